"""Find the window of every id among the flags of its lane: where it starts, how many steps it has, how it ends.

Bounds are derived from `done`, one byte a row around the step: the flags are the only record of where episodes start
and end, so no second table can disagree with them.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import (
    CUT,
    FIRST,
    NO_STEP,
    OBSERVATION_ONLY,
    POSITION_BITS,
    POSITION_MASK,
    TERMINATED,
    TRUNCATED,
    Ints,
)

from . import frozen, gathering as cols
from .following import COMMITTED, OBSERVED
from .jit import kernel, load_byte, load_int, touch

Bytes = NDArray[np.uint8]

# Of an index that may be negative for all that the compiler knows, each use costs a comparison.
_at = np.uint64

WORD = 8  # flags read at once
# So many segments that caches do not hold what is known of each.
MANY_SLOTS = 1 << 10
_ENDS = TERMINATED | TRUNCATED


@kernel("int", "ints", "int", "int", "int", "ints", "int", "out_ints2", "out_bytes", "out_bytes")
def find_windows(
    ids: Ints, n: int, stack: int, whole: int, snapshot: Ints, table: int, windows: Ints, ends: Bytes, behind: Bytes
) -> int:
    """Write the window of up to `n` steps (-1: to the episode's end) that starts at each id of a snapshot.

    `table` is the address of the line of `gathering` of the flags. `stack` rows up to the step's own are looked at for
    the episode's start. With `whole`, row AFTER of an open episode must be a step and not only an observation. `ends`
    gets bit 1 where the window reaches the end of a terminated episode, bit 2 of a truncated or cut one, and the flags
    FIRST and CUT of the window's first row. Returns the first id that has no such window or whose flags are not mapped,
    or -1.

    `n` 0: write the window of one row of each id that is a step's; its flags go to `ends`, and those of the row behind
    it, 0 if the lane ends, to `behind`. OWN_STOP gets the end of the lane.
    """
    # Read once: for all that the compiler knows, each number that is written may be one of the record.
    origin, lanes, lane_base = snapshot[frozen.ORIGIN], snapshot[frozen.LANES], snapshot[frozen.LANE_BASE]
    slots, oldest, reached = snapshot[frozen.SLOTS], snapshot[frozen.OLDEST], snapshot[frozen.REACHED]
    folders, first_rows = snapshot[frozen.FOLDERS], snapshot[frozen.FIRST_ROWS]
    rows, all_lanes, live_lanes = snapshot[frozen.ROWS], snapshot[frozen.ALL_LANES], snapshot[frozen.LIVE_LANES]
    live, live_base, first_growing = snapshot[frozen.LIVE], snapshot[frozen.LIVE_BASE], snapshot[frozen.FIRST_GROWING]
    shifts, first_chunks = load_int(table + 8 * cols.SHIFT), load_int(table + 8 * cols.FIRST_CHUNK)
    chunk_counts, bases = load_int(table + 8 * cols.CHUNKS), load_int(table + 8 * cols.BASES)
    places = load_int(table + 8 * cols.BASES_SIZE)
    # Of many segments no cache holds what is known of the lanes: it is read from memory at once.
    for i in range(ids.size if slots >= MANY_SLOTS else 0):
        slot = (ids[_at(i)] >> POSITION_BITS) - origin
        if 0 <= slot < slots:
            touch(lanes + 8 * slot)
            touch(lane_base + 8 * slot)
            touch(folders + 8 * slot)
    for i in range(ids.size if slots >= MANY_SLOTS else 0):
        slot = (ids[_at(i)] >> POSITION_BITS) - origin
        if 0 <= slot < slots and load_int(lanes + 8 * slot) > 0:
            place = load_int(lane_base + 8 * slot)
            touch(first_rows + 8 * place)
            if reached:
                touch(oldest + 8 * place)
            touch(rows + 8 * (COMMITTED * all_lanes + place))
    # First where each id's row is, up to one that is not visible or has no mapped flags. AFTER gets the address of the
    # row's flags, K how many the chunk has from there on, OWN_STOP the end of the lane.
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
        windows[cols.FOLDER, item], windows[cols.LINE, item], windows[cols.BEFORE, item] = folder, line, before
        windows[cols.AFTER, item], windows[cols.K, item] = base + (line << bits) + inside, (1 << bits) - inside
        windows[cols.SLOT, item], windows[cols.LANE, item], windows[cols.ROW, item] = slot, lane, row
        windows[cols.OWN_STOP, item] = stop
        located += 1
    for i in range(located):
        touch(windows[cols.AFTER, _at(i)])
    words = (1 << WORD * n) - 1 if 0 < n < WORD else -1
    for i in range(located):
        item = _at(i)
        address, row, stop = windows[cols.AFTER, item], windows[cols.ROW, item], windows[cols.OWN_STOP, item]
        flags = load_byte(address)
        if flags & NO_STEP:
            return i
        begins, floor = flags & (FIRST | CUT), row
        if stack > 1 and not flags & FIRST:
            # The oldest row that the stack may show. Rows that are hidden are shown: they are of the episode.
            folder, before = windows[cols.FOLDER, item], windows[cols.BEFORE, item]
            bits, first = load_int(shifts + 8 * folder), load_int(first_chunks + 8 * folder)
            chunk, base = -1, 0
            while floor > 0 and row - floor < stack - 1:
                floor -= 1
                inside = floor + before
                if inside >> bits != chunk:
                    chunk = inside >> bits
                    base = load_int(bases + 8 * (first + chunk))
                    if base == 0:
                        return i
                if load_byte(base + (windows[cols.LINE, item] << bits) + (inside & ((1 << bits) - 1))) & FIRST:
                    break
        # Nearly every window lies in the middle of an episode: its steps and the row behind them have no flags.
        if flags & _ENDS == 0 and n > 0 and row + n < stop and windows[cols.K, item] > max(n, WORD):
            at, last = address + 1, address + 1 + n - WORD
            found = load_int(max(at, last)) & words
            while found == 0 and at < last:
                found = load_int(at)
                at += WORD
            if found == 0:
                after = row + n
                windows[cols.FLOOR, item], windows[cols.AFTER, item], windows[cols.K, item] = floor, after, n
                windows[cols.OBS_STOP, item] = windows[cols.STEP_STOP, item] = windows[cols.FRAMES_STOP, item] = (
                    after + 1
                )
                ends[item] = begins
                continue
        # Rows are counted as in the folder here: those of the lane have as many before them.
        folder, before = windows[cols.FOLDER, item], windows[cols.BEFORE, item]
        row, stop = row + before, stop + before
        bits, first = load_int(shifts + 8 * folder), load_int(first_chunks + 8 * folder)
        mask, above = (1 << bits) - 1, windows[cols.LINE, item] << bits  # what of a chunk is before the lane's line
        count = min(load_int(chunk_counts + 8 * folder), places - first)
        chunk, base = row >> bits, address - (row & mask)
        k, end, final = 0, 0, False
        while True:
            k += 1
            after, following = row + k, 0
            if after < stop:
                if after >> bits != chunk:
                    chunk = after >> bits
                    base = load_int(bases + 8 * (first + chunk)) if chunk < count else 0
                    if base == 0:
                        return i
                    base += above
                following = load_byte(base + (after & mask))
            if n == 0:
                break
            if flags & _ENDS:
                end, final = flags, following & OBSERVATION_ONLY != 0
                break
            column = load_int(live_base + 8 * windows[cols.SLOT, item]) if after >= stop else -1
            if column >= 0:
                observed = load_int(live + 8 * (OBSERVED * live_lanes + column + windows[cols.LANE, item]))
                if k != n or whole or after - before >= observed:
                    return i
                final = True
                break
            if following & NO_STEP:
                end, final = following | (following & CUT) >> 3, following & OBSERVATION_ONLY != 0
                break
            if after >= stop or following & FIRST:
                end = TRUNCATED
                break
            if k == n:
                final = True
                break
            flags = following
        if n == 0:
            windows[cols.FLOOR, item], windows[cols.AFTER, item] = floor, after - before
            ends[item], behind[item] = flags, following
            continue
        at_end = end & _ENDS
        if at_end and not final and not at_end & TERMINATED:
            # There is nothing to bootstrap from behind the last step: the window ends at that step's observation.
            k -= 1
            if k == 0:
                return i
            at_end, final = 0, True
            after -= 1
        is_step = not at_end and after < stop
        after -= before
        windows[cols.FLOOR, item], windows[cols.AFTER, item], windows[cols.K, item] = floor, after, k
        windows[cols.OBS_STOP, item] = after + 1 if final else 0
        windows[cols.FRAMES_STOP, item] = after + 1 if final else after
        windows[cols.STEP_STOP, item] = after + 1 if is_step else 0
        ends[item] = at_end | begins
    return -1 if located == ids.size else located
