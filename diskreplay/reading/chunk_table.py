"""The addresses of the rows of each field in memory. A chunk file is mapped or read when a reader first needs it."""

import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from operator import attrgetter, is_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReplayError, SegmentGone
from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints, locate, places_of
from diskreplay.kernels.frozen import OWN_FOLDER
from diskreplay.kernels.gathering import table_line
from diskreplay.kernels.packed import pack
from diskreplay.kernels.table import get_kernel
from diskreplay.reading import chunk_budget
from diskreplay.reading.chunk_budget import BLOCK_BYTES, DECOMPRESSED, IN_PACK, MAPPED, READ, Piece, Room, zeros_piece
from diskreplay.reading.decompression import decompress, reads_no_disk
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.layout import split_range
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.mapping import (
    MADV_HUGEPAGE,
    MADV_RANDOM,
    Mapping,
    MappingRefused,
)
from diskreplay.segments.folder import GONE, LACKING, Folder, Pack
from diskreplay.segments.segment import SegmentInfo, read_segment

# Rows of at least this many bytes are wide. The system reads only the needed pages of wide rows from disk. For narrower
# rows, the system may also read other pages in advance, because batches soon need every page.
WIDE_ROW = 1024

# Chunk files of more than this many bytes, or of wide rows, are mapped, and not read into memory. Files of live
# segments are always mapped, because these files still change.
LARGEST_READ = 256 << 10

# A call of `ensure` tries at most this many times to map all its chunks. After each mapping that the system refuses,
# other mapped chunks are released, perhaps chunks of the same call.
_ATTEMPTS = 8

# The binary logarithm of a number of rows that no lane reaches.
WHOLE = 40

# The arrays `first_chunk`, `chunks`, `shift` and `bases` of a `ChunkTable`.
Addresses = tuple[Ints, Ints, Ints, Ints]

# The result of `kernels.gathering.table_line`, and the four arrays whose addresses are in this result.
TableLine = tuple[Ints, Addresses]

# With more ranges of rows than this, `_ensure` is quicker if it removes repeated ranges first.
_MANY_RANGES = 1 << 12

# With more rows per lane than this, on average, `rows_of_lanes` is quicker if it copies lane by lane.
_ROWS_A_LANE = 64


