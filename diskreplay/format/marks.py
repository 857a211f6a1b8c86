"""Marks: the log in which an unsealed segment says which of its rows are durable, and by which bytes they are known.

While a segment is written, its process brings what was committed to the disk every few seconds and then appends a mark:
the rows of each lane, the CRC-32C of the bytes that came since the mark before, and the mark's own checksum, which goes
on from that of the mark before. So rows prove themselves wherever the files are: after a reboot, a move, a copy by any
tool in any order, or in a snapshot of a volume, the rows of the longest prefix of marks that fits are whole.

A mark of a segment with L lanes is ``24 + 8 L`` bytes, little-endian: its size (uint32), the checksum of the new bytes
(uint32), when it was made in seconds since 1970 (float64), the rows of each lane (L int64), zeros (uint32), the CRC-32C
of all that precedes, which starts from that of the mark before (uint32). The new bytes are taken array after array in
the order of their paths, of each chunk after chunk, in each lane after lane.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StorageFull
from diskreplay.folders import close_when_collected
from diskreplay.format import layout
from diskreplay.format.durable import write_at
from diskreplay.format.mapping import Mapping, map_file, opened, read_regular
from diskreplay.format.metadata import RowArray
from diskreplay.format.root import Root

Ints = NDArray[np.int64]

# Bytes of one lane's new rows in a chunk from which on they are worth a call of their own; fewer are put together.
_LONG = 4096
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 30


class Mark(NamedTuple):
    """One entry of the log: the rows of each lane, the checksum of the bytes since the entry before, and when."""

    rows: Ints
    crc: int
    time: float


class Place(NamedTuple):
    """Where a segment's rows are: its folder, the number of its lanes, and the rows a chunk of each array."""

    folder: str
    lanes: int
    chunk_rows: dict[str, int]


def log_path(folder: str) -> str:
    """Return the path of a segment's log of marks."""
    return f"{folder}/{layout.DURABLE}/{layout.MARKS}"


def read_marks(folder: str, lanes: int) -> list[Mark]:
    """Return the marks of a segment's log up to the first one that does not fit its own checksum.

    Whether the rows fit is another question: see `proven_rows`. Empty where there is no log.
    """
    try:
        return list(_parse(read_regular(log_path(folder), None, _MOST_BYTES), lanes))
    except (FileNotFoundError, FormatError):
        return []


def _parse(data: bytes, lanes: int) -> Iterator[Mark]:
    kind = _record(lanes)
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
        yield Mark(rows, int(record["crc"]), float(record["time"]))


@lru_cache(maxsize=64)
def _record(lanes: int) -> np.dtype[np.void]:
    return np.dtype(
        [("size", "<u4"), ("crc", "<u4"), ("time", "<f8"), ("rows", "<i8", (lanes,)), ("zero", "<u4"), ("own", "<u4")]
    )


class MarkLog:
    """The end of a segment's log, to which marks are appended. One thread at a time.

    The log stays open and chunks stay mapped until this object is collected.
    """

    def __init__(self, root: Root, place: Place) -> None:
        self._root, self._place, self._fd = root, place, -1
        self._kind = _record(place.lanes)
        marks = read_marks(place.folder, place.lanes)
        self._count = len(marks)
        self.rows: Ints = marks[-1].rows if marks else np.zeros(place.lanes, np.int64)
        self._seed = self._read_seed()
        self._mapped: dict[str, tuple[int, Mapping]] = {}  # the last chunk of each array that was looked at

    @property
    def path(self) -> str:
        """The file."""
        return log_path(self._place.folder)

    def create(self) -> None:
        """Make the file, empty, where there is none.

        Raises StorageFull where there is no space, or the system's OSError.
        """
        try:
            self._open()
        except OSError as error:
            raise self._explained(error) from error

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            close_when_collected(self, self._fd)
        return self._fd

    def _map_chunk(self, place: Place, array: RowArray, per_chunk: int, chunk: int) -> Mapping:
        known, mapping = self._mapped.get(array.path, (-1, None))
        if mapping is None or known != chunk:
            mapping = map_chunk(place, array, per_chunk, chunk)
            self._mapped[array.path] = chunk, mapping
        return mapping

    def _explained(self, error: OSError) -> OSError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        return StorageFull(
            error.errno,
            f"no space in {self._root.path} to make durable what was appended; it is there, but a loss of power would "
            "take it: free some and append again",
        )

    def _read_seed(self) -> int:
        if not self._count:
            return 0
        with opened(self.path, None) as fd:
            return int.from_bytes(os.pread(fd, 4, self._count * self._kind.itemsize - 4), "little")

    def append(self, rows: Ints) -> None:
        """Append a mark of committed rows that are on the disk, and bring it there.

        Raises StorageFull where there is no space, or the system's OSError; the log is as good as before, and the call
        may be repeated.
        """
        crc = new_rows_crc(self._root, self._place, self.rows, rows, 0, self._map_chunk)
        record = np.zeros(1, self._kind)
        record["size"], record["crc"], record["time"] = self._kind.itemsize, crc, time.time()
        record["rows"][0] = rows
        data = record.tobytes()[:-4]
        own = crc32c(data, self._seed)
        try:
            # What an earlier attempt left behind the last whole mark is overwritten.
            write_at(self._open(), data + own.to_bytes(4, "little"), self._count * self._kind.itemsize)
            os.fdatasync(self._open())
        except OSError as error:
            raise self._explained(error) from error
        self._count, self._seed, self.rows = self._count + 1, own, rows.copy()


