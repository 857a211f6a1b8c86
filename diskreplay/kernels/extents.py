"""Extents: runs of ids whose numbers, from 0 on, stand for places.

An extent is a line of a table, as long as a cache line: id first + j * stride has number j and place base + j, and
`low` <= j < `high` can be drawn.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK
from diskreplay.kernels import jit
from diskreplay.kernels.runs import lane_keys

Ints = NDArray[np.int64]

COLUMNS = ("first", "stride", "base", "room", "known", "low", "high", "zero")
FIRST, STRIDE, BASE, ROOM, KNOWN, LOW, HIGH, ZERO = range(8)


@jit.kernel(
    "none", "ints", "int", "ints", "ints", "ints", "ints2", "int", "int", "out_ints", "out_ints", "out_ints",
    "out_ints", checked=False
)  # fmt: skip
def locate(
    ids: Ints, origin: int, lanes: Ints, keys: Ints, at: Ints, table: Ints, low: int, high: int,
    key: Ints, place: Ints, extent: Ints, number: Ints,
) -> None:  # fmt: skip
    """Find the extent, and the number in it, of each id; what is not found keeps its `extent`.

    Numbers from that in column `low` to below that in column `high` count. `at` holds extents in the order of their
    `keys`: see `lane_keys`. In this order they do not overlap. `key` and `place` are scratch memory, a number an id.
    """
    for i in range(ids.size):
        place[i] = 0
        slot = (ids[i] >> POSITION_BITS) - origin
        width = lanes[slot] if 0 <= slot < lanes.size else 0
        key[i] = ids[i] if width == 1 else -1
        if width > 1:
            position = ids[i] & POSITION_MASK
            row = position // width
            key[i] = ids[i] - position + (position - row * width) * (POSITION_MASK // width) + row
    # Halving steps of one width for all ids: cache misses overlap.
    size = keys.size
    while size > 1:
        half = size >> 1
        for i in range(ids.size):
            place[i] += half * (keys[np.uint64(place[i] + half)] <= key[i])
        size -= half
    for i in range(ids.size if keys.size else 0):
        found = np.uint64(at[np.uint64(place[i])])
        distance, stride = ids[i] - table[found, FIRST], table[found, STRIDE]
        j = distance // stride
        within = table[found, low] <= j < table[found, high] and j * stride == distance
        if within and 0 <= keys[np.uint64(place[i])] <= key[i]:
            extent[i] = found
            number[i] = j


def locate_plain(
    ids: Ints, origin: int, lanes: Ints, keys: Ints, at: Ints, table: Ints, low: int, high: int,
    key: Ints, place: Ints, extent: Ints, number: Ints,
) -> None:  # fmt: skip
    """Do what `locate` does."""
    if not len(keys):
        return
    key[:] = lane_keys(ids, origin, lanes)
    place[:] = np.searchsorted(keys, key, side="right") - 1
    found = at[np.maximum(place, 0)]
    j, between = np.divmod(ids - table[found, FIRST], table[found, STRIDE])
    good = (key >= 0) & (place >= 0) & (between == 0) & (table[found, low] <= j) & (j < table[found, high])
    extent[good], number[good] = found[good], j[good]
