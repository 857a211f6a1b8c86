"""Prioritized replay: the priorities of a batch set from its errors, in one call. See `prioritized`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.extents import BASE, HIGH, LOW, locate, locate_plain
from diskreplay.kernels.powers import powers, powers_plain
from diskreplay.kernels.prioritized import LARGEST, SMALLEST
from diskreplay.kernels.sumtree import FAN_OUT, sumtree_set, sumtree_set_plain

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

if jit.COMPILED:
    _locate, _powers, _sumtree_set = map(jit.apart, (locate, powers, sumtree_set))

_FINITE = np.finfo(np.float64).max


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