def cut_marks(folder: str, lanes: int, rows: Ints) -> None:
    """Cut off the marks of more than these rows, which did not fit; the log then ends with what is proven."""
    marks = read_marks(folder, lanes)
    kept = sum(bool((mark.rows <= rows).all()) for mark in marks)
    if kept < len(marks):
        os.truncate(log_path(folder), kept * _record(lanes).itemsize)


# --- the bytes of rows -----------------------------------------------------------------------------------------------


def map_chunk(place: Place, array: RowArray, per_chunk: int, chunk: int) -> Mapping:
    """Map a chunk file; FileNotFoundError or FormatError where it is not there, or has another size."""
    path = f"{place.folder}/{array.path}/{array.chunk_key(chunk)}"
    return map_file(path, place.lanes * per_chunk * array.row_bytes)


def new_rows_crc(
    root: Root,
    place: Place,
    before: Ints,
    rows: Ints,
    crc: int,
    mapped: Callable[[Place, RowArray, int, int], Mapping] = map_chunk,
) -> int:
    """Return the CRC-32C of the bytes of all lanes' rows from ``before`` up to ``rows``, going on from ``crc``.

    ``mapped`` gives the mapping of a chunk: of a place, an array, its rows a chunk, and the chunk's number. Raises
    FileNotFoundError or FormatError where a chunk is not there, or has another size.
    """
    first, last = int(before[rows > before].min(initial=1 << 62)), int(rows.max())
    for path in sorted(root.blueprint.arrays):
        array, per_chunk = root.blueprint.arrays[path], place.chunk_rows[path]
        for chunk in range(first // per_chunk, -(-last // per_chunk)):
            start, stop = (np.minimum(np.maximum(edge - chunk * per_chunk, 0), per_chunk) for edge in (before, rows))
            if (start < stop).any():
                crc = _rows_crc(mapped(place, array, per_chunk, chunk), array.row_bytes, per_chunk, start, stop, crc)
    return crc


def _rows_crc(mapping: Mapping, row_bytes: int, per_chunk: int, start: Ints, stop: Ints, crc: int) -> int:
    """Go on with the rows ``[start[lane], stop[lane])`` of each lane of one chunk."""
    lanes = np.flatnonzero(start < stop)
    count = stop[lanes] - start[lanes]
    begin = lanes * per_chunk + start[lanes]
    if len(lanes) == 1 or int(count.sum()) * row_bytes >= _LONG * len(lanes):
        data = np.asarray(mapping).data
        for at, rows in zip(begin.tolist(), count.tolist(), strict=True):
            crc = crc32c(data[at * row_bytes : (at + rows) * row_bytes], crc)  # others run meanwhile
        return crc
    # Of few rows a lane, a call for each would take longer than to put them side by side.
    items = np.asarray(mapping).view(f"V{row_bytes}")
    at = np.repeat(begin - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    step = max(1, _BLOCK_BYTES // row_bytes)
    for some in range(0, len(at), step):
        crc = crc32c(items[at[some : some + step]].tobytes(), crc)
    return crc


# --- what they prove -------------------------------------------------------------------------------------------------


def proven_rows(root: Root, place: Place) -> Ints:
    """Return the rows of each lane that the longest prefix of marks that fits covers, ``(lanes,)``.

    Every marked byte is read.
    """
    rows = np.zeros(place.lanes, np.int64)
    for mark in read_marks(place.folder, place.lanes):
        try:
            if new_rows_crc(root, place, rows, mark.rows, 0) != mark.crc:
                break
        except (OSError, FormatError):
            break  # a chunk that the mark tells of is not here
        rows = mark.rows
    return rows
