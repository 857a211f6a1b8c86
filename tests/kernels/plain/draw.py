"""Plain twins of the kernels of `kernels.draw`."""

import numpy as np

from diskreplay.kernels import packed
from diskreplay.kernels.draw import Floats, Ints
from diskreplay.kernels.pages import FIRST, LAST_ROW, PAGE_BITS, PAGES, SOME, STARTS, STRIDE, SUMS, TREE
from tests.kernels.plain.mix import fractions
from tests.kernels.plain.sumtree import sumtree_find_plain


def draw_plain(key: int, strata: int, table: Ints, drawn: Ints, chances: Floats) -> None:
    """Do what `draw` does."""
    starts, tree, sums = packed.ints(table, STARTS), packed.floats(table, TREE), packed.floats(table, SUMS)
    pages, some = packed.ints2(table, PAGES), packed.floats(table, SOME)
    total, (places, ids) = sums[-1], drawn
    chances[:] = (fractions(key, len(chances)) + np.arange(len(chances)) % strata) * (total / strata)
    sumtree_find_plain(starts, tree, sums, pages, chances, places, some)
    page = pages[places >> PAGE_BITS]
    ids[:] = page[:, FIRST] + (places & LAST_ROW) * page[:, STRIDE]
    chances /= total
