"""Plain twins of the kernels of `kernels.hide_oldest`."""

import ctypes
import heapq

import numpy as np

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints
from diskreplay.kernels import advancing, following as live, packed
from diskreplay.kernels.frozen import OWN_FOLDER
from diskreplay.kernels.hiding import (
    COUNT,
    DONE,
    FRONT,
    HEAP_COLUMNS,
    HIDDEN,
    LAST,
    LINE,
    LISTED,
    NEEDED,
    NEVER,
    OLDEST,
    SEEN,
    SIZE,
    TAIL,
    UNMAPPED,
    UNTIL,
    WAITING,
)


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
    lines, following = log[:end], packed.ints(tables, advancing.FOLLOWING)

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
