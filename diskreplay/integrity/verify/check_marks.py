"""Finds the rows of a segment that its marks prove, as docs/format.md describes."""

import os

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.files import BLOCK_BYTES
from diskreplay.integrity.verify.row_flags import NO_STEP
from diskreplay.segments.documents import layout

Ints = NDArray[np.int64]
_MOST_BYTES = 1 << 30
_INVERTED = 0xFFFFFFFF


def proven_rows(segment: Segment) -> Ints:
    """Return, for each lane, the number of rows that marks prove.

    A mark counts if this mark and all earlier marks match the rows.
    """
    proven, values = np.zeros((2, segment.lanes), np.int64)
    for sums, upto in _marks(segment):
        more = segment.count_values(upto, proven)
        if _new_bytes(segment, (proven, values), (upto, values + more)) != sums:
            break
        proven, values = upto, values + more
    return proven


def _marks(segment: Segment) -> list[tuple[list[int], Ints]]:
    """Return two checksums (see `_new_bytes`) and the rows per lane for each mark before the first invalid mark."""
    where = segment.inside(layout.MARKS)
    if not os.path.lexists(segment.files.path(where)):
        return []
    data = segment.files.read(where, _MOST_BYTES)
    size = 24 + 8 * segment.lanes
    found: list[tuple[list[int], Ints]] = []
    seed, before = 0, np.zeros(segment.lanes, np.int64)
    for start in range(0, len(data or b"") - size + 1, size):
        record = (data or b"")[start : start + size]
        own = crc32c(record[:-4], seed)
        upto = np.frombuffer(record[16:-8], "<i8")
        if int.from_bytes(record[:4], "little") != size or int.from_bytes(record[-4:], "little") != own:
            break
        if (upto < before).any() or int(upto.max()) > layout.POSITION_MASK // segment.lanes:
            break
        found.append(([int.from_bytes(part, "little") for part in (record[4:8], record[-8:-4])], upto))
        seed, before = own, upto
    return found


def _new_bytes(segment: Segment, proven: tuple[Ints, Ints], marked: tuple[Ints, Ints]) -> list[int] | None:
    """Return the two checksums of the rows from ``proven`` up to ``marked``; None: a file is not complete.

    ``proven`` and ``marked`` are pairs of arrays: each lane's number of rows, and its number of rows in arrays of
    episode fields. The first checksum is the CRC-32C of all arrays except priorities. The second checksum is a CRC-32C
    of priorities; the register is not inverted, so that zeros give 0.
    """
    sums = [0, _INVERTED]
    for path in sorted(segment.plan.arrays):
        which, is_of_values = int(path == layout.PRIORITY), layout.is_of_episodes(path)
        before, upto = proven[is_of_values], marked[is_of_values]
        grown = np.flatnonzero(before < upto).tolist()
        per_chunk, row_bytes = segment.chunk_rows[path], segment.plan.arrays[path].row_bytes
        most = max(1, BLOCK_BYTES // max(1, row_bytes))
        first = min((int(before[lane]) // per_chunk for lane in grown), default=0)
        stop = max((-(-int(upto[lane]) // per_chunk) for lane in grown), default=0)
        for chunk in range(first, stop):
            for lane in grown:
                at = max(int(before[lane]), chunk * per_chunk)
                end = min(int(upto[lane]), (chunk + 1) * per_chunk)
                while at < end:
                    data = segment.read_rows(path, lane, at, min(end, at + most))
                    if data is None:
                        return None
                    sums[which], at = crc32c(data, sums[which]), min(end, at + most)
    return [sums[0], sums[1] ^ _INVERTED]


def count_unproven(segment: Segment, proven: Ints) -> int:
    """Return the number of unproven steps: the counter ``committed`` or flags claim them after the proven rows."""
    lanes = segment.lanes
    data = segment.files.quiet().read(segment.inside(f"{layout.COMMITTED}/c.0"), 8 * lanes, 8 * lanes)
    claimed = proven if data is None else np.maximum(np.frombuffer(data, "<i8"), proven)
    return sum(_count_behind(segment, lane, int(proven[lane]), int(claimed[lane])) for lane in range(lanes))


def _count_behind(segment: Segment, lane: int, first: int, claimed: int) -> int:
    """Count a lane's steps from row ``first`` on.

    All steps before row ``claimed`` count. Later steps count up to the last row whose flags are not 0.
    """
    per_chunk, at, steps, pending = segment.chunk_rows[layout.DONE], first, 0, 0
    while True:
        stop = min((at // per_chunk + 1) * per_chunk, at + BLOCK_BYTES)
        data = segment.read_rows(layout.DONE, lane, at, stop)
        if data is None:
            return steps
        flags = np.frombuffer(data, np.uint8)
        used = max(int(np.flatnonzero(flags)[-1]) + 1 if flags.any() else 0, min(claimed - at, len(flags)))
        is_step = (flags & NO_STEP) == 0
        if used > 0:
            steps += pending + int(np.count_nonzero(is_step[:used]))
            pending = 0
        pending += int(np.count_nonzero(is_step[max(used, 0) :]))
        at = stop
