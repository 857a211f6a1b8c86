"""Advantages of columns of steps that are in memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import TERMINATED
from diskreplay.kernels.table import chosen
from diskreplay.views.arguments import fraction

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]


def advantages(
    rewards: Any, values: Any, last_values: Any, dones: Any, gamma: float, gae_lambda: float
) -> tuple[Floats32, Floats32]:
    """Compute generalized advantage estimates (Schulman et al. 2016, equation 16), in float64 and rounded once.

    Arrays are (num_steps, columns); `last_values`, (columns,), is V of the observation behind each column, and
    bootstraps its last step. Nothing follows a step that is done. Returns the advantages, and the returns: advantage +
    value, float32. Raises ValueError where `gamma` or `gae_lambda` is not from 0 to 1.
    """
    gamma, gae_lambda = fraction("gamma", gamma), fraction("gae_lambda", gae_lambda)
    r, v = np.array(rewards, np.float64), np.array(values, np.float64)
    following = np.concatenate([v[1:], np.asarray(last_values, np.float64)[None]])
    ends = np.where(np.asarray(dones) != 0, TERMINATED, 0).astype(np.uint8)
    return estimates(gamma, gae_lambda, r, v, following, ends)


def estimates(
    gamma: float, gae_lambda: float, rewards: Floats, values: Floats, following: Floats, ends: NDArray[np.uint8]
) -> tuple[Floats32, Floats32]:
    """Return advantages and returns of columns of steps, given what follows each: see `kernels.gae`."""
    advantage, ret = np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32)
    chosen("gae")(rewards, values, following, ends, gamma, gae_lambda, np.empty(rewards.shape[1]), advantage, ret)
    return advantage, ret
