"""Plain twins of the kernels of `kernels.ids_at`."""

import numpy as np

from diskreplay.ids import mixed
from diskreplay.kernels.ids_at import Floats, Ints
from diskreplay.kernels.runs import BEFORE, FIRST, STRIDE


def ids_at_plain(positions: Floats, low: int, high: int, block: Ints, coarse: Ints, wanted: Ints, out: Ints) -> None:
    """Do what `ids_at` does."""
    at = positions.astype(np.int64) + block[BEFORE, low]
    run = np.searchsorted(block[BEFORE, low:high], at, side="right") - 1 + low
    out[:] = block[FIRST, run] + (at - block[BEFORE, run]) * block[STRIDE, run]


def random_ids_plain(key: int, low: int, high: int, block: Ints, coarse: Ints, wanted: Ints, out: Ints) -> None:
    """Do what `random_ids` does."""
    state = np.uint64(key) + np.arange(1, len(out) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    scale = int(block[BEFORE, high] - block[BEFORE, low]) * 2.0**-53
    ids_at_plain((mixed(state) >> np.uint64(11)).astype(np.float64) * scale, low, high, block, coarse, wanted, out)
