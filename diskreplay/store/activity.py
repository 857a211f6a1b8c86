"""The activity in a store, measured by repeated looks at its files."""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from diskreplay.errors import MissingExtra, SegmentGone
from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.follower import Follower
from diskreplay.reading.snapshot import Snapshot
from diskreplay.reading.step_account import read_account
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.quarantine import read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.root import Root, read_root
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.segment import SegmentInfo
from diskreplay.store.processes import (
    LimiterCounts,
    Limiters,
    Rate,
    SavedSampler,
    SavedSamplers,
    WriterActivity,
    Writers,
)
from diskreplay.writing.limiter import RateLimiter

Progress = Callable[[int, int], None]

NEWEST = 100
"""The number of newest episodes over which the mean total reward is computed."""

# With this many lanes in unsealed segments, compiled code finds new rows, because plain Python takes 70 us per lane.
# The first look always uses plain Python, because it takes longer to load or compile the code.
_MANY_LANES = 256

# Growth in steps is measured over the last _RATE_S seconds. Growth in bytes is measured over the last _GROWTH_S
# seconds, but over at least _LEAST_GROWTH_S seconds. A store grows by whole reserved blocks, so its growth in less than
# a minute does not predict its growth in an hour.
_RATE_S, _GROWTH_S, _LEAST_GROWTH_S = 10.0, 600.0, 60.0

# A store that takes at least this part of `capacity_bytes` counts as full. A store rarely takes more, because each
# deletion frees a segment of up to a sixteenth of `capacity_bytes`.
_FULL = 7 / 8


@dataclass(frozen=True)
class Disk:
    """The number of bytes of a store, and the number of free bytes of its file system.

    `bytes_per_hour` is the growth of the store; None in the first minute, and for a store that has reached a limit.
    `full_in_s` is the time in seconds until the disk is full at this rate; None if the disk will not fill.
    """

    bytes: int
    free: int
    bytes_per_hour: float | None
    full_in_s: float | None


@dataclass(frozen=True)
class RetentionActivity:
    """The limits of a store, and the number of steps that are no longer visible.

    `share` is the fraction of `capacity` or `capacity_bytes` that is used: the larger fraction if both are set, and
    None if neither is set. `reached_in_s` is the time in seconds until one of these two limits is reached at the
    present rate. `steps_gone` is the number of inserted steps that are not visible, and `gone_per_second` is the growth
    of `steps_gone`. `oldest_age_s` is the age of the oldest visible step.
    """

    capacity: int | None
    capacity_bytes: int | None
    max_age_s: float | None
    share: float | None
    reached_in_s: float | None
    steps_gone: int
    gone_per_second: float | None
    oldest_age_s: float | None


@dataclass(frozen=True)
class Look:
    """The result of one look at a store; rates, such as `steps_per_second`, are None at the first look.

    Every inserted step is in one class: `inserted` is the sum of `steps` (visible steps), `steps_hidden`,
    `steps_evicted`, `steps_discarded`, `steps_lost` and `steps_in_quarantine`. `mean_total_reward` is the mean over the
    `newest_episodes` episodes that ended last.
    """

    path: str
    time: float
    steps: int
    steps_hidden: int
    steps_evicted: int
    steps_discarded: int
    steps_lost: int
    steps_in_quarantine: int
    inserted: int
    steps_per_second: float | None
    episodes: int
    episodes_open: int
    episodes_per_second: float | None
    newest_episodes: int
    mean_total_reward: float | None
    writers: list[WriterActivity]
    samplers: list[SavedSampler]
    limiters: list[LimiterCounts]
    disk: Disk
    retention: RetentionActivity
    problems: list[str]


