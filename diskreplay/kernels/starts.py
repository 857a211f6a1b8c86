"""At which ids the samples of episodes start: runs of ids, and how many come before each."""

import numpy as np

from diskreplay.ids import END, FIRST_ID, OBS_ROWS, OBSERVATION_ONLY, OPEN, STEPS, STRIDE, TERMINATED, Ints
from diskreplay.kernels import jit
from diskreplay.kernels.runs import ALL_STEPS, FIRST_ONLY, MOVED_BACK, starts_plain as starts_plain


@jit.kernel(
    "int", "ints2", "int", "int", "int", "int", "int", "int", "int", "out_ints", "out_ints", "out_ints", "out_ints",
    checked=False,
)  # fmt: skip
def starts(
    lines: Ints, length: int, step: int, last: int, open_rows: int, observed: int, frontier: int, at: int,
    first: Ints, stride: Ints, count: Ints, before: Ints,
) -> int:  # fmt: skip
    """Write the ids at which samples of episodes start, none below `frontier`; `runs.Starts` says which they are.

    Runs are written from place `at` on, two an episode at most; the place behind the last one is returned. `before` has
    one number more, of the ids that come before each run.
    """
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
        begin, apart = lines[i, FIRST_ID], lines[i, STRIDE]
        moved = begin + back * apart
        apart *= step
        if begin < frontier:
            hidden = min((frontier - begin + apart - 1) // apart, ids)
            begin, ids = begin + hidden * apart, ids - hidden
        if ids > 0:
            first[at], stride[at], count[at], before[at + 1] = begin, apart, ids, before[at] + ids
            at += 1
        if back >= 0 and moved >= frontier:
            first[at], stride[at], count[at], before[at + 1] = moved, lines[i, STRIDE], 1, before[at] + 1
            at += 1
    return int(at)
