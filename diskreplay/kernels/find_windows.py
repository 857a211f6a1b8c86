"""Find the window of every id among the flags of its lane: where it starts, how many steps it has, how it ends.

Bounds are derived from `done`, one byte a row around the step: the flags are the only record of where episodes start
and end, so no second table can disagree with them.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import CUT, FIRST, NO_STEP, OBSERVATION_ONLY, POSITION_BITS, POSITION_MASK, TERMINATED, TRUNCATED

from . import frozen, jit
from .following import COMMITTED, OBSERVED
from .freeze import rows_of
from .gathering import (
    AFTER,
    BEFORE,
    FLOOR,
    FOLDER,
    FRAMES_STOP,
    LANE,
    LINE,
    OBS_STOP,
    OWN_STOP,
    ROW,
    SLOT,
    STEP_STOP,
    K,
)
from .jit import load_byte, load_int, touch

Ints = NDArray[np.int64]

# Of an index that may be negative for all that the compiler knows, each use costs a comparison.
_at = np.uint64

WORD = 8  # flags read at once
# So many segments that caches do not hold what is known of each.
MANY_SLOTS = 1 << 10


@jit.inner
def _all_zero(address: int, count: int) -> int:
    """Tell whether the `count` flags from an address on are zero; `max(count, WORD)` bytes are there to be read."""
    if count < WORD:
        return load_int(address) & ((1 << WORD * count) - 1) == 0
    for at in range(address, address + count - WORD, WORD):
        if load_int(at) != 0:
            return False
    return load_int(address + count - WORD) == 0


@jit.inner
def _touch_lanes(ids: Ints, record: Ints) -> None:
    """Read what is known of the ids' lanes from memory at once: of many segments, no cache holds all that."""
    slots, origin = record[frozen.SLOTS], record[frozen.ORIGIN]
    if slots < MANY_SLOTS:
        return
    for i in range(ids.size):
        slot = (ids[_at(i)] >> POSITION_BITS) - origin
        if 0 <= slot < slots:
            touch(record[frozen.LANES] + 8 * slot)
            touch(record[frozen.LANE_BASE] + 8 * slot)
            touch(record[frozen.FOLDERS] + 8 * slot)
    for i in range(ids.size):
        slot = (ids[_at(i)] >> POSITION_BITS) - origin
        if 0 <= slot < slots and load_int(record[frozen.LANES] + 8 * slot) > 0:
            place = load_int(record[frozen.LANE_BASE] + 8 * slot)
            touch(record[frozen.FIRST_ROWS] + 8 * place)
            if record[frozen.REACHED]:
                touch(record[frozen.OLDEST] + 8 * place)
            touch(record[frozen.ROWS] + 8 * (COMMITTED * record[frozen.ALL_LANES] + place))


@jit.inner
def _floor_of(windows: Ints, i: int, stack: int, first_chunk: Ints, shift: Ints, bases: Ints) -> int:
    """Return the oldest row that a stack up to the row of item `i` may show; -1 where the flags of one are not mapped.

    The row itself begins no episode. Rows that are hidden are shown: they are of the episode.
    """
    folder, before = windows[FOLDER, _at(i)], windows[BEFORE, _at(i)]
    # Rows are counted as in the folder here.
    row = windows[ROW, _at(i)] + before
    bits, first = shift[_at(folder)], first_chunk[_at(folder)]
    floor, chunk, base = row, -1, 0
    while floor > before and row - floor < stack - 1:
        floor -= 1
        if floor >> bits != chunk:
            chunk = floor >> bits
            if bases[_at(first + chunk)] == 0:
                return -1
            base = bases[_at(first + chunk)] + (windows[LINE, _at(i)] << bits)
        if load_byte(base + (floor & ((1 << bits) - 1))) & FIRST:
            break
    return floor - before


