"""Which episodes and steps of a store a report reads: all of a small store, else a sample that is always the same."""

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
EPISODES, STEPS = 5_000, 100_000  # most that are read
LONGEST = 1_000_000  # steps of an episode whose rewards are summed
REWARDS = 20_000_000  # that are summed of all episodes
ASKED = 50_000  # episodes of which --where is asked
SEGMENTS = 256  # the newest ones, among which the newest episode is
PIECES = 400  # successive steps are read together

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Episodes:
    """Episodes that were read, in the order in which they began.

    ``at`` are their places in `Store.episodes`, ``began`` when their first steps were published, in seconds, and
    ``total_reward`` NaN for an episode that was not read. ``matching`` of ``asked`` meet the condition; ``total`` are
    in the store.
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
    """Read what is known of episodes: of all where they are few, and of the newest one in any case."""
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
        with suppress(SegmentGone), np.errstate(invalid="ignore"):  # rewards may be infinite both ways
            total_reward = episode.total_reward if read else np.nan
            found.append((at, len(episode), total_reward, began_at(store, at), episode.ended))
        progress(done + 1, min(matches, EPISODES))
    found.sort(key=lambda row: row[3])
    rows = np.array(found, [("at", "i8"), ("length", "i8"), ("total_reward", "f8"), ("began", "f8"), ("ended", "U10")])
    columns = {name: rows[name] for name in rows.dtype.names or ()}
    return Episodes(**columns, matching=matches, asked=asked, total=total)


def newest_episode(store: dr.Store) -> int:
    """Return the place of the episode that began last: writers have segments of their own, so of each the last one."""
    first = store.snapshot.episodes.first
    last = np.flatnonzero(np.diff(first >> layout.POSITION_BITS, append=-1))[-SEGMENTS:]
    with suppress(SegmentGone):
        last = last[np.argsort(store.snapshot.times(first[last]), kind="stable")]
    return int(last[-1])


def choose(store: dr.Store, order: Ints, where: Predicate | None) -> tuple[Ints, int]:
    """Return the episodes that meet a condition, in this order, and of how many it was asked."""
    if where is None:
        return order, len(order)
    order = order[:ASKED]
    return order[np.array(matching((store.episodes[at] for at in order.tolist()), where), np.bool_)], len(order)


def began_at(store: dr.Store, at: int) -> float:
    """Return when the first step of an episode was published, in seconds since the epoch."""
    return float(store.snapshot.times(store.snapshot.episodes.first[at : at + 1])[0] / 1e9)


@dataclass(frozen=True)
class Steps:
    """Steps that are read, by id; ``total`` are in the episodes that they were drawn from."""

    snapshot: Snapshot
    ids: Ints
    total: int

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, path: str, most: int = STEPS) -> tuple[Ints, NDArray[Any]]:
        """Return values of a leaf of at most so many steps, and the ids of these: those that are still there."""
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
        """Return when steps were published, in seconds since the epoch, and their ids."""
        ids, times = self.read(layout.TIME)
        clocks = self.snapshot.clocks[(ids >> layout.POSITION_BITS) - self.snapshot.origin]
        return ids, (times + clocks) / 1e9


def sample_steps(store: dr.Store, episodes: Episodes | None) -> Steps:
    """Draw steps of some episodes, or of all: in pieces of successive ones, with equal chances for each step."""
    table = store.snapshot.episodes
    if episodes is not None:
        table = table.select(np.sort(episodes.at))
    return Steps(store.snapshot, ids_of(table, places(int(table.steps.sum()))), int(table.steps.sum()))


def places(total: int) -> Ints:
    """Return which of so many steps are read: all, or pieces at random places, one in each of equal parts."""
    if total <= STEPS:
        return np.arange(total)
    size, part = STEPS // PIECES, total / PIECES
    begin = np.arange(PIECES) * part + np.random.default_rng(SEED).random(PIECES) * (part - size)
    return (begin.astype(np.int64)[:, None] + np.arange(size)).ravel()


def ids_of(table: EpisodeTable, at: Ints) -> Ints:
    """Return the ids of steps by their places among all steps of the episodes, one behind the other."""
    stop = np.cumsum(table.steps)
    episode = np.searchsorted(stop, at, "right")
    ids: Ints = table.first[episode] + (at - stop[episode] + table.steps[episode]) * table.stride[episode]
    return ids
