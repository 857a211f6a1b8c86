"""`gather` for several leaves in one call.

One call a leaf costs microseconds of its own, and waits for memory leaf after leaf. Here the first row of every item is
on its way from memory, in all leaves, before the first byte is copied.

A plan has a line of int64 a leaf: the addresses of the arrays of its table, and what `gather` is given beside them.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.gather import gather_plain
from diskreplay.kernels.scan import FLOOR, LANE, SLOT

if jit.COMPILED:
    from diskreplay.kernels.jit import copy_bytes, load_int, prefetch, zero_bytes

Ints = NDArray[np.int64]

# Columns of a plan: the table's arrays by address (with the lengths that bound them), ...
FIRST_CHUNK, CHUNKS, SHIFT, SLOTS, BASES, BASES_SIZE = range(6)
# ... the rest of the table and the window: rows of the table of windows for row and stop, offset, length, and the
# address of the output, (items, length * row_bytes).
ROW_BYTES, ROW, STOP, OFFSET, LENGTH, OUT = range(6, 12)
PLAN_COLUMNS = 12


@jit.kernel("int", "ints2", "ints2", "out_ints2", "int")
def _pieces(windows: Ints, plan: Ints, sources: Ints, leaf: int) -> int:
    """Copy the windows of a leaf that are more than one run; return the first item with an unmapped row, or -1."""
    row_bytes, length = plan[leaf, ROW_BYTES], plan[leaf, LENGTH]
    for i in range(windows.shape[1]):
        if sources[leaf, i] != 0:
            continue
        s, lane, stop = windows[SLOT, i], windows[LANE, i], windows[plan[leaf, STOP], i]
        bits = load_int(plan[leaf, SHIFT] + 8 * s)
        chunks, first = load_int(plan[leaf, CHUNKS] + 8 * s), load_int(plan[leaf, FIRST_CHUNK] + 8 * s)
        begin = windows[plan[leaf, ROW], i] + plan[leaf, OFFSET]
        target = plan[leaf, OUT] + i * length * row_bytes
        done = 0
        while done < length:
            r = max(begin + done, windows[FLOOR, i])
            if r >= stop:
                zero_bytes(target + done * row_bytes, (length - done) * row_bytes)
                break
            c = r >> bits
            if r < 0 or c >= chunks:
                return i
            c += first
            if c < 0 or c >= plan[leaf, BASES_SIZE]:
                return i
            base = load_int(plan[leaf, BASES] + 8 * c)
            if base == 0:
                return i
            inside = r & ((1 << bits) - 1)
            run = 1 if r > begin + done else min(length - done, stop - r, (1 << bits) - inside)
            copy_bytes(target + done * row_bytes, base + ((lane << bits) + inside) * row_bytes, run * row_bytes)
            done += run
    return -1


@jit.kernel("int", "ints2", "ints", "ints2", "out_ints2")
def gather_leaves(windows: Ints, lanes: Ints, plan: Ints, sources: Ints) -> int:
    """Copy the windows of every leaf; return leaf * items + item of the first with an unmapped row, or -1.

    ``sources`` is scratch, (leaves, items).
    """
    items = windows.shape[1]
    for leaf in range(plan.shape[0]):
        first_chunks, chunk_counts, shifts = plan[leaf, FIRST_CHUNK], plan[leaf, CHUNKS], plan[leaf, SHIFT]
        slots, bases, bases_size = plan[leaf, SLOTS], plan[leaf, BASES], plan[leaf, BASES_SIZE]
        row_bytes, offset, length = plan[leaf, ROW_BYTES], plan[leaf, OFFSET], plan[leaf, LENGTH]
        row_window, stop_window = plan[leaf, ROW], plan[leaf, STOP]
        for i in range(items):
            s, lane = windows[SLOT, i], windows[LANE, i]
            if s < 0 or s >= slots or lane < 0 or lane >= lanes[s]:
                return leaf * items + i
            bits = load_int(shifts + 8 * s)
            begin = windows[row_window, i] + offset
            r = min(max(begin, windows[FLOOR, i]), windows[stop_window, i] - 1)
            c = r >> bits
            sources[leaf, i] = 0
            if r < 0 or c >= load_int(chunk_counts + 8 * s):
                continue
            c += load_int(first_chunks + 8 * s)
            if c < 0 or c >= bases_size:
                continue
            base = load_int(bases + 8 * c)
            if base == 0:
                continue
            inside = r & ((1 << bits) - 1)
            source = base + ((lane << bits) + inside) * row_bytes
            prefetch(source)
            # A window that is one run is copied as it is; the others, below, piece by piece.
            if r == begin and r + length <= windows[stop_window, i] and inside + length <= 1 << bits:
                sources[leaf, i] = source
    for leaf in range(plan.shape[0]):
        out, nbytes = plan[leaf, OUT], plan[leaf, LENGTH] * plan[leaf, ROW_BYTES]
        # Of a constant width a copy is two moves and no call.
        if nbytes == 16:
            for i in range(items):
                if sources[leaf, i] != 0:
                    copy_bytes(out + i * 16, sources[leaf, i], 16)
        elif nbytes == 8:
            for i in range(items):
                if sources[leaf, i] != 0:
                    copy_bytes(out + i * 8, sources[leaf, i], 8)
        elif nbytes == 20:
            for i in range(items):
                if sources[leaf, i] != 0:
                    copy_bytes(out + i * 20, sources[leaf, i], 20)
        else:
            for i in range(items):
                if sources[leaf, i] != 0:
                    copy_bytes(out + i * nbytes, sources[leaf, i], nbytes)
        bad = _pieces(windows, plan, sources, leaf)
        if bad >= 0:
            return leaf * items + bad
    return -1


def _array(address: int, count: int) -> Ints:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def gather_leaves_plain(windows: Ints, lanes: Ints, plan: Ints, sources: Ints) -> int:
    """Do what `gather_leaves` does, leaf after leaf."""
    items = windows.shape[1]
    for number, leaf in enumerate(plan.tolist()):
        first_chunk, chunks, shift = (_array(leaf[column], leaf[SLOTS]) for column in (FIRST_CHUNK, CHUNKS, SHIFT))
        width = leaf[LENGTH] * leaf[ROW_BYTES]
        memory = (ctypes.c_uint8 * (items * width)).from_address(leaf[OUT])
        bad = gather_plain(
            windows[SLOT], windows[LANE], windows[leaf[ROW]], windows[FLOOR], windows[leaf[STOP]],
            leaf[OFFSET], leaf[LENGTH], first_chunk, chunks, shift, lanes, _array(leaf[BASES], leaf[BASES_SIZE]),
            leaf[ROW_BYTES], np.ctypeslib.as_array(memory).reshape(items, width),
        )  # fmt: skip
        if bad >= 0:
            return number * items + bad
    return -1
