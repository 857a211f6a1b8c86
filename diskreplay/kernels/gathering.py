"""The windows of ids, the record of a gather plan, and how windows are found among the flags of a lane.

Bounds are derived from `done`, one byte a row around the step: the flags are the only record of where episodes start
and end, so no second table can disagree with them.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay import ids
from diskreplay.ids import Ints

from . import frozen, jit
from .following import COMMITTED, OBSERVED, WORD
from .jit import load_byte, load_int, touch

Bytes = NDArray[np.uint8]

# Rows of a table of windows, one column an id.
SLOT, LANE, ROW = 0, 1, 2
FLOOR = 3  # the oldest row that a stack may show: the episode's first, or as many rows back as the stack has
AFTER = 4  # the row k steps later; `find_windows` has the address of the window's first flag there meanwhile
OBS_STOP = 5  # AFTER + 1 where that row has an observation, 0 where it has none
STEP_STOP = 6  # AFTER + 1 where that row is a step of the episode, 0 where it is none
K = 7  # the steps of the window
FRAMES_STOP = 8  # the row behind the last observation: AFTER + 1 where that row has one, else AFTER
OWN, OWN_STOP = 9, 10  # what a reader writes there; `find_windows` has the end of the lane in OWN_STOP meanwhile
# Written by the kernels: the folder whose chunks hold the rows, which line of each is the lane's, and how many rows of
# the line come before the first of the lane.
FOLDER, LINE, BEFORE = 11, 12, 13
WINDOW_ROWS = 14

# Columns of the record. Whether windows are to be found, how, where they are, and memory for the sources of all items.
FINDS, N, STACK, WHOLE, WINDOWS, ITEMS, SOURCES = range(7)
LIMITS = 7  # the address of the most steps that each of these windows may have, or 0
# How many lines there are, how many of them are copied, and the line behind the summands: that of the discounts, if
# there is one. Then gamma, whether wide rows go past the caches, and the line that could not be copied, or -1.
LINES, COPIED, SUMMED, GAMMA, STREAMED, FAILED = range(8, 14)
# Which array of the batch gets what is not copied from a leaf; -1 is none.
COMPUTED = ("reward", "discount", "terminated", "truncated", "index", "n_steps", "weight")
REWARD, DISCOUNT, TERMINATED, TRUNCATED, INDEX, N_STEPS, WEIGHT = range(14, 21)
# The table of the flags, as those of leaves below.
FLAGS = 21
# Columns of a line. A table: addresses of the arrays by folder and their length, of the chunks' addresses; bytes of a
# row.
FIRST_CHUNK, CHUNKS, SHIFT, FOLDERS, BASES, BASES_SIZE, ROW_BYTES = range(7)
HEAD = FLAGS + 7
BEGIN, STOP, OFFSET, LENGTH, TARGET = range(7, 12)
# Of a summand: its kind of number and its weight in the sum, the bits of a float64. That of discounts is gamma.
KIND, FACTOR = 10, 11
COLUMNS = 12

KINDS = "fiu"
"""Kinds of numbers that can be summed: floats of 2, 4 or 8 bytes, and integers of up to 8."""

LARGE_BATCH = 8 << 20
"""Bytes of a batch from which on its wide rows are streamed: a loss by half of that, a clear gain at twice."""


def table_line(first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, row_bytes: int) -> Ints:
    """Return the table of a leaf as a record has it; the caller keeps the arrays alive."""
    addresses = [array.ctypes.data for array in (first_chunk, chunks, shift)]
    folders = min(len(first_chunk), len(chunks), len(shift))
    return np.array([*addresses, folders, bases.ctypes.data, len(bases), row_bytes], np.int64)


# Of an index that may be negative for all that the compiler knows, each use costs a comparison.
_at = np.uint64

# So many segments that caches do not hold what is known of each.
MANY_SLOTS = 1 << 10
_ENDS = ids.TERMINATED | ids.TRUNCATED


@jit.inlined
def _touch_lanes(step_ids: Ints, snapshot: Ints) -> None:
    """Read what is known of the lanes of ids from memory, all at once: of many segments no cache holds it."""
    origin, slots, reached = snapshot[frozen.ORIGIN], snapshot[frozen.SLOTS], snapshot[frozen.REACHED]
    lanes, lane_base = snapshot[frozen.LANES], snapshot[frozen.LANE_BASE]
    committed = snapshot[frozen.ROWS] + 8 * COMMITTED * snapshot[frozen.ALL_LANES]
    for i in range(step_ids.size):
        slot = (step_ids[_at(i)] >> ids.POSITION_BITS) - origin
        if 0 <= slot < slots:
            touch(lanes + 8 * slot)
            touch(lane_base + 8 * slot)
            touch(snapshot[frozen.FOLDERS] + 8 * slot)
    for i in range(step_ids.size):
        slot = (step_ids[_at(i)] >> ids.POSITION_BITS) - origin
        if 0 <= slot < slots and load_int(lanes + 8 * slot) > 0:
            place = load_int(lane_base + 8 * slot)
            touch(snapshot[frozen.FIRST_ROWS] + 8 * place)
            if reached:
                touch(snapshot[frozen.OLDEST] + 8 * place)
            touch(committed + 8 * place)


@jit.inlined
def _locate(step_ids: Ints, snapshot: Ints, table: tuple[int, ...], windows: Ints) -> int:
    """Find where each id's row is, up to one that is not visible or has no mapped flags; return how many were found.

    AFTER gets the address of the row's flags, K how many the chunk has from there on, OWN_STOP the end of the lane.
    """
    # Read once: for all that the compiler knows, each number that is written may be one of the record.
    origin, lanes, lane_base = snapshot[frozen.ORIGIN], snapshot[frozen.LANES], snapshot[frozen.LANE_BASE]
    slots, oldest, reached = snapshot[frozen.SLOTS], snapshot[frozen.OLDEST], snapshot[frozen.REACHED]
    folders, first_rows = snapshot[frozen.FOLDERS], snapshot[frozen.FIRST_ROWS]
    rows, all_lanes, live_lanes = snapshot[frozen.ROWS], snapshot[frozen.ALL_LANES], snapshot[frozen.LIVE_LANES]
    live, live_base, first_growing = snapshot[frozen.LIVE], snapshot[frozen.LIVE_BASE], snapshot[frozen.FIRST_GROWING]
    first_chunks, chunk_counts, shifts, bases, places = table
    located = 0
    while located < step_ids.size:
        item = _at(located)
        slot = (step_ids[item] >> ids.POSITION_BITS) - origin
        if slot < 0 or slot >= slots:
            break
        width = load_int(lanes + 8 * slot)
        if width <= 0:
            break
        row, lane = step_ids[item] & ids.POSITION_MASK, 0
        if width > 1:  # a division costs as much as all the rest
            position = row
            row = position // width
            lane = position - row * width
        place = load_int(lane_base + 8 * slot) + lane
        # Most often it does not grow, and its place among those that do is not in a cache.
        column = load_int(live_base + 8 * slot) if slot >= first_growing else -1
        if column >= 0:
            stop = load_int(live + 8 * (COMMITTED * live_lanes + column + lane))
        else:
            stop = load_int(rows + 8 * (COMMITTED * all_lanes + place))
        kept = load_int(oldest + 8 * place) if reached else 0
        folder, before = load_int(folders + 8 * slot), load_int(first_rows + 8 * place)
        line = 0
        if before == frozen.OWN_FOLDER:
            line, before = lane, 0
        bits, first = load_int(shifts + 8 * folder), load_int(first_chunks + 8 * folder)
        inside = before + row
        chunk = inside >> bits
        if row < kept or row >= stop or chunk >= min(load_int(chunk_counts + 8 * folder), places - first):
            break
        base = load_int(bases + 8 * (first + chunk))
        if base == 0:
            break
        inside &= (1 << bits) - 1
        windows[FOLDER, item], windows[LINE, item], windows[BEFORE, item] = folder, line, before
        windows[AFTER, item], windows[K, item] = base + (line << bits) + inside, (1 << bits) - inside
        windows[SLOT, item], windows[LANE, item], windows[ROW, item] = slot, lane, row
        windows[OWN_STOP, item] = stop
        located += 1
    for i in range(located):
        touch(windows[AFTER, _at(i)])
    return located


@jit.inlined
def _find_floor(row: int, before: int, stack: int, line: int, bits: int, bases: int) -> int:
    """Return the oldest row that a stack may show, -1 where flags on the way are not mapped.

    Rows that are hidden are shown: they are of the episode. The addresses of the folder's chunks lie from `bases` on.
    """
    chunk, base, floor = -1, 0, row
    while floor > 0 and row - floor < stack - 1:
        floor -= 1
        inside = floor + before
        if inside >> bits != chunk:
            chunk = inside >> bits
            base = load_int(bases + 8 * chunk)
            if base == 0:
                return -1
        if load_byte(base + (line << bits) + (inside & ((1 << bits) - 1))) & ids.FIRST:
            break
    return floor


@jit.inlined
def _are_zeros(at: int, count: int) -> bool:
    """Tell whether so many flags from an address on are zeros; there is memory for a word."""
    words = (1 << WORD * count) - 1 if count < WORD else -1
    last = at + count - WORD
    found = load_int(max(at, last)) & words
    while found == 0 and at < last:
        found = load_int(at)
        at += WORD
    return found == 0


@jit.inlined
def _walk(
    windows: Ints, item: int, flags: int, n: int, whole: int, live: tuple[int, int, int], table: tuple[int, ...]
) -> tuple[int, int, bool, int]:
    """Look at one flag after the other from the row of an item on, whose own are `flags`.

    Returns the steps of the window, 0 where it has none or its flags are not mapped; the flags that end its episode;
    whether the row behind the window has an observation; and the flags of that row, 0 if the lane ends.
    """
    folder, before = windows[FOLDER, item], windows[BEFORE, item]
    first_chunks, chunk_counts, shifts, bases, places = table
    # Rows are counted as in the folder here: those of the lane have as many before them.
    row, stop = windows[ROW, item] + before, windows[OWN_STOP, item] + before
    bits, first = load_int(shifts + 8 * folder), load_int(first_chunks + 8 * folder)
    mask, above = (1 << bits) - 1, windows[LINE, item] << bits  # what of a chunk is before the lane's line
    count = min(load_int(chunk_counts + 8 * folder), places - first)
    chunk, base, k = row >> bits, windows[AFTER, item] - (row & mask), 0
    while True:
        k += 1
        after, following = row + k, 0
        if after < stop:
            if after >> bits != chunk:
                chunk = after >> bits
                base = load_int(bases + 8 * (first + chunk)) if chunk < count else 0
                if base == 0:
                    return 0, 0, False, 0
                base += above
            following = load_byte(base + (after & mask))
        if n == 0:
            return k, 0, False, following
        if flags & _ENDS:
            return k, flags, following & ids.OBSERVATION_ONLY != 0, following
        live_rows, live_base, live_lanes = live
        column = load_int(live_base + 8 * windows[SLOT, item]) if after >= stop else -1
        if column >= 0:
            observed = load_int(live_rows + 8 * (OBSERVED * live_lanes + column + windows[LANE, item]))
            is_there = k == n and not whole and after - before < observed
            return (k if is_there else 0), 0, True, 0
        if following & ids.NO_STEP:
            end = following | (following & ids.CUT) >> 3
            return k, end, following & ids.OBSERVATION_ONLY != 0, following
        if after >= stop or following & ids.FIRST:
            return k, ids.TRUNCATED, False, following
        if k == n:
            return k, 0, True, following
        flags = following


@jit.kernel("int", "ints", "int", "int", "int", "ints", "int", "out_ints2", "out_bytes", "out_bytes")
def find_windows(
    step_ids: Ints, n: int, stack: int, whole: int, snapshot: Ints, table: int, windows: Ints, ends: Bytes,
    behind: Bytes,
) -> int:  # fmt: skip
    """Write the window of up to `n` steps (-1: to the episode's end) that starts at each id of a snapshot.

    `table` is the address of the line of `gathering` of the flags. `stack` rows up to the step's own are looked at for
    the episode's start. With `whole`, row AFTER of an open episode must be a step and not only an observation. `ends`
    gets bit 1 where the window reaches the end of a terminated episode, bit 2 of a truncated or cut one, and the flags
    FIRST and CUT of the window's first row. Returns the first id that has no such window or whose flags are not mapped,
    or -1.

    `n` 0: write the window of one row of each id that is a step's; its flags go to `ends`, and those of the row behind
    it, 0 if the lane ends, to `behind`. OWN_STOP gets the end of the lane.
    """
    if snapshot[frozen.SLOTS] >= MANY_SLOTS:
        _touch_lanes(step_ids, snapshot)
    first_chunks, chunk_counts = load_int(table + 8 * FIRST_CHUNK), load_int(table + 8 * CHUNKS)
    shifts, bases = load_int(table + 8 * SHIFT), load_int(table + 8 * BASES)
    flags_table = first_chunks, chunk_counts, shifts, bases, load_int(table + 8 * BASES_SIZE)
    live = snapshot[frozen.LIVE], snapshot[frozen.LIVE_BASE], snapshot[frozen.LIVE_LANES]
    located = _locate(step_ids, snapshot, flags_table, windows)
    for i in range(located):
        item = _at(i)
        address, row, stop = windows[AFTER, item], windows[ROW, item], windows[OWN_STOP, item]
        flags = load_byte(address)
        if flags & ids.NO_STEP:
            return i
        floor = row
        if stack > 1 and not flags & ids.FIRST:
            folder = windows[FOLDER, item]
            chunks = bases + 8 * load_int(first_chunks + 8 * folder)
            bits = load_int(shifts + 8 * folder)
            floor = _find_floor(row, windows[BEFORE, item], stack, windows[LINE, item], bits, chunks)
            if floor < 0:
                return i
        windows[FLOOR, item] = floor
        k, end, final, following = n, 0, True, 0
        # Nearly every window lies in the middle of an episode: its steps and the row behind them have no flags.
        is_inside = flags & _ENDS == 0 and n > 0 and row + n < stop and windows[K, item] > max(n, WORD)
        if not is_inside or not _are_zeros(address + 1, n):
            k, end, final, following = _walk(windows, item, flags, n, whole, live, flags_table)
            if k == 0:
                return i
            if n == 0:
                windows[AFTER, item], ends[item], behind[item] = row + 1, flags, following
                continue
        at_end = end & _ENDS
        if at_end and not final and not at_end & ids.TERMINATED:
            # There is nothing to bootstrap from behind the last step: the window ends at that step's observation.
            k -= 1
            if k == 0:
                return i
            at_end, final = 0, True
        after = row + k
        windows[AFTER, item], windows[K, item] = after, k
        windows[OBS_STOP, item] = after + 1 if final else 0
        windows[FRAMES_STOP, item] = after + 1 if final else after
        windows[STEP_STOP, item] = after + 1 if not at_end and after < stop else 0
        ends[item] = at_end | flags & (ids.FIRST | ids.CUT)
    return -1 if located == step_ids.size else located