class Activity:
    """Looks at a store repeatedly, without writing to it and without taking a lock; only for one thread.

    The time that a look takes depends on the changes since the last look, not on the size of the store.

    Parameters
    ----------
    path : Path
        The folder of the store.
    limiters : iterable of RateLimiter
        Limiters with the same arguments as the limiters of the writers and samplers. The arguments are not on disk.
    progress : callable, optional
        ``progress(done, total)`` is called with numbers of segments while the constructor measures the sizes of
        segments.

    Raises
    ------
    StoreNotFound
        The path has no store.
    FormatError
        The whole store is damaged, or of a version that this release does not know.
    """

    def __init__(self, path: Path, limiters: Iterable[RateLimiter] = (), progress: Progress | None = None) -> None:
        self._root = root = read_root(path.absolute())
        self._counters = root.counters()
        self._follower = Follower(root, self._counters)
        self._steps = StepCounter(root)
        self._episodes = NewestEpisodes(NEWEST)
        self._writers, self._samplers = Writers(_RATE_S), SavedSamplers(root)
        self._limiters, self._disk = Limiters(root, limiters, _RATE_S), DiskUse(root)
        self._rates = {name: Rate(_RATE_S) for name in ("inserted", "gone", "episodes")}
        self._growth = Rate(_GROWTH_S, _LEAST_GROWTH_S)
        self._is_first, self._is_compiled = True, False
        self._steps.read()
        self._disk.read({info.number for info in self._steps.growing()}, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.close()
        self._counters.close()

    def look(self) -> Look:
        """Return the present state of the store.

        Raises StoreNotFound if the store was deleted or replaced since it was opened, and FormatError if the whole
        store was damaged since then.
        """
        with self._root.still_there():
            look = self._look(self._root)
        self._is_first = False
        return look

    def _compile(self, growing: Sequence[SegmentInfo]) -> None:
        if not (self._is_first or self._is_compiled) and sum(len(info.lanes) for info in growing) >= _MANY_LANES:
            self._is_compiled = True
            with suppress(MissingExtra):
                self._follower.follow_with(get_kernel)

    def _look(self, root: Root) -> Look:
        self._compile(self._steps.growing())
        snapshot, account = read_account(self._follower, self._steps)
        root.follow_limits()
        now = time.time()
        self._episodes.follow(snapshot)
        writers = self._writers.read(now, snapshot, self._steps)
        total = account.total
        steps, gone = total.visible, max(0, total.inserted - total.visible)
        rates = {
            name: self._rates[name].add(now, value)
            for name, value in (("inserted", total.inserted), ("gone", gone), ("episodes", self._episodes.seen))
        }
        nbytes = self._disk.read({info.number for info in self._steps.growing()})
        growth = self._growth.add(now, nbytes)
        if self._is_full(steps, nbytes):
            growth = None
        share, reached = self._limit(steps, nbytes, rates["inserted"], growth)
        aside = read_quarantine(root.folder)
        total_rewards = [episode.total_reward for episode in self._episodes.newest]
        return Look(
            path=str(root.path),
            time=now,
            steps=steps,
            steps_hidden=total.hidden,
            steps_evicted=total.evicted,
            steps_discarded=total.discarded,
            steps_lost=total.lost,
            steps_in_quarantine=account.quarantined,
            inserted=total.inserted,
            steps_per_second=rates["inserted"],
            episodes=count_ended(snapshot),
            episodes_open=len(snapshot.open),
            episodes_per_second=rates["episodes"],
            newest_episodes=len(total_rewards),
            mean_total_reward=_mean(total_rewards),
            writers=writers,
            samplers=self._samplers.read(now),
            limiters=self._limiters.read(now, account.counted),
            disk=_disk(root.folder, nbytes, growth, reached),
            retention=RetentionActivity(
                **vars(root.limits),
                share=share,
                reached_in_s=reached,
                steps_gone=gone,
                gone_per_second=None if rates["gone"] is None else max(0.0, rates["gone"]),
                oldest_age_s=_oldest_age(snapshot, now),
            ),
            problems=self._problems(writers, len(aside)),
        )

    def _is_full(self, steps: int, nbytes: int) -> bool:
        capacity, capacity_bytes = self._root.limits.capacity, self._root.limits.capacity_bytes
        if capacity is not None and steps >= capacity:
            return True
        return capacity_bytes is not None and nbytes >= _FULL * capacity_bytes

    def _limit(
        self, steps: int, nbytes: int, steps_per_s: float | None, bytes_per_s: float | None
    ) -> tuple[float | None, float | None]:
        limits, shares, seconds = self._root.limits, [], []
        for used, most, rate in (
            (steps, limits.capacity, steps_per_s),
            (nbytes, limits.capacity_bytes, bytes_per_s),
        ):
            if most is not None:
                shares.append(used / most)
                if used >= most or (rate or 0) > 0:
                    seconds.append(max(0.0, most - used) / (rate or 1.0))
        return max(shares, default=None), min(seconds, default=None)

    def _problems(self, writers: Iterable[WriterActivity], aside: int) -> list[str]:
        found = [f"segment {number} is damaged: {detail}" for number, detail in sorted(self._follower.damaged.items())]
        for one in writers:
            if one.state == "dead":
                numbers = ", ".join(map(str, one.segments))
                found.append(
                    f"writer {one.writer} died; the next process that opens the store for writing, or repair, "
                    f"seals segment {numbers}"
                )
        if aside:
            found.append(f"entries in quarantine: {aside}; diskreplay repair --restore SEGMENT brings one back")
        return found


def _mean(values: list[float]) -> float | None:
    if not values:
        return None
    with np.errstate(invalid="ignore"):  # rewards may be +inf and -inf
        return float(np.mean(values))


def _disk(folder: Path, nbytes: int, bytes_per_s: float | None, reached_in_s: float | None) -> Disk:
    free = shutil.disk_usage(folder).free
    full = free / bytes_per_s if bytes_per_s is not None and bytes_per_s > 0 else None
    if full is not None and reached_in_s is not None and reached_in_s <= full:
        full = None  # the store reaches its limit and stops growing before the disk is full
    return Disk(nbytes, free, None if bytes_per_s is None else bytes_per_s * 3600, full)


def _oldest_age(snapshot: Snapshot, now: float) -> float | None:
    """Return the age in seconds of the oldest visible step in the first segment with visible steps; None if unknown."""
    for slot in np.flatnonzero(snapshot.lanes).tolist():
        lanes, base = int(snapshot.lanes[slot]), int(snapshot.lane_base[slot])
        oldest, committed = snapshot.oldest[base : base + lanes], snapshot.committed[base : base + lanes]
        lane = np.flatnonzero(oldest < committed)
        if not len(lane):
            continue
        ids = ((slot + snapshot.origin) << layout.POSITION_BITS) + oldest[lane] * lanes + lane
        try:
            published = int(snapshot.times(ids).min())
        except SegmentGone:
            return None
        return max(0.0, now - max(published, snapshot.hidden_before) / 1e9)
    return None


# --- bytes on disk ---------------------------------------------------------------------------------------------------


class DiskUse:
    """The bytes that a store takes on disk; not thread-safe.

    A segment that may grow is measured at each look. Sealing frees reserved blocks of a segment. So a sealed
    segment is measured again at the next two looks, and then no more.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._at_rest: dict[int, int] = {}
        self._growing_before: Collection[int] = ()

    def read(self, growing: Collection[int], progress: Progress | None = None) -> int:
        there = listed_numbers(self._root)
        self._at_rest = {number: self._at_rest[number] for number in there if number in self._at_rest}
        measured = [number for number in there if number not in self._at_rest]
        total = sum(self._at_rest.values())
        for done, number in enumerate(measured):
            nbytes = disk_usage(self._root.segment_path(number))[0]
            total += nbytes
            if number not in growing and number not in self._growing_before:
                self._at_rest[number] = nbytes
            if progress is not None:
                progress(done + 1, len(measured))
        self._growing_before = growing
        other_files = [name for name in os.listdir(self._root.folder) if name != layout.SEGMENTS]
        other_files.append(f"{layout.SEGMENTS}/{layout.METADATA}")
        return total + sum(disk_usage(self._root.folder / name)[0] for name in other_files)


# --- newest episodes -------------------------------------------------------------------------------------------------

# The maximum number of episodes whose times are read to find the newest episodes. Reading the time of every episode
# could take long.
_CANDIDATES = 8192


class Ended(NamedTuple):
    time: int
    total_reward: float


class NewestEpisodes:
    """The newest ended episodes, at most ``most``, in the order of their ends; not thread-safe.

    `seen` is the number of episodes that ended since the first look.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._generation, self._read = -1, 0
        self.seen = 0
        self.newest: list[Ended] = []

    def follow(self, snapshot: Snapshot) -> None:
        log, is_first = snapshot.log, self._generation < 0
        if snapshot.generation == self._generation:
            new = log.select(slice(self._read, None)).without_discarded()
            self.seen += len(new)
            self._take(snapshot, new)
        else:  # episodes in the log have other positions now, so new episodes are found by their times
            count = self._take(snapshot, log.without_discarded(), self.newest[-1].time if self.newest else 0)
            self.seen += 0 if is_first else count
        self._generation, self._read = snapshot.generation, len(log)

    def _take(self, snapshot: Snapshot, ended: EpisodeTable, after: int = 0) -> int:
        if not len(ended):
            return 0
        ended = _candidates(ended, self._most)
        ended = ended.select(snapshot.hidden_steps(ended) < ended.steps)
        try:
            times = snapshot.times(ended.first + (ended.steps - 1) * ended.stride)
        except SegmentGone:
            return 0
        newest = np.argsort(times, kind="stable")[-self._most :]
        for at in newest[times[newest] > after].tolist():
            try:
                rewards = snapshot.rows("reward", int(ended.first[at]), int(ended.steps[at]))
            except SegmentGone:
                continue
            with np.errstate(invalid="ignore"):  # rewards may be +inf and -inf
                self.newest.append(Ended(int(times[at]), float(rewards.sum(dtype=np.float64))))
        self.newest = sorted(self.newest, key=attrgetter("time"))[-self._most :]
        return int(np.count_nonzero(times > after))


def count_ended(snapshot: Snapshot) -> int:
    log = snapshot.log.without_discarded()
    # Episodes that began at `snapshot.reached` or later have no hidden steps, so most episodes need no check.
    older = log.select(log.time < snapshot.reached)
    return len(log) - int(np.count_nonzero(snapshot.hidden_steps(older) >= older.steps))


def _candidates(ended: EpisodeTable, most: int) -> EpisodeTable:
    """Return some episodes of ``ended``, probably including the ``most`` newest episodes, without reading times.

    The result has the episodes of the newest segments. If these are more than `_CANDIDATES` episodes, the result has
    only the `_CANDIDATES` episodes with the highest first rows.
    """
    segment = ended.first >> POSITION_BITS
    counts = np.bincount(segment - segment.min())
    # The factor 4 allows for several writers that fill segments at the same time.
    enough = np.searchsorted(np.cumsum(counts[::-1]), 4 * most)
    ended = ended.select(segment >= segment.max() - enough)
    if len(ended) > _CANDIDATES:
        row = (ended.first & POSITION_MASK) // ended.stride
        ended = ended.select(np.argsort(row, kind="stable")[-_CANDIDATES:])
    return ended
