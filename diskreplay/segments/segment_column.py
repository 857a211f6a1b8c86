"""Writes one array of a segment: disk blocks are reserved for rows, and the rows are written later."""

import os
from collections.abc import Sequence
from itertools import pairwise
from mmap import PAGESIZE
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.segments.documents.layout import CLOSE_LANES, join_ranges, split_range
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.files.durable import makes_pages, storage_error, write_row, write_zeros_at
from diskreplay.segments.files.mapping import MADV_RANDOM, Mapping
from diskreplay.segments.segment import SegmentInfo

Ints = NDArray[np.int64]

MOST_DESCRIPTORS = 32
_STEP_ROWS = 256
# Limits of what is reserved ahead: the number of bytes in all lanes together (at least one chunk), and the number of
# rows of a lane.
_MOST_AHEAD_BYTES, _MOST_AHEAD_ROWS = 32 << 20, 128
# If at least 1 / `_CROWD` of the lanes soon need more rows, rows of all lanes are reserved together: see `_near`.
_CROWD = 8
# Zeros are written to at least _LEAST_ZEROS adjacent bytes: see `_write_zeros`. A lone lane with rows of at least
# _LEAST_DENSE_BYTES gets at most _MOST_ZEROS bytes of zeros at once.
_LEAST_ZEROS, _MOST_ZEROS, _LEAST_DENSE_BYTES = 64 << 10, 1 << 20, 256

_LONE_LANE: Ints = np.zeros(1, np.int64)


class Pages(NamedTuple):
    """How the disk space that is reserved for a lane grows in a segment's first chunk.

    A lane starts with ``first`` pages. Its number of pages is multiplied by 4 up to ``few`` pages, and by 2 beyond
    ``few`` pages. Pages are brought into memory at least ``step`` pages at a time.
    """

    first: int
    few: int
    step: int


# `_LONE` is for a segment with one lane, and `_LANE` is for a segment with several lanes. Each of several lanes needs
# its own system calls, so a lane begins with more pages to save calls.
_LONE, _LANE = Pages(first=1, few=0, step=32), Pages(first=4, few=16, step=4)


