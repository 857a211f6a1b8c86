"""Prioritized replay: ids drawn in proportion to their masses, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from . import jit, packed, pages as paging
from .mix import fraction
from .pages import LAST_ROW, PAGE_BITS
from .sumtree import sumtree_find

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@jit.kernel("none", "int", "int", "ints2", "out_ints", "out_floats")
def draw(key: int, strata: int, table: Ints, ids: Ints, chances: Floats) -> None:
    """Draw ids at random: write them, and the share that each has of the total, and keep both places and ids.

    The total, which is not 0, is cut into `strata` equal parts: the first id is one of the first part, and so on, from
    the first part again behind the last. For the random numbers see `mix.fraction`, for the record of the table
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
