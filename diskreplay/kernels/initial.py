"""Prioritized replay: the initial priorities of steps, read in one call."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Ints

from . import addresses, jit
from .packed import number
from .pages import width_of

_FINITE = np.finfo(np.float64).max

LANE_BASE, FOLDERS, FIRST_ROWS, TABLE = range(4)
"""The record of what `initial_priorities` reads, see `packed`: for the first three see `frozen`, then comes the table
of the array of priorities, see `addresses`."""


@jit.kernel("int", "ints", "int", "ints", "ints2", "out_floats")
def initial_priorities(ids: Ints, origin: int, lanes: Ints, record: Ints, out: NDArray[np.float64]) -> int:
    """Write the initial priority of each step, |td|, NaN where none was given or its segment is gone.

    `lanes` are those of the segments from `origin` on; a shift of the table below 0 says that a folder has no
    priorities. Returns the place of the first id whose chunk is not mapped, else -1.
    """
    for i in range(ids.size):
        out[i] = np.nan
        slot, position = (ids[i] >> POSITION_BITS) - origin, ids[i] & POSITION_MASK
        width = width_of(ids[i], origin, lanes)
        folder = number(record, FOLDERS, slot) if width > 0 else 0
        if width <= 0 or number(record, TABLE + addresses.SHIFT, folder) < 0:
            continue
        row = position // width
        lane = position - row * width
        first = number(record, FIRST_ROWS, number(record, LANE_BASE, slot) + lane)
        address = addresses.row_address(record, TABLE, folder, first, lane, row)
        if address == 0:
            return i
        value = jit.load_float64(address)
        if 0.0 < value <= _FINITE:  # anything else is damage
            out[i] = value
    return -1
