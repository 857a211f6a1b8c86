"""Marks: log entries of a segment that prove, by checksums, which rows of the segment are durable.

docs/format.md describes the log. It also says when readers trust only marks, and not the counters of committed rows.
"""

import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.folders import close_when_collected
from diskreplay.ids import Ints, places_of
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.layout import join_ranges
from diskreplay.segments.files.commit import map_lane_counter, open_lane_counter
from diskreplay.segments.files.copies import note_changed
from diskreplay.segments.files.durable import storage_errors, sync_file, sync_folder, write_at
from diskreplay.segments.files.machine import boot_id
from diskreplay.segments.files.mapping import Mapping, open_regular, read_regular
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.segment_column import MOST_DESCRIPTORS
from diskreplay.segments.segment_reader import Extent, extent_of

# With fewer new bytes per range of rows than this, all new rows of a chunk are gathered for one checksum call.
_LONG = 4096
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_INVERTED = 0xFFFFFFFF


class Sums(NamedTuple):
    """The checksums of the rows since the previous mark.

    ``crc`` covers all arrays except the priorities, ``priority`` the priorities.
    """

    crc: int
    priority: int


class Mark(NamedTuple):
    """An entry of the log; ``sums`` covers the rows since the previous mark.

    ``rows`` has the number of rows of each lane. ``time`` is in seconds since 1970. ``own`` is the checksum of the mark
    itself.
    """

    rows: Ints
    sums: Sums
    time: float
    own: int


def read_marks(folder: str, lanes: int) -> list[Mark]:
    """Return the marks of a segment's log up to the first damaged mark; an empty list if the log is missing.

    Only the marks' own checksums are verified here. `proven_rows` compares the marks with the rows.
    """
    try:
        return list(_parse(read_regular(f"{folder}/{layout.MARKS}", None, _MOST_BYTES), lanes))
    except (FileNotFoundError, FormatError):
        return []


def _parse(data: bytes, lanes: int) -> Iterator[Mark]:
    kind = record_type(lanes)
    count, seed, before = len(data) // kind.itemsize, 0, np.zeros(lanes, np.int64)
    for at, record in enumerate(np.frombuffer(data[: count * kind.itemsize], kind)):
        start = at * kind.itemsize
        own = crc32c(data[start : start + kind.itemsize - 4], seed)
        if record["size"] != kind.itemsize or record["own"] != own:
            return
        rows = np.array(record["rows"], np.int64)
        if (rows < before).any() or int(rows.max()) > layout.POSITION_MASK // lanes:
            return
        seed, before = own, rows
        yield Mark(rows, Sums(int(record["crc"]), int(record["priority"])), float(record["time"]), own)


@lru_cache(maxsize=64)
def record_type(lanes: int) -> np.dtype[np.void]:
    rows, sums = ("rows", "<i8", (lanes,)), [("priority", "<u4"), ("own", "<u4")]
    return np.dtype([("size", "<u4"), ("crc", "<u4"), ("time", "<f8"), rows, *sums])


def cut_marks(folder: str, lanes: int, rows: Ints) -> None:
    """Remove, from the end of a segment's log, the marks that cover more than ``rows[lane]`` rows of any lane."""
    marks = read_marks(folder, lanes)
    kept = sum(bool((mark.rows <= rows).all()) for mark in marks)
    if kept < len(marks):
        os.truncate(f"{folder}/{layout.MARKS}", kept * record_type(lanes).itemsize)


# --- the bytes of rows -----------------------------------------------------------------------------------------------


