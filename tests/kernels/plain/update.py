"""Plain twins of the kernels of `kernels.update`."""

import numpy as np

from diskreplay.kernels import packed
from diskreplay.kernels.pages import LEAST, ORIGIN, PAGES, RAW, SLOTS, STARTS, SUMS, TREE, lanes_of
from diskreplay.kernels.powers import LARGEST, SMALLEST
from diskreplay.kernels.update import Floats, Ints
from tests.kernels.plain.pages import locate_plain
from tests.kernels.plain.powers import powers_plain
from tests.kernels.plain.sumtree import sumtree_set_plain


def update_plain(ids: Ints, errors: Floats, eps: float, alpha: float, offered: Ints, table: Ints) -> int:
    """Do what `update` does to what can be drawn, and find each id anew, drawn or not; bounds stay as they are."""
    pages, slots, raw = packed.ints2(table, PAGES), packed.ints32(table, SLOTS), packed.floats(table, RAW)
    tree = packed.ints(table, STARTS), *(packed.floats(table, part) for part in (TREE, SUMS, LEAST))
    values, places = np.abs(errors), np.empty(len(ids), np.int64)
    if not np.isfinite(values).all():
        return -1 - int(np.flatnonzero(~np.isfinite(values))[0])
    locate_plain(ids, int(offered[ORIGIN, 0]), lanes_of(offered), pages, slots, places)
    found = places >= 0
    places, values = places[found], values[found] + eps
    raw[places] = values
    masses = np.empty(len(places))
    powers_plain(values, alpha, SMALLEST, LARGEST, np.empty(len(places)), masses)
    sumtree_set_plain(places, masses, *tree, np.empty(len(places), np.int64))
    return len(ids) - len(places)
