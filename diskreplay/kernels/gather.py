"""Copy windows of rows out of mapped chunks, addressed in bytes so that one compiled kernel serves every dtype.

An item is a lane of a segment and `length` rows from `row + offset` on. A row below `floor` is replaced by row `floor`
(the first frame of a stack repeats); a row at or above `stop` comes out as zeros. Every row is checked against the
table of chunks before its address is formed: the kernels return the first item with a row whose chunk does not exist
or is not mapped, or -1 when all were copied.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.stream import WIDE

if jit.COMPILED:
    from diskreplay.kernels.jit import copy_bytes, fence, prefetch
    from diskreplay.kernels.stream import stream_apart

Ints = NDArray[np.int64]

# Rows are scattered over memory: while one is copied, the first lines of the next eight are on their way.
AHEAD = 8


@jit.kernel("int", *["ints"] * 5, "int", "int", *["ints"] * 5, "int", "int", "out_bytes2")
def gather(
    slot: Ints,
    lane: Ints,
    row: Ints,
    floor: Ints,
    stop: Ints,
    offset: int,
    length: int,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    lanes: Ints,
    bases: Ints,
    row_bytes: int,
    streamed: int,
    out: NDArray[np.uint8],
) -> int:
    """Copy the window of every item into `out` (items, length * row_bytes), one copy a contiguous run.

    `streamed`: long runs are copied past the caches.
    """
    out_address = out.ctypes.data
    for ahead in range(slot.size + AHEAD):
        if ahead < slot.size and 0 <= slot[ahead] < chunks.size:
            s = slot[ahead]
            r = min(max(row[ahead] + offset, floor[ahead]), stop[ahead] - 1)
            c = first_chunk[s] + (r >> shift[s])
            if 0 <= c < bases.size:
                prefetch(bases[c] + ((lane[ahead] << shift[s]) + (r & ((1 << shift[s]) - 1))) * row_bytes)
        i = ahead - AHEAD
        if i < 0:
            continue
        s = slot[i]
        if s < 0 or s >= chunks.size or lane[i] < 0 or lane[i] >= lanes[s]:
            return i
        bits = shift[s]
        rows_a_chunk = 1 << bits
        begin = row[i] + offset
        done = 0
        while done < length:
            r = max(begin + done, floor[i])
            if r >= stop[i]:
                out[i, done * row_bytes :] = 0
                break
            c = r >> bits
            if r < 0 or c >= chunks[s]:
                return i
            c += first_chunk[s]
            if c < 0 or c >= bases.size or bases[c] == 0:
                return i
            inside = r & (rows_a_chunk - 1)
            run = 1 if r > begin + done else min(length - done, stop[i] - r, rows_a_chunk - inside)
            source = bases[c] + ((lane[i] << bits) + inside) * row_bytes
            target = out_address + i * out.shape[1] + done * row_bytes
            if streamed and run * row_bytes >= WIDE:
                stream_apart(target, source, run * row_bytes)
            else:
                copy_bytes(target, source, run * row_bytes)
            done += run
    if streamed:
        fence()
    return -1


def row_address(
    slot: int,
    lane: int,
    row: int,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    lanes: Ints,
    bases: Ints,
    row_bytes: int,
) -> int:
    """Return where a row lies, or 0 when its chunk does not exist or is not mapped."""
    if not (0 <= slot < len(chunks) and 0 <= lane < lanes[slot] and 0 <= row >> int(shift[slot]) < chunks[slot]):
        return 0
    rows_a_chunk = 1 << int(shift[slot])
    index = int(first_chunk[slot]) + row // rows_a_chunk
    if not 0 <= index < len(bases) or bases[index] == 0:
        return 0
    return int(bases[index]) + (lane * rows_a_chunk + row % rows_a_chunk) * row_bytes


def gather_plain(
    slot: Ints,
    lane: Ints,
    row: Ints,
    floor: Ints,
    stop: Ints,
    offset: int,
    length: int,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    lanes: Ints,
    bases: Ints,
    row_bytes: int,
    streamed: int,
    out: NDArray[np.uint8],
) -> int:
    """Do what `gather` does, row after row."""
    for i in range(len(slot)):
        at = int(slot[i]), int(lane[i])
        if not (0 <= at[0] < len(chunks) and 0 <= at[1] < lanes[at[0]]):
            return i
        for j in range(length):
            target = out[i, j * row_bytes : (j + 1) * row_bytes]
            r = max(int(row[i]) + offset + j, int(floor[i]))
            if r >= stop[i]:
                target[:] = 0
                continue
            source = row_address(*at, r, first_chunk, chunks, shift, lanes, bases, row_bytes)
            if source == 0:
                return i
            target[:] = np.frombuffer(ctypes.string_at(source, row_bytes), np.uint8)
    return -1
