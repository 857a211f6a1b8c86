"""Plain twins of the kernels of `kernels.draw`."""

import numpy as np

from diskreplay.kernels import packed
from diskreplay.kernels.draw import Floats, Ints
from diskreplay.kernels.pages import (
    DRAWN,
    DRAWN_IDS,
    DRAWN_PLACES,
    FIRST,
    HEIGHTS,
    LAST_ROW,
    PAGE_BITS,
    PAGES,
    STARTS,
    STRIDE,
    SUMS,
    TREE,
    VALUES,
)
from tests.kernels.plain.mix import fractions
from tests.kernels.plain.sumtree import sumtree_find_plain


def draw_plain(key: int, strata: int, table: Ints, ids: Ints, chances: Floats) -> None:
    """Do what `draw` does."""
    starts, tree, sums = packed.ints(table, STARTS), packed.floats(table, TREE), packed.floats(table, SUMS)
    pages, some = packed.ints2(table, PAGES), packed.floats(table, VALUES)
    total, size = sums[-1], len(ids)
    chances[:] = (fractions(key, size) + np.arange(size) % strata) * (total / strata)
    places = np.empty(size, np.int64)
    sumtree_find_plain(starts, tree, sums, pages, chances, places, some)
    page = pages[places >> PAGE_BITS]
    ids[:] = page[:, FIRST] + (places & LAST_ROW) * page[:, STRIDE]
    chances /= total
    packed.ints(table, DRAWN_PLACES)[:size] = places
    packed.ints(table, DRAWN_IDS)[:size] = ids
    packed.ints(table, HEIGHTS)[DRAWN] = size
