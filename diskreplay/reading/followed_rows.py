"""The rows that a reader follows: it reads the flags of each row once, to find episodes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diskreplay.errors import SegmentGone
from diskreplay.ids import CONTINUES, OPEN, POSITION_BITS, POSITION_MASK, EpisodeTable, Ints, locate
from diskreplay.kernels import following, hiding
from diskreplay.kernels.table import Kernel
from diskreplay.reading.chunk_table import ChunkTables
from diskreplay.reading.episode_log import Discards, EpisodeLog, Evictions
from diskreplay.reading.known_segments import KnownSegments
from diskreplay.reading.live_lanes import MANY_ROWS, CapacityFrontier, LiveLanes, LiveSegment, Segments
from diskreplay.reading.snapshot import SegmentTable, Snapshot
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.folder import Pack, lost_ids
from diskreplay.segments.segment import DAMAGE, SegmentInfo
from diskreplay.segments.segment_reader import (
    LaneFlags,
    LaneSlice,
    ParsedEpisodes,
    check_chunks,
    parse_episodes,
    read_lanes,
    read_sealed,
)

# The flags of several sealed segments are parsed together, about this many bytes at a time.
_AT_ONCE = 16 << 20


class _Sealed(NamedTuple):
    """The flags of one sealed segment, or of several segments of a pack."""

    slots: list[int]
    committed: Ints
    flags: LaneFlags


class FollowedRows:
    """The rows of all segments that a reader has followed, and their episodes. Used by one thread.

    ``newly_discarded`` has the discarded episodes that were found since the caller last emptied this list. ``lost`` is
    the number of steps of segments that turned out to be damaged or gone; the caller resets it to 0.
    """

    def __init__(
        self, root: Root, counters: StoreCounters, known: KnownSegments, kernel: Kernel, generation: int, is_timed: bool
    ) -> None:
        self._root, self._counters, self._known, self._is_timed = root, counters, known, is_timed
        self._leaves = [layout.DONE, layout.TIME] if is_timed else [layout.DONE]
        self.slots = known.slots
        self.tables = ChunkTables(root, counters)
        self.log = EpisodeLog(generation)
        self.evictions, self._discards = Evictions(root), Discards()
        self.newly_discarded: list[EpisodeTable] = []
        self._frontier = CapacityFrontier(root.limits.capacity, is_timed)
        self.live = LiveLanes(kernel, self.log, self._frontier, self._leaves)
        self._gone: list[int] = []  # deleted segments whose episodes are still in the log: see `drop`
        self.lost = 0
        self._segments: SegmentTable | None
        self.list_growing()

    @property
    def origin(self) -> int:
        return self.slots.origin

    @property
    def steps(self) -> int:
        return self.log.steps + self.slots.count_open()

    def list_growing(self) -> None:
        """Make a new table of the segments that may grow.

        Call this after an array with a value per segment or per lane was replaced or changed.
        """
        slots, tables, self._segments = self.slots, self.tables, None
        self._where = Segments(
            slots.origin, slots.lanes, slots.lane_base, slots.clocks, tables.folders, tables.first_rows
        )
        self.live.list_segments(slots.rows, self._where, tables)

    def release(self) -> None:
        self.live.segments.clear()
        self.list_growing()
        self.tables.forget()

    # --- new and deleted segments ------------------------------------------------------------------------------------

    def add(self, infos: list[SegmentInfo | None], packs: Sequence[Pack]) -> None:
        """Add new segments and packs; an element of ``infos`` is None if the segment is gone or is in a pack."""
        first_slot = len(self.slots.lanes)
        self._frontier.add_lanes(self.slots.add(infos, packs))
        self.tables.add_slots(infos, self.slots.lane_base, self.slots.rows.shape[1])
        self._read_new(infos, first_slot)
        for pack in packs:
            self._add_pack(pack, first_slot)
        self.list_growing()

    def _read_new(self, infos: list[SegmentInfo | None], first_slot: int) -> None:
        sealed: list[_Sealed] = []
        pending = 0
        for slot, info in enumerate(infos, first_slot):
            if info is None:
                continue
            try:
                if info.sealed:
                    self.evictions.add_lost(lost_ids(info))
                    sealed.append(_Sealed([slot], *read_sealed(info)))
                    pending += len(sealed[-1].flags.flags)
                else:
                    self.live.segments[slot] = LiveSegment(self._root, info.number)
                    self.evictions.add_lost(lost_ids(self.live.segments[slot].info))
            except DAMAGE as error:
                self.exclude(slot, error)
            if pending > _AT_ONCE:
                self._add_sealed(sealed)
                sealed, pending = [], 0
        self._add_sealed(sealed)

    def _add_pack(self, pack: Pack, first_new: int) -> None:
        """Add a pack, which has rows of known segments (in slots before ``first_new``) and of new segments."""
        slots = pack.numbers - self.slots.origin
        self.tables = self.tables.with_pack(slots, pack)
        self.slots.move(slots, pack)
        if self.evictions.add_lost(pack.lost_ids()):
            self.remove_evicted()
        self.list_growing()
        for member in np.flatnonzero(np.isin(slots, list(self.live.segments))).tolist():
            slot, committed = int(slots[member]), pack.rows_of(member)
            self._take_sealed(slot, committed, committed)
        if (new := np.flatnonzero(slots >= first_new)).size:
            try:
                self._add_sealed([_Sealed(slots[new].tolist(), *pack.read_flags(new))])
            except DAMAGE as error:
                self.exclude(int(slots[new[0]]), error)

    def exclude(self, slot: int, error: Exception) -> None:
        """Leave out a segment that is damaged or gone, and all segments of the same pack."""
        steps, folder = self.steps, int(self.slots.folder[slot])
        self._known.leave_out(folder, error)
        self.drop(np.flatnonzero((self.slots.folder == folder) & (self.slots.lanes > 0)).tolist())
        self.lost += steps - self.steps

    def drop(self, slots: list[int]) -> None:
        """Empty the slots of segments that are gone.

        If a limit hides all episodes of these segments, the episodes stay in the log until they are half of the log.
        Every sampler starts over when episodes leave the log. If any of the episodes is not hidden, all of them leave
        the log at once, because a new reader of the store would not find them.
        """
        if not slots:
            return
        gone = np.isin(self.slots.lane_slot, slots)
        if self._frontier.generation != self.log.generation:
            self._follow_log()
        places, open_start = self.slots.places_of(self.log.table), self.slots.rows[following.OPEN_START]
        self._frontier.drop(gone, self.log.table, places, open_start)
        open_start[gone] = -1
        self.slots.empty(slots)
        for slot in slots:
            self.live.segments.pop(slot, None)
        self.tables = self.tables.without(slots)
        self.list_growing()
        self._gone.extend(slot + self.slots.origin for slot in slots)
        for left_out in self.evictions, self._discards:
            left_out.forget(np.array(slots) + self.slots.origin)
        behind = np.isin(self.log.table.first >> POSITION_BITS, self._gone)
        words = self._counters.read()
        past = max(self._frontier.found[hiding.HIDDEN_BEFORE], int(max(words[layout.FRONTIER], words[layout.HORIZON])))
        is_hidden = not behind.any() or int(self.log.table.time[behind].max()) < past
        # Without times, readers could not tell which episodes of the log began after the hidden episodes.
        if not self._is_timed or not is_hidden or 2 * np.count_nonzero(behind) >= len(behind):
            self.log.remove(behind)
            self._gone = []

    def remove_evicted(self) -> None:
        self.log.remove(self.evictions.split(self.log.table)[1])

    # --- segments that may grow --------------------------------------------------------------------------------------

    @property
    def keeps_all_ended(self) -> bool:
        return self.evictions.has_none and not self._discards.waits

    def add_ended(self, end: int, steps: int) -> None:
        if self.evictions.has_none:
            self.log.extend_to(end, steps)
        else:
            new = EpisodeTable(self.log.reserve(0)[len(self.log) : end].copy())
            self.log.append(self.evictions.split(new)[0])

    def lanes_of(self, slot: int) -> tuple[int, Ints] | None:
        return self.tables.lanes_of(slot, self.slots.origin) if self.slots.lanes[slot] else None

    def published_rows(self, slot: int, lane: int) -> int:
        live = self.live.segments.get(slot)
        counted = self.slots.rows[following.COMMITTED, self.slots.span(slot)] if live is None else live.committed
        return int(counted[lane])

    def is_followed(self, slot: int, lane: int) -> bool:
        known, _, open_start, *_ = self.slots.rows[:, self.slots.span(slot).start + lane].tolist()
        return bool(known >= self.published_rows(slot, lane) and open_start < 0)

    def read_time(self, step_id: int) -> bool:
        slot, position = (step_id >> POSITION_BITS) - self.slots.origin, step_id & POSITION_MASK
        row, lane = divmod(position, int(self.slots.lanes[slot]))
        try:
            self.tables.leaf(layout.TIME).ensure(*np.array([[slot], [lane], [row], [row]]))
        except (SegmentGone, *DAMAGE) as error:
            self.exclude(slot, error)
            return False
        return True

    def prepare_segment(self, slot: int, is_damaged: bool) -> None:
        try:
            self._make_followable(slot, is_damaged)
        except (SegmentGone, *DAMAGE) as error:
            self.exclude(slot, error)

    def _make_followable(self, slot: int, is_damaged: bool) -> None:
        live, span = self.live.segments[slot], self.slots.span(slot)
        known = self.slots.rows[following.COMMITTED, span]
        committed, observed = live.read(known)
        new, most, before = committed - known, int(committed.max()), live.checked_rows
        self.live.set_checked(slot, check_chunks(live.info, before, most))
        if live.checked_rows > before:
            self.tables.follow(slot, most - 1)
        if is_damaged or int(new.max()) >= MANY_ROWS:
            self._parse_live(slot, span.start + np.flatnonzero(new), committed, False)  # raises if rows are damaged
            self.slots.set_rows(span, committed, observed)
        elif live.checked_rows == before:
            # If rows were checked above, their chunks are mapped later: the kernel stops at an unmapped chunk, and this
            # method is called again.
            lane = np.flatnonzero(new)
            for leaf in self._leaves:
                self.tables.leaf(leaf).ensure(np.full(len(lane), slot), lane, known[lane], committed[lane] - 1)

    def reread(self, slot: int) -> bool:
        """Read the new attributes of a segment in `live`, and return whether the segment is sealed."""
        before, live = self.live.segments[slot], LiveSegment(self._root, self.slots.origin + slot)
        if live.folder != before.folder:
            return False  # repair has replaced the folder, and will increment the counter CHANGES
        live.checked_rows = before.checked_rows
        if self.evictions.add_lost(lost_ids(live.info)):
            self.remove_evicted()
        if live.info.sealed:
            committed, observed = live.read(self.slots.rows[following.COMMITTED, self.slots.span(slot)])
            check_chunks(live.info, live.checked_rows, int(committed.max()))
            self._take_sealed(slot, committed, observed)
            self.slots.last[slot] = live.info.bounds[1]
        else:
            self.live.segments[slot] = live
        self.tables.note_info(slot, live.info)
        self.list_growing()
        return live.info.sealed

    def _take_sealed(self, slot: int, committed: Ints, observed: Ints) -> None:
        span = self.slots.span(slot)
        self._parse_live(slot, np.arange(span.start, span.stop), committed, True)
        self.slots.set_rows(span, committed, observed)
        self.slots.note_sealed(slot)
        del self.live.segments[slot]

    # --- new rows ----------------------------------------------------------------------------------------------------

    def _parse_live(self, slot: int, at: Ints, committed: Ints, sealed: bool) -> None:
        """Find the episodes in the new rows of some lanes of a segment.

        Lane i of the segment has ``committed[i]`` rows. ``at`` has the places of the chosen lanes among all lanes.
        """
        base, info = int(self.slots.lane_base[slot]), self.tables.info(slot)
        if not len(at) or info is None:
            return
        start, stop = self.slots.rows[following.OPEN_START, at], committed[at - base]
        first = np.where(start < 0, self.slots.rows[following.COMMITTED, at], start)
        done, bounds = self.tables.leaf(layout.DONE), (at - base, first, stop)
        read = read_lanes(info, *bounds, lambda: done.rows_of_lanes(slot, *bounds))
        self._add_rows(at, first, read, sealed)

    def _add_sealed(self, segments: list[_Sealed]) -> None:
        if not segments:
            return
        there = np.zeros(len(self.slots.lanes), np.bool_)
        there[[slot for segment in segments for slot in segment.slots]] = True
        at = np.flatnonzero(there[self.slots.lane_slot])
        committed = np.concatenate([segment.committed for segment in segments])
        flags = LaneFlags.concatenate([segment.flags for segment in segments])
        try:
            self._add_rows(at, np.zeros_like(at), flags, True)
        except (SegmentGone, *DAMAGE) as error:
            if len(segments) == 1:
                self.exclude(segments[0].slots[0], error)
            else:
                for segment in segments:
                    self._add_sealed([segment])
            return
        self.slots.set_rows(at, committed, committed)
        self.slots.sealed |= there

    def _add_rows(self, at: Ints, first: Ints, flags: LaneFlags, sealed: bool) -> None:
        """Add the episodes of some lanes to the log.

        ``at`` has the places of the lanes among all lanes. ``flags`` has the flags of the i-th lane from row
        ``first[i]`` on. An episode starts at this row.
        """
        slots = self.slots
        slot = slots.lane_slot[at]
        lane, lanes = at - slots.lane_base[slot], slots.lanes[slot]
        slices = LaneSlice(slot + slots.origin, lanes, lane, first, flags.rows, np.full(len(at), sealed))
        found = parse_episodes(flags.flags, slices, flags.gaps)
        if self._is_timed:
            self._set_times(found, at)
        slots.rows[following.OPEN_START, at] = found.open_start
        slots.rows[following.OPEN_END, at] = np.where(found.open_continues, OPEN | CONTINUES, OPEN)
        self.log.append(self.evictions.split(found.ended)[0])

    def _set_times(self, found: ParsedEpisodes, at: Ints) -> None:
        slots = self.slots
        place, row = slots.places_of(found.ended), (found.ended.first & POSITION_MASK) // found.ended.stride
        still_open = found.open_start >= 0
        place, row = np.append(place, at[still_open]), np.append(row, found.open_start[still_open])
        slot = slots.lane_slot[place]
        times = self.tables.leaf(layout.TIME).values(slot, place - slots.lane_base[slot], row) + slots.clocks[slot]
        found.ended.time[:] = times[: len(found.ended)]
        slots.rows[following.OPEN_TIME, at[still_open]] = times[len(found.ended) :]

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, record: Ints, total: int) -> Snapshot:
        """Return a snapshot with this record (see `kernels.frozen`); ``total`` counts visible and hidden steps."""
        frontier, segments = self._frontier, self._segments
        assert segments is not None
        found = frontier.found
        steps, reached, until = total - found[hiding.HIDDEN], found[hiding.REACHED], found[hiding.HIDDEN_BEFORE]
        if segments.discarded_steps:
            discarded = self._discards.episodes
            steps -= int((discarded.steps - frontier.hidden_of(discarded, self.slots.places_of(discarded))).sum())
        return Snapshot(segments, steps, record, self.slots.rows, self.log.table, frontier.oldest, reached, until)

    def segment_table(self) -> SegmentTable:
        found = self._discards.follow(self.log, self.evictions, self)
        if len(found):
            self.newly_discarded.append(found)
        if self._frontier.generation != self.log.generation:
            self._follow_log()
        segments, generation = self._segments, self.log.generation
        evictions = self._discards.with_evicted(self.evictions.found)
        if segments is not None and segments.evictions is evictions and segments.generation == generation:
            return segments
        self._segments = segments = SegmentTable.of(
            self.live.growing,
            schema=self._root.schema,
            tables=self.tables,
            sealed=self.slots.sealed,
            evictions=evictions,
            discarded_steps=int(self._discards.episodes.steps.sum()),
            generation=generation,
            **self._where._asdict(),
        )
        return segments

    def _follow_log(self) -> None:
        self._frontier.follow(self.log, self.slots.places_of(self.log.table), self.slots.rows[following.OPEN_START])


def steps_not_shown(episodes: EpisodeTable, shown: Snapshot) -> int:
    counts = np.zeros(len(episodes), np.int64)
    there, slot, _, lane, row = locate(episodes.first, shown.origin, shown.lanes)
    counts[there] = shown.committed_rows(slot[there], lane[there]) - row[there]
    return int((episodes.steps - np.clip(counts, 0, episodes.steps)).sum())
