"""From files to snapshots: which segments there are, how far they reach, which episodes they hold."""

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.numbers import present_segments, segment_numbers
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.format.unwritten import NeverWritten
from diskreplay.store.damaged import DAMAGE, DamagedSegments
from diskreplay.store.flags import LaneFlags, check_chunks, read_lanes, read_sealed
from diskreplay.store.frontier import Frontier
from diskreplay.store.hidden import Evictions
from diskreplay.store.live_segment import LiveSegment
from diskreplay.store.log import EpisodeLog
from diskreplay.store.places import MOST_SLOTS, Places
from diskreplay.store.scan import CONTINUES, OPEN, Episodes, Stretch, scan
from diskreplay.store.snapshot import Snapshot
from diskreplay.store.tables import Tables

# Bytes of flags of sealed segments that are looked at together.
_AT_ONCE = 16 << 20


class _Sealed(NamedTuple):
    """A sealed segment's place, and what `read_sealed` found."""

    slot: int
    committed: NDArray[np.int64]
    flags: LaneFlags


class Index:
    """Follows a store on disk and makes snapshots of it.

    A segment that cannot be read is left out, with a warning; `damaged` says which are.

    Concurrency: any thread; one refreshes at a time. It writes nothing and takes no lock on disk.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._lock = threading.Lock()
        self._generation = 0
        self._least = 0  # the frontier so far: it never goes back
        self._reset()

    def _reset(self) -> None:
        """Start from nothing, and look."""
        self._words = self._counters.read()
        self._raw = b""
        self._broken = False
        self._places = Places(self._root, self._counters)
        self._origin = self._places.lowest()
        self._first = 0  # the first slot that has a segment, or had the last one
        self._lost = 0  # steps of segments that turned out to be damaged in this refresh
        self.damaged = DamagedSegments(self._root)
        self._tables = Tables(self._root)
        self._live: dict[int, LiveSegment] = {}
        self._log = EpisodeLog(self._generation)
        self._frontier = Frontier(self._root.capacity)
        self._lanes = np.zeros(0, np.int64)
        self._lane_base = np.zeros(0, np.int64)
        self._sealed = np.zeros(0, np.bool_)
        # By lane, segment after segment.
        self._committed = np.zeros(0, np.int64)
        self._observed = np.zeros(0, np.int64)
        self._open_start = np.zeros(0, np.int64)
        self._open_end = np.zeros(0, np.uint8)
        self._lane_slot = np.zeros(0, np.int64)
        self._evictions = Evictions(self._root)
        self.snapshot: Snapshot
        self._gone: list[int] = []  # evicted segments whose episodes are still in the log
        self._update(force=True)

    def look_anew(self) -> None:
        """Begin anew at the next refresh, in a forked child: another thread may have been in the middle of one."""
        self._broken = self._broken or self._lock.locked()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of every mapping; arrays over them, and batches being gathered, keep what they use."""
        with self._lock:
            self._live.clear()
            self._tables.forget()

    def refresh(self) -> int:
        """Look again; return how many steps became visible since the snapshot before, evicted ones aside."""
        with self._lock:
            try:
                if self._broken:
                    self._generation = self._log.generation + 1
                    self._reset()
                    return len(self.snapshot)
                return self._update(force=False)
            except BaseException as error:
                # Interrupted halfway: what was taken in already is not known, so the next look starts anew.
                self._broken = True
                self._root.explain(error)
                raise

    def _update(self, *, force: bool) -> int:
        raw = self._counters.raw()
        if not force and raw == self._raw and not (self._live and any(live.has_news() for live in self._live.values())):
            return 0
        self._raw = raw
        words = self._counters.read()
        changed = force or bool((words != self._words).any())
        is_rearranged = not force and bool(words[layout.CHANGES] != self._words[layout.CHANGES])
        if is_rearranged and self._has_returned():
            before, self._generation = len(self.snapshot), self._log.generation + 1
            self._reset()
            return max(0, len(self.snapshot) - before)
        arrived = -self._total_steps()
        if changed:
            self._add_segments(int(words[layout.NEXT_SEGMENT]))
            arrived += self._total_steps()
            gone = [layout.STEPS_EVICTED, layout.FIRST_LIVE, layout.CHANGES]
            if (words[gone] != self._words[gone]).any():
                self._drop_gone(everywhere=is_rearranged)
            self._read_hidden(int(words[layout.HIDDEN_ENTRIES]))
            self._words = words
            arrived -= self._total_steps()
        # The newest first: where a lane has moved on, what it left is read after it left.
        for slot in sorted(self._live, reverse=True):
            changed |= self._follow(slot)
        arrived += self._total_steps() + self._lost
        self._lost = 0
        if changed:
            self.snapshot = self._freeze()
        return arrived

    # --- segments that come and go -----------------------------------------------------------------------------------

    def _add_segments(self, end: int) -> None:
        start = self._origin + len(self._lanes)
        there = segment_numbers(self._root, start, end)
        if not there:
            return
        slots = there[-1] + 1 - start
        if slots + len(self._lanes) > MOST_SLOTS:
            raise FormatError(f"{self._root.path} has segments {there[0]} to {there[-1]}; restore its counters")
        infos: list[SegmentInfo | None] = [None] * slots
        for number in there:
            infos[number - start] = self._read_segment(number)
        lanes = np.array([0 if info is None else len(info.lanes) for info in infos], np.int64)
        first_slot, count = len(self._lanes), int(lanes.sum())
        self._lane_base = np.append(self._lane_base, len(self._committed) + np.cumsum(lanes) - lanes)
        self._lane_slot = np.append(self._lane_slot, np.repeat(first_slot + np.arange(len(infos)), lanes))
        self._lanes = np.append(self._lanes, lanes)
        self._sealed = np.append(self._sealed, np.zeros(len(infos), np.bool_))
        self._committed = np.append(self._committed, np.zeros(count, np.int64))
        self._observed = np.append(self._observed, np.zeros(count, np.int64))
        self._open_start = np.append(self._open_start, np.full(count, -1, np.int64))
        self._open_end = np.append(self._open_end, np.zeros(count, np.uint8))
        self._tables.add_slots(infos)
        sealed: list[_Sealed] = []
        pending = 0
        for slot, info in enumerate(infos, first_slot):
            if info is None:
                continue
            try:
                self._evictions.add_lost(info)
                if info.sealed:
                    sealed.append(_Sealed(slot, *read_sealed(self._root, info)))
                    pending += len(sealed[-1].flags.flags)
                else:
                    self._live[slot] = LiveSegment(self._root, info.number)
            except DAMAGE as error:
                self._leave_out(slot, error)
            if pending > _AT_ONCE:
                self._take_sealed(sealed)
                sealed, pending = [], 0
        self._take_sealed(sealed)

    def _read_segment(self, number: int) -> SegmentInfo | None:
        """Read a segment's attributes; None: it is gone, was never written, or is damaged."""
        self._places.note(number)
        try:
            info = read_segment(self._root, number)
            return None if self._places.was_taken_out(info) else info
        except NeverWritten:
            return None
        except DAMAGE as error:
            self.damaged.note(number, error)
            return None

    def _leave_out(self, slot: int, error: Exception) -> None:
        """Go on without a segment that cannot be read."""
        self.damaged.note(slot + self._origin, error)
        self._drop([slot])

    def _has_returned(self) -> bool:
        """Whether a segment is there that was not, or is another one than it was."""
        known = dict[int, int | None].fromkeys((np.flatnonzero(self._lanes) + self._origin).tolist())
        known |= {slot + self._origin: live.folder for slot, live in self._live.items()}
        stop = self._origin + len(self._lanes)
        return bool(self.damaged.details) or self._places.has_other(self._origin, stop, known)

    def _drop_gone(self, *, everywhere: bool) -> None:
        """Release the segments whose folder is gone; ``everywhere``: not only where retention takes them out."""
        words = self._counters.read()
        stop = len(self._lanes)
        if self._root.max_age_s is None and not words[layout.HIDDEN_ENTRIES] and not everywhere:
            stop = max(0, min(int(words[layout.HORIZON]) - self._origin, stop))
        known = np.flatnonzero(self._lanes[:stop]) + self._origin
        there = set(present_segments(self._root, known.tolist()))
        self._drop([number - self._origin for number in known.tolist() if number not in there])

    def _drop(self, slots: list[int]) -> None:
        """Empty slots.

        Their episodes stay in the log, behind the frontier, until they are half of it: a new log costs every sampler
        a new start.
        """
        if not slots:
            return
        self._lanes = self._lanes.copy()
        self._lanes[slots] = 0
        self._open_start[np.isin(self._lane_slot, slots)] = -1
        for slot in slots:
            self._live.pop(slot, None)
        while self._first + 1 < len(self._lanes) and not self._lanes[self._first]:
            self._first += 1
        self._tables = self._tables.without(slots)
        self._gone.extend(slot + self._origin for slot in slots)
        self._evictions.forget(np.array(slots) + self._origin)
        behind = np.isin(self._log.view().first >> layout.POSITION_BITS, self._gone)
        if 2 * np.count_nonzero(behind) >= len(behind):
            self._compact()

    def _compact(self) -> None:
        gone, self._gone = np.array(self._gone), []
        self._log.remove(lambda log: np.isin(log.first >> layout.POSITION_BITS, gone))

    def _read_hidden(self, count: int) -> None:
        """Drop the episodes that were evicted by hand."""
        if self._evictions.read(count):
            self._log.remove(lambda log: self._evictions.split(log)[1])

    # --- rows that come ----------------------------------------------------------------------------------------------

    def _follow(self, slot: int) -> bool:
        """Take in what a live segment has published; tell whether that was anything."""
        live = self._live[slot]
        try:
            sealed = False
            if live.may_be_sealed():
                self._places.note(self._origin + slot)
                before, live = live, LiveSegment(self._root, self._origin + slot)
                if live.folder != before.folder:
                    return False  # replaced by repair, which is about to count a change
                sealed = live.info.sealed
            return self._take_new_rows(slot, live, sealed)
        except (SegmentGone, *DAMAGE) as error:
            if self.damaged.note(self._origin + slot, error):
                steps = self._total_steps()
                self._drop([slot])
                self._lost += steps - self._total_steps()
                return True
            base = int(self._lane_base[slot])
            if self._committed[base : base + int(self._lanes[slot])].any():
                self._words[layout.STEPS_EVICTED] = -1  # it is gone: the next refresh looks for such
            else:
                del self._live[slot]  # nothing of it had been durable when the power went
            return False

    def _take_new_rows(self, slot: int, live: LiveSegment, sealed: bool) -> bool:
        base, count = int(self._lane_base[slot]), int(self._lanes[slot])
        span = slice(base, base + count)
        committed, observed = live.read(self._committed[span])
        new = committed != self._committed[span]
        if not sealed and not new.any() and (observed == self._observed[span]).all():
            return False
        if self._evictions.add_lost(live.info):
            self._log.remove(lambda log: self._evictions.split(log)[1])
        live.checked_rows = check_chunks(self._root, live.info, live.checked_rows, int(committed.max()))
        self._scan_live(slot, base + np.flatnonzero(new | sealed), committed, sealed)
        self._committed[span], self._observed[span] = committed, observed
        self._tables.infos[slot] = live.info
        self._live[slot] = live
        if sealed:
            self._sealed = self._sealed.copy()
            self._sealed[slot] = True
            del self._live[slot]
        return True

    def _scan_live(self, slot: int, at: NDArray[np.int64], committed: NDArray[np.int64], sealed: bool) -> None:
        """Take in what lanes of a live segment have published; ``at`` are their places among all lanes."""
        lanes, base = int(self._lanes[slot]), int(self._lane_base[slot])
        done = self._tables.leaves[layout.DONE]
        start, stop = self._open_start[at], committed[at - base]
        if not sealed:
            # Nearly all that is new is the middle of open episodes, without a flag.
            before = np.where(start < 0, stop, self._committed[at])
            flags = done.rows_of_lanes(slot, lanes, at - base, before, stop)
            wanted = start < 0
            if not wanted.any() and not flags.any():
                return
            wanted[np.searchsorted(np.cumsum(stop - before), np.flatnonzero(flags), "right")] = True
            at, start, stop = at[wanted], start[wanted], stop[wanted]
        if len(at):
            first = np.where(start < 0, self._committed[at], start)
            info, bounds = self._tables.infos[slot], (at - base, first, stop)
            if info is not None:
                read = read_lanes(self._root, info, *bounds, lambda: done.rows_of_lanes(slot, lanes, *bounds))
                self._take_in(at, first, read, sealed)

    def _take_sealed(self, segments: list[_Sealed]) -> None:
        """Take in whole sealed segments."""
        if not segments:
            return
        there = np.zeros(len(self._lanes), np.bool_)
        there[[segment.slot for segment in segments]] = True
        at = np.flatnonzero(there[self._lane_slot])
        committed = np.concatenate([segment.committed for segment in segments])
        flags = LaneFlags.concatenate([segment.flags for segment in segments])
        try:
            self._take_in(at, np.zeros_like(at), flags, True)
        except FormatError as error:  # of one of them the flags are damaged
            if len(segments) == 1:
                self._leave_out(segments[0].slot, error)
            else:
                for segment in segments:
                    self._take_sealed([segment])
            return
        self._committed[at] = self._observed[at] = committed
        self._sealed |= there

    def _take_in(self, at: NDArray[np.int64], first: NDArray[np.int64], flags: LaneFlags, sealed: bool) -> None:
        """Take in the rows of lanes from ``first`` on, each from the start of an episode on."""
        slot = self._lane_slot[at]
        lane = at - self._lane_base[slot]
        stretches = Stretch(slot + self._origin, self._lanes[slot], lane, first, flags.rows, np.full(len(at), sealed))
        found = scan(flags.flags, stretches, flags.gaps)
        self._open_start[at] = found.open_start
        self._open_end[at] = np.where(found.open_continues, OPEN | CONTINUES, OPEN)
        self._log.append(self._visible(found.ended))

    def _visible(self, episodes: Episodes) -> Episodes:
        return self._evictions.split(episodes)[0]

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _total_steps(self) -> int:
        lanes = np.flatnonzero(self._open_start >= 0)
        return self._log.steps + int((self._committed[lanes] - self._open_start[lanes]).sum())

    def _open_episodes(self) -> Episodes:
        at = np.flatnonzero((self._open_start >= 0) & (self._committed > self._open_start))
        slot, start = self._lane_slot[at], self._open_start[at]
        lanes = self._lanes[slot]
        lane = at - self._lane_base[slot]
        return Episodes(
            first=((slot + self._origin) << layout.POSITION_BITS) | (start * lanes + lane),
            stride=lanes,
            steps=self._committed[at] - start,
            obs_rows=self._observed[at] - start,
            end=self._open_end[at],
        )

    def _freeze(self) -> Snapshot:
        log, opened, words = self._log.view(), self._open_episodes(), self._words
        total = self._total_steps()
        horizon = int(words[layout.HORIZON]) if self._root.has_horizon else 0
        least = max(self._least, int(words[layout.FRONTIER]), horizon << layout.POSITION_BITS)
        # Below the first segment there is nothing; one may come back there, which what a rule has hidden never does.
        start = max(least, (self._origin + self._first) << layout.POSITION_BITS)
        frontier, hidden = self._frontier.find(log, self._log.generation, opened, total, start)
        if self._gone and frontier <= max(self._gone) << layout.POSITION_BITS | layout.POSITION_MASK:
            self._compact()
            return self._freeze()
        self._least = frontier if frontier > start else least
        return Snapshot(
            schema=self._root.schema,
            generation=self._log.generation,
            origin=self._origin,
            frontier=frontier,
            steps=total - hidden,
            lanes=self._lanes,
            lane_base=self._lane_base,
            sealed=self._sealed,
            committed=self._committed.copy(),
            observed=self._observed.copy(),
            log=log,
            open=opened,
            hidden=self._evictions.found,
            tables=self._tables,
        )
