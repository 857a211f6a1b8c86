"""At which ids the samples of episodes start: runs of ids, and how many come before each."""

import numpy as np

from diskreplay.ids import (
    END,
    FIRST_ID,
    OBS_ROWS,
    OBSERVATION_ONLY,
    OPEN,
    POSITION_BITS,
    POSITION_MASK,
    STEPS,
    STRIDE,
    TERMINATED,
    TIME,
    Ints,
)
from diskreplay.kernels import jit, runs
from diskreplay.kernels.runs import (
    ALL_STEPS,
    FIRST_ONLY,
    MOVED_BACK,
    NEVER,
    starts_plain as starts_plain,
)

_FIRST, _STRIDE, _COUNT, _TIME, _BEFORE = runs.FIRST, runs.STRIDE, runs.COUNT, runs.TIME, runs.BEFORE


@jit.kernel("int", "out_ints2", *["int"] * 5, inner=True, inlined=True)
def _append(block: Ints, at: int, first: int, stride: int, count: int, time: int) -> int:
    """Write a run; return the place behind it."""
    block[_FIRST, at], block[_STRIDE, at], block[_COUNT, at], block[_TIME, at] = first, stride, count, time
    block[_BEFORE, at + 1] = block[_BEFORE, at] + count
    return at + 1


@jit.kernel("int", "int", "int", "ints", "ints", "ints", inner=True)
def _least_id(step_id: int, origin: int, lanes: Ints, lane_base: Ints, oldest: Ints) -> int:
    """Return the least id of a step's lane that is not hidden."""
    slot, position = (step_id >> POSITION_BITS) - origin, step_id & POSITION_MASK
    if slot < 0 or slot >= lanes.size or lanes[slot] <= 0:
        return NEVER
    width = lanes[slot]
    row = position // width
    return step_id + (oldest[lane_base[slot] + position - row * width] - row) * width


@jit.kernel("int", "ints2", "ints", "int", "int", *["ints"] * 3, "out_ints2", "int", "out_ints2", checked=False)
def starts(
    lines: Ints, rule: Ints, reached: int, origin: int, lanes: Ints, lane_base: Ints, oldest: Ints, partly: Ints,
    at: int, block: Ints,
) -> int:  # fmt: skip
    """Write the ids at which samples of episodes start; `rule` has the numbers of a `runs.Starts`, which says which.

    None is below `since`, and none is hidden: `oldest` has the first row of each lane that is not, of those episodes
    that began before `reached`. Runs are written into the block from place `at` on, two an episode at most; the place
    behind the last one is returned.

    What is not hidden of the runs of `partly`, (4, n), comes first, and stays in it; one that is hidden whole has the
    count 0 there.
    """
    length, step, last, open_rows, observed, since = rule[0], rule[1], rule[2], rule[3], rule[4], rule[5]
    for i in range(partly.shape[1]):
        least = _least_id(partly[_FIRST, i], origin, lanes, lane_base, oldest)
        if partly[_FIRST, i] < least:
            hidden = min((least - partly[_FIRST, i] + partly[_STRIDE, i] - 1) // partly[_STRIDE, i], partly[_COUNT, i])
            partly[_FIRST, i] += hidden * partly[_STRIDE, i]
            partly[_COUNT, i] -= hidden
        if partly[_COUNT, i] > 0:
            at = _append(block, at, partly[_FIRST, i], partly[_STRIDE, i], partly[_COUNT, i], partly[_TIME, i])
    for i in range(lines.shape[0]):
        steps, end, time = lines[i, STEPS], lines[i, END], lines[i, TIME]
        ids, back = np.int64(0), np.int64(-1)
        if end & OPEN:
            beyond = (lines[i, OBS_ROWS] if observed else steps) - open_rows
            if open_rows > 0 and beyond >= 0:
                ids = beyond // step + 1
        elif last == ALL_STEPS:
            ids = steps
        else:
            total = steps if end & (TERMINATED | OBSERVATION_ONLY) else steps - 1
            missing = total - length
            if total > 0:
                ids = np.int64(1)
                if missing > 0 and last != FIRST_ONLY:
                    ids += missing // step
                    if missing % step:
                        if last == MOVED_BACK:
                            back = missing
                        else:
                            ids += 1
        begin, apart, least = lines[i, FIRST_ID], lines[i, STRIDE], since
        if time < reached:
            least = max(least, _least_id(begin, origin, lanes, lane_base, oldest))
        moved = begin + back * apart
        apart *= step
        if begin < least:
            hidden = min((least - begin + apart - 1) // apart, ids)
            begin, ids = begin + hidden * apart, ids - hidden
        if ids > 0:
            at = _append(block, at, begin, apart, ids, time)
        if back >= 0 and moved >= least:
            at = _append(block, at, moved, lines[i, STRIDE], 1, time)
    return int(at)
