"""Arrays of a kernel in one record, for kernels that are called at every batch: an argument costs up to 0.1 µs.

Whoever makes the record keeps the arrays alive. The types are those that the kernel takes for granted.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints

from . import jit

Ints32 = NDArray[np.int32]

ADDRESS, LINES, COLUMNS = range(3)


def pack(*arrays: NDArray[np.generic]) -> Ints:
    """Return the record of contiguous arrays of one or two dimensions, a line each."""
    return np.array([(a.ctypes.data, len(a), a.shape[-1]) for a in arrays], np.int64)


@jit.inner
def ints(record: Ints, i: int) -> Ints:
    """Return array `i`: int64."""
    return jit.ints_at(record[i, ADDRESS], record[i, LINES])


@jit.inner
def ints2(record: Ints, i: int) -> Ints:
    """Return array `i`: int64, two dimensions."""
    return jit.ints2_at(record[i, ADDRESS], record[i, LINES], record[i, COLUMNS])


@jit.inner
def ints32(record: Ints, i: int) -> Ints32:
    """Return array `i`: int32."""
    return jit.carray(jit.pointer(record[i, ADDRESS]), (record[i, LINES],), np.int32)


@jit.inner
def floats(record: Ints, i: int) -> Floats:
    """Return array `i`: float64."""
    return jit.carray(jit.pointer(record[i, ADDRESS]), (record[i, LINES],), np.float64)


@jit.inner
def number(record: Ints, i: int, j: int) -> int:
    """Return number `j` of array `i`: int64, of one dimension."""
    return jit.load_int(record[i, ADDRESS] + 8 * j)
