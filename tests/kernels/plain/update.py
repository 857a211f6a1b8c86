"""Plain twins of the kernels of `kernels.update`."""

import numpy as np

from diskreplay.kernels.powers import LARGEST, SMALLEST
from diskreplay.kernels.update import Floats, Ints, Ints32
from tests.kernels.plain.pages import locate_plain
from tests.kernels.plain.powers import powers_plain
from tests.kernels.plain.sumtree import sumtree_set_plain


def update_plain(
    ids: Ints, errors: Floats, eps: float, alpha: float, origin: int, lanes: Ints, pages: Ints, slots: Ints32,
    starts: Ints, tree: Floats, sums: Floats, least: Floats, raw: Floats, bounds: Floats, drawn: Ints,
    ints: Ints, floats: Floats,
) -> int:  # fmt: skip
    """Do what `update` does to what can be drawn, and find each id anew, drawn or not; bounds stay as they are."""
    values = np.abs(errors)
    if not np.isfinite(values).all():
        return -1 - int(np.flatnonzero(~np.isfinite(values))[0])
    locate_plain(ids, origin, lanes, pages, slots, ints[0])
    found = ints[0] >= 0
    place, values = ints[0][found], values[found] + eps
    raw[place] = values
    masses = np.empty(len(place))
    powers_plain(values, alpha, SMALLEST, LARGEST, floats[1], masses)
    sumtree_set_plain(place, masses, starts, tree, sums, least, ints[1])
    return len(ids) - len(place)
