"""Plain twins of the kernels of `kernels.sumtree`."""

import math
from typing import Any

import numpy as np

from diskreplay.kernels.sumtree import _BELOW, FAN_OUT, FAN_OUT_BITS, Floats, Ints


def sumtree_set_plain(
    leaves: Ints, values: Floats, starts: Ints, tree: Floats, sums: Floats, least: Floats, changed: Ints
) -> None:
    """Do what `sumtree_set` does."""
    tree[leaves] = values
    nodes = np.asarray(leaves)
    for level in range(1, len(starts) - 1):
        below, here = int(starts[level - 1]), int(starts[level])
        nodes = np.unique(nodes >> FAN_OUT_BITS)
        children = below + (nodes[:, None] << FAN_OUT_BITS) + np.arange(FAN_OUT)
        tree[here + nodes] = np.cumsum(tree[children], axis=1)[:, -1]  # cumsum adds from left to right, sum does not
        if len(least):
            mass = tree[children] if level == 1 else least[children - starts[1]]
            least[here + nodes - starts[1]] = _smallest_plain(mass)
    top = tree[starts[-2] :]
    np.cumsum(top, out=sums[1:])
    if len(least):
        mass = top if len(starts) == 2 else least[starts[-2] - starts[1] : -1]
        least[-1] = _smallest_plain(mass)


def _smallest_plain(mass: Floats) -> Any:
    smallest = np.where(mass > 0, mass, math.inf).min(axis=-1)
    return np.where(smallest < math.inf, smallest, 0.0)


def sumtree_find_plain(
    starts: Ints, tree: Floats, sums: Floats, notes: Ints, mass: Floats, leaves: Ints, some: Floats
) -> None:
    """Do what `sumtree_find` does."""
    sought = np.clip(mass, 0.0, sums[-1] * _BELOW)
    at = np.searchsorted(sums[:-1], sought, side="right") - 1
    sought = np.minimum(sought - sums[at], tree[starts[-2] + at] * _BELOW)
    for start in starts[-3::-1]:
        first = start + (at << FAN_OUT_BITS)
        totals = np.cumsum(tree[first[:, None] + np.arange(FAN_OUT - 1)], axis=1)
        child = (totals <= sought[:, None]).sum(axis=1)
        before = np.where(child > 0, np.take_along_axis(totals, np.maximum(child - 1, 0)[:, None], 1)[:, 0], 0.0)
        at = (at << FAN_OUT_BITS) + child
        sought = np.minimum(sought - before, tree[first + child] * _BELOW)
    leaves[:] = at
    mass[:] = tree[at]
