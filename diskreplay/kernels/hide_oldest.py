"""Hide the oldest steps of a store, lane by lane, in the order in which they were published.

A heap has an entry for each lane of each segment that has a step left: when its oldest one was published, the id of
that, and the lane's place among all lanes. The ended episodes of a lane form a chain of lines of the log; behind them
comes its open episode. Times are read where a lane's oldest step lies inside of an episode: of the first step of one,
the tables of episodes know it.
"""

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints
from diskreplay.kernels import following as live, hiding, jit
from diskreplay.kernels.addresses import row_address


@jit.kernel("int", "ints2", "int", "int", inner=True)
def _before(heap: Ints, one: int, other: int) -> int:
    """Tell whether one entry comes before another."""
    if heap[one, hiding.WHEN] != heap[other, hiding.WHEN]:
        return heap[one, hiding.WHEN] < heap[other, hiding.WHEN]
    return heap[one, hiding.ID] < heap[other, hiding.ID]


@jit.kernel("none", "out_ints2", "int", "int", inner=True)
def _swap(heap: Ints, one: int, other: int) -> None:
    for column in range(heap.shape[1]):
        held = heap[one, column]
        heap[one, column] = heap[other, column]
        heap[other, column] = held


@jit.kernel("none", "out_ints2", "int", inner=True)
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


@jit.kernel("none", "out_ints2", "int", inner=True)
def _rise(heap: Ints, at: int) -> None:
    """Move an entry up to where it belongs."""
    while at > 0 and _before(heap, at, (at - 1) >> 1):
        _swap(heap, at, (at - 1) >> 1)
        at = (at - 1) >> 1


@jit.kernel("int", *["int"] * 5, *["ints"] * 7, "out_ints", inner=True)
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


@jit.kernel(
    "int", *["int"] * 6, "ints2", "out_ints2", *["ints"] * 7, "out_ints2", "out_ints2", "out_ints", inner=True
)  # fmt: skip
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


@jit.kernel(
    "int", *["int"] * 5, "ints2", "out_ints2", *["ints"] * 7, "out_ints2", "out_ints2", "out_ints", inner=True
)  # fmt: skip
def _list(
    place: int, base: int, slot: int, lane: int, width: int, lines: Ints, rows: Ints, clocks: Ints,
    folders: Ints, first_rows: Ints, first_times: Ints, time_chunks: Ints, time_shift: Ints, times: Ints, heap: Ints,
    by_place: Ints, found: Ints,
) -> int:  # fmt: skip
    """Put a lane into the heap, if it has a step; -1: its time is not mapped."""
    at = found[hiding.SIZE]
    status = _set_entry(
        at, place, base, slot, lane, width, lines, rows, clocks, folders, first_rows, first_times, time_chunks,
        time_shift, times, heap, by_place, found,
    )  # fmt: skip
    if status > 0:
        by_place[hiding.LISTED, place] = 1
        found[hiding.SIZE] = at + 1
        _rise(heap, at)
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
            if row + lines[line, STEPS] > by_place[hiding.OLDEST, place]:
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
    while found[hiding.SIZE] > 0:
        when, step_id, row, place = heap[0, hiding.WHEN], heap[0, hiding.ID], heap[0, hiding.ROW], heap[0, hiding.PLACE]
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
            status = _set_entry(
                0, place, base, slot, base & POSITION_MASK, width, lines, rows, clocks, folders, first_rows,
                first_times, time_chunks, time_shift, times, heap, by_place, found,
            )  # fmt: skip
            if status < 0:
                by_place[hiding.OLDEST, place], by_place[hiding.LINE, place] = kept, line
                return hiding.UNMAPPED
            found[hiding.COUNT] -= 1
            found[hiding.HIDDEN] += 1
            found[hiding.LAST] = max(found[hiding.LAST], when)
        if status == 0:
            by_place[hiding.LISTED, place] = 0
            found[hiding.SIZE] -= 1
            _swap(heap, 0, found[hiding.SIZE])
        _sink(heap, found[hiding.SIZE])
    return hiding.DONE
