"""A whole batch in one call: find the windows of its ids, copy the rows of all leaves, and sum the rewards.

A leaf is one stored array, such as the rewards. A call per leaf would cost microseconds, and would wait for memory. One
call for all leaves computes all addresses and prefetches the rows before it copies the first byte.

The arguments are in one record of int64, since each argument of a kernel costs about 50 ns. The record has numbers, and
addresses of arrays that the caller keeps alive. After its head, see `gathering.FINDS`, the record has a line per leaf.

The first lines are for leaves to copy: `LENGTH` rows for each window are copied to array number `TARGET` of the batch.
`BEGIN` and `STOP` are indices of two rows in the table of windows, see `gathering`. Each of the two rows has a bound
for every window. The copied rows begin `OFFSET` rows after the bound at `BEGIN`. A row before the window's `FLOOR` is
replaced by row `FLOOR`, so that the first frame of a stack repeats. A row at or above the bound at `STOP` becomes
zeros.

The next lines are summands: leaves whose weighted sum is the reward. If the store has discounts of steps, the last line
is for the leaf of the discounts.

Before the address of a row is computed, a check makes sure that the chunk table has the row.
"""

import numpy as np

from diskreplay.ids import TERMINATED, TRUNCATED, Ints

from . import frozen, gathering as cols, jit
from .copying import WIDE, stream
from .gathering import Bytes, find_windows
from .huge_pages import CACHE_LINE
from .jit import copy_bytes, load_int, number_of, prefetch, store_byte, store_float32
from .returns import number_at

_at = np.uint64
# The number of items whose rows are prefetched and then copied together. With more items, the first prefetched rows
# would leave the caches before they are copied.
_PART = 512


@jit.inner
def _locate(windows: Ints, plan: Ints, leaf: int, copied: int, count: int, sources: Ints) -> int:
    """Write to `sources`, for each item, the address of its rows in a leaf, or 0; return the number of zeros.

    The address is 0 unless the rows are successive rows of one mapped chunk. `plan` has the lines of the record of
    `gather`, one per leaf. The first `copied` lines are for leaves to copy. The other lines are for summands.
    """
    first_chunks, chunk_counts, shifts = plan[leaf, cols.FIRST_CHUNK], plan[leaf, cols.CHUNKS], plan[leaf, cols.SHIFT]
    bases, bases_size, row_bytes = plan[leaf, cols.BASES], plan[leaf, cols.BASES_SIZE], plan[leaf, cols.ROW_BYTES]
    begin, stop = _at(plan[leaf, cols.BEGIN]), _at(plan[leaf, cols.STOP])
    offset, length = plan[leaf, cols.OFFSET], plan[leaf, cols.LENGTH]
    left = 0
    for i in range(count):
        item = _at(i)
        folder = windows[cols.FOLDER, item]
        r = windows[begin, item] + offset
        row, bits = windows[cols.BEFORE, item] + r, load_int(shifts + 8 * folder)
        chunk, inside = row >> bits, row & ((1 << bits) - 1)
        run = length if leaf < copied else windows[cols.K, item]
        source = np.int64(0)
        is_whole = r >= windows[cols.FLOOR, item] and r + run <= windows[stop, item] and inside + run <= 1 << bits
        if is_whole and chunk < load_int(chunk_counts + 8 * folder):
            place = load_int(first_chunks + 8 * folder) + chunk
            base = load_int(bases + 8 * place) if _at(place) < _at(bases_size) else 0
            if base != 0:
                source = base + ((windows[cols.LINE, item] << bits) + inside) * row_bytes
                prefetch(source)
                prefetch(source + run * row_bytes - 1)
        left += source == 0
        sources[_at(leaf), item] = source
    return left


