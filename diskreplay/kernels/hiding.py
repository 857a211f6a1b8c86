"""Hide the oldest steps of a store, in the order of publishing.

A heap has an entry for each lane with visible steps. The entry has the publishing time and the id of the lane's oldest
visible step, and the number of the lane. The publishing time of an episode's first step is in the log, or in the table
`lanes` of `following` for an open episode. The publishing time of any other step is read from the segment.

The log is the table ENDED of `advancing`. It has a line per ended episode. FOLLOWING links the lines of a lane from its
oldest to its newest episode. The lane's open episode comes after its ended episodes.

If a writer appends to several lanes at once, these lanes get their next entries in the order of their previous entries.
The next entries wait in a sorted ring, not in the heap, since a heap moves each entry through all of its levels.

Without numba, `hide_oldest_plain` replaces `hide_oldest`: in plain Python, `hide_oldest` would take twice as long.
"""

import ctypes
import heapq

import numpy as np

from diskreplay.ids import FIRST_ID, POSITION_BITS, POSITION_MASK, STEPS, STRIDE, TIME, Ints

from . import advancing, following as live, jit, packed
from .frozen import OWN_FOLDER
from .packed import number, row_address
from .runs import NEVER as NEVER

# Columns of the table `heap`. A line is an entry for a lane with visible steps. The first half of the lines is the
# heap. The second half is a ring: a queue of entries in the order of `_before`.
# - WHEN, ID, ROW: the time of publishing, the id and the row of the lane's oldest visible step.
# - PLACE: the index of the lane among the lanes of all segments.
WHEN, ID, ROW, PLACE = range(4)
HEAP_COLUMNS = 4

# Rows of the table `by_place`. It has a column for each lane; PLACE is the number of the column.
# - OLDEST: the lane's first visible row.
# - LINE, TAIL: the lines of the log with the lane's oldest and newest ended episodes that have visible steps, or -1.
# - LISTED: 1 if the lane has an entry in the heap or the ring, else 0.
OLDEST, LINE, TAIL, LISTED = range(4)
PLACE_ROWS = 4

# Indices of the numbers in the array `found`.
# - SEEN: the number of lines of the log that `hide_oldest` has read.
# - UNTIL: `hide_oldest` hides all steps published before this time, even if they are more than found[COUNT].
# - LAST: the publishing time of the newest step that was hidden since the last call of `note_last`, or -1.
# - NEEDED: the id of the step whose time a kernel could not read, because its chunk is not mapped into memory.
# - FRONT: the position of the ring's first entry in the second half of the table `heap`.
# - WAITING: the number of entries of the ring.
# Only `advance_hiding` uses the numbers below.
# - CAPACITY: the largest number of visible steps, or -1 without a limit.
# - PAST: all steps published before this time are hidden.
# - REACHED: episodes that began at this time or later have no hidden steps.
# - READY: 1 if the caller has made the arrays that `hide_oldest` reads.
# - HIDDEN_BEFORE: PAST, or 1 ns after the publishing time of the newest hidden step. Every hidden step was published
#   before HIDDEN_BEFORE. A visible step may have the publishing time of the newest hidden step.
# - OLDEST_AT: the address of the array with the first visible row of each lane.
(
    SEEN, SIZE, COUNT, UNTIL, HIDDEN, LAST, NEEDED, CAPACITY, PAST, REACHED, READY, HIDDEN_BEFORE, FRONT, WAITING,
    OLDEST_AT,
) = range(15)  # fmt: skip
FOUND = 15

DONE, UNMAPPED = range(2)
"""Results of `hide_oldest`. DONE: the requested steps are hidden. UNMAPPED: the caller must map the time of the step
with the id found[NEEDED], and call `hide_oldest` again."""


@jit.inner
def _before(heap: Ints, one: int, other: int) -> bool:
    if heap[one, WHEN] != heap[other, WHEN]:
        return heap[one, WHEN] < heap[other, WHEN]
    return heap[one, ID] < heap[other, ID]


@jit.inner
def _copy(heap: Ints, target: int, source: int) -> None:
    for column in range(HEAP_COLUMNS):
        heap[target, column] = heap[source, column]


@jit.inner
def _push(heap: Ints, line: int, found: Ints) -> None:
    """Push a copy of the ring's entry at `line` of the table `heap` into the heap."""
    at = found[SIZE]
    found[SIZE] = at + 1
    while at > 0 and _before(heap, line, (at - 1) >> 1):
        _copy(heap, at, (at - 1) >> 1)
        at = (at - 1) >> 1
    _copy(heap, at, line)


@jit.inner
def _behind(heap: Ints, count: int, front: int) -> int:
    """Return the line of the ring's entry at position `count`; the first entry has position 0.

    After the last line of the table `heap`, the ring continues at its own first line, in the middle of the table.
    """
    half = heap.shape[0] >> 1
    at = front + count
    return half + (at - half if at >= half else at)


