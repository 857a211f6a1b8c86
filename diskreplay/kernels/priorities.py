"""Prioritized replay in a call each: ids are drawn, given priorities, and can be drawn or no more. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints

from . import frozen, jit, packed, pages as paging
from .ids_at import fraction
from .packed import Ints32, number, row_address
from .pages import (
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

# Makes an index that is not tested for being negative.
_at = np.uint64
_FINITE = np.finfo(np.float64).max


LANE_BASE, FOLDERS, FIRST_ROWS, TABLE = range(4)
"""The record of what `initial_priorities` reads, see `packed`: for the first three see `frozen`, then comes the table
of the array of priorities, see `packed`."""


@jit.kernel("int", "ints", "int", "ints", "ints2", "out_floats")
def initial_priorities(ids: Ints, origin: int, lanes: Ints, record: Ints, out: NDArray[np.float64]) -> int:
    """Write the initial priority of each step, |td|, NaN where none was given or its segment is gone.

    `lanes` are those of the segments from `origin` on; a shift of the table below 0 says that a folder has no
    priorities. Returns the place of the first id whose chunk is not mapped, else -1.
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
        if 0.0 < value <= _FINITE:  # anything else is damage
            out[i] = value
    return -1


@jit.kernel("none", "int", "int", "ints2", "out_ints", "out_floats")
def draw(key: int, strata: int, table: Ints, ids: Ints, chances: Floats) -> None:
    """Draw ids at random: write them, and the share that each has of the total, and keep both places and ids.

    The total, which is not 0, is cut into `strata` equal parts: the first id is one of the first part, and so on, from
    the first part again behind the last. For the random numbers see `ids_at.fraction`, for the record of the table
    `pages.PAGES`, which has room for the draw.
    """
    starts, tree = packed.ints(table, paging.STARTS), packed.floats(table, paging.TREE)
    pages, sums = packed.ints2(table, paging.PAGES), packed.floats(table, paging.SUMS)
    places, total = packed.ints(table, paging.DRAWN_PLACES), sums[sums.size - 1]
    part, stratum = total / strata, 0
    for i in range(chances.size):
        chances[i] = (fraction(key, i) + stratum) * part
        stratum = stratum + 1 if stratum + 1 < strata else 0
    sumtree_find(starts, tree, sums, pages, chances, places, packed.floats(table, paging.VALUES))
    for i in range(chances.size):
        page = np.uint64(places[i] >> PAGE_BITS)
        ids[i] = pages[page, paging.FIRST] + (places[i] & LAST_ROW) * pages[page, paging.STRIDE]
        chances[i] /= total
    jit.copy_bytes(table[paging.DRAWN_IDS, packed.ADDRESS], ids.ctypes.data, 8 * ids.size)
    packed.ints(table, paging.HEIGHTS)[paging.DRAWN] = chances.size


@jit.kernel("int", "ints", "floats", "float", "float", "ints2", "ints2")
def update(ids: Ints, errors: Floats, eps: float, alpha: float, offered: Ints, table: Ints) -> int:
    """Set raw = |error| + eps and mass = raw ** alpha of the ids that `locate` finds.

    The last error counts where an id is named twice. These priorities are given: for `raw` and `bounds` see `pages`.
    Returns how many ids were not found, or else -1 - i if error i is not finite: then nothing is changed.
    `offered` is what can be drawn, see `pages.ENDED`. For the record of the `table` see `pages.PAGES`: its scratch
    memory has room for n. It may have the places of these very ids, which most updates are of.
    """
    pages, slots = packed.ints2(table, paging.PAGES), packed.ints32(table, paging.SLOTS)
    raw, bounds = packed.floats(table, paging.RAW), packed.floats(table, paging.BOUNDS)
    starts, tree = packed.ints(table, paging.STARTS), packed.floats(table, paging.TREE)
    sums, least = packed.floats(table, paging.SUMS), packed.floats(table, paging.LEAST)
    place, nodes = packed.ints(table, paging.PLACES), packed.ints(table, paging.NODES)
    drawn_places, drawn = packed.ints(table, paging.DRAWN_PLACES), packed.ints(table, paging.DRAWN_IDS)
    values, numbers = packed.floats(table, paging.VALUES), packed.floats(table, paging.NUMBERS)
    masses = packed.floats(table, paging.MASSES)
    wrong = np.int64(0)  # counted first: a loop that may return does not become vector code
    for i in range(ids.size):
        wrong += not abs(errors[i]) <= _FINITE
    for i in range(ids.size if wrong else 0):
        if not abs(errors[i]) <= _FINITE:
            return -1 - i
    others = np.int64(number(table, paging.HEIGHTS, paging.DRAWN) != ids.size)
    for i in range(0 if others else ids.size):
        others |= drawn[i] ^ ids[i]
    if others:
        locate(ids, offered[paging.ORIGIN, 0], paging.lanes_of(offered), pages, slots, place)
    else:
        for i in range(ids.size):
            place[i] = drawn_places[i]
    for i in range(ids.size):
        values[i] = abs(errors[i]) + eps
    found = np.int64(0)
    for i in range(ids.size):
        found += place[i] >= 0
    if found < ids.size:  # those with a place are moved to the front
        found = np.int64(0)
        for i in range(ids.size):
            if place[i] >= 0:
                place[_at(found)], values[_at(found)] = place[i], values[i]
                found += 1
    place, values, numbers, masses = place[:found], values[:found], numbers[:found], masses[:found]
    # What is changed, and what is added up with it, is on its way while the powers are computed.
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


