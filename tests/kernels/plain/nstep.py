"""Plain twins of the kernels of `kernels.nstep`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.nstep import Floats, Ints


def nstep_plain(
    r: Floats,
    start: int,
    k: Ints,
    ends: NDArray[np.uint8],
    gamma: float,
    total: Floats,
    scale: Floats,
    reward: NDArray[np.float32],
    discount: NDArray[np.float32],
    terminated: NDArray[np.bool_],
    truncated: NDArray[np.bool_],
) -> None:
    """Do what `nstep` does, one column of all windows after the other."""
    if start == 0:
        total[:], scale[:] = 0.0, 1.0
    for j in range(r.shape[1]):
        inside = start + j < k
        total[inside] += scale[inside] * r[inside, j]
        scale[inside] *= gamma
    with np.errstate(over="ignore"):
        reward[:] = total
        discount[:] = np.where(ends & 1, 0.0, scale)
    terminated[:] = ends & 1 != 0
    truncated[:] = ends & 2 != 0
