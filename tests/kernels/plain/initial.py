"""Plain twins of the kernels of `kernels.initial`."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import locate
from diskreplay.kernels.initial import Ints


def initial_priorities_plain(
    ids: Ints, origin: int, lanes: Ints, first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints,
    out: NDArray[np.float64],
) -> int:  # fmt: skip
    """Do what `initial_priorities` does."""
    known, slot, _, lane, row = locate(ids, origin, lanes)
    for i in range(len(ids)):
        out[i] = np.nan
        if not known[i] or shift[slot[i]] < 0:
            continue
        per_chunk = 1 << int(shift[slot[i]])
        chunk, within = divmod(int(row[i]), per_chunk)
        if chunk >= chunks[slot[i]] or bases[first_chunk[slot[i]] + chunk] == 0:
            return i
        at = int(bases[first_chunk[slot[i]] + chunk]) + 8 * (int(lane[i]) * per_chunk + within)
        value = ctypes.c_double.from_address(at).value
        out[i] = value if 0 < value < np.inf else np.nan
    return -1
