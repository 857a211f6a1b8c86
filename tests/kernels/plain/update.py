"""Plain twins of the kernels of `kernels.update`."""

import numpy as np

from diskreplay.kernels import packed
from diskreplay.kernels.pages import LEAST, PAGES, RAW, SLOTS, STARTS, SUMS, TREE
from diskreplay.kernels.powers import LARGEST, SMALLEST
from diskreplay.kernels.update import Floats, Ints
from tests.kernels.plain.pages import locate_plain
from tests.kernels.plain.powers import powers_plain
from tests.kernels.plain.sumtree import sumtree_set_plain


def update_plain(
    ids: Ints, errors: Floats, eps: float, alpha: float, origin: int, lanes: Ints, table: Ints, drawn: Ints,
    ints: Ints, floats: Floats,
) -> int:  # fmt: skip
    """Do what `update` does to what can be drawn, and find each id anew, drawn or not; bounds stay as they are."""
    pages, slots, raw = packed.ints2(table, PAGES), packed.ints32(table, SLOTS), packed.floats(table, RAW)
    tree = packed.ints(table, STARTS), *(packed.floats(table, part) for part in (TREE, SUMS, LEAST))
    values = np.abs(errors)
    if not np.isfinite(values).all():
        return -1 - int(np.flatnonzero(~np.isfinite(values))[0])
    locate_plain(ids, origin, lanes, pages, slots, ints[0])
    found = ints[0] >= 0
    place, values = ints[0][found], values[found] + eps
    raw[place] = values
    masses = np.empty(len(place))
    powers_plain(values, alpha, SMALLEST, LARGEST, floats[1], masses)
    sumtree_set_plain(place, masses, *tree, ints[1])
    return len(ids) - len(place)