@jit.inner
def _locate_found(windows: Ints, plan: Ints, leaf: int, copied: int, count: int, sources: Ints) -> int:
    """Do what `_locate` does, for windows from `find_windows`; the leaf must be a summand or have `LENGTH` 1.

    Two checks of `_locate` are left out: no row is before the window's `FLOOR`, and no row of a summand is beyond the
    bound at `STOP`. Each row must lie within one cache line.
    """
    first_chunks, chunk_counts, shifts = plan[leaf, cols.FIRST_CHUNK], plan[leaf, cols.CHUNKS], plan[leaf, cols.SHIFT]
    bases, bases_size, row_bytes = plan[leaf, cols.BASES], plan[leaf, cols.BASES_SIZE], plan[leaf, cols.ROW_BYTES]
    row_window, stop_window = _at(plan[leaf, cols.BEGIN]), _at(plan[leaf, cols.STOP])
    is_step, found = leaf < copied, 0
    for i in range(count):
        item = _at(i)
        folder, before, r = windows[cols.FOLDER, item], windows[cols.BEFORE, item], windows[row_window, item]
        bits = load_int(shifts + 8 * folder)
        chunk = (before + r) >> bits
        inside = (before + r) & ((1 << bits) - 1)
        source = np.int64(0)
        whole = r < windows[stop_window, item] if is_step else inside + windows[cols.K, item] <= 1 << bits
        if whole and chunk < load_int(chunk_counts + 8 * folder):
            place = load_int(first_chunks + 8 * folder) + chunk
            base = load_int(bases + 8 * place) if _at(place) < _at(bases_size) else 0
            if base != 0:
                source = base + ((windows[cols.LINE, item] << bits) + inside) * row_bytes
                prefetch(source)
                if not is_step:
                    prefetch(source + windows[cols.K, item] * row_bytes - 1)
                found += 1
        sources[_at(leaf), item] = source
    return count - found


@jit.inner
def _run(windows: Ints, plan: Ints, leaf: int, i: int, r: int, sources: Ints) -> int:
    """Write the address of a leaf's row `r`, in the lane of item `i`, to `sources`.

    Returns the number of rows from row `r` to the end of its chunk, or 0 if the row is not mapped.
    """
    item = _at(i)
    folder, row = windows[cols.FOLDER, item], windows[cols.BEFORE, item] + r
    bits = load_int(plan[leaf, cols.SHIFT] + 8 * folder)
    chunk, inside = row >> bits, row & ((1 << bits) - 1)
    if row < 0 or chunk >= load_int(plan[leaf, cols.CHUNKS] + 8 * folder):
        return 0
    place = load_int(plan[leaf, cols.FIRST_CHUNK] + 8 * folder) + chunk
    base = load_int(plan[leaf, cols.BASES] + 8 * place) if _at(place) < _at(plan[leaf, cols.BASES_SIZE]) else 0
    sources[_at(leaf), item] = base + ((windows[cols.LINE, item] << bits) + inside) * plan[leaf, cols.ROW_BYTES]
    return (1 << bits) - inside if base != 0 else 0


@jit.inner
def _copy(windows: Ints, plan: Ints, leaf: int, out: int, streamed: int, left: int, count: int, sources: Ints) -> int:
    """Copy a leaf's rows of each item to address `out`; with `streamed`, copies of at least `WIDE` bytes use `stream`.

    `left` is the sum of the results of `_locate` for all leaves. If an item's address in `sources` is 0, its rows are
    copied chunk by chunk. Returns the index of the first item with an unmapped row, or -1.
    """
    row_bytes, length = plan[leaf, cols.ROW_BYTES], plan[leaf, cols.LENGTH]
    nbytes, begin, stop_row = length * row_bytes, _at(plan[leaf, cols.BEGIN]), _at(plan[leaf, cols.STOP])
    is_streamed = streamed != 0 and nbytes >= WIDE
    if nbytes == 16:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                copy_bytes(out + i * 16, sources[_at(leaf), _at(i)], 16)
    elif nbytes == 8:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                copy_bytes(out + i * 8, sources[_at(leaf), _at(i)], 8)
    elif nbytes == 4:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                copy_bytes(out + i * 4, sources[_at(leaf), _at(i)], 4)
    elif not is_streamed:
        for i in range(count):
            if sources[_at(leaf), _at(i)] != 0:
                copy_bytes(out + i * nbytes, sources[_at(leaf), _at(i)], nbytes)
    if not is_streamed and left == 0:
        return -1
    for i in range(count):
        source, target = sources[_at(leaf), _at(i)], out + i * nbytes
        if source != 0 and not is_streamed:
            continue
        row, stop = windows[begin, _at(i)] + plan[leaf, cols.OFFSET], windows[stop_row, _at(i)]
        done, run = 0, length
        while done < length:
            if source == 0:
                r = max(row + done, windows[cols.FLOOR, _at(i)])
                if r >= stop:
                    jit.zero_bytes(target, (length - done) * row_bytes)
                    break
                run = _run(windows, plan, leaf, i, r, sources)
                if run == 0:
                    return i
                run = 1 if r > row + done else min(run, length - done, stop - r)
            if is_streamed and run * row_bytes >= WIDE:
                stream(target, sources[_at(leaf), _at(i)], run * row_bytes)
            else:
                copy_bytes(target, sources[_at(leaf), _at(i)], run * row_bytes)
            target += run * row_bytes
            done += run
    return -1


