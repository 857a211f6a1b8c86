"""A whole batch in one call: find the windows of its ids, copy rows of every leaf, sum rewards.

One call after the other costs microseconds each, and waits for memory leaf after leaf. Here the address of every row is
formed once, and the row is on its way from memory before the first byte is copied: its first cache line and its last
one are prefetched when it is found.

What is done is said by a record of int64, since each argument of a kernel costs about 50 ns: numbers, and addresses of
arrays, which whoever writes the record keeps alive. Behind its head it has a line a leaf. The first lines are leaves
that are copied: `LENGTH` rows from row `BEGIN` + `OFFSET` of a window on, to the array of the batch that `TARGET`
names. `BEGIN` and `STOP` name rows of the table of windows; see `gathering`. A row below the window's floor is
replaced by the one at the floor (the first frame of a stack repeats); a row at or above `STOP` comes out as zeros. The
other lines are summands of the return, and perhaps one that holds the discount of each step.

Every row is checked against the table of chunks before its address is formed.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED

from . import frozen, gathering as cols, jit
from .find_windows import find_windows
from .stream import WIDE, stream

Ints = NDArray[np.int64]

# Of an index that may be negative for all that the compiler knows, each use costs a comparison.
_at = np.uint64
_LINE = 64  # bytes that a cache reads at once
# Items that are found, and then copied: of more, the first rows that were prefetched would have left the caches.
_PART = 512


@jit.kernel("none", "out_ints", "int", "ints", "ints", "ints", "ints", "int")
def bind_table(
    record: Ints, at: int, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, row_bytes: int
) -> None:
    """Write the table of a leaf into a record, from a column on."""
    record[at + cols.FIRST_CHUNK], record[at + cols.CHUNKS] = first_chunk.ctypes.data, chunks.ctypes.data
    record[at + cols.SHIFT], record[at + cols.BASES] = shift.ctypes.data, bases.ctypes.data
    record[at + cols.FOLDERS], record[at + cols.BASES_SIZE] = min(first_chunk.size, chunks.size, shift.size), bases.size
    record[at + cols.ROW_BYTES] = row_bytes


@jit.inner
def _base(folder: int, chunk: int, first_chunks: int, chunk_counts: int, bases: int, bases_size: int) -> int:
    """Return where a chunk of a folder begins in memory, 0 where it is not mapped; the others are a table's columns."""
    if chunk >= jit.load_int(chunk_counts + 8 * folder):
        return 0
    place = jit.load_int(first_chunks + 8 * folder) + chunk
    return jit.load_int(bases + 8 * place) if _at(place) < _at(bases_size) else 0


@jit.inner
def _locate(windows: Ints, plan: Ints, leaf: int, copied: int, count: int, sources: Ints) -> int:
    """Write where the window of each item starts, and 0 where it is not one run of mapped rows; count the latter."""
    first_chunks, chunk_counts, shifts = plan[leaf, cols.FIRST_CHUNK], plan[leaf, cols.CHUNKS], plan[leaf, cols.SHIFT]
    bases, bases_size, row_bytes = plan[leaf, cols.BASES], plan[leaf, cols.BASES_SIZE], plan[leaf, cols.ROW_BYTES]
    row_window, stop_window, offset = plan[leaf, cols.BEGIN], plan[leaf, cols.STOP], plan[leaf, cols.OFFSET]
    length = plan[leaf, cols.LENGTH]
    found = 0
    for i in range(count):
        folder, before = windows[cols.FOLDER, _at(i)], windows[cols.BEFORE, _at(i)]
        bits = jit.load_int(shifts + 8 * folder)
        r = windows[_at(row_window), _at(i)] + offset
        c = (before + r) >> bits
        # Of a summand, the steps of the window; what stands behind them is not read.
        run = length if leaf < copied else windows[cols.K, _at(i)]
        inside = (before + r) & ((1 << bits) - 1)
        whole = (
            r >= windows[cols.FLOOR, _at(i)]
            and r + run <= windows[_at(stop_window), _at(i)]
            and inside + run <= 1 << bits
        )
        source = np.int64(0)
        base = _base(folder, c, first_chunks, chunk_counts, bases, bases_size) if whole else 0
        if base != 0:
            source = base + ((windows[cols.LINE, _at(i)] << bits) + inside) * row_bytes
            jit.prefetch(source)
            jit.prefetch(source + run * row_bytes - 1)
            found += 1
        sources[_at(leaf), _at(i)] = source
    return count - found


