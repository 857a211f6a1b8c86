"""Plain twins of the kernels of `kernels.ids_at`."""

import numpy as np

from diskreplay.kernels import packed
from diskreplay.kernels.ids_at import Floats, Ints
from diskreplay.kernels.runs import BEFORE, BLOCK, FIRST, STRIDE
from tests.kernels.plain.mix import fractions


def ids_at_plain(positions: Floats, low: int, high: int, record: Ints, out: Ints) -> None:
    """Do what `ids_at` does."""
    block = packed.ints2(record, BLOCK)
    at = positions.astype(np.int64) + block[BEFORE, low]
    run = np.searchsorted(block[BEFORE, low:high], at, side="right") - 1 + low
    out[:] = block[FIRST, run] + (at - block[BEFORE, run]) * block[STRIDE, run]


def random_ids_plain(key: int, low: int, high: int, record: Ints, out: Ints) -> None:
    """Do what `random_ids` does."""
    before = packed.ints2(record, BLOCK)[BEFORE]
    ids_at_plain(fractions(key, len(out)) * int(before[high] - before[low]), low, high, record, out)