class Column:
    """Reserves disk blocks for rows of one array of a segment, and writes the rows.

    An *item* is one row as an element of a 1-d NumPy array. The item is bytes (a void dtype) if the field has a shape
    or is an observation. For any other field, the item is a number. NumPy assigns items much faster than arrays of
    rows.

    ``by_position``: rows are written with pwrite, and not through mapped memory. ``keeps``: the file system keeps
    blocks that were reserved for a file; if False, no blocks are reserved.

    Concurrency: one thread reserves at a time. Another thread may write reserved rows and release chunks.
    """

    def __init__(self, info: SegmentInfo, array: RowArray, by_position: bool, keeps: bool) -> None:
        self.info, self.leaf = info, array.path
        self.dtype, self.row_bytes = array.dtype, array.row_bytes
        self.as_bytes = is_bytes(array.path, array.shape)
        self.item = np.dtype(f"V{self.row_bytes}") if self.as_bytes else self.dtype
        self.zero: Any = bytes(self.row_bytes) if self.as_bytes else self.dtype.type(0)
        self.rows = info.chunk_rows[self.leaf]
        self.shift = self.rows.bit_length() - 1
        self.mask = self.rows - 1
        pages, page_rows = _LONE if len(info.lanes) == 1 else _LANE, PAGESIZE / self.row_bytes
        self._first_rows, self._few_rows = max(2, int(pages.first * page_rows)), int(pages.few * page_rows)
        self._step_rows = max(_STEP_ROWS, int(pages.step * page_rows))
        self._chunk_bytes = info.chunk_nbytes(self.leaf)
        in_bytes = _MOST_AHEAD_BYTES // (len(info.lanes) * self.row_bytes)
        self._most_ahead = max(2, min(_MOST_AHEAD_ROWS, max(self.rows, in_bytes)))
        self._least_ahead = max(2, min(self.rows, self._most_ahead)) if len(info.lanes) > CLOSE_LANES else 2
        self.by_position = by_position
        self._keeps = keeps
        is_dense = len(info.lanes) > CLOSE_LANES or (len(info.lanes) == 1 and self.row_bytes >= _LEAST_DENSE_BYTES)
        self._makes_folios = is_dense and not by_position and not makes_pages(info.root.file_system)
        self._zero_rows = max(2, _MOST_ZEROS // self.row_bytes)
        # By lane: the first row that cannot be written yet, and the first row without disk blocks.
        self.reserved, self._allocated = np.zeros((2, len(info.lanes)), np.int64)
        # By chunk number: a mapped chunk as an array of items, one lane after another; with `by_position`, a
        # descriptor.
        self.chunks: dict[int, NDArray[Any]] = {}
        self.descriptors: dict[int, int] = {}
        self._mappings: dict[int, Mapping] = {}

    def begin(self, rows: Ints) -> None:
        """Let each lane continue at row ``rows[lane]``: the rows before it exist already, and are not written here."""
        self.reserved[:] = self._allocated[:] = rows

    def reserve(self, lane: int, row: int, stop: int, rows: Ints, *, ahead: bool = False) -> None:
        """Reserve disk blocks for the next rows of a lane, so that no write to them can find the disk full.

        ``row`` is the first row that needs blocks, and ``rows`` has the number of rows of each lane. The call reserves
        the rows below ``stop`` and some rows after ``stop``, but none beyond the end of the chunk. The call also
        reserves rows of other lanes that will soon need more (see `_near`). With ``ahead``, the call also reserves rows
        of lanes that `wanting` would return. Raises StorageFull if the disk has no room.
        """
        begin = int(self.reserved[lane])
        if row < begin:
            return
        chunk = begin >> self.shift
        behind = int(self._margins(begin)) if ahead else 0
        if ahead and chunk > 0:
            # Lanes with at most about a chunk of unused reserved rows get more rows, too: one system call reserves the
            # rows of all these lanes.
            behind += min(self.rows, self._most_ahead)
        try:
            if begin == self._allocated[lane]:
                self._allocate(chunk, lane, stop, rows, behind)
            # The lane may have blocks in the next chunk, too, but the methods below are for rows of one chunk.
            upto = min(int(self._allocated[lane]), (chunk + 1) << self.shift)
            # If pages are not brought into memory here, the first writes to them cause one page fault per lane.
            brings_in = not self.by_position and (len(rows) > 1 or not self._is_whole(chunk))
            if brings_in or self._makes_folios:
                upto = min(upto, max(stop, begin + (self._step_rows if brings_in else self._zero_rows)))
            near = self._near(lane, upto, rows, self.reserved, behind)
            ends = np.minimum(upto, self._allocated[near])
            if self._makes_folios:
                self._write_zeros(chunk, near, ends)
            self.reserved[near] = self._populate(chunk, near, ends) if brings_in else ends
        except OSError as error:
            raise storage_error(error, self.info.chunk_path(self.leaf, chunk)) from error

    def reserve_ahead(self, lanes: Ints, rows: Ints) -> bool:
        """Reserve more rows for the first lane that `wanting` returns, and for other lanes that will soon need more.

        Return False if `wanting` returns no lane. Errors as for `reserve`.
        """
        wanting = self.wanting(lanes, rows)
        if len(wanting):
            self.reserve(int(wanting[0]), int(self.reserved[wanting[0]]), 0, rows, ahead=True)
        return len(wanting) > 0

    def wanting(self, lanes: Ints, rows: Ints) -> Ints:
        return lanes[self.rows_until_wanting(lanes, rows) <= 0]

    def rows_until_wanting(self, lanes: Ints, rows: Ints) -> Ints:
        """Return, for each of these lanes, how many more rows it may get before `wanting` returns it."""
        ends = self.reserved[lanes]
        left: Ints = ends - self._margins(ends) - rows[lanes]
        return left

    def _margins(self, ends: Any) -> Any:
        """Return, for each lane, the number of unused reserved rows up to which `wanting` returns the lane.

        ``ends`` has the number of reserved rows of each lane. The result is a sixteenth of ``ends``, so that a small
        store reserves little. If row ``ends`` begins a new chunk, the result is a quarter of ``ends``, because creating
        a file is slow. With many lanes, the result is then at least a whole chunk of rows, because creating pages for
        all lanes is slow.
        """
        is_new, least = ends & self.mask == 0, self._least_ahead
        return np.clip(ends >> np.where(is_new, 2, 4), np.where(is_new, least, 2), self._most_ahead)

    def _near(self, lane: int, upto: int, rows: Ints, now: Ints, behind: int) -> Ints:
        """Return ``lane`` and the other lanes that soon need more rows; the caller reserves rows for all in one call.

        ``now`` has the number of reserved rows of each lane, and ``rows`` the number of rows in use. Only lanes whose
        reserved rows end in the same chunk, before row ``upto``, are returned. A lane soon needs more if it has at most
        ``behind`` unused reserved rows, or at most an eighth of the rows that ``lane`` gets. If the segment
        has many lanes, and at least 1 / `_CROWD` of these soon need more, all lanes in the chunk are returned. One
        system call then reserves the rows of all these lanes.
        """
        if len(rows) == 1:
            return _LONE_LANE
        begin = int(now[lane])
        base = begin >> self.shift << self.shift
        inside = (now >= base) & (now < upto)
        near = inside & (now - rows <= max(1, behind, (upto - begin) >> 3))
        near[lane] = True
        is_crowd = len(rows) > CLOSE_LANES and _CROWD * np.count_nonzero(near) >= len(rows)
        return np.flatnonzero(inside if is_crowd else near)

    def _allocate(self, chunk: int, lane: int, stop: int, rows: Ints, behind: int) -> None:
        """Reserve disk blocks for a lane, and for the other lanes that `_near` returns.

        In a segment's first chunk, the space of a lane grows by factors (see `Pages`), so that a short segment takes
        little disk space. In any later chunk, all rows of a lane in the chunk are reserved at once.
        """
        begin, end = int(self._allocated[lane]), (chunk + 1) << self.shift
        growing = chunk == 0 and self._keeps
        times = 4 if begin < self._few_rows else 2
        upto = min(end, max(stop, times * begin, self._first_rows)) if growing else end
        lanes = self._near(lane, upto, rows, self._allocated, behind)
        # If the lanes get all their rows in the chunk, each range begins with the lane's first row in the chunk. So the
        # ranges of neighbouring lanes are adjacent, and one call reserves them.
        starts = np.full(len(lanes), chunk << self.shift) if upto == end else self._allocated[lanes]
        firsts, lasts = self._pages(chunk, lanes, starts, np.full(len(lanes), upto))
        fd = self.info.open_chunk(self.leaf, chunk)
        try:
            # The chunk is mapped before blocks are reserved: a failed call leaves nothing to undo and may be repeated.
            if not self.by_position and chunk not in self.chunks:
                self._map(chunk, fd)
            for first, last in join_ranges(firsts, lasts) if self._keeps else ():
                os.posix_fallocate(fd, first, last - first)
        finally:
            os.close(fd)
        self._allocated[lanes] = np.minimum(self._row_at(chunk, lanes, lasts), end)

    def _is_whole(self, chunk: int) -> bool:
        return bool((self._allocated >= (chunk + 1) << self.shift).all())

    def _write_zeros(self, chunk: int, lanes: Ints, ends: Ints) -> None:
        """Let the page cache have large folios for the reserved rows of ``lanes[i]`` up to row ``ends[i]``, for all i.

        Without zeros, the first write to each page takes microseconds, since the system makes and maps this page alone.
        But each sync then writes a whole folio for each page that changed. So zeros are only written where many bytes
        change between two syncs.

        The rows from ``reserved`` to ``ends`` are in the chunk, and none was written yet, so the zeros replace no data.
        Pages that these rows share with other rows are left out.
        """
        ranges = join_ranges(*self._bytes(chunk, lanes, self.reserved[lanes], ends))
        pages = [(first + PAGESIZE - 1 & -PAGESIZE, last & -PAGESIZE) for first, last in ranges]
        long = [(first, last) for first, last in pages if last - first >= _LEAST_ZEROS]
        if long:
            fd = self.info.open_chunk(self.leaf, chunk)
            try:
                for first, last in long:
                    write_zeros_at(fd, first, last)
            finally:
                os.close(fd)

    def _populate(self, chunk: int, lanes: Ints, ends: Ints) -> Ints:
        """Bring the reserved pages of ``lanes[i]`` into memory up to row ``ends[i]``, for all i.

        Return, for each of these lanes, the row at which the lane's last page in memory ends.

        After a sequential read of the file, the page cache may have joined many pages to one large folio. A write to
        one of these pages needs the disk blocks of all of them. On a full disk, this call raises an error, but a write
        would end the process by SIGBUS.
        """
        firsts, lasts = self._pages(chunk, lanes, self.reserved[lanes], ends)
        for first, last in join_ranges(firsts, lasts):
            self._mappings[chunk].populate(first, last)
        last_rows = np.minimum(self._row_at(chunk, lanes, lasts), (chunk + 1) << self.shift)
        return np.minimum(last_rows, self._allocated[lanes])

    def prefault(self, rows: Ints) -> None:
        """Bring the reserved pages of the next rows of several lanes into memory again, after a sync.

        The next rows of a lane begin at row ``rows[lane]``. Any thread may call this, also while other threads reserve,
        write and release chunks.
        """
        ends = self.reserved.copy()
        lanes = np.flatnonzero(rows < ends) if len(rows) > 1 else _LONE_LANE[:0]
        chunks = rows[lanes] >> self.shift
        for chunk in np.unique(chunks).tolist():
            if (mapping := self._mappings.get(chunk)) is not None:
                here = lanes[chunks == chunk]
                stops = np.minimum(np.minimum(ends[here], rows[here] + self._step_rows), (chunk + 1) << self.shift)
                for first, last in join_ranges(*self._pages(chunk, here, rows[here], stops)):
                    mapping.populate(first, last)

    def _pages(self, chunk: int, lanes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
        """Return the byte ranges of the pages with rows ``starts[i]`` to ``stops[i]`` of ``lanes[i]`` in a chunk.

        A write to a mapped page needs all of the page's disk blocks, even if these are smaller than a page.
        """
        firsts, lasts = self._bytes(chunk, lanes, starts, stops)
        return firsts & -PAGESIZE, np.minimum(lasts + PAGESIZE - 1 & -PAGESIZE, self._chunk_bytes)

    def _bytes(self, chunk: int, lanes: Ints, starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
        before = (lanes - chunk) << self.shift
        return (before + starts) * self.row_bytes, (before + stops) * self.row_bytes

    def _row_at(self, chunk: int, lanes: Ints, at: Ints) -> Ints:
        return at // self.row_bytes - ((lanes - chunk) << self.shift)

    def _map(self, chunk: int, fd: int) -> None:
        mapping = self._mappings[chunk] = Mapping(fd, self._chunk_bytes, writable=True)
        # Without this advice, the first access to a new chunk reads megabytes around the page.
        mapping.advise(MADV_RANDOM)
        self.chunks[chunk] = mapping.array(self.item, (len(self.info.lanes) * self.rows,))

    def descriptor(self, chunk: int) -> int:
        fd = self.descriptors.get(chunk)
        if fd is None:
            if len(self.descriptors) >= MOST_DESCRIPTORS:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            fd = self.descriptors[chunk] = self.info.open_chunk(self.leaf, chunk)
        return fd

    def write_row(self, lane: int, row: int, item: Any) -> None:
        """Write one reserved row of a lane; ``item`` is the row's bytes, or a number that fits the dtype."""
        at = lane * self.rows + (row & self.mask)
        if self.by_position:
            self.write_at(row >> self.shift, at, self.as_data(item))
        else:
            self.chunks[row >> self.shift][at] = item

    def write_block(self, lane: int, row: int, block: NDArray[Any]) -> None:
        """Write ``block``, ``(n, *shape)``, to a lane's reserved rows ``row``, ``row + 1``, ..."""
        items = self.items(block)
        for chunk, inside, count in split_range(row, row + len(items), self.rows):
            at, part, items = lane * self.rows + inside, items[:count], items[count:]
            if self.by_position:
                self.write_at(chunk, at, part.view(np.uint8).data)
            else:
                self.chunks[chunk][at : at + count] = part

    def mapped_chunks(
        self, rows: Ints, first: int, last: int, used: dict[int, list[int]]
    ) -> list[Mapping | None] | None:
        """Return the chunks from row ``first`` to row ``last``, or None if a chunk with one of ``rows`` is not mapped.

        ``first`` and ``last`` are the lowest and the highest of ``rows``. A chunk between lanes that are far apart may
        be unmapped (see `unmap_unused`): None stands for it. By shift, ``used`` keeps the positions of chunks with rows
        for the next column.
        """
        if self.by_position:
            return None
        found = [self._mappings.get(chunk) for chunk in range(first >> self.shift, (last >> self.shift) + 1)]
        if None in found:
            if self.shift not in used:
                used[self.shift] = np.flatnonzero(np.bincount((rows >> self.shift) - (first >> self.shift))).tolist()
            if None in [found[chunk] for chunk in used[self.shift]]:
                return None
        return found

    def write_lanes(self, places: Sequence["Places"], items: NDArray[Any]) -> None:
        """Write one reserved row of each of several lanes; `find_places` returns the ``places`` of the ``items``."""
        for chunk, at, chosen in places:
            some = items if chosen is None else items[chosen]
            if self.by_position:
                self._write_items(chunk, at, some)
            else:
                self.chunks[chunk][at] = some

    def _write_items(self, chunk: int, at: Ints, items: NDArray[Any]) -> None:
        data, size = items.view(np.uint8).data, self.row_bytes
        # Adjacent rows are written together. If a chunk has one row per lane, the rows of all lanes are adjacent.
        edges = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
        for start, stop in pairwise(edges):
            self.write_at(chunk, int(at[start]), data[start * size : stop * size])

    def write_at(self, chunk: int, at: int, data: Any) -> None:
        """Write the bytes of adjacent items with pwrite; ``at`` is the index of the first of them within the chunk.

        Raises StorageFull if the file system keeps no reservations and has no room; none of these rows becomes visible.
        """
        try:
            write_row(self.descriptor(chunk), data, at * self.row_bytes)
        except OSError as error:
            raise storage_error(error, self.info.chunk_path(self.leaf, chunk)) from error

    def items(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return rows ``(n, *shape)`` of the array's dtype as n items (see `Column`)."""
        values = np.ascontiguousarray(values)
        # `frombuffer` takes a third of the time of `reshape` and `view`.
        return np.frombuffer(values, self.item) if self.as_bytes else values

    def as_data(self, item: Any) -> bytes:
        data: bytes = item if self.as_bytes else np.asarray(item, self.dtype).tobytes()
        return data

    def target(self, lane: int, row: int) -> tuple[Any, int]:
        """Return (target, count): assigning ``target[i]`` writes row ``row + i`` of a lane, for i below ``count``.

        ``count`` is the number of rows from ``row`` to the end of the chunk.
        """
        at, stop = lane * self.rows + (row & self.mask), (lane + 1) * self.rows
        if self.by_position:
            return _Positions(self, row >> self.shift, at), stop - at
        return self.chunks[row >> self.shift][at:stop], stop - at

    def unmap_unused(self, rows: Ints, lanes: Ints) -> None:
        """Unmap each chunk that has neither the next row nor a later reserved row of any of these lanes.

        The next row of a lane is ``rows[lane]``. No other lane may write to the segment again. Only the thread that
        reserves rows may call this.
        """
        if len(self.chunks) < 2:
            return
        firsts, stops = rows[lanes] >> self.shift, (self._allocated[lanes] - 1 >> self.shift) + 1
        # As many lanes stop at or before an unused chunk as begin there or before it.
        begun = np.cumsum(np.bincount(firsts, minlength=1 + max(self.chunks)))
        stopped = np.cumsum(np.bincount(stops, minlength=1 + max(self.chunks)))
        for chunk in [c for c in self.chunks if begun[c] == stopped[c]]:
            del self.chunks[chunk], self._mappings[chunk]

    def close_before(self, row: int) -> None:
        """Close the descriptors of chunks that end before ``row``. Only the thread that writes rows may call this."""
        for chunk in [c for c in self.descriptors if c < row >> self.shift]:
            os.close(self.descriptors.pop(chunk))

    def close(self) -> list[Mapping]:
        """Close every chunk, and return the mappings of the chunks: each is unmapped when nothing refers to it."""
        held = list(self._mappings.values())
        self.chunks.clear()
        self._mappings.clear()
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])
        return held


class Places(NamedTuple):
    """The rows of a call that are written to one chunk, and their places in the chunk.

    Item ``at[i]`` of the chunk (see `Column`) gets row ``chosen[i]`` of the call; if ``chosen`` is None, row i.
    """

    chunk: int
    at: Ints
    chosen: Ints | None


def find_places(lanes: Ints, rows: Ints, shift: int) -> list[Places]:
    """Return the `Places` of row ``rows[i]`` of ``lanes[i]``, for all i; a lane has ``2**shift`` rows in a chunk."""
    chunks, at = rows >> shift, lanes << shift
    at += rows
    first = int(chunks[0])
    if (chunks == first).all():
        at -= first << shift
        return [Places(first, at, None)]
    at -= chunks << shift
    found = []
    for chunk in np.unique(chunks).tolist():
        chosen = np.flatnonzero(chunks == chunk)
        found.append(Places(chunk, at[chosen], chosen))
    return found


class _Positions:
    """Stands in for a chunk's array of items (see `Column`): assigning an item writes the row with pwrite."""

    __slots__ = ("_base", "_chunk", "_column")

    def __init__(self, column: Column, chunk: int, at: int) -> None:
        self._column, self._chunk, self._base = column, chunk, at

    def __setitem__(self, at: int, item: Any) -> None:
        self._column.write_at(self._chunk, self._base + at, self._column.as_data(item))


def is_bytes(leaf: str, shape: tuple[int, ...]) -> bool:
    """Return whether rows of an array are written as bytes: rows with a shape, and observations.

    Observations are bytes even without a shape, because they are compared as bytes.
    """
    return bool(shape) or leaf == "obs" or leaf.startswith("obs/")