@jit.inner
def _locate_found(windows: Ints, plan: Ints, leaf: int, copied: int, count: int, sources: Ints) -> int:
    """Do what `_locate` does with windows that were found, and one row of each or its steps: nearly always.

    These are not below the floor, nor is the end of the steps behind the stop, so there is less to check and to keep in
    registers. Each row lies in one cache line.
    """
    first_chunks, chunk_counts, shifts = plan[leaf, cols.FIRST_CHUNK], plan[leaf, cols.CHUNKS], plan[leaf, cols.SHIFT]
    bases, bases_size, row_bytes = plan[leaf, cols.BASES], plan[leaf, cols.BASES_SIZE], plan[leaf, cols.ROW_BYTES]
    row_window, stop_window = _at(plan[leaf, cols.BEGIN]), _at(plan[leaf, cols.STOP])
    is_step, found = leaf < copied, 0
    for i in range(count):
        folder, before, r = windows[cols.FOLDER, _at(i)], windows[cols.BEFORE, _at(i)], windows[row_window, _at(i)]
        bits = jit.load_int(shifts + 8 * folder)
        c = (before + r) >> bits
        inside = (before + r) & ((1 << bits) - 1)
        source = np.int64(0)
        whole = r < windows[stop_window, _at(i)] if is_step else inside + windows[cols.K, _at(i)] <= 1 << bits
        base = _base(folder, c, first_chunks, chunk_counts, bases, bases_size) if whole else 0
        if base != 0:
            source = base + ((windows[cols.LINE, _at(i)] << bits) + inside) * row_bytes
            jit.prefetch(source)
            if not is_step:
                jit.prefetch(source + windows[cols.K, _at(i)] * row_bytes - 1)
            found += 1
        sources[_at(leaf), _at(i)] = source
    return count - found


@jit.inner
def _run(windows: Ints, plan: Ints, leaf: int, i: int, r: int, sources: Ints) -> int:
    """Write where a row of an item's lane is; return how many its chunk has from there on, 0 if it is not mapped."""
    folder, row = windows[cols.FOLDER, _at(i)], windows[cols.BEFORE, _at(i)] + r
    bits = jit.load_int(plan[leaf, cols.SHIFT] + 8 * folder)
    if row < 0:
        return 0
    base = _base(
        folder, row >> bits, plan[leaf, cols.FIRST_CHUNK], plan[leaf, cols.CHUNKS], plan[leaf, cols.BASES],
        plan[leaf, cols.BASES_SIZE],
    )  # fmt: skip
    if base == 0:
        return 0
    inside = row & ((1 << bits) - 1)
    sources[_at(leaf), _at(i)] = base + ((windows[cols.LINE, _at(i)] << bits) + inside) * plan[leaf, cols.ROW_BYTES]
    return (1 << bits) - inside


@jit.inner
def _pieces(windows: Ints, plan: Ints, leaf: int, out: int, streamed: int, count: int, sources: Ints) -> int:
    """Copy the windows that `_locate` left, piece by piece; return the first item with an unmapped row, or -1."""
    row_bytes, length = plan[leaf, cols.ROW_BYTES], plan[leaf, cols.LENGTH]
    for i in range(count):
        if sources[_at(leaf), _at(i)] != 0:
            continue
        stop, floor = windows[plan[leaf, cols.STOP], i], windows[cols.FLOOR, _at(i)]
        row = windows[plan[leaf, cols.BEGIN], i] + plan[leaf, cols.OFFSET]
        target = out + i * length * row_bytes
        done = 0
        while done < length:
            r = max(row + done, floor)
            if r >= stop:
                jit.zero_bytes(target + done * row_bytes, (length - done) * row_bytes)
                break
            run = _run(windows, plan, leaf, i, r, sources)
            if run == 0:
                return i
            run = 1 if r > row + done else min(run, length - done, stop - r)
            if streamed and run * row_bytes >= WIDE:
                stream(target + done * row_bytes, sources[_at(leaf), _at(i)], run * row_bytes)
            else:
                jit.copy_bytes(target + done * row_bytes, sources[_at(leaf), _at(i)], run * row_bytes)
            done += run
    return -1


