"""The class `Follower` makes snapshots of a store: it reads the complete store once, and later only what is new."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from diskreplay.errors import FormatError, SegmentGone, StoreLocked
from diskreplay.ids import EpisodeTable, Ints
from diskreplay.kernels.advance import advance, advance_hiding
from diskreplay.kernels.huge_pages import give_back_free
from diskreplay.kernels.table import Kernel
from diskreplay.reading.followed_rows import FollowedRows, steps_not_shown
from diskreplay.reading.known_segments import MOST_SLOTS, KnownSegments, Merged
from diskreplay.reading.snapshot import Snapshot
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.machine import clock_ns, this_clock
from diskreplay.segments.files.numbers import present_segments, segment_numbers
from diskreplay.segments.segment import DAMAGE, SegmentInfo

# Seconds between checks for sealed segments while no counter changes. No counter changes if a process dies right after
# it has sealed a segment.
CHECK_EVERY_S = 1.0
# The maximum number of attempts to read the complete store. An attempt fails if segments are merged into a pack
# meanwhile.
_ATTEMPTS = 100

# The kernels as plain Python functions. They are used until a sampler calls `follow_with` with compiled kernels.
_PLAIN: dict[str, Kernel] = {"advance": advance, "advance_hiding": advance_hiding}


class Follower:
    """Follows a store on disk and makes snapshots of it.

    An unreadable segment is left out, and listed in `damaged`. If ``warns`` is True, a warning is issued.

    Concurrency: any thread; one thread refreshes at a time. A follower writes no files and takes no locks of the store.
    """

    def __init__(self, root: Root, counters: StoreCounters, warns: bool = True) -> None:
        self._root, self._counters, self._warns = root, counters, warns
        self._lock = threading.Lock()
        self._broken = False  # whether `_now` is incomplete, so that the next refresh reads the whole store
        self._least = layout.MAX_SEGMENTS  # the lowest segment number in the packs known so far
        self._kernel: Callable[[str], Kernel] = _PLAIN.__getitem__
        self._now = self._begin(0)
        self.snapshot = self._now.snapshot

    def _begin(self, generation: int) -> "_Generation":
        for _ in range(_ATTEMPTS):
            try:
                words = self._counters.read()
                known = KnownSegments(self._root, self._counters, words, self._warns, self._least)
                return _Generation(self._root, self._counters, words, known, self._kernel, generation)
            except Merged as merged:
                self._least = min(self._least, merged.least)
        raise StoreLocked(
            f"segments of {self._root.path} were merged while they were read, {_ATTEMPTS} times; try again when no "
            "process merges them"
        )

    def follow_with(self, kernel: Callable[[str], Kernel]) -> None:
        kernel(self.kernel_name)  # outside the lock: compilation takes seconds, and other threads may refresh meanwhile
        with self._lock:
            self._kernel = kernel
            self._now.rows.live.follow_with(kernel(self.kernel_name))

    @property
    def kernel_name(self) -> str:
        return self._now.kernel_name

    @property
    def damaged(self) -> dict[int, str]:
        return self._now.known.damaged

    @property
    def origin(self) -> int:
        return self._now.rows.origin

    def reset_after_fork(self) -> None:
        """In a forked child, make the next refresh start over if another thread was refreshing at the fork."""
        self._broken = self._broken or self._lock.locked()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Unmap all files, except files that arrays or unfinished batches still use."""
        with self._lock:
            self._broken = True  # even if this call is interrupted, the next refresh starts over
            self._now.rows.release()

    def refresh(self) -> tuple[Snapshot, int]:
        """Take a new snapshot; return it, and the number of steps that were added since the last snapshot.

        Steps that were evicted or hidden since the last snapshot are not subtracted from this number.
        """
        with self._lock:
            try:
                if not self._broken:
                    try:  # `suppress` would take as long as an `update` without changes
                        arrived = self._now.update()
                        self.snapshot = self._now.snapshot
                        return self.snapshot, arrived
                    except Merged as merged:
                        self._least = min(self._least, merged.least)
                before = 0 if self._broken else len(self.snapshot)
                self._now = self._begin(self._now.rows.log.generation + 1)
                self._broken, self.snapshot = False, self._now.snapshot
                return self.snapshot, max(0, len(self.snapshot) - before)
            except BaseException as error:
                # After an error halfway, `_now` may be incomplete, so the next refresh starts over.
                self._broken = True
                self._root.explain(error)
                raise


