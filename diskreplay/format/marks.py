"""Marks: the log in which an unsealed segment says which of its rows are durable, and by which bytes they are known.

While a segment is written, its process makes what was committed durable every few seconds and then appends a mark:
the rows of each lane, the CRC-32C of the bytes that came since the mark before, and the mark's own checksum, which goes
on from that of the mark before. So rows prove themselves wherever the files are: after a reboot, a move, a copy by any
tool in any order, or in a snapshot of a volume, the rows of the longest prefix of marks that fits are whole.

The process that writes a segment also publishes rows in memory that all processes of this boot share. A reader may
trust these counters only where it has the very same file: in the same boot, on the same volume, with the same inode.
Anywhere else memory says nothing, and only the marks do.

A mark of a segment with L lanes is ``24 + 8 L`` bytes, little-endian: its size (uint32), the checksum of the new bytes
(uint32), when it was made in seconds since 1970 (float64), the rows of each lane (L int64), a checksum of the new
priorities (uint32), the CRC-32C of all that precedes, which starts from that of the mark before (uint32). The new bytes
are taken array after array in the order of their paths, of each chunk after chunk, in each lane after lane.

Priorities have a checksum of their own, which is 0 for zeros and where there are none: so marks that were made before a
segment got this array fit as well when it has it.
"""

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.commit import map_lane_counter
from diskreplay.format.machine import boot_id
from diskreplay.format.mapping import Mapping, read_regular
from diskreplay.format.segment import SegmentInfo

Ints = NDArray[np.int64]

# Bytes of one lane's new rows in a chunk from which on they are worth a call of their own; fewer are put together.
_LONG = 4096
_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 30
_INVERTED = 0xFFFFFFFF


class Sums(NamedTuple):
    """The checksums of new rows: of all arrays but the priorities, and of these."""

    crc: int
    priority: int


class Mark(NamedTuple):
    """One entry of the log: rows of each lane, checksums of the rows since the entry before, when, its own checksum."""

    rows: Ints
    sums: Sums
    time: float
    own: int


def read_marks(folder: str, lanes: int) -> list[Mark]:
    """Return the marks of a segment's log up to the first one that does not fit its own checksum.

    Whether the rows fit is another question: see `proven_rows`. Empty where there is no log.
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
    """Return how a mark of so many lanes is written."""
    rows, sums = ("rows", "<i8", (lanes,)), [("priority", "<u4"), ("own", "<u4")]
    return np.dtype([("size", "<u4"), ("crc", "<u4"), ("time", "<f8"), rows, *sums])


def cut_marks(folder: str, lanes: int, rows: Ints) -> None:
    """Cut off the marks of more than these rows, which did not fit; the log then ends with what is proven."""
    marks = read_marks(folder, lanes)
    kept = sum(bool((mark.rows <= rows).all()) for mark in marks)
    if kept < len(marks):
        os.truncate(f"{folder}/{layout.MARKS}", kept * record_type(lanes).itemsize)


# --- the bytes of rows -----------------------------------------------------------------------------------------------


def new_rows_crc(
    info: SegmentInfo,
    before: Ints,
    rows: Ints,
    mapped: Callable[[str, int], Mapping] | None = None,
) -> Sums:
    """Return the checksums of the bytes of all lanes' rows from ``before`` up to ``rows``.

    ``mapped`` gives the mapping of a chunk in place of `SegmentInfo.map_chunk`. Raises FileNotFoundError or FormatError
    where a chunk is not there, or has another size.
    """
    # CRC-32C inverts its register at both ends. Where it is inverted once more, that of zeros stays 0.
    sums, first, last = [0, _INVERTED], int(before[rows > before].min(initial=1 << 62)), int(rows.max())
    for leaf, array in sorted(info.arrays.items()):
        which, per_chunk = int(leaf == layout.PRIORITY), info.chunk_rows[leaf]
        for chunk in range(first // per_chunk, -(-last // per_chunk)):
            start, stop = (np.minimum(np.maximum(edge - chunk * per_chunk, 0), per_chunk) for edge in (before, rows))
            if (start < stop).any():
                mapping = (mapped or info.map_chunk)(leaf, chunk)
                sums[which] = _rows_crc(mapping, array.row_bytes, per_chunk, start, stop, sums[which])
    return Sums(sums[0], sums[1] ^ _INVERTED)


def _rows_crc(mapping: Mapping, row_bytes: int, per_chunk: int, start: Ints, stop: Ints, crc: int) -> int:
    """Return the CRC-32C that goes on from ``crc`` with rows ``[start[lane], stop[lane])`` of each lane of a chunk."""
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


# --- which rows count ------------------------------------------------------------------------------------------------


def proven_rows(info: SegmentInfo) -> Ints:
    """Return the rows of each lane that the longest prefix of marks that fits covers, ``(lanes,)``.

    Every marked byte is read.
    """
    rows = np.zeros(len(info.lanes), np.int64)
    for mark in read_marks(str(info.path), len(info.lanes)):
        try:
            if new_rows_crc(info, rows, mark.rows) != mark.sums:
                break
        except (OSError, FormatError):
            break  # a chunk with marked rows is missing
        rows = mark.rows
    return rows


def shows_live_rows(info: SegmentInfo) -> bool:
    """Whether rows that may be only in this machine's memory can be trusted; those of a sealed segment always can."""
    return info.sealed or (bool(info.boot) and info.boot == boot_id() and info.is_in_place)


def map_trusted(info: SegmentInfo) -> tuple[Ints, Ints]:
    """Map the rows of each lane whose observation, and that as a whole, can be trusted: ``(lanes,)`` each.

    Those of a segment that has to prove its rows do not change; every marked byte of it is read. Raises
    FileNotFoundError where the segment was evicted, FormatError where a counter is damaged.
    """
    if not shows_live_rows(info):
        rows = proven_rows(info)
        os.stat(info.path)  # one that was evicted meanwhile proves nothing
        return rows, rows
    observed, committed = (
        map_lane_counter(f"{info.path}/{name}", len(info.lanes)) for name in (layout.OBSERVED, layout.COMMITTED)
    )
    return observed, committed
