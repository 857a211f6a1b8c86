"""Plain twins of the kernels of `kernels.powers`."""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.powers import _EXP, _EXPONENT, _LOG, _ROOT_OF_HALF, _ROUND, Floats


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
