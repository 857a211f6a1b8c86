"""Prioritized replay, one call a batch: ids drawn in proportion, and their priorities set.

Ids have places, the leaves of a sum tree. `owner` says to which extent a place belongs: a line of a table that says
what its id is. `locate` goes the other way.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.extents import BASE, FIRST, HIGH, KNOWN, LOW, STRIDE, locate, locate_plain
from diskreplay.kernels.powers import powers, powers_plain
from diskreplay.kernels.sumtree import FAN_OUT, sumtree_find, sumtree_find_plain, sumtree_set, sumtree_set_plain

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]
Floats = NDArray[np.float64]

if jit.COMPILED:
    _locate, _powers, _sumtree_find, _sumtree_set = map(jit.apart, (locate, powers, sumtree_find, sumtree_set))

# Masses lie between two to these: sums of 1e17 of them are finite, and none is lost to denormal numbers.
SMALLEST, LARGEST = -963.0, 963.0
_FINITE = np.finfo(np.float64).max


@jit.kernel(
    "none", "floats", "int", "ints", "floats", "floats", "ints32", "ints2", "out_floats",
    "out_ints", "out_ints", "out_floats",
)  # fmt: skip
def draw(
    fractions: Floats, stratified: int, starts: Ints, tree: Floats, sums: Floats, owner: Ints32, table: Ints,
    some: Floats, places: Ints, ids: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Write the place and id at each fraction of the total, 0 to below 1, and its share of the total, which is not 0.

    Stratified: the total is cut into as many equal parts as there are fractions, and fraction i is one of part i.
    `some` is scratch memory for `sumtree.SOME` numbers.
    """
    total = sums[sums.size - 1]
    part = total / fractions.size if stratified else total
    for i in range(fractions.size):
        chances[i] = (fractions[i] + i if stratified else fractions[i]) * part
    _sumtree_find(starts, tree, sums, owner, chances, places, some)
    for i in range(fractions.size):
        place = places[i]
        extent = np.uint64(owner[np.uint64(place)])
        ids[i] = table[extent, FIRST] + (place - table[extent, BASE]) * table[extent, STRIDE]
        chances[i] /= total


def draw_plain(
    fractions: Floats, stratified: int, starts: Ints, tree: Floats, sums: Floats, owner: Ints32, table: Ints,
    some: Floats, places: Ints, ids: Ints, chances: Floats,
) -> None:  # fmt: skip
    """Do what `draw` does."""
    size, total = len(fractions), sums[-1]
    chances[:] = (fractions + np.arange(size)) * (total / size) if stratified else fractions * total
    sumtree_find_plain(starts, tree, sums, owner, chances, places, some)
    line = table[owner[places]]
    ids[:] = line[:, FIRST] + (places - line[:, BASE]) * line[:, STRIDE]
    chances /= total


@jit.kernel("int", "ints", "ints", inner=True)
def _same(some: Ints, others: Ints) -> int:
    """Tell whether two arrays hold the same numbers."""
    if some.size != others.size:
        return 0
    differences = np.int64(0)
    for i in range(some.size):
        differences |= some[i] ^ others[i]
    return int(differences == 0)


