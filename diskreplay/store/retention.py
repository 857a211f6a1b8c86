"""Numbers for new segments, and which old ones leave: all that is done under the store lock."""

import os
import shutil
from collections import deque
from collections.abc import Sequence

from diskreplay.errors import ReplayError
from diskreplay.format import layout, states
from diskreplay.format.commit import StoreCounters
from diskreplay.format.durable import Lock, held_lock, is_locked, try_lock
from diskreplay.format.root import Root
from diskreplay.format.sealing import count_steps, may_seal
from diskreplay.format.segment import (
    DRAFT,
    SegmentInfo,
    Size,
    build_segment,
    place_segment,
    read_segment,
    remove_dead_draft,
    segment_numbers,
)

# Each dead segment that waits to be sealed holds a descriptor.
_AT_ONCE = 64


class Retention:
    """Makes and removes segments of one store.

    Concurrency: any thread and process; each call takes the store lock. Segment locks are only tried under it.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._seen = 0  # numbers below it were looked at
        self._steps: dict[int, int] = {}  # of each live segment, as far as known: an unsealed one may have more by now
        self._unsealed: dict[int, tuple[int, SegmentInfo] | None] = {}  # with the inode of the file it was read from
        self._newest: deque[int] = deque()  # segments from the horizon on, lowest number first
        self._held = 0  # their steps
        self._older: list[int] = []  # segments below the horizon that are still there
        self._tried: set[int] = set()  # dead segments that were handed out to be sealed

    def new_segment(self, writer: int | None, lanes: Sequence[int], size: Size) -> tuple[SegmentInfo, Lock]:
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
            # With a segment an episode, many wait to be sealed: they are looked at again when that is done.
            self._remove_old(again=self._root.segment_steps != "episode")
            number = self._next_number()
            info, lock = build_segment(self._root, number, writer, lanes, size)
            self._counters.set(layout.NEXT_SEGMENT, number + 1)
        return info, lock

    def place(self, draft: SegmentInfo) -> SegmentInfo:
        """Make a draft the next segment. Old ones are removed when the one before it is sealed.

        Raises
        ------
        StorageFull, FileNotFoundError, StoreLocked
            It could not be placed; it is as it was.
        """
        with held_lock(self._root.lock_path):
            self._counters.mend()
            number = self._next_number()
            info = place_segment(self._root, draft, number)
            self._counters.set(layout.NEXT_SEGMENT, number + 1)
        return info

    def _next_number(self) -> int:
        number = int(self._counters.read()[layout.NEXT_SEGMENT])
        # A writer that died between the rename and the counter has left a segment with no rows under it.
        while os.path.lexists(self._root.segment_path(number)):
            number += 1
        if number >= layout.MAX_SEGMENTS:
            raise ReplayError(f"{self._root.path} has used all {layout.MAX_SEGMENTS} segment numbers")
        return number

    def enforce(self) -> None:
        """Remove segments beyond the capacity; nothing else has to succeed first."""
        if self._root.capacity is None:
            return
        with held_lock(self._root.lock_path):
            self._counters.mend()
            self._remove_old(again=True)

    def dead_segments(self) -> list[tuple[SegmentInfo, Lock]]:
        """Lock and return unsealed segments whose writer is gone and that this machine may seal, some at a time."""
        dead: list[tuple[SegmentInfo, Lock]] = []
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
                # A sealer may just have finished.
                info = read_segment(self._root, info.number)
                if info.sealed:
                    lock.release()
                else:
                    self._tried.add(info.number)
                    dead.append((info, lock))
        return dead

    def _clean_up(self) -> None:
        """Remove what processes that died left half removed or half made; the caller holds the store lock."""
        for name in os.listdir(self._root.counters_folder):
            if name.startswith(("old-", "new-")):
                shutil.rmtree(self._root.counters_folder / name, ignore_errors=True)
            elif name.startswith(states.DRAFT):
                states.remove_dead_draft(f"{self._root.counters_folder}/{name}")
            elif name.startswith(DRAFT):
                remove_dead_draft(f"{self._root.counters_folder}/{name}")
        states.remove_stale(self._root)

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

    def _remove_old(self, *, again: bool) -> None:
        """Move the horizon on and delete the sealed segments below it.

        ``again``: look at known segments that were not sealed too. Without it their steps may be too few, which only
        makes the horizon move later.
        """
        capacity = self._root.capacity
        if capacity is None:
            return
        words = self._counters.read()
        first, end = max(self._seen, int(words[layout.FIRST_LIVE])), int(words[layout.NEXT_SEGMENT])
        for number in segment_numbers(self._root, first, end):
            self._newest.append(number)
            self._steps[number] = 0
            self._unsealed[number] = None
        for number in [n for n in self._unsealed if again or n >= first]:
            self._look(number)
        self._seen = end
        horizon = int(words[layout.HORIZON])
        newest = self._newest
        while newest and (newest[0] < horizon or self._held - self._steps[newest[0]] >= capacity):
            self._older.append(newest.popleft())
            self._held -= self._steps[self._older[-1]]
        if newest and newest[0] > horizon and self._held >= capacity:
            self._counters.set(layout.HORIZON, newest[0])
        for number in list(self._older):
            if not os.path.exists(self._root.segment_path(number)):
                self._forget(number)  # by another process, or by hand
            elif number not in self._unsealed:
                self._delete(number)
        first = min([*self._older[:1], *([newest[0]] if newest else [end])])
        if first > words[layout.FIRST_LIVE]:
            self._counters.set(layout.FIRST_LIVE, first)

    def _look(self, number: int) -> None:
        """Count the steps of a segment that was not sealed when it was last looked at, if ever."""
        known = self._unsealed[number]
        try:
            inode = os.stat(self._root.segment_path(number) / layout.METADATA).st_ino
            info = known[1] if known and known[0] == inode else read_segment(self._root, number)
            steps = count_steps(self._root, info) if info.steps is None else info.steps
        except FileNotFoundError:
            return
        self._unsealed[number] = (inode, info)
        if info.sealed:
            del self._unsealed[number]
        if self._newest and number >= self._newest[0]:
            self._held += steps - self._steps[number]
        self._steps[number] = steps

    def _forget(self, number: int) -> None:
        self._older.remove(number)
        del self._steps[number]
        self._unsealed.pop(number, None)

    def _delete(self, number: int) -> None:
        """Take a sealed segment out: renamed first, so that nobody finds it half there."""
        gone = self._root.counters_folder / f"old-{layout.segment_name(number)}"
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(self._root.segment_path(number), gone)
        evicted = int(self._counters.read()[layout.STEPS_EVICTED])
        self._counters.set(layout.STEPS_EVICTED, evicted + self._steps[number])
        self._forget(number)
        shutil.rmtree(gone, ignore_errors=True)
