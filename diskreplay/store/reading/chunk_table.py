"""Where the rows of each field are in memory: chunk files mapped or read when first needed, addresses in arrays."""

import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, ReplayError, SegmentGone
from diskreplay.folders import shown_paths
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.layout import split_range
from diskreplay.format.mapping import (
    MADV_HUGEPAGE,
    MADV_RANDOM,
    Mapping,
    MappingRefused,
    map_file,
    read_into,
    refuse_links,
)
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.ids import POSITION_BITS, POSITION_MASK, locate
from diskreplay.kernels.table import chosen
from diskreplay.store.reading import chunk_budget
from diskreplay.store.reading.arena import Piece

# Bytes. Rows as wide as this are read from disk page by page, by those who know which are needed: what lies around them
# is not wanted. Of narrower ones, whatever the system reads at a fault soon serves another.
WIDE_ROW = 1024

# Bytes of the largest chunk file that is read and not mapped. Only of sealed segments, which never change, and of
# narrow rows.
LARGEST_READ = 256 << 10

# The system may refuse a mapping, and then others leave, also of those needed with it: what is missing is opened again.
_ATTEMPTS = 8

LACKING = -1
"""In place of the binary logarithm of a chunk's rows: the segment has no such array."""

# Of so many rows a lane, on average, it is quicker to copy lane by lane.
_ROWS_A_LANE = 64


