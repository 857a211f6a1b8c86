"""Follow lanes that grow: read counters and new flags, and find the ended episodes and the open episode of each lane.

A writer writes the counters `observed` and `committed` of a lane after the rows that they count. So a reader reads
`observed`, then `committed`, then the rows.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import (
    CONTINUES,
    CUT,
    DISCARD,
    DISCARD_BEFORE,
    DISCARDED,
    END,
    EPISODE_VALUES,
    FIRST,
    FIRST_ID,
    NO_STEP,
    OBS_ROWS,
    OBSERVATION_ONLY,
    OPEN,
    POSITION_BITS,
    STEPS,
    STRIDE,
    TERMINATED,
    TIME,
    TRUNCATED,
    Ints,
)

from . import advancing, jit, packed
from .frozen import OWN_FOLDER
from .packed import number

# Columns of the table `growing`. It has a line for each segment that may grow.
# - SLOT: the segment's number minus the number of the store's first segment.
# - PLACE: the index of the segment's first lane among the lanes of all segments.
# - OBSERVED_AT, COMMITTED_AT: the addresses of the counters of the segment's first lane. The counters of the other
#   lanes follow.
# - CHECKED: all rows before this row are in chunks that a check has found complete.
# - CLOCK: the number to add to the times of the segment's rows to get nanoseconds since the epoch.
# - FOLDER: the number of the segment's folder in `Chunks`.
SLOT, LANES, PLACE, OBSERVED_AT, COMMITTED_AT, CHECKED, CLOCK, FOLDER = range(8)
GROWING_COLUMNS = 8

# Rows of the table `lanes`. It has a column for each lane.
# - COMMITTED: the number of complete rows.
# - OBSERVED: the number of rows with an observation.
# - OPEN_START: the first row of the open episode, or -1 if no episode is open.
# - OPEN_END: the bits of the open episode's end that are known already, see `ids.OPEN`.
# - OPEN_TIME: the time when the first step of the open episode was published.
COMMITTED, OBSERVED, OPEN_START, OPEN_END, OPEN_TIME = range(5)
LANE_ROWS = 5

# The chunk table of a stored array: four arrays, in this order.
# - `first_chunk`: for each folder, the index in `bases` of the folder's first chunk.
# - `chunks`: for each folder, the number of its chunks.
# - `shift`: for each folder, the binary logarithm of the number of rows per chunk.
# - `bases`: the address of each chunk, or 0 if the chunk is not mapped.
Chunks = tuple[Ints, ...]

# Indices of the numbers in the array `found`.
# - ENDED: the number of ended episodes. The table ENDED of `advancing` has this number of filled lines.
# - CHANGED: 0 if the snapshot stays the same; else bits, see HIDDEN.
# - LEFT: the line in `growing` of the segment that `follow` read last.
# - FOLLOWED: 1 when all lanes were read. While FOLLOWED is 1, `follow` does nothing; only the caller sets FOLLOWED to
#   0.
# - SPLITS: 1 if the caller must check new ended episodes, because some may be discarded, evicted or lost.
ENDED, ENDED_STEPS, CHANGED, OPEN_STEPS, LEFT, FOLLOWED, SPLITS = range(7)
FOUND = 7

HIDDEN = 2
"""The bit of CHANGED for newly hidden steps; the bit of value 1 means any other change."""

DONE, UNCHECKED, DAMAGED, FULL, ADDED = range(5)
"""Results of `follow`.

- DONE: the new rows of all lanes were read.
- UNCHECKED: some new rows of the segment in line found[LEFT] of `growing` are in chunks that are not checked or not
  mapped yet.
- DAMAGED: the flags or counters of the segment in line found[LEFT] are damaged.
- FULL: the new rows of a lane may have more episodes than the table `ended` has free lines. No new row of the lane was
  read.
