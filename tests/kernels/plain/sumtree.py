"""Plain twins of the kernels of `kernels.sumtree`."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.sumtree import (
    _BELOW,
    _EXP,
    _EXPONENT,
    _LOG,
    _ROOT_OF_HALF,
    _ROUND,
    FAN_OUT,
    FAN_OUT_BITS,
    Floats,
    Ints,
)


def powers_plain(values: Floats, exponent: float, low: float, high: float, numbers: Floats, out: Floats) -> None:
    """Do what `powers` does, bit for bit."""
    bits = np.ascontiguousarray(values).view(np.int64)
    e = (bits - _ROOT_OF_HALF) >> _EXPONENT
    m = (bits - (e << _EXPONENT)).view(np.float64)
    s = (m - 1.0) / (m + 1.0)
    p = np.clip(exponent * (e + _horner(_LOG, s * s) * s), low, high)
    rounded = p + _ROUND
    result = _horner(_EXP, p - (rounded - _ROUND))
    out[:] = (result.view(np.int64) + (rounded.view(np.int64) << _EXPONENT)).view(np.float64)


def _horner(coefficients: tuple[float, ...], x: Floats) -> Floats:
    series = np.full(len(x), coefficients[0])
    for a in coefficients[1:]:
        series = series * x + a
    return series


def weights_plain(chances: Floats, least: float, exponent: float, scratch: Floats, out: NDArray[np.float32]) -> None:
    """Do what `weights` does, bit for bit."""
    ratios = (least or np.fmin.reduce(chances, initial=math.inf)) / chances
    powers_plain(ratios, exponent, -1022.0, 0.0, scratch[1], scratch[2])
    out[:] = scratch[2]


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
