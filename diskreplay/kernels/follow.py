"""Follow lanes that grow: from counters in memory and new flags to ended episodes and the open one of each lane.

A writer stores `observed` and `committed` of a lane behind the rows that they show, and so they are read in that order
here. All that is new of a lane is looked at once, one byte a row.
"""

import numpy as np

from diskreplay import ids

from . import following as live, jit
from .find_windows import WORD
from .following import Ints

AHEAD = 32  # lanes


@jit.inner
def _emit(
    ended: Ints, found: Ints, segment: int, width: int, start: int, steps: int, final: int, end: int, time: int
) -> None:
    """Write an ended episode; one that nothing ended was cut by its writer."""
    if end & live.ENDS == 0:
        end |= ids.TRUNCATED | ids.CUT
    if end & ids.DISCARDED:
        found[live.SPLITS] = 1
    at = found[live.ENDED]
    ended[at, ids.FIRST_ID] = segment + start * width
    ended[at, ids.STRIDE] = width
    ended[at, ids.STEPS] = steps
    ended[at, ids.OBS_ROWS] = steps + final
    ended[at, ids.END] = end
    ended[at, ids.TIME] = time
    found[live.ENDED] = at + 1
    found[live.ENDED_STEPS] += steps


@jit.inner
def _are_mapped(folder: int, first: int, last: int, start: Ints, chunks: Ints, shift: Ints, bases: Ints) -> int:
    """Tell whether the chunks of two rows of a segment, and those between them, have addresses."""
    bits = shift[folder]
    for chunk in range(first >> bits, (last >> bits) + 1):
        if chunk >= chunks[folder] or bases[np.uint64(start[folder] + chunk)] == 0:
            return 0
    return 1


