"""Where the rows of each field are in memory: chunk files mapped or read when first needed, addresses in arrays."""

import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
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
from diskreplay.format.packs import PackTables, open_shard
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.format.shards import Shard
from diskreplay.ids import POSITION_BITS, POSITION_MASK, locate
from diskreplay.kernels.chunk_geometry import BITS, PLACES, WHOLE_LANE, apart
from diskreplay.kernels.frozen import places_of
from diskreplay.kernels.table import chosen
from diskreplay.store.reading import chunk_budget
from diskreplay.store.reading.arena import BLOCK_BYTES, Piece, zeros_piece
from diskreplay.store.reading.chunk_budget import DECOMPRESSED, IN_PACK, MAPPED, READ, Room
from diskreplay.store.reading.decompression import decompress, reads_no_disk
from diskreplay.store.reading.packed import Pack, find_pack, read_packed_chunk, rows_as_before, times_of

# Bytes. Rows as wide as this are read from disk page by page, by those who know which are needed: what lies around them
# is not wanted. Of narrower ones, whatever the system reads at a fault soon serves another.
WIDE_ROW = 1024

# Bytes of the largest chunk file that is read and not mapped. Only of sealed segments, which never change, and of
# narrow rows.
LARGEST_READ = 256 << 10

# The system may refuse a mapping, and then others leave, also of those needed with it: what is missing is opened again.
_ATTEMPTS = 8

LACKING = -1
"""In place of how a segment's rows are divided into chunks: it has no such array."""

# Of so many rows a lane, on average, it is quicker to copy lane by lane.
_ROWS_A_LANE = 64


