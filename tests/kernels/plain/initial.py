"""Plain twins of the kernels of `kernels.initial`."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Ints, locate
from diskreplay.kernels import packed
from diskreplay.kernels.frozen import OWN_FOLDER
from tests.kernels.plain.find_windows import row_address


def initial_priorities_plain(ids: Ints, origin: int, lanes: Ints, record: Ints, out: NDArray[np.float64]) -> int:
    """Do what `initial_priorities` does."""
    lane_base, folders, first_rows, *table = (packed.ints(record, i) for i in range(len(record)))
    known, slot, _, lane, row = locate(ids, origin, lanes)
    for i in range(len(ids)):
        out[i] = np.nan
        if not known[i] or table[2][folders[slot[i]]] < 0:
            continue
        first = int(first_rows[lane_base[slot[i]] + lane[i]])
        where = int(folders[slot[i]]), int(lane[i]) if first == OWN_FOLDER else 0, max(first, 0)
        at = row_address(where, int(row[i]), *table, 8)
        if not at:
            return i
        value = ctypes.c_double.from_address(at).value
        out[i] = value if 0 < value < np.inf else np.nan
    return -1
