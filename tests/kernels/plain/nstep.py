"""The plain twin of `kernels.nstep`, and what `gather` sums, one column of all windows after the other."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints


def nstep_plain(r: Floats, k: Ints, gamma: float, reward: NDArray[np.float32]) -> None:
    """Do what `nstep` does."""
    unused = (np.empty(len(k), dtype) for dtype in ("f4", "?", "?"))
    sum_windows(r, k, np.zeros(len(k), np.uint8), np.full(r.shape, gamma), reward, *unused)


def sum_windows(
    r: Floats,
    k: Ints,
    ends: NDArray[np.uint8],
    gamma: Floats,
    reward: NDArray[np.float32],
    discount: NDArray[np.float32],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
) -> None:
    """Write the returns of the first `k` rewards of each line of `r`, discounted step by step, and how windows end."""
    total, scale = np.zeros(len(k)), np.ones(len(k))
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(r.shape[1]):
            inside = j < k
            total[inside] += scale[inside] * r[inside, j]
            scale[inside] *= gamma[inside, j]
        reward[:] = total
        discount[:] = np.where(ends & 1, 0.0, scale)
    terminated[:] = ends & 1 != 0
    truncated[:] = ends & 2 != 0
