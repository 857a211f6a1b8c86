"""How the oldest steps of a store are hidden: the tables of `hide_oldest`, and its plain twin.

A store uses the twin without numba: the loop of `hide_oldest` takes twice as long in Python.
"""

import ctypes
import heapq

import numpy as np

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints

from . import advancing, following as live, packed
from .frozen import OWN_FOLDER
from .runs import NEVER as NEVER

# Columns of the heap, a line a lane of a segment that has a step left: when its oldest one was published, the id and
# the row of that, and the lane's place among all lanes. The second half of the lines is the ring of `hide_oldest`.
WHEN, ID, ROW, PLACE = range(4)
HEAP_COLUMNS = 4

# Rows of `by_place`, one column a lane: its first row that is not hidden; the lines of the log with the oldest and the
# newest of its ended episodes that are not hidden whole, -1: none; whether it is in the heap.
OLDEST, LINE, TAIL, LISTED = range(4)
PLACE_ROWS = 4

# What `found` holds: lines of the log that are in chains, entries of the heap; how many steps to hide, and before which
# time all are; how many were, and when the last of them was published; the id of the step whose time is not mapped.
# Then what `advance_hiding` knows: how many steps are left at most, or -1; before which time all are hidden by now, and
# none of an episode that began at REACHED or later, as `advance` knows, too; whether the arrays of `hide_oldest` were
# made; the time behind the last step that is hidden: steps of one call have one time, and some of them may be left.
# The first line of the ring that is in use, and how many are. The address of the first rows that are not hidden.
(
    SEEN, SIZE, COUNT, UNTIL, HIDDEN, LAST, NEEDED, CAPACITY, PAST, REACHED, READY, BEHIND, FRONT, WAITING, OLDEST_AT,
) = range(15)  # fmt: skip
FOUND = 15

DONE, UNMAPPED = range(2)
"""What `hide_oldest` returns: all is done; the time of step NEEDED is not mapped, and it is to be called again."""


def hide_oldest_plain(tables: Ints, origin: int, end: int, found: Ints) -> int:
    """Do what `hide_oldest` does, with Python's heap."""
    log, growing, rows, heap, by_place = (
        packed.ints2(tables, i)
        for i in (advancing.ENDED, advancing.GROWING, advancing.ROWS, advancing.HEAP, advancing.BY_PLACE)
    )
    lanes, lane_base, clocks, folders, first_rows = (
        packed.ints(tables, i) for i in range(advancing.LANES, advancing.FIRST_ROWS + 1)
    )
    first_times, time_chunks, time_shift, times = (
        packed.ints(tables, i) for i in range(advancing.FIRST_TIMES, advancing.TIMES + 1)
    )
    lines, following, origin = log[:end], packed.ints(tables, advancing.FOLLOWING), int(origin)

    def time_of(step_id: int) -> int | None:
        slot, position = (step_id >> POSITION_BITS) - origin, step_id & POSITION_MASK
        row, lane = divmod(position, int(lanes[slot]))
        folder, first = int(folders[slot]), int(first_rows[lane_base[slot] + lane])
        if first != OWN_FOLDER:
            row, lane = row + first, 0
        bits = int(time_shift[folder])
        chunk, inside = divmod(row, 1 << bits)
        base = int(times[first_times[folder] + chunk]) if chunk < time_chunks[folder] else 0
        if not base:
            found[NEEDED] = step_id
            return None
        at = base + 8 * ((lane << bits) + inside)
        return int(ctypes.c_int64.from_address(at).value + clocks[slot])

    def oldest_of(place: int, base: int, width: int) -> tuple[int, int, int] | None:
        """Return time, id and row of a lane's oldest step, no time where it is not mapped; None: there is none."""
        kept, line = int(by_place[OLDEST, place]), int(by_place[LINE, place])
        if line >= 0:
            begin, time = (int(lines[line, FIRST_ID]) & POSITION_MASK) // width, int(lines[line, TIME])
        else:
            begin, stop, time = (int(rows[row, place]) for row in (live.OPEN_START, live.COMMITTED, live.OPEN_TIME))
            if begin < 0 or max(begin, kept) >= stop:
                return None
        row = max(begin, kept)
        step_id = base + row * width
        when = time if row == begin else time_of(step_id)
        return (-1 if when is None else when), step_id, row

    half = len(heap) // 2
    ring = half + (found[FRONT] + np.arange(found[WAITING])) % max(half, 1)
    queue = [tuple(entry) for entry in np.concatenate([heap[: found[SIZE]], heap[ring]]).tolist()]
    heapq.heapify(queue)

    def listed(place: int, base: int, width: int) -> bool:
        entry = oldest_of(place, base, width)
        if entry is not None:
            if entry[0] < 0:
                return False
            heapq.heappush(queue, (*entry, place))
        by_place[LISTED, place] = entry is not None
        return True

    def all_listed() -> bool:
        while found[SEEN] < len(lines):
            line = int(found[SEEN])
            first, width, steps = (int(lines[line, column]) for column in (FIRST_ID, STRIDE, STEPS))
            slot, position = (first >> POSITION_BITS) - origin, first & POSITION_MASK
            if lanes[slot]:
                place = int(lane_base[slot]) + position % width
                if steps and position // width + steps > by_place[OLDEST, place]:
                    before = by_place[[LINE, TAIL], place].copy()
                    following[line] = -1
                    if before[0] < 0:
                        by_place[LINE, place] = line
                    else:
                        following[before[1]] = line
                    by_place[TAIL, place] = line
                    if not by_place[LISTED, place] and not listed(place, first - position + position % width, width):
                        by_place[[LINE, TAIL], place] = before
                        return False
            found[SEEN] += 1
        for slot, width, first_place in growing[:, [live.SLOT, live.LANES, live.PLACE]].tolist():
            for lane in range(width):
                base, place = ((slot + origin) << POSITION_BITS) + lane, first_place + lane
                if not by_place[LISTED, place] and not listed(place, base, width):
                    return False
        return True

    def hidden() -> bool:
        while queue:
            when, step_id, row, place = queue[0]
            if by_place[OLDEST, place] >= NEVER:
                heapq.heappop(queue)
                by_place[LISTED, place] = 0
                continue
            if found[COUNT] <= 0 and when >= found[UNTIL]:
                break
            width = int(lanes[(step_id >> POSITION_BITS) - origin])
            base, kept, line = step_id - row * width, by_place[:, place].copy(), int(by_place[LINE, place])
            by_place[OLDEST, place] = row + 1
            if line >= 0 and row + 1 >= (int(lines[line, FIRST_ID]) & POSITION_MASK) // width + lines[line, STEPS]:
                by_place[LINE, place] = following[line]
            entry = oldest_of(place, base, width)
            if entry is not None and entry[0] < 0:
                by_place[:, place] = kept
                return False
            heapq.heappop(queue)
            if entry is None:
                by_place[LISTED, place] = 0
            else:
                heapq.heappush(queue, (*entry, place))
            found[COUNT] -= 1
            found[HIDDEN] += 1
            found[LAST] = max(found[LAST], when)
        return True

    done = all_listed() and hidden()
    found[SIZE], found[WAITING] = len(queue), 0
    heap[: len(queue)] = np.array(queue, np.int64).reshape(-1, HEAP_COLUMNS)
    return DONE if done else UNMAPPED
