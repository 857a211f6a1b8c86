"""Which segments are too old, by clocks of which some may be wrong."""

import heapq
import time

from diskreplay.format.machine import boot_time, is_clock_synchronized
from diskreplay.format.segment import SegmentInfo


class Ages:
    """The ages of sealed segments. Not thread-safe.

    A wall clock that is wrong must not cost a store. Of a segment that was sealed since this machine booted, the clock
    of the boot alone decides, which nobody can set. Of others the wall clock decides, if one of these confirms it: a
    time service keeps the wall clock; this machine sealed the segment, and has been up for as long; this process has
    known the segment for as long. A time of sealing in the future counts as the moment at which it was seen.
    """

    def __init__(self) -> None:
        self._this_boot: list[tuple[float, int]] = []  # a heap: seconds of this boot when a segment was sealed
        self._others: list[tuple[float, int]] = []  # a heap: wall time when a segment was sealed
        self._confirmed_by: dict[int, float] = {}  # of these: the moment of this boot that is as old, for certain
        self._old: set[int] = set()  # of these: old by the wall clock, and by nothing else so far

    def add(self, number: int, info: SegmentInfo) -> None:
        """Take in a sealed segment."""
        now, sealed = boot_time(), info.sealed_clock
        if sealed is not None and sealed.boot == now.boot and sealed.seconds <= now.seconds:
            heapq.heappush(self._this_boot, (sealed.seconds, number))
            return
        wall = time.time()
        heapq.heappush(self._others, (min(info.sealed_at or wall, wall), number))
        was_here = sealed is not None and sealed.machine == now.machine and sealed.boot != now.boot
        self._confirmed_by[number] = 0.0 if was_here else now.seconds

    def older_than(self, seconds: float) -> set[int]:
        """Return the segments that have become so old; each is returned once."""
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
