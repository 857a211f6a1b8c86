"""A whole batch of transitions in one call: `scan`, then `gather` of every leaf, then the sums of `nstep`.

One call after the other costs microseconds each, and waits for memory leaf after leaf. Here the address of every row is
formed once, and the row is on its way from memory before the first byte is copied.

A plan has a line of int64 a leaf: the addresses of the arrays of its table, and what `gather` is given beside them. Its
first lines are leaves that are copied to the batch; the others are summands of the return, float32 or float64. Where
the batch's arrays are is said by `targets`, places in `addresses`: one a copied leaf, then one each of `COMPUTED`.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.gather import gather_plain
from diskreplay.kernels.nstep import nstep_plain
from diskreplay.kernels.scan import FLOOR, LANE, SLOT, K, scan, scan_plain
from diskreplay.kernels.stream import WIDE

if jit.COMPILED:
    from diskreplay.kernels.jit import (
        copy_bytes,
        fence,
        load_float32,
        load_float64,
        load_int,
        prefetch,
        store_byte,
        store_float32,
        store_int,
        zero_bytes,
    )
    from diskreplay.kernels.stream import stream_apart

    _scan = jit.apart(scan)

Ints = NDArray[np.int64]

# Columns of a plan: the table's arrays by address (with the lengths that bound them), ...
FIRST_CHUNK, CHUNKS, SHIFT, SLOTS, BASES, BASES_SIZE, ROW_BYTES = range(7)
# ... rows of the table of windows for row and stop, offset, length, and the address of scratch memory for a summand,
# (items, length * row_bytes).
ROW_WINDOW, STOP_WINDOW, OFFSET, LENGTH, SCRATCH = range(7, 12)
PLAN_COLUMNS = 12

COMPUTED = ("reward", "discount", "terminated", "truncated", "index", "n_steps", "weight")
"""What a batch has beside copied leaves, in the order of the last targets; -1 is a target that is not wanted."""
REWARD, DISCOUNT, TERMINATED, TRUNCATED, INDEX, N_STEPS, WEIGHT = range(7)


@jit.kernel("int", "ints2", "ints2", "int", "int", "out_ints2", inner=True)
def _locate(windows: Ints, plan: Ints, leaf: int, copied: int, sources: Ints) -> int:
    """Write where the window of each item starts, and 0 where it is not one run of mapped rows; count the latter."""
    first_chunks, chunk_counts, shifts = plan[leaf, FIRST_CHUNK], plan[leaf, CHUNKS], plan[leaf, SHIFT]
    bases, bases_size, row_bytes = plan[leaf, BASES], plan[leaf, BASES_SIZE], plan[leaf, ROW_BYTES]
    row_window, stop_window = plan[leaf, ROW_WINDOW], plan[leaf, STOP_WINDOW]
    offset, length = plan[leaf, OFFSET], plan[leaf, LENGTH]
    found = 0
    for i in range(windows.shape[1]):
        s = windows[SLOT, i]
        bits = load_int(shifts + 8 * s)
        r = windows[row_window, i] + offset
        c = r >> bits
        sources[leaf, i] = 0
        # Of a summand, the steps of the window; what stands behind them is not read.
        run = length if leaf < copied else windows[K, i]
        inside = r & ((1 << bits) - 1)
        whole = r >= windows[FLOOR, i] and r + run <= windows[stop_window, i] and inside + run <= 1 << bits
        if not whole or c >= load_int(chunk_counts + 8 * s):
            continue
        c += load_int(first_chunks + 8 * s)
        if c >= bases_size:
            continue
        base = load_int(bases + 8 * c)
        if base == 0:
            continue
        source = base + ((windows[LANE, i] << bits) + inside) * row_bytes
        prefetch(source)
        last = source + run * row_bytes - 1
        if (source ^ last) >> 6 != 0:  # of another cache line
            prefetch(last)
        sources[leaf, i] = source
        found += 1
    return windows.shape[1] - found


@jit.kernel("int", "ints2", "ints2", "int", "int", "out_ints2", inner=True)
def _pieces(windows: Ints, plan: Ints, leaf: int, out: int, sources: Ints) -> int:
    """Copy the windows that `_locate` left, piece by piece; return the first item with an unmapped row, or -1."""
    row_bytes, length = plan[leaf, ROW_BYTES], plan[leaf, LENGTH]
    for i in range(windows.shape[1]):
        if sources[leaf, i] != 0:
            continue
        s, lane, stop = windows[SLOT, i], windows[LANE, i], windows[plan[leaf, STOP_WINDOW], i]
        bits = load_int(plan[leaf, SHIFT] + 8 * s)
        chunks, first = load_int(plan[leaf, CHUNKS] + 8 * s), load_int(plan[leaf, FIRST_CHUNK] + 8 * s)
        begin = windows[plan[leaf, ROW_WINDOW], i] + plan[leaf, OFFSET]
        target = out + i * length * row_bytes
        sources[leaf, i] = target
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


@jit.kernel("none", "int", "int", "int", "ints2", "int", inner=True)
def _copy(out: int, nbytes: int, streamed: int, sources: Ints, leaf: int) -> None:
    """Copy the windows that `_locate` found, past the caches if they are wide and that is wanted."""
    # Of a constant width a copy is two moves and no call.
    if nbytes == 16:
        for i in range(sources.shape[1]):
            if sources[leaf, i] != 0:
                copy_bytes(out + i * 16, sources[leaf, i], 16)
    elif nbytes == 8:
        for i in range(sources.shape[1]):
            if sources[leaf, i] != 0:
                copy_bytes(out + i * 8, sources[leaf, i], 8)
    elif nbytes == 4:
        for i in range(sources.shape[1]):
            if sources[leaf, i] != 0:
                copy_bytes(out + i * 4, sources[leaf, i], 4)
    elif streamed and nbytes >= WIDE:
        for i in range(sources.shape[1]):
            if sources[leaf, i] != 0:
                stream_apart(out + i * nbytes, sources[leaf, i], nbytes)
    else:
        for i in range(sources.shape[1]):
            if sources[leaf, i] != 0:
                copy_bytes(out + i * nbytes, sources[leaf, i], nbytes)


@jit.kernel("none", "ints2", "bytes", "ints2", "ints2", "int", "float", "floats", "ints", "ints", inner=True)
def _sum(
    windows: Ints,
    ends: NDArray[np.uint8],
    plan: Ints,
    sources: Ints,
    copied: int,
    gamma: float,
    weights: NDArray[np.float64],
    addresses: Ints,
    computed: Ints,
) -> None:
    """Do what `nstep` does, with the summands where they are."""
    rewards, discounts = computed[REWARD], computed[DISCOUNT]
    terminals, truncations = computed[TERMINATED], computed[TRUNCATED]
    usual = weights.size == 1 and plan[copied, ROW_BYTES] == 4
    for i in range(sources.shape[1]):
        total, power = 0.0, 1.0
        if usual:
            for j in range(windows[K, i]):
                total += power * (np.float64(load_float32(sources[copied, i] + 4 * j)) * weights[0])
                power *= gamma
        else:
            for j in range(windows[K, i]):
                r = 0.0
                for leaf in range(copied, plan.shape[0]):
                    width = plan[leaf, ROW_BYTES]
                    at = sources[leaf, i] + j * width
                    x = np.float64(load_float32(at)) if width == 4 else load_float64(at)
                    r += x * weights[leaf - copied]
                total += power * r
                power *= gamma
        if rewards >= 0:
            store_float32(addresses[rewards] + 4 * i, np.float32(total))
        if discounts >= 0:
            store_float32(addresses[discounts] + 4 * i, np.float32(0.0 if ends[i] & 1 else power))
        if terminals >= 0:
            store_byte(addresses[terminals] + i, np.uint8(ends[i] & 1))
        if truncations >= 0:
            store_byte(addresses[truncations] + i, np.uint8(ends[i] >> 1 & 1))


@jit.kernel(
    "int", "ints", "int", "int", "int", "int", "ints", "ints", "ints", "ints", "ints", "bools",
    "ints", "ints", "ints", "ints", "out_ints2", "out_bytes",
    "ints2", "out_ints2", "float", "floats", "ints", "ints", "int",
)  # fmt: skip
def transitions(
    ids: Ints,
    n: int,
    stack: int,
    whole: int,
    origin: int,
    oldest: Ints,
    lanes: Ints,
    lane_base: Ints,
    committed: Ints,
    observed: Ints,
    sealed: NDArray[np.bool_],
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    bases: Ints,
    windows: Ints,
    ends: NDArray[np.uint8],
    plan: Ints,
    sources: Ints,
    gamma: float,
    weights: NDArray[np.float64],
    addresses: Ints,
    targets: Ints,
    streamed: int,
) -> int:
    """Find the windows of these ids as `scan` does, copy or sum every leaf; return -1, or else an item that could not.

    ``weights`` are those of the summands; without any, what is made of sums is left alone. ``sources`` is scratch,
    (leaves, items). ``streamed``: wide rows are copied past the caches.
    """
    bad = _scan(
        ids, n, stack, whole, origin, oldest, lanes, lane_base, committed, observed, sealed,
        first_chunk, chunks, shift, bases, windows, ends,
    )  # fmt: skip
    if bad >= 0:
        return bad
    copied = plan.shape[0] - weights.size
    left = 0
    for leaf in range(plan.shape[0]):
        if plan[leaf, SLOTS] < lanes.size:
            return 0
        left += _locate(windows, plan, leaf, copied, sources)
    for leaf in range(plan.shape[0]):
        out = addresses[targets[leaf]] if leaf < copied else plan[leaf, SCRATCH]
        if leaf < copied:
            _copy(out, plan[leaf, LENGTH] * plan[leaf, ROW_BYTES], streamed, sources, leaf)
        bad = _pieces(windows, plan, leaf, out, sources) if left else -1
        if bad >= 0:
            return bad
    computed = targets[copied:]
    if weights.size:
        _sum(windows, ends, plan, sources, copied, gamma, weights, addresses, computed)
    index, steps, weight = computed[INDEX], computed[N_STEPS], computed[WEIGHT]
    for i in range(ids.size):
        if index >= 0:
            store_int(addresses[index] + 8 * i, ids[i])
        if steps >= 0:
            store_int(addresses[steps] + 8 * i, windows[K, i])
        if weight >= 0:
            store_float32(addresses[weight] + 4 * i, np.float32(1.0))
    if streamed:
        fence()
    return -1


def _array(address: int, count: int, dtype: Any = np.int64) -> NDArray[Any]:
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def transitions_plain(
    ids: Ints,
    n: int,
    stack: int,
    whole: int,
    origin: int,
    oldest: Ints,
    lanes: Ints,
    lane_base: Ints,
    committed: Ints,
    observed: Ints,
    sealed: NDArray[np.bool_],
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    bases: Ints,
    windows: Ints,
    ends: NDArray[np.uint8],
    plan: Ints,
    sources: Ints,
    gamma: float,
    weights: NDArray[np.float64],
    addresses: Ints,
    targets: Ints,
    streamed: int,
) -> int:
    """Do what `transitions` does with the plain kernels, leaf after leaf."""
    bad = scan_plain(
        ids, n, stack, whole, origin, oldest, lanes, lane_base, committed, observed, sealed,
        first_chunk, chunks, shift, bases, windows, ends,
    )  # fmt: skip
    if bad >= 0:
        return bad
    items, copied = len(ids), len(plan) - len(weights)
    r = np.zeros((items, int(plan[copied:, LENGTH].max(initial=0))))
    for number, line in enumerate(plan.tolist()):
        width = line[LENGTH] * line[ROW_BYTES]
        out = _array(int(addresses[targets[number]]) if number < copied else line[SCRATCH], items * width, np.uint8)
        table = [_array(line[column], line[SLOTS]) for column in (FIRST_CHUNK, CHUNKS, SHIFT)]
        row, stop = windows[line[ROW_WINDOW]], windows[line[STOP_WINDOW]]
        bad = gather_plain(
            windows[SLOT], windows[LANE], row, windows[FLOOR], stop, line[OFFSET], line[LENGTH],
            table[0], table[1], table[2], lanes, _array(line[BASES], line[BASES_SIZE]),
            line[ROW_BYTES], streamed, out.reshape(items, width),
        )  # fmt: skip
        if bad >= 0:
            return bad
        if number >= copied:
            r += out.view(f"f{line[ROW_BYTES]}").reshape(r.shape) * weights[number - copied]
    dtypes = (np.float32, np.float32, np.bool_, np.bool_, np.int64, np.int64, np.float32)
    places = [int(target) for target in targets[copied:]]
    outs = [
        _array(int(addresses[p]), items, d) if p >= 0 else np.empty(items, d)
        for p, d in zip(places, dtypes, strict=True)
    ]
    if len(weights):
        scratch = np.empty(items), np.empty(items)
        nstep_plain(r, 0, windows[K], ends, gamma, *scratch, *outs[:4])
    outs[INDEX][:], outs[N_STEPS][:], outs[WEIGHT][:] = ids, windows[K], 1.0
    return -1