def new_rows_crc(
    info: SegmentInfo,
    before: Extent,
    upto: Extent,
    mapped: Callable[[str, int], Mapping] | None = None,
) -> Sums:
    """Return the checksums of the rows from the extent ``before`` to the extent ``upto``.

    If ``mapped`` is given, this function maps chunks in place of `SegmentInfo.map_chunk`. Raises FileNotFoundError if a
    chunk is missing, FormatError if it has the wrong size.
    """
    # CRC-32C inverts its register at the start and at the end. The checksum of priorities undoes both inversions, so
    # that it is 0 for zeros.
    sums, bounds = [0, _INVERTED], dict[bool, tuple[Ints, Ints, int, int]]()
    for leaf, array in sorted(info.arrays.items()):
        edges = bounds.get(array.is_of_episodes)
        if edges is None:
            begin, end = before.of(leaf), upto.of(leaf)
            edges = begin, end, int(begin[end > begin].min(initial=1 << 62)), int(end.max())
            bounds[array.is_of_episodes] = edges
        *edge_rows, first, last = edges
        which, per_chunk = int(leaf == layout.PRIORITY), info.chunk_rows[leaf]
        for chunk in range(first // per_chunk, -(-last // per_chunk)):
            start, stop = (np.minimum(np.maximum(edge - chunk * per_chunk, 0), per_chunk) for edge in edge_rows)
            if (start < stop).any():
                mapping = (mapped or info.map_chunk)(leaf, chunk)
                sums[which] = _rows_crc(mapping, array.row_bytes, per_chunk, start, stop, sums[which])
    return Sums(sums[0], sums[1] ^ _INVERTED)


def _rows_crc(mapping: Mapping, row_bytes: int, per_chunk: int, start: Ints, stop: Ints, crc: int) -> int:
    before = np.arange(len(start)) * per_chunk
    ranges = join_ranges(before + start, before + stop)  # if all rows of a chunk are new, they are one range
    count = np.maximum(stop - start, 0)
    if len(ranges) == 1 or int(count.sum()) * row_bytes >= _LONG * len(ranges):
        data = np.asarray(mapping).data
        for first, last in ranges:
            crc = crc32c(data[first * row_bytes : last * row_bytes], crc)  # releases the GIL
        return crc
    items = np.asarray(mapping).view(f"V{row_bytes}")
    at = places_of(before + start, count)
    step = max(1, _BLOCK_BYTES // row_bytes)
    for some in range(0, len(at), step):
        crc = crc32c(items[at[some : some + step]].tobytes(), crc)
    return crc


# --- trusted rows ----------------------------------------------------------------------------------------------------


def proven_rows(info: SegmentInfo) -> Ints:
    """Return, for each lane, the number of rows that marks prove, ``(lanes,)``.

    The marks are checked against the bytes of the rows, one mark after another, up to the first mismatch.
    """
    proven = Extent.begin(len(info.lanes))
    for mark in read_marks(str(info.path), len(info.lanes)):
        try:
            upto = extent_of(info, mark.rows, proven)
            if new_rows_crc(info, proven, upto) != mark.sums:
                break
        except (OSError, FormatError):
            break  # a chunk with rows that the mark covers is missing
        proven = upto
    return proven.rows


def shows_live_rows(info: SegmentInfo) -> bool:
    """Return whether readers may trust all committed rows of a segment, even rows without a mark."""
    return info.sealed or (bool(info.boot) and info.boot == boot_id() and info.is_in_place)


def map_trusted(info: SegmentInfo) -> tuple[Ints, Ints]:
    """Return, for each lane, two numbers of rows that can be trusted, as arrays ``(lanes,)``.

    The first array counts rows with a trusted observation, and the second array counts rows in which all fields are
    trusted. Usually both arrays are mapped counters, which grow while the segment is written. If the counters cannot be
    trusted, both arrays have the numbers in `SegmentInfo.shown`. If `shown` is None, both arrays have the numbers of
    rows that marks prove, and all bytes that marks cover are read. Raises FileNotFoundError if the segment was evicted,
    FormatError if a counter is damaged.
    """
    if not shows_live_rows(info):
        rows = proven_rows(info) if info.shown is None else np.array(info.shown, np.int64)
        os.stat(info.path)  # for an evicted segment, this raises now, and not when rows are read
        return rows, rows
    observed, committed = (
        map_lane_counter(f"{info.path}/{name}", len(info.lanes)) for name in (layout.OBSERVED, layout.COMMITTED)
    )
    return observed, committed


# --- making marks ----------------------------------------------------------------------------------------------------


class MarkLog:
    """Appends marks to a segment's log. Only one thread at a time may use this object.

    The log stays open and chunks stay mapped until this object is garbage collected.
    """

    def __init__(self, info: SegmentInfo) -> None:
        self._info, self._fd = info, -1
        self.path = f"{info.path}/{layout.MARKS}"
        self._full = (
            f"no space in {info.root.path} to make appended steps durable; readers see them, but a power loss would "
            "take them: free some space and append again"
        )
        self._kind = record_type(len(info.lanes))
        marks = read_marks(str(info.path), len(info.lanes))
        self._count = len(marks)
        self.rows: Ints = marks[-1].rows if marks else np.zeros(len(info.lanes), np.int64)
        self._marked: Extent | None = None  # the `Extent` with these `rows`; None: not computed yet
        self._seed = marks[-1].own if marks else 0
        self._mapped: dict[str, tuple[int, Mapping]] = {}  # by array: the chunk that was mapped last

    def create(self) -> None:
        with storage_errors(self.path, self._full):
            self._open()

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
            close_when_collected(self, self._fd)
        return self._fd

    def _map_chunk(self, leaf: str, chunk: int) -> Mapping:
        known, mapping = self._mapped.get(leaf, (-1, None))
        if mapping is None or known != chunk:
            mapping = self._info.map_chunk(leaf, chunk)
            self._mapped[leaf] = chunk, mapping
        return mapping

    @property
    def marked(self) -> Extent:
        if self._marked is None:
            self._marked = extent_of(self._info, self.rows)
        return self._marked

    def extent(self, rows: Ints) -> Extent:
        return extent_of(self._info, rows, self.marked, self._map_chunk)

    def chunks_behind(self, leaf: str, upto: Extent) -> set[int]:
        return _chunks_between(self.marked.of(leaf), upto.of(leaf), self._info.chunk_rows[leaf])

    def append(self, upto: Extent, *, synced: bool = True) -> None:
        """Append a mark that covers all rows up to the extent ``upto``; these must be committed and durable.

        ``synced``: the mark is made durable, too. Raises StorageFull if the disk has no space, or the system's OSError.
        After an error, earlier marks are intact, and the call may be repeated.
        """
        rows = upto.rows
        crc, priority = new_rows_crc(self._info, self.marked, upto, self._map_chunk)
        record = np.zeros(1, self._kind)
        record["size"], record["crc"], record["time"] = self._kind.itemsize, crc, time.time()
        record["rows"][0], record["priority"] = rows, priority
        data = record.tobytes()[:-4]
        own = crc32c(data, self._seed)
        with storage_errors(self.path, self._full):
            # A failed attempt may have left bytes after the last valid mark: the new mark overwrites these bytes.
            write_at(self._open(), data + own.to_bytes(4, "little"), self._count * self._kind.itemsize)
            if synced:
                os.fdatasync(self._open())
        self._count, self._seed, self.rows = self._count + 1, own, rows.copy()
        self._marked = Extent(self.rows, upto.values)


class DurableRows:
    """Makes rows of a segment durable, and appends marks of these rows to the segment's log.

    Files stay open between marks, until this object is garbage collected. This saves system calls: after each call,
    this thread may have to wait until the appending thread releases the GIL.

    ``after_sync`` is called with the path of each array whose chunks were synced. ``is_left``: the segment's writer
    publishes no further rows, and the segment may be sealed while a mark is made. With ``is_left``, making a mark
    changes no byte that a checksum covers, and does not set back the modification time of a sealed chunk.

    Concurrency: one thread at a time; it need not be the appending thread.
    """

    def __init__(
        self, info: SegmentInfo, after_sync: Callable[[str], None] = lambda _: None, *, is_left: bool = False
    ) -> None:
        self._info, self._after_sync, self._is_left = info, after_sync, is_left
        self._log = MarkLog(info)
        self._counter = open_lane_counter(f"{info.path}/{layout.DURABLE}", len(info.lanes), late=True)
        self._named: dict[str, int] = {}  # by array: the highest number of a chunk whose file name is durable
        self._open: dict[str, _OpenChunk] = {}  # by array: the chunk that was synced last
        self._is_new = True

    def mark(self, rows: Ints) -> None:
        """Make the first ``rows[lane]`` rows of each lane durable, and append a mark of these rows.

        Raises StorageFull if the disk has no room for the mark; the rows are durable, and the call may be repeated. If
        the system raises an OSError, it is unknown which rows are durable.
        """
        if not self._is_new and (rows == self._log.rows).all():
            return
        upto = self._log.extent(rows)
        for leaf in self._info.chunk_rows:
            self._sync_array(leaf, self._log.chunks_behind(leaf, upto))
        if self._is_new:
            self._sync_new_segment()
        self._log.append(upto)
        self.finish(rows)

    # `prepare`, `append` and `finish` do the work of `mark` for many segments, with two syncs of their file system. The
    # caller syncs after `prepare`, for the rows and the names of files, and again after `append`, for the marks.

    def prepare(self, rows: Ints) -> None:
        """Set the modification times of chunks with rows that no mark covers.

        Copying tools compare these times, but writes through mapped memory may leave them unchanged.
        """
        upto = self._log.extent(rows)
        for leaf in self._info.chunk_rows:
            for chunk in self._log.chunks_behind(leaf, upto):
                note_changed(self._info.chunk_path(leaf, chunk), for_good=self._is_left)
        if self._is_new:
            note_changed(f"{self._info.root.counters_folder}/c.0")

    def append(self, rows: Ints) -> None:
        self._log.append(self._log.extent(rows), synced=False)

    def finish(self, rows: Ints) -> None:
        self._is_new = False
        if not self._is_left:
            self._counter[:] = rows

    def _sync_array(self, leaf: str, chunks: set[int]) -> None:
        for chunk in sorted(chunks):
            fd = self._descriptor(leaf, chunk)
            note_changed(fd, for_good=self._is_left)
            os.fdatasync(fd)
        if chunks:
            self._after_sync(leaf)
        newest = max(chunks, default=-1)
        if newest > self._named.get(leaf, -1):
            sync_file(self._info.path / leaf / layout.METADATA)
            sync_folder(self._info.path / leaf)
            self._named[leaf] = newest

    def _descriptor(self, leaf: str, chunk: int) -> int:
        known = self._open.get(leaf)
        if known is None or known.number != chunk:
            self._open.pop(leaf, None)
            if len(self._open) >= MOST_DESCRIPTORS:
                del self._open[next(iter(self._open))]
            known = self._open[leaf] = _OpenChunk(self._info.chunk_path(leaf, chunk), chunk)
        return known.fd

    def _sync_new_segment(self) -> None:
        path, root = self._info.path, self._info.root
        for name in layout.LANE_COUNTERS:
            sync_file(path / name / "c.0")
        for folder in [*(path / below for below in self._info.blueprint.paths), path]:
            sync_file(folder / layout.METADATA)
            sync_folder(folder)
        for folder in (path.parent, root.counters_folder, root.folder):
            sync_folder(folder)
        note_changed(f"{root.counters_folder}/c.0")
        sync_file(root.counters_folder / "c.0")
        # The log's file name must be durable too: without this name, a power loss would remove the whole log.
        self._log.create()
        sync_folder(os.path.dirname(self._log.path))
        self._is_new = False


class _OpenChunk:
    def __init__(self, path: str, number: int) -> None:
        self.number, self.fd = number, open_regular(path, None)
        close_when_collected(self, self.fd)


def _chunks_between(before: Ints, rows: Ints, per_chunk: int) -> set[int]:
    grown = before < rows
    begin, end = (before[grown] // per_chunk).tolist(), ((rows[grown] - 1) // per_chunk).tolist()
    return {chunk for first, last in set(zip(begin, end, strict=True)) for chunk in range(first, last + 1)}
