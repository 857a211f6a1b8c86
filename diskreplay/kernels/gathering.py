"""The table of windows, the record of `gather`, and the search for the windows of ids in the flags of their lanes.

The store's array `done` has one byte of flags per row. The bounds of a window come from the flags of the rows around
its step. Only flags say where episodes start and end, so no second table can disagree with the flags.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import ids
from diskreplay.ids import Ints

from . import frozen, jit
from .following import COMMITTED, OBSERVED, WORD
from .jit import load_byte, load_int, touch

Bytes = NDArray[np.uint8]

# Rows of a table of windows. It has a column for each id. SLOT (see `frozen`), LANE and ROW identify the first row of
# the window.
SLOT, LANE, ROW = 0, 1, 2
FLOOR = 3  # The oldest row that a frame stack may show: depth - 1 rows back, but not before the episode's start.
AFTER = 4  # The row K steps after row ROW. At first, AFTER is the address of the flags of row ROW.
OBS_STOP = 5  # AFTER + 1 if row AFTER has an observation, else 0.
STEP_STOP = 6  # AFTER + 1 if row AFTER is a step of the episode, else 0.
K = 7  # The number of steps in the window.
FRAMES_STOP = 8  # The row after the last observation: AFTER + 1 if row AFTER has an observation, else AFTER.
OWN, OWN_STOP = 9, 10  # Bounds from the caller of `gather`. `find_windows` sets OWN_STOP to the end of the lane.
# The kernels write the rows FOLDER, LINE and BEFORE:
# - FOLDER: the number of the folder with the window's rows.
# - LINE: the number of the lane's line in each chunk of this folder.
# - BEFORE: the number of rows in this line before the lane's first row.
FOLDER, LINE, BEFORE = 11, 12, 13
WINDOW_ROWS = 14

# The head of the `record` of `gather`: the numbers at its start.
# - FINDS: 1 if `gather` must find the windows, 0 if the caller has made them.
# - N, STACK, WHOLE: the arguments of `find_windows` with these names.
# - WINDOWS: the address of the table of windows.
# - SOURCES: the address of scratch memory for the addresses of all items' rows.
FINDS, N, STACK, WHOLE, WINDOWS, ITEMS, SOURCES = range(7)
LIMITS = 7  # The address of an array with the largest number of steps for each window, 0 without such an array.
# - LINES: the number of lines after the head, one per leaf (see `gather`).
# - COPIED: the number of copied leaves.
# - SUMMED: the number of the line after the summands. If the store has discounts of steps, this line is for them.
# - GAMMA: the bits of the float64 gamma.
# - STREAMED: 1 if copies of wide rows bypass the caches.
# - FAILED: the line of the leaf with an unmapped row, or -1.
LINES, COPIED, SUMMED, GAMMA, STREAMED, FAILED = range(8, 14)
# For each computed field, the number of its array in the argument `addresses` of `gather`, or -1.
COMPUTED = ("reward", "discount", "terminated", "truncated", "index", "n_steps", "weight")
REWARD, DISCOUNT, TERMINATED, TRUNCATED, INDEX, N_STEPS, WEIGHT = range(14, 21)
# From this index on, the head has the chunk table of the flags: the numbers FIRST_CHUNK to ROW_BYTES.
FLAGS = 21
# Columns of a leaf's line. FIRST_CHUNK to ROW_BYTES describe the leaf's chunk table, see `following.Chunks`.
# - FIRST_CHUNK, CHUNKS, SHIFT: the addresses of the three arrays with a value per folder.
# - FOLDERS: the number of folders in the chunk table.
# - BASES, BASES_SIZE: the address and the length of the array `bases`.
# For the columns BEGIN to TARGET see `gather`.
FIRST_CHUNK, CHUNKS, SHIFT, FOLDERS, BASES, BASES_SIZE, ROW_BYTES = range(7)
HEAD = FLAGS + 7
BEGIN, STOP, OFFSET, LENGTH, TARGET = range(7, 12)
# Columns of a summand's line. KIND is the kind of the leaf's numbers, an index in KINDS. FACTOR has the bits of a
# float64: the weight of the leaf in the reward. In the line of the discounts, this float64 is gamma.
KIND, FACTOR = 10, 11
COLUMNS = 12

KINDS = "fiu"
"""numpy's letters for the kinds of numbers that can be summed: floats of 2, 4 or 8 bytes, and signed and unsigned
integers of up to 8 bytes."""


def kind_and_factor(dtype: np.dtype[Any], factor: float) -> tuple[int, int]:
    """Return KIND and FACTOR of numbers with a dtype that are multiplied by a factor; a bool is an integer."""
    return KINDS.index(dtype.kind.replace("b", "u")), int(np.float64(factor).view(np.int64))


LARGE_BATCH = 8 << 20
"""The smallest size in bytes of a batch whose wide rows are streamed. For batches of half this size, streaming took
longer than copying. For batches of twice this size, streaming was clearly faster."""


def table_line(first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, row_bytes: int) -> Ints:
    """Return the chunk table of a stored array as the numbers FIRST_CHUNK to ROW_BYTES.

    For the arguments see `following.Chunks`; the caller keeps these arrays alive.
    """
    addresses = [array.ctypes.data for array in (first_chunk, chunks, shift)]
    folders = min(len(first_chunk), len(chunks), len(shift))
    return np.array([*addresses, folders, bases.ctypes.data, len(bases), row_bytes], np.int64)


# `_at` makes an index unsigned, because numba tests each signed index for being negative.
_at = np.uint64

# A store with at least this number of segments has tables of segments and lanes that do not fit into the caches.
MANY_SLOTS = 1 << 10
_ENDS = ids.TERMINATED | ids.TRUNCATED


@jit.inlined
def _touch_lanes(step_ids: Ints, snapshot: Ints) -> None:
    """Load into the caches what `_locate` will read about the ids' lanes, so that many cache misses overlap."""
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
    """Write each id's lane and row to `windows`; stop at an id that is hidden or gone, or whose flags are unmapped.

    AFTER gets the address of the row's flags. K gets the number of flags from this address to the end of the chunk.
    OWN_STOP gets the end of the lane. `table` has the numbers FIRST_CHUNK, CHUNKS, SHIFT, BASES and BASES_SIZE of the
    flags' chunk table. Returns the number of ids whose lane and row were written.
    """
    # The numbers of the record are read before the loop, because the compiler assumes that each write may change the
    # record.
    origin, lanes, lane_base = snapshot[frozen.ORIGIN], snapshot[frozen.LANES], snapshot[frozen.LANE_BASE]
    slots, oldest, reached = snapshot[frozen.SLOTS], snapshot[frozen.OLDEST], snapshot[frozen.REACHED]
    folders, first_rows = snapshot[frozen.FOLDERS], snapshot[frozen.FIRST_ROWS]
    committed = snapshot[frozen.ROWS] + 8 * COMMITTED * snapshot[frozen.ALL_LANES]
    first_growing = snapshot[frozen.FIRST_GROWING]
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
        if width > 1:  # a division takes as long as everything else in this loop
            position = row
            row = position // width
            lane = position - row * width
        place = load_int(lane_base + 8 * slot) + lane
        # Segments below `first_growing` are sealed. Their LIVE_BASE is not read, because the read would be a cache
        # miss.
        column = load_int(snapshot[frozen.LIVE_BASE] + 8 * slot) if slot >= first_growing else -1
        if column >= 0:
            stop = load_int(snapshot[frozen.LIVE] + 8 * (COMMITTED * snapshot[frozen.LIVE_LANES] + column + lane))
        else:
            stop = load_int(committed + 8 * place)
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
    """Return the oldest row that a frame stack of depth `stack` may show, or -1 if needed flags are unmapped.

    Stacks also show hidden rows of the episode. `bases` is the address of an array: the addresses of the folder's
    chunks.
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
    """Return whether the `count` flags at address `at` are zeros; the `WORD` bytes at this address must be readable."""
    words = (1 << WORD * count) - 1 if count < WORD else -1
    last = at + count - WORD
    found = load_int(max(at, last)) & words
    while found == 0 and at < last:
        found = load_int(at)
        at += WORD
    return found == 0


@jit.inner
def _walk(
    windows: Ints, item: int, flags: int, n: int, whole: int, live: tuple[int, int, int], table: tuple[int, ...]
) -> tuple[int, int, bool, int]:
    """Find the end of an item's window from the flags of each row; `flags` are the flags of the window's first row.

    Returns four values:

    - the number of steps of the window, 0 if there is no window or needed flags are not mapped,
    - the bits of the episode's end, 0 if the window ends before the episode,
    - whether the row after the window has an observation,
    - the flags of the row after the window, 0 if the lane has no such row.
    """
    folder, before = windows[FOLDER, item], windows[BEFORE, item]
    first_chunks, chunk_counts, shifts, bases, places = table
    # Count rows from the start of the line in the folder, not from the start of the lane.
    row, stop = windows[ROW, item] + before, windows[OWN_STOP, item] + before
    bits, first = load_int(shifts + 8 * folder), load_int(first_chunks + 8 * folder)
    mask, above = (1 << bits) - 1, windows[LINE, item] << bits  # a chunk has `above` flags before the lane's line
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
    """Write the window of each id: the `n` steps from this id on, or fewer steps if the episode ends earlier.

    With `n` -1, windows reach to the end of the episode. With `whole`, the row after a window in an open episode must
    be a step, not only an observation. `stack` is the depth of frame stacks: the search for the episode's start goes
    back at most `stack` - 1 rows. For `windows` see `SLOT`. `snapshot` is the record of a snapshot, see `frozen`.
    `table` is the address of the result of `table_line` for the flags.

    If the window reaches the end of a terminated or truncated episode, `ends` gets TERMINATED or TRUNCATED; a cut
    episode counts as truncated. `ends` also gets the flags FIRST and CUT of the window's first row. Returns the
    position of the first id without a window or with unmapped flags, or -1.

    With `n` 0, each window is one row. `ends` gets the flags of this row. `behind` gets the flags of the next row, or 0
    if the lane has no next row. OWN_STOP gets the end of the lane.
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
        # Nearly every window is in the middle of an episode: the flags of its steps and of the next row are 0.
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
            # The last step has no next observation to bootstrap from. So the window ends one step earlier, and
            # bootstraps from the observation of the last step.
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
