"""Pages of priorities: each id has a place in a page, and each place is a leaf of a sum tree.

A page has the places of `PAGE` successive rows of a lane; the first row is a multiple of `PAGE`. A place is the page's
number times `PAGE`, plus the row modulo `PAGE`. A page is one line of a table, and fills a cache line. Three columns
are numbers:

- `FIRST`: the id of the page's first row,
- `STRIDE`: the difference between the ids of successive rows, 0 for an unused page,
- `TOUCHED`: 1 while the page is in the stack `CHANGED`.

The other columns are masks with a bit per row:

- `SHOWN`: rows that can be drawn,
- `WANTED`: rows that can be drawn when the current call of `sync_priorities` returns,
- `KNOWN`: rows with a priority,
- `ENTERED`: the rows that got their first priority when `sync_priorities` last added ids to the page.

`slots` is a hash table with open addressing. The table has each page's number plus 1, at the hash of the page's first
id or at a later index.

`raw` has a number per place. The number's absolute value is the priority |td| + eps. The number is positive if an
update or a writer gave the priority, and negative if `sync_priorities` gave it to a new id.

`bounds` has a bound for each block of `BLOCK` successive pages, then a bound for each page. The bound of a page is at
least the largest priority that an update or a writer gave to a row of the page. The bound of a block is the largest
bound of its pages. An update only raises bounds, with one comparison per bound. `largest_given` lowers bounds that are
too high.
"""

import numpy as np

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Floats, Ints, mixed

from . import jit
from .ids_at import mix
from .packed import Ints32

PAGE_BITS = 6
PAGE = 1 << PAGE_BITS
LAST_ROW = PAGE - 1

# The record of a table of priorities, see `packed`.
# - PAGES to BOUNDS: the arrays that the module's docstring describes.
# - STARTS to LEAST: the arrays of `sumtree`.
# - DRAWN_PLACES, DRAWN_IDS: the places and ids of the last draw.
# - PLACES to MASSES: scratch memory.
# All arrays from DRAWN_PLACES on have the same length.
(
    PAGES, SLOTS, STACKS, HEIGHTS, RAW, BOUNDS, STARTS, TREE, SUMS, LEAST, DRAWN_PLACES, DRAWN_IDS, PLACES, NODES,
    VALUES, NUMBERS, MASSES,
) = range(17)  # fmt: skip

# `stacks` has two lines. UNUSED has the unused pages; the page at its end is used next. During a call of
# `sync_priorities`, CHANGED has the pages whose `WANTED` the call has changed. After the call, CHANGED has the pages
# with new ids. `heights` has the heights of both stacks, and two more numbers. NEW is the number of pages with new ids.
# DRAWN is the number of ids in the last draw, or 0 if pages have changed since that draw.
UNUSED, CHANGED, NEW, DRAWN = range(4)

# The tables `old` and `new` of `sync_priorities`, (4, `RUNS` + number of runs), have the runs from column RUNS on.
# Row LANES_AT of column 1 has the address of an array with the number of lanes of each segment. The caller keeps this
# array alive. Column 0 has four numbers:
# - ENDED: the number of final runs, see `priorities.sync_priorities`.
# - LEFT: the number of partially hidden runs.
# - ORIGIN: the number of the first segment.
# - SLOT_COUNT: the number of segments.
ENDED, LEFT, ORIGIN, SLOT_COUNT = range(4)
LANES_AT = 0
RUNS = 2

FIRST, STRIDE, SHOWN, WANTED, KNOWN, TOUCHED, ENTERED = range(7)
COLUMNS = 8

_at = np.uint64


@jit.inner
def lanes_of(offered: Ints) -> Ints:
    return jit.ints_at(offered[LANES_AT, 1], offered[SLOT_COUNT, 0])


@jit.inner
def width_of(step_id: int, origin: int, lanes: Ints) -> int:
    """Return the number of lanes of an id's segment, 0 if it is gone; `lanes` begins with segment number `origin`."""
    slot = (step_id >> POSITION_BITS) - origin
    return lanes[slot] if 0 <= slot < lanes.size else 0


@jit.inner
def slot_of(first: int, slots: int) -> int:
    """Return the hash of a page's first id, from 0 to `slots` - 1; `slots` is a power of two."""
    return np.int64(mix(_at(first)) & _at(slots - 1))  # type: ignore[return-value]


