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
from diskreplay.kernels import jit
from diskreplay.kernels.runs import (
    ALL_STEPS,
    FIRST_ONLY,
    MOVED_BACK,
    NEVER,
    starts_plain as starts_plain,
)


@jit.kernel("int", "int", "int", "ints", "ints", "ints", inner=True)
def _least_id(step_id: int, origin: int, lanes: Ints, lane_base: Ints, oldest: Ints) -> int:
    """Return the least id of a step's lane that is not hidden."""
    slot, position = (step_id >> POSITION_BITS) - origin, step_id & POSITION_MASK
    if slot < 0 or slot >= lanes.size or lanes[slot] <= 0:
        return NEVER
    width = lanes[slot]
    row = position // width
    return step_id + (oldest[lane_base[slot] + position - row * width] - row) * width


@jit.kernel(
    "int", "ints2", *["int"] * 8, *["ints"] * 3, "out_ints2", "int", *["out_ints"] * 5, checked=False
)  # fmt: skip
def starts(
    lines: Ints, length: int, step: int, last: int, open_rows: int, observed: int, since: int, reached: int,
    origin: int, lanes: Ints, lane_base: Ints, oldest: Ints, partly: Ints, at: int,
    first: Ints, stride: Ints, count: Ints, time: Ints, before: Ints,
) -> int:  # fmt: skip
    """Write the ids at which samples of episodes start; `runs.Starts` says which they are.

    None is below `since`, and none is hidden: `oldest` has the first row of each lane that is not, of those episodes
    that began before `reached`. Runs are written from place `at` on, two an episode at most; the place behind the last
    one is returned. `before` has one number more, of the ids that come before each run.

    What is not hidden of the runs of `partly`, (4, n), comes first, and stays in it; one that is hidden whole has the
    count 0 there.
    """
    for i in range(partly.shape[1]):
        least = _least_id(partly[0, i], origin, lanes, lane_base, oldest)
        if partly[0, i] < least:
            hidden = min((least - partly[0, i] + partly[1, i] - 1) // partly[1, i], partly[2, i])
            partly[0, i] += hidden * partly[1, i]
            partly[2, i] -= hidden
        if partly[2, i] > 0:
            first[at], stride[at], count[at], time[at] = partly[0, i], partly[1, i], partly[2, i], partly[3, i]
            before[at + 1] = before[at] + partly[2, i]
            at += 1
    for i in range(lines.shape[0]):
        steps, end = lines[i, STEPS], lines[i, END]
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
        begin, apart, least = lines[i, FIRST_ID], lines[i, STRIDE], np.int64(since)
        if lines[i, TIME] < reached:
            least = max(least, _least_id(begin, origin, lanes, lane_base, oldest))
        moved = begin + back * apart
        apart *= step
        if begin < least:
            hidden = min((least - begin + apart - 1) // apart, ids)
            begin, ids = begin + hidden * apart, ids - hidden
        if ids > 0:
            first[at], stride[at], count[at], before[at + 1] = begin, apart, ids, before[at] + ids
            time[at] = lines[i, TIME]
            at += 1
        if back >= 0 and moved >= least:
            first[at], stride[at], count[at], before[at + 1] = moved, lines[i, STRIDE], 1, before[at] + 1
            time[at] = lines[i, TIME]
            at += 1
    return int(at)
