"""Hide the oldest steps of a store, lane by lane, in the order in which they were published.

A heap has an entry for each lane of each segment that has a step left: when its oldest one was published, the id of
that, and the lane's place among all lanes. The ended episodes of a lane form a chain of lines of the log; behind them
comes its open episode. Times are read where a lane's oldest step lies inside of an episode: of the first step of one,
the tables of episodes know it.

The next steps of lanes that were appended together come in the order in which the steps before them were hidden. They
wait in a ring, which is in order, and not in the heap: a heap moves each entry through all of its levels.
"""

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints

from . import following as live, hiding, jit
from .addresses import row_address


@jit.inner
def _before(heap: Ints, one: int, other: int) -> int:
    """Tell whether one entry comes before another."""
    if heap[one, hiding.WHEN] != heap[other, hiding.WHEN]:
        return heap[one, hiding.WHEN] < heap[other, hiding.WHEN]
    return heap[one, hiding.ID] < heap[other, hiding.ID]


@jit.inner
def _swap(heap: Ints, one: int, other: int) -> None:
    for column in range(heap.shape[1]):
        held = heap[one, column]
        heap[one, column] = heap[other, column]
        heap[other, column] = held


@jit.inner
def _sink(heap: Ints, size: int) -> None:
    """Move the first entry down to where it belongs."""
    at = 0
    while True:
        least, left = at, 2 * at + 1
        if left < size and _before(heap, left, least):
            least = left
        if left + 1 < size and _before(heap, left + 1, least):
            least = left + 1
        if least == at:
            return
        _swap(heap, at, least)
        at = least


@jit.inner
def _push(heap: Ints, line: int, found: Ints) -> None:
    """Put a copy of the entry of a line into the heap."""
    at = found[hiding.SIZE]
    for column in range(heap.shape[1]):
        heap[at, column] = heap[line, column]
    found[hiding.SIZE] = at + 1
    while at > 0 and _before(heap, at, (at - 1) >> 1):
        _swap(heap, at, (at - 1) >> 1)
        at = (at - 1) >> 1


@jit.inner
def _behind(heap: Ints, count: int, front: int) -> int:
    """Return the line behind the first `count` of the ring, which begins at its line `front`."""
    half = heap.shape[0] >> 1
    at = front + count
    return half + (at - half if at >= half else at)


@jit.inner
def _wait(heap: Ints, found: Ints) -> None:
    """Take the entry behind the ring into it, or where that breaks its order, into the heap.

    The last entry of the ring goes to the heap before a new one does: else one late step kept all others out.
    """
    count, front = found[hiding.WAITING], found[hiding.FRONT]
    line = _behind(heap, count, front)
    if count == 0 or not _before(heap, line, _behind(heap, count - 1, front)):
        found[hiding.WAITING] = count + 1
        return
    last = _behind(heap, count - 1, front)
    _push(heap, last, found)
    if count > 1 and _before(heap, line, _behind(heap, count - 2, front)):
        _push(heap, line, found)
        found[hiding.WAITING] = count - 1
        return
    for column in range(heap.shape[1]):
        heap[last, column] = heap[line, column]


@jit.inner
def _time_of(
    step_id: int, row: int, slot: int, lane: int, place: int, clocks: Ints, folders: Ints, first_rows: Ints,
    first_times: Ints, time_chunks: Ints, time_shift: Ints, times: Ints, found: Ints,
) -> int:  # fmt: skip
    """Return when a step was published; -1, and its id is NEEDED, where that is not mapped."""
    address = row_address(
        folders[slot], first_rows[place], lane, row, 8, first_times, time_chunks, time_shift, times
    )  # fmt: skip
    if address == 0:
        found[hiding.NEEDED] = step_id
        return -1
    return jit.load_int(address) + clocks[slot]


@jit.inner
def _set_entry(
    at: int, place: int, base: int, slot: int, lane: int, width: int, lines: Ints, rows: Ints, clocks: Ints,
    folders: Ints, first_rows: Ints, first_times: Ints, time_chunks: Ints, time_shift: Ints, times: Ints, heap: Ints,
    by_place: Ints, found: Ints,
) -> int:  # fmt: skip
    """Make entry `at` that of a lane's oldest step; 1: done, 0: it has none, -1: its time is not mapped."""
    line, kept = by_place[hiding.LINE, place], by_place[hiding.OLDEST, place]
    if line >= 0:
        begin, when = (lines[line, FIRST_ID] & POSITION_MASK) // width, lines[line, TIME]
    else:
        begin, when = rows[live.OPEN_START, place], rows[live.OPEN_TIME, place]
        if begin < 0 or max(begin, kept) >= rows[live.COMMITTED, place]:
            return 0
    row = max(begin, kept)
    if row > begin:
        when = _time_of(
            base + row * width, row, slot, lane, place, clocks, folders, first_rows, first_times, time_chunks,
            time_shift, times, found,
        )  # fmt: skip
        if when < 0:
            return -1
    heap[at, hiding.WHEN], heap[at, hiding.ID] = when, base + row * width
    heap[at, hiding.ROW], heap[at, hiding.PLACE] = row, place
    return 1


