"""Hashes of single numbers, `ids.mixed` compiled, and the random numbers that they make."""

import numpy as np

from diskreplay.ids import mixed

from . import jit

mix = jit.inner(mixed)


@jit.inner
def fraction(key: int, i: int) -> float:
    """Return random number `i` from 0 to below 1: the first 53 bits of number `i` of splitmix64 from the state `key`.

    Steele et al. 2014.
    """
    number = mix(np.uint64(key) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))
    return float(np.int64(number >> np.uint64(11)) * 2.0**-53)
