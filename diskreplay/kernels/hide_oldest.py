"""Hide the oldest steps of a store, lane by lane, in the order in which they were published.

A heap has an entry for each lane of each segment that has a step left: when its oldest one was published, the id of
that, and the lane's place among all lanes. The ended episodes of a lane form a chain of lines of the log; behind them
comes its open episode. Times are read where a lane's oldest step lies inside of an episode: of the first step of one,
the tables of episodes know it.

The next steps of lanes that were appended together come in the order in which the steps before them were hidden. They
wait in a ring, which is in order, and not in the heap: a heap moves each entry through all of its levels.
"""

import numpy as np

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints

from . import advancing, following as live, hiding, jit, packed
from .addresses import row_address
from .packed import number


@jit.inner
def _before(heap: Ints, one: int, other: int) -> bool:
    """Tell whether one entry comes before another."""
    if heap[one, hiding.WHEN] != heap[other, hiding.WHEN]:
        return heap[one, hiding.WHEN] < heap[other, hiding.WHEN]
    return heap[one, hiding.ID] < heap[other, hiding.ID]


@jit.inner
def _copy(heap: Ints, target: int, source: int) -> None:
    """Write one entry over another."""
    for column in range(hiding.HEAP_COLUMNS):
        heap[target, column] = heap[source, column]


@jit.inner
def _push(heap: Ints, line: int, found: Ints) -> None:
    """Put a copy of the entry of a line of the ring into the heap."""
    at = found[hiding.SIZE]
    found[hiding.SIZE] = at + 1
    while at > 0 and _before(heap, line, (at - 1) >> 1):
        _copy(heap, at, (at - 1) >> 1)
        at = (at - 1) >> 1
    _copy(heap, at, line)


@jit.inner
def _behind(heap: Ints, count: int, front: int) -> int:
    """Return the line behind the first `count` of the ring, which begins at its line `front`."""
    half = heap.shape[0] >> 1
    at = front + count
    return half + (at - half if at >= half else at)


@jit.inner
def _set_entry(
    tables: Ints, origin: int, place: int, base: int, width: int, log: Ints, rows: Ints, heap: Ints, by_place: Ints,
    found: Ints,
) -> int:  # fmt: skip
    """Make the entry behind the ring that of a lane's oldest step; `base` is the id of the lane's row 0.

    1: done, 0: it has none, -1: its time is not mapped, and it is NEEDED.
    """
    line, kept = by_place[hiding.LINE, place], by_place[hiding.OLDEST, place]
    if line >= 0:
        begin, when = (log[line, FIRST_ID] & POSITION_MASK) // width, log[line, TIME]
    else:
        begin, when = rows[live.OPEN_START, place], rows[live.OPEN_TIME, place]
        if begin < 0 or (begin if begin > kept else kept) >= rows[live.COMMITTED, place]:
            return 0
    row = begin if begin > kept else kept
    step_id = base + row * width
    if row > begin:
        slot, lane = (base >> POSITION_BITS) - origin, base & POSITION_MASK
        folder, first = number(tables, advancing.FOLDERS, slot), number(tables, advancing.FIRST_ROWS, place)
        address = row_address(tables, advancing.FIRST_TIMES, folder, first, lane, row)
        if address == 0:
            found[hiding.NEEDED] = step_id
            return -1
        when = jit.load_int(address) + number(tables, advancing.CLOCKS, slot)
    at = _behind(heap, found[hiding.WAITING], found[hiding.FRONT])
    heap[at, hiding.WHEN], heap[at, hiding.ID] = when, step_id
    heap[at, hiding.ROW], heap[at, hiding.PLACE] = row, place
    return 1