class ChunkTable:
    """The chunks of one array in all segments.

    ``first_chunk``, ``chunks`` and ``shift`` are by slot, `LACKING` the shift of a segment that has no such array;
    ``bases`` holds the address of each chunk that is mapped or
    read, and 0 for the others. Raw addresses may be used while ``holder`` is referenced. ``used`` says at which call of
    `chunk_budget.now` a chunk was asked for last, ``is_read`` whether it was read and not mapped.

    Concurrency: any thread. Arrays grow by replacement and never change what they say, but for an address filled in.
    """

    def __init__(self, tables: "ChunkTables", leaf: str) -> None:
        root = tables.root
        # No cycle: old tables, and what only they keep mapped, go with the last snapshot and not with the collector.
        self._tables: ChunkTables = weakref.proxy(tables)
        self.leaf = leaf
        array = root.blueprint.of([leaf]).arrays[leaf]
        self.dtype, self.shape = array.dtype, array.shape
        self.row_bytes = array.row_bytes
        self.wide = self.row_bytes >= WIDE_ROW
        self.first_chunk = np.zeros(0, np.int64)
        self.chunks = np.zeros(0, np.int64)
        self.shift = np.zeros(0, np.int64)
        self.bases = np.zeros(0, np.int64)
        self.used = np.zeros(0, np.int64)
        self.is_read = np.zeros(0, np.bool_)
        self.holder: dict[int, Mapping | Piece] = {}

    @property
    def lock(self) -> Any:
        """That of all tables of the store: while it is held, nothing leaves for what other threads map."""
        return self._tables.lock

    def add_slots(self, infos: list[SegmentInfo | None]) -> None:
        """Add segments with room for one chunk each; see `ChunkTables.add_slots`."""
        shifts = [self._shift(info) for info in infos]
        start = len(self.bases)
        self.shift = np.concatenate([self.shift, np.array(shifts, np.int64)])
        self.first_chunk = np.concatenate([self.first_chunk, start + np.arange(len(infos))])
        self.chunks = np.concatenate([self.chunks, np.ones(len(infos), np.int64)])
        self._add_places(np.zeros(len(infos), np.int64))

    def _shift(self, info: SegmentInfo | None) -> int:
        if info is None:
            return 0
        return info.chunk_rows[self.leaf].bit_length() - 1 if self.leaf in info.chunk_rows else LACKING

    def note_array(self, slot: int, info: SegmentInfo) -> None:
        """Note that a segment has got this array since it was added."""
        if self.shift[slot] == LACKING:
            shift = self.shift.copy()
            shift[slot] = self._shift(info)
            self.shift = shift

    def _add_places(self, bases: NDArray[np.int64]) -> None:
        self.used = np.concatenate([self.used, np.zeros(len(bases), np.int64)])
        self.is_read = np.concatenate([self.is_read, np.zeros(len(bases), np.bool_)])
        self.bases = np.concatenate([self.bases, bases])

    def ensure(
        self,
        slot: NDArray[np.int64],
        first_row: NDArray[np.int64],
        last_row: NDArray[np.int64],
        since: int = sys.maxsize,
    ) -> None:
        """Map or read every chunk that holds any of the rows ``first_row[i]`` to ``last_row[i]`` of ``slot[i]``.

        No chunk leaves for these that was asked for in the use of this number, or later: see `chunk_budget.now`. Raises
        SegmentGone where a segment has been evicted, FormatError where a chunk is missing or has the wrong size.
        """
        shift = self.shift[slot]
        first, last = first_row >> shift, last_row >> shift
        if self._has(slot, first, last):
            return
        with self._tables.lock:
            self._map(slot, first, last, since)

    def follow(self, slot: int, row: int) -> None:
        """Map the chunk of a row if the one before is mapped: who reads that soon reads this."""
        chunk = row >> int(self.shift[slot])
        if 0 < chunk <= int(self.chunks[slot]):
            before = self._place(slot, chunk - 1)  # first: see `addresses`
            if self.bases[before]:
                with suppress(ReplayError, OSError):  # who needs it will say so
                    self.ensure(*np.array([[slot], [row], [row]]))

    def _has(self, slot: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]) -> bool:
        """Whether these chunks are there, two of each slot at most; they count as used."""
        if (last >= self.chunks[slot]).any() or int((last - first).max(initial=0)) > 1:
            return False
        at = self.first_chunk[slot]
        self.used[at + first] = self.used[at + last] = chunk_budget.now()
        return bool(self.bases[at + first].all() and self.bases[at + last].all())

    def _map(self, slot: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64], since: int) -> None:
        most = int((last - first).max(initial=-1)) + 1
        keys = [slot << POSITION_BITS | np.minimum(first + number, last) for number in range(most)]
        every = np.unique(np.concatenate([slot[:0], *keys]))
        wanted = list(zip((every >> POSITION_BITS).tolist(), (every & POSITION_MASK).tolist(), strict=True))
        for s, chunk in wanted:
            self._extend(s, chunk + 1)
        use = chunk_budget.now()
        self.used[[self._place(*key) for key in wanted]] = use
        use = min(use, since)
        for attempt in range(_ATTEMPTS):
            missing = sorted(key for key in wanted if not self.bases[self._place(*key)])
            if not missing:
                return
            try:
                for key in missing:
                    self._open(*key, use, copy=attempt > 0)
            except MappingRefused:
                if attempt > 0:
                    raise
        raise MappingRefused(
            f"the system allows this process too few mappings for {len(wanted)} chunks of {self.leaf} at once; make "
            "stores with larger chunk_bytes, or allow it more (sysctl vm.max_map_count)"
        )

    def _open(self, slot: int, chunk: int, use: int, *, copy: bool) -> None:
        """Read or map a chunk; what was asked for before this use may leave for it. For `copy` see `_memory`."""
        piece = self._memory(slot, use, copy)
        if piece is None:
            chunk_budget.make_room(use)
        held = self._tables.open_chunk(slot, self.leaf, chunk, piece)
        if isinstance(held, Mapping):
            # What is read from disk through a narrow mapping comes in the largest pages there are: thousands of small
            # ones are more than the processor has room for, which takes a quarter of a small batch's time.
            held.advise(MADV_RANDOM if self.wide else MADV_HUGEPAGE)
        place = self._place(slot, chunk)
        self.is_read[place] = piece is not None
        self.holder[place] = held
        self.bases[place] = held.address

    def _memory(self, slot: int, use: int, copy: bool) -> Piece | None:
        """Return memory to read a chunk of a slot into, or None where it is to be mapped.

        Chunks that may still change are mapped always, large ones and wide rows unless `copy` says that there are too
        few mappings for what is needed at once.
        """
        info = self._tables.infos[slot]
        if info is None or not info.sealed:
            return None
        nbytes = info.chunk_nbytes(self.leaf)
        piece = None
        if not self.wide and nbytes <= LARGEST_READ:
            piece = chunk_budget.allocate(nbytes, use)
        if piece is None and copy:
            piece = chunk_budget.allocate_beyond_budget(nbytes, use)
        return piece

    def _place(self, slot: int, chunk: int) -> int:
        return int(self.first_chunk[slot]) + chunk

    def _extend(self, slot: int, chunks: int) -> None:
        """Give a slot room for more chunks, at the end: its old places are left to whoever still reads them."""
        have = int(self.chunks[slot])
        if chunks <= have:
            return
        room = max(chunks, 2 * have)
        old = int(self.first_chunk[slot])
        start = len(self.bases)
        self._add_places(np.concatenate([self.bases[old : old + have], np.zeros(room - have, np.int64)]))
        for column in self.used, self.is_read:
            column[start : start + have] = column[old : old + have]
        # A new dict: whoever uses the old places holds the old one, and only new places are released with their slot.
        moved = range(old, old + have)
        self.holder = {start + (p - old) if p in moved else p: mapping for p, mapping in self.holder.items()}
        # Replaced, not changed in place: a reader may hold the arrays. The start first, then the longer length.
        first_chunk, counts = self.first_chunk.copy(), self.chunks.copy()
        first_chunk[slot], counts[slot] = start, room
        self.first_chunk, self.chunks = first_chunk, counts
        # Another array over the same memory: who has seen the one before looks again, and finds the others too.
        self.bases = self.bases.view()

    def addresses(self) -> tuple[Any, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return ``holder``, ``chunks``, ``first_chunk`` and ``bases`` as of one moment.

        Another thread may be mapping chunks, so the order of reading matters: the holder first, which keeps alive what
        ``bases`` names; then the length of a slot's chunks, their start, the addresses, against the order in which a
        table that grows replaces them, so that what is read later reaches at least as far.
        """
        return self.holder, self.chunks, self.first_chunk, self.bases

    def release(self, places: NDArray[np.int64]) -> None:
        """Release the chunks at these places; those in use stay until their user drops ``holder``."""
        bases, holder = self.bases.copy(), self.holder.copy()
        bases[places] = 0
        for place in places.tolist():
            holder.pop(place, None)
        # In this order: see `addresses`.
        self.bases, self.holder = bases, holder

    def forget(self) -> None:
        """Release every chunk; those in use stay until their user drops ``holder``."""
        self.bases, self.holder = np.zeros_like(self.bases), {}

    def rows(self, slot: int, lanes: int, lane: int, first: int, stop: int) -> NDArray[Any]:
        """Return the rows ``[first, stop)`` of a lane, ``(stop - first, *shape)``; a view where one chunk has them."""
        if stop <= first:
            return np.zeros((0, *self.shape), self.dtype)
        # One thread at a time: another's chunks may need the room that these have just taken.
        with self._tables.lock:
            self.ensure(np.array([slot]), np.array([first]), np.array([stop - 1]))
            parts = self._blocks(slot, lanes, lane, first, stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rows_of_lanes(
        self, slot: int, lanes: int, lane: NDArray[np.int64], first: NDArray[np.int64], stop: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the rows ``[first[i], stop[i])`` of each ``lane[i]``, one lane after another."""
        filled = first < stop
        lane, first, stop = lane[filled], first[filled], stop[filled]
        count = stop - first
        if not len(count):
            return np.zeros((0, *self.shape), self.dtype)
        with self._tables.lock:
            self.ensure(np.full(len(lane), slot), first, stop - 1)
            if int(count.sum()) > _ROWS_A_LANE * len(lane):
                bounds = zip(lane.tolist(), first.tolist(), stop.tolist(), strict=True)
                return np.concatenate([part for bound in bounds for part in self._blocks(slot, lanes, *bound)])
            row = np.repeat(stop - np.cumsum(count), count) + np.arange(count.sum())
            return self.values(slot, lanes, np.repeat(lane, count), row)

    def values(self, slot: int, lanes: int, lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[Any]:
        """Return the value at each row of each lane of a segment."""
        out = np.empty((len(row), *self.shape), self.dtype)
        with self._tables.lock:
            self.ensure(np.full(len(row), slot), row, row)
            chunk, within = row >> self.shift[slot], row & ((1 << self.shift[slot]) - 1)
            for number in np.unique(chunk).tolist():
                here = chunk == number
                mapping = self.holder[self._place(slot, number)]
                block = mapping.array(self.dtype, (lanes, 1 << int(self.shift[slot]), *self.shape))
                out[here] = block[lane[here], within[here]]
        return out

    def priorities(self, ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number that this array, that of priorities, has of each step; NaN where there is none.

        ``lanes`` are those of the segments from number ``origin`` on.
        """
        found = np.empty(len(ids))
        if self._read_priorities(ids, origin, lanes, found) < 0:
            return found
        known, slots, _, _, row = locate(ids, origin, lanes)
        # One segment at a time, and one thread: a chunk may need the room that another has just taken.
        for slot in np.unique(slots[known]).tolist():
            here = np.flatnonzero((slots == slot) & known)
            some = np.full(len(here), np.nan)
            with self._tables.lock, suppress(SegmentGone):
                if self.shift[slot] != LACKING:
                    self.ensure(slots[here], row[here], row[here])
                self._read_priorities(ids[here], origin, lanes, some)
            found[here] = some
        found[~known] = np.nan
        return found

    def _read_priorities(
        self, ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64], out: NDArray[np.float64]
    ) -> int:
        """Call the kernel of this."""
        _held, chunks, first_chunk, bases = self.addresses()
        found: int = chosen("initial_priorities")(ids, origin, lanes, first_chunk, chunks, self.shift, bases, out)
        return found

    def _blocks(self, slot: int, lanes: int, lane: int, first: int, stop: int) -> list[NDArray[Any]]:
        rows, parts = 1 << int(self.shift[slot]), []
        for chunk, start, count in split_range(first, stop, rows):
            mapping = self.holder[self._place(slot, chunk)]
            block = mapping.array(self.dtype, (lanes, rows, *self.shape))
            if self.wide:
                mapping.will_need((lane * rows + start) * self.row_bytes, count * self.row_bytes)
            parts.append(block[lane, start : start + count])
        return parts


class ChunkTables:
    """The tables of all arrays of a store. All those of a process share what they may hold; see `chunk_budget`.

    Old snapshots keep the tables they were made with, so what they have mapped stays mapped after an eviction.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self.root, self._counters = root, counters
        # Segments that may still get priorities, by slot, and what had been counted when they were known to lack them.
        self._lacking, self._counted = set[int](), -1
        self.lock = threading.RLock()
        self.infos: list[SegmentInfo | None] = []
        self.leaves = {leaf: ChunkTable(self, leaf) for leaf in root.blueprint.arrays}
        chunk_budget.share(self)

    def reset_after_fork(self) -> None:
        """Release all in a forked child: what is evicted must not stay on disk because a child has it mapped."""
        self.lock = threading.RLock()  # another thread may have held it
        self.forget()

    @property
    def priorities(self) -> ChunkTable | None:
        """The table of the priorities that steps were appended with; None where no segment has this array.

        A segment may have got it since it was read. Its writer counts that before it publishes the first such row: so
        whoever has followed the row finds the array here.
        """
        counted = self._counters.peek(layout.SEALED)
        if counted != self._counted:
            with self.lock:
                for slot in sorted(self._lacking):
                    info = self.infos[slot]
                    with suppress(OSError, ReplayError):  # who reads its steps says what is wrong
                        self.note_info(slot, info and read_segment(self.root, info.number))
                self._counted = counted
        return self.leaves.get(layout.PRIORITY)

    def add_slots(self, infos: list[SegmentInfo | None]) -> None:
        """Add segments in the order of their numbers; None where one was evicted already."""
        with self.lock:
            start = len(self.infos)
            self.infos.extend(infos)
            for table in self.leaves.values():
                table.add_slots(infos)
            for slot, info in enumerate(infos, start):
                self.note_info(slot, info)
            self._counted = -1  # they were read before now

    def note_info(self, slot: int, info: SegmentInfo | None) -> None:
        """Take in the attributes of a segment, which may have got priorities; None: it is gone."""
        leaf = layout.PRIORITY
        with self.lock:
            self.infos[slot] = info
            has_priorities = info is not None and leaf in info.chunk_rows
            if has_priorities or info is None or info.sealed:
                self._lacking.discard(slot)
            else:
                self._lacking.add(slot)
            if has_priorities and leaf not in self.leaves:  # most stores never have them
                table = ChunkTable(self, leaf)
                table.add_slots(self.infos)
                self.leaves = {**self.leaves, leaf: table}  # another thread may go through the tables
            elif info is not None and has_priorities:
                self.leaves[leaf].note_array(slot, info)

    def follow(self, slot: int, row: int) -> None:
        """Map the chunks of a row of those arrays of which the chunk before is mapped."""
        for table in self.leaves.values():
            if table.shift[slot] != LACKING:
                table.follow(slot, row)

    def forget(self) -> None:
        """Release every chunk."""
        for table in self.leaves.values():
            table.forget()

    def without(self, slots: list[int]) -> "ChunkTables":
        """Return tables in which these slots are empty; everything else stays mapped, or in memory."""
        new = ChunkTables(self.root, self._counters)
        with self.lock:
            new.infos = list(self.infos)
            for slot in slots:
                new.infos[slot] = None
            new._lacking = self._lacking - {*slots}
            for leaf, table in self.leaves.items():
                copy = new.leaves[leaf] = ChunkTable(new, leaf)
                copy.shift, copy.chunks = table.shift, table.chunks
                copy.first_chunk, copy.bases = table.first_chunk, table.bases.copy()
                copy.used, copy.is_read = table.used.copy(), table.is_read.copy()
                copy.holder = dict(table.holder)
                for slot in slots:
                    for place in range(int(copy.first_chunk[slot]), int(copy.first_chunk[slot] + copy.chunks[slot])):
                        copy.bases[place] = 0
                        copy.holder.pop(place, None)
        return new

    @shown_paths()
    def open_chunk(self, slot: int, leaf: str, chunk: int, piece: Piece | None) -> Mapping | Piece:
        """Read one chunk file into memory, or map it where there is none; see `ChunkTable.ensure`."""
        info = self.infos[slot]
        if info is None:
            raise SegmentGone("the segment of these steps was evicted or set aside; draw again")
        path, nbytes = info.chunk_path(leaf, chunk), info.chunk_nbytes(leaf)
        parts = leaf.split("/")
        refuse_links(info.path, ("/".join(parts[: i + 1]) for i in range(len(parts))))
        try:
            if piece is None:
                return map_file(path, nbytes)
            read_into(path, nbytes, np.asarray(piece))
            return piece
        except FileNotFoundError:
            if not info.path.exists():
                raise SegmentGone(f"segment {info.number} was evicted or set aside; refresh and draw again") from None
            raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
