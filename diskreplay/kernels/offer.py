"""Prioritized replay: which ids can be drawn follows lists of their runs, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK

from . import jit, packed, pages as paging
from .largest import largest_given, raise_bound
from .pages import find_page, slot_of
from .powers import LARGEST, SMALLEST, powers
from .sumtree import FAN_OUT_BITS, sumtree_set

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
Floats = NDArray[np.float64]

# Lines of `stacks`: pages that nobody uses, the next one last; and those that a call has touched. Behind the heights of
# these comes that of what is left of the second when the call returns: pages with rows that entered, in their order.
UNUSED, CHANGED, NEW = range(3)

AHEAD = 12  # runs

# Row of runs, below first ids, strides and counts: the page of an id that came or went last, at one end, or -1.
PAGE_ROW = 3

_at = np.uint64


@jit.inner
def _add_page(first: int, stride: int, pages: Ints, slots: Ints32, stacks: Ints, heights: Ints) -> int:
    """Make a page of one that nobody uses and return it, -1 if there is none."""
    if heights[UNUSED] == 0:
        return -1
    heights[UNUSED] -= 1
    page = stacks[UNUSED, heights[UNUSED]]
    at = slot_of(first, slots.size)
    while slots[at] > 0:
        at = (at + 1) & (slots.size - 1)
    slots[at] = page + 1
    pages[page, paging.FIRST], pages[page, paging.STRIDE] = first, stride
    return int(page)


@jit.inner
def _touch(page: int, pages: Ints, stacks: Ints, heights: Ints) -> None:
    """Note that a page changes."""
    if pages[page, paging.TOUCHED] == 0:
        pages[page, paging.TOUCHED] = 1
        stacks[CHANGED, heights[CHANGED]] = page
        heights[CHANGED] += 1


@jit.inner
def _mask(begin: int, count: int, step: int) -> int:
    """Set so many bits from one on, each `step` behind the one before."""
    if step == 1:
        return int(np.int64((_at(0) - _at(1)) >> _at(paging.PAGE - count)) << begin)
    bits = np.int64(0)
    for i in range(count):
        bits |= np.int64(1) << (begin + i * step)
    return int(bits)


@jit.inner
def _want(
    runs: Ints, i: int, first: int, count: int, wanted: int, origin: int, lanes: Ints, pages: Ints, slots: Ints32,
    stacks: Ints, heights: Ints,
) -> int:  # fmt: skip
    """Set ids of a run, from `first` on, to be wanted or not; return how many pages are lacking for it."""
    stride = runs[1, i]
    slot = (first >> POSITION_BITS) - origin
    width = lanes[slot] if 0 <= slot < lanes.size else 0
    if width == 0:
        return 0
    row, lacking = int(np.int64(_at(first & POSITION_MASK) // _at(width))), 0
    step = 1 if stride == width else stride // width  # most often a division less
    row_0 = first - row * width
    while count > 0:
        begin = row & paging.LAST_ROW
        some: int = min(count, paging.PAGE - begin if step == 1 else (paging.LAST_ROW - begin) // step + 1)
        rows = _mask(begin, some, step)
        page_first = row_0 + (row - begin) * width
        page = runs[PAGE_ROW, i]
        if not 0 <= page < len(pages) or pages[page, paging.FIRST] != page_first or pages[page, paging.STRIDE] != width:
            page = find_page(page_first, pages, slots)
        if page < 0 and wanted:
            page = _add_page(page_first, width, pages, slots, stacks, heights)
            lacking += 1 if page < 0 else 0
        if page >= 0:
            before = pages[page, paging.WANTED]
            after = before | rows if wanted else before & ~rows
            if after != before:
                pages[page, paging.WANTED] = after
                _touch(page, pages, stacks, heights)
        runs[PAGE_ROW, i] = page
        row += some * step
        count -= some
    return lacking


@jit.inner
def _look_ahead(runs: Ints, i: int, origin: int, lanes: Ints, pages: Ints, slots: Ints32, found: int) -> None:
    """Start to load where the page of a run's last id is looked up, or that page, where the former is `found`."""
    last = runs[0, _at(i)] + (runs[2, _at(i)] - 1) * runs[1, _at(i)]
    slot = (last >> POSITION_BITS) - origin
    width = lanes[slot] if 0 <= slot < lanes.size else 0
    if width > 0:
        row = int(np.int64(_at(last & POSITION_MASK) // _at(width)))
        at = slot_of(last - (row & paging.LAST_ROW) * width, slots.size)
        if found:
            jit.prefetch(pages.ctypes.data + 8 * (max(np.int64(slots[_at(at)]) - 1, 0) * pages.shape[1]))
        else:
            jit.prefetch(slots.ctypes.data + 4 * at)


@jit.inner
def _lane(first: int, origin: int, lanes: Ints) -> int:
    """Return the id of row 0 of an id's lane: a number that orders ids by segment and lane."""
    slot = (first >> POSITION_BITS) - origin
    width = lanes[slot] if 0 <= slot < lanes.size else 1
    return int(first - (first & POSITION_MASK) // max(width, 1) * width)


@jit.inner
def _want_difference(
    wanted: int, runs: Ints, i: int, stop: int, others: Ints, j: int, others_stop: int, by_lane: int,
    origin: int, lanes: Ints, pages: Ints, slots: Ints32, stacks: Ints, heights: Ints,
) -> int:  # fmt: skip
    """Set the ids of runs that are not in the other ones to be wanted or not; return how many pages are lacking.

    A run that is in both costs what it has grown, or lost, at one end. For that both are ordered `by_lane`, or else of
    those that are not wanted what is left is wanted in the same order, and then others. Where they are not, more is set
    than need be: with the same outcome, as all that is not wanted comes first.
    """
    lacking = np.int64(0)
    while i < stop:
        if wanted:
            runs[PAGE_ROW, i] = -1
            if j + AHEAD < others_stop and others[PAGE_ROW, j + AHEAD] >= 0:  # most often that of a run ahead
                jit.prefetch(pages.ctypes.data + 8 * others[PAGE_ROW, j + AHEAD] * pages.shape[1])
            elif i + 2 * AHEAD < stop:
                _look_ahead(runs, i + 2 * AHEAD, origin, lanes, pages, slots, 0)
                _look_ahead(runs, i + AHEAD, origin, lanes, pages, slots, 1)
        first, stride, count = runs[0, i], runs[1, i], runs[2, i]
        if j < others_stop:
            apart, more = first - others[0, j], count - others[2, j]
            if stride == others[1, j] and (apart == 0 or apart + more * stride == 0):
                first += others[2, j] * stride if apart == 0 else 0
                count = more
                if wanted:
                    runs[PAGE_ROW, i] = others[PAGE_ROW, j]
                j += 1
            elif wanted if not by_lane else _lane(others[0, j], origin, lanes) < _lane(first, origin, lanes):
                j += 1
                continue
        if count > 0:
            lacking += _want(runs, i, first, count, wanted, origin, lanes, pages, slots, stacks, heights)
        i += 1
    return int(lacking)


@jit.inner
def _fresh(pages: Ints, stacks: Ints, heights: Ints, raw: Floats, bounds: Floats) -> float:
    """Return the priority that new ids enter with; raise the bounds for ids that can be drawn again."""
    entering = np.int64(0)
    for i in range(heights[CHANGED]):
        page = stacks[CHANGED, i]
        rows = pages[page, paging.WANTED] & ~pages[page, paging.SHOWN]
        entering |= rows & ~pages[page, paging.KNOWN]
        rows &= pages[page, paging.KNOWN]
        while rows != 0:
            raise_bound(page, raw[_at((page << paging.PAGE_BITS) + jit.lowest_bit(rows))], bounds)
            rows &= rows - 1
    most = largest_given(pages, raw, bounds) if entering != 0 else 0.0
    return most if most > 0.0 else 1.0


@jit.inner
def _show(
    alpha: float, fresh: float, pages: Ints, stacks: Ints, heights: Ints, raw: Floats,
    starts: Ints, tree: Floats, sums: Floats, least: Floats, ints: Ints, floats: Floats,
) -> None:  # fmt: skip
    """Give what is wanted of the pages that were touched its masses, and what is not wanted 0."""
    places, changed = ints[0], ints[1]
    values, numbers, masses = floats[0], floats[1], floats[2]
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
                    place = (ahead << paging.PAGE_BITS) + jit.lowest_bit(changed_rows)
                    jit.prefetch(raw.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * place)
                    jit.prefetch(tree.ctypes.data + 8 * (starts[1] + (place >> FAN_OUT_BITS)))
            wanted, known = pages[page, paging.WANTED], pages[page, paging.KNOWN]
            rows = pages[page, paging.SHOWN] ^ wanted
            pages[page, paging.SHOWN], pages[page, paging.KNOWN] = wanted, known | wanted
            pages[page, paging.TOUCHED] = 0
            if rows & wanted & ~known:
                pages[page, paging.ENTERED] = rows & wanted & ~known
                stacks[CHANGED, entered] = page  # over one that is done
                entered += 1
            known_again |= rows & wanted & known
            while rows != 0:
                row = jit.lowest_bit(rows)
                rows &= rows - 1
                place = (page << paging.PAGE_BITS) + row
                value = 0.0
                if (wanted >> row) & 1:
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
        sumtree_set(places[:used], masses[:used], starts, tree, sums, least, changed)
    heights[CHANGED], heights[NEW] = 0, entered


@jit.kernel(
    "int", "out_ints2", "ints", "ints", "out_ints2", "ints", "ints", "int", "float", "ints2", checked=False
)  # fmt: skip
def offer(
    old: Ints, old_numbers: Ints, old_lanes: Ints, new: Ints, numbers: Ints, lanes: Ints, whole: int, alpha: float,
    table: Ints,
) -> int:  # fmt: skip
    """Let the ids of `new` runs be drawn, and those of `old` ones that are not among them no more.

    Runs are (4, n): first ids, strides, counts and what `PAGE_ROW` says, which is found for the new ones. Their numbers
    are `ended`, `left`, and that of the first segment, whose `lanes` come first. The first `ended` ones stay as they
    are from then on, so the old ones of these are not looked at. Then come `left`, of which as many are the same as
    before in the same order; the rest are by segment and lane. `whole`: nothing but the new ones can be drawn, whatever
    was before.

    New ids enter with the largest priority given to ids that can be drawn when the call returns, 1.0 before any: for
    `raw` and `bounds` see `largest`. `stacks` then lists their pages. Returns how many pages
    are lacking; if there are some, nothing can be drawn that could not be, and the call is to be repeated with more.
    For the record of the `table` see `pages.PAGES`: `ints` and `floats` are (2, block) and (3, block), at least a page.
    """
    pages, slots = packed.ints2(table, paging.PAGES), packed.ints32(table, paging.SLOTS)
    stacks, heights = packed.ints2(table, paging.STACKS), packed.ints(table, paging.HEIGHTS)
    raw, bounds = packed.floats(table, paging.RAW), packed.floats(table, paging.BOUNDS)
    starts, tree = packed.ints(table, paging.STARTS), packed.floats(table, paging.TREE)
    sums, least = packed.floats(table, paging.SUMS), packed.floats(table, paging.LEAST)
    ints, floats = packed.ints2(table, paging.INTS), packed.floats2(table, paging.FLOATS)
    old_ended, old_left, old_origin = old_numbers[0], old_numbers[1], old_numbers[2]
    ended, left, origin = numbers[0], numbers[1], numbers[2]
    if whole:
        for page in range(pages.shape[0]):
            if pages[page, paging.SHOWN] | pages[page, paging.WANTED]:
                pages[page, paging.WANTED] = 0
                _touch(page, pages, stacks, heights)
    end, stop, old_end, old_stop = ended + left, new.shape[1], old_ended + old_left, old.shape[1]
    if whole:
        old_ended = old_end = old_stop
    _want_difference(
        0, old, old_ended, old_end, new, ended, end, 0, old_origin, old_lanes, pages, slots, stacks, heights
    )  # fmt: skip
    _want_difference(
        0, old, old_end, old_stop, new, end, stop, 1, old_origin, old_lanes, pages, slots, stacks, heights
    )  # fmt: skip
    lacking = _want_difference(1, new, 0, ended, old, 0, 0, 0, origin, lanes, pages, slots, stacks, heights)
    lacking += _want_difference(
        1, new, ended, end, old, old_ended, old_end, 0, origin, lanes, pages, slots, stacks, heights
    )  # fmt: skip
    lacking += _want_difference(
        1, new, end, stop, old, old_end, old_stop, 1, origin, lanes, pages, slots, stacks, heights
    )  # fmt: skip
    if lacking == 0:
        fresh = _fresh(pages, stacks, heights, raw, bounds)
        _show(alpha, fresh, pages, stacks, heights, raw, starts, tree, sums, least, ints, floats)
    return int(lacking)
