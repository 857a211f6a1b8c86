"""Plain twins of the kernels of `kernels.returns`."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED, TRUNCATED, Floats, Ints
from diskreplay.kernels.gathering import KINDS
from tests.kernels.plain.frozen import array_at


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
    fields: Ints, ends: NDArray[np.uint8], bootstraps: Floats, gamma: float, gae_lambda: float, scratch: Floats,
    out: Ints,
) -> None:  # fmt: skip
    """Do what `gae` does, one step of all columns after the other."""
    values, next_values, discounts, *summands = (field_at(line, ends.shape) for line in fields.tolist())
    rewards, carry = np.zeros(ends.shape), np.zeros(ends.shape[1])
    for summand in summands:
        rewards += summand
    if next_values is None:
        next_values = np.append(values[1:], bootstraps[-1:], axis=0)
    is_end = ends & TRUNCATED != 0
    is_end[-1] = True
    following = np.where(ends & TERMINATED, 0.0, np.where(is_end, bootstraps, next_values))
    advantages, returns = np.zeros((2, *ends.shape))
    with np.errstate(over="ignore", invalid="ignore"):
        for t in reversed(range(len(ends))):
            behind = np.where(ends[t] & (TERMINATED | TRUNCATED), 0.0, carry)
            discount = gamma if discounts is None else gamma * discounts[t]
            carry = rewards[t] + discount * following[t] - values[t] + discount * gae_lambda * behind
            advantages[t], returns[t] = carry, carry + values[t]
        for address, sums in zip(out.tolist(), (rewards, advantages, returns), strict=True):
            if address:
                array_at(address, ends.size, np.float32)[:] = sums.astype(np.float32).ravel()


def field_at(line: list[int], shape: tuple[int, ...]) -> Floats | None:
    """Return the numbers that a line of `fields` describes, times its factor; None without a field."""
    address, kind, width, factor = line
    if not address:
        return None
    numbers = array_at(address, shape[0] * shape[1], f"{KINDS[kind]}{width}").reshape(shape)
    return numbers.astype(np.float64) * np.int64(factor).view(np.float64)
