"""Numbers for new segments, and which old ones leave: all that is done under the store lock."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress

from diskreplay.errors import FormatError, ReplayError, StorageFull, StoreLocked
from diskreplay.format import layout, states
from diskreplay.format.commit import StoreCounters
from diskreplay.format.durable import Lock, held_lock, is_locked, try_lock
from diskreplay.format.hidden import HiddenEntries, has_reserve, hide, reserve
from diskreplay.format.mending import move_aside
from diskreplay.format.removal import destroy, remove_dead_draft, take_out
from diskreplay.format.root import Root
from diskreplay.format.sealing import may_seal
from diskreplay.format.segment import (
    DRAFT,
    SegmentInfo,
    Size,
    build_segment,
    place_segment,
    read_segment,
    segment_numbers,
)
from diskreplay.format.unwritten import NeverWritten, has_no_durable_row
from diskreplay.store.ledger import Ledger

# Each dead segment that waits to be sealed holds a descriptor, and each that is deleted keeps others from the lock.
_AT_ONCE = 64
# A segment that is being deleted: its number, and what the counter of steps evicted becomes.
_REMOVED = re.compile(r"old-[0-9]{8,9}-([0-9]{1,19})")


class Retention:
    """Makes and removes segments of one store.

    Concurrency: any thread and process; each call takes the store lock. Segment locks are only tried under it.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._ledger = Ledger(root, counters)
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
            if not self._ledger.is_idle:
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
        """Remove segments that have to leave; nothing else has to succeed first."""
        left = not self._ledger.is_idle
        while left:  # others get the lock in between
            with held_lock(self._root.lock_path):
                self._counters.mend()
                left = self._remove_old(again=True)

    def evict(self, episodes: Sequence[tuple[int, int]], find_frontier: Callable[[], int]) -> list[int]:
        """Hide episodes of sealed segments, all or, where that fails, none; return the first ids of those that were.

        Others were evicted meanwhile. ``find_frontier`` tells below which id the capacity hides everything; it is
        called under the lock.
        """
        with held_lock(self._root.lock_path):
            self._counters.mend()
            entries = HiddenEntries(self._root).new(int(self._counters.read()[layout.HIDDEN_ENTRIES]))
            known = set(entries[:, 0].tolist())
            segments = {first >> layout.POSITION_BITS for first, _ in episodes}
            there = {number for number in segments if os.path.exists(self._root.segment_path(number))}
            left = [e for e in episodes if e[0] not in known and e[0] >> layout.POSITION_BITS in there]
            if left:
                hide(self._root, self._counters, left, find_frontier())
        return [first for first, _ in left]

    def reserve_entries(self) -> None:
        """See that there is room for evictions by hand, also when the disk is full; where there is none now, go on."""
        with suppress(StorageFull, StoreLocked, FormatError):
            if not has_reserve(self._root, self._counters.peek(layout.HIDDEN_ENTRIES)):
                with held_lock(self._root.lock_path):
                    reserve(self._root, int(self._counters.read()[layout.HIDDEN_ENTRIES]))

    def dead_segments(self) -> list[tuple[SegmentInfo, Lock]]:
        """Lock and return unsealed segments whose writer is gone and that this machine may seal, some at a time.

        Those of an earlier boot without a durable row are removed: they may have empty files.
        """
        dead: list[tuple[SegmentInfo, Lock]] = []
        with held_lock(self._root.lock_path):
            self._counters.mend()
            self._clean_up()
            for info in self._live():
                if len(dead) == _AT_ONCE:
                    break
                if info.number in self._tried or info.sealed or not may_seal(info) or is_locked(info.lock_path):
                    continue
                if not info.shows_live_rows and has_no_durable_row(str(info.path)):
                    self._discard(info.number)
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
        self._finish_removals()
        for name in os.listdir(self._root.counters_folder):
            if name.startswith("new-"):
                shutil.rmtree(self._root.counters_folder / name, ignore_errors=True)
            elif name.startswith(states.DRAFT):
                remove_dead_draft(f"{self._root.counters_folder}/{name}", layout.LOCK)
            elif name.startswith(DRAFT):
                remove_dead_draft(f"{self._root.counters_folder}/{name}", f"{layout.COMMITTED}/{layout.LOCK}")
        states.remove_stale(self._root)
        words = self._counters.read()
        for name in os.listdir(self._root.segments_folder):
            if name.isdecimal() and name == layout.segment_name(number := int(name)):
                self._check_place(number, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT]))

    def _check_place(self, number: int, first: int, following: int) -> None:
        """Remove a segment that came back after a loss of power, or that was made and never counted."""
        path = self._root.segment_path(number)
        if first <= number < following or is_locked(path / layout.COMMITTED / layout.LOCK):
            return
        try:
            if number < first or not read_segment(self._root, number).map_trusted()[1].any():
                self._discard(number)
        except NeverWritten:
            move_aside(self._root.path, f"{layout.SEGMENTS}/{path.name}")
        except (FormatError, OSError):
            pass  # verify tells of it

    def _discard(self, number: int) -> None:
        """Delete a segment that has no step which counts."""
        destroy(self._root, [take_out(self._root, number, int(self._counters.read()[layout.STEPS_EVICTED]))])

    def _live(self) -> list[SegmentInfo]:
        """Read the attributes of every segment that is there, lowest number first.

        Those that say nothing of themselves since the power went are set aside.
        """
        words = self._counters.read()
        found = []
        for number in segment_numbers(self._root, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT])):
            try:
                found.append(read_segment(self._root, number))
            except NeverWritten as error:
                if not is_locked(f"{error.filename}/{layout.COMMITTED}/{layout.LOCK}"):
                    move_aside(self._root.path, f"{layout.SEGMENTS}/{layout.segment_name(number)}")
            except FileNotFoundError:
                continue
        return found

    def _remove_old(self, *, again: bool) -> bool:
        """Take out what has to leave, some at a time, and delete it; tell whether more has to."""
        gone: list[str] = []
        for number, steps in self._ledger.leaving(_AT_ONCE, again=again):
            if not gone:
                self._finish_removals()
            evicted = self._counters.evicted_after(steps)
            gone.append(take_out(self._root, number, evicted))
            self._counters.set(layout.STEPS_EVICTED, evicted)
        destroy(self._root, gone)
        return self._ledger.has_more

    def _finish_removals(self) -> None:
        """Delete what processes that died left half deleted, and count its steps; the caller holds the store lock."""
        for name in os.listdir(self._root.counters_folder):
            if name.startswith("old-"):
                if counted := _REMOVED.fullmatch(name):
                    now = int(self._counters.read()[layout.STEPS_EVICTED])
                    self._counters.set(layout.STEPS_EVICTED, max(now, min(int(counted[1]), layout.MOST_COUNTED)))
                shutil.rmtree(self._root.counters_folder / name, ignore_errors=True)
