"""Prioritized replay: ids drawn in proportion to their masses, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from . import jit, packed
from .mix import fraction
from .pages import FIRST, LAST_ROW, PAGE_BITS, PAGES, SOME, STARTS, STRIDE, SUMS, TREE
from .sumtree import sumtree_find

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@jit.kernel("none", "int", "int", "ints2", "out_ints2", "out_floats")
def draw(key: int, strata: int, table: Ints, drawn: Ints, chances: Floats) -> None:
    """Draw ids at random: write their places and them to `drawn`, (2, n), and the share that each has of the total.

    The total, which is not 0, is cut into `strata` equal parts: the first id is one of the first part, and so on, from
    the first part again behind the last. For the random numbers see `mix.fraction`, for the record of
    the table `pages.PAGES`.
    """
    starts, tree, sums = packed.ints(table, STARTS), packed.floats(table, TREE), packed.floats(table, SUMS)
    pages, some = packed.ints2(table, PAGES), packed.floats(table, SOME)
    places, ids = drawn[0], drawn[1]
    total = sums[sums.size - 1]
    part, stratum = total / strata, 0
    for i in range(chances.size):
        chances[i] = (fraction(key, i) + stratum) * part
        stratum = stratum + 1 if stratum + 1 < strata else 0
    sumtree_find(starts, tree, sums, pages, chances, places, some)
    for i in range(chances.size):
        page = np.uint64(places[i] >> PAGE_BITS)
        ids[i] = pages[page, FIRST] + (places[i] & LAST_ROW) * pages[page, STRIDE]
        chances[i] /= total
