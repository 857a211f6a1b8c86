"""From files to snapshots: which segments there are, how far they reach, which episodes they hold."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.ids import CONTINUES, OPEN, POSITION_BITS, POSITION_MASK, EpisodeTable, Ints, locate
from diskreplay.kernels import following as rows, hiding
from diskreplay.kernels.advance import advance
from diskreplay.kernels.advance_hiding import advance_hiding
from diskreplay.kernels.huge_pages import give_back_free
from diskreplay.kernels.table import Kernel
from diskreplay.reading.capacity_frontier import CapacityFrontier, Segments
from diskreplay.reading.chunk_table import ChunkTables
from diskreplay.reading.episode_log import Discards, EpisodeLog, Evictions
from diskreplay.reading.folder import Pack
from diskreplay.reading.known_segments import DAMAGE, MOST_SLOTS, KnownSegments
from diskreplay.reading.live_lanes import MANY_ROWS, LiveLanes, LiveSegment, Slots
from diskreplay.reading.snapshot import SegmentTable, Snapshot
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.machine import clock_ns, this_clock
from diskreplay.segments.files.numbers import present_segments, segment_numbers
from diskreplay.segments.packs import merged_numbers, read_tables
from diskreplay.segments.parse_episodes import LaneSlice, ParsedEpisodes, parse_episodes
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.segment_reader import LaneFlags, check_chunks, read_lanes, read_pack, read_sealed

# Bytes of flags of sealed segments that are parsed together.
_AT_ONCE = 16 << 20
# Seconds after which segments are checked though no counter says that one was sealed: who sealed it may have died.
_CHECK_EVERY_S = 1.0
# Each means that segments were put into a pack between two looks at the store.
_ATTEMPTS = 100

# Undecorated, until numba is needed anyway.
_PLAIN: dict[str, Kernel] = {"advance": advance, "advance_hiding": advance_hiding}


class _Merged(Exception):
    """Segments were put into a pack while they were read, or returned: what was taken in is not known."""


class _Sealed(NamedTuple):
    """The places of sealed segments, and what `read_sealed` found in one, or `read_pack` in several."""

    slots: list[int]
    committed: Ints
    flags: LaneFlags


class Follower:
    """Follows a store on disk and makes snapshots of it.

    A segment that cannot be read is left out, with a warning unless ``warns`` is false; `damaged` says which are.

    Concurrency: any thread; one refreshes at a time. It writes nothing and takes no lock on disk.
    """

    def __init__(self, root: Root, counters: StoreCounters, warns: bool = True) -> None:
        self._root, self._counters, self._warns = root, counters, warns
        self._lock = threading.Lock()
        self._generation = 0
        self._least = layout.MAX_SEGMENTS  # the lowest number of a segment that is in a pack, where that is known
        self._kernel: Callable[[str], Kernel] = _PLAIN.__getitem__
        self._begin()

    def _begin(self) -> None:
        """Start from nothing, again where segments were put into packs meanwhile."""
        for _ in range(_ATTEMPTS):
            try:
                return self._reset()
            except _Merged:
                self._generation += 1
        self._reset()

    def follow_with(self, kernel: Callable[[str], Kernel]) -> None:
        """Use compiled kernels: ``kernel(name)``."""
        kernel(self.kernel_name)  # which takes seconds where it was not compiled yet: others may refresh meanwhile
        with self._lock:
            self._kernel = kernel
            self._live.follow_with(kernel(self.kernel_name))

    @property
    def kernel_name(self) -> str:
        """The kernel that it follows with, compiled or not."""
        return "advance_hiding" if self._is_timed else "advance"

    def _reset(self) -> None:
        """Start from nothing, and read the store."""
        self._words = self._counters.read()
        # What leaves one by one leaves in the order of time: without, nobody asks when a step was published. What a
        # limit of former times has hidden stays so.
        self._limits = replace(self._root.limits)
        self._is_timed = self._limits.are_set or bool(self._words[[layout.FRONTIER, layout.HORIZON]].any())
        self._leaves = [layout.DONE, layout.TIME] if self._is_timed else [layout.DONE]
        self._raw = b""
        self._broken = False
        self._known = KnownSegments(self._root, self._counters, self._warns)
        self._slots = Slots(min(self._known.lowest(), self._least))
        self._until = 0  # what was published before is hidden, by what the counters say
        self._lost = 0  # steps of segments that turned out to be damaged in this refresh
        self._tables = ChunkTables(self._root, self._counters)
        self._log = EpisodeLog(self._generation)
        self._frontier = CapacityFrontier(self._limits.capacity, self._is_timed)
        self._live = LiveLanes(self._kernel(self.kernel_name), self._log, self._frontier, self._leaves)
        self._segments: SegmentTable | None
        self._clock = this_clock()  # what the newest segments of this boot have in its place
        self._list_growing()
        self._next_check_at = 0.0
        self._evictions, self._discards = Evictions(self._root), Discards()
        self._newly_discarded: list[EpisodeTable] = []  # found by this refresh
        self.snapshot: Snapshot
        self._gone: list[int] = []  # evicted segments whose episodes are still in the log
        self._update(force=True)
        # Of tables that grew part by part: half as much again.
        give_back_free(max(len(self._log), len(self._slots.lanes)))

    @property
    def damaged(self) -> dict[int, str]:
        """What is wrong with each segment that is left out, by number."""
        return self._known.damaged

    @property
    def origin(self) -> int:
        """The number of the first segment."""
        return self._slots.origin

    def reset_after_fork(self) -> None:
        """Start over at the next refresh, in a forked child: another thread may have been in the middle of one."""
        self._broken = self._broken or self._lock.locked()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release every mapping; arrays over them, and batches being gathered, keep what they use."""
        with self._lock:
            self._broken = True  # what would refresh after an interrupt of this starts over
            self._live.segments.clear()
            self._list_growing()
            self._tables.forget()

    def refresh(self) -> tuple[Snapshot, int]:
        """Refresh; return a snapshot, and how many steps became visible since the one before, evicted ones aside."""
        with self._lock:
            try:
                if not self._broken:
                    try:  # and not suppress(), which takes as long as to find that nothing has changed
                        arrived = self._update(force=False)
                        return self.snapshot, arrived
                    except _Merged:
                        pass
                before = 0 if self._broken else len(self.snapshot)
                self._generation = self._log.generation + 1
                self._begin()
                return self.snapshot, max(0, len(self.snapshot) - before)
            except BaseException as error:
                # Interrupted halfway: what was taken in already is not known, so the next refresh starts over.
                self._broken = True
                self._root.explain(error)
                raise

    def _update(self, *, force: bool) -> int:
        raw = self._counters.raw()
        if raw == self._raw and not (force or self._live.segments or self._limits.max_age_s is not None):
            return 0  # a store at rest, which is asked at every batch
        changed, arrived = force, 0
        if force or raw != self._raw:
            self._raw = raw
            words = self._counters.read()
            is_rearranged = not force and bool(words[layout.CHANGES] != self._words[layout.CHANGES])
            if is_rearranged:
                self._root.follow_limits()
            if is_rearranged and (self._limits != self._root.limits or self._has_returned()):
                raise _Merged
            changed = changed or bool((words != self._words).any())
            if changed:
                arrived = self._follow_counters(words, is_rearranged)
        steps, self._lost = self._log.steps + self._live.open_steps, 0
        if changed or time.monotonic() >= self._next_check_at:
            changed |= self._add_newly_sealed()
        until = self._until
        if self._limits.max_age_s is not None:
            # By the clock that the newest segments have.
            until = max(until, clock_ns() + self._clock.wall - int(self._limits.max_age_s * 1e9))
        record = self._live.advance(changed, until, self)
        total = self._log.steps + self._live.open_steps
        if self._newly_discarded:
            arrived -= 0 if force else self._never_shown(EpisodeTable.concatenate(self._newly_discarded))
            self._newly_discarded = []
        if record is not None:
            self.snapshot = self._snapshot_of(record, total)
        return arrived + total - steps + self._lost

    def _follow_log(self) -> None:
        self._frontier.follow(self._log, self._slots.places_of(self._log.table), self._slots.rows[rows.OPEN_START])

    def _follow_counters(self, words: Ints, is_rearranged: bool) -> int:
        """Take in segments that came and went, and evictions; return how many steps came."""
        steps = self._total_steps()
        self._add_segments(int(words[layout.NEXT_SEGMENT]))
        arrived = self._total_steps() - steps
        gone = [layout.STEPS_EVICTED, layout.FIRST_LIVE, layout.CHANGES, layout.HORIZON]
        if (words[gone] != self._words[gone]).any():
            self._drop_gone(everywhere=is_rearranged)
        if self._evictions.read(int(words[layout.EVICTION_ENTRIES])):  # by hand
            self._log.remove(self._evictions.split(self._log.table)[1])
            self._list_growing()  # for `keeps_all_ended`
        self._words = words
        if self._is_timed:
            self._until = int(max(words[layout.FRONTIER], words[layout.HORIZON]))
        self._live.open_steps = self._total_steps() - self._log.steps
        return arrived

    # --- segments that come and go -----------------------------------------------------------------------------------

    def _add_segments(self, end: int) -> None:
        start = self._slots.end
        there = segment_numbers(self._root, start, end)
        if not there:
            if start < end and self._merged_since(end):
                raise _Merged
            return
        slots = there[-1] + 1 - start
        if slots + len(self._slots.lanes) > MOST_SLOTS:
            raise FormatError(f"{self._root.path} has segments {there[0]} to {there[-1]}; restore its counters")
        infos: list[SegmentInfo | None] = [None] * slots
        for number in there:
            infos[number - start] = self._known.read(number)
        packs = self._find_packs(infos)
        first_slot = len(self._slots.lanes)
        self._frontier.add_lanes(self._slots.add(infos, packs))
        self._tables.add_slots(infos, self._slots.lane_base, self._slots.rows.shape[1])
        every = [info.clock for info in [*infos, *(pack.info for pack in packs)] if info is not None]
        self._clock = next((clock for clock in reversed(every) if clock.boot == self._clock.boot), self._clock)
        self._read_new(infos, first_slot)
        for pack in packs:
            self._add_pack(pack, first_slot)
        self._list_growing()

    def _read_new(self, infos: list[SegmentInfo | None], first_slot: int) -> None:
        """Take in new sealed segments, many at a time, and note those that may grow."""
        sealed: list[_Sealed] = []
        pending = 0
        for slot, info in enumerate(infos, first_slot):
            if info is None:
                continue
            try:
                if info.sealed:
                    self._evictions.add_lost(info)
                    sealed.append(_Sealed([slot], *read_sealed(info)))
                    pending += len(sealed[-1].flags.flags)
                else:
                    self._live.segments[slot] = LiveSegment(self._root, info.number)
                    self._evictions.add_lost(self._live.segments[slot].info)
            except DAMAGE as error:
                self._exclude(slot, error)
            if pending > _AT_ONCE:
                self._add_sealed(sealed)
                sealed, pending = [], 0
        self._add_sealed(sealed)

    def _find_packs(self, infos: list[SegmentInfo | None]) -> list[Pack]:
        """Return the packs among segments that are new, lowest number first, and leave out what they stand for."""
        start, found, taken = self._slots.end, list[Pack](), set[int]()
        for at in range(len(infos) - 1, -1, -1):
            info = infos[at]
            if info is None or info.packed is None:
                continue
            infos[at] = None
            if at + start in taken:
                continue
            try:
                pack = Pack(info, read_tables(info))
            except DAMAGE as error:
                self._note_damage(at + start, error)
                continue
            numbers = pack.tables.numbers.tolist()
            if taken.isdisjoint(numbers):  # else it was merged into another one
                found.append(pack)
                taken.update(numbers)
        if taken and min(taken) < self._slots.origin:
            self._least = min(taken)
            raise _Merged
        for number in taken:
            if number >= start:
                infos[number - start] = None
            elif self._slots.lanes[number - self._slots.origin] == 0:
                raise _Merged  # it had left, or could not be read
        end = start + len(infos)
        if any(start <= n < end and infos[n - start] is None and n not in taken for n in self._merged_since(end)):
            raise _Merged  # it was gone before it was read
        return found[::-1]

    def _add_pack(self, pack: Pack, first_new: int) -> None:
        """Take in a pack: the segments of it that are known are read from it from now on, the others are new."""
        tables, info = pack.tables, pack.info
        slots = tables.numbers - self._slots.origin
        self._tables = self._tables.with_pack(slots, pack)
        self._slots.move(slots, pack)
        if self._evictions.add_lost(info, tables):
            self._log.remove(self._evictions.split(self._log.table)[1])
        self._list_growing()
        for member in np.flatnonzero(np.isin(slots, list(self._live.segments))).tolist():
            slot, committed = int(slots[member]), tables.rows[tables.runs_of(member)]
            self._take_sealed(slot, committed, committed)
        if (new := np.flatnonzero(slots >= first_new)).size:
            try:
                self._add_sealed([_Sealed(slots[new].tolist(), *read_pack(info, tables, new))])
            except DAMAGE as error:
                self._exclude(int(slots[new[0]]), error)

    def _exclude(self, slot: int, error: Exception) -> None:
        """Go on without a segment that is damaged or gone."""
        steps, folder = self._total_steps(), int(self._slots.folder[slot])
        self._note_damage(folder, error)
        self._drop(np.flatnonzero((self._slots.folder == folder) & (self._slots.lanes > 0)).tolist())
        self._lost += steps - self._total_steps()

    def _note_damage(self, number: int, error: Exception) -> None:
        """Note that a segment cannot be read. Raises _Merged where it may be in a pack by now."""
        self._check_merged([number])
        self._known.note_damage(number, error)

    def _check_merged(self, gone: Iterable[int]) -> None:
        """Raise _Merged where one of these segments, or packs, is gone and its rows are in a pack that is not known."""
        missing = [number for number in gone if not os.path.lexists(self._root.segment_path(number))]
        if missing and (merged := self._merged_since(self._slots.end)):
            slots = np.flatnonzero(np.isin(self._slots.folder, missing))
            if not merged.isdisjoint((slots + self._slots.origin).tolist()):
                raise _Merged

    def _merged_since(self, first: int) -> set[int]:
        """Return the segments that are in packs from number ``first`` on."""
        return merged_numbers(self._root, first) if self._counters.peek(layout.NEXT_SEGMENT) > first else set()

    def _has_returned(self) -> bool:
        """Whether a segment is there that was not, or is another one than it was."""
        infos = [folder.info for folder in self._tables.known if folder is not None]
        known: dict[int, Identity | int] = {info.number: info.document for info in infos}
        known |= {slot + self._slots.origin: live.folder for slot, live in self._live.segments.items()}
        stop = self._slots.end
        return bool(self._known.damaged) or self._known.has_other(self._slots.origin, stop, known)

    def _drop_gone(self, *, everywhere: bool) -> None:
        """Release the segments that retention takes out; ``everywhere``: and others whose folder is gone."""
        words = self._counters.read()
        horizon = int(words[layout.HORIZON]) if self._root.has_horizon else 0
        known = np.flatnonzero(self._slots.lanes)
        below = known[self._slots.last[known] < horizon]
        if not (self._limits.max_age_s is not None or words[layout.EVICTION_ENTRIES] or everywhere):
            # Only those of which nobody knows whether they were sealed before they were gone.
            known = known[~self._slots.sealed[known] & ~np.isin(known, list(self._live.segments))]
        numbers = np.unique(self._slots.folder[known]).tolist()
        gone = set(numbers) - set(present_segments(self._root, numbers))
        self._check_merged(gone)
        self._drop(np.union1d(below, known[np.isin(self._slots.folder[known], list(gone))]).tolist())

    def _drop(self, slots: list[int]) -> None:
        """Empty slots.

        Their episodes stay in the log, hidden, until they are half of it: a new log costs every sampler a new start.
        Episodes that no limit hides do not stay: a reader that begins now has no trace of them, and must agree.
        """
        if not slots:
            return
        gone = np.isin(self._slots.lane_slot, slots)
        if self._frontier.generation != self._log.generation:
            self._follow_log()
        places, open_start = self._slots.places_of(self._log.table), self._slots.rows[rows.OPEN_START]
        self._frontier.drop(gone, self._log.table, places, open_start)
        open_start[gone] = -1
        self._slots.empty(slots)
        for slot in slots:
            self._live.segments.pop(slot, None)
        self._tables = self._tables.without(slots)
        self._list_growing()
        self._gone.extend(slot + self._slots.origin for slot in slots)
        for left_out in self._evictions, self._discards:
            left_out.forget(np.array(slots) + self._slots.origin)
        behind = np.isin(self._log.table.first >> POSITION_BITS, self._gone)
        words = self._counters.read()
        past = max(self._frontier.hidden_before, int(max(words[layout.FRONTIER], words[layout.HORIZON])))
        is_hidden = not behind.any() or int(self._log.table.time[behind].max()) < past
        # Without times, nobody could tell which episodes began after those that are gone.
        if not self._is_timed or not is_hidden or 2 * np.count_nonzero(behind) >= len(behind):
            self._log.remove(behind)
            self._gone = []

    # --- rows that come ----------------------------------------------------------------------------------------------

    def _list_growing(self) -> None:
        """List the segments that may grow, after any array of segments or lanes was replaced or changed."""
        tables, self._segments = self._tables, None
        where = tables.folders, tables.first_rows
        self._where = Segments(self._slots.origin, self._slots.lanes, self._slots.lane_base, self._slots.clocks, *where)
        self._live.list_segments(self._slots.rows, self._where, tables)

    @property
    def keeps_all_ended(self) -> bool:
        """Whether no episode that ends is one that was evicted, lost, or part of a discarded one."""
        return self._evictions.has_none and not self._discards.waits

    def add_ended(self, end: int, steps: int) -> None:
        """Add the lines behind the log to it, up to ``end``, but for episodes that were evicted or lost."""
        if self._evictions.has_none:
            self._log.extend_to(end, steps)
        else:
            new = EpisodeTable(self._log.reserve(0)[len(self._log) : end].copy())
            self._log.append(self._evictions.split(new)[0])

    def _never_shown(self, episodes: EpisodeTable) -> int:
        """Count the steps of episodes that the last snapshot does not have."""
        before, shown = self.snapshot, np.zeros(len(episodes), np.int64)
        there, slot, _, lane, row = locate(episodes.first, before.origin, before.lanes)
        shown[there] = before.committed_rows(slot[there], lane[there]) - row[there]
        return int((episodes.steps - np.clip(shown, 0, episodes.steps)).sum())

    def lanes_of(self, slot: int) -> tuple[int, Ints] | None:
        """Return the writer of a segment and the numbers of its lanes; None: it is gone."""
        return self._tables.lanes_of(slot, self._slots.origin) if self._slots.lanes[slot] else None

    def published_rows(self, slot: int, lane: int) -> int:
        """Return how many rows of a lane are published."""
        live = self._live.segments.get(slot)
        counted = self._slots.rows[rows.COMMITTED, self._slots.span(slot)] if live is None else live.committed
        return int(counted[lane])

    def is_followed(self, slot: int, lane: int) -> bool:
        """Tell whether all that is published of a lane is in the log."""
        known, _, open_start, *_ = self._slots.rows[:, self._slots.span(slot).start + lane].tolist()
        return bool(known >= self.published_rows(slot, lane) and open_start < 0)

    def read_time(self, step_id: int) -> bool:
        """Map the time of a step, or go on without its segment; tell whether it is mapped."""
        slot, position = (step_id >> POSITION_BITS) - self._slots.origin, step_id & POSITION_MASK
        row, lane = divmod(position, int(self._slots.lanes[slot]))
        try:
            self._tables.leaves[layout.TIME].ensure(*np.array([[slot], [lane], [row], [row]]))
        except (SegmentGone, *DAMAGE) as error:
            self._exclude(slot, error)
            return False
        return True

    def prepare_segment(self, slot: int, is_damaged: bool) -> None:
        """See to it that the rows of a live segment can be followed, or go on without it; it may seem to be damaged."""
        try:
            self._make_followable(slot, is_damaged)
        except (SegmentGone, *DAMAGE) as error:
            self._exclude(slot, error)

    def _make_followable(self, slot: int, is_damaged: bool) -> None:
        live, span = self._live.segments[slot], self._slots.span(slot)
        known = self._slots.rows[rows.COMMITTED, span]
        committed, observed = live.read(known)
        new, most, before = committed - known, int(committed.max()), live.checked_rows
        self._live.set_checked(slot, check_chunks(live.info, before, most))
        if live.checked_rows > before:
            self._tables.follow(slot, most - 1)
        if is_damaged or int(new.max()) >= MANY_ROWS:
            self._parse_live(slot, span.start + np.flatnonzero(new), committed, False)  # which names the damage
            self._slots.rows[rows.COMMITTED, span], self._slots.rows[rows.OBSERVED, span] = committed, observed
        elif live.checked_rows == before:  # else that was all, most often: what is not mapped is asked for next
            lane = np.flatnonzero(new)
            for leaf in self._leaves:
                self._tables.leaves[leaf].ensure(np.full(len(lane), slot), lane, known[lane], committed[lane] - 1)

    def _add_newly_sealed(self) -> bool:
        """Take in segments that were sealed since, the newest first; tell whether there are any."""
        self._next_check_at = time.monotonic() + _CHECK_EVERY_S
        changed = False
        for slot in sorted(self._live.segments, reverse=True):
            try:
                if self._live.segments[slot].may_be_sealed():
                    changed |= self._reread(slot)
            except (SegmentGone, *DAMAGE) as error:
                self._exclude(slot, error)
                changed = True
        return changed

    def _reread(self, slot: int) -> bool:
        """Read the document of a live segment that was replaced; tell whether it is sealed."""
        before, live = self._live.segments[slot], LiveSegment(self._root, self._slots.origin + slot)
        if live.folder != before.folder:
            return False  # replaced by repair, which is about to count a change
        live.checked_rows = before.checked_rows
        span = self._slots.span(slot)
        if self._evictions.add_lost(live.info):
            self._log.remove(self._evictions.split(self._log.table)[1])
        if live.info.sealed:
            committed, observed = live.read(self._slots.rows[rows.COMMITTED, span])
            check_chunks(live.info, live.checked_rows, int(committed.max()))
            self._take_sealed(slot, committed, observed)
            self._slots.last[slot] = live.info.bounds[1]
        else:
            self._live.segments[slot] = live
        self._tables.note_info(slot, live.info)
        self._list_growing()
        return live.info.sealed

    def _take_sealed(self, slot: int, committed: Ints, observed: Ints) -> None:
        """Take in the rest of a live segment that is sealed now."""
        span = self._slots.span(slot)
        self._parse_live(slot, np.arange(span.start, span.stop), committed, True)
        self._slots.rows[rows.COMMITTED, span], self._slots.rows[rows.OBSERVED, span] = committed, observed
        self._slots.note_sealed(slot)
        del self._live.segments[slot]

    def _parse_live(self, slot: int, at: Ints, committed: Ints, sealed: bool) -> None:
        """Take in what lanes of a live segment have published; ``at`` are their places among all lanes."""
        base, info = int(self._slots.lane_base[slot]), self._tables.info(slot)
        if not len(at) or info is None:
            return
        start, stop = self._slots.rows[rows.OPEN_START, at], committed[at - base]
        first = np.where(start < 0, self._slots.rows[rows.COMMITTED, at], start)
        done, bounds = self._tables.leaves[layout.DONE], (at - base, first, stop)
        read = read_lanes(info, *bounds, lambda: done.rows_of_lanes(slot, *bounds))
        self._add_rows(at, first, read, sealed)

    def _add_sealed(self, segments: list[_Sealed]) -> None:
        """Take in whole sealed segments."""
        if not segments:
            return
        there = np.zeros(len(self._slots.lanes), np.bool_)
        there[[slot for segment in segments for slot in segment.slots]] = True
        at = np.flatnonzero(there[self._slots.lane_slot])
        committed = np.concatenate([segment.committed for segment in segments])
        flags = LaneFlags.concatenate([segment.flags for segment in segments])
        try:
            self._add_rows(at, np.zeros_like(at), flags, True)
        except (SegmentGone, *DAMAGE) as error:  # of one of them flags or times are damaged or gone
            if len(segments) == 1:
                self._exclude(segments[0].slots[0], error)
            else:
                for segment in segments:
                    self._add_sealed([segment])
            return
        self._slots.rows[rows.COMMITTED, at] = self._slots.rows[rows.OBSERVED, at] = committed
        self._slots.sealed |= there

    def _add_rows(self, at: Ints, first: Ints, flags: LaneFlags, sealed: bool) -> None:
        """Take in the rows of lanes from ``first`` on, each from the start of an episode on."""
        slots = self._slots
        slot = slots.lane_slot[at]
        lane, lanes = at - slots.lane_base[slot], slots.lanes[slot]
        slices = LaneSlice(slot + slots.origin, lanes, lane, first, flags.rows, np.full(len(at), sealed))
        found = parse_episodes(flags.flags, slices, flags.gaps)
        if self._is_timed:
            self._set_times(found, at)
        slots.rows[rows.OPEN_START, at] = found.open_start
        slots.rows[rows.OPEN_END, at] = np.where(found.open_continues, OPEN | CONTINUES, OPEN)
        self._log.append(self._evictions.split(found.ended)[0])

    def _set_times(self, found: ParsedEpisodes, at: Ints) -> None:
        """Look up when the first steps of these episodes were published."""
        slots = self._slots
        place, row = slots.places_of(found.ended), (found.ended.first & POSITION_MASK) // found.ended.stride
        still_open = found.open_start >= 0
        place, row = np.append(place, at[still_open]), np.append(row, found.open_start[still_open])
        slot = slots.lane_slot[place]
        times = self._tables.leaves[layout.TIME].values(slot, place - slots.lane_base[slot], row) + slots.clocks[slot]
        found.ended.time[:] = times[: len(found.ended)]
        slots.rows[rows.OPEN_TIME, at[still_open]] = times[len(found.ended) :]

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def _total_steps(self) -> int:
        return self._log.steps + self._slots.count_open()

    def _snapshot_of(self, record: Ints, total: int) -> Snapshot:
        """Return the snapshot that has this record, of so many steps, some of which are hidden."""
        frontier, segments = self._frontier, self._segments
        assert segments is not None
        found = frontier.found
        steps, reached, until = total - found[hiding.HIDDEN], found[hiding.REACHED], frontier.hidden_before
        if segments.discarded_steps:
            discarded = self._discards.episodes
            steps -= int((discarded.steps - frontier.hidden_of(discarded, self._slots.places_of(discarded))).sum())
        return Snapshot(segments, steps, record, self._slots.rows, self._log.table, frontier.oldest, reached, until)

    def segment_table(self) -> SegmentTable:
        """Return the table of all segments, a new one where anything in it has changed."""
        found = self._discards.follow(self._log, self._evictions, self)
        if len(found):
            self._newly_discarded.append(found)
        if self._frontier.generation != self._log.generation:
            self._follow_log()
        segments, generation = self._segments, self._log.generation
        evictions = self._discards.with_evicted(self._evictions.found)
        if segments is not None and segments.evictions is evictions and segments.generation == generation:
            return segments
        self._segments = segments = SegmentTable.of(
            self._live.growing,
            schema=self._root.schema,
            tables=self._tables,
            sealed=self._slots.sealed,
            evictions=evictions,
            discarded_steps=int(self._discards.episodes.steps.sum()),
            generation=generation,
            **self._where._asdict(),
        )
        return segments
