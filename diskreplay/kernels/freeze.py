"""Make the record of a snapshot, and read it: see `frozen`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import following, jit
from diskreplay.kernels.frozen import (
    ALL_LANES,
    HEAD,
    LANE_BASE,
    LIVE,
    LIVE_BASE,
    LIVE_LANES,
    OLDEST,
    REACHED,
    ROWS,
)
from diskreplay.kernels.jit import copy_bytes, load_int

Ints = NDArray[np.int64]


@jit.kernel("none", "ints2", "ints2", "ints", "int", "ints", "out_ints")
def freeze(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Write the record of a snapshot: its head, and what is known of the lanes of the segments that may grow.

    `growing` and `rows` are those of `follow`, `oldest` the first row of each lane that is not hidden: none of
    an episode that began at `reached` or later.
    """
    for column in range(HEAD):
        record[column] = head[column]
    record[REACHED] = reached
    record[ALL_LANES], record[OLDEST], record[ROWS] = rows.shape[1], oldest.ctypes.data, rows.ctypes.data
    record[LIVE] = record.ctypes.data + 8 * HEAD
    at = record[LIVE]
    for which in range(growing.shape[0]):
        place, count = growing[which, following.PLACE], 8 * growing[which, following.LANES]
        for row in range(following.LANE_ROWS):
            source = record[ROWS] + 8 * (row * rows.shape[1] + place)
            copy_bytes(at + 8 * row * head[LIVE_LANES], source, count)
        at += count


@jit.kernel("int", "int", "int", "int", "ints", inner=True, inlined=True)
def rows_of(which: int, slot: int, lane: int, record: Ints) -> int:
    """Return how many rows of a lane were followed: `following.COMMITTED` or `OBSERVED` ones."""
    column = load_int(record[LIVE_BASE] + 8 * slot)
    if column >= 0:
        return load_int(record[LIVE] + 8 * (which * record[LIVE_LANES] + column + lane))
    place = load_int(record[LANE_BASE] + 8 * slot) + lane
    return load_int(record[ROWS] + 8 * (which * record[ALL_LANES] + place))
