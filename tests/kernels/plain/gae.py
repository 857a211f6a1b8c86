"""Plain twins of the kernels of `kernels.gae`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED
from diskreplay.kernels.gae import Floats


def gae_plain(
    r: Floats,
    value: Floats,
    next_value: Floats,
    ends: NDArray[np.uint8],
    discounts: Floats,
    gamma: float,
    gae_lambda: float,
    carry: Floats,
    advantage: NDArray[np.float32],
    ret: NDArray[np.float32],
) -> None:
    """Do what `gae` does, one step of all columns after the other."""
    carry[:] = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for t in reversed(range(len(r))):
            following = np.where(ends[t] & TERMINATED, 0.0, next_value[t])
            behind = np.where(ends[t] & (TERMINATED | TRUNCATED), 0.0, carry)
            discount = gamma * discounts[t] if discounts.size else gamma
            carry[:] = r[t] + discount * following - value[t] + discount * gae_lambda * behind
            advantage[t] = carry
            ret[t] = carry + value[t]
