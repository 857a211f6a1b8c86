"""Prioritized replay: ids drawn in proportion to their masses, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.pages import FIRST, LAST_ROW, PAGE_BITS, STRIDE
from diskreplay.kernels.sumtree import sumtree_find

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_sumtree_find = jit.apart(sumtree_find)


@jit.kernel(
    "none", "floats", "int", "ints", "floats", "floats", "ints2", "out_floats", "out_ints", "out_ints", "out_floats"
)  # fmt: skip
def draw(
    fractions: Floats, strata: int, starts: Ints, tree: Floats, sums: Floats, pages: Ints, some: Floats,
    places: Ints, ids: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Write the place and id at each fraction of the total, 0 to below 1, and its share of the total, which is not 0.

    The total is cut into `strata` equal parts: the first fraction is one of the first part, and so on, from the first
    part again behind the last. `some` is scratch memory for `sumtree.SOME` numbers.
    """
    total = sums[sums.size - 1]
    part, stratum = total / strata, 0
    for i in range(fractions.size):
        chances[i] = (fractions[i] + stratum) * part
        stratum = stratum + 1 if stratum + 1 < strata else 0
    _sumtree_find(starts, tree, sums, pages, chances, places, some)
    for i in range(fractions.size):
        page = np.uint64(places[i] >> PAGE_BITS)
        ids[i] = pages[page, FIRST] + (places[i] & LAST_ROW) * pages[page, STRIDE]
        chances[i] /= total
