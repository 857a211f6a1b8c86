"""Writing rows of one segment: reserve, put, publish."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import map_lane_counter
from diskreplay.format.durable import Lock, storage_error, sync_file, sync_folder
from diskreplay.format.layout import WIDE_ROW_BYTES
from diskreplay.format.mapping import MADV_RANDOM, Mapping
from diskreplay.format.metadata import RowArray
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, chunk_nbytes, chunk_path, open_chunk

_MOST_DESCRIPTORS = 32


class _Column:
    """One array of the segment, as its writer sees it: the chunks that lanes stand in."""

    def __init__(self, root: Root, info: SegmentInfo, array: RowArray, by_position: bool) -> None:
        self.root, self.info, self.leaf = root, info, array.path
        self.dtype, self.shape, self.row_bytes = array.dtype, array.shape, array.row_bytes
        self.zero = np.zeros(self.shape, self.dtype)
        self.rows = info.chunk_rows[self.leaf]
        self.shift = self.rows.bit_length() - 1
        self.mask = self.rows - 1
        self.by_position = by_position
        self.reserved = np.zeros(len(info.lanes), np.int64)  # chunks whose blocks a lane has
        # Mapped chunks, or where rows are written by position descriptors.
        self.chunks: dict[int, NDArray[Any]] = {}
        self.descriptors: dict[int, int] = {}

    def reserve(self, lane: int, row: int, rows: NDArray[np.int64]) -> None:
        """Give the lane's part of a row's chunk its blocks, so that no write into it can find the disk full.

        Lanes that stand shortly before the same chunk get theirs in the same call.
        """
        chunk = row >> self.shift
        if self.reserved[lane] > chunk:
            return
        near = (self.reserved == chunk) & (rows >= row - max(1, self.rows // 8))
        near[lane] = True
        fd = self.descriptor(chunk) if self.by_position else open_chunk(self.root, self.info, self.leaf, chunk)
        try:
            # Mapped before it is reserved: what fails leaves nothing to undo, and may be repeated.
            if not self.by_position and chunk not in self.chunks:
                self._map(chunk, fd)
            lane_bytes = self.rows * self.row_bytes
            for first, stop in _runs(near):
                os.posix_fallocate(fd, first * lane_bytes, (stop - first) * lane_bytes)
        except OSError as error:
            raise storage_error(error, chunk_path(self.root, self.info, self.leaf, chunk)) from error
        finally:
            if not self.by_position:
                os.close(fd)
        self.reserved[near] = chunk + 1

    def _map(self, chunk: int, fd: int) -> None:
        mapping = Mapping(fd, chunk_nbytes(self.root, self.info, self.leaf), writable=True)
        # Without it the first touch of a fresh chunk reads megabytes around it.
        mapping.advise(MADV_RANDOM)
        self.chunks[chunk] = mapping.array(self.dtype, (len(self.info.lanes), self.rows, *self.shape))

    def descriptor(self, chunk: int) -> int:
        fd = self.descriptors.get(chunk)
        if fd is None:
            if len(self.descriptors) >= _MOST_DESCRIPTORS:
                os.close(self.descriptors.pop(next(iter(self.descriptors))))
            fd = self.descriptors[chunk] = open_chunk(self.root, self.info, self.leaf, chunk)
        return fd

    def put(self, lane: int, row: int, value: Any) -> None:
        if self.by_position:
            offset = (lane * self.rows + (row & self.mask)) * self.row_bytes
            _write_at(self.descriptor(row >> self.shift), np.asarray(value, self.dtype), offset)
        else:
            self.chunks[row >> self.shift][lane, row & self.mask] = value

    def put_block(self, lane: int, row: int, block: NDArray[Any]) -> None:
        """Put rows ``row``, ``row + 1``, ...; their chunks are reserved."""
        done = 0
        while done < len(block):
            at = (row + done) & self.mask
            count = min(self.rows - at, len(block) - done)
            part = block[done : done + count]
            if self.by_position:
                offset = (lane * self.rows + at) * self.row_bytes
                _write_at(self.descriptor((row + done) >> self.shift), part, offset)
            else:
                self.chunks[(row + done) >> self.shift][lane, at : at + count] = part
            done += count

    def forget_before(self, row: int) -> None:
        """Let go of chunks that no lane will write again."""
        first = row >> self.shift
        for chunk in [c for c in self.chunks if c < first]:
            del self.chunks[chunk]
        for chunk in [c for c in self.descriptors if c < first]:
            os.close(self.descriptors.pop(chunk))

    def close(self) -> None:
        self.chunks.clear()
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def _runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each run of True."""
    if mask.all():  # a single lane, or lanes in step
        yield 0, len(mask)
        return
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def _write_at(fd: int, value: NDArray[Any], offset: int) -> None:
    data = memoryview(value.data).cast("B")
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


