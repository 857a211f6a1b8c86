"""Plain twins of the kernels of `kernels.draw`."""

import numpy as np

from diskreplay.kernels.draw import Floats, Ints
from diskreplay.kernels.pages import FIRST, LAST_ROW, PAGE_BITS, STRIDE
from tests.kernels.plain.sumtree import sumtree_find_plain


def draw_plain(
    fractions: Floats, strata: int, starts: Ints, tree: Floats, sums: Floats, pages: Ints, some: Floats,
    places: Ints, ids: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Do what `draw` does."""
    total = sums[-1]
    chances[:] = (fractions + np.arange(len(fractions)) % strata) * (total / strata)
    sumtree_find_plain(starts, tree, sums, pages, chances, places, some)
    page = pages[places >> PAGE_BITS]
    ids[:] = page[:, FIRST] + (places & LAST_ROW) * page[:, STRIDE]
    chances /= total