@jit.inner
def _sum(
    windows: Ints, ends: Bytes, plan: Ints, record: Ints, addresses: Ints, begin: int, count: int, missing: int,
    sources: Ints,
) -> int:  # fmt: skip
    """Write the fields reward (see `returns.nstep`), discount, terminated and truncated of each window.

    `missing` is the result of `_locate` for the last leaf. Returns the index of the first item with an unmapped row, or
    -1.
    """
    copied, summed, gamma = record[cols.COPIED], record[cols.SUMMED], number_of(record[cols.GAMMA])
    rewards, discounts = addresses[record[cols.REWARD]], addresses[record[cols.DISCOUNT]]
    terminals, truncations = addresses[record[cols.TERMINATED]], addresses[record[cols.TRUNCATED]]
    kind, width, factor = plan[copied, cols.KIND], plan[copied, cols.ROW_BYTES], number_of(plan[copied, cols.FACTOR])
    is_simple = plan.shape[0] == copied + 1 and kind == 0 and width == 4 and missing == 0
    for i in range(count):
        item = _at(i)
        k, total, power, done = windows[cols.K, item], 0.0, 1.0, 0
        if is_simple:
            source, done = sources[_at(copied), item], k
            for j in range(k):
                total += power * (np.float64(jit.load_float32(source + 4 * j)) * factor)
                power *= gamma
        while done < k:
            run = k - done
            for leaf in range(copied, plan.shape[0]):
                run = min(run, _run(windows, plan, leaf, i, windows[cols.ROW, item] + done, sources))
            if run == 0:
                return i
            for j in range(run):
                r = 0.0
                for leaf in range(copied, plan.shape[0]):
                    width = plan[leaf, cols.ROW_BYTES]
                    x = number_at(sources[_at(leaf), item] + j * width, plan[leaf, cols.KIND], width)
                    x *= number_of(plan[leaf, cols.FACTOR])
                    if leaf < summed:
                        r += x
                    else:
                        gamma = x
                total += power * r
                power *= gamma
            done += run
        end, at = ends[item], begin + i
        if rewards != 0:
            store_float32(rewards + 4 * at, np.float32(total))
        if discounts != 0:
            store_float32(discounts + 4 * at, np.float32(0.0 if end & TERMINATED else power))
        if terminals != 0:
            store_byte(terminals + at, end & TERMINATED)
        if truncations != 0:
            store_byte(truncations + at, (end & TRUNCATED) >> 1)
    return -1


@jit.inner
def _find_folders(windows: Ints, snapshot: Ints, count: int) -> int:
    """Write the rows FOLDER, LINE and BEFORE of `windows`; the caller of `gather` has made the other rows.

    Returns the index of the first item whose lane is not in the snapshot, or whose row `FLOOR` is before all stored
    rows; else -1.
    """
    for i in range(count):
        item = _at(i)
        slot, lane = windows[cols.SLOT, item], windows[cols.LANE, item]
        if slot < 0 or slot >= snapshot[frozen.SLOTS] or lane < 0:
            return i
        if lane >= load_int(snapshot[frozen.LANES] + 8 * slot):
            return i
        place = load_int(snapshot[frozen.LANE_BASE] + 8 * slot) + lane
        first = load_int(snapshot[frozen.FIRST_ROWS] + 8 * place)
        is_own = first == frozen.OWN_FOLDER
        before = jit.either(is_own, 0, first)
        windows[cols.FOLDER, item] = load_int(snapshot[frozen.FOLDERS] + 8 * slot)
        windows[cols.LINE, item], windows[cols.BEFORE, item] = jit.either(is_own, lane, 0), before
        # `FLOOR` is counted from the lane's first row of steps. `FLOOR` may be negative for the episode fields of a
        # pack: a pack has fewer rows of episode fields than rows of steps.
        if before + windows[cols.FLOOR, item] < 0:
            return i
    return -1


