"""The rules of retention: which segments are due for removal, by their steps, bytes and age."""

import heapq
import os
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.ids import DISCARD_BEFORE
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import EvictionEntries
from diskreplay.segments.documents.metadata import identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import sync_folder
from diskreplay.segments.files.machine import boot_time, is_clock_synchronized
from diskreplay.segments.files.numbers import present_segments, segment_numbers
from diskreplay.segments.files.times import count_until
from diskreplay.segments.packs import read_members
from diskreplay.segments.sealing import count_steps
from diskreplay.segments.segment import SegmentInfo, pack_draft, read_segment
from diskreplay.segments.segment_reader import read_sealed


class Ages:
    """The ages of sealed segments; not thread-safe.

    A wrong wall clock must not delete a store's steps. If this machine sealed a segment since its last boot, only the
    boot clock counts, because this clock cannot be set. For any other segment, the wall clock counts, but only if one
    of these facts confirms the age:

    - a time service keeps the wall clock,
    - this machine sealed the segment, and has been up for longer than the age limit,
    - this process has known the segment for longer than the age limit.

    A sealing time in the future is replaced by the time when this process first saw the segment.
    """

    def __init__(self) -> None:
        self._this_boot: list[tuple[float, int]] = []  # A heap of (sealing time in seconds of this boot, segment).
        self._others: list[tuple[float, int]] = []  # A heap of (sealing time by the wall clock, segment).
        # By segment: a time, in seconds of this boot, at which the segment was already sealed.
        self._confirmed_by: dict[int, float] = {}
        self._old: set[int] = set()  # Segments that are too old by the wall clock, but whose age no fact confirms yet.

    def add(self, number: int, info: SegmentInfo) -> None:
        now, sealed = boot_time(), info.sealed_clock
        if sealed is not None and sealed.boot == now.boot and sealed.seconds <= now.seconds:
            heapq.heappush(self._this_boot, (sealed.seconds, number))
            return
        wall = time.time()
        heapq.heappush(self._others, (min(info.sealed_at or wall, wall), number))
        was_here = sealed is not None and sealed.machine == now.machine and sealed.boot != now.boot
        self._confirmed_by[number] = 0.0 if was_here else now.seconds

    def older_than(self, seconds: float) -> set[int]:
        """Return the segments that have become older than ``seconds``; each segment is returned only once."""
        due = set()
        latest = boot_time().seconds - seconds
        while self._this_boot and self._this_boot[0][0] <= latest:
            due.add(heapq.heappop(self._this_boot)[1])
        wall = time.time() - seconds
        while self._others and self._others[0][0] <= wall:
            self._old.add(heapq.heappop(self._others)[1])
        if self._old:
            is_kept = is_clock_synchronized()
            certain = {number for number in self._old if is_kept or self._confirmed_by[number] <= latest}
            self._old -= certain
            due |= certain
            for number in certain:
                del self._confirmed_by[number]
        return due


@dataclass(slots=True)
class _Account:
    """The numbers of steps and bytes of a segment; an unsealed segment may have grown since it was read."""

    steps: int = 0
    evicted: int = 0  # The number of steps that were evicted by hand.
    nbytes: int = 0  # The number of bytes on disk; 0 if the store has no capacity in bytes.
    info: SegmentInfo | None = None
    first: int = 0  # time of the first row of a sealed segment, in nanoseconds since the epoch; 0 without rows

    @property
    def sealed(self) -> bool:
        return self.info is not None and self.info.sealed

    @property
    def lost(self) -> int:
        return 0 if self.info is None else self.info.lost.steps

    @property
    def kept(self) -> int:
        return max(0, self.steps - self.evicted - self.lost)


