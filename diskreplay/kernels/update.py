"""Prioritized replay: the priorities of a batch set from its errors, in one call. See `pages`."""

import numpy as np
from numpy.typing import NDArray

from . import jit, packed, pages as paging
from .largest import raise_bound
from .pages import locate
from .powers import LARGEST, SMALLEST, powers
from .sumtree import FAN_OUT, sumtree_set

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Makes an index that is not tested for being negative.
_at = np.uint64
_FINITE = np.finfo(np.float64).max


@jit.kernel("int", "ints", "floats", "float", "float", "ints2", "ints2")
def update(ids: Ints, errors: Floats, eps: float, alpha: float, offered: Ints, table: Ints) -> int:
    """Set raw = |error| + eps and mass = raw ** alpha of the ids that `locate` finds.

    The last error counts where an id is named twice. These priorities are given: for `raw` and `bounds` see `largest`.
    Returns how many ids were not found, or else -1 - i if error i is not finite: then nothing is changed.
    `offered` is what can be drawn, see `pages.ENDED`. For the record of the `table` see `pages.PAGES`: its scratch
    memory has room for n. It may have the places of these very ids, which most updates are of.
    """
    pages, slots = packed.ints2(table, paging.PAGES), packed.ints32(table, paging.SLOTS)
    raw, bounds = packed.floats(table, paging.RAW), packed.floats(table, paging.BOUNDS)
    starts, tree = packed.ints(table, paging.STARTS), packed.floats(table, paging.TREE)
    sums, least = packed.floats(table, paging.SUMS), packed.floats(table, paging.LEAST)
    place, nodes = packed.ints(table, paging.PLACES), packed.ints(table, paging.NODES)
    drawn_places, drawn = packed.ints(table, paging.DRAWN_PLACES), packed.ints(table, paging.DRAWN_IDS)
    values, numbers = packed.floats(table, paging.VALUES), packed.floats(table, paging.NUMBERS)
    masses = packed.floats(table, paging.MASSES)
    wrong = np.int64(0)  # counted first: a loop that may return does not become vector code
    for i in range(ids.size):
        wrong += not abs(errors[i]) <= _FINITE
    for i in range(ids.size if wrong else 0):
        if not abs(errors[i]) <= _FINITE:
            return -1 - i
    others = np.int64(packed.number(table, paging.HEIGHTS, paging.DRAWN) != ids.size)
    for i in range(0 if others else ids.size):
        others |= drawn[i] ^ ids[i]
    if others:
        locate(ids, offered[paging.ORIGIN, 0], paging.lanes_of(offered), pages, slots, place)
    else:
        for i in range(ids.size):
            place[i] = drawn_places[i]
    for i in range(ids.size):
        values[i] = abs(errors[i]) + eps
    found = np.int64(0)
    for i in range(ids.size):
        found += place[i] >= 0
    if found < ids.size:  # those with a place are moved to the front
        found = np.int64(0)
        for i in range(ids.size):
            if place[i] >= 0:
                place[_at(found)], values[_at(found)] = place[i], values[i]
                found += 1
    place, values, numbers, masses = place[:found], values[:found], numbers[:found], masses[:found]
    # What is changed, and what is added up with it, is on its way while the powers are computed.
    leaf, node = tree.ctypes.data, tree.ctypes.data + 8 * starts[1]
    for i in range(found):
        jit.prefetch(leaf + 8 * place[i])
        jit.prefetch(node + (place[i] // FAN_OUT) * 8)
    for i in range(found):
        jit.prefetch(raw.ctypes.data + 8 * place[i])
    powers(values, alpha, SMALLEST, LARGEST, numbers, masses)
    sumtree_set(place, masses, starts, tree, sums, least, nodes)
    for i in range(found):
        raw[_at(place[i])] = values[i]
        raise_bound(place[i] >> paging.PAGE_BITS, values[i], bounds)
    return ids.size - found  # type: ignore[return-value]