AHEAD = 12  # runs

# Row of runs, below first ids, strides and counts: the page of an id that came or went last, at one end, or -1.
PAGE_ROW = 3


@jit.inner
def _want_difference(
    wanted: int, runs: Ints, i: int, stop: int, others: Ints, j: int, others_stop: int, by_lane: bool,
    origin: int, lanes: Ints, pages: Ints, slots: Ints32, stacks: Ints, heights: Ints,
) -> int:  # fmt: skip
    """Set the ids of runs that are not in the other ones to be wanted or not; return how many pages are lacking.

    A run that is in both costs what it has grown, or lost, at one end. For that both are ordered `by_lane`, or else of
    those that are not wanted what is left is wanted in the same order, and then others. Where they are not, more is set
    than need be: with the same outcome, as all that is not wanted comes first.
    """
    lacking = 0
    while i < stop:
        if wanted:
            runs[PAGE_ROW, i] = -1
            if j + AHEAD < others_stop and others[PAGE_ROW, j + AHEAD] >= 0:  # most often that of a run ahead
                jit.prefetch(pages.ctypes.data + 8 * others[PAGE_ROW, j + AHEAD] * pages.shape[1])
            elif i + 2 * AHEAD < stop:
                # First where the page of a run's last id is looked up, then that page.
                for ahead in range(i + AHEAD, i + 2 * AHEAD + 1, AHEAD):
                    last = runs[0, _at(ahead)] + (runs[2, _at(ahead)] - 1) * runs[1, _at(ahead)]
                    width = width_of(last, origin, lanes)
                    row = np.int64(_at(last & POSITION_MASK) // _at(width if width > 0 else 1))
                    at = slot_of(last - (row & LAST_ROW) * width, slots.size)
                    if ahead > i + AHEAD:
                        jit.prefetch(slots.ctypes.data + 4 * at)
                    else:
                        page = np.int64(slots[_at(at)]) - 1
                        jit.prefetch(pages.ctypes.data + 8 * (page if page > 0 else 0) * pages.shape[1])
        first, stride, count = runs[0, i], runs[1, i], runs[2, i]
        width = width_of(first, origin, lanes)
        unsigned = _at(width if width > 0 else 1)
        if j < others_stop:
            other = others[0, j]
            apart, more = first - other, count - others[2, j]
            if stride == others[1, j] and (apart == 0 or apart + more * stride == 0):
                first += others[2, j] * stride if apart == 0 else 0
                count = more
                if wanted:
                    runs[PAGE_ROW, i] = others[PAGE_ROW, j]
                j += 1
            else:
                comes_first = other < first
                if (other ^ first) >> POSITION_BITS == 0:  # of one segment: by lane
                    comes_first = _at(other & POSITION_MASK) % unsigned < _at(first & POSITION_MASK) % unsigned
                if comes_first if by_lane else wanted != 0:
                    j += 1
                    continue
        if width == 0:
            count = 0
        row = np.int64(_at(first & POSITION_MASK) // unsigned)
        step = 1 if stride == width else np.int64(_at(stride) // unsigned)  # most often a division less
        row_0 = first - row * width
        while count > 0:
            begin = row & LAST_ROW
            some = paging.PAGE - begin if step == 1 else (LAST_ROW - begin) // step + 1
            some = some if some < count else count
            rows = ~(np.int64(-2) << (some - 1)) << begin
            if step > 1:
                rows = np.int64(0)
                for k in range(some):
                    rows |= np.int64(1) << (begin + k * step)
            page_first = row_0 + (row - begin) * width
            page = runs[PAGE_ROW, i]
            is_known = 0 <= page < len(pages) and pages[page, paging.FIRST] == page_first
            if not is_known or pages[page, paging.STRIDE] != width:
                at = find_slot(page_first, pages, slots)
                page = np.int64(slots[_at(at)]) - 1
                if page < 0 and wanted:
                    if heights[UNUSED] > 0:
                        heights[UNUSED] -= 1
                        page = stacks[UNUSED, heights[UNUSED]]
                        slots[_at(at)] = page + 1
                        pages[page, paging.FIRST], pages[page, paging.STRIDE] = page_first, width
                    else:
                        lacking += 1
            if page >= 0:
                before = pages[page, paging.WANTED]
                after = before | rows if wanted else before & ~rows
                if after != before:
                    pages[page, paging.WANTED] = after
                    if pages[page, paging.TOUCHED] == 0:
                        pages[page, paging.TOUCHED] = 1
                        stacks[CHANGED, heights[CHANGED]] = page
                        heights[CHANGED] += 1
            runs[PAGE_ROW, i] = page
            row += some * step
            count -= some
        i += 1
    return lacking


@jit.inner
def _entering_priority(table: Ints) -> float:
    """Return the priority that new ids enter with, 1.0 before any; the bounds count ids that can be drawn again."""
    pages, stacks = packed.ints2(table, paging.PAGES), packed.ints2(table, paging.STACKS)
    raw, bounds = packed.floats(table, paging.RAW), packed.floats(table, paging.BOUNDS)
    entering = np.int64(0)
    for i in range(number(table, paging.HEIGHTS, CHANGED)):
        page = stacks[CHANGED, i]
        rows = pages[page, paging.WANTED] & ~pages[page, paging.SHOWN]
        entering |= rows & ~pages[page, paging.KNOWN]
        rows &= pages[page, paging.KNOWN]
        while rows != 0:
            raise_bound(page, raw[_at((page << PAGE_BITS) + jit.lowest_bit(rows))], bounds)
            rows &= rows - 1
    largest = largest_given(pages, raw, bounds) if entering != 0 else 0.0
    return largest if largest > 0.0 else 1.0


@jit.kernel(
    "int", "out_ints2", "strided_ints2", "out_ints2", "ints", "ints2", "int", "int", "int", "float"
)  # fmt: skip
def offer(
    old: Ints, runs: Ints, new: Ints, snapshot: Ints, table: Ints, loose: int, left: int, whole: int, alpha: float
) -> int:
    """Let the ids of `runs` be drawn, and those of `old` ones that are not among them no more.

    Runs are (3, n), in rows without gaps: first ids, strides and counts. All but the last `loose` of them stay as they
    are from then on, so old ones of this kind are not looked at. The first `left` of the loose ones are as many as
    before, in the same order; the rest are by segment and lane. `whole`: nothing but these runs can be drawn, whatever
    was before.

    `new`, (4, `RUNS` + n), becomes the `old` of the next call: see `pages.ENDED`. `snapshot` is the record of the
    snapshot that has the runs, see `frozen`.

    New ids enter with the largest priority given to ids that can be drawn when the call returns, 1.0 before any: for
    `raw` and `bounds` see `pages`. `stacks` then lists their pages. Returns how many pages
    are lacking; if there are some, nothing can be drawn that could not be, and the call is to be repeated with more.
    For the record of the `table` see `pages.PAGES`: its scratch memory has room for a page at least.
    """
    pages, slots = packed.ints2(table, paging.PAGES), packed.ints32(table, paging.SLOTS)
    stacks, heights = packed.ints2(table, paging.STACKS), packed.ints(table, paging.HEIGHTS)
    raw = packed.floats(table, paging.RAW)
    starts, tree = packed.ints(table, paging.STARTS), packed.floats(table, paging.TREE)
    sums, least = packed.floats(table, paging.SUMS), packed.floats(table, paging.LEAST)
    places, nodes = packed.ints(table, paging.PLACES), packed.ints(table, paging.NODES)
    values, numbers = packed.floats(table, paging.VALUES), packed.floats(table, paging.NUMBERS)
    masses = packed.floats(table, paging.MASSES)
    heights[DRAWN] = 0
    new[paging.ENDED, 0], new[paging.LEFT, 0] = runs.shape[1] - loose, left
    new[paging.ORIGIN, 0], new[paging.SLOT_COUNT, 0] = snapshot[frozen.ORIGIN], snapshot[frozen.SLOTS]
    new[paging.LANES_AT, 1] = snapshot[frozen.LANES]
    for row in range(PAGE_ROW):
        target, source = row * new.shape[1] + paging.RUNS, runs.ctypes.data + row * runs.strides[0]
        jit.copy_bytes(new.ctypes.data + 8 * target, source, 8 * runs.shape[1])
    lanes, old_lanes = paging.lanes_of(new), paging.lanes_of(old)
    for page in range(pages.shape[0] if whole else 0):
        if pages[page, paging.SHOWN] | pages[page, paging.WANTED]:
            pages[page, paging.WANTED], pages[page, paging.TOUCHED] = 0, 1
            stacks[CHANGED, heights[CHANGED]] = page
            heights[CHANGED] += 1
    lacking = 0
    for wanted in range(2):
        # Those that ended, of which old ones are not looked at; those that are left; and the rest.
        begin = old_begin = np.int64(paging.RUNS)
        for part in range(3):
            is_rest, end, old_end = part == 2, begin + new[_at(part), 0], old_begin + old[_at(part), 0]
            if is_rest:
                end, old_end = np.int64(new.shape[1]), np.int64(old.shape[1])
            old_first = old_end if whole or part == 0 else old_begin
            if wanted:
                lacking += _want_difference(
                    1, new, begin, end, old, old_first, old_end, is_rest, new[paging.ORIGIN, 0], lanes, pages, slots,
                    stacks, heights,
                )  # fmt: skip
            else:
                _want_difference(
                    0, old, old_first, old_end, new, begin, end, is_rest, old[paging.ORIGIN, 0], old_lanes, pages,
                    slots, stacks, heights,
                )  # fmt: skip
            begin, old_begin = end, old_end
    if lacking > 0:
        return lacking
    fresh = _entering_priority(table)
    # Masses for what is wanted of the pages that were touched, and 0 for what is not.
    values[0] = fresh
    powers(values[:1], alpha, SMALLEST, LARGEST, numbers[:1], masses[:1])
    fresh_mass = masses[0]
    done, count, entered = 0, heights[CHANGED], 0
    while done < count:
        used, known_again = np.int64(0), np.int64(0)
        while done < count and used + paging.PAGE <= places.size:
            page = stacks[CHANGED, done]
            if done + AHEAD < count:
                ahead = stacks[CHANGED, done + AHEAD]
                changed_rows = pages[ahead, paging.SHOWN] ^ pages[ahead, paging.WANTED]
                if changed_rows != 0:
                    place = (ahead << PAGE_BITS) + jit.lowest_bit(changed_rows)
                    jit.prefetch(raw.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * (starts[1] + (place >> FAN_OUT_BITS)))
            wanted_rows, known = pages[page, paging.WANTED], pages[page, paging.KNOWN]
            rows = pages[page, paging.SHOWN] ^ wanted_rows
            pages[page, paging.SHOWN], pages[page, paging.KNOWN] = wanted_rows, known | wanted_rows
            pages[page, paging.TOUCHED] = 0
            if rows & wanted_rows & ~known:
                pages[page, paging.ENTERED] = rows & wanted_rows & ~known
                stacks[CHANGED, entered] = page  # over one that is done
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
