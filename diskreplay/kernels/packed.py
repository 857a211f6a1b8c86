"""A record passes many arrays to a kernel as one argument, since each argument of a call costs up to 0.1 µs.

A record has the address and shape of each array. It has no types: the kernel must know them. The caller keeps the
arrays alive.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints

from . import jit
from .frozen import OWN_FOLDER

Ints32 = NDArray[np.int32]

ADDRESS, LINES, COLUMNS = range(3)


def pack(*arrays: NDArray[np.generic]) -> Ints:
    """Return the record, (n, 3): ADDRESS, LINES and COLUMNS of n contiguous arrays of one or two dimensions."""
    return np.array([(a.ctypes.data, len(a), a.shape[-1]) for a in arrays], np.int64)


@jit.inner
def ints(record: Ints, i: int) -> Ints:
    return jit.ints_at(record[i, ADDRESS], record[i, LINES])


@jit.inner
def ints2(record: Ints, i: int) -> Ints:
    return jit.ints2_at(record[i, ADDRESS], record[i, LINES], record[i, COLUMNS])


@jit.inner
def ints32(record: Ints, i: int) -> Ints32:
    return jit.carray(jit.pointer(record[i, ADDRESS]), (record[i, LINES],), np.int32)


@jit.inner
def floats(record: Ints, i: int) -> Floats:
    return jit.carray(jit.pointer(record[i, ADDRESS]), (record[i, LINES],), np.float64)


@jit.inner
def number(record: Ints, i: int, j: int) -> int:
    return jit.load_int(record[i, ADDRESS] + 8 * j)


FIRST_CHUNK, CHUNKS, SHIFT, BASES = range(4)
"""The arrays of a chunk table (see `following.Chunks`) in a record, numbered from the line of the first array."""


@jit.inner
def row_address(record: Ints, table: int, folder: int, first: int, lane: int, row: int) -> int:
    """Return the address of a row in an array with 8 bytes per row, or 0 if the row is not mapped.

    The array's chunk table, see `following.Chunks`, begins at line `table` of the record. `first` is the lane's value
    in `frozen.FIRST_ROWS`.
    """
    is_own = first == OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, first), jit.either(is_own, lane, 0)
    bits = number(record, table + SHIFT, folder)
    chunk = row >> bits
    if chunk >= number(record, table + CHUNKS, folder):
        return 0
    base = number(record, table + BASES, number(record, table + FIRST_CHUNK, folder) + chunk)
    return base + 8 * ((lane << bits) + (row & ((1 << bits) - 1))) if base != 0 else 0
