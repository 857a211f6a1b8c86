"""Numbers for new segments, and which old ones leave: all that is done under the store lock."""

import os
import shutil
from collections.abc import Sequence

from filelock import FileLock

from diskreplay.errors import ReplayError
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.durable import held_lock, is_locked, try_lock
from diskreplay.format.root import Root
from diskreplay.format.sealing import count_steps, may_seal
from diskreplay.format.segment import SegmentInfo, Size, build_segment, read_segment, segment_numbers

# Each dead segment that waits to be sealed holds a descriptor.
_AT_ONCE = 64


class Retention:
    """Makes and removes segments of one store.

    Concurrency: any thread and process; each call takes the store lock. Segment locks are only tried under it.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._sealed_steps: dict[int, int] = {}
        self._tried: set[int] = set()  # dead segments that were handed out to be sealed

    def new_segment(self, writer: int | None, lanes: Sequence[int], size: Size) -> tuple[SegmentInfo, FileLock]:
        """Make the next segment and return it with its lock, held. Removes old ones first.

        Raises
        ------
        StorageFull
            There is no room for it.
        StoreLocked
            The store lock was not free for a minute.
        """
        with held_lock(self._root.lock_path):
            self._counters.mend()
            self._remove_old()
            number = int(self._counters.read()[layout.NEXT_SEGMENT])
            # A writer that died between the rename and the counter has left a segment with no rows under it.
            while os.path.lexists(self._root.segment_path(number)):
                number += 1
            if number >= layout.MAX_SEGMENTS:
                raise ReplayError(f"{self._root.path} has used all {layout.MAX_SEGMENTS} segment numbers")
            info, lock = build_segment(self._root, number, writer, lanes, size)
            self._counters.set(layout.NEXT_SEGMENT, number + 1)
        return info, lock

    def enforce(self) -> None:
        """Remove segments beyond the capacity; nothing else has to succeed first."""
        if self._root.capacity is None:
            return
        with held_lock(self._root.lock_path):
            self._counters.mend()
            self._remove_old()

    def dead_segments(self) -> list[tuple[int, FileLock]]:
        """Lock and return unsealed segments whose writer is gone and that this machine may seal, some at a time."""
        dead: list[tuple[int, FileLock]] = []
        with held_lock(self._root.lock_path):
            self._counters.mend()
            self._clean_up()
            for info in self._live():
                if len(dead) == _AT_ONCE:
                    break
                if info.number in self._tried or info.sealed or not may_seal(info) or is_locked(info.lock_path):
                    continue
                lock = try_lock(info.lock_path)
                if lock is None:
                    continue
                # Its path may name another file by now, or a sealer may just have finished.
                if read_segment(self._root, info.number).sealed:
                    lock.release()
                else:
                    self._tried.add(info.number)
                    dead.append((info.number, lock))
        return dead

    def _clean_up(self) -> None:
        """Remove what processes that died left half removed or half made; the caller holds the store lock."""
        for name in os.listdir(self._root.counters_folder):
            if name.startswith(("old-", "new-")):
                shutil.rmtree(self._root.counters_folder / name, ignore_errors=True)

    def _live(self) -> list[SegmentInfo]:
        """Read the attributes of every segment that is there, lowest number first."""
        words = self._counters.read()
        found = []
        for number in segment_numbers(self._root, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT])):
            try:
                found.append(read_segment(self._root, number))
            except FileNotFoundError:
                continue
        return found

    def _remove_old(self) -> None:
        capacity = self._root.capacity
        if capacity is None:
            return
        words = self._counters.read()
        numbers = segment_numbers(self._root, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT]))
        steps = self._count(numbers, int(words[layout.HORIZON]))
        horizon = self._horizon(steps, capacity)
        if horizon > words[layout.HORIZON]:
            self._counters.set(layout.HORIZON, horizon)
        for number in [n for n in sorted(steps) if n < horizon and n in self._sealed_steps]:
            self._delete(number, steps.pop(number))
        first = min(steps, default=int(words[layout.NEXT_SEGMENT]))
        if first > words[layout.FIRST_LIVE]:
            self._counters.set(layout.FIRST_LIVE, first)

    def _count(self, numbers: Sequence[int], horizon: int) -> dict[int, int]:
        """Return the steps of each segment that is there; sealed ones are counted once."""
        steps = {}
        for number in numbers:
            if number in self._sealed_steps:
                # Only below the horizon can another process have removed it.
                if number >= horizon or os.path.exists(self._root.segment_path(number)):
                    steps[number] = self._sealed_steps[number]
                continue
            try:
                info = read_segment(self._root, number)
                steps[number] = info.steps if info.steps is not None else count_steps(self._root, info)
            except FileNotFoundError:
                continue
            if info.sealed:
                self._sealed_steps[number] = steps[number]
        return steps

    @staticmethod
    def _horizon(steps: dict[int, int], capacity: int) -> int:
        """Return the lowest segment that holds any of the newest ``capacity`` steps."""
        held = 0
        for number in sorted(steps, reverse=True):
            held += steps[number]
            if held >= capacity:
                return number
        return 0

    def _delete(self, number: int, steps: int) -> None:
        """Take a sealed segment out: renamed first, so that nobody finds it half there."""
        gone = self._root.counters_folder / f"old-{layout.segment_name(number)}"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self._root.segment_path(number), gone)
        evicted = int(self._counters.read()[layout.STEPS_EVICTED])
        self._counters.set(layout.STEPS_EVICTED, evicted + steps)
        self._sealed_steps.pop(number, None)
        shutil.rmtree(gone, ignore_errors=True)