@jit.inner
def _set_entry(
    tables: Ints, origin: int, place: int, base: int, width: int, log: Ints, rows: Ints, heap: Ints, by_place: Ints,
    found: Ints,
) -> int:  # fmt: skip
    """Write an entry for a lane's oldest visible step to the line after the last entry of the ring, see `WHEN`.

    `place` is the index of the lane among the lanes of all segments. `base` is the id of the lane's row 0. `width` is
    the number of lanes of the segment. Returns 1 if the entry was written, and 0 if the lane has no visible step. If
    the step's time is not mapped, returns -1 and writes the id of the step to found[NEEDED].
    """
    line, kept = by_place[LINE, place], by_place[OLDEST, place]
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
            found[NEEDED] = step_id
            return -1
        when = jit.load_int(address) + number(tables, advancing.CLOCKS, slot)
    at = _behind(heap, found[WAITING], found[FRONT])
    heap[at, WHEN], heap[at, ID] = when, step_id
    heap[at, ROW], heap[at, PLACE] = row, place
    return 1


@jit.inner
def _list_lane(
    tables: Ints, origin: int, place: int, base: int, width: int, log: Ints, rows: Ints, heap: Ints, by_place: Ints,
    found: Ints,
) -> bool:  # fmt: skip
    """Push an entry for a lane's oldest visible step into the heap; return False if the step's time is not mapped."""
    status = _set_entry(tables, origin, place, base, width, log, rows, heap, by_place, found)
    if status > 0:
        by_place[LISTED, place] = 1
        _push(heap, _behind(heap, found[WAITING], found[FRONT]), found)
    return bool(status >= 0)


@jit.inlined
def _take_first(heap: Ints, at: int, found: Ints) -> None:
    """Remove the first entry of the heap if `at` is 0, else the first entry of the ring."""
    half = heap.shape[0] >> 1
    if at > 0:
        front = found[FRONT] + 1
        found[WAITING] -= 1
        found[FRONT] = front if front < half else 0
        return
    found[SIZE] -= 1
    last, child = found[SIZE], 1
    while child < last:
        if child + 1 < last and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, last):
            break
        _copy(heap, at, child)
        at, child = child, 2 * child + 1
    _copy(heap, at, last)


@jit.inner
def note_last(found: Ints) -> None:
    found[PAST] = max(found[PAST], found[LAST])
    found[HIDDEN_BEFORE] = max(found[HIDDEN_BEFORE], found[LAST] + 1)
    found[REACHED] = max(found[REACHED], found[HIDDEN_BEFORE])
    found[LAST] = -1


@jit.kernel("int", "ints2", "int", "int", "out_ints")
def hide_oldest(tables: Ints, origin: int, end: int, found: Ints) -> int:
    """Hide the oldest found[COUNT] visible steps, and all steps published before found[UNTIL]; return DONE or UNMAPPED.

    For `tables` see `advancing.GROWING`, for `found` see `SEEN`. `end` is the number of lines of the log.
    """
    log, growing = packed.ints2(tables, advancing.ENDED), packed.ints2(tables, advancing.GROWING)
    rows, heap = packed.ints2(tables, advancing.ROWS), packed.ints2(tables, advancing.HEAP)
    by_place, following = packed.ints2(tables, advancing.BY_PLACE), packed.ints(tables, advancing.FOLLOWING)
    lanes, half = packed.ints(tables, advancing.LANES), heap.shape[0] >> 1
    while found[SEEN] < end:
        line = found[SEEN]
        first, width, steps = log[line, FIRST_ID], log[line, STRIDE], log[line, STEPS]
        slot, position = (first >> POSITION_BITS) - origin, first & POSITION_MASK
        # A line without steps is no episode: it says that the writer discarded earlier parts of an episode.
        if steps > 0 and lanes[slot] > 0:
            row = position // width
            lane = position - row * width
            place = number(tables, advancing.LANE_BASE, slot) + lane
            if row + steps > by_place[OLDEST, place]:
                oldest, newest = by_place[LINE, place], by_place[TAIL, place]
                following[line] = -1
                if oldest < 0:
                    by_place[LINE, place] = line
                else:
                    following[newest] = line
                by_place[TAIL, place] = line
                if by_place[LISTED, place] == 0:
                    base = first - row * width
                    if not _list_lane(tables, origin, place, base, width, log, rows, heap, by_place, found):
                        by_place[LINE, place], by_place[TAIL, place] = oldest, newest
                        return UNMAPPED
        found[SEEN] = line + 1
    for which in range(growing.shape[0]):
        base, width = (growing[which, live.SLOT] + origin) << POSITION_BITS, growing[which, live.LANES]
        for lane in range(width):
            place = growing[which, live.PLACE] + lane
            if by_place[LISTED, place] != 0 or rows[live.OPEN_START, place] < 0:
                continue
            if not _list_lane(tables, origin, place, base + lane, width, log, rows, heap, by_place, found):
                return UNMAPPED
    while found[SIZE] > 0 or found[WAITING] > 0:
        at, front = np.int64(0), half + found[FRONT]
        if found[WAITING] > 0 and (found[SIZE] == 0 or _before(heap, front, 0)):
            at = front
        when, step_id, row = heap[at, WHEN], heap[at, ID], heap[at, ROW]
        place, status = heap[at, PLACE], np.int64(0)
        kept, line = by_place[OLDEST, place], by_place[LINE, place]
        if kept < NEVER:
            if found[COUNT] <= 0 and when >= found[UNTIL]:
                break
            width = lanes[(step_id >> POSITION_BITS) - origin]
            by_place[OLDEST, place] = row + 1
            if line >= 0 and step_id >= log[line, FIRST_ID] + (log[line, STEPS] - 1) * width:
                by_place[LINE, place] = following[line]
            # The ring (the second half of `heap`) has room for the lane's next entry: it has a line per lane, a lane
            # has at most one entry, and the lane's present entry is removed below.
            base = step_id - row * width
            status = _set_entry(tables, origin, place, base, width, log, rows, heap, by_place, found)
            if status < 0:
                by_place[OLDEST, place], by_place[LINE, place] = kept, line
                return UNMAPPED
            found[COUNT] -= 1
            found[HIDDEN] += 1
            found[LAST] = max(when, found[LAST])
        _take_first(heap, at, found)
        if status == 0:
            by_place[LISTED, place] = 0
            continue
        # The ring gets the new entry if the ring stays sorted. Otherwise the ring's last entry moves to the heap: it
        # would keep every earlier entry out of the ring. Then the new entry replaces the last entry if the ring stays
        # sorted. If not, the new entry moves to the heap, too.
        count, front = found[WAITING], found[FRONT]
        line, last = _behind(heap, count, front), _behind(heap, count - 1 if count > 0 else 0, front)
        if count == 0 or not _before(heap, line, last):
            found[WAITING] = count + 1
            continue
        _push(heap, last, found)
        if count > 1 and _before(heap, line, _behind(heap, count - 2, front)):
            _push(heap, line, found)
            found[WAITING] = count - 1
        else:
            _copy(heap, last, line)
    return DONE