@jit.inner
def _locate(ids: Ints, record: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, windows: Ints) -> int:
    """Write where each id's row is, up to the first that is not visible or has no mapped flags; return how many.

    AFTER gets the address of the row's flags, K how many the chunk has from there on, OWN_STOP the end of the lane.
    """
    # Read once: for all that the compiler knows, each number that is written may be one of the record.
    origin, lanes, lane_base = record[frozen.ORIGIN], record[frozen.LANES], record[frozen.LANE_BASE]
    slots, oldest, reached = record[frozen.SLOTS], record[frozen.OLDEST], record[frozen.REACHED]
    folders, first_rows, first_growing = record[frozen.FOLDERS], record[frozen.FIRST_ROWS], record[frozen.FIRST_GROWING]
    committed = record[frozen.ROWS] + 8 * COMMITTED * record[frozen.ALL_LANES]
    _touch_lanes(ids, record)
    located = 0
    while located < ids.size:
        item = _at(located)
        slot = (ids[item] >> POSITION_BITS) - origin
        if slot < 0 or slot >= slots:
            break
        width = load_int(lanes + 8 * slot)
        if width <= 0:
            break
        row, lane = ids[item] & POSITION_MASK, 0
        if width > 1:  # a division costs as much as all the rest
            position = row
            row = position // width
            lane = position - row * width
        place = load_int(lane_base + 8 * slot) + lane
        stop = load_int(committed + 8 * place) if slot < first_growing else rows_of(COMMITTED, slot, lane, record)
        kept = load_int(oldest + 8 * place) if reached else 0
        folder, before = load_int(folders + 8 * slot), load_int(first_rows + 8 * place)
        line = 0
        if before == frozen.OWN_FOLDER:
            line, before = lane, 0
        bits, first = shift[_at(folder)], first_chunk[_at(folder)]
        inside = before + row
        chunk = inside >> bits
        if row < kept or row >= stop or chunk >= min(chunks[_at(folder)], bases.size - first):
            break
        base = bases[_at(first + chunk)]
        if base == 0:
            break
        inside &= (1 << bits) - 1
        windows[FOLDER, item], windows[LINE, item], windows[BEFORE, item] = folder, line, before
        windows[AFTER, item], windows[K, item] = base + (line << bits) + inside, (1 << bits) - inside
        windows[SLOT, item], windows[LANE, item], windows[ROW, item] = slot, lane, row
        windows[OWN_STOP, item] = stop
        located += 1
    return located