@jit.kernel("int", "ints2", "int", "int", "out_ints")
def hide_oldest(tables: Ints, origin: int, end: int, found: Ints) -> int:
    """Hide found[COUNT] more steps, the oldest, and all that were published before a time; see `DONE` for the result.

    For the record of `tables` see `advancing.GROWING`. The log has `end` lines; those from found[SEEN] on are new.
    """
    log, growing = packed.ints2(tables, advancing.ENDED), packed.ints2(tables, advancing.GROWING)
    rows, heap = packed.ints2(tables, advancing.ROWS), packed.ints2(tables, advancing.HEAP)
    by_place, following = packed.ints2(tables, advancing.BY_PLACE), packed.ints(tables, advancing.FOLLOWING)
    lanes, half = packed.ints(tables, advancing.LANES), heap.shape[0] >> 1
    while found[hiding.SEEN] < end:
        line = found[hiding.SEEN]
        first, width, steps = log[line, FIRST_ID], log[line, STRIDE], log[line, STEPS]
        slot, position = (first >> POSITION_BITS) - origin, first & POSITION_MASK
        # A discard of the parts before it alone has no step.
        if steps > 0 and lanes[slot] > 0:
            row = position // width
            lane = position - row * width
            place = number(tables, advancing.LANE_BASE, slot) + lane
            if row + steps > by_place[hiding.OLDEST, place]:
                oldest, newest = by_place[hiding.LINE, place], by_place[hiding.TAIL, place]
                following[line] = -1
                if oldest < 0:
                    by_place[hiding.LINE, place] = line
                else:
                    following[newest] = line
                by_place[hiding.TAIL, place] = line
                if by_place[hiding.LISTED, place] == 0:
                    base = first - row * width
                    status = _set_entry(tables, origin, place, base, width, log, rows, heap, by_place, found)
                    if status < 0:
                        by_place[hiding.LINE, place], by_place[hiding.TAIL, place] = oldest, newest
                        return hiding.UNMAPPED
                    if status > 0:
                        by_place[hiding.LISTED, place] = 1
                        _push(heap, _behind(heap, found[hiding.WAITING], found[hiding.FRONT]), found)
        found[hiding.SEEN] = line + 1
    for which in range(growing.shape[0]):
        base, width = (growing[which, live.SLOT] + origin) << POSITION_BITS, growing[which, live.LANES]
        for lane in range(width):
            place = growing[which, live.PLACE] + lane
            if by_place[hiding.LISTED, place] == 0 and rows[live.OPEN_START, place] >= 0:
                status = _set_entry(tables, origin, place, base + lane, width, log, rows, heap, by_place, found)
                if status < 0:
                    return hiding.UNMAPPED
                if status > 0:
                    by_place[hiding.LISTED, place] = 1
                    _push(heap, _behind(heap, found[hiding.WAITING], found[hiding.FRONT]), found)
    while found[hiding.SIZE] > 0 or found[hiding.WAITING] > 0:
        at, front = np.int64(0), half + found[hiding.FRONT]
        if found[hiding.WAITING] > 0 and (found[hiding.SIZE] == 0 or _before(heap, front, 0)):
            at = front
        when, step_id, row = heap[at, hiding.WHEN], heap[at, hiding.ID], heap[at, hiding.ROW]
        place, status = heap[at, hiding.PLACE], np.int64(0)
        kept, line = by_place[hiding.OLDEST, place], by_place[hiding.LINE, place]
        if kept < hiding.NEVER:
            if found[hiding.COUNT] <= 0 and when >= found[hiding.UNTIL]:
                break
            width = lanes[(step_id >> POSITION_BITS) - origin]
            by_place[hiding.OLDEST, place] = row + 1
            if line >= 0 and step_id >= log[line, FIRST_ID] + (log[line, STEPS] - 1) * width:
                by_place[hiding.LINE, place] = following[line]
            # There is a line behind the ring: this entry's own leaves, and together they are no more than the lanes.
            base = step_id - row * width
            status = _set_entry(tables, origin, place, base, width, log, rows, heap, by_place, found)
            if status < 0:
                by_place[hiding.OLDEST, place], by_place[hiding.LINE, place] = kept, line
                return hiding.UNMAPPED
            found[hiding.COUNT] -= 1
            found[hiding.HIDDEN] += 1
            found[hiding.LAST] = when if when > found[hiding.LAST] else found[hiding.LAST]
        if at == 0:
            found[hiding.SIZE] -= 1
            last, child = found[hiding.SIZE], np.int64(1)
            while child < last:  # the last entry moves down to where it belongs
                if child + 1 < last and _before(heap, child + 1, child):
                    child += 1
                if not _before(heap, child, last):
                    break
                _copy(heap, at, child)
                at, child = child, 2 * child + 1
            _copy(heap, at, last)
        else:
            found[hiding.WAITING] -= 1
            found[hiding.FRONT] = front + 1 - half if front + 1 < 2 * half else 0
        if status == 0:
            by_place[hiding.LISTED, place] = 0
            continue
        # The entry behind the ring is taken into it, or where that breaks its order, into the heap. The last one of the
        # ring goes there before a new one does: else one late step kept all others out.
        count, front = found[hiding.WAITING], found[hiding.FRONT]
        line, last = _behind(heap, count, front), _behind(heap, count - 1 if count > 0 else 0, front)
        if count == 0 or not _before(heap, line, last):
            found[hiding.WAITING] = count + 1
            continue
        _push(heap, last, found)
        if count > 1 and _before(heap, line, _behind(heap, count - 2, front)):
            _push(heap, line, found)
            found[hiding.WAITING] = count - 1
        else:
            _copy(heap, last, line)
    return hiding.DONE
