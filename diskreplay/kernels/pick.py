"""From positions in a population to ids: a search among the runs' cumulative counts."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit

Ints = NDArray[np.int64]


@jit.kernel("none", "ints", "int", "int", "ints", "ints", "ints", "out_ints")
def pick(positions: Ints, low: int, high: int, before: Ints, first: Ints, stride: Ints, out: Ints) -> None:
    """Write the id at each position; runs `low` to `high` count, and run i starts at position before[i] - before[low].

    Halving steps of one width for all positions, without a branch on data: cache misses overlap, and the inner loop
    becomes vector code. Unsigned indices, because numba tests a signed one for being negative.
    """
    shift = before[low]
    for i in range(positions.size):
        out[i] = low
    width = high - low
    while width > 1:
        half = width >> 1
        for i in range(positions.size):
            out[i] += half * (before[np.uint64(out[i] + half)] <= positions[i] + shift)
        width -= half
    for i in range(positions.size):
        run = np.uint64(out[i])
        out[i] = first[run] + (positions[i] + shift - before[run]) * stride[run]


def pick_plain(positions: Ints, low: int, high: int, before: Ints, first: Ints, stride: Ints, out: Ints) -> None:
    """Do what `pick` does."""
    at = positions + before[low]
    run = np.searchsorted(before[low:high], at, side="right") - 1 + low
    out[:] = first[run] + (at - before[run]) * stride[run]
