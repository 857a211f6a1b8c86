"""Plain twins of the kernels of `kernels.returns`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED, Floats, Ints


def discounted_plain(r: Floats, count: Ints, before: Floats, gamma: float, out: Floats) -> None:
    """Do what `discounted` does."""
    t = 0
    for steps, carry in zip(count.tolist(), before.tolist(), strict=True):
        for _ in range(steps):
            if t < len(r):
                carry = out[t] = float(r[t]) + gamma * carry
                t += 1


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
