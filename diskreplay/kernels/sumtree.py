"""A tree of sums with 16 children a node: leaves drawn in proportion to their mass, and found by id.

`tree` holds all levels one after the other, the leaves first: level l is tree[starts[l] : starts[l + 1]], and node i of
level l + 1 is the sum of the 16 entries from 16 * i on of level l, added from left to right. The last level is the root
alone. Levels are padded with zeros to a multiple of 16. `least`, which may be empty, holds the smallest mass that is
not zero below each inner node, at the node's place in the tree less starts[1].

A node is always added up anew from its children, so no rounding error outlives the next update. A search compares with
the same partial sums that made the node: while what it looks for is less than the node's sum, the child it takes
has a mass above zero. Clamping to the largest number below a child's mass keeps that true after the subtraction.
"""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.runs import SEGMENT_SHIFT, WITHIN_SEGMENT, lane_keys

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FAN_OUT = 16
_BITS = 4
# Times any normal number: a little less than that number.
_BELOW = 1.0 - 2.0**-52


def tree_starts(capacity: int) -> Ints:
    """Return where the levels of a tree with room for `capacity` leaves start, and its length."""
    starts = [0]
    nodes = max(capacity, 1)
    while nodes > 1:
        starts.append(starts[-1] + -(-nodes // FAN_OUT) * FAN_OUT)
        nodes = -(-nodes // FAN_OUT)
    if len(starts) == 1:  # a single leaf still has a root
        starts.append(FAN_OUT)
    return np.array([*starts, starts[-1] + 1], np.int64)


@jit.kernel("none", "ints", "floats", "ints", "out_floats", "out_floats")
def sumtree_set(leaves: Ints, values: Floats, starts: Ints, tree: Floats, least: Floats) -> None:
    """Give leaves their masses, the last one where a leaf is named twice, and add up the nodes above them."""
    for i in range(leaves.size):
        tree[leaves[i]] = values[i]
    for level in range(1, starts.size - 1):
        below, here, shift = starts[level - 1], starts[level], np.int64(level * _BITS)
        nodes = (here - below) >> _BITS
        every = leaves.size >= nodes
        previous = np.int64(-1)
        for i in range(nodes if every else leaves.size):
            node = np.int64(i) if every else leaves[i] >> shift
            if node == previous:
                continue
            previous = node
            child = below + (node << _BITS)
            total = 0.0
            for k in range(FAN_OUT):
                total += tree[np.uint64(child + k)]
            tree[np.uint64(here + node)] = total
            if least.size:
                smallest = math.inf
                if level == 1:
                    for k in range(FAN_OUT):
                        mass = tree[np.uint64(child + k)]
                        mass = mass if mass > 0.0 else math.inf
                        smallest = mass if mass < smallest else smallest
                else:
                    for k in range(FAN_OUT):
                        mass = least[np.uint64(child + k - starts[1])]
                        smallest = mass if mass < smallest else smallest
                least[np.uint64(here + node - starts[1])] = smallest


def sumtree_set_plain(leaves: Ints, values: Floats, starts: Ints, tree: Floats, least: Floats) -> None:
    """Do what `sumtree_set` does."""
    tree[leaves] = values
    nodes = np.asarray(leaves)
    for level in range(1, len(starts) - 1):
        below, here = int(starts[level - 1]), int(starts[level])
        nodes = np.unique(nodes >> _BITS)
        children = below + (nodes[:, None] << _BITS) + np.arange(FAN_OUT)
        tree[here + nodes] = np.cumsum(tree[children], axis=1)[:, -1]  # cumsum adds from left to right, sum does not
        if len(least):
            mass = tree[children] if level == 1 else least[children - starts[1]]
            least[here + nodes - starts[1]] = np.where(mass > 0, mass, math.inf).min(axis=1)


@jit.kernel("none", "ints", "floats", "out_floats", "out_ints")
def sumtree_find(starts: Ints, tree: Floats, mass: Floats, leaves: Ints) -> None:
    """Find the leaf at each cumulated mass from 0 to the total; `mass` is overwritten with the leaf's own.

    Level by level for all at once, without a branch on data: cache misses overlap. The total must not be 0.
    """
    below_total = tree[starts[starts.size - 2]] * _BELOW
    for i in range(mass.size):
        leaves[i] = 0
        mass[i] = min(max(mass[i], 0.0), below_total)
    address = tree.ctypes.data
    sums = np.zeros(FAN_OUT)  # before each child
    for level in range(starts.size - 3, -1, -1):
        start = starts[level]
        below = address + 8 * starts[max(level - 1, 0)]
        for i in range(mass.size):
            first = np.uint64(start + (leaves[i] << _BITS))
            total = 0.0
            for k in range(FAN_OUT - 1):
                total += tree[first + np.uint64(k)]
                sums[np.uint64(k + 1)] = total
            child = np.uint64(0)
            for k in range(1, FAN_OUT):
                child += np.uint64(sums[np.uint64(k)] <= mass[i])
            node = (leaves[i] << _BITS) + np.int64(child)
            leaves[i] = node
            jit.prefetch(below + (node << (_BITS + 3)))
            jit.prefetch(below + (node << (_BITS + 3)) + 64)
            left, most = mass[i] - sums[child], tree[first + child] * _BELOW
            mass[i] = left if left < most else most
    for i in range(mass.size):
        mass[i] = tree[np.uint64(leaves[i])]


def sumtree_find_plain(starts: Ints, tree: Floats, mass: Floats, leaves: Ints) -> None:
    """Do what `sumtree_find` does."""
    sought = np.clip(mass, 0.0, tree[starts[-2]] * _BELOW)
    at = np.zeros(len(mass), np.int64)
    for start in starts[-3::-1]:
        first = start + (at << _BITS)
        totals = np.cumsum(tree[first[:, None] + np.arange(FAN_OUT - 1)], axis=1)
        child = (totals <= sought[:, None]).sum(axis=1)
        before = np.where(child > 0, np.take_along_axis(totals, np.maximum(child - 1, 0)[:, None], 1)[:, 0], 0.0)
        at = (at << _BITS) + child
        sought = np.minimum(sought - before, tree[first + child] * _BELOW)
    leaves[:] = at
    mass[:] = tree[at]


@jit.kernel("none", "floats", "float", "float", "float", "out_floats")
def powers(values: Floats, exponent: float, least: float, most: float, out: Floats) -> None:
    """Raise positive values to a power, and keep the results within limits."""
    for i in range(values.size):
        power = values[i] ** exponent
        power = power if power > least else least
        out[i] = power if power < most else most


def powers_plain(values: Floats, exponent: float, least: float, most: float, out: Floats) -> None:
    """Do what `powers` does, to the last bit or nearly."""
    with np.errstate(over="ignore", under="ignore"):
        np.clip(values**exponent, least, most, out=out)


@jit.kernel(
    "none", "ints", "int", "ints", "ints", "ints", "ints", "ints", "ints", "ints", "out_ints", "out_ints"
)  # fmt: skip
def locate(
    ids: Ints, origin: int, lanes: Ints, keys: Ints, at: Ints, first: Ints, stride: Ints, low: Ints, high: Ints,
    extent: Ints, number: Ints,
) -> None:  # fmt: skip
    """Find the extent, and the number in it, of each id; what is not found keeps its `extent`.

    An extent is a run of ids: id first + j * stride has number j, and low <= j < high are those that count. `at` holds
    extents in the order of their `keys`: see `lane_keys`. In this order they do not overlap.
    """
    key, place = np.empty(ids.size, np.int64), np.zeros(ids.size, np.int64)
    for i in range(ids.size):
        slot = (ids[i] >> SEGMENT_SHIFT) - origin
        width = lanes[slot] if 0 <= slot < lanes.size else 0
        key[i] = -1
        if width > 0:
            position = ids[i] & WITHIN_SEGMENT
            row = position // width
            key[i] = ids[i] - position + (position - row * width) * (WITHIN_SEGMENT // width) + row
    # Halving steps of one width for all ids: cache misses overlap.
    size = keys.size
    while size > 1:
        half = size >> 1
        for i in range(ids.size):
            place[i] += half * (keys[np.uint64(place[i] + half)] <= key[i])
        size -= half
    for i in range(ids.size if keys.size else 0):
        found = np.uint64(at[np.uint64(place[i])])
        distance = ids[i] - first[found]
        j = distance // stride[found]
        within = low[found] <= j < high[found] and j * stride[found] == distance
        if within and 0 <= keys[np.uint64(place[i])] <= key[i]:
            extent[i] = found
            number[i] = j


def locate_plain(
    ids: Ints, origin: int, lanes: Ints, keys: Ints, at: Ints, first: Ints, stride: Ints, low: Ints, high: Ints,
    extent: Ints, number: Ints,
) -> None:  # fmt: skip
    """Do what `locate` does."""
    if not len(keys):
        return
    key = lane_keys(ids, origin, lanes)
    place = np.searchsorted(keys, key, side="right") - 1
    found = at[np.maximum(place, 0)]
    j, between = np.divmod(ids - first[found], stride[found])
    good = (key >= 0) & (place >= 0) & (between == 0) & (low[found] <= j) & (j < high[found])
    extent[good], number[good] = found[good], j[good]
