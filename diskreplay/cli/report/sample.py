"""Chooses the episodes and steps of a report: all of a small store, or a sample that is always the same."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli.where import Predicate, matching
from diskreplay.errors import SegmentGone
from diskreplay.ids import EpisodeTable, locate
from diskreplay.reading.snapshot import Snapshot
from diskreplay.segments.documents import layout

SEED = 0
EPISODES, STEPS = 5_000, 100_000  # the maximum numbers of episodes and of steps that are read
LONGEST = 1_000_000  # the rewards of an episode with more steps are not summed
REWARDS = 20_000_000  # the maximum number of rewards that are summed
ASKED = 50_000  # --where is tested on at most this many episodes
SEGMENTS = 256  # at most this many of the newest segments are searched for the newest episode
PIECES = 400  # a sample has this many ranges of successive steps

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Episodes:
    """The episodes of a report, oldest first.

    ``at`` has the index of each episode in `Store.episodes`. ``began`` has the publishing time of each first step, in
    seconds since 1970. ``total_reward`` is NaN for an episode whose rewards were not read. The store has
    ``total`` episodes. --where was tested on ``asked`` episodes, and ``matching`` episodes met it.
    """

    at: Ints
    length: Ints
    total_reward: NDArray[np.float64]
    began: NDArray[np.float64]
    ended: NDArray[np.str_]
    matching: int
    asked: int
    total: int

    def __len__(self) -> int:
        return len(self.at)


def read_episodes(store: dr.Store, where: Predicate | None, progress: Callable[[int, int], None]) -> Episodes:
    """Return the episodes of a report. The newest episode is one of them, unless ``where`` excludes it."""
    total = store.num_episodes
    order = np.random.default_rng(SEED).permutation(total)
    if total:
        newest = newest_episode(store)
        order = np.concatenate([[newest], order[order != newest]])
    chosen, asked = choose(store, order, where)
    matches, steps, found = len(chosen), 0, []
    for done, at in enumerate(chosen[:EPISODES].tolist()):
        episode = store.episodes[at]
        read = len(episode) <= LONGEST and steps + len(episode) <= REWARDS
        steps += len(episode) * read
        with suppress(SegmentGone), np.errstate(invalid="ignore"):  # the sum of +inf and -inf is invalid
            total_reward = episode.total_reward if read else np.nan
            found.append((at, len(episode), total_reward, began_at(store, at), episode.ended))
        progress(done + 1, min(matches, EPISODES))
    found.sort(key=lambda row: row[3])
    rows = np.array(found, [("at", "i8"), ("length", "i8"), ("total_reward", "f8"), ("began", "f8"), ("ended", "U10")])
    columns = {name: rows[name] for name in rows.dtype.names or ()}
    return Episodes(**columns, matching=matches, asked=asked, total=total)


def newest_episode(store: dr.Store) -> int:
    """Return the index of the episode that began last, among the last episodes of the newest segments."""
    first = store.snapshot.episodes.first
    last = np.flatnonzero(np.diff(first >> layout.POSITION_BITS, append=-1))[-SEGMENTS:]
    with suppress(SegmentGone):
        last = last[np.argsort(store.snapshot.times(first[last]), kind="stable")]
    return int(last[-1])


def choose(store: dr.Store, order: Ints, where: Predicate | None) -> tuple[Ints, int]:
    if where is None:
        return order, len(order)
    order = order[:ASKED]
    return order[np.array(matching((store.episodes[at] for at in order.tolist()), where), np.bool_)], len(order)


def began_at(store: dr.Store, at: int) -> float:
    """Return the publishing time of an episode's first step, in seconds since 1970."""
    return float(store.snapshot.times(store.snapshot.episodes.first[at : at + 1])[0] / 1e9)


@dataclass(frozen=True)
class Steps:
    """The ids of sampled steps. ``total`` is the number of steps before sampling."""

    snapshot: Snapshot
    ids: Ints
    total: int

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, path: str, most: int = STEPS) -> tuple[Ints, NDArray[Any]]:
        """Return the ids of at most ``most`` steps, and the values of a field in these steps.

        Leave out evicted steps.
        """
        ids = self.ids if len(self.ids) <= most else self.ids[np.linspace(0, len(self.ids) - 1, most).astype(int)]
        snapshot, leaf = self.snapshot, self.snapshot.leaf(path)
        if not len(ids):
            return ids, np.empty((0, *leaf.shape), leaf.dtype)
        there, slots, _, lane, row = locate(ids, snapshot.origin, snapshot.lanes)
        found, values = [ids[:0]], [np.empty((0, *leaf.shape), leaf.dtype)]
        for slot in np.unique(slots[there]).tolist():
            here = np.flatnonzero((slots == slot) & there)
            with suppress(SegmentGone):
                values.append(leaf.values(slots[here], lane[here], row[here]))
                found.append(ids[here])
        return np.concatenate(found), np.concatenate(values)

    def times(self) -> tuple[Ints, NDArray[np.float64]]:
        """Return the ids of the steps that still exist, and their publishing times in seconds since 1970."""
        ids, times = self.read(layout.TIME)
        clocks = self.snapshot.clocks[(ids >> layout.POSITION_BITS) - self.snapshot.origin]
        return ids, (times + clocks) / 1e9


def sample_steps(store: dr.Store, episodes: Episodes | None) -> Steps:
    """Sample ranges of successive steps, spread over the steps of ``episodes``. None: all episodes of the store."""
    table = store.snapshot.episodes
    if episodes is not None:
        table = table.select(np.sort(episodes.at))
    return Steps(store.snapshot, ids_of(table, places(int(table.steps.sum()))), int(table.steps.sum()))


def places(total: int) -> Ints:
    """Return the numbers of the sampled steps.

    Up to `STEPS` steps, all are sampled. If there are more, a random range in each of `PIECES` equal parts is.
    """
    if total <= STEPS:
        return np.arange(total)
    size, part = STEPS // PIECES, total / PIECES
    begin = np.arange(PIECES) * part + np.random.default_rng(SEED).random(PIECES) * (part - size)
    return (begin.astype(np.int64)[:, None] + np.arange(size)).ravel()


def ids_of(table: EpisodeTable, at: Ints) -> Ints:
    """Return the ids of the steps with the numbers ``at``. Steps are numbered from 0 through all episodes."""
    stop = np.cumsum(table.steps)
    episode = np.searchsorted(stop, at, "right")
    ids: Ints = table.first[episode] + (at - stop[episode] + table.steps[episode]) * table.stride[episode]
    return ids
