"""At which ids the samples of episodes start: runs of ids, and how many come before each."""

import numpy as np

from diskreplay import ids
from diskreplay.ids import Ints

from . import frozen, jit, runs
from .following import COMMITTED, LANE_ROWS, OBSERVED, OPEN_START, OPEN_TIME

_FIRST, _STRIDE, _COUNT, _TIME, _BEFORE = runs.FIRST, runs.STRIDE, runs.COUNT, runs.TIME, runs.BEFORE

# Makes an index that is not tested for being negative.
_at = np.uint64


@jit.inner
def _append(block: Ints, at: int, first: int, stride: int, count: int, time: int) -> int:
    """Write a run; return the place behind it."""
    block[_FIRST, _at(at)], block[_STRIDE, _at(at)], block[_COUNT, _at(at)] = first, stride, count
    if block[_TIME, _at(at)] != time:  # a page of zeros that nobody writes takes no memory
        block[_TIME, _at(at)] = time
    block[_BEFORE, _at(at + 1)] = block[_BEFORE, _at(at)] + count
    return at + 1


@jit.inner
def _least_id(step_id: int, snapshot: Ints) -> int:
    """Return the least id of a step's lane that is not hidden."""
    slot, position = (step_id >> ids.POSITION_BITS) - snapshot[frozen.ORIGIN], step_id & ids.POSITION_MASK
    width = jit.load_int(snapshot[frozen.LANES] + 8 * slot) if 0 <= slot < snapshot[frozen.SLOTS] else 0
    if width <= 0:
        return runs.NEVER
    row = position // width
    place = jit.load_int(snapshot[frozen.LANE_BASE] + 8 * slot) + position - row * width
    return step_id + (jit.load_int(snapshot[frozen.OLDEST] + 8 * place) - row) * width


@jit.inner
def _starts_of(
    begin: int, apart: int, steps: int, obs_rows: int, end: int, time: int, rule: Ints, snapshot: Ints, at: int,
    block: Ints,
) -> int:  # fmt: skip
    """Write the ids at which samples of an episode start."""
    length, step, last, open_rows, observed, since = rule[0], rule[1], rule[2], rule[3], rule[4], rule[5]
    followed, from_end = rule[6], rule[7]
    # Steps at which the first sample and one that was moved start, -1 where none was.
    first, count, moved = 0, 0, -1
    if end & ids.OPEN:
        beyond = (obs_rows if observed else steps) - open_rows
        if open_rows > 0 and beyond >= 0:
            count = (beyond if step == 1 else beyond // step) + 1
    elif last == runs.ALL_STEPS:
        count = steps
    else:
        total = steps
        if not end & ids.TERMINATED:
            total -= followed if end & ids.OBSERVATION_ONLY else 1
        missing = total - length
        if total > 0 and (missing <= 0 or last == runs.FIRST_ONLY):
            count = 1 if missing >= 0 or last != runs.DROPPED else 0
        elif total > 0:
            count = missing // step + 1
            rest = missing - (count - 1) * step
            if from_end:
                first = rest
            if rest and step < length + rest:
                if last == runs.PADDED:
                    count += 1
                elif last == runs.MOVED_BACK:
                    moved = 0 if from_end else missing
    least = since
    if time < snapshot[frozen.REACHED]:
        least = max(least, _least_id(begin, snapshot))
    moved_id, stride = begin + moved * apart, apart * step
    begin += first * apart
    if moved == 0 and moved_id >= least:
        at = _append(block, at, moved_id, apart, 1, time)
    if begin < least:
        hidden = min((least - begin + stride - 1) // stride, count)
        begin, count = begin + hidden * stride, count - hidden
    if count > 0:
        at = _append(block, at, begin, stride, count, time)
    if moved > 0 and moved_id >= least:
        at = _append(block, at, moved_id, apart, 1, time)
    return at


@jit.kernel("int", "ints2", "int", "ints", "ints", "out_ints2", "int", "out_ints2")
def starts(lines: Ints, opened: int, rule: Ints, snapshot: Ints, partly: Ints, at: int, block: Ints) -> int:
    """Write the ids at which samples of episodes start; `rule` has the numbers of a `runs.Starts`, which says which.

    None is below `since`, and none is hidden in the snapshot of this record. Runs are written into the block from place
    `at` on, two an episode at most; the place behind the last one is returned.

    What is not hidden of the runs of `partly`, (4, n), comes first, and stays in it; one that is hidden whole has the
    count 0 there, and then the complement of that place is returned, which is negative. Then come the episodes of
    `lines`, and if `opened` is not 0 those that are open in the snapshot.
    """
    gone = 0
    for i in range(partly.shape[1]):
        least = _least_id(partly[_FIRST, i], snapshot)
        if partly[_FIRST, i] < least:
            hidden = min((least - partly[_FIRST, i] + partly[_STRIDE, i] - 1) // partly[_STRIDE, i], partly[_COUNT, i])
            partly[_FIRST, i] += hidden * partly[_STRIDE, i]
            partly[_COUNT, i] -= hidden
        if partly[_COUNT, i] > 0:
            at = _append(block, at, partly[_FIRST, i], partly[_STRIDE, i], partly[_COUNT, i], partly[_TIME, i])
        else:
            gone = -1
    for i in range(lines.shape[0]):
        at = _starts_of(
            lines[i, ids.FIRST_ID], lines[i, ids.STRIDE], lines[i, ids.STEPS], lines[i, ids.OBS_ROWS],
            lines[i, ids.END], lines[i, ids.TIME], rule, snapshot, at, block,
        )  # fmt: skip
    if opened:
        growing = jit.ints2_at(snapshot[frozen.GROWING], snapshot[frozen.GROWING_COUNT], frozen.GROWING_COLUMNS)
        live = jit.ints2_at(snapshot[frozen.LIVE], LANE_ROWS, snapshot[frozen.LIVE_LANES])
        for which in range(growing.shape[0]):
            width, column = growing[which, 1], growing[which, 2]
            base = (growing[which, 0] + snapshot[frozen.ORIGIN]) << ids.POSITION_BITS
            for lane in range(width):
                place = np.uint64(column + lane)
                start = live[OPEN_START, place]
                steps = live[COMMITTED, place] - start
                if start >= 0 and steps > 0:
                    at = _starts_of(
                        base + lane + start * width, width, steps, live[OBSERVED, place] - start, ids.OPEN,
                        live[OPEN_TIME, place], rule, snapshot, at, block,
                    )  # fmt: skip
    return at ^ gone


@jit.kernel("none", "out_ints2", "int", "int")
def sort_runs(block: Ints, start: int, end: int) -> None:
    """Sort a few runs of a block by when their episodes began, and then by id; and count how many are before each."""
    for at in range(start + 1, end):
        first, stride, count, time = block[_FIRST, at], block[_STRIDE, at], block[_COUNT, at], block[_TIME, at]
        to = at
        while to > start and (
            block[_TIME, to - 1] > time or (block[_TIME, to - 1] == time and block[_FIRST, to - 1] > first)
        ):
            for row in range(_BEFORE):
                block[row, to] = block[row, to - 1]
            to -= 1
        block[_FIRST, to], block[_STRIDE, to], block[_COUNT, to], block[_TIME, to] = first, stride, count, time
    for at in range(start, end):
        block[_BEFORE, at + 1] = block[_BEFORE, at] + block[_COUNT, at]
