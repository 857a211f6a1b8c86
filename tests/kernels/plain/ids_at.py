"""Plain twins of the kernels of `kernels.ids_at`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import mixed
from diskreplay.kernels import packed
from diskreplay.kernels.ids_at import Floats, Ints
from diskreplay.kernels.runs import BEFORE, BLOCK, FIRST, STRIDE


def fractions(key: int, count: int) -> NDArray[np.float64]:
    """Return what `fraction` does for each of the first `count` numbers."""
    state = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def ids_at_plain(positions: Floats, low: int, high: int, record: Ints, memory: Ints) -> None:
    """Do what `ids_at` does."""
    block = packed.ints2(record, BLOCK)
    at = positions.astype(np.int64) + block[BEFORE, low]
    run = np.searchsorted(block[BEFORE, low:high], at, side="right") - 1 + low
    memory[0] = block[FIRST, run] + (at - block[BEFORE, run]) * block[STRIDE, run]


def random_ids_plain(key: int, low: int, high: int, record: Ints, memory: Ints) -> None:
    """Do what `random_ids` does."""
    before = packed.ints2(record, BLOCK)[BEFORE]
    ids_at_plain(fractions(key, memory.shape[1]) * int(before[high] - before[low]), low, high, record, memory)
