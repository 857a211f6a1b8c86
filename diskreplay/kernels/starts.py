"""At which ids the samples of episodes start: runs of ids, and how many come before each."""

import numpy as np

from diskreplay import ids
from diskreplay.ids import Ints

from . import frozen, runs
from .following import COMMITTED, OBSERVED, OPEN_START, OPEN_TIME
from .jit import kernel, load_int

_FIRST, _STRIDE, _COUNT, _TIME, _BEFORE = runs.FIRST, runs.STRIDE, runs.COUNT, runs.TIME, runs.BEFORE
_NEVER, _PADDED, _MOVED_BACK = runs.NEVER, runs.PADDED, runs.MOVED_BACK
_FIRST_ONLY, _ALL_STEPS, _DROPPED = runs.FIRST_ONLY, runs.ALL_STEPS, runs.DROPPED

# Makes an index that is not tested for being negative.
_at = np.uint64


@kernel("int", "ints2", "int", "ints", "ints", "out_ints2", "int", "out_ints2")
def starts(lines: Ints, opened: int, rule: Ints, snapshot: Ints, partly: Ints, at: int, block: Ints) -> int:
    """Write the ids at which samples of episodes start; `rule` has the numbers of a `runs.Starts`, which says which.

    None is below `since`, and none is hidden in the snapshot of this record. Runs are written into the block from place
    `at` on, two an episode at most; the place behind the last one is returned.

    What is not hidden of the runs of `partly`, (4, n), comes first, and stays in it; one that is hidden whole has the
    count 0 there, and then the complement of that place is returned, which is negative. Then come the episodes of
    `lines`, and if `opened` is not 0 those that are open in the snapshot.
    """
    length, step, last, open_rows, observed, since = rule[0], rule[1], rule[2], rule[3], rule[4], rule[5]
    followed, from_end = rule[6], rule[7]
    left, listed = partly.shape[1], partly.shape[1] + lines.shape[0]
    growing, live, row_bytes = snapshot[frozen.GROWING], snapshot[frozen.LIVE], 8 * snapshot[frozen.LIVE_LANES]
    origin, reached = snapshot[frozen.ORIGIN], snapshot[frozen.REACHED]
    gone = 0
    for i in range(listed + (snapshot[frozen.LIVE_LANES] if opened else 0)):
        # The first step, and the distance of two; the step at which the first sample and one that was moved start.
        skipped, count, moved, least = 0, 0, -1, since
        if i < left:
            item = _at(i)
            begin, apart, count = partly[_FIRST, item], partly[_STRIDE, item], partly[_COUNT, item]
            time, least = partly[_TIME, item], 0
            spacing = apart
        else:
            if i < listed:
                item = _at(i - left)
                begin, apart, steps = lines[item, ids.FIRST_ID], lines[item, ids.STRIDE], lines[item, ids.STEPS]
                obs_rows, end, time = lines[item, ids.OBS_ROWS], lines[item, ids.END], lines[item, ids.TIME]
            else:
                column = i - listed
                while column >= load_int(growing + 8) + load_int(growing + 16):  # lanes of a segment, and its first one
                    growing += 8 * frozen.GROWING_COLUMNS
                apart, lane = load_int(growing + 8), column - load_int(growing + 16)
                start = load_int(live + OPEN_START * row_bytes + 8 * column)
                steps = load_int(live + COMMITTED * row_bytes + 8 * column) - start
                obs_rows = load_int(live + OBSERVED * row_bytes + 8 * column) - start
                end, time = ids.OPEN, load_int(live + OPEN_TIME * row_bytes + 8 * column)
                begin = ((load_int(growing) + origin) << ids.POSITION_BITS) + lane + start * apart
                if start < 0 or steps <= 0:
                    continue
            spacing = apart * step
            total = steps
            if last != _ALL_STEPS and not end & ids.TERMINATED:
                total -= followed if end & ids.OBSERVATION_ONLY else 1
            missing = total - length
            if end & ids.OPEN:
                beyond = (obs_rows if observed else steps) - open_rows
                if open_rows > 0 and beyond >= 0:
                    count = (beyond if step == 1 else beyond // step) + 1
            elif last == _ALL_STEPS:
                count = steps
            elif total > 0 and (missing <= 0 or last == _FIRST_ONLY):
                count = 1 if missing >= 0 or last != _DROPPED else 0
            elif total > 0:
                count = missing // step + 1
                rest = missing - (count - 1) * step
                if from_end:
                    skipped = rest
                if rest and step < length + rest:
                    if last == _PADDED:
                        count += 1
                    elif last == _MOVED_BACK:
                        moved = 0 if from_end else missing
        if i < left or time < reached:
            slot, position = (begin >> ids.POSITION_BITS) - origin, begin & ids.POSITION_MASK
            width = load_int(snapshot[frozen.LANES] + 8 * slot) if 0 <= slot < snapshot[frozen.SLOTS] else 0
            if width > 0:
                row = position // width
                place = load_int(snapshot[frozen.LANE_BASE] + 8 * slot) + position - row * width
                least = max(least, begin + (load_int(snapshot[frozen.OLDEST] + 8 * place) - row) * width)
            else:
                least = _NEVER
        for part in range(3):  # a moved sample at step 0, those that were not moved, a moved one behind them
            first, stride, some = begin + moved * apart, apart, 0
            if part == 1:
                first, stride, some = begin + skipped * apart, spacing, count
            elif moved == 0 if part == 0 else moved > 0:
                some = 1
            if some > 0 and first < least:
                hidden = min((least - first + stride - 1) // stride, some)
                first, some = first + hidden * stride, some - hidden
            if i < left and part == 1:
                partly[_FIRST, _at(i)], partly[_COUNT, _at(i)] = first, some
                gone = gone if some > 0 else -1
            if some > 0:
                to = _at(at)
                block[_FIRST, to], block[_STRIDE, to], block[_COUNT, to] = first, stride, some
                if block[_TIME, to] != time:  # a page of zeros that nobody writes takes no memory
                    block[_TIME, to] = time
                at += 1
                block[_BEFORE, _at(at)] = block[_BEFORE, to] + some
    return at ^ gone