@jit.inner
def _copy(out: int, nbytes: int, streamed: int, count: int, sources: Ints, leaf: int) -> None:
    """Copy the windows that `_locate` found, past the caches if they are wide and that is wanted."""
    # Of a constant width a copy is two moves and no call.
    if nbytes == 16:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                jit.copy_bytes(out + i * 16, sources[_at(leaf), _at(i)], 16)
    elif nbytes == 8:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                jit.copy_bytes(out + i * 8, sources[_at(leaf), _at(i)], 8)
    elif nbytes == 4:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                jit.copy_bytes(out + i * 4, sources[_at(leaf), _at(i)], 4)
    elif streamed and nbytes >= WIDE:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                stream(out + i * nbytes, sources[_at(leaf), _at(i)], nbytes)
    else:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                jit.copy_bytes(out + i * nbytes, sources[_at(leaf), _at(i)], nbytes)


@jit.inner
def _number(address: int, kind: int, width: int) -> float:
    """Read a number of one of `KINDS`."""
    if kind == 0 and width == 4:
        return np.float64(jit.load_float32(address))
    if kind == 0 and width == 8:
        return jit.load_float64(address)
    bits = np.int64(0)
    for at in range(width):
        bits |= np.int64(jit.load_byte(address + at)) << (8 * at)
    if kind == 1:
        return np.float64((bits << (64 - 8 * width)) >> (64 - 8 * width))
    if kind == 2:
        return np.float64(np.uint64(bits))
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    # Of a float16: the bits of a float64 with its exponent, or a multiple of the least there is.
    if exponent == 31:
        size = jit.number_of(int(2047 << 52 | mantissa << 42))
    elif exponent == 0:
        size = mantissa * 2.0**-24
    else:
        size = jit.number_of(int((exponent + 1008) << 52 | mantissa << 42))
    return -size if bits >> 15 else size


@jit.inner
def _target(which: int, width: int, begin: int, record: Ints, addresses: Ints) -> int:
    """Return where something computed goes for item `begin`, 0 where the batch has no such array."""
    place = record[which]
    return addresses[place] + begin * width if place >= 0 else 0


@jit.inner
def _store(
    i: int, total: float, power: float, end: int, rewards: int, discounts: int, terminals: int, truncations: int
) -> None:
    """Write what follows from the sum of an item, whose window ended that way."""
    if rewards != 0:
        jit.store_float32(rewards + 4 * i, np.float32(total))
    if discounts != 0:
        jit.store_float32(discounts + 4 * i, np.float32(0.0 if end & 1 else power))
    if terminals != 0:
        jit.store_byte(terminals + i, np.uint8(end & 1))
    if truncations != 0:
        jit.store_byte(truncations + i, np.uint8(end >> 1 & 1))


@jit.inner
def _sum_runs(
    windows: Ints,
    ends: NDArray[np.uint8],
    plan: Ints,
    record: Ints,
    addresses: Ints,
    begin: int,
    count: int,
    sources: Ints,
) -> None:
    """Do what `_sum` does with one summand of float32, all of whose windows `_locate` found: nearly always."""
    leaf, gamma = record[cols.COPIED], jit.number_of(record[cols.GAMMA])
    factor = jit.number_of(plan[leaf, cols.FACTOR])
    rewards = _target(cols.REWARD, 4, begin, record, addresses)
    discounts = _target(cols.DISCOUNT, 4, begin, record, addresses)
    terminals = _target(cols.TERMINATED, 1, begin, record, addresses)
    truncations = _target(cols.TRUNCATED, 1, begin, record, addresses)
    for i in range(count):
        source, total, power = sources[_at(leaf), _at(i)], 0.0, 1.0
        for j in range(windows[cols.K, _at(i)]):
            total += power * (np.float64(jit.load_float32(source + 4 * j)) * factor)
            power *= gamma
        _store(i, total, power, ends[_at(i)], rewards, discounts, terminals, truncations)


