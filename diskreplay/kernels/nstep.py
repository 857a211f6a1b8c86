"""n-step returns: sums in float64, rounded once to float32 (Sutton & Barto, Reinforcement Learning, 2nd ed., 7.1)."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints

from . import jit


@jit.kernel("none", "floats2", "ints", "float", "out_floats32")
def nstep(r: Floats, k: Ints, gamma: float, reward: NDArray[np.float32]) -> None:
    """Write the return of the first `k` rewards of each line of `r`."""
    for i in range(k.size):
        total, power = 0.0, 1.0
        for j in range(min(k[i], r.shape[1])):
            total += power * r[i, j]
            power *= gamma
        reward[i] = total