@jit.inner
def _follow_segment(
    which: int, growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints,
    time_chunks: Ints, time_shift: Ints, times: Ints, origin: int, lanes: Ints, ended: Ints, found: Ints,
) -> int:  # fmt: skip
    """Take in what the lanes of a segment have published."""
    # Unsigned indices, because numba tests a signed one for being negative.
    line = np.uint64(which)
    slot, width, clock = growing[line, live.SLOT], growing[line, live.LANES], growing[line, live.CLOCK]
    folder = np.uint64(growing[line, live.FOLDER])
    bits, first = shift[folder], first_chunk[folder]
    mask = (1 << bits) - 1
    for lane in range(width - 1, -1, -1):
        # Flags of lanes lie in pages of their own: those of the lane after the next ones are on their way by then.
        ahead = lane - AHEAD
        if ahead >= 0:
            row = lanes[live.COMMITTED, np.uint64(growing[line, live.PLACE] + ahead)]
            if row >> bits < chunks[folder]:
                jit.prefetch(bases[np.uint64(first + (row >> bits))] + (ahead << bits) + (row & mask))
        at = np.uint64(growing[line, live.PLACE] + lane)
        observed = jit.load_shared(growing[line, live.OBSERVED_AT] + 8 * lane)
        stop = jit.load_shared(growing[line, live.COMMITTED_AT] + 8 * lane)
        row, over, steps_over = lanes[live.COMMITTED, at], found[live.ENDED], found[live.ENDED_STEPS]
        splits = found[live.SPLITS]
        if stop < row or observed > stop + 1:
            return live.DAMAGED
        observed = max(observed, stop)
        if stop == row:
            if observed != lanes[live.OBSERVED, at]:
                lanes[live.OBSERVED, at], found[live.CHANGED] = observed, 1
            continue
        if stop > growing[line, live.CHECKED]:
            return live.UNCHECKED
        if over + stop - row >= ended.shape[0]:
            return live.FULL
        if not _are_mapped(folder, row, stop - 1, first_chunk, chunks, shift, bases):
            return live.UNCHECKED
        if times.size and not _are_mapped(folder, row, stop - 1, first_times, time_chunks, time_shift, times):
            return live.UNCHECKED
        start, so_far = lanes[live.OPEN_START, at], lanes[live.OPEN_END, at]
        goes_on = stop == row + 1 and start >= 0 and so_far & ids.EPISODE_VALUES == 0
        if goes_on and jit.load_byte(bases[np.uint64(first + (row >> bits))] + (lane << bits) + (row & mask)) == 0:
            # A step in the middle of an episode: nearly always.
            lanes[live.COMMITTED, at], lanes[live.OBSERVED, at], found[live.CHANGED] = stop, observed, 1
            found[live.OPEN_STEPS] += 1
            continue
        segment = ((slot + origin) << ids.POSITION_BITS) + lane
        before, time = so_far & ids.CONTINUES, lanes[live.OPEN_TIME, at]
        previous = so_far & ids.EPISODE_VALUES  # flags of the row before
        while row < stop:
            address = bases[np.uint64(first + (row >> bits))] + (lane << bits) + (row & mask)
            inside = start >= 0 and previous & live.ENDS == 0 and stop - row >= WORD and (row & mask) + WORD <= mask + 1
            if inside and jit.load_int(address) == 0:  # the middle of an episode
                row, previous = row + WORD, 0
                continue
            flags = np.int64(jit.load_byte(address))
            if flags & ids.DISCARDED and flags != ids.DISCARD and flags != ids.DISCARD_BEFORE:
                found[live.ENDED], found[live.ENDED_STEPS], found[live.SPLITS] = over, steps_over, splits
                return live.DAMAGED
            if start >= 0 and flags & ids.NO_STEP and flags & ids.FIRST == 0:
                end = previous & live.LAST_STEP | flags & live.BEHIND_LAST | before
                final = 1 if flags & ids.OBSERVATION_ONLY else 0
                _emit(ended, found, segment, width, start, row - start, final, end, time)
                start = -1
            else:
                if start >= 0 and (flags & ids.FIRST or previous & live.ENDS):
                    _emit(ended, found, segment, width, start, row - start, 0, previous & live.LAST_STEP | before, time)
                    start = -1
                if start < 0:
                    if flags & (ids.FIRST | ids.NO_STEP) != ids.FIRST and flags != ids.DISCARD_BEFORE:
                        found[live.ENDED], found[live.ENDED_STEPS], found[live.SPLITS] = over, steps_over, splits
                        return live.DAMAGED
                    start, before = row, ids.CONTINUES if flags & ids.CUT else 0
                    if times.size:
                        bits_of_times = time_shift[folder]
                        block = times[np.uint64(first_times[folder] + (row >> bits_of_times))]
                        inside_block = (lane << bits_of_times) + (row & ((1 << bits_of_times) - 1))
                        time = jit.load_int(block + 8 * inside_block) + clock
                    if flags & ids.DISCARDED:
                        _emit(ended, found, segment, width, start, 0, 0, ids.DISCARDED | before, time)
                        start = -1
                previous = flags
            row += 1
        if start >= 0 and previous & live.ENDS:
            _emit(ended, found, segment, width, start, stop - start, 0, previous & live.LAST_STEP | before, time)
            start = -1
        if lanes[live.OPEN_START, at] >= 0:
            found[live.OPEN_STEPS] -= lanes[live.COMMITTED, at] - lanes[live.OPEN_START, at]
        lanes[live.OPEN_START, at], lanes[live.OPEN_END, at], lanes[live.OPEN_TIME, at] = start, ids.OPEN, time
        if start >= 0:
            found[live.OPEN_STEPS] += stop - start
            lanes[live.OPEN_END, at] |= before | previous & ids.EPISODE_VALUES
        lanes[live.COMMITTED, at], lanes[live.OBSERVED, at], found[live.CHANGED] = stop, observed, 1
    return live.DONE


@jit.kernel("int", "ints2", *["ints"] * 8, "int", "out_ints2", "out_ints2", "out_ints")
def follow(
    growing: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, first_times: Ints, time_chunks: Ints,
    time_shift: Ints, times: Ints, origin: int, lanes: Ints, ended: Ints, found: Ints,
) -> int:  # fmt: skip
    """Take in what lanes have published, unless that was done before (FOLLOWED); see `DONE` for the result.

    The last segments come first: where a lane has moved on to a newer segment, what it left is read after it left.
    Ended episodes go to `ended`, from line found[ENDED] on.

    `first_chunk`, `chunks`, `shift` and `bases` are those of the table of `done`, the next four those of `time`; with
    no `times` no time is read.
    """
    if found[live.FOLLOWED] != 0:
        return live.DONE
    before = found[live.ENDED]
    for which in range(growing.shape[0] - 1, -1, -1):
        status = _follow_segment(
            which, growing, first_chunk, chunks, shift, bases, first_times, time_chunks, time_shift, times, origin,
            lanes, ended, found,
        )  # fmt: skip
        if status != live.DONE:
            found[live.LEFT] = which
            return status
    found[live.FOLLOWED] = 1
    return live.ADDED if found[live.ENDED] > before and found[live.SPLITS] != 0 else live.DONE