class SegmentWriter:
    """The write side of one open segment.

    ``in_blocks`` says that rows come many at a time, which mappings do not pay for.

    Concurrency: one thread of one process, the one that holds the segment's lock. It never takes that lock itself.
    """

    def __init__(self, root: Root, info: SegmentInfo, lock: Lock, *, in_blocks: bool = False) -> None:
        self.root, self.info, self.number, self.lock = root, info, info.number, lock
        lanes = len(info.lanes)
        arrays = root.blueprint.arrays
        in_blocks &= len(arrays) <= _MOST_DESCRIPTORS
        self.columns = {
            leaf: _Column(root, info, array, in_blocks or array.row_bytes >= WIDE_ROW_BYTES)
            for leaf, array in arrays.items()
        }
        self.committed, self.observed = (
            map_lane_counter(f"{info.path}/{name}", lanes, writable=True)
            for name in (layout.COMMITTED, layout.OBSERVED)
        )
        self.rows = [0] * lanes
        self.total_rows = 0
        self._reserved = [0] * lanes  # rows below this have their blocks in every field
        self._synced_folders = False

    @cached_property
    def durable(self) -> NDArray[np.int64]:
        """The rows known to be on the platter; mapped when first asked for, as many a segment is never flushed."""
        return map_lane_counter(f"{self.info.path}/{layout.DURABLE}", len(self.info.lanes), writable=True)

    def reserve(self, lane: int, row: int) -> None:
        """Make sure that ``row`` of a lane can be written in every field.

        Raises
        ------
        StorageFull
            There is no room; nothing that was committed is touched, and the call may be repeated.
        """
        if row < self._reserved[lane]:
            return
        rows = np.asarray(self.rows)
        first = min(self.rows)
        for column in self.columns.values():
            column.reserve(lane, row, rows)
            column.forget_before(first)
        bounds = np.min([column.reserved << column.shift for column in self.columns.values()], axis=0)
        self._reserved = bounds.tolist()

    def reserve_rows(self, lane: int, row: int, stop: int) -> None:
        """Reserve the rows ``[row, stop)``; see `reserve`."""
        while row < stop:
            self.reserve(lane, row)
            row = self._reserved[lane]

    def publish(self, lane: int, rows: int, observed: int = 0) -> None:
        """Make ``rows`` rows of a lane visible, and observations up to ``observed``. What they show is written."""
        self.total_rows += rows - self.rows[lane]
        self.rows[lane] = rows
        # Readers load `observed` first: one past `committed` then means the observation after just these rows.
        self.committed[lane] = rows
        if observed:
            self.observed[lane] = observed

    def flush(self) -> None:
        """Put everything published on the platter, then say so in ``durable``."""
        upto = self.committed.copy()
        if self._synced_folders and (upto == self.durable).all():
            return
        path = self.info.path
        changed = self._chunks_since(self.durable, upto)
        for leaf, chunks in changed.items():
            for chunk in chunks:
                sync_file(chunk_path(self.root, self.info, leaf, chunk))
            sync_file(path / leaf / layout.METADATA)
            sync_folder(path / leaf)
        if not self._synced_folders:
            self._sync_new_segment()
        self.durable[:] = upto
        sync_file(path / layout.DURABLE / "c.0")

    def _chunks_since(self, before: NDArray[np.int64], upto: NDArray[np.int64]) -> dict[str, set[int]]:
        spans = [(int(a), int(b)) for a, b in zip(before, upto, strict=True) if a < b]
        return {
            leaf: {chunk for a, b in spans for chunk in range(a >> c.shift, ((b - 1) >> c.shift) + 1)}
            for leaf, c in self.columns.items()
        }

    def _sync_new_segment(self) -> None:
        path = self.info.path
        for folder in {path / leaf for leaf in self.columns} | {path / n for n in layout.LANE_COUNTERS}:
            for part in (folder, *folder.parents):
                sync_file(part / layout.METADATA)
                sync_folder(part)
                if part == path:
                    break
        for name in layout.LANE_COUNTERS:
            sync_file(path / name / "c.0")
        for folder in (path.parent, self.root.counters_folder, self.root.path):
            sync_folder(folder)
        sync_file(self.root.counters_folder / "c.0")
        self._synced_folders = True

    def close(self) -> None:
        """Let go of every chunk. The lock stays: whoever seals the segment needs it."""
        for column in self.columns.values():
            column.close()
