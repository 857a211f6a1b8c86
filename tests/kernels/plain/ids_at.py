"""Plain twins of the kernels of `kernels.ids_at`."""

import numpy as np

from diskreplay.kernels.ids_at import Floats, Ints
from diskreplay.kernels.runs import BEFORE, FIRST, STRIDE
from tests.kernels.plain.mix import fractions


def ids_at_plain(positions: Floats, low: int, high: int, block: Ints, coarse: Ints, wanted: Ints, out: Ints) -> None:
    """Do what `ids_at` does."""
    at = positions.astype(np.int64) + block[BEFORE, low]
    run = np.searchsorted(block[BEFORE, low:high], at, side="right") - 1 + low
    out[:] = block[FIRST, run] + (at - block[BEFORE, run]) * block[STRIDE, run]


def random_ids_plain(key: int, low: int, high: int, block: Ints, coarse: Ints, wanted: Ints, out: Ints) -> None:
    """Do what `random_ids` does."""
    count = int(block[BEFORE, high] - block[BEFORE, low])
    ids_at_plain(fractions(key, len(out)) * count, low, high, block, coarse, wanted, out)