class ChunkTable:
    """The chunks of one array in all folders of a store: their addresses in memory, and the objects that hold them.

    A folder has one segment or one pack. In a chunk of a segment, each lane has a line of rows. A chunk of a pack has a
    single line, in which the rows of all lanes follow one another. One mapping serves all chunks of a pack, unless the
    array is compressed, or the pack was merged into another pack. The place of a chunk is its index in ``bases``,
    ``used`` and ``how``.

    Concurrency: any thread. The arrays and ``holder`` are replaced by other objects under the lock of all tables. The
    values in the arrays that ``arrays()`` returns never change, except that an address of 0 may get another value: see
    `ChunkTables.addresses`.

    Attributes
    ----------
    first_chunk, chunks, shift : (folders,) int64
        For each folder: the place of its first chunk, the number of its chunks, and the binary logarithm of the number
        of rows of a chunk. ``shift`` is `LACKING` if the folder does not have the array. The number of a folder is its
        index in `ChunkTables.known`.
    bases : (places,) int64
        The address of each chunk, 0 if the chunk is not in memory.
    used : (places,) int64
        When each chunk was last used: a number that `chunk_budget.now` returned.
    how : (places,) uint8
        How each chunk is kept in memory: `MAPPED`, `READ`, `DECOMPRESSED` or `IN_PACK`.
    holder : dict of int to Mapping or Piece
        The object with the memory of each chunk, by the place of the chunk.
    """

    def __init__(self, tables: "ChunkTables", array: RowArray) -> None:
        # The reference is weak, to avoid a cycle. Old tables and their mappings are freed as soon as the last snapshot
        # that uses them is gone, without the garbage collector.
        self._tables: ChunkTables = weakref.proxy(tables)
        self.array, self.leaf = array, array.path
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
        self._line: TableLine | None = None

    def arrays(self) -> Addresses:
        return self.first_chunk, self.chunks, self.shift, self.bases

    def line(self) -> TableLine:
        """Return the result of `arrays` in the form that the kernel `gather` reads; the caller holds the lock."""
        arrays, found = self.arrays(), self._line
        if found is None or not all(map(is_, found[1], arrays)):
            found = self._line = table_line(*arrays, self.row_bytes), arrays
        return found

    @property
    def lock(self) -> Any:
        """The lock of all tables of the store: while it is held, other threads release no chunk of these tables."""
        return self._tables.lock

    def add_folders(self, folders: Sequence[Folder | None]) -> None:
        """Add folders, with a place for every chunk of a pack, and one place for a segment."""
        divided = [(0, 0) if folder is None else folder.division(self.leaf) for folder in folders]
        shift, chunks = np.array(divided, np.int64).reshape(-1, 2).T
        how = np.full(len(folders), MAPPED, np.uint8)
        for at, folder in enumerate(folders):
            if isinstance(folder, Pack) and shift[at] != LACKING:
                how[at] = IN_PACK if folder.compressed_bytes(self.leaf) is None else DECOMPRESSED
        self.shift = np.append(self.shift, shift)
        self.first_chunk = np.append(self.first_chunk, len(self.bases) + np.cumsum(chunks) - chunks)
        self.chunks = np.append(self.chunks, chunks)
        self._add_places(np.zeros(int(chunks.sum()), np.int64), np.repeat(how, chunks))

    def note_array(self, folder: int) -> None:
        """Record that a folder's segment has this array now: the writer may have made it after `add_folders`."""
        if self.shift[folder] == LACKING:
            shift = self.shift.copy()
            shift[folder] = self._tables.folder(folder).division(self.leaf)[0]
            self.shift = shift
            self._tables.note_change()

    def _add_places(self, bases: Ints, how: NDArray[np.uint8]) -> None:
        count = len(self.bases)  # if an earlier call was interrupted, `used` and `how` may be longer than `bases`
        self.used = np.concatenate([self.used[:count], np.zeros(len(bases), np.int64)])
        self.how = np.concatenate([self.how[:count], how])
        self.bases = np.concatenate([self.bases, bases])

    def ensure(self, slot: Ints, lane: Ints, first_row: Ints, last_row: Ints, since: int = sys.maxsize) -> None:
        """Map or read every chunk that holds any of the rows ``first_row[i]`` to ``last_row[i]`` of ``lane[i]``.

        ``slot[i]`` is the slot of the lane's segment. Chunks that were last used before ``since`` may be released to
        make room. ``since`` is a number that `chunk_budget.now` returned.

        Raises
        ------
        SegmentGone
            A segment has been evicted.
        FormatError
            A chunk is missing or has the wrong size.
        """
        folder, _, before = self._tables.find(slot, lane)
        first, last = ((before + row) >> self.shift[folder] for row in (first_row, last_row))
        self._ensure(folder, first, last, since)

    def _ensure(self, folder: Ints, first: Ints, last: Ints, since: int = sys.maxsize) -> None:
        if len(folder) > _MANY_RANGES:  # successive ranges mostly lie in the same chunks
            wanted = np.stack([folder, first, last])
            folder, first, last = wanted[:, np.append(True, (wanted[:, 1:] != wanted[:, :-1]).any(axis=0))]
        if not self._has(folder, first, last):
            with self._tables.lock:
                self._map(folder, first, last, since)

    def follow(self, slot: int, row: int) -> None:
        """In a growing segment, map the chunk that has row ``row``, if the chunk before it is mapped."""
        folder = int(self._tables.folders[slot])
        if self.shift[folder] == LACKING:
            return
        chunk = row >> int(self.shift[folder])
        if 0 < chunk <= int(self.chunks[folder]):
            before = self._place(folder, chunk - 1)  # the place is read before `bases`: see `_extend`
            if self.bases[before]:
                with suppress(ReplayError, OSError):  # the error is raised again if a caller needs the chunk
                    self.ensure(*np.array([[slot], [0], [row], [row]]))

    def _has(self, folder: Ints, first: Ints, last: Ints) -> bool:
        """Record a use of chunks ``first[i]`` to ``last[i]`` of each ``folder[i]``; return whether all were in memory.

        Returns False and records nothing if a range has more than two chunks, or if a chunk has no place in `bases`
        yet.
        """
        if (last >= self.chunks[folder]).any() or int((last - first).max(initial=0)) > 1:
            return False
        at = self.first_chunk[folder]
        self.used[at + first] = self.used[at + last] = chunk_budget.now()
        return bool(self.bases[at + first].all() and self.bases[at + last].all())

    def _map(self, folder: Ints, first: Ints, last: Ints, since: int) -> None:
        most = int((last - first).max(initial=-1)) + 1
        keys = [folder << POSITION_BITS | np.minimum(first + number, last) for number in range(most)]
        every = np.unique(np.concatenate([folder[:0], *keys]))
        folders, chunks = every >> POSITION_BITS, every & POSITION_MASK
        for at in np.flatnonzero(chunks >= self.chunks[folders]).tolist():
            self._extend(int(folders[at]), int(chunks[at]) + 1)
        places = self.first_chunk[folders] + chunks
        use = chunk_budget.now()
        self.used[places] = use
        use = min(use, since)
        for attempt in range(_ATTEMPTS):
            missing = self.bases[places] == 0
            if not missing.any():
                return
            try:
                self._open_all(folders[missing], chunks[missing], places[missing], use, copy=attempt > 0)
            except MappingRefused:
                if attempt > 0:
                    raise
        raise MappingRefused(
            f"the system allows this process too few mappings for {len(every)} chunks of {self.leaf} at once; make "
            "stores with larger chunk_bytes, or allow it more (sysctl vm.max_map_count)"
        )

    def _open_all(self, folders: Ints, chunks: Ints, places: Ints, use: int, *, copy: bool) -> None:
        for folder in self._tables.packs_with_compressed(self.leaf):
            inside = folders == folder
            if inside.any():
                self._decompress(self._tables.packs[folder], chunks[inside], places[inside], use)
        for folder, chunk, place in zip(folders.tolist(), chunks.tolist(), places.tolist(), strict=True):
            if not self.bases[place]:  # the chunk is not in memory yet
                self._open(folder, chunk, use, copy=copy)

    def _decompress(self, pack: Pack, inner: Ints, places: Ints, use: int) -> None:
        found = pack.open_compressed(self.leaf, inner)
        if not isinstance(found, tuple):
            return self._keep_copied(places, found, use)
        shard, inner = found
        is_zero = shard.sizes[inner] == 0
        if is_zero.any():
            zeros = zeros_piece(shard.inner_bytes)
            self._hold(places[is_zero], zeros, np.full(np.count_nonzero(is_zero), zeros.address))
        places, inner = places[~is_zero], inner[~is_zero]
        if not len(places):
            return
        of, on_disk = self._tables.bytes_of(self.leaf)
        rooms = chunk_budget.allocate_inner(len(inner), shard.inner_bytes, use, of=of, grows=reads_no_disk())
        stops = list(accumulate(room.chunks for room in rooms))[:-1]
        decompress(shard, list(zip(np.split(inner, stops), rooms, strict=True)), on_disk=on_disk)
        for part, room in zip(np.split(places, stops), rooms, strict=True):
            self._keep(part, room, shard.inner_bytes, is_lone=room.piece.nbytes > BLOCK_BYTES)

    def _keep(self, places: Ints, room: Room, inner_bytes: int, *, is_lone: bool) -> None:
        chunk_budget.keep(self, places, room.piece, len(places) * inner_bytes, is_lone=is_lone)
        self._hold(places, room.piece, room.piece.address + room.start + inner_bytes * np.arange(len(places)))

    def _keep_copied(self, places: Ints, copied: NDArray[np.uint8], use: int) -> None:
        """Keep the rows ``copied`` of chunks in memory: the pack of the chunks was merged into another pack."""
        piece = Piece.of(copied)
        chunk_budget.make_room_decompressed(piece.nbytes, use)
        self.how[places] = DECOMPRESSED
        self._keep(places, Room(len(places), piece, 0), piece.nbytes // len(places), is_lone=True)

    def _hold(self, places: Ints, held: Mapping | Piece, addresses: Ints) -> None:
        self.holder.update(dict.fromkeys(places.tolist(), held))
        self.bases[places] = addresses

    def _open(self, folder: int, chunk: int, use: int, *, copy: bool) -> None:
        """Read or map a chunk; chunks that were last used before ``use`` may be released to make room."""
        source = self._tables.folder(folder)
        piece = self._memory(source, use, copy)
        if piece is None:
            chunk_budget.make_room(use)
        memory, first = None if piece is None else np.asarray(piece), chunk << int(self.shift[folder])
        found = source.open(self.leaf, chunk, first, self._rows(folder, chunk), memory)
        places = np.array([self._place(folder, chunk)])
        if not isinstance(found, Mapping):
            if isinstance(source, Pack):
                return self._keep_copied(places, found, use)
            held = piece if piece is not None and found is memory else Piece.of(found)
            self.how[places] = READ
            return self._hold(places, held, np.array([held.address]))
        # Narrow rows are mapped with huge pages. With thousands of small pages, TLB misses of the processor take a
        # quarter of a small batch's time.
        found.advise(MADV_RANDOM if self.wide else MADV_HUGEPAGE)
        if isinstance(source, Pack):
            every = np.arange(int(self.chunks[folder]))
            addresses = found.address + (every << int(self.shift[folder])) * self.row_bytes
            return self._hold(self._place(folder, 0) + every, found, addresses)
        self.how[places] = MAPPED
        self._hold(places, found, np.array([found.address]))

    def _rows(self, folder: int, chunk: int) -> int:
        source, bits = self._tables.folder(folder), int(self.shift[folder])
        rows = 1 << bits
        return rows if not isinstance(source, Pack) else min(rows, source.info.chunk_rows[self.leaf] - (chunk << bits))

    def _memory(self, source: Folder, use: int, copy: bool) -> Piece | None:
        """Return memory to read a chunk of ``source`` into, or None if the chunk is to be mapped.

        Chunks of packs and of live segments are always mapped. Large chunks and chunks of wide rows are mapped if
        ``copy`` is False. ``copy`` is True if a first attempt to map all chunks has failed.
        """
        if isinstance(source, Pack) or not source.info.sealed:
            return None
        nbytes = source.info.chunk_nbytes(self.leaf)
        piece = None
        if not self.wide and nbytes <= LARGEST_READ:
            piece = chunk_budget.allocate(nbytes, use)
        if piece is None and copy:
            piece = chunk_budget.allocate_beyond_budget(nbytes, use)
        return piece

    def _place(self, folder: int, chunk: int) -> int:
        return int(self.first_chunk[folder]) + chunk

    def _extend(self, folder: int, chunks: int) -> None:
        """Copy a folder's values to the end of ``bases``, ``used`` and ``how``, with room for ``chunks`` chunks."""
        have = int(self.chunks[folder])
        if chunks <= have:
            return
        room = max(chunks, 2 * have)
        old = int(self.first_chunk[folder])
        start = len(self.bases)
        more = np.zeros(room - have, np.int64)
        how = np.append(self.how[old : old + have], more.astype(np.uint8))
        self._add_places(np.append(self.bases[old : old + have], more), how)
        self.used[start : start + have] = self.used[old : old + have]
        # The new dict has the new places of the folder's chunks. Readers that use the old places refer to the old dict,
        # which keeps these chunks mapped.
        moved = range(old, old + have)
        self.holder = {start + (p - old) if p in moved else p: mapping for p, mapping in self.holder.items()}
        # A reader may hold the arrays, so they are replaced and not changed. A reader without the lock reads `chunks`,
        # then `first_chunk`, and then `bases`. The arrays are replaced in the opposite order. In another order, the
        # reader could compute a place of another folder, or a place that `bases` does not have yet.
        first_chunk, counts = self.first_chunk.copy(), self.chunks.copy()
        first_chunk[folder], counts[folder] = start, room
        self.first_chunk, self.chunks = first_chunk, counts
        self._tables.note_change()

    def release(self, places: Ints) -> None:
        """Release the chunks at these places; the caller holds the lock.

        A released chunk stays in memory while a reader has an array of the chunk's rows, or a `MappingGuard` that was
        made before the release.
        """
        bases, holder = self.bases.copy(), self.holder.copy()
        bases[places] = 0
        if len(places) > len(holder):  # skip places without chunks in memory, to shorten the loop
            held = np.fromiter(holder, np.int64, len(holder))
            places = held[np.isin(held, places)]
        for place in places.tolist():
            holder.pop(place, None)
        self.bases, self.holder = bases, holder
        self._tables.note_change()

    def rows(self, slot: int, lane: int, first: int, stop: int) -> NDArray[Any]:
        """Return the rows ``[first, stop)`` of a lane, ``(stop - first, *shape)``.

        The result is a view if a single chunk has all these rows and was not decompressed, else a copy.
        """
        if stop <= first:
            return np.zeros((0, *self.shape), self.dtype)
        (folder,), (line,), (before,) = (column.tolist() for column in self._tables.find(*np.array([[slot], [lane]])))
        parts = self.rows_in(folder, line, before + first, before + stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def rows_in(self, folder: int, line: int, first: int, stop: int) -> list[NDArray[Any]]:
        """Return the rows ``[first, stop)`` of a line of a folder, one array per chunk.

        If one mapping has all chunks of a pack, the result has a single array. Raises the errors of `ensure`.
        """
        bits = int(self.shift[folder])
        where, first_chunk, last_chunk = np.array([[folder], [first >> bits], [(stop - 1) >> bits]])
        # Without the lock, another thread could release these chunks before their rows are read.
        with self._tables.lock:
            self._ensure(where, first_chunk, last_chunk)
            return self._blocks(folder, line, first, stop)

    def rows_of_lanes(self, slot: int, lane: Ints, first: Ints, stop: Ints) -> NDArray[Any]:
        filled = first < stop
        lane, first, stop = lane[filled], first[filled], stop[filled]
        slots, count = np.full(len(lane), slot), stop - first
        if int(count.sum()) <= _ROWS_A_LANE * len(lane):
            return self.values(np.repeat(slots, count), np.repeat(lane, count), places_of(first, count))
        bounds = np.stack([slots, lane, first, stop], axis=1).tolist()
        return np.concatenate([self.rows(*bound) for bound in bounds])

    def values(self, slots: Ints, lane: Ints, row: Ints) -> NDArray[Any]:
        """Return the values of this array in ``n`` rows, ``(n, *shape)``.

        The i-th value is in row ``row[i]`` of lane ``lane[i]`` of the segment in slot ``slots[i]``.
        """
        out = np.empty((len(row), *self.shape), self.dtype)
        # Without the lock, the chunks of the segment could be released before their values are copied.
        for slot in np.unique(slots).tolist():
            here = np.flatnonzero(slots == slot)
            with self._tables.lock:
                folders, line, before = self._tables.find(slots[here], lane[here])
                bits, at = self.shift[folders], before + row[here]
                chunk, within = at >> bits, at & ((1 << bits) - 1)
                self._ensure(folders, chunk, chunk)
                for number in np.unique(chunk).tolist():
                    some = chunk == number
                    block, first = self._block(int(folders[0]), number)
                    out[here[some]] = block[line[some], first + within[some]]
        return out

    def priorities(self, ids: Ints, origin: int, lanes: Ints) -> Floats:
        """Return the stored priority of each step; NaN if the step has no priority or is gone.

        Call this method only on the table of priorities, `ChunkTables.priorities`. ``lanes`` has the number of lanes of
        each segment, beginning with segment ``origin``.
        """
        found = np.empty(len(ids))
        if self._read_priorities(ids, origin, lanes, found) < 0:
            return found
        known, slots, _, lane, row = locate(ids, origin, lanes)
        # Each segment is read under the lock, for the reason given in `values`.
        for slot in np.unique(slots[known]).tolist():
            here = np.flatnonzero((slots == slot) & known)
            some = np.full(len(here), np.nan)
            with self._tables.lock, suppress(SegmentGone):
                if self.has_rows(slot):
                    self.ensure(slots[here], lane[here], row[here], row[here])
                self._read_priorities(ids[here], origin, lanes, some)
            found[here] = some
        found[~known] = np.nan
        return found

    def has_rows(self, slot: int) -> bool:
        """Return whether the segment in a slot, or the pack that has its rows, has this array."""
        return bool(self.shift[self._tables.folders[slot]] != LACKING)

    def _read_priorities(self, ids: Ints, origin: int, lanes: Ints, out: Floats) -> int:
        """Write the priorities of steps to ``out``, and stop at the first step whose chunk is not in memory.

        Returns the index of this first step in ``ids``; -1 if all priorities were written.
        """
        tables = self._tables
        where = tables.lane_base, tables.folders, tables.first_rows
        _held, (addresses,) = tables.addresses([self.leaf])
        return int(get_kernel("initial_priorities")(ids, origin, lanes, pack(*where, *addresses), out))

    def _blocks(self, folder: int, line: int, first: int, stop: int) -> list[NDArray[Any]]:
        parts, bits = [], int(self.shift[folder])
        if folder in self._tables.packs and isinstance(self.holder[self._place(folder, first >> bits)], Mapping):
            bits = WHOLE  # one mapping has all rows of the pack
        for chunk, start, count in split_range(first, stop, 1 << bits):
            block, begin = self._block(folder, chunk)
            if self.wide:
                mapping = self.holder[self._place(folder, chunk)]
                mapping.will_need((line * block.shape[1] + begin + start) * self.row_bytes, count * self.row_bytes)
            rows = block[line, begin + start : begin + start + count]
            # A view of decompressed rows would keep the whole `Piece` in memory.
            parts.append(rows.copy() if self.how[self._place(folder, chunk)] == DECOMPRESSED else rows)
        return parts

    def _block(self, folder: int, chunk: int) -> tuple[NDArray[Any], int]:
        """Return an array with a chunk's rows, ``(lanes, rows, *shape)``, and the index of the chunk's first row there.

        For a pack, ``lanes`` is 1. If one mapping has all chunks of the pack, the array has the rows of all these
        chunks.
        """
        source, place = self._tables.folder(folder), self._place(folder, chunk)
        held, address = self.holder[place], int(self.bases[place])
        if not isinstance(source, Pack):
            return held.array(self.dtype, (len(source.info.lanes), 1 << int(self.shift[folder]), *self.shape)), 0
        if isinstance(held, Piece):
            rows = self._rows(folder, chunk)
            return Piece(held, address, rows * self.row_bytes).array(self.dtype, (1, rows, *self.shape)), 0
        rows = held.nbytes // self.row_bytes
        return held.array(self.dtype, (1, rows, *self.shape)), (address - held.address) // self.row_bytes


_holder = attrgetter("holder")


class MappingGuard:
    """Keeps in memory all chunks that the tables held when this guard was made, as long as the guard exists."""

    __slots__ = ("__weakref__", "_holders")

    def __init__(self, tables: Iterable[ChunkTable]) -> None:
        self._holders = [*map(_holder, tables)]

    def is_of(self, tables: Collection[ChunkTable]) -> bool:
        """Return whether this guard was made for these tables, and each table still has the same ``holder``."""
        return len(tables) == len(self._holders) and all(map(is_, map(_holder, tables), self._holders))


def no_reference() -> MappingGuard | None:
    """Return None, like a dead weak reference: a reader has this function in place of a reference to a guard."""
    return None


class ChunkTables:
    """The `ChunkTable` of each array of a store. All stores of a process share one budget: see `chunk_budget`.

    The rows of a segment lie in its own folder, or in the folder of a pack.

    An old snapshot keeps its tables, so chunks that these tables have mapped stay mapped after an eviction.

    Attributes
    ----------
    known : list of Folder or None
        All folders; None for a folder that is gone. The number of a folder is its index in this list.
    packs : dict of int to Pack
        The folders that are packs, by their index in ``known``.
    folders : (slots,) int64
        The number of each segment's folder; -1 if the segment is gone.
    lane_base : (slots,) int64
        The index of each segment's first lane among the lanes of all slots.
    first_rows : (lanes,) int64
        The row of the pack at which each lane begins, or `frozen.OWN_FOLDER` if the lane's segment is not in a pack.
    leaves : dict of str to ChunkTable
        The tables that were made so far, by the path of the array: see `leaf`. The table of priorities is in this dict
        if any segment has priorities.
    held : MappingGuard
        A guard that keeps in memory all chunks that are there now. It is replaced whenever a table gets a new array or
        a new ``holder``: see `addresses`.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self.root, self._counters = root, counters
        # The numbers of the folders whose segments may still get the array of priorities.
        self._lacking, self._counted = set[int](), -1  # `_counted`: the counter SEALED at the last read of attributes
        self.lock = threading.RLock()
        self.known: list[Folder | None] = []
        self.packs: dict[int, Pack] = {}
        self.folders, self.lane_base, self.first_rows = np.zeros((3, 0), np.int64)
        self.leaves: dict[str, ChunkTable] = {}
        self.note_change()
        chunk_budget.share(self)

    def note_change(self) -> None:
        """Replace the guard ``held``, so that readers notice new arrays of a table; the caller holds the lock."""
        self.held = MappingGuard(self.leaves.values())

    def leaf(self, path: str) -> ChunkTable:
        """Return the table of an array; make the table if it does not exist yet."""
        return self.leaves.get(path) or self._make(path)

    def _make(self, path: str) -> ChunkTable:
        with self.lock:
            if path not in self.leaves:
                table = ChunkTable(self, self.root.blueprint.of([path]).arrays[path])
                table.add_folders(self.known)
                self.leaves = {**self.leaves, path: table}  # a new dict: another thread may iterate over the old one
                self.note_change()
            return self.leaves[path]

    def addresses(self, leaves: Iterable[str]) -> tuple[MappingGuard, list[Addresses]]:
        """Return ``held``, and the `Addresses` of each array in ``leaves``.

        While the returned guard exists, all addresses in the result are valid, also addresses that are set later. As
        long as ``held`` is the same guard, a caller can use the result again without another call.
        """
        with self.lock:
            tables = [self.leaf(leaf) for leaf in leaves]  # this may replace `held`
            if not self.held.is_of(self.leaves.values()):  # an interrupt came between a change and `note_change`
                self.note_change()
            return self.held, [table.arrays() for table in tables]

    def lines(self, leaves: Collection[str]) -> tuple[MappingGuard, list[TableLine]]:
        with self.lock:
            held, _ = self.addresses(leaves)
            return held, [self.leaf(leaf).line() for leaf in leaves]

    def reset_after_fork(self) -> None:
        """Release all chunks in a forked child: the child's mappings would keep evicted files on the disk."""
        self.lock = threading.RLock()  # another thread may have held the old lock
        self.forget()

    @property
    def priorities(self) -> ChunkTable | None:
        """The table of the priorities that were given with the steps; None if no segment has priorities.

        A segment may get the array of priorities after its attributes were read. The segment's writer increments the
        counter SEALED before it publishes the first row with a priority, so every reader of this row finds the array.
        """
        counted = self._counters.peek(layout.SEALED)
        if counted != self._counted:
            with self.lock:
                for number in sorted(self._lacking):
                    with suppress(OSError, ReplayError):  # the error is raised again when a reader reads steps
                        self._note(number, read_segment(self.root, self.folder(number).info.number))
                self._counted = counted
        return self.leaves.get(layout.PRIORITY)

    def add_slots(self, infos: list[SegmentInfo | None], lane_base: Ints, lanes: int) -> None:
        """Add slots for the next segments, and a folder for each segment that has attributes in ``infos``.

        An element of ``infos`` is None if the segment was evicted or is in a pack. ``lane_base`` has a value for each
        old and new slot; ``lanes`` is the number of lanes of all old and new slots.
        """
        with self.lock:
            there = np.array([info is not None for info in infos], np.bool_)
            own = np.where(there, len(self.known) + np.cumsum(there) - 1, -1)
            self.folders, self.lane_base = np.append(self.folders, own), lane_base
            self.first_rows = np.append(self.first_rows, np.full(lanes - len(self.first_rows), OWN_FOLDER))
            self._add_folders([Folder(info) for info in infos if info is not None])
            self._counted = -1  # the segments may have got priorities since their attributes were read

    def _add_folders(self, folders: Sequence[Folder]) -> None:
        start = len(self.known)
        self.known.extend(folders)
        for table in self.leaves.values():
            table.add_folders(folders)
        self.note_change()
        for number, folder in enumerate(folders, start):
            self._note_priorities(number, folder.info)

    def find(self, slot: Ints, lane: Ints) -> tuple[Ints, Ints, Ints]:
        """Return three arrays: the folder of each lane, the lane's line in the chunks, and the lane's first row there.

        Raises
        ------
        SegmentGone
            A segment was evicted or set aside.
        """
        folder = self.folders[slot]
        if (folder < 0).any():
            raise SegmentGone(GONE)
        first = self.first_rows[self.lane_base[slot] + lane]
        is_own = first == OWN_FOLDER
        return folder, np.where(is_own, lane, 0), np.where(is_own, 0, first)

    def reward_sums(self, slot: int, lane: Ints, row: Ints, steps: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the stored sum of rewards of each episode, and a mask of the episodes that have a stored sum.

        All episodes are in one segment. ``row`` has the first row of each episode. Only sealed segments store sums.
        """
        folder = self.folder_of(slot) if 0 <= slot < len(self.folders) else None
        if folder is None or not folder.info.sealed:
            return np.zeros(len(row)), np.zeros(len(row), np.bool_)
        _, line, before = self.find(np.array(slot), lane)
        return folder.reward_sums.find(line, before + row, steps)

    def folder_of(self, slot: int) -> Folder | None:
        number = int(self.folders[slot])
        return None if number < 0 else self.known[number]

    def info(self, slot: int) -> SegmentInfo | None:
        folder = self.folder_of(slot)
        return None if folder is None else folder.info

    def folder(self, number: int) -> Folder:
        found = self.known[number]
        if found is None:
            raise SegmentGone(GONE)
        return found

    def packs_with_compressed(self, leaf: str) -> list[int]:
        return [folder for folder, pack in self.packs.items() if pack.compressed_bytes(leaf) is not None]

    def bytes_of(self, leaf: str) -> tuple[int, int]:
        """Return the decompressed size and the compressed size of an array, in bytes, in all packs that compress it."""
        table, packs = self.leaf(leaf), self.packs_with_compressed(leaf)
        decompressed = int((table.chunks[packs] << table.shift[packs]).sum()) * table.row_bytes
        return decompressed, sum(self.packs[folder].compressed_bytes(leaf) or 0 for folder in packs)

    def lanes_of(self, slot: int, origin: int) -> tuple[int, Ints] | None:
        folder = self.folder_of(slot)
        return None if folder is None else folder.lanes_of(slot + origin)

    def note_info(self, slot: int, info: SegmentInfo) -> None:
        self._note(int(self.folders[slot]), info)

    def _note(self, number: int, info: SegmentInfo) -> None:
        with self.lock:
            self.folder(number).note(info)
            self._note_priorities(number, info)

    def _note_priorities(self, number: int, info: SegmentInfo) -> None:
        """Record whether a folder's segment has the array of priorities; the caller holds the lock."""
        has_priorities = layout.PRIORITY in info.chunk_rows
        if has_priorities or info.sealed:
            self._lacking.discard(number)
        else:
            self._lacking.add(number)
        if has_priorities:
            self.leaf(layout.PRIORITY).note_array(number)

    def follow(self, slot: int, row: int) -> None:
        for leaf, table in self.leaves.items():
            if not layout.is_of_episodes(leaf):
                table.follow(slot, row)

    def value_rows(self, slot: Ints, lane: Ints, row: Ints, committed: Ints) -> Ints:
        """Return, for each row with the flag `EPISODE_VALUES`, the row of the values in the arrays of episode fields.

        A result is relative to the lane's first row in the folder. In a pack, most results are negative, because the
        arrays of episode fields have fewer rows than the flags. ``committed`` is the number of complete rows of each
        lane. The call may read the flags of these rows.
        """
        folder, line, before = self.find(slot, lane)
        found = np.empty(len(row), np.int64)
        for number in np.unique(folder).tolist():
            here = folder == number
            where = line[here], (before + row)[here], (before + committed)[here]
            flags = partial(self.leaf(layout.DONE).rows_in, number)
            found[here] = self.folder(number).value_rows.find(flags, self.lock, *where) - before[here]
        return found

    def forget(self) -> None:
        with self.lock:
            for table in self.leaves.values():
                if table.holder:
                    table.release(np.arange(len(table.bases)))

    def without(self, slots: list[int]) -> "ChunkTables":
        """Return tables without the segments of these slots; chunks of all other segments stay in memory."""
        folders = self.folders.copy()
        folders[slots] = -1
        return self._copy(folders)

    def with_pack(self, slots: Ints, pack: Pack) -> "ChunkTables":
        folders = self.folders.copy()
        folders[slots] = number = len(self.known)
        new = self._copy(folders)
        with new.lock:
            new.first_rows = self.first_rows.copy()
            new.first_rows[places_of(self.lane_base[slots], pack.lanes)] = pack.first_rows
            new.packs[number] = pack
            new._add_folders([pack])
        return new

    def _copy(self, folders: Ints) -> "ChunkTables":
        new = ChunkTables(self.root, self._counters)
        with self.lock, new.lock:  # other threads may already use the new tables
            is_there = np.zeros(len(self.known) + 1, np.bool_)
            is_there[folders] = True  # -1, for a slot without a folder, sets the extra last element
            gone = [at for at, folder in enumerate(self.known) if folder is not None and not is_there[at]]
            new.known = [folder if is_there[at] else None for at, folder in enumerate(self.known)]
            new.folders, new.lane_base, new.first_rows = folders, self.lane_base, self.first_rows
            new._lacking = self._lacking.difference(gone)
            new.packs = {number: pack for number, pack in self.packs.items() if is_there[number]}
            for leaf, table in self.leaves.items():
                copy = new.leaves[leaf] = ChunkTable(new, table.array)
                copy.shift, copy.chunks = table.shift, table.chunks
                copy.first_chunk, copy.bases, copy.holder = table.first_chunk, table.bases, table.holder
                copy.used, copy.how = table.used.copy(), table.how.copy()
                copy.release(places_of(copy.first_chunk[gone], copy.chunks[gone]))
        return new
