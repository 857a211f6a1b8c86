"""Sums of rewards in float64; n-step returns and advantages are rounded to float32 at the end.

For n-step returns see Sutton & Barto, Reinforcement Learning, 2nd ed., 7.1. The discounted sum of the rewards so far is
R_t = r_t + gamma * R_{t-1}.

For generalized advantage estimation see Schulman et al., High-Dimensional Continuous Control Using Generalized
Advantage Estimation (2016), equation 16. A_t is the sum over l of (gamma * lambda)^l * delta_{t+l}, with delta_t =
r_t + gamma * V(s_{t+1}) - V(s_t). If the environment gives a discount d_t with each step, gamma * d_t replaces gamma.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED, Floats, Ints

from . import jit


@jit.kernel("none", "floats", "ints", "floats", "float", "out_floats")
def discounted(r: Floats, count: Ints, before: Floats, gamma: float, out: Floats) -> None:
    """Write R_t = r_t + gamma · R_{t-1} for each step of several runs of steps, one run after the other.

    Run i has count[i] steps. before[i] is R_t of the step before run i.
    """
    t = 0
    for run in range(count.size):
        total = before[run]
        for _ in range(min(count[run], r.size - t)):
            total = r[t] + gamma * total
            out[t] = total
            t += 1


@jit.kernel("none", "floats2", "ints", "float", "out_floats32")
def nstep(r: Floats, k: Ints, gamma: float, reward: NDArray[np.float32]) -> None:
    """For each line i of `r`, write the discounted sum of the line's first k[i] rewards to `reward`."""
    for i in range(k.size):
        total, power = 0.0, 1.0
        for j in range(min(k[i], r.shape[1])):
            total += power * r[i, j]
            power *= gamma
        reward[i] = total


@jit.kernel(
    "none", "floats2", "floats2", "floats2", "bytes2", "floats2", "float", "float", "out_floats", "out_floats32_2",
    "out_floats32_2",
)  # fmt: skip
def gae(
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
    """Write the advantage of each step to `advantage`, and the sum of the advantage and `value` to `ret`.

    Arrays are (steps, columns); a column has successive steps. `ends` has the flags of each step. At a TERMINATED step,
    the next value counts as 0. At a TRUNCATED step, and at the last step of a column, the next value counts, but
    later deltas do not. `next_value` is V of each step's next observation; it is not read for a terminated step. The
    environment's `discounts` multiply gamma; the array is empty if the environment gives no discounts. `carry` is
    scratch memory, (columns,).
    """
    steps, columns = r.shape
    discounted = discounts.size > 0
    carry[:] = 0.0
    for t in range(steps - 1, -1, -1):
        for n in range(columns):
            following = 0.0 if ends[t, n] & TERMINATED else next_value[t, n]
            behind = 0.0 if ends[t, n] & (TERMINATED | TRUNCATED) else carry[n]
            discount = gamma * discounts[t, n] if discounted else gamma
            delta = r[t, n] + discount * following - value[t, n]
            carry[n] = delta + discount * gae_lambda * behind
            advantage[t, n] = carry[n]
            ret[t, n] = carry[n] + value[t, n]
