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
from .jit import load_byte, number_of, store_float32


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


@jit.inner
def number_at(address: int, kind: int, width: int) -> float:
    """Return, as a float64, the number in `width` bytes at an address; `kind` is an index in `gathering.KINDS`."""
    if kind == 0 and width == 4:
        return np.float64(jit.load_float32(address))
    if kind == 0 and width == 8:
        return jit.load_float64(address)
    bits = 0
    for at in range(width):
        bits |= load_byte(address + at) << (8 * at)
    if kind == 1:
        return np.float64((bits << (64 - 8 * width)) >> (64 - 8 * width))
    if kind == 2:
        return np.float64(np.uint64(bits))
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    # A denormal float16 is a multiple of 2 ** -24. Any other float16 becomes a float64 with the same exponent and
    # mantissa.
    size = mantissa * 2.0**-24
    if exponent > 0:
        size = number_of((2047 if exponent == 31 else exponent + 1008) << 52 | mantissa << 42)
    return -size if bits >> 15 else size


# Lines of the table `fields` of `gae`. The lines from SUMMANDS on are for the fields whose weighted sum is the reward.
VALUE, NEXT_VALUE, DISCOUNT, SUMMANDS = range(4)
# Columns of the table.
# - ADDRESS: the address of the field's values for all steps, 0 without such a field.
# - KIND, WIDTH: the arguments of `number_at` with these names.
# - FACTOR: the bits of a float64. Each value is multiplied by this float64.
ADDRESS, KIND, WIDTH, FACTOR = range(4)
FIELD_COLUMNS = 4
# Rows of the scratch memory of `gae`. REWARDS, ADVANTAGES and RETURNS are also the indices of the results in `out`. Two
# rows from VALUES on have the values of a step and of the next step; they change places from step to step.
REWARDS, ADVANTAGES, RETURNS, DISCOUNTS, VALUES = range(5)
SCRATCH_ROWS = 6


@jit.inner
def _read_row(fields: Ints, line: int, first: int, row: Floats) -> None:
    """Add a field's values, times FACTOR, at step `first` and at the following steps to a row of numbers."""
    address, kind, width = fields[line, ADDRESS], fields[line, KIND], fields[line, WIDTH]
    factor = number_of(fields[line, FACTOR])
    if kind == 0 and width == 4:
        for n in range(row.size):
            row[n] += np.float64(jit.load_float32(address + 4 * (first + n))) * factor
    else:
        for n in range(row.size):
            row[n] += number_at(address + width * (first + n), kind, width) * factor


@jit.kernel("none", "ints2", "bytes2", "floats2", "float", "float", "out_floats2", "ints")
def gae(
    fields: Ints, ends: NDArray[np.uint8], bootstraps: Floats, gamma: float, gae_lambda: float, scratch: Floats,
    out: Ints,
) -> None:  # fmt: skip
    """Write the reward, the advantage, and the sum of advantage and value of each step to the addresses in `out`.

    Results for an address of 0 are not written. Arrays are (steps, columns); a column has successive steps. `fields`
    describes the stored fields, see `VALUE`. `ends` has the flags of each step. V of a step's next observation is

    - 0 at a TERMINATED step,
    - else the step's number in `bootstraps` at a TRUNCATED step, and at the last step of a column,
    - else the step's NEXT_VALUE, or without this field, the VALUE of the column's next step.

    Later deltas do not count at TERMINATED and TRUNCATED steps. The environment's DISCOUNT of each step, if there is
    such a field, multiplies gamma. `scratch` is (`SCRATCH_ROWS`, columns).
    """
    steps, columns = ends.shape
    scratch[:] = 0.0
    scratch[DISCOUNTS] = 1.0
    for t in range(steps - 1, -1, -1):
        first, now, behind = t * columns, VALUES + (t & 1), VALUES + 1 - (t & 1)
        scratch[REWARDS] = scratch[now] = 0.0
        for line in range(SUMMANDS, fields.shape[0]):
            _read_row(fields, line, first, scratch[REWARDS])
        _read_row(fields, VALUE, first, scratch[now])
        for line, row in ((NEXT_VALUE, behind), (DISCOUNT, DISCOUNTS)):
            if fields[line, ADDRESS] != 0:
                scratch[row] = 0.0
                _read_row(fields, line, first, scratch[row])
        for n in range(columns):
            following, after = scratch[behind, n], scratch[ADVANTAGES, n]
            if ends[t, n] & TERMINATED:
                following = after = 0.0
            elif ends[t, n] & TRUNCATED or t == steps - 1:
                following, after = bootstraps[t, n], 0.0
            discount, value = gamma * scratch[DISCOUNTS, n], scratch[now, n]
            delta = scratch[REWARDS, n] + discount * following - value
            scratch[ADVANTAGES, n] = delta + discount * gae_lambda * after
            scratch[RETURNS, n] = scratch[ADVANTAGES, n] + value
        for row in range(RETURNS + 1):
            for n in range(columns if out[row] != 0 else 0):
                store_float32(out[row] + 4 * (first + n), np.float32(scratch[row, n]))