class _Generation:
    """A follower's knowledge of a store, replaced when the follower reads the complete store again.

    Used by one thread.

    The constructor and `update` raise `Merged` if the complete store has to be read again.
    """

    snapshot: Snapshot

    def __init__(
        self,
        root: Root,
        counters: StoreCounters,
        words: Ints,
        known: KnownSegments,
        kernel: Callable[[str], Kernel],
        number: int,
    ) -> None:
        self._root, self._counters, self._words, self.known = root, counters, words, known
        root.follow_limits()  # after the counters, so that the next refresh notices a later change of a limit
        # A limit hides steps in the order of their publication, so the follower needs the times of rows. Steps that an
        # earlier limit has hidden stay hidden.
        self._limits = replace(root.limits)
        self._is_timed = self._hides(self._words)
        self._raw = b""
        self._until = 0  # the counters of the store say that all steps published before this time are hidden
        self._clock = this_clock()  # `_add_segments` sets the clock of the newest segment written since the boot
        self._next_check_at = 0.0
        self.rows = FollowedRows(root, counters, known, kernel(self.kernel_name), number, self._is_timed)
        self.update(force=True)
        # The growth of the tables has left freed memory in the process, up to half the size of the tables.
        give_back_free(max(len(self.rows.log), len(known.slots.lanes)))

    def _hides(self, words: Ints) -> bool:
        """Return whether the store has a limit, or an earlier limit has hidden steps; ``words`` has the counters."""
        return self._limits.are_set or bool(words[[layout.FRONTIER, layout.HORIZON]].any())

    @property
    def kernel_name(self) -> str:
        return "advance_hiding" if self._is_timed else "advance"

    def update(self, *, force: bool = False) -> int:
        raw, rows = self._counters.raw(), self.rows
        changed, arrived = force, 0
        if raw == self._raw and not force:
            if not rows.live.segments and self._limits.max_age_s is None:
                return 0  # this path is fast, as samplers refresh for every batch
        else:
            self._raw = raw
            words = self._counters.read()
            is_rearranged = bool(words[layout.CHANGES] != self._words[layout.CHANGES])
            if is_rearranged:
                self._root.follow_limits()
                is_other = self._limits != self._root.limits or self._is_timed != self._hides(words)
                if force or is_other or self._has_returned():
                    raise Merged
            changed = changed or bool((words != self._words).any())
            if changed:
                arrived = self._follow_counters(words, is_rearranged)
        steps, rows.lost = rows.log.steps + rows.live.open_steps, 0
        if changed or time.monotonic() >= self._next_check_at:
            changed |= self._add_newly_sealed()
        until = self._until
        if self._limits.max_age_s is not None:
            # The age is measured by the clock of the newest segment.
            until = max(until, clock_ns() + self._clock.wall - int(self._limits.max_age_s * 1e9))
        record = rows.live.advance(changed, until, rows)
        if record is None:
            return 0
        total = rows.log.steps + rows.live.open_steps
        if rows.newly_discarded:
            if not force:
                arrived -= steps_not_shown(EpisodeTable.concatenate(rows.newly_discarded), self.snapshot)
            rows.newly_discarded = []
        self.snapshot = rows.snapshot(record, total)
        return arrived + total - steps + rows.lost

    def _follow_counters(self, words: Ints, is_rearranged: bool) -> int:
        rows = self.rows
        steps = rows.steps
        self._add_segments(int(words[layout.NEXT_SEGMENT]))
        arrived = rows.steps - steps
        gone = [layout.STEPS_EVICTED, layout.FIRST_LIVE, layout.CHANGES, layout.HORIZON]
        if (words[gone] != self._words[gone]).any():
            self._drop_gone(everywhere=is_rearranged)
        if rows.evictions.read(int(words[layout.EVICTION_ENTRIES])):
            rows.remove_evicted()
            rows.list_growing()  # so that `LiveLanes` reads `keeps_all_ended` again
        self._words = words
        if self._is_timed:
            self._until = int(max(words[layout.FRONTIER], words[layout.HORIZON]))
        rows.live.open_steps = rows.slots.count_open()
        return arrived

    def _add_segments(self, end: int) -> None:
        slots = self.known.slots
        start = slots.end
        there = segment_numbers(self._root, start, end)
        if not there:
            if start < end and self.known.merged_since(end):
                raise Merged
            return
        count = there[-1] + 1 - start
        if count + len(slots.lanes) > MOST_SLOTS:
            raise FormatError(
                f"{self._root.path} has segments {there[0]} to {there[-1]}, more than a store can have; restore its "
                "counters"
            )
        infos: list[SegmentInfo | None] = [None] * count
        for number in there:
            infos[number - start] = self.known.read(number)
        packs = self.known.find_packs(infos)
        for info in [*infos, *(pack.info for pack in packs)]:
            if info is not None and info.clock.boot == self._clock.boot:
                self._clock = info.clock
        self.rows.add(infos, packs)

    def _drop_gone(self, *, everywhere: bool) -> None:
        """Drop the segments that a limit has deleted; if ``everywhere`` is True, drop all segments that are gone."""
        words, slots = self._counters.read(), self.known.slots
        horizon = int(words[layout.HORIZON]) if self._root.has_horizon else 0
        known = np.flatnonzero(slots.lanes)
        below = known[slots.last[known] < horizon]
        if not (self._limits.max_age_s is not None or words[layout.EVICTION_ENTRIES] or everywhere):
            # Sealed segments need no check: `below` has those that are gone. `_add_newly_sealed` checks the segments in
            # `live`.
            known = known[~slots.sealed[known] & ~np.isin(known, list(self.rows.live.segments))]
        numbers = np.unique(slots.folder[known]).tolist()
        gone = set(numbers) - set(present_segments(self._root, numbers))
        self.known.check_merged(gone)
        self.rows.drop(np.union1d(below, known[np.isin(slots.folder[known], list(gone))]).tolist())

    def _add_newly_sealed(self) -> bool:
        """Add the last rows of segments that were sealed since the last call, the newest segment first.

        Returns whether any segment was sealed or left out.
        """
        self._next_check_at = time.monotonic() + CHECK_EVERY_S
        changed, live = False, self.rows.live.segments
        for slot in sorted(live, reverse=True):
            try:
                if live[slot].may_be_sealed():
                    changed |= self.rows.reread(slot)
            except (SegmentGone, *DAMAGE) as error:
                self.rows.exclude(slot, error)
                changed = True
        return changed

    def _has_returned(self) -> bool:
        """Return whether a segment may have come back to the store, or may have been replaced."""
        infos = [folder.info for folder in self.rows.tables.known if folder is not None]
        known: dict[int, Identity | int] = {info.number: info.document for info in infos}
        known |= {slot + self.rows.origin: live.folder for slot, live in self.rows.live.segments.items()}
        return bool(self.known.damaged) or self.known.has_other(known)
