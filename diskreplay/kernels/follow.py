"""Follow lanes that grow: from counters in memory and new flags to ended episodes and the open one of each lane.

A writer stores `observed` and `committed` of a lane behind the rows that they show, and so they are read in that order
here. All that is new of a lane is looked at once, one byte a row.
"""

import numpy as np

from diskreplay import ids
from diskreplay.ids import Ints

from . import addresses, advancing, following as live, jit, packed
from .find_windows import WORD
from .frozen import OWN_FOLDER
from .packed import number

AHEAD = 32  # lanes

_at = np.uint64


@jit.inner
def _emit(ended: Ints, found: Ints, first: int, width: int, steps: int, final: int, end: int, time: int) -> None:
    """Write an ended episode; one that nothing ended was cut by its writer."""
    if end & live.ENDS == 0:
        end |= ids.TRUNCATED | ids.CUT
    if end & ids.DISCARDED:
        found[live.SPLITS] = 1
    at = found[live.ENDED]
    ended[at, ids.FIRST_ID] = first
    ended[at, ids.STRIDE] = width
    ended[at, ids.STEPS] = steps
    ended[at, ids.OBS_ROWS] = steps + final
    ended[at, ids.END] = end
    ended[at, ids.TIME] = time
    found[live.ENDED] = at + 1
    found[live.ENDED_STEPS] += steps


@jit.inner
def _are_mapped(tables: Ints, table: int, folder: int, first: int, last: int) -> bool:
    """Tell whether the chunks of two rows of a segment, and those between them, have addresses."""
    bits, start = number(tables, table + addresses.SHIFT, folder), number(tables, table, folder)
    count = number(tables, table + addresses.CHUNKS, folder)
    for chunk in range(first >> bits, (last >> bits) + 1):
        if chunk >= count or number(tables, table + addresses.BASES, start + chunk) == 0:
            return False
    return True


