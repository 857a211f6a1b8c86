"""Prioritized replay: draw ids, update their priorities, and change which ids can be drawn; see `priority_pages`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints

from . import frozen, jit, packed, priority_pages
from .ids_at import fraction
from .packed import number, row_address
from .priority_pages import (
    CHANGED,
    DRAWN,
    LAST_ROW,
    NEW,
    PAGE_BITS,
    UNUSED,
    find_slot,
    largest_given,
    locate,
    raise_bound,
    slot_of,
    width_of,
)
from .sumtree import FAN_OUT, FAN_OUT_BITS, LARGEST, SMALLEST, powers, sumtree_find, sumtree_set

_at = np.uint64
_FINITE = np.finfo(np.float64).max


LANE_BASE, FOLDERS, FIRST_ROWS, TABLE = range(4)
"""Lines of the record of `initial_priorities`, see `packed`. LANE_BASE, FOLDERS and FIRST_ROWS are the arrays of the
same names in `frozen`. From line TABLE on comes a chunk table: the priorities that writers gave."""


@jit.kernel("int", "ints", "int", "ints", "ints2", "out_floats")
def initial_priorities(ids: Ints, origin: int, lanes: Ints, record: Ints, out: NDArray[np.float64]) -> int:
    """Write the priority |td| that the writer gave to each step; NaN without a priority, or if the segment is gone.

    `lanes` has the number of lanes of each segment from number `origin` on. The array `shift` of the chunk table is
    negative for a folder without priorities. Returns the position of the first id with an unmapped chunk, or -1.
    """
    for i in range(ids.size):
        out[i] = np.nan
        slot, position = (ids[i] >> POSITION_BITS) - origin, ids[i] & POSITION_MASK
        width = width_of(ids[i], origin, lanes)
        folder = number(record, FOLDERS, slot) if width > 0 else 0
        if width <= 0 or number(record, TABLE + packed.SHIFT, folder) < 0:
            continue
        row = position // width
        lane = position - row * width
        first = number(record, FIRST_ROWS, number(record, LANE_BASE, slot) + lane)
        address = row_address(record, TABLE, folder, first, lane, row)
        if address == 0:
            return i
        value = jit.load_float64(address)
        if 0.0 < value <= _FINITE:  # any other value is damaged data
            out[i] = value
    return -1


@jit.kernel("none", "int", "int", "ints2", "out_ints", "out_floats")
def draw(key: int, strata: int, table: Ints, ids: Ints, chances: Floats) -> None:
    """Draw random ids in proportion to their masses; write them to `ids`, and their probabilities to `chances`.

    The mass of an id is its priority ** alpha. The total mass must not be 0. It is divided into `strata` equal parts:
    id i comes from part i modulo `strata`. The ids and their places are also written to `table` (see
    `priority_pages.PAGES`), where `update` reads them. The scratch memory of `table` must have room for all drawn ids.
    For random numbers and `key` see `ids_at.fraction`.
    """
    starts, tree = packed.ints(table, priority_pages.STARTS), packed.floats(table, priority_pages.TREE)
    pages, sums = packed.ints2(table, priority_pages.PAGES), packed.floats(table, priority_pages.SUMS)
    places, total = packed.ints(table, priority_pages.DRAWN_PLACES), sums[sums.size - 1]
    part, stratum = total / strata, 0
    for i in range(chances.size):
        chances[i] = (fraction(key, i) + stratum) * part
        stratum = stratum + 1 if stratum + 1 < strata else 0
    sumtree_find(starts, tree, sums, pages, chances, places, packed.floats(table, priority_pages.VALUES))
    for i in range(chances.size):
        page = np.uint64(places[i] >> PAGE_BITS)
        ids[i] = pages[page, priority_pages.FIRST] + (places[i] & LAST_ROW) * pages[page, priority_pages.STRIDE]
        chances[i] /= total
    jit.copy_bytes(table[priority_pages.DRAWN_IDS, packed.ADDRESS], ids.ctypes.data, 8 * ids.size)
    packed.ints(table, priority_pages.HEIGHTS)[priority_pages.DRAWN] = chances.size


@jit.kernel("int", "ints", "floats", "float", "float", "ints2", "ints2")
def update(ids: Ints, errors: Floats, eps: float, alpha: float, offered: Ints, table: Ints) -> int:
    """Set the priority |error| + eps, and the mass priority ** alpha, of each id that can be drawn.

    If an id occurs twice, its last error counts. The priorities are positive numbers in `raw`, see `priority_pages`.
    Returns the number of ids that cannot be drawn. If error i is the first error that is not finite, returns -1 - i and
    changes nothing.

    `offered` is the table `new` of the last call of `sync_priorities`, see `priority_pages.ENDED`. `table`, see
    `priority_pages.PAGES`, must have scratch memory for all ids. Most updates are for the ids of the last call of
    `draw`, so `table` still has their places.
    """
    pages, slots = packed.ints2(table, priority_pages.PAGES), packed.ints32(table, priority_pages.SLOTS)
    raw, bounds = packed.floats(table, priority_pages.RAW), packed.floats(table, priority_pages.BOUNDS)
    starts, tree = packed.ints(table, priority_pages.STARTS), packed.floats(table, priority_pages.TREE)
    sums, least = packed.floats(table, priority_pages.SUMS), packed.floats(table, priority_pages.LEAST)
    place, nodes = packed.ints(table, priority_pages.PLACES), packed.ints(table, priority_pages.NODES)
    drawn_places, drawn = packed.ints(table, priority_pages.DRAWN_PLACES), packed.ints(table, priority_pages.DRAWN_IDS)
    values, numbers = packed.floats(table, priority_pages.VALUES), packed.floats(table, priority_pages.NUMBERS)
    masses = packed.floats(table, priority_pages.MASSES)
    wrong = np.int64(0)  # counted in a separate loop, because a loop with a return does not become vector code
    for i in range(ids.size):
        wrong += not abs(errors[i]) <= _FINITE
    for i in range(ids.size if wrong else 0):
        if not abs(errors[i]) <= _FINITE:
            return -1 - i
    others = np.int64(number(table, priority_pages.HEIGHTS, priority_pages.DRAWN) != ids.size)
    for i in range(0 if others else ids.size):
        others |= drawn[i] ^ ids[i]
    if others:
        locate(ids, offered[priority_pages.ORIGIN, 0], priority_pages.lanes_of(offered), pages, slots, place)
    else:
        for i in range(ids.size):
            place[i] = drawn_places[i]
    for i in range(ids.size):
        values[i] = abs(errors[i]) + eps
    found = np.int64(0)
    for i in range(ids.size):
        found += place[i] >= 0
    if found < ids.size:
        found = np.int64(0)
        for i in range(ids.size):
            if place[i] >= 0:
                place[_at(found)], values[_at(found)] = place[i], values[i]
                found += 1
    place, values, numbers, masses = place[:found], values[:found], numbers[:found], masses[:found]
    leaf, node = tree.ctypes.data, tree.ctypes.data + 8 * starts[1]
    for i in range(found):
        jit.prefetch(leaf + 8 * place[i])
        jit.prefetch(node + (place[i] // FAN_OUT) * 8)
    for i in range(found):
        jit.prefetch(raw.ctypes.data + 8 * place[i])
    powers(values, alpha, SMALLEST, LARGEST, numbers, masses)
    sumtree_set(place, masses, starts, tree, sums, least, nodes)
    for i in range(found):
        raw[_at(place[i])] = values[i]
        raise_bound(place[i] >> PAGE_BITS, values[i], bounds)
    return ids.size - found  # type: ignore[return-value]


AHEAD = 12  # runs and pages are prefetched this many indices ahead

# The tables `old` and `new` of `sync_priorities` have four rows: first ids, strides, counts and pages. For each run,
# row PAGE_ROW has the page that `_want_rows` changed last, or -1.
PAGE_ROW = 3


@jit.inner
def _slot_of_last(runs: Ints, i: int, origin: int, lanes: Ints, slots: int) -> int:
    """Return the hash of the page of a run's last id, see `slot_of`."""
    last = runs[0, _at(i)] + (runs[2, _at(i)] - 1) * runs[1, _at(i)]
    width = width_of(last, origin, lanes)
    row = np.int64(_at(last & POSITION_MASK) // _at(width if width > 0 else 1))
    return slot_of(last - (row & LAST_ROW) * width, slots)


@jit.inlined
def _want_rows(wanted: int, runs: Ints, i: int, first: int, count: np.int64, width: int, table: Ints) -> int:
    """Set or clear the bit `WANTED` of `count` ids of run `i`, from id `first` on.

    `width` is the number of lanes of the segment. For the other arguments and the result see `_want_difference`.
    """
    pages, slots = packed.ints2(table, priority_pages.PAGES), packed.ints32(table, priority_pages.SLOTS)
    stacks, heights = packed.ints2(table, priority_pages.STACKS), packed.ints(table, priority_pages.HEIGHTS)
    row, stride, missing = np.int64(_at(first & POSITION_MASK) // _at(width)), runs[1, i], 0
    step = 1 if stride == width else np.int64(_at(stride) // _at(width))  # the usual case needs no division
    row_0 = first - row * width
    while count > 0:
        begin = row & LAST_ROW
        some = priority_pages.PAGE - begin if step == 1 else (LAST_ROW - begin) // step + 1
        some = some if some < count else count
        rows = ~(np.int64(-2) << (some - 1)) << begin
        if step > 1:
            rows = np.int64(0)
            for k in range(some):
                rows |= np.int64(1) << (begin + k * step)
        page_first = row_0 + (row - begin) * width
        page = runs[PAGE_ROW, i]
        is_known = 0 <= page < len(pages) and pages[page, priority_pages.FIRST] == page_first
        if not is_known or pages[page, priority_pages.STRIDE] != width:
            at = find_slot(page_first, pages, slots)
            page = np.int64(slots[_at(at)]) - 1
            if page < 0 and wanted:
                if heights[UNUSED] > 0:
                    heights[UNUSED] -= 1
                    page = stacks[UNUSED, heights[UNUSED]]
                    slots[_at(at)] = page + 1
                    pages[page, priority_pages.FIRST], pages[page, priority_pages.STRIDE] = page_first, width
                else:
                    missing += 1
        if page >= 0:
            before = pages[page, priority_pages.WANTED]
            after = before | rows if wanted else before & ~rows
            if after != before:
                pages[page, priority_pages.WANTED] = after
                if pages[page, priority_pages.TOUCHED] == 0:
                    pages[page, priority_pages.TOUCHED] = 1
                    stacks[CHANGED, heights[CHANGED]] = page
                    heights[CHANGED] += 1
        runs[PAGE_ROW, i] = page
        row += some * step
        count -= some
    return missing


@jit.inner
def _want_difference(
    wanted: int, runs: Ints, i: int, stop: int, others: Ints, j: int, others_stop: int, by_lane: bool, table: Ints
) -> int:
    """Set the bit `WANTED` of each id of `runs` that is not in `others`; if `wanted` is 0, clear the bit.

    For `WANTED` see `priority_pages`. The runs are `i` to `stop` - 1 of the table `runs`, and `j` to `others_stop` - 1
    of the table `others`. Returns the number of missing pages: pages that were needed when no unused page was left.

    For a run in both tables, only the ids that it has gained or lost at one end are visited. With `by_lane`, both
    tables should be ordered by lane. Without `by_lane`, the new runs should begin with the remaining old runs in their
    old order. Any other order only costs time: the result is the same, because `sync_priorities` clears all ids before
    it sets any. `table` is the argument of `sync_priorities`.
    """
    pages, slots = packed.ints2(table, priority_pages.PAGES), packed.ints32(table, priority_pages.SLOTS)
    origin, lanes, missing = runs[priority_pages.ORIGIN, 0], priority_pages.lanes_of(runs), 0
    while i < stop:
        if wanted:
            runs[PAGE_ROW, i] = -1
            if j + AHEAD < others_stop and others[PAGE_ROW, j + AHEAD] >= 0:  # a later run is usually in this page
                jit.prefetch(pages.ctypes.data + 8 * others[PAGE_ROW, j + AHEAD] * pages.shape[1])
            elif i + 2 * AHEAD < stop:
                # Prefetch the entry of `slots` for run i + 2 * AHEAD. Prefetch the page of run i + AHEAD: the entry of
                # this run is loaded by now.
                jit.prefetch(slots.ctypes.data + 4 * _slot_of_last(runs, i + 2 * AHEAD, origin, lanes, slots.size))
                page = np.int64(slots[_at(_slot_of_last(runs, i + AHEAD, origin, lanes, slots.size))]) - 1
                jit.prefetch(pages.ctypes.data + 8 * page * pages.shape[1])
        first, stride, count = runs[0, i], runs[1, i], runs[2, i]
        width = width_of(first, origin, lanes)
        if j < others_stop:
            other = others[0, j]
            offset, more = first - other, count - others[2, j]
            if stride == others[1, j] and (offset == 0 or offset + more * stride == 0):
                first += others[2, j] * stride if offset == 0 else 0
                count = more
                if wanted:
                    runs[PAGE_ROW, i] = others[PAGE_ROW, j]
                j += 1
            else:
                comes_first = other < first
                if (other ^ first) >> POSITION_BITS == 0 and width > 0:  # within a segment, runs are ordered by lane
                    comes_first = _at(other & POSITION_MASK) % _at(width) < _at(first & POSITION_MASK) % _at(width)
                if comes_first if by_lane else wanted != 0:
                    j += 1
                    continue
        if width > 0 and count > 0:
            missing += _want_rows(wanted, runs, i, first, count, width, table)
        i += 1
    return missing


@jit.inner
def _entering_priority(table: Ints) -> float:
    """Return the priority for new ids, and raise the bounds of pages with ids that have become drawable again.

    For the priority see `sync_priorities`.
    """
    pages, stacks = packed.ints2(table, priority_pages.PAGES), packed.ints2(table, priority_pages.STACKS)
    raw, bounds = packed.floats(table, priority_pages.RAW), packed.floats(table, priority_pages.BOUNDS)
    entering = np.int64(0)
    for i in range(number(table, priority_pages.HEIGHTS, CHANGED)):
        page = stacks[CHANGED, i]
        rows = pages[page, priority_pages.WANTED] & ~pages[page, priority_pages.SHOWN]
        entering |= rows & ~pages[page, priority_pages.KNOWN]
        rows &= pages[page, priority_pages.KNOWN]
        while rows != 0:
            raise_bound(page, raw[_at((page << PAGE_BITS) + jit.lowest_bit(rows))], bounds)
            rows &= rows - 1
    largest = largest_given(pages, raw, bounds) if entering != 0 else 0.0
    return largest if largest > 0.0 else 1.0


@jit.kernel(
    "int", "out_ints2", "strided_ints2", "out_ints2", "ints", "ints2", "int", "int", "int", "float"
)  # fmt: skip
def sync_priorities(
    old: Ints, runs: Ints, new: Ints, snapshot: Ints, table: Ints, provisional: int, partially_hidden: int, whole: int,
    alpha: float,
) -> int:  # fmt: skip
    """Make exactly the ids of `runs` drawable; ids of the `old` runs that are not in `runs` become undrawable.

    `runs` is (3, n), with contiguous rows: first ids, strides and counts. All but the last `provisional` runs are
    final: they never change again, so final runs in `old` are not compared with the new runs. The first
    `partially_hidden` provisional runs are visible parts of runs with hidden ids. They should match the partially
    hidden runs in `old` in number and order; otherwise, the call takes longer. The other provisional runs are ordered
    by segment and lane. With `whole`, `old` is ignored, and all ids that are not in `runs` become undrawable.

    The call fills the table `new`, (4, `RUNS` + n), see `priority_pages.ENDED`. The next call needs this table as
    `old`. `snapshot` is the record of the snapshot that has the runs; see `frozen`. `table`, see
    `priority_pages.PAGES`, must have scratch memory for at least one page.

    A new id gets the largest priority of the ids that are drawable after the call, or 1.0. Only priorities from an
    update or a writer count. After the call, line CHANGED of `stacks` has the pages with new ids.

    Returns the number of missing pages, see `_want_difference`. If this number is not 0, the same ids as before are
    drawable, and the caller repeats the call with more pages.
    """
    pages, raw = packed.ints2(table, priority_pages.PAGES), packed.floats(table, priority_pages.RAW)
    stacks, heights = packed.ints2(table, priority_pages.STACKS), packed.ints(table, priority_pages.HEIGHTS)
    starts, tree = packed.ints(table, priority_pages.STARTS), packed.floats(table, priority_pages.TREE)
    sums, least = packed.floats(table, priority_pages.SUMS), packed.floats(table, priority_pages.LEAST)
    places, nodes = packed.ints(table, priority_pages.PLACES), packed.ints(table, priority_pages.NODES)
    values, numbers = packed.floats(table, priority_pages.VALUES), packed.floats(table, priority_pages.NUMBERS)
    masses = packed.floats(table, priority_pages.MASSES)
    heights[DRAWN] = 0
    new[priority_pages.ENDED, 0], new[priority_pages.LEFT, 0] = runs.shape[1] - provisional, partially_hidden
    new[priority_pages.ORIGIN, 0], new[priority_pages.SLOT_COUNT, 0] = snapshot[frozen.ORIGIN], snapshot[frozen.SLOTS]
    new[priority_pages.LANES_AT, 1] = snapshot[frozen.LANES]
    for row in range(PAGE_ROW):
        target, source = row * new.shape[1] + priority_pages.RUNS, runs.ctypes.data + row * runs.strides[0]
        jit.copy_bytes(new.ctypes.data + 8 * target, source, 8 * runs.shape[1])
    for page in range(pages.shape[0] if whole else 0):
        if pages[page, priority_pages.SHOWN] | pages[page, priority_pages.WANTED]:
            pages[page, priority_pages.WANTED], pages[page, priority_pages.TOUCHED] = 0, 1
            stacks[CHANGED, heights[CHANGED]] = page
            heights[CHANGED] += 1
    missing = 0
    for wanted in range(2):
        # Part 0 has the final runs, part 1 the partially hidden runs, part 2 all other runs.
        begin = old_begin = np.int64(priority_pages.RUNS)
        for part in range(3):
            is_rest, end, old_end = part == 2, begin + new[_at(part), 0], old_begin + old[_at(part), 0]
            if is_rest:
                end, old_end = np.int64(new.shape[1]), np.int64(old.shape[1])
            old_first = old_end if whole or part == 0 else old_begin
            if wanted:
                missing += _want_difference(1, new, begin, end, old, old_first, old_end, is_rest, table)
            else:
                _want_difference(0, old, old_first, old_end, new, begin, end, is_rest, table)
            begin, old_begin = end, old_end
    if missing > 0:
        return missing
    fresh = _entering_priority(table)
    # Rows that have become drawable get their masses, and rows that are no longer drawable get mass 0.
    values[0] = fresh
    powers(values[:1], alpha, SMALLEST, LARGEST, numbers[:1], masses[:1])
    fresh_mass = masses[0]
    done, count, entered = 0, heights[CHANGED], 0
    while done < count:
        used, known_again = np.int64(0), np.int64(0)
        while done < count and used + priority_pages.PAGE <= places.size:
            page = stacks[CHANGED, done]
            if done + AHEAD < count:
                ahead = stacks[CHANGED, done + AHEAD]
                changed_rows = pages[ahead, priority_pages.SHOWN] ^ pages[ahead, priority_pages.WANTED]
                if changed_rows != 0:
                    place = (ahead << PAGE_BITS) + jit.lowest_bit(changed_rows)
                    jit.prefetch(raw.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * (starts[1] + (place >> FAN_OUT_BITS)))
            wanted_rows, known = pages[page, priority_pages.WANTED], pages[page, priority_pages.KNOWN]
            rows = pages[page, priority_pages.SHOWN] ^ wanted_rows
            pages[page, priority_pages.SHOWN], pages[page, priority_pages.KNOWN] = wanted_rows, known | wanted_rows
            pages[page, priority_pages.TOUCHED] = 0
            if rows & wanted_rows & ~known:
                pages[page, priority_pages.ENTERED] = rows & wanted_rows & ~known
                stacks[CHANGED, entered] = page  # the loop has read this entry already
                entered += 1
            known_again |= rows & wanted_rows & known
            while rows != 0:
                row = jit.lowest_bit(rows)
                rows &= rows - 1
                place = (page << PAGE_BITS) + row
                value = 0.0
                if (wanted_rows >> row) & 1:
                    if (known >> row) & 1:
                        value = abs(raw[_at(place)])
                    else:
                        raw[_at(place)], value = -fresh, fresh
                places[used], values[used] = place, value
                used += 1
            done += 1
        if known_again != 0:
            powers(values[:used], alpha, SMALLEST, LARGEST, numbers[:used], masses[:used])
        for i in range(used):
            mass = masses[i] if known_again != 0 else fresh_mass
            masses[i] = mass if values[i] > 0.0 else 0.0
        sumtree_set(places[:used], masses[:used], starts, tree, sums, least, nodes)
    heights[CHANGED], heights[NEW] = 0, entered
    return 0
