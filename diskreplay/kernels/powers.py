"""Powers of many positive numbers at once: priorities and weights.

x ** y is 2 ** (y * log2 x), both from their power series, which the compiler turns into vector code; a call of libm for
each number takes three times as long. A result y * log2 x bits above 1 is off by at most about that many units in the
last place, and is the same on every machine.

With x = m * 2 ** e and m from sqrt(1/2) to sqrt(2), log2 x = e + 2 / ln 2 * (s + s ** 3 / 3 + s ** 5 / 5 + ...), where
s = (m - 1) / (m + 1); what is left out is below 2 ** -54 of it. 2 ** p = 2 ** n * exp(f ln 2) with n the whole number
nearest to p, f = p - n, and the series of exp.
"""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats

from . import jit
from .jit import bits_of, number_of

# Highest power first, for Horner's scheme.
_LOG = tuple(2.0 / math.log(2.0) / (2 * k + 1) for k in range(10, -1, -1))
_EXP = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
_LOG_FIRST, _LOG_REST = _LOG[0], _LOG[1:]
_EXP_FIRST, _EXP_REST = _EXP[0], _EXP[1:]
_ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
_EXPONENT = 52  # the bit where it starts
# Masses lie between two to these: sums of 1e17 of them are finite, and none is lost to denormal numbers.
SMALLEST, LARGEST = -963.0, 963.0
# Added to a number of less than 2 ** 51, it leaves the nearest whole number in the lowest bits.
_ROUND = 1.5 * 2.0**52


@jit.kernel("none", "floats", "float", "float", "float", "out_floats", "out_floats", shared=True)
def powers(values: Floats, exponent: float, low: float, high: float, numbers: Floats, out: Floats) -> None:
    """Raise positive values to a power, and keep the results from 2 ** low to 2 ** high; -1022 <= low <= high <= 1023.

    `numbers` is scratch memory of the same length; none of the three shares any.
    """
    for i in range(values.size):
        bits = bits_of(values[i])
        e = (bits - _ROOT_OF_HALF) >> _EXPONENT
        numbers[i] = number_of(bits - (e << _EXPONENT))
        out[i] = np.float64(e)
    for i in range(values.size):
        s = (numbers[i] - 1.0) / (numbers[i] + 1.0)
        square = s * s
        series = _LOG_FIRST
        for a in _LOG_REST:
            series = series * square + a
        p = exponent * (out[i] + series * s)
        p = p if p > low else low
        p = p if p < high else high
        numbers[i] = p + _ROUND
        f = p - (numbers[i] - _ROUND)
        series = _EXP_FIRST
        for a in _EXP_REST:
            series = series * f + a
        out[i] = series
    for i in range(values.size):
        out[i] = number_of(bits_of(out[i]) + (bits_of(numbers[i]) << _EXPONENT))


@jit.kernel("none", "floats", "float", "float", "out_floats2", "out_floats32")
def weights(chances: Floats, least: float, exponent: float, scratch: Floats, out: NDArray[np.float32]) -> None:
    """Write (least / chance) ** exponent, at most 1; `least` 0 is the smallest of these chances, NaN aside.

    `scratch` is memory, (3, n).
    """
    if least == 0.0:
        # Positive numbers are in the order of their bits, and the compiler may take the least of these eight at a time.
        bits = np.uint64(bits_of(math.inf))
        for i in range(chances.size):
            mine = np.uint64(bits_of(chances[i]))
            bits = mine if mine < bits else bits
        least = number_of(int(bits))
    ratios, numbers, found = scratch[0], scratch[1], scratch[2]
    for i in range(chances.size):
        ratios[i] = least / chances[i]
    powers(ratios, exponent, -1022.0, 0.0, numbers, found)
    for i in range(chances.size):
        out[i] = np.float32(found[i])