- ADDED: the new rows of all lanes were read, and the caller must check the new ended episodes, see SPLITS.
"""

ENDS = TERMINATED | TRUNCATED
# The END of an episode combines bits of two rows. LAST_STEP selects bits of the episode's last step. BEHIND_LAST
# selects bits of the row after the last step: a final observation or an end marker.
LAST_STEP = ENDS | EPISODE_VALUES
BEHIND_LAST = TRUNCATED | OBSERVATION_ONLY | CUT | EPISODE_VALUES | DISCARDED


AHEAD = 32  # the flags of a lane are prefetched this many lanes before they are read

_at = np.uint64


WORD = 8  # this number of flags is read at once


@jit.inner
def _emit(ended: Ints, found: Ints, first: int, width: int, steps: int, end: int, time: int) -> None:
    """Append an ended episode to `ended`; an episode without a bit of `ENDS` counts as cut."""
    if end & ENDS == 0:
        end |= TRUNCATED | CUT
    if end & DISCARDED:
        found[SPLITS] = 1
    at = found[ENDED]
    ended[at, FIRST_ID] = first
    ended[at, STRIDE] = width
    ended[at, STEPS] = steps
    ended[at, OBS_ROWS] = steps + (1 if end & OBSERVATION_ONLY else 0)
    ended[at, END] = end
    ended[at, TIME] = time
    found[ENDED] = at + 1
    found[ENDED_STEPS] += steps


@jit.inner
def _are_mapped(tables: Ints, table: int, folder: int, first: int, last: int) -> bool:
    """Return whether rows `first` to `last` of a folder are mapped; the chunk table begins at line `table`."""
    bits, start = number(tables, table + packed.SHIFT, folder), number(tables, table, folder)
    count = number(tables, table + packed.CHUNKS, folder)
    for chunk in range(first >> bits, (last >> bits) + 1):
        if chunk >= count or number(tables, table + packed.BASES, start + chunk) == 0:
            return False
    return True


@jit.inner
def _split_rows(tables: Ints, found: Ints, line: int, lane: int, base: int, stop: int) -> bool:
    """Read a lane's new rows up to row `stop` - 1: append the ended episodes, and write the open episode to `lanes`.

    `line` is the line of the lane's segment in `growing`. `base` is the id of the lane's row 0. Returns False if the
    flags do not describe a valid sequence of episodes.
    """
    growing, lanes = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    ended, is_timed = packed.ints2(tables, advancing.ENDED), tables[advancing.TIMES, packed.LINES] > 0
    width, folder, at = growing[line, LANES], growing[line, FOLDER], _at(growing[line, PLACE] + lane)
    bits, chunks_at = number(tables, advancing.SHIFT, folder), tables[advancing.BASES, packed.ADDRESS]
    chunks_at += 8 * number(tables, advancing.FIRST_CHUNK, folder)
    row, start, time = lanes[COMMITTED, at], lanes[OPEN_START, at], lanes[OPEN_TIME, at]
    before, previous = lanes[OPEN_END, at] & CONTINUES, lanes[OPEN_END, at] & EPISODE_VALUES
    while row < stop:
        inside = row & ((1 << bits) - 1)
        flags_at = jit.load_int(chunks_at + 8 * (row >> bits)) + (lane << bits) + inside
        is_open = start >= 0 and previous & ENDS == 0  # no row has ended the episode so far
        if is_open and stop - row >= WORD and inside + WORD <= 1 << bits and jit.load_int(flags_at) == 0:
            row, previous = row + WORD, 0
            continue
        flags = jit.load_byte(flags_at)
        if flags & DISCARDED and flags != DISCARD and flags != DISCARD_BEFORE:
            return False
        is_behind = start >= 0 and flags & NO_STEP != 0 and flags & FIRST == 0  # `row` is the row after the last step
        if start >= 0 and (is_behind or flags & FIRST != 0 or not is_open):
            end = previous & LAST_STEP | before | (flags & BEHIND_LAST if is_behind else 0)
            _emit(ended, found, base + start * width, width, row - start, end, time)
            start = -1
        if start < 0 and not is_behind:
            if flags & (FIRST | NO_STEP) != FIRST and flags != DISCARD_BEFORE:
                return False
            start, before = row, CONTINUES if flags & CUT else 0
            if is_timed:
                address = packed.row_address(tables, advancing.FIRST_TIMES, folder, OWN_FOLDER, lane, row)
                time = jit.load_int(address) + growing[line, CLOCK]
            if flags & DISCARDED:
                _emit(ended, found, base + start * width, width, 0, DISCARDED | before, time)
                start = -1
        row, previous = row + 1, flags
    if start >= 0 and previous & ENDS:  # the last new row is the last step of its episode
        _emit(ended, found, base + start * width, width, row - start, previous & LAST_STEP | before, time)
        start = -1
    if lanes[OPEN_START, at] >= 0:
        found[OPEN_STEPS] -= lanes[COMMITTED, at] - lanes[OPEN_START, at]
    lanes[OPEN_START, at], lanes[OPEN_END, at], lanes[OPEN_TIME, at] = start, OPEN, time
    if start >= 0:
        found[OPEN_STEPS] += stop - start
        lanes[OPEN_END, at] |= before | previous & EPISODE_VALUES
    return True


@jit.kernel("int", "ints2", "int", "out_ints")
def follow(tables: Ints, origin: int, found: Ints) -> int:
    """Read the new committed rows of all lanes, and update `tables` and `found`; for the result see `DONE`.

    Newer segments are read before older ones. So if a writer has continued in a newer segment, the older segment is
    complete when it is read. Ended episodes are appended to the array ENDED of `tables`. For `tables` see
    `advancing.GROWING`. If the array TIMES of `tables` is empty, no times are read. `origin` is the number of the
    store's first segment.
    """
    if found[FOLLOWED] != 0:
        return DONE
    growing, lanes = packed.ints2(tables, advancing.GROWING), packed.ints2(tables, advancing.ROWS)
    is_timed, before_all = tables[advancing.TIMES, packed.LINES] > 0, found[ENDED]
    for which in range(growing.shape[0] - 1, -1, -1):
        found[LEFT] = which
        line = _at(which)
        slot, width, place = growing[line, SLOT], growing[line, LANES], growing[line, PLACE]
        folder, segment = growing[line, FOLDER], (slot + origin) << POSITION_BITS
        bits, chunks = number(tables, advancing.SHIFT, folder), number(tables, advancing.CHUNKS, folder)
        bases = tables[advancing.BASES, packed.ADDRESS] + 8 * number(tables, advancing.FIRST_CHUNK, folder)
        mask = (1 << bits) - 1
        for lane in range(width - 1, -1, -1):
            # The flags of different lanes lie in different pages of memory, so they are prefetched some lanes ahead.
            ahead = lane - AHEAD
            if ahead >= 0:
                row = lanes[COMMITTED, _at(place + ahead)]
                if row >> bits < chunks:
                    jit.prefetch(jit.load_int(bases + 8 * (row >> bits)) + (ahead << bits) + (row & mask))
            at = _at(place + lane)
            observed = jit.load_shared(growing[line, OBSERVED_AT] + 8 * lane)
            stop = jit.load_shared(growing[line, COMMITTED_AT] + 8 * lane)
            row, start, so_far = lanes[COMMITTED, at], lanes[OPEN_START, at], lanes[OPEN_END, at]
            if stop < row or observed > stop + 1:
                return DAMAGED
            observed = observed if observed > stop else stop
            if stop == row:
                if observed != lanes[OBSERVED, at]:
                    lanes[OBSERVED, at], found[CHANGED] = observed, 1
                continue
            if stop > growing[line, CHECKED]:
                return UNCHECKED
            if found[ENDED] + stop - row >= tables[advancing.ENDED, packed.LINES]:
                return FULL
            if not _are_mapped(tables, advancing.FIRST_CHUNK, folder, row, stop - 1):
                return UNCHECKED
            if is_timed and not _are_mapped(tables, advancing.FIRST_TIMES, folder, row, stop - 1):
                return UNCHECKED
            is_inside = stop == row + 1 and start >= 0 and so_far & EPISODE_VALUES == 0
            flags_at = jit.load_int(bases + 8 * (row >> bits)) + (lane << bits) + (row & mask)
            if is_inside and jit.load_byte(flags_at) == 0:
                # The usual case: one step in the middle of an episode.
                found[OPEN_STEPS] += 1
            else:
                over, steps_over, splits = found[ENDED], found[ENDED_STEPS], found[SPLITS]
                if not _split_rows(tables, found, line, lane, segment + lane, stop):
                    found[ENDED], found[ENDED_STEPS], found[SPLITS] = over, steps_over, splits
                    return DAMAGED
            lanes[COMMITTED, at], lanes[OBSERVED, at], found[CHANGED] = stop, observed, 1
    found[FOLLOWED] = 1
    return ADDED if found[ENDED] > before_all and found[SPLITS] != 0 else DONE


def follow_plain(tables: Ints, origin: int, found: Ints) -> int:
    growing = packed.ints2(tables, advancing.GROWING)
    if found[FOLLOWED] or not len(growing):
        return DONE
    lanes, ended = packed.ints2(tables, advancing.ROWS), packed.ints2(tables, advancing.ENDED)
    flags = tuple(packed.ints(tables, i) for i in range(advancing.FIRST_CHUNK, advancing.FIRST_TIMES))
    times = tuple(packed.ints(tables, i) for i in range(advancing.FIRST_TIMES, advancing.ROWS))
    before = found[ENDED]
    for which in range(len(growing) - 1, -1, -1):
        segment = growing[which].tolist()
        found[LEFT] = which
        for lane in range(segment[LANES] - 1, -1, -1):
            status = _follow_lane_plain(segment, lane, flags, times, origin, lanes, ended, found)
            if status != DONE:
                return status
    found[FOLLOWED] = 1
    return ADDED if found[ENDED] > before and found[SPLITS] else DONE


def _follow_lane_plain(
    segment: list[int], lane: int, flags_table: Chunks, time_table: Chunks, origin: int, lanes: Ints, ended: Ints,
    found: Ints,
) -> int:  # fmt: skip
    place, addresses = segment[PLACE] + lane, (segment[OBSERVED_AT] + 8 * lane, segment[COMMITTED_AT] + 8 * lane)
    observed, stop = (ctypes.c_int64.from_address(address).value for address in addresses)
    row, seen, start, so_far, time = lanes[:, place].tolist()
    if stop < row or observed > stop + 1:
        return DAMAGED
    observed = max(observed, stop)
    if stop > row:
        if stop > segment[CHECKED]:
            return UNCHECKED
        if found[ENDED] + stop - row >= ended.shape[0]:
            return FULL
        flags = _new_values(segment, lane, row, stop, flags_table, np.uint8)
        new_times: NDArray[Any] | None = np.zeros(stop - row, np.int64)
        is_timed = len(time_table[-1]) > 0
        if is_timed:
            new_times = _new_values(segment, lane, row, stop, time_table, np.int64)
        if flags is None or new_times is None:
            return UNCHECKED
        episodes = _split(flags, row, start, so_far)
        if episodes is None:
            return DAMAGED
        published = np.append(new_times + (segment[CLOCK] if is_timed else 0), time)
        *over, (start, so_far) = episodes
        base = ((segment[SLOT] + origin) << POSITION_BITS) + lane
        for first, steps, end in over:
            obs_rows = steps + (end & OBSERVATION_ONLY != 0)
            # The last entry of `published` is the start time of the episode that was open before the new rows.
            line = base + first * segment[LANES], segment[LANES], steps, obs_rows, end
            ended[found[ENDED]] = *line, published[max(first - row, -1)]
            found[ENDED] += 1
            found[ENDED_STEPS] += steps
            if end & DISCARDED:
                found[SPLITS] = 1
        if start >= row or len(over):
            time = published[start - row if start >= 0 else max(over[-1][0] - row, -1)]
    elif observed == seen:
        return DONE
    before, started = lanes[[COMMITTED, OPEN_START], place].tolist()
    found[OPEN_STEPS] += (stop - start if start >= 0 else 0) - (before - started if started >= 0 else 0)
    lanes[:, place] = stop, observed, start, so_far, time
    found[CHANGED] = 1
    return DONE


def _new_values(segment: list[int], lane: int, row: int, stop: int, table: Chunks, dtype: Any) -> NDArray[Any] | None:
    """Return an array's values in rows `row` to `stop` - 1 of a segment's lane; None if not all are mapped."""
    (first_chunk, chunks, shift, bases), folder = table, segment[FOLDER]
    parts, bits, size = [], int(shift[folder]), np.dtype(dtype).itemsize
    while row < stop:
        chunk, inside = row >> bits, row & ((1 << bits) - 1)
        if chunk >= chunks[folder] or bases[first_chunk[folder] + chunk] == 0:
            return None
        count = min((1 << bits) - inside, stop - row)
        at = int(bases[first_chunk[folder] + chunk]) + ((lane << bits) + inside) * size
        parts.append(ctypes.string_at(at, count * size))
        row += count
    return np.frombuffer(b"".join(parts), dtype)


def _split(flags: NDArray[np.uint8], row: int, start: int, so_far: int) -> list[tuple[int, ...]] | None:
    """Split new rows of a lane into episodes: return a tuple per ended episode, then a tuple for the open episode.

    The tuple of an ended episode is (first row, number of steps, bits of its end). The tuple of the open episode is
    (first row, known bits of its end), with row -1 if no episode is open. `flags` are the flags of the rows from `row`
    on. `start` and `so_far` are the lane's OPEN_START and OPEN_END before the new rows.
    Returns None if the flags do not describe a valid sequence of episodes.
    """
    over: list[tuple[int, ...]] = []
    previous, before = so_far & EPISODE_VALUES, so_far & CONTINUES

    def end_at(stop: int, end: int) -> None:
        cut = 0 if end & ENDS else TRUNCATED | CUT
        over.append((start, stop - start, end | cut | before))

    if start < 0 and not flags[0] & FIRST:
        return None
    last = -1
    for at in np.flatnonzero(flags).tolist():
        here = int(flags[at])
        if here & DISCARDED and here not in (DISCARD, DISCARD_BEFORE):
            return None
        step = previous if at == last + 1 else 0
        if start >= 0 and here & NO_STEP and not here & FIRST:
            end_at(row + at, step & LAST_STEP | here & BEHIND_LAST)
            start = -1
        else:
            if start >= 0 and (here & FIRST or step & ENDS):
                end_at(row + at, step & LAST_STEP)
                start = -1
            if start < 0:
                if here & (FIRST | NO_STEP) != FIRST and here != DISCARD_BEFORE:
                    return None
                start, before = row + at, CONTINUES if here & CUT else 0
                if here & DISCARDED:
                    end_at(start, DISCARDED)
                    start = -1
        if start < 0 or here & ENDS:
            behind = flags[at + 1 : at + 2]
            if len(behind) and not behind[0] & (FIRST if start < 0 else FIRST | NO_STEP):
                return None
        last, previous = at, here
    step = previous if last == len(flags) - 1 else 0
    if start >= 0 and step & ENDS:
        end_at(row + len(flags), step & LAST_STEP)
        start = -1
    return [*over, (start, OPEN | before | step & EPISODE_VALUES if start >= 0 else OPEN)]