@jit.inner
def _list(
    place: int, base: int, slot: int, lane: int, width: int, lines: Ints, rows: Ints, clocks: Ints,
    folders: Ints, first_rows: Ints, first_times: Ints, time_chunks: Ints, time_shift: Ints, times: Ints, heap: Ints,
    by_place: Ints, found: Ints,
) -> int:  # fmt: skip
    """Put a lane into the heap, if it has a step; -1: its time is not mapped."""
    line = _behind(heap, found[hiding.WAITING], found[hiding.FRONT])
    status = _set_entry(
        line, place, base, slot, lane, width, lines, rows, clocks, folders, first_rows, first_times, time_chunks,
        time_shift, times, heap, by_place, found,
    )  # fmt: skip
    if status > 0:
        by_place[hiding.LISTED, place] = 1
        _push(heap, line, found)
    return status


@jit.kernel(
    "int", "ints2", "ints2", "out_ints2", "int", *["ints"] * 9, "out_ints2", "out_ints2", "out_ints", "out_ints"
)  # fmt: skip
def hide_oldest(
    lines: Ints, growing: Ints, rows: Ints, origin: int, lanes: Ints, lane_base: Ints, clocks: Ints, folders: Ints,
    first_rows: Ints, first_times: Ints, time_chunks: Ints, time_shift: Ints, times: Ints, heap: Ints, by_place: Ints,
    following: Ints, found: Ints,
) -> int:  # fmt: skip
    """Hide found[COUNT] more steps, the oldest, and all that were published before a time; see `DONE` for the result.

    `lines` are those of the log; those from found[SEEN] on are new. `growing` and `rows` are those of `follow`;
    `clocks` is added to the times of each segment; for `folders` and `first_rows` see `frozen`. `following` says which
    line comes behind another in its lane.
    """
    while found[hiding.SEEN] < lines.shape[0]:
        line = found[hiding.SEEN]
        first, width = lines[line, FIRST_ID], lines[line, STRIDE]
        slot, position = (first >> POSITION_BITS) - origin, first & POSITION_MASK
        if lanes[slot] > 0:
            row = position // width
            lane = position - row * width
            place = lane_base[slot] + lane
            # A discard of the parts before it alone has no step.
            if lines[line, STEPS] > 0 and row + lines[line, STEPS] > by_place[hiding.OLDEST, place]:
                oldest, newest = by_place[hiding.LINE, place], by_place[hiding.TAIL, place]
                following[line] = -1
                if oldest < 0:
                    by_place[hiding.LINE, place] = line
                else:
                    following[newest] = line
                by_place[hiding.TAIL, place] = line
                if by_place[hiding.LISTED, place] == 0:
                    status = _list(
                        place, first - position + lane, slot, lane, width, lines, rows, clocks, folders, first_rows,
                        first_times, time_chunks, time_shift, times, heap, by_place, found,
                    )  # fmt: skip
                    if status < 0:
                        by_place[hiding.LINE, place], by_place[hiding.TAIL, place] = oldest, newest
                        return hiding.UNMAPPED
        found[hiding.SEEN] = line + 1
    for which in range(growing.shape[0]):
        slot, width = growing[which, live.SLOT], growing[which, live.LANES]
        for lane in range(width):
            place = growing[which, live.PLACE] + lane
            if by_place[hiding.LISTED, place] == 0 and rows[live.OPEN_START, place] >= 0:
                status = _list(
                    place, ((slot + origin) << POSITION_BITS) + lane, slot, lane, width, lines, rows, clocks, folders,
                    first_rows, first_times, time_chunks, time_shift, times, heap, by_place, found,
                )  # fmt: skip
                if status < 0:
                    return hiding.UNMAPPED
    while found[hiding.SIZE] > 0 or found[hiding.WAITING] > 0:
        at, front = 0, _behind(heap, 0, found[hiding.FRONT])
        if found[hiding.WAITING] > 0 and (found[hiding.SIZE] == 0 or _before(heap, front, 0)):
            at = front
        when, step_id, row, place = (
            heap[at, hiding.WHEN],
            heap[at, hiding.ID],
            heap[at, hiding.ROW],
            heap[at, hiding.PLACE],
        )
        status = 0
        kept, line = by_place[hiding.OLDEST, place], by_place[hiding.LINE, place]
        if kept < hiding.NEVER:
            if found[hiding.COUNT] <= 0 and when >= found[hiding.UNTIL]:
                break
            slot = (step_id >> POSITION_BITS) - origin
            width = lanes[slot]
            by_place[hiding.OLDEST, place] = row + 1
            if line >= 0 and step_id >= lines[line, FIRST_ID] + (lines[line, STEPS] - 1) * width:
                by_place[hiding.LINE, place] = following[line]
            base = step_id - row * width
            # There is a line behind the ring: this entry's own leaves, and together they are no more than the lanes.
            status = _set_entry(
                _behind(heap, found[hiding.WAITING], found[hiding.FRONT]), place, base, slot, base & POSITION_MASK,
                width, lines, rows, clocks, folders, first_rows, first_times, time_chunks, time_shift, times, heap,
                by_place, found,
            )  # fmt: skip
            if status < 0:
                by_place[hiding.OLDEST, place], by_place[hiding.LINE, place] = kept, line
                return hiding.UNMAPPED
            found[hiding.COUNT] -= 1
            found[hiding.HIDDEN] += 1
            found[hiding.LAST] = max(found[hiding.LAST], when)
        if at == 0:
            found[hiding.SIZE] -= 1
            _swap(heap, 0, found[hiding.SIZE])
            _sink(heap, found[hiding.SIZE])
        else:
            found[hiding.WAITING] -= 1
            found[hiding.FRONT] = _behind(heap, 1, found[hiding.FRONT]) - (heap.shape[0] >> 1)
        if status > 0:
            _wait(heap, found)
        else:
            by_place[hiding.LISTED, place] = 0
    return hiding.DONE