@jit.inner
def _sum(
    windows: Ints,
    ends: NDArray[np.uint8],
    plan: Ints,
    record: Ints,
    addresses: Ints,
    begin: int,
    count: int,
    sources: Ints,
) -> int:
    """Sum as `nstep` does, and say how windows end; return the first item with an unmapped row, or -1."""
    copied, summed, gamma = record[cols.COPIED], record[cols.SUMMED], jit.number_of(record[cols.GAMMA])
    rewards = _target(cols.REWARD, 4, begin, record, addresses)
    discounts = _target(cols.DISCOUNT, 4, begin, record, addresses)
    terminals = _target(cols.TERMINATED, 1, begin, record, addresses)
    truncations = _target(cols.TRUNCATED, 1, begin, record, addresses)
    for i in range(count):
        total, power = 0.0, 1.0
        done = 0
        while done < windows[cols.K, _at(i)]:
            run = windows[cols.K, _at(i)] - done
            for leaf in range(copied, plan.shape[0]):
                run = min(run, _run(windows, plan, leaf, i, windows[cols.ROW, _at(i)] + done, sources))
            if run == 0:
                return i
            for j in range(run):
                r = 0.0
                for leaf in range(copied, plan.shape[0]):
                    width = plan[leaf, cols.ROW_BYTES]
                    x = _number(sources[_at(leaf), _at(i)] + j * width, plan[leaf, cols.KIND], width)
                    x *= jit.number_of(plan[leaf, cols.FACTOR])
                    if leaf < summed:
                        r += x
                    else:
                        gamma = x
                total += power * r
                power *= gamma
            done += run
        _store(i, total, power, ends[_at(i)], rewards, discounts, terminals, truncations)
    return -1


@jit.inner
def _find_folders(windows: Ints, lanes: Ints, snapshot: Ints, count: int) -> int:
    """Find where the rows of windows are that are given, as `find_windows` does of those that it finds.

    Returns the first item whose lane or floor is not one of the snapshot's, or -1.
    """
    for i in range(count):
        slot, lane = windows[cols.SLOT, _at(i)], windows[cols.LANE, _at(i)]
        if slot < 0 or slot >= lanes.size or lane < 0 or lane >= lanes[slot]:
            return i
        place = jit.load_int(snapshot[frozen.LANE_BASE] + 8 * slot) + lane
        first = jit.load_int(snapshot[frozen.FIRST_ROWS] + 8 * place)
        windows[cols.FOLDER, _at(i)] = jit.load_int(snapshot[frozen.FOLDERS] + 8 * slot)
        is_own = first == frozen.OWN_FOLDER
        windows[cols.LINE, _at(i)] = jit.either(is_own, lane, 0)
        windows[cols.BEFORE, _at(i)] = jit.either(is_own, 0, first)
        # Values of episodes in a pack may have rows below 0 of their lane, as there are fewer than rows of the pack.
        if windows[cols.BEFORE, _at(i)] + windows[cols.FLOOR, _at(i)] < 0:
            return i
    return -1