@jit.kernel("int", "ints2", "int", "out_ints")
def follow(tables: Ints, origin: int, found: Ints) -> int:
    """Take in what lanes have published, unless that was done before (FOLLOWED); see `DONE` for the result.

    The last segments come first: where a lane has moved on to a newer segment, what it left is read after it left.
    Ended episodes go to line found[ENDED] of the log and those behind it. For the record of `tables` see
    `advancing.GROWING`; if there are no TIMES, no time is read.
    """
    if found[live.FOLLOWED] != 0:
        return live.DONE
    growing, lanes = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    ended, is_timed = packed.ints2(tables, advancing.ENDED), tables[advancing.TIMES, packed.LINES] > 0
    before_all = found[live.ENDED]
    for which in range(growing.shape[0] - 1, -1, -1):
        found[live.LEFT] = which
        # Unsigned indices, because numba tests a signed one for being negative.
        line = _at(which)
        slot, width, place = growing[line, live.SLOT], growing[line, live.LANES], growing[line, live.PLACE]
        folder, segment = growing[line, live.FOLDER], (slot + origin) << ids.POSITION_BITS
        bits, chunks = number(tables, advancing.SHIFT, folder), number(tables, advancing.CHUNKS, folder)
        # Where the address of the segment's first chunk of flags is.
        bases = tables[advancing.BASES, packed.ADDRESS] + 8 * number(tables, advancing.FIRST_CHUNK, folder)
        mask = (1 << bits) - 1
        for lane in range(width - 1, -1, -1):
            # Flags of lanes lie in pages of their own: those of the lane after the next ones are on their way by then.
            ahead = lane - AHEAD
            if ahead >= 0:
                row = lanes[live.COMMITTED, _at(place + ahead)]
                if row >> bits < chunks:
                    jit.prefetch(jit.load_int(bases + 8 * (row >> bits)) + (ahead << bits) + (row & mask))
            at = _at(place + lane)
            observed = jit.load_shared(growing[line, live.OBSERVED_AT] + 8 * lane)
            stop = jit.load_shared(growing[line, live.COMMITTED_AT] + 8 * lane)
            row, over, steps_over = lanes[live.COMMITTED, at], found[live.ENDED], found[live.ENDED_STEPS]
            splits = found[live.SPLITS]
            if stop < row or observed > stop + 1:
                return live.DAMAGED
            observed = observed if observed > stop else stop
            if stop == row:
                if observed != lanes[live.OBSERVED, at]:
                    lanes[live.OBSERVED, at], found[live.CHANGED] = observed, 1
                continue
            if stop > growing[line, live.CHECKED]:
                return live.UNCHECKED
            if over + stop - row >= ended.shape[0]:
                return live.FULL
            if not _are_mapped(tables, advancing.FIRST_CHUNK, folder, row, stop - 1):
                return live.UNCHECKED
            if is_timed and not _are_mapped(tables, advancing.FIRST_TIMES, folder, row, stop - 1):
                return live.UNCHECKED
            start, so_far = lanes[live.OPEN_START, at], lanes[live.OPEN_END, at]
            goes_on = stop == row + 1 and start >= 0 and so_far & ids.EPISODE_VALUES == 0
            flags_at = jit.load_int(bases + 8 * (row >> bits)) + (lane << bits) + (row & mask)
            if goes_on and jit.load_byte(flags_at) == 0:
                # A step in the middle of an episode: nearly always.
                lanes[live.COMMITTED, at], lanes[live.OBSERVED, at], found[live.CHANGED] = stop, observed, 1
                found[live.OPEN_STEPS] += 1
                continue
            before, time = so_far & ids.CONTINUES, lanes[live.OPEN_TIME, at]
            previous = so_far & ids.EPISODE_VALUES  # flags of the row before
            # Behind the last row an episode is over, too, that its last step ends.
            while row < stop or (start >= 0 and previous & live.ENDS != 0):
                flags = np.int64(ids.FIRST)
                if row < stop:
                    flags_at = jit.load_int(bases + 8 * (row >> bits)) + (lane << bits) + (row & mask)
                    inside = start >= 0 and previous & live.ENDS == 0 and stop - row >= WORD
                    if inside and (row & mask) + WORD <= mask + 1 and jit.load_int(flags_at) == 0:
                        row, previous = row + WORD, 0  # the middle of an episode
                        continue
                    flags = np.int64(jit.load_byte(flags_at))
                ends = start >= 0 and flags & ids.NO_STEP != 0 and flags & ids.FIRST == 0
                is_damaged = flags & ids.DISCARDED != 0 and flags != ids.DISCARD and flags != ids.DISCARD_BEFORE
                if start >= 0 and (ends or flags & ids.FIRST != 0 or previous & live.ENDS != 0):
                    end = previous & live.LAST_STEP | before
                    final = 1 if ends and flags & ids.OBSERVATION_ONLY else 0
                    end |= flags & live.BEHIND_LAST if ends else 0
                    first = segment + lane + start * width
                    _emit(ended, found, first, width, row - start, final, end, time)
                    start = -1
                if not ends and row < stop:
                    if start < 0:
                        is_start = flags & (ids.FIRST | ids.NO_STEP) == ids.FIRST or flags == ids.DISCARD_BEFORE
                        is_damaged = is_damaged or not is_start
                        start, before = row, ids.CONTINUES if flags & ids.CUT else 0
                        if is_timed:
                            table = advancing.FIRST_TIMES
                            address = addresses.row_address(tables, table, folder, OWN_FOLDER, lane, row)
                            time = jit.load_int(address) + growing[line, live.CLOCK]
                        if flags & ids.DISCARDED:
                            first = segment + lane + start * width
                            _emit(ended, found, first, width, 0, 0, ids.DISCARDED | before, time)
                            start = -1
                    previous = flags
                if is_damaged:
                    found[live.ENDED], found[live.ENDED_STEPS], found[live.SPLITS] = over, steps_over, splits
                    return live.DAMAGED
                row += 1
            if lanes[live.OPEN_START, at] >= 0:
                found[live.OPEN_STEPS] -= lanes[live.COMMITTED, at] - lanes[live.OPEN_START, at]
            lanes[live.OPEN_START, at], lanes[live.OPEN_END, at], lanes[live.OPEN_TIME, at] = start, ids.OPEN, time
            if start >= 0:
                found[live.OPEN_STEPS] += stop - start
                lanes[live.OPEN_END, at] |= before | previous & ids.EPISODE_VALUES
            lanes[live.COMMITTED, at], lanes[live.OBSERVED, at], found[live.CHANGED] = stop, observed, 1
    found[live.FOLLOWED] = 1
    return live.ADDED if found[live.ENDED] > before_all and found[live.SPLITS] != 0 else live.DONE