@jit.inner
def find_slot(first: int, pages: Ints, slots: Ints32) -> int:
    """Return the index in `slots` of the page whose first id is `first`, or of a free entry for this page."""
    at = slot_of(first, slots.size)
    while slots[_at(at)] > 0 and pages[_at(slots[_at(at)] - 1), FIRST] != first:
        at = (at + 1) & (slots.size - 1)
    return at


@jit.kernel("none", "ints", "int", "ints", "ints2", "ints32", "out_ints")
def locate(ids: Ints, origin: int, lanes: Ints, pages: Ints, slots: Ints32, places: Ints) -> None:
    """Write each id's place, or -1 if the id cannot be drawn; for `lanes` see `width_of`."""
    for i in range(ids.size):
        places[i] = -1
        width = width_of(ids[i], origin, lanes)
        if width > 0:
            row = (ids[i] & POSITION_MASK) // width
            within = row & LAST_ROW
            page = np.int64(slots[_at(find_slot(ids[i] - within * width, pages, slots))]) - 1
            if page >= 0 and (pages[_at(page), SHOWN] >> within) & 1:
                places[i] = (page << PAGE_BITS) + within


def slots_of(first: Ints, slots: Ints32) -> Ints:
    hashes = mixed(np.ascontiguousarray(first).view(np.uint64))
    return (hashes & _at(len(slots) - 1)).astype(np.int64)


def index_pages(pages: Ints, slots: Ints32) -> None:
    slots[:] = 0
    left = np.flatnonzero(pages[:, STRIDE])
    at = slots_of(pages[left, FIRST], slots)
    while len(left):
        is_free = slots[at] == 0
        slots[at[is_free]] = left[is_free] + 1  # if several pages get the same slot, numpy keeps the last one
        again = slots[at] != left + 1
        left, at = left[again], (at[again] + 1) & (len(slots) - 1)


BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS


def bounds_of(pages: int, before: Floats) -> Floats:
    """Return `bounds` for `pages` pages: the bounds `before` of fewer pages (empty for a new table), and zeros."""
    blocks, known = -(-pages // BLOCK), len(before) // (BLOCK + 1)
    bounds = np.zeros(blocks * (BLOCK + 1))
    bounds[:known] = before[:known]
    bounds[blocks : blocks + known * BLOCK] = before[known:]
    return bounds


@jit.inner
def raise_bound(page: int, value: float, bounds: Floats) -> None:
    at = bounds.size // (BLOCK + 1) + page
    if value > bounds[_at(at)]:
        bounds[_at(at)] = value
        block = page >> BLOCK_BITS
        if value > bounds[_at(block)]:
            bounds[_at(block)] = value


@jit.kernel("float", "ints2", "floats", "out_floats")
def largest_given(pages: Ints, raw: Floats, bounds: Floats) -> float:
    """Return the largest priority that an update or a writer gave to a row whose bit of `WANTED` is set, or 0."""
    blocks = bounds.size // (BLOCK + 1)
    while True:
        block, at, begin, end = -1, 0, 0, blocks
        while block < 0 or at < blocks:  # first find the block with the largest bound, then the page in this block
            most_bits = 0
            for i in range(begin, end):  # positive floats sort like their bits: this loop becomes vector code
                bits = jit.bits_of(bounds[_at(i)])
                most_bits = bits if bits > most_bits else most_bits
            at = begin
            while jit.bits_of(bounds[_at(at)]) != most_bits:
                at += 1
            if block < 0:
                block, begin = at, blocks + (at << BLOCK_BITS)
                end = begin + BLOCK
        bound, page = bounds[_at(at)], at - blocks
        if bounds[_at(block)] > bound:
            bounds[_at(block)] = bound
            continue
        if bound == 0.0:
            return 0.0
        rows, most = pages[_at(page), WANTED] & pages[_at(page), KNOWN], 0.0
        while rows != 0:
            value = raw[_at((page << PAGE_BITS) + jit.lowest_bit(rows))]
            most = value if value > most else most
            rows &= rows - 1
        if most == bound:
            return most
        bounds[_at(at)] = most