@jit.kernel("int", "ints", "ints", "ints", "out_ints", "int", "int")
def gather(ids: Ints, addresses: Ints, snapshot: Ints, record: Ints, begin: int, until: int) -> int:
    """Write items `begin` to `until` - 1 of a batch to the arrays at `addresses`; item i of the batch is for ids[i].

    The last entry of `addresses` is 0. An unwanted field has the array number -1, which selects this 0. `snapshot` is
    the record of a snapshot, see `frozen`; for `record` see `gathering.FINDS`. Returns the position of an item without
    a window or with an unmapped row, or -1. Several threads may write parts of one batch at the same time.
    """
    items, lines, copied, streamed = record[cols.ITEMS], record[cols.LINES], record[cols.COPIED], record[cols.STREAMED]
    plan = jit.ints2_at(record.ctypes.data + 8 * cols.HEAD, lines, cols.COLUMNS)
    while begin < until:
        # Index 0 of `windows`, `ends` and `sources` is for item `begin` of the batch.
        count = min(_PART, until - begin)
        windows = jit.ints2_at(record[cols.WINDOWS] + 8 * begin, cols.WINDOW_ROWS, items)
        ends = jit.bytes_at(record[cols.WINDOWS] + 8 * cols.WINDOW_ROWS * items + begin, count)
        sources = jit.ints2_at(record[cols.SOURCES] + 8 * begin, lines, items)
        if not record[cols.FINDS]:
            bad = _find_folders(windows, snapshot, count)
        elif record[cols.FLAGS + cols.FOLDERS] < snapshot[frozen.FOLDER_COUNT]:
            bad = 0
        else:
            bad = find_windows(
                jit.ints_at(ids.ctypes.data + 8 * begin, count), record[cols.N], record[cols.STACK],
                record[cols.WHOLE], snapshot, record.ctypes.data + 8 * cols.FLAGS, windows, ends, ends,
            )  # fmt: skip
        if bad >= 0:
            record[cols.FAILED] = -1
            return begin + bad
        for i in range(count if record[cols.LIMITS] != 0 else 0):
            item, n = _at(i), load_int(record[cols.LIMITS] + 8 * (begin + i))
            if n < windows[cols.K, item]:
                after = windows[cols.ROW, item] + n
                windows[cols.K, item], windows[cols.AFTER, item] = n, after
                windows[cols.OBS_STOP, item] = windows[cols.STEP_STOP, item] = windows[cols.FRAMES_STOP, item] = (
                    after + 1
                )
                ends[item] &= ~(TERMINATED | TRUNCATED)
        left = missing = 0
        for leaf in range(lines):
            if plan[leaf, cols.FOLDERS] < snapshot[frozen.FOLDER_COUNT]:
                return begin
            is_step = leaf >= copied or (plan[leaf, cols.OFFSET] == 0 and plan[leaf, cols.LENGTH] == 1)
            row_bytes = plan[leaf, cols.ROW_BYTES]
            if record[cols.FINDS] and is_step and row_bytes <= CACHE_LINE and row_bytes & (row_bytes - 1) == 0:
                missing = _locate_found(windows, plan, leaf, copied, count, sources)
            else:
                missing = _locate(windows, plan, leaf, copied, count, sources)
            left += missing
        for leaf in range(copied):
            out = addresses[plan[leaf, cols.TARGET]] + begin * plan[leaf, cols.LENGTH] * plan[leaf, cols.ROW_BYTES]
            bad = _copy(windows, plan, leaf, out, streamed, left, count, sources)
            if bad >= 0:
                record[cols.FAILED] = leaf
                return begin + bad
        if copied < lines:
            bad = _sum(windows, ends, plan, record, addresses, begin, count, missing, sources)
            if bad >= 0:
                record[cols.FAILED] = copied
                return begin + bad
        index, steps, weights = (
            addresses[record[cols.INDEX]],
            addresses[record[cols.N_STEPS]],
            addresses[record[cols.WEIGHT]],
        )
        if index != 0:
            copy_bytes(index + 8 * begin, ids.ctypes.data + 8 * begin, 8 * count)
        if steps != 0:
            copy_bytes(steps + 8 * begin, record[cols.WINDOWS] + 8 * (cols.K * items + begin), 8 * count)
        for i in range(count if weights != 0 else 0):
            store_float32(weights + 4 * (begin + i), np.float32(1.0))
        if streamed:
            jit.fence()
        begin += count
    return -1
