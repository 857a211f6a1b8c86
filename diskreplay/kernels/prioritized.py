"""Prioritized replay, one call a batch: ids drawn in proportion to their masses, and shown or hidden.

Ids have places, the leaves of a sum tree. `owner` says to which extent a place belongs: a line of a table that says
what its id is. `locate` goes the other way.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.extents import BASE, FIRST, KNOWN, STRIDE
from diskreplay.kernels.powers import powers, powers_plain
from diskreplay.kernels.sumtree import sumtree_find, sumtree_find_plain, sumtree_set, sumtree_set_plain

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
Floats = NDArray[np.float64]

if jit.COMPILED:
    _powers, _sumtree_find, _sumtree_set = map(jit.apart, (powers, sumtree_find, sumtree_set))

# Masses lie between two to these: sums of 1e17 of them are finite, and none is lost to denormal numbers.
SMALLEST, LARGEST = -963.0, 963.0


@jit.kernel(
    "none", "floats", "int", "ints", "floats", "floats", "ints32", "ints2", "out_floats",
    "out_ints", "out_ints", "out_floats",
)  # fmt: skip
def draw(
    fractions: Floats, strata: int, starts: Ints, tree: Floats, sums: Floats, owner: Ints32, table: Ints,
    some: Floats, places: Ints, ids: Ints, chances: Floats,
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
    _sumtree_find(starts, tree, sums, owner, chances, places, some)
    for i in range(fractions.size):
        place = places[i]
        extent = np.uint64(owner[np.uint64(place)])
        ids[i] = table[extent, FIRST] + (place - table[extent, BASE]) * table[extent, STRIDE]
        chances[i] /= total


def draw_plain(
    fractions: Floats, strata: int, starts: Ints, tree: Floats, sums: Floats, owner: Ints32, table: Ints,
    some: Floats, places: Ints, ids: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Do what `draw` does."""
    total = sums[-1]
    chances[:] = (fractions + np.arange(len(fractions)) % strata) * (total / strata)
    sumtree_find_plain(starts, tree, sums, owner, chances, places, some)
    line = table[owner[places]]
    ids[:] = line[:, FIRST] + (places - line[:, BASE]) * line[:, STRIDE]
    chances /= total


@jit.kernel(
    "none", "ints", "ints", "ints", "int", "float", "ints2", "out_ints32", "out_floats", "float",
    "ints", "out_floats", "out_floats", "out_floats", "out_ints2", "out_floats2",
)  # fmt: skip
def show(
    extent: Ints, start: Ints, count: Ints, shown: int, alpha: float, table: Ints, owner: Ints32, raw: Floats,
    new: float, starts: Ints, tree: Floats, sums: Floats, least: Floats, ints: Ints, floats: Floats,
) -> None:  # fmt: skip
    """Let numbers start[i] to below start[i] + count[i] of each extent be drawn, or, if not `shown`, no more.

    Those from the extent's `known` on are new: they get the raw priority `new`. `ints` and `floats` are scratch memory,
    (2, block) and (3, block): so many are shown or hidden at a time.
    """
    places, changed = ints[0], ints[1]
    values, numbers, masses = floats[0], floats[1], floats[2]
    if not shown:
        for i in range(masses.size):
            masses[i] = 0.0
    which, done = 0, 0  # extents, and numbers of the one that is next
    while which < extent.size:
        used = 0
        while which < extent.size and used < places.size:
            base, known, number = table[extent[which], BASE], table[extent[which], KNOWN], start[which] + done
            some = min(count[which] - done, places.size - used)
            for i in range(some):
                place, here = base + number + i, np.uint64(used + i)
                places[here] = place
                if shown:
                    owner[place] = extent[which]
                    if number + i >= known:
                        raw[place] = new
                    values[here] = raw[place]
            used, done = used + some, done + some
            if done == count[which]:
                which, done = which + 1, 0
        if shown:
            _powers(values[:used], alpha, SMALLEST, LARGEST, numbers[:used], masses[:used])
        _sumtree_set(places[:used], masses[:used], starts, tree, sums, least, changed)


def show_plain(
    extent: Ints, start: Ints, count: Ints, shown: int, alpha: float, table: Ints, owner: Ints32, raw: Floats,
    new: float, starts: Ints, tree: Floats, sums: Floats, least: Floats, ints: Ints, floats: Floats,
) -> None:  # fmt: skip
    """Do what `show` does."""
    which = np.repeat(np.arange(len(extent)), count)
    number = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + start[which]
    line = table[extent[which]]
    places, masses = line[:, BASE] + number, np.zeros(len(which))
    if shown:
        owner[places] = extent[which]
        raw[places[number >= line[:, KNOWN]]] = new
        powers_plain(raw[places], alpha, SMALLEST, LARGEST, np.empty(len(which)), masses)
    sumtree_set_plain(places, masses, starts, tree, sums, least, places.copy())