def _time_of(step_id: int, origin: int, where: tuple[Ints, ...], times: tuple[Ints, ...]) -> int | None:
    """Return the time when a step was published, or None if this time is not mapped.

    `where` are the arrays LANES to FIRST_ROWS of `advancing`. `times` are the arrays FIRST_TIMES to TIMES of
    `advancing`.
    """
    lanes, lane_base, clocks, folders, first_rows = where
    first_times, time_chunks, time_shift, bases = times
    slot, position = (step_id >> POSITION_BITS) - origin, step_id & POSITION_MASK
    row, lane = divmod(position, int(lanes[slot]))
    folder, first = int(folders[slot]), int(first_rows[lane_base[slot] + lane])
    if first != OWN_FOLDER:
        row, lane = row + first, 0
    bits = int(time_shift[folder])
    chunk, inside = divmod(row, 1 << bits)
    base = int(bases[first_times[folder] + chunk]) if chunk < time_chunks[folder] else 0
    if not base:
        return None
    return int(ctypes.c_int64.from_address(base + 8 * ((lane << bits) + inside)).value + clocks[slot])


def hide_oldest_plain(tables: Ints, origin: int, end: int, found: Ints) -> int:
    log, growing, rows, heap, by_place = (
        packed.ints2(tables, i)
        for i in (advancing.ENDED, advancing.GROWING, advancing.ROWS, advancing.HEAP, advancing.BY_PLACE)
    )
    where = tuple(packed.ints(tables, i) for i in range(advancing.LANES, advancing.FIRST_ROWS + 1))
    times = tuple(packed.ints(tables, i) for i in range(advancing.FIRST_TIMES, advancing.TIMES + 1))
    lanes, lane_base = where[:2]
    lines, following, origin = log[:end], packed.ints(tables, advancing.FOLLOWING), int(origin)

    def oldest_of(place: int, base: int, width: int) -> tuple[int, int, int] | None:
        """Return time (-1: not mapped), id and row of a lane's oldest visible step, or None without such a step."""
        kept, line = int(by_place[OLDEST, place]), int(by_place[LINE, place])
        if line >= 0:
            begin, time = (int(lines[line, FIRST_ID]) & POSITION_MASK) // width, int(lines[line, TIME])
        else:
            begin, stop, time = (int(rows[row, place]) for row in (live.OPEN_START, live.COMMITTED, live.OPEN_TIME))
            if begin < 0 or max(begin, kept) >= stop:
                return None
        row = max(begin, kept)
        step_id = base + row * width
        when = time if row == begin else _time_of(step_id, origin, where, times)
        if when is None:
            found[NEEDED] = step_id
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