class RetentionPolicy:
    """Follows the segments of a store and decides which segments are due for removal.

    Not thread-safe: the caller holds the store lock, unless a method says otherwise.

    Only sealed, readable segments are removed, by any of these rules:

    - ``capacity``: the segment whose last step is oldest is due while the other segments together hold at least
      `capacity` newer steps that readers show.
    - ``capacity_bytes``: the segment whose last step is oldest is due while all segments together take more than
      `capacity_bytes` on disk. A pack that is being made counts, too.
    - ``max_age_s``: a segment is due `max_age_s` seconds after it was sealed; `Ages` says by which clock.
    - eviction by hand: a segment is due when all its steps were evicted.

    `capacity` and `capacity_bytes` move the retention horizon, a time: readers hide all older steps.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._changes = 0
        self.pack_nbytes = 0  # bytes to count as used for the pack that this process makes
        self._begin()

    def _begin(self) -> None:
        self._next = 0  # The number of the next segment to read.
        self._accounts: dict[int, _Account] = {}  # One per segment, sorted by the segment's number.
        self._unsealed: set[int] = set()
        self._by_last: list[tuple[int, int]] = []  # A heap: (time of the last step, number) of each sealed segment.
        # Sorted: (time of the first step, number) of each sealed segment that is not in `_below`.
        self._by_first: list[tuple[int, int]] = []
        self._short = -1, 0  # (segment, steps): `capacity` keeps this segment until `_kept` has reached ``steps``.
        self._below: dict[int, None] = {}  # Segments that are older than the horizon and still exist.
        self._kept = 0  # The number of steps, without evicted and lost ones, of all segments that are not in `_below`.
        self._nbytes = 0  # The number of bytes of all segments that are not in `_below`.
        self._draft_nbytes = 0  # The number of bytes of the pack that is being made.
        self._ages = Ages()
        self._doomed: set[int] = set()  # segments that are too old, or whose steps are all evicted or lost
        self._entries = EvictionEntries(self._root)
        self._by_hand: dict[int, int] = {}  # The number of steps evicted by hand, by segment.
        self._packs: dict[int, list[int]] = {}  # The segments in each pack.
        self._merged: set[int] = set()  # Segments and packs that may still exist although later packs have their rows.
        self._durable: set[int] = set()  # The segments in `_merged` whose pack has a durable name.
        self._evicted = 0
        self.has_more = False

    @property
    def is_idle(self) -> bool:
        if self._counters.peek(layout.CHANGES) != self._changes:
            self._root.follow_limits()
        return not self._root.limits.are_set and not self._counters.peek(layout.EVICTION_ENTRIES)

    def sync_packs(self) -> None:
        """Make the names of packs durable, if the last call of `due` found merged segments that still exist.

        The process that made a pack may have died before it made the name durable. Any thread may call this method,
        without the store lock, so that other processes need not wait for the disk.
        """
        found = self._merged.copy()
        if not found <= self._durable:
            sync_folder(self._root.segments_folder)
            self._durable.update(found)

    def look(self, pace: Callable[[], None]) -> None:
        """Read all segments, so that later calls of `due` read only newer ones; call ``pace`` after each segment.

        The caller does not hold the store lock. No other thread may use this object yet.
        """
        if not self.is_idle:
            self._look(self._counters.read(), again=True, pace=pace)

    def due(self, most: int, *, again: bool) -> Iterator[tuple[int, int]]:
        """Yield (number, steps) of segments that are due for removal, and forget each segment after it was yielded.

        At most ``most`` segments are yielded; `has_more` tells whether more are due. The retention horizon is moved
        before the first segment is yielded. With ``again``, unsealed segments are read again. Without ``again``, the
        step counts of unsealed segments may be too small. This only delays the horizon. A segment whose rows are in a
        pack is due after `sync_packs`.
        """
        words = self._counters.read()
        end = self._look(words, again=again)
        self._move_horizon(int(words[layout.HORIZON]))
        for number in self._merged_leftovers(most):
            yield number, 0
            self._merged.discard(number)
        # As long as a merged segment exists, no other segment is due. If a pack were removed before a segment that was
        # merged into it, that segment's rows would count again.
        due = [] if self._merged else self._candidates()
        self.has_more = len(due) > most or bool(self._merged)
        for number in due[:most]:
            steps = self._accounts[number].steps
            if os.path.exists(self._root.segment_path(number)):
                yield number, steps
            self._forget(number)  # also if another process or a user has removed the segment
        first = min([next(iter(self._accounts), end), *(numbers[0] for numbers in self._packs.values())])
        if first > words[layout.FIRST_LIVE]:
            self._counters.set(layout.FIRST_LIVE, first)
        self._evicted = int(self._counters.read()[layout.STEPS_EVICTED])

    def _look(self, words: NDArray[np.int64], *, again: bool, pace: Callable[[], None] = lambda: None) -> int:
        """Read new segments, and with ``again`` all unsealed segments; return the number for the next new segment."""
        if words[layout.CHANGES] != self._changes:  # a segment was quarantined, brought back or replaced
            self._changes = int(words[layout.CHANGES])
            self._begin()  # read all again, because a rebuilt segment may have replaced a damaged one
        first, end = max(self._next, int(words[layout.FIRST_LIVE])), int(words[layout.NEXT_SEGMENT])
        if self._evicted != words[layout.STEPS_EVICTED] and (
            self._root.limits.max_age_s or words[layout.EVICTION_ENTRIES]
        ):
            self._forget_gone()
        for number in segment_numbers(self._root, first, end):
            self._accounts[number] = _Account()
            self._unsealed.add(number)
        self._next = max(end, self._next)
        self._read_evictions(int(words[layout.EVICTION_ENTRIES]))
        for number in [n for n in self._unsealed if again or n >= first]:
            self._read(number)
            pace()
        self._forget_merged()
        return end

    def _candidates(self) -> list[int]:
        if self._root.limits.max_age_s is not None:
            self._doomed |= self._ages.older_than(self._root.limits.max_age_s) & self._accounts.keys()
        return [*self._below, *sorted(self._doomed - self._below.keys())]

    # --- the horizon -------------------------------------------------------------------------------------------------

    def _move_horizon(self, horizon: int) -> None:
        """Move the retention horizon past each segment that is due by a capacity, oldest segment first."""
        if not self._root.has_horizon:
            return
        before = horizon
        if self._root.limits.capacity_bytes is not None:
            # The unfinished pack is measured on disk, too, because another process may be making it.
            self._draft_nbytes = max(self.pack_nbytes, disk_usage(Path(pack_draft(self._root)))[0])
        while (oldest := self._oldest()) is not None:
            last, number = oldest
            if not (last < horizon or self._has_enough_without(last, number) or self._has_too_many_bytes()):
                break
            account = self._accounts[number]
            heapq.heappop(self._by_last)
            self._leave_first(number, account)
            self._kept -= account.kept
            self._nbytes -= account.nbytes
            self._below[number] = None
            horizon = max(horizon, min(last + 1, layout.MOST_COUNTED))  # the time was read from disk, and may be forged
        if horizon > before:
            self._counters.set(layout.HORIZON, horizon)

    def _leave_first(self, number: int, account: _Account) -> None:
        del self._by_first[bisect_left(self._by_first, (account.first, number))]

    def _oldest(self) -> tuple[int, int] | None:
        while self._by_last and self._by_last[0][1] not in self._accounts:
            heapq.heappop(self._by_last)  # this segment was removed
        return self._by_last[0] if self._by_last else None

    def _has_too_many_bytes(self) -> bool:
        most = self._root.limits.capacity_bytes
        return most is not None and self._nbytes + self._draft_nbytes > most

    def _has_enough_without(self, last: int, number: int) -> bool:
        """Return whether the other segments hold ``capacity`` steps that are newer than this segment's last step."""
        capacity = self._root.limits.capacity
        if capacity is None:
            return False
        newer = self._kept - self._accounts[number].kept
        if newer < capacity or (number == self._short[0] and self._kept < self._short[1]):
            return False
        begun = [n for first, n in self._by_first[: bisect_right(self._by_first, (last, layout.MAX_SEGMENTS))]]
        for other in {*begun, *self._unsealed} - {number}:
            newer -= self._older_steps(other, last)
            if newer < capacity:
                break
        # Counting is slow. There cannot be ``capacity`` newer steps before `_kept` has grown by ``capacity - newer``.
        # The steps are not counted again before then.
        self._short = number, self._kept + capacity - newer
        return newer >= capacity

    def _older_steps(self, number: int, last: int) -> int:
        """Return an upper bound of the number of a segment's steps at or before the time ``last``."""
        account = self._accounts[number]
        if account.info is None or not account.kept:
            return account.kept  # the steps of a damaged segment cannot be counted
        try:
            return min(account.kept, count_until(account.info, last - account.info.clock.wall))
        except (FormatError, OSError):
            return account.kept

    # --- counts of segments ------------------------------------------------------------------------------------------

    def _read_evictions(self, count: int) -> None:
        if count <= self._entries.count:
            return
        in_pack = {number: pack for pack, numbers in self._packs.items() for number in numbers}
        for number, steps in self._entries.steps_by_segment(count).items():
            self._by_hand[number] = self._by_hand.get(number, 0) + steps
            holder = in_pack.get(number, number)
            account = self._accounts.get(holder)
            if account is not None:  # None: the segment was removed
                with self._changing(holder, account):
                    account.evicted += steps

    def _read(self, number: int) -> None:
        account, path = self._accounts[number], self._root.segment_path(number)
        nbytes = 0 if self._root.limits.capacity_bytes is None else disk_usage(path)[0]
        try:
            info = account.info
            if info is None or info.document != identify(path / layout.METADATA):
                info = read_segment(self._root, number)
            steps = count_steps(info) if info.steps is None else info.steps
            if number not in self._packs and (members := read_members(info)[:, 0].tolist()) != [number]:
                self._packs[number] = members
        except FileNotFoundError:
            if not os.path.lexists(path):
                self._forget(number)  # the segment is in quarantine; after its return, all segments are read again
            return
        except (FormatError, NotADirectoryError, IsADirectoryError):
            # A damaged segment is not removed before it is repaired, but its bytes count.
            with self._changing(number, account):
                account.nbytes = nbytes
            return
        with self._changing(number, account):
            account.info, account.steps, account.nbytes = info, steps, nbytes
            if number in self._packs:
                account.evicted = sum(self._by_hand.get(member, 0) for member in self._packs[number])
        if info.sealed and number in self._unsealed:
            self._take_sealed(number, account, info)

    def _forget_merged(self) -> None:
        for pack in sorted(self._packs, reverse=True):
            if pack not in self._packs:
                continue
            numbers = {*self._packs[pack]}
            merged = [other for other, members in self._packs.items() if other != pack and members[0] in numbers]
            for number in [*merged, *(numbers & self._accounts.keys())]:
                self._forget(number)
                self._merged.add(number)

    def _merged_leftovers(self, most: int) -> list[int]:
        """Return at most ``most`` segments and packs that still exist although their rows are in durable packs."""
        self._merged = {number for number in self._merged if os.path.lexists(self._root.segment_path(number))}
        self._durable &= self._merged
        return sorted(self._durable)[:most]

    def _take_sealed(self, number: int, account: _Account, info: SegmentInfo) -> None:
        self._unsealed.discard(number)
        account.first = info.bounds[0]
        heapq.heappush(self._by_last, (info.kept_until, number))
        insort(self._by_first, (account.first, number))
        if self._root.limits.max_age_s is not None:
            self._ages.add(number, info)

    @contextmanager
    def _changing(self, number: int, account: _Account) -> Iterator[None]:
        """Run a `with` block that changes a segment's counts, ``account``; then update the sums of all segments."""
        kept, nbytes = account.kept, account.nbytes
        yield
        if number not in self._below:
            self._kept += account.kept - kept
            self._nbytes += account.nbytes - nbytes
        info = account.info
        if info is None or not info.sealed or account.kept or not account.evicted + account.lost:
            return
        # All steps of the segment are gone. But a segment with unproven rows is kept, because these rows were not
        # evicted. A segment with a row that discards earlier parts of an episode is kept, too: without the row, readers
        # would show those parts.
        if info.claimed is None and not _discards_earlier_parts(info):
            self._doomed.add(number)

    def _forget_gone(self) -> None:
        there = set(present_segments(self._root, list(self._accounts)))
        for number in [n for n in self._accounts if n not in there]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if number not in self._below:
            account = self._accounts[number]
            self._kept -= account.kept
            self._nbytes -= account.nbytes
            if number not in self._unsealed:
                self._leave_first(number, account)
        del self._accounts[number]
        self._below.pop(number, None)
        self._unsealed.discard(number)
        self._doomed.discard(number)
        self._packs.pop(number, None)


def _discards_earlier_parts(info: SegmentInfo) -> bool:
    """Return whether a sealed segment has the flags `DISCARD_BEFORE`, which hide earlier parts of an episode."""
    try:
        return bool((read_sealed(info)[1].flags == DISCARD_BEFORE).any())
    except (FormatError, OSError):
        return True  # the segment is damaged, so it is kept for repair


def disk_usage(path: Path) -> tuple[int, int]:
    """Return (bytes on disk, size in bytes) of a file, or the sums of both over all files below a folder."""
    on_disk = apparent = 0
    for folder, _, files in os.walk(path) if is_folder(path) else [(str(path.parent), [], [path.name])]:
        for name in files:
            try:
                status = os.stat(os.path.join(folder, name), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue  # the file was replaced or evicted meanwhile
            on_disk += status.st_blocks * 512
            apparent += status.st_size
    return on_disk, apparent
