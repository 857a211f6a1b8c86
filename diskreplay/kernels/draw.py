"""Prioritized replay: ids drawn in proportion to their masses, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.mix import fraction
from diskreplay.kernels.pages import FIRST, LAST_ROW, PAGE_BITS, STRIDE
from diskreplay.kernels.sumtree import sumtree_find

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_sumtree_find = jit.apart(sumtree_find)


@jit.kernel("none", "int", "int", "ints", "floats", "floats", "ints2", "out_floats", "out_ints2", "out_floats")
def draw(
    key: int, strata: int, starts: Ints, tree: Floats, sums: Floats, pages: Ints, some: Floats,
    drawn: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Draw ids at random: write their places and them to `drawn`, (2, n), and the share that each has of the total.

    The total, which is not 0, is cut into `strata` equal parts: the first id is one of the first part, and so on, from
    the first part again behind the last. For the random numbers see `mix.fraction`; `some` is scratch memory for
    `sumtree.SOME` numbers.
    """
    places, ids = drawn[0], drawn[1]
    total = sums[sums.size - 1]
    part, stratum = total / strata, 0
    for i in range(chances.size):
        chances[i] = (fraction(key, i) + stratum) * part
        stratum = stratum + 1 if stratum + 1 < strata else 0
    _sumtree_find(starts, tree, sums, pages, chances, places, some)
    for i in range(chances.size):
        page = np.uint64(places[i] >> PAGE_BITS)
        ids[i] = pages[page, FIRST] + (places[i] & LAST_ROW) * pages[page, STRIDE]
        chances[i] /= total