class ChunkTable:
    """The chunks of one array in all segments.

    ``first_chunk``, ``chunks`` and ``shift`` are by slot; see `kernels.chunk_geometry` for the latter, which is
    `LACKING` where a segment has no such array. ``bases`` holds the address of each chunk that is mapped or
    read, and 0 for the others. Raw addresses may be used while ``holder`` is referenced. ``used`` says at which call of
    `chunk_budget.now` a chunk was asked for last, ``how`` how it is held.

    The lanes of all segments of a pack have places one behind the other; one mapping serves them all.

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
        self.how = np.zeros(0, np.uint8)
        self.holder: dict[int, Mapping | Piece] = {}

    @property
    def lock(self) -> Any:
        """That of all tables of the store: while it is held, nothing leaves for what other threads map."""
        return self._tables.lock

    def add_slots(self, infos: list[SegmentInfo | None]) -> None:
        """Add segments with room for one chunk each that is there; see `ChunkTables.add_slots`."""
        there = [at for at, info in enumerate(infos) if info is not None]
        shifts, chunks = np.zeros((2, len(infos)), np.int64)
        shifts[there], chunks[there] = [self._shift(infos[at]) for at in there], 1
        self.shift = np.concatenate([self.shift, shifts])
        self.first_chunk = np.concatenate([self.first_chunk, len(self.bases) + np.cumsum(chunks) - chunks])
        self.chunks = np.concatenate([self.chunks, chunks])
        self._add_places(np.zeros(int(chunks.sum()), np.int64))

    def shares_geometry_of(self, other: "ChunkTable") -> bool:
        """Use the arrays of another table if they say the same, which none ever changes; tell whether they do."""
        theirs, own = ((table.first_chunk, table.chunks, table.shift) for table in (other, self))
        is_same = all(map(np.array_equal, own, theirs))
        if is_same:
            self.first_chunk, self.chunks, self.shift = theirs
        return is_same

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
        self.how = np.concatenate([self.how, np.zeros(len(bases), np.uint8)])
        self.bases = np.concatenate([self.bases, bases])

    def add_pack(self, slots: NDArray[np.int64], pack: "Pack") -> None:
        """Have these slots be those of the segments of a pack; -1: a segment that has none.

        For tables that no other thread has seen yet.
        """
        there, start, how = slots >= 0, len(self.bases), pack.info.compressed.get(self.leaf)
        places = pack.places(self.leaf)
        chunks = places * pack.tables.lanes
        self._add_places(np.zeros(int(chunks.sum()), np.int64))
        self.how[start:] = IN_PACK if how is None else DECOMPRESSED
        self.shift, self.first_chunk, self.chunks = self.shift.copy(), self.first_chunk.copy(), self.chunks.copy()
        bits = WHOLE_LANE if how is None else how.rows.bit_length() - 1
        has_array = self.leaf in pack.info.chunk_rows
        self.shift[slots[there]] = apart(bits, places[there]) if has_array else LACKING
        self.first_chunk[slots[there]] = start + (np.cumsum(chunks) - chunks)[there]
        self.chunks[slots[there]] = chunks[there]
        pack.first_place[self.leaf] = start
        if how is not None:
            pack.list_inner(self.leaf)

    def ensure(
        self,
        slot: NDArray[np.int64],
        lane: NDArray[np.int64],
        first_row: NDArray[np.int64],
        last_row: NDArray[np.int64],
        since: int = sys.maxsize,
    ) -> None:
        """Map or read every chunk that holds any of the rows ``first_row[i]`` to ``last_row[i]`` of ``lane[i]``.

        ``slot[i]`` is that of its segment.
        No chunk leaves for these that was asked for in the use of this number, or later: see `chunk_budget.now`. Raises
        SegmentGone where a segment has been evicted, FormatError where a chunk is missing or has the wrong size.
        """
        first, last = self.chunks_of(slot, lane, first_row), self.chunks_of(slot, lane, last_row)
        if self._has(slot, first, last):
            return
        with self._tables.lock:
            self._map(slot, first, last, since)

    def chunks_of(self, slot: NDArray[np.int64], lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the chunk of its segment that each row is in."""
        shift = self.shift[slot]
        chunk: NDArray[np.int64] = (shift >> PLACES) * lane + (row >> (shift & BITS))
        return chunk

    def follow(self, slot: int, row: int) -> None:
        """Map the chunk of a row of a segment that may grow if the one before is mapped: it is read soon, too."""
        chunk = row >> int(self.shift[slot])
        if 0 < chunk <= int(self.chunks[slot]):
            before = self._place(slot, chunk - 1)  # first: see `addresses`
            if self.bases[before]:
                with suppress(ReplayError, OSError):  # who needs it will say so
                    self.ensure(*np.array([[slot], [0], [row], [row]]))

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
        slots, chunks = every >> POSITION_BITS, every & POSITION_MASK
        for at in np.flatnonzero(chunks >= self.chunks[slots]).tolist():
            self._extend(int(slots[at]), int(chunks[at]) + 1)
        places = self.first_chunk[slots] + chunks
        use = chunk_budget.now()
        self.used[places] = use
        use = min(use, since)
        for attempt in range(_ATTEMPTS):
            missing = self.bases[places] == 0
            if not missing.any():
                return
            try:
                self._open_all(slots[missing], chunks[missing], places[missing], use, copy=attempt > 0)
            except MappingRefused:
                if attempt > 0:
                    raise
        raise MappingRefused(
            f"the system allows this process too few mappings for {len(every)} chunks of {self.leaf} at once; make "
            "stores with larger chunk_bytes, or allow it more (sysctl vm.max_map_count)"
        )

    def _open_all(
        self, slots: NDArray[np.int64], chunks: NDArray[np.int64], places: NDArray[np.int64], use: int, *, copy: bool
    ) -> None:
        """Open chunks that are not there; see `_open`."""
        for pack in self._tables.packs_with(self.leaf, slots):
            first = pack.first_place[self.leaf]
            inside = (places >= first) & (places < first + len(pack.inner[self.leaf]))
            self._decompress(pack, places[inside], use)
        for slot, chunk, place in zip(slots.tolist(), chunks.tolist(), places.tolist(), strict=True):
            if not self.bases[place]:  # else it came with another one of its pack
                self._open(slot, chunk, use, copy=copy)

    def _decompress(self, pack: Pack, places: NDArray[np.int64], use: int) -> None:
        """Decompress inner chunks of a pack, for which others leave as in `_open`."""
        inner = pack.inner[self.leaf][places - pack.first_place[self.leaf]]
        found = self._tables.open_shard(pack, self.leaf, inner)
        if isinstance(found, Piece):
            return self._keep(places, Room(len(places), found, 0), found.nbytes // len(places), is_lone=True)
        shard, inner = found
        is_zero = shard.sizes[inner] == 0
        if is_zero.any():
            zeros = zeros_piece(shard.inner_bytes)
            self._hold(places[is_zero], zeros, np.full(np.count_nonzero(is_zero), zeros.address))
        places, inner = places[~is_zero], inner[~is_zero]
        if not len(places):
            return
        of = self._tables.decompressed_bytes(self.leaf)
        rooms = chunk_budget.allocate_inner(len(inner), shard.inner_bytes, use, of=of, grows=reads_no_disk())
        stops = list(accumulate(room.chunks for room in rooms))[:-1]
        decompress(shard, list(zip(np.split(inner, stops), rooms, strict=True)))
        for part, room in zip(np.split(places, stops), rooms, strict=True):
            self._keep(part, room, shard.inner_bytes, is_lone=room.piece.nbytes > BLOCK_BYTES)

    def _keep(self, places: NDArray[np.int64], room: Room, inner_bytes: int, *, is_lone: bool) -> None:
        chunk_budget.keep(self, places, room.piece, len(places) * inner_bytes, is_lone=is_lone)
        self._hold(places, room.piece, room.piece.address + room.start + inner_bytes * np.arange(len(places)))

    def _hold(self, places: NDArray[np.int64], piece: Piece, addresses: NDArray[np.int64]) -> None:
        """Have places be at these addresses, which are good as long as a piece of memory is there."""
        self.holder.update(dict.fromkeys(places.tolist(), piece))
        self.bases[places] = addresses

    def _open(self, slot: int, chunk: int, use: int, *, copy: bool) -> None:
        """Read or map a chunk; what was asked for before this use may leave for it. For `copy` see `_memory`."""
        pack = self._tables.pack_of(slot)
        piece = self._memory(slot, use, copy) if pack is None else None
        if piece is None:
            chunk_budget.make_room(use)
        first_rows = None
        if pack is None:
            held = self._tables.open_chunk(slot, self.leaf, chunk, piece)
        else:
            held, first_rows = self._tables.open_pack(pack, self.leaf)
        if isinstance(held, Mapping):
            # What is read from disk through a narrow mapping comes in the largest pages there are: thousands of small
            # ones are more than the processor has room for, which takes a quarter of a small batch's time.
            held.advise(MADV_RANDOM if self.wide else MADV_HUGEPAGE)
        place = self._held_at(slot, chunk)
        self.holder[place] = held
        if first_rows is None:
            self.how[place] = READ if isinstance(held, Piece) else MAPPED
            self.bases[place] = held.address
        else:
            self.bases[place : place + len(first_rows)] = held.address + first_rows * self.row_bytes

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
        self.used[start : start + have] = self.used[old : old + have]
        self.how[start : start + have] = self.how[old : old + have]
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
        if len(places) > len(holder):  # all of a store that is opened, of which nothing is held
            held = np.fromiter(holder, np.int64, len(holder))
            places = held[np.isin(held, places)]
        for place in places.tolist():
            holder.pop(place, None)
        # In this order: see `addresses`.
        self.bases, self.holder = bases, holder

    def forget(self) -> None:
        """Release every chunk; those in use stay until their user drops ``holder``."""
        self.bases, self.holder = np.zeros_like(self.bases), {}

    def rows(self, slot: int, lanes: int, lane: int, first: int, stop: int) -> NDArray[Any]:
        """Return the rows ``[first, stop)`` of a lane, ``(stop - first, *shape)``.

        A view where one chunk has them, unless it was decompressed.
        """
        if stop <= first:
            return np.zeros((0, *self.shape), self.dtype)
        # One thread at a time: another's chunks may need the room that these have just taken.
        with self._tables.lock:
            self.ensure(*np.array([[slot], [lane], [first], [stop - 1]]))
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
            self.ensure(np.full(len(lane), slot), lane, first, stop - 1)
            if int(count.sum()) > _ROWS_A_LANE * len(lane):
                bounds = zip(lane.tolist(), first.tolist(), stop.tolist(), strict=True)
                return np.concatenate([part for bound in bounds for part in self._blocks(slot, lanes, *bound)])
            return self.values(slot, lanes, np.repeat(lane, count), places_of(first, count))

    def values(self, slot: int, lanes: int, lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[Any]:
        """Return the value at each row of each lane of a segment."""
        out = np.empty((len(row), *self.shape), self.dtype)
        with self._tables.lock:
            slots = np.full(len(row), slot)
            self.ensure(slots, lane, row, row)
            chunk, within = self.chunks_of(slots, lane, row), row & ((1 << (self.shift[slot] & BITS)) - 1)
            for number in np.unique(chunk).tolist():
                here = chunk == number
                block, first = self._block(slot, lanes, number)
                out[here] = block[lane[here] if first is None else 0, within[here] + (first or 0)]
        return out

    def priorities(self, ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the number that this array, that of priorities, has of each step; NaN where there is none.

        ``lanes`` are those of the segments from number ``origin`` on.
        """
        found = np.empty(len(ids))
        if self._read_priorities(ids, origin, lanes, found) < 0:
            return found
        known, slots, _, lane, row = locate(ids, origin, lanes)
        # One segment at a time, and one thread: a chunk may need the room that another has just taken.
        for slot in np.unique(slots[known]).tolist():
            here = np.flatnonzero((slots == slot) & known)
            some = np.full(len(here), np.nan)
            with self._tables.lock, suppress(SegmentGone):
                if self.shift[slot] != LACKING:
                    self.ensure(slots[here], lane[here], row[here], row[here])
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
        shift, parts = int(self.shift[slot]), []
        for chunk, start, count in split_range(first, stop, 1 << (shift & BITS)):
            block, begin = self._block(slot, lanes, (shift >> PLACES) * lane + chunk)
            line, at = (lane, start) if begin is None else (0, begin + start)
            if self.wide:
                mapping = self.holder[self._held_at(slot, (shift >> PLACES) * lane + chunk)]
                mapping.will_need((line * block.shape[1] + at) * self.row_bytes, count * self.row_bytes)
            rows = block[line, at : at + count]
            # Who keeps a view keeps all that was decompressed with it.
            parts.append(rows.copy() if self.how[self._place(slot, 0)] == DECOMPRESSED else rows)
        return parts

    def _held_at(self, slot: int, chunk: int) -> int:
        """Return the place of what holds a chunk."""
        pack = self._tables.pack_of(slot)
        if pack is None or self.leaf in pack.info.compressed:
            return self._place(slot, chunk)
        return pack.first_place[self.leaf]

    def _block(self, slot: int, lanes: int, chunk: int) -> tuple[NDArray[Any], int | None]:
        """Return the rows of a chunk that is there, ``(lanes, rows, *shape)``.

        Or ``(1, rows, *shape)`` and where in these the rows of a lane begin, where that has a chunk of its own.
        """
        pack, mapping = self._tables.pack_of(slot), self.holder[self._held_at(slot, chunk)]
        if pack is None:
            return mapping.array(self.dtype, (lanes, 1 << int(self.shift[slot]), *self.shape)), None
        address = int(self.bases[self._place(slot, chunk)])
        if isinstance(mapping, Piece) and self.leaf in pack.info.compressed:
            rows = 1 << (int(self.shift[slot]) & BITS)
            return Piece(mapping, address, rows * self.row_bytes).array(self.dtype, (1, rows, *self.shape)), 0
        first = (address - mapping.address) // max(1, self.row_bytes)
        return mapping.array(self.dtype, (1, mapping.nbytes // max(1, self.row_bytes), *self.shape)), first


class ChunkTables:
    """The tables of all arrays of a store. All those of a process share what they may hold; see `chunk_budget`.

    Old snapshots keep the tables they were made with, so what they have mapped stays mapped after an eviction.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self.root, self._counters = root, counters
        # Segments that may still get priorities, by slot, and what had been counted when they were known to lack them.
        self._lacking, self._counted = set[int](), -1
        self.lock = threading.RLock()
        # Of each slot; of those of the segments of a pack, the pack's.
        self.infos: list[SegmentInfo | None] = []
        self._packs: dict[int, Pack] = {}  # by number
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
                if info is not None:
                    self.note_info(slot, info)
            self._counted = -1  # they were read before now

    def pack_of(self, slot: int) -> Pack | None:
        """Return the pack that a slot's segment is in."""
        info = self.infos[slot]
        return None if info is None or info.packed is None else self._packs.get(info.number)

    def packs_with(self, leaf: str, slots: NDArray[np.int64]) -> list[Pack]:
        """Return the packs that segments of these slots are in, and in which an array is compressed."""
        if not any(leaf in pack.info.compressed for pack in self._packs.values()):
            return []
        found = {id(pack): pack for slot in np.unique(slots).tolist() if (pack := self.pack_of(slot)) is not None}
        return [pack for pack in found.values() if leaf in pack.info.compressed]

    def decompressed_bytes(self, leaf: str) -> int:
        """Return what an array takes in all packs in which it is compressed, when it is decompressed."""
        packs = [pack for pack in self._packs.values() if leaf in pack.inner]
        rows = sum(len(pack.inner[leaf]) * pack.info.compressed[leaf].rows for pack in packs)
        return rows * self.leaves[leaf].row_bytes

    @shown_paths()
    def open_shard(self, pack: Pack, leaf: str, inner: NDArray[np.int64]) -> tuple[Shard, NDArray[np.int64]] | Piece:
        """Open a compressed array of a pack, or of one that it was merged into; return also which inner chunks.

        Or these themselves, where they are not in the other as they were.
        """
        info, tables, rows = pack.info, pack.tables, pack.info.compressed[leaf].rows
        while True:
            try:
                if info is pack.info:
                    return pack.shard(leaf), inner
                if leaf not in info.compressed or info.compressed[leaf].rows != rows:
                    ranges = [(number * rows, rows) for number in inner.tolist()]
                    return rows_as_before(pack, leaf, ranges, info, tables)
                return open_shard(info, leaf), tables.rows_of(pack.tables.ids_of(inner * rows)) // rows
            except FileNotFoundError:
                info, tables = self._merged_into(pack, info, leaf)

    def _merged_into(self, pack: Pack, last: SegmentInfo, leaf: str) -> tuple[SegmentInfo, PackTables]:
        """Return the pack that a pack was merged into, after one was gone that had its rows last."""
        if last.path.exists():
            path = last.chunk_path(leaf, 0)
            raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
        found = find_pack(self.root, int(pack.tables.numbers[0]))
        if found is None:
            number = pack.info.number
            raise SegmentGone(f"segment {number} was evicted or set aside; refresh and draw again") from None
        return found

    def lanes_of(self, slot: int, origin: int) -> tuple[int, NDArray[np.int64]] | None:
        """Return the writer of a slot's segment and the numbers of its lanes, None where it is gone."""
        info, pack = self.infos[slot], self.pack_of(slot)
        if info is None:
            return None
        if pack is None:
            return info.writer, np.array(info.lanes, np.int64)
        tables = pack.tables
        member = int(tables.places(np.array([slot + origin]))[0])
        return int(tables.writers[member]), tables.runs[tables.runs_of(member), 2]

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
        return self._copy(slots, {})

    def with_pack(self, slots: NDArray[np.int64], pack: Pack) -> "ChunkTables":
        """Return tables in which these slots, one a segment of a pack, are in the pack; -1: it has no slot."""
        new = self._copy(slots[slots >= 0].tolist(), {pack.info.number: pack})
        for slot in slots[slots >= 0].tolist():
            new.infos[slot] = pack.info
        if layout.PRIORITY in pack.info.chunk_rows and layout.PRIORITY not in new.leaves:
            table = new.leaves[layout.PRIORITY] = ChunkTable(new, layout.PRIORITY)
            table.add_slots(new.infos)
        for table in new.leaves.values():
            table.add_pack(slots, pack)
        new.share_geometry()
        return new

    def share_geometry(self) -> None:
        """Have arrays that are divided into chunks alike use one set of tables: of many segments, these are large.

        A batch then waits once for a line of them, and not once for each array that it reads.
        """
        different: list[ChunkTable] = []
        for table in self.leaves.values():
            if not any(table.shares_geometry_of(other) for other in different):
                different.append(table)

    def _copy(self, without: Sequence[int], packs: dict[int, Pack]) -> "ChunkTables":
        """Return a copy in which some slots are empty, and that has these packs, too."""
        new = ChunkTables(self.root, self._counters)
        with self.lock:
            new.infos = list(self.infos)
            for slot in without:
                new.infos[slot] = None
            new._lacking = self._lacking - {*without}
            there = {info.number for info in new.infos if info is not None and info.packed is not None}
            gone = [pack for number, pack in self._packs.items() if number not in there]
            new._packs = {n: pack for n, pack in self._packs.items() if n in there} | packs
            alone = [slot for slot in without if self.pack_of(slot) is None]
            for leaf, table in self.leaves.items():
                copy = new.leaves[leaf] = ChunkTable(new, leaf)
                copy.shift, copy.chunks = table.shift, table.chunks
                copy.first_chunk, copy.bases, copy.holder = table.first_chunk, table.bases, table.holder
                copy.used, copy.how = table.used.copy(), table.how.copy()
                spans = [pack.span(leaf) for pack in gone if leaf in pack.first_place]
                first, counts = np.array(spans, np.int64).reshape(-1, 2).T
                first = np.append(first, copy.first_chunk[alone])
                copy.release(places_of(first, np.append(counts, copy.chunks[alone])))
        return new

    @shown_paths()
    def open_chunk(self, slot: int, leaf: str, chunk: int, piece: Piece | None) -> Mapping | Piece:
        """Read one chunk file into memory, or map it where there is none; see `ChunkTable.ensure`."""
        info = self.infos[slot]
        if info is None:
            raise SegmentGone("the segment of these steps was evicted or set aside; draw again")
        path, nbytes = info.chunk_path(leaf, chunk), info.chunk_nbytes(leaf)
        refuse_links(info.path, above(leaf))
        try:
            if piece is None:
                return map_file(path, nbytes)
            read_into(path, nbytes, np.asarray(piece))
            return piece
        except FileNotFoundError:
            if info.path.exists():
                raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
            packed = read_packed_chunk(info, leaf, chunk)
            if packed is None:
                raise SegmentGone(f"segment {info.number} was evicted or set aside; refresh and draw again") from None
            return packed

    @shown_paths()
    def open_pack(self, pack: Pack, leaf: str) -> tuple[Mapping | Piece, NDArray[np.int64]]:
        """Map an array of a pack, or of one that it was merged into; return also where in it each lane begins."""
        (info, tables), numbers = (pack.info, pack.tables), pack.tables.numbers
        while True:
            try:
                refuse_links(info.path, above(leaf))
                if leaf in info.compressed:
                    ranges = [(0, pack.info.chunk_rows[leaf])]
                    return rows_as_before(pack, leaf, ranges, info, tables), pack.tables.first_rows
                mapping = info.map_chunk(leaf, 0)
            except FileNotFoundError:
                info, tables = self._merged_into(pack, info, leaf)
                continue
            at = tables.places(numbers)
            first_rows = tables.first_rows[places_of(tables.first_run[:-1][at], pack.tables.lanes)]
            if leaf == layout.TIME and info.clock.wall != pack.info.clock.wall:
                return times_of(pack, mapping, first_rows, info.clock.wall), pack.tables.first_rows
            return mapping, first_rows


def above(leaf: str) -> list[str]:
    """Return the paths of an array and of the groups that it is in, outermost first."""
    parts = leaf.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