@jit.kernel("int", "ints", "ints", "ints", "out_ints", "int", "int")
def gather(ids: Ints, addresses: Ints, snapshot: Ints, record: Ints, begin: int, until: int) -> int:
    """Gather ids[begin:until], and write to these places of the batch's arrays, which lie at `addresses`.

    `snapshot` is its record; see `frozen`.

    Returns an item that has no window or a row that is not mapped, or -1. Threads may share the items of a batch.
    """
    while begin < until:
        # Of the arrays of all items, what lies behind the first of these: an index from 0 on cannot be negative.
        items, count = record[cols.ITEMS], min(_PART, until - begin)
        mine = jit.ints_at(ids.ctypes.data + 8 * begin, count)
        windows = jit.ints2_at(record[cols.WINDOWS] + 8 * begin, cols.WINDOW_ROWS, items)
        ends = jit.bytes_at(record[cols.WINDOWS] + 8 * cols.WINDOW_ROWS * items + begin, count)
        lanes = jit.ints_at(snapshot[frozen.LANES], snapshot[frozen.SLOTS])
        flags = cols.FLAGS
        folders = record[flags + cols.FOLDERS]
        if record[cols.FINDS] and folders < snapshot[frozen.FOLDER_COUNT]:
            bad = 0
        elif record[cols.FINDS]:
            bad = find_windows(
                mine, record[cols.N], record[cols.STACK], record[cols.WHOLE], snapshot,
                jit.ints_at(record[flags + cols.FIRST_CHUNK], folders),
                jit.ints_at(record[flags + cols.CHUNKS], folders),
                jit.ints_at(record[flags + cols.SHIFT], folders),
                jit.ints_at(record[flags + cols.BASES], record[flags + cols.BASES_SIZE]), windows, ends,
            )  # fmt: skip
        else:
            bad = _find_folders(windows, lanes, snapshot, count)
        if bad >= 0:
            record[cols.FAILED] = -1
            return begin + bad
        for i in range(count if record[cols.LIMITS] != 0 else 0):
            n = jit.load_int(record[cols.LIMITS] + 8 * (begin + i))
            if n < windows[cols.K, _at(i)]:
                windows[cols.K, _at(i)], windows[cols.AFTER, _at(i)] = n, windows[cols.ROW, _at(i)] + n
                for stop in (cols.OBS_STOP, cols.STEP_STOP, cols.FRAMES_STOP):
                    windows[stop, _at(i)] = windows[cols.AFTER, _at(i)] + 1
                ends[_at(i)] &= ~(TERMINATED | TRUNCATED)
        lines, copied, streamed = record[cols.LINES], record[cols.COPIED], record[cols.STREAMED]
        plan = jit.ints2_at(record.ctypes.data + 8 * cols.HEAD, lines, cols.COLUMNS)
        sources = jit.ints2_at(record[cols.SOURCES] + 8 * begin, lines, items)
        left = missing = 0
        for leaf in range(lines):
            if plan[leaf, cols.FOLDERS] < snapshot[frozen.FOLDER_COUNT]:
                return begin
            is_step = leaf >= copied or (plan[leaf, cols.OFFSET] == 0 and plan[leaf, cols.LENGTH] == 1)
            row_bytes = plan[leaf, cols.ROW_BYTES]
            is_in_a_line = row_bytes <= _LINE and row_bytes & (row_bytes - 1) == 0
            if record[cols.FINDS] and is_step and is_in_a_line:
                missing = _locate_found(windows, plan, leaf, copied, count, sources)
            else:
                missing = _locate(windows, plan, leaf, copied, count, sources)
            left += missing
        for leaf in range(copied):
            nbytes = plan[leaf, cols.LENGTH] * plan[leaf, cols.ROW_BYTES]
            out = addresses[plan[leaf, cols.TARGET]] + begin * nbytes
            _copy(out, nbytes, streamed, count, sources, leaf)
            bad = _pieces(windows, plan, leaf, out, streamed, count, sources) if left else -1
            if bad >= 0:
                record[cols.FAILED] = leaf
                return begin + bad
        if lines == copied + 1 and plan[copied, cols.KIND] == 0 and plan[copied, cols.ROW_BYTES] == 4 and missing == 0:
            _sum_runs(windows, ends, plan, record, addresses, begin, count, sources)
        elif copied < lines:
            bad = _sum(windows, ends, plan, record, addresses, begin, count, sources)
            if bad >= 0:
                record[cols.FAILED] = copied
                return begin + bad
        index, steps = (
            _target(cols.INDEX, 8, begin, record, addresses),
            _target(cols.N_STEPS, 8, begin, record, addresses),
        )
        weights = _target(cols.WEIGHT, 4, begin, record, addresses)
        if index != 0:
            jit.copy_bytes(index, mine.ctypes.data, 8 * count)
        if steps != 0:
            jit.copy_bytes(steps, record[cols.WINDOWS] + 8 * (cols.K * items + begin), 8 * count)
        for i in range(count if weights != 0 else 0):
            jit.store_float32(weights + 4 * i, np.float32(1.0))
        if streamed:
            jit.fence()
        begin += count
    return -1
