"""From positions in a population to ids: a search among the runs' cumulative counts."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit
from diskreplay.kernels.runs import BEFORE, FIRST, STRIDE

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@jit.kernel("none", "floats", "float", "int", "int", "ints2", "out_ints", "out_ints")
def pick(positions: Floats, scale: float, low: int, high: int, block: Ints, wanted: Ints, out: Ints) -> None:
    """Write the id at the whole part of each position times `scale`.

    Runs `low` to `high` of the block count, and run i starts at position before[i] - before[low].

    Halving steps of one width for all positions, without a branch on data: cache misses overlap, and the inner loop
    becomes vector code. Unsigned indices, because numba tests a signed one for being negative. ``wanted`` is scratch
    memory, a number a position.
    """
    before, first, stride = block[BEFORE], block[FIRST], block[STRIDE]
    for i in range(positions.size):
        wanted[i] = np.int64(positions[i] * scale) + before[low]
        out[i] = low
    width = high - low
    while width > 1:
        half = width >> 1
        for i in range(positions.size):
            out[i] += half * (before[np.uint64(out[i] + half)] <= wanted[i])
        width -= half
    for i in range(positions.size):
        run = np.uint64(out[i])
        out[i] = first[run] + (wanted[i] - before[run]) * stride[run]


def pick_plain(positions: Floats, scale: float, low: int, high: int, block: Ints, wanted: Ints, out: Ints) -> None:
    """Do what `pick` does."""
    at = (positions * scale).astype(np.int64) + block[BEFORE, low]
    run = np.searchsorted(block[BEFORE, low:high], at, side="right") - 1 + low
    out[:] = block[FIRST, run] + (at - block[BEFORE, run]) * block[STRIDE, run]
