"""n-step returns: sums in float64, rounded once to float32 (Sutton & Barto, Reinforcement Learning, 2nd ed., 7.1)."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@jit.kernel(
    "none", "floats2", "int", "ints", "bytes", "float", "out_floats", "out_floats",
    "out_floats32", "out_floats32", "out_bools", "out_bools",
)  # fmt: skip
def nstep(
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
    """Add the rewards `r` (items, width) of steps start, start + 1, ... to the returns of windows of `k` steps.

    Windows longer than `width` take several calls; `total` and `scale` (gamma to the steps summed) carry between them,
    and are set anew at start 0. The outputs are right after the last call. `ends` has bit 1 where a window reaches the
    end of a terminated episode, bit 2 of a truncated one.
    """
    for i in range(k.size):
        acc, power = (0.0, 1.0) if start == 0 else (total[i], scale[i])
        for j in range(min(k[i] - start, r.shape[1])):
            acc += power * r[i, j]
            power *= gamma
        total[i] = acc
        scale[i] = power
        reward[i] = acc
        terminated[i] = ends[i] & 1 != 0
        truncated[i] = ends[i] & 2 != 0
        discount[i] = 0.0 if ends[i] & 1 else power
