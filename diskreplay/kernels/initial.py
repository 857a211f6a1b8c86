"""Prioritized replay: the initial priorities of steps, read in one call."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Ints

from . import jit
from .addresses import row_address

_FINITE = np.finfo(np.float64).max


@jit.kernel("int", "ints", "int", *["ints"] * 8, "out_floats", checked=False)
def initial_priorities(
    ids: Ints, origin: int, lanes: Ints, lane_base: Ints, folders: Ints, first_rows: Ints, first_chunk: Ints,
    chunks: Ints, shift: Ints, bases: Ints, out: NDArray[np.float64],
) -> int:  # fmt: skip
    """Write the initial priority of each step, |td|, NaN where none was given or its segment is gone.

    `lanes` are those of the segments from `origin` on; for `lane_base`, `folders` and `first_rows` see `frozen`. The
    rest is of the table of their array, where a shift below 0 says that a folder has none. Returns the place of the
    first id whose chunk is not mapped, else -1.
    """
    for i in range(ids.size):
        out[i] = np.nan
        slot = (ids[i] >> POSITION_BITS) - origin
        width = lanes[slot] if 0 <= slot < lanes.size else 0
        folder = folders[slot] if width > 0 else 0
        if width <= 0 or shift[folder] < 0:
            continue
        row = (ids[i] & POSITION_MASK) // width
        lane = (ids[i] & POSITION_MASK) - row * width
        first = first_rows[lane_base[slot] + lane]
        address = row_address(folder, first, lane, row, 8, first_chunk, chunks, shift, bases)
        if address == 0:
            return i
        value = jit.load_float64(address)
        if 0.0 < value <= _FINITE:  # anything else is damage
            out[i] = value
    return -1