@jit.kernel("int", "ints", "int", "int", "int", *["ints"] * 5, "out_ints2", "out_bytes")
def find_windows(
    ids: Ints,
    n: int,
    stack: int,
    whole: int,
    record: Ints,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    bases: Ints,
    windows: Ints,
    ends: NDArray[np.uint8],
) -> int:
    """Write the window of up to `n` steps (-1: to the episode's end) that starts at each id of a snapshot.

    `stack` rows up to the step's own are looked at for the episode's start. With `whole`, row AFTER of an open episode
    must be a step and not only an observation. `ends` gets bit 1 where the window reaches the end of a terminated
    episode, bit 2 of a truncated or cut one, and the flags FIRST and CUT of the window's first row. Returns the first
    id that has no such window or whose flags are not mapped, or -1.
    """
    located = _locate(ids, record, first_chunk, chunks, shift, bases, windows)
    for i in range(located):
        touch(windows[AFTER, _at(i)])
    for i in range(located):
        address, row, stop = windows[AFTER, _at(i)], windows[ROW, _at(i)], windows[OWN_STOP, _at(i)]
        flags = load_byte(address)
        if flags & NO_STEP:
            return i
        begins, floor = flags & (FIRST | CUT), row
        if stack > 1 and not flags & FIRST:
            floor = _floor_of(windows, i, stack, first_chunk, shift, bases)
            if floor < 0:
                return i
        # Nearly every window lies in the middle of an episode: its steps and the row behind them have no flags.
        plain = flags & (TERMINATED | TRUNCATED) == 0 and n > 0 and row + n < stop
        if plain and windows[K, _at(i)] > max(n, WORD) and _all_zero(address + 1, n):
            after = row + n
            windows[FLOOR, _at(i)], windows[AFTER, _at(i)], windows[K, _at(i)] = floor, after, n
            windows[OBS_STOP, _at(i)] = windows[STEP_STOP, _at(i)] = windows[FRAMES_STOP, _at(i)] = after + 1
            ends[_at(i)] = begins
            continue
        # Rows are counted as in the folder here: those of the lane have as many before them.
        folder, before = windows[FOLDER, _at(i)], windows[BEFORE, _at(i)]
        row, stop = row + before, stop + before
        bits = shift[_at(folder)]
        mask, above = (1 << bits) - 1, windows[LINE, _at(i)] << bits  # what of a chunk is before the lane's line
        first = first_chunk[_at(folder)]
        count = min(chunks[_at(folder)], bases.size - first)
        chunk = row >> bits
        base = bases[_at(first + chunk)] + above
        k = 1
        final = False
        while True:
            after = row + k
            following = 0
            if after < stop:
                if after >> bits != chunk:
                    chunk = after >> bits
                    if chunk >= count or bases[_at(first + chunk)] == 0:
                        return i
                    base = bases[_at(first + chunk)] + above
                following = load_byte(base + (after & mask))
            if flags & (TERMINATED | TRUNCATED):
                end, final = flags, following & OBSERVATION_ONLY != 0
                break
            if after >= stop and load_int(record[frozen.LIVE_BASE] + 8 * windows[SLOT, _at(i)]) >= 0:
                observed = rows_of(OBSERVED, windows[SLOT, _at(i)], windows[LANE, _at(i)], record)
                if k != n or whole or after - before >= observed:
                    return i
                end, final = 0, True
                break
            if following & NO_STEP:
                end, final = following | (following & CUT) >> 3, following & OBSERVATION_ONLY != 0
                break
            if after >= stop or following & FIRST:
                end = TRUNCATED
                break
            if k == n:
                end, final = 0, True
                break
            flags = following
            k += 1

        at_end = end & (TERMINATED | TRUNCATED)
        if at_end and not final and not at_end & TERMINATED:
            # There is nothing to bootstrap from behind the last step: the window ends at that step's observation.
            k -= 1
            if k == 0:
                return i
            at_end, final = 0, True
            after -= 1
        is_step = not at_end and after < stop
        after -= before
        windows[FLOOR, _at(i)] = floor
        windows[AFTER, _at(i)] = after
        windows[OBS_STOP, _at(i)] = after + 1 if final else 0
        windows[FRAMES_STOP, _at(i)] = after + 1 if final else after
        windows[STEP_STOP, _at(i)] = after + 1 if is_step else 0
        windows[K, _at(i)] = k
        ends[_at(i)] = at_end | begins
    return -1 if located == ids.size else located


@jit.kernel("int", *["ints"] * 6, "out_ints2", "out_bytes", "out_bytes")
def find_steps(
    ids: Ints,
    record: Ints,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    bases: Ints,
    windows: Ints,
    own: NDArray[np.uint8],
    behind: NDArray[np.uint8],
) -> int:
    """Write the window of one row of each id of a snapshot, its flags, and those of the row behind it, 0 if none.

    OWN_STOP gets the end of the lane. Returns the first id that is no visible step's or whose flags are not mapped, or
    -1.
    """
    located = _locate(ids, record, first_chunk, chunks, shift, bases, windows)
    for i in range(located):
        touch(windows[AFTER, _at(i)])
    for i in range(located):
        address, row = windows[AFTER, _at(i)], windows[ROW, _at(i)]
        flags, following = load_byte(address), 0
        if flags & NO_STEP:
            return i
        if row + 1 < windows[OWN_STOP, _at(i)]:
            if windows[K, _at(i)] > 1:
                following = load_byte(address + 1)
            else:
                folder = windows[FOLDER, _at(i)]
                bits, first = shift[_at(folder)], first_chunk[_at(folder)]
                chunk = (windows[BEFORE, _at(i)] + row + 1) >> bits
                if chunk >= min(chunks[_at(folder)], bases.size - first) or bases[_at(first + chunk)] == 0:
                    return i
                following = load_byte(bases[_at(first + chunk)] + (windows[LINE, _at(i)] << bits))
        windows[FLOOR, _at(i)], windows[AFTER, _at(i)] = row, row + 1
        own[_at(i)], behind[_at(i)] = flags, following
    return -1 if located == ids.size else located
