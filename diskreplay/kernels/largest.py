"""Prioritized replay: the largest priority that was given, of ids that can be drawn. See `pages`.

`raw` has a number a place. It is positive if an update or a writer gave the id this priority, and negative if the id
entered with it by the rule. The masks of the page say which ids can be drawn.

`bounds` holds a number for each page, at least the largest priority given to its rows, and before those a number for
each block of `BLOCK` successive pages, the largest of theirs. Updates only raise them, which takes a comparison.
`largest_given` lowers the bounds that it finds too high: each at most once for each update that raised it.
"""

import numpy as np

from diskreplay.ids import Floats, Ints

from . import jit
from .pages import KNOWN, PAGE_BITS, WANTED

BLOCK_BITS = 6
BLOCK = 1 << BLOCK_BITS

# Makes an index that is not tested for being negative.
_at = np.uint64


def bounds_of(pages: int, before: Floats) -> Floats:
    """Return the bounds of `pages` pages; `before` are the bounds of the first ones, empty for a new table."""
    blocks, known = -(-pages // BLOCK), len(before) // (BLOCK + 1)
    bounds = np.zeros(blocks * (BLOCK + 1))
    bounds[:known] = before[:known]
    bounds[blocks : blocks + known * BLOCK] = before[known:]
    return bounds


@jit.inner
def raise_bound(page: int, value: float, bounds: Floats) -> None:
    """Make the bounds of a page at least the value, one that is not positive aside."""
    at = bounds.size // (BLOCK + 1) + page
    if value > bounds[_at(at)]:
        bounds[_at(at)] = value
        block = page >> BLOCK_BITS
        if value > bounds[_at(block)]:
            bounds[_at(block)] = value


@jit.kernel("float", "ints2", "floats", "out_floats")
def largest_given(pages: Ints, raw: Floats, bounds: Floats) -> float:
    """Return the largest priority given to a wanted id, 0 if no wanted id was given one; lower bounds on the way."""
    blocks = bounds.size // (BLOCK + 1)
    while True:
        block, at, begin, end = -1, 0, 0, blocks
        while block < 0 or at < blocks:  # the first block with the largest bound, and the first such page of it
            most_bits = 0
            for i in range(begin, end):  # positive numbers are in the order of their bits: this becomes vector code
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