@jit.kernel(
    "int", "ints", "floats", "float", "float", "ints", "ints", "int", "ints", "ints", "ints", "ints", "ints", "ints2",
    "ints", "out_floats", "out_floats", "out_floats", "out_floats", "out_floats", "out_ints2", "out_floats2",
)  # fmt: skip
def update(
    ids: Ints, errors: Floats, eps: float, alpha: float, drawn: Ints, drawn_places: Ints, origin: int, lanes: Ints,
    keys: Ints, at: Ints, more_keys: Ints, more_at: Ints, table: Ints,
    starts: Ints, tree: Floats, sums: Floats, least: Floats, raw: Floats, largest: Floats, ints: Ints, floats: Floats,
) -> int:  # fmt: skip
    """Set raw = |error| + eps and mass = raw ** alpha of the ids that `locate` finds by either index.

    Where the ids are those `drawn`, their places are known.
    The last error counts where an id is named twice; largest[0] becomes the largest raw priority if that is larger.
    Returns how many ids were not found, or else -1 - i if error i is not finite: then nothing is changed.
    `ints` and `floats` are scratch memory, (4, n) and (3, n).
    """
    for i in range(ids.size):
        if not abs(errors[i]) <= _FINITE:
            return -1 - i
    place, extent, key, position = ints[0], ints[1], ints[2], ints[3]
    values, numbers, masses = floats[0], floats[1], floats[2]
    found = np.int64(0)
    if _same(ids, drawn):
        for i in range(ids.size):
            place[i] = drawn_places[i]
            values[i] = abs(errors[i]) + eps
        found += ids.size
    else:
        for i in range(ids.size):
            extent[i], place[i] = -1, 0
        _locate(ids, origin, lanes, keys, at, table, LOW, HIGH, key, position, extent, place)
        if more_keys.size:
            _locate(ids, origin, lanes, more_keys, more_at, table, LOW, HIGH, key, position, extent, place)
        for i in range(ids.size):
            here = np.uint64(found)
            place[here] = place[i] + table[np.uint64(max(extent[i], 0)), BASE]
            values[here] = abs(errors[i]) + eps
            found += np.int64(extent[i] >= 0)
    place, values, numbers, masses = place[:found], values[:found], numbers[:found], masses[:found]
    # What is changed, and what is added up with it, is on its way while the powers are computed.
    leaf, node = tree.ctypes.data, tree.ctypes.data + 8 * starts[1]
    for i in range(found):
        jit.prefetch(raw.ctypes.data + 8 * place[i])
        jit.prefetch(leaf + 8 * place[i])
        jit.prefetch(node + (place[i] // FAN_OUT) * 8)
    _powers(values, alpha, SMALLEST, LARGEST, numbers, masses)
    for i in range(found):
        raw[np.uint64(place[i])] = values[i]
        largest[0] = max(largest[0], values[i])
    _sumtree_set(place, masses, starts, tree, sums, least, key)
    return int(ids.size - found)


def update_plain(
    ids: Ints, errors: Floats, eps: float, alpha: float, drawn: Ints, drawn_places: Ints, origin: int, lanes: Ints,
    keys: Ints, at: Ints, more_keys: Ints, more_at: Ints, table: Ints,
    starts: Ints, tree: Floats, sums: Floats, least: Floats, raw: Floats, largest: Floats, ints: Ints, floats: Floats,
) -> int:  # fmt: skip
    """Do what `update` does."""
    values = np.abs(errors)
    if not np.isfinite(values).all():
        return -1 - int(np.flatnonzero(~np.isfinite(values))[0])
    extent, number = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
    for index in ((keys, at), (more_keys, more_at)):
        locate_plain(ids, origin, lanes, *index, table, LOW, HIGH, ints[2], ints[3], extent, number)
    found = extent >= 0
    place, values = number[found] + table[extent[found], BASE], values[found] + eps
    raw[place] = values
    largest[0] = max(largest[0], values.max(initial=0.0))
    masses = np.empty(len(place))
    powers_plain(values, alpha, SMALLEST, LARGEST, floats[1], masses)
    sumtree_set_plain(place, masses, starts, tree, sums, least, ints[2])
    return len(ids) - len(place)


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
    block = places.size
    if not shown:
        for i in range(block):
            masses[i] = 0.0
    used = np.int64(0)
    for i in range(extent.size):
        base, known, end = table[extent[i], BASE], table[extent[i], KNOWN], start[i] + count[i]
        j = start[i]
        while j < end:
            until = min(end, j + block - used)
            for number in range(j, until):
                place = base + number
                places[np.uint64(used)] = place
                used += 1
                if shown:
                    owner[place] = extent[i]
                    if number >= known:
                        raw[place] = new
                    values[np.uint64(used - 1)] = raw[place]
            j = until
            if used == block:
                if shown:
                    _powers(values, alpha, SMALLEST, LARGEST, numbers, masses)
                _sumtree_set(places, masses, starts, tree, sums, least, changed)
                used = np.int64(0)
    if used > 0:
        places, masses = places[:used], masses[:used]
        if shown:
            _powers(values[:used], alpha, SMALLEST, LARGEST, numbers[:used], masses)
        _sumtree_set(places, masses, starts, tree, sums, least, changed)


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
