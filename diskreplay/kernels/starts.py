"""At which ids the samples of episodes start: runs of ids, and how many come before each."""

import numpy as np

from diskreplay import ids
from diskreplay.ids import Ints

from . import frozen, packed, runs
from .following import COMMITTED, OBSERVED, OPEN_START, OPEN_TIME
from .jit import kernel, load_int

_FIRST, _STRIDE, _COUNT, _TIME, _BEFORE = runs.FIRST, runs.STRIDE, runs.COUNT, runs.TIME, runs.BEFORE
_NEVER, _PADDED, _MOVED_BACK = runs.NEVER, runs.PADDED, runs.MOVED_BACK
_FIRST_ONLY, _ALL_STEPS, _DROPPED = runs.FIRST_ONLY, runs.ALL_STEPS, runs.DROPPED

# Makes an index that is not tested for being negative.
_at = np.uint64


@kernel("int", "out_ints2", "int", "ints", "ints2", "int")
def starts(given: Ints, kind: int, snapshot: Ints, record: Ints, at: int) -> int:
    """Write the ids at which samples of episodes start.

    `record` is that of a population, see `runs.RULE`: the numbers of a `runs.Starts` say which ids these are, and runs
    of them are written into the block from place `at` on, two an episode at most. The place behind the last one is
    returned. None is below `since`, and none is hidden in the snapshot of this record.

    `given` are lines of episodes (LINES), or runs, (4, n), that are partly hidden (RUNS). Such runs lose their hidden
    ids, and are written; one that is hidden whole gets the count 0 and is not. Then the complement of that place is
    returned, which is negative. With RUNS_AND_OPEN the episodes that are open in the snapshot follow.
    """
    rule, block = packed.ints(record, runs.RULE), packed.ints2(record, runs.BLOCK)
    length, step, last, open_rows, observed, since = rule[0], rule[1], rule[2], rule[3], rule[4], rule[5]
    followed, from_end = rule[6], rule[7]
    left = 0 if kind == runs.LINES else given.shape[1]
    listed = given.shape[0] if kind == runs.LINES else left
    growing, live, row_bytes = snapshot[frozen.GROWING], snapshot[frozen.LIVE], 8 * snapshot[frozen.LIVE_LANES]
    origin, reached = snapshot[frozen.ORIGIN], snapshot[frozen.REACHED]
    gone = 0
    for i in range(listed + (snapshot[frozen.LIVE_LANES] if kind == runs.RUNS_AND_OPEN else 0)):
        # The first step, and the distance of two; the step at which the first sample and one that was moved start.
        skipped, count, moved, least = 0, 0, -1, since
        item = _at(i)
        if i < left:
            begin, apart, count = given[_FIRST, item], given[_STRIDE, item], given[_COUNT, item]
            time, least = given[_TIME, item], 0
            spacing = apart
        else:
            if i < listed:
                begin, apart, steps = given[item, ids.FIRST_ID], given[item, ids.STRIDE], given[item, ids.STEPS]
                obs_rows, end, time = given[item, ids.OBS_ROWS], given[item, ids.END], given[item, ids.TIME]
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
                given[_FIRST, item], given[_COUNT, item] = first, some
                gone = gone if some > 0 else -1
            if some > 0:
                to = _at(at)
                block[_FIRST, to], block[_STRIDE, to], block[_COUNT, to] = first, stride, some
                if block[_TIME, to] != time:  # a page of zeros that nobody writes takes no memory
                    block[_TIME, to] = time
                at += 1
                block[_BEFORE, _at(at)] = block[_BEFORE, to] + some
    return at ^ gone
