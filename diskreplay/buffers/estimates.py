"""Advantages of columns of steps in a few operations of their device."""

import torch

from diskreplay.distributions.number_arguments import fraction


@torch.no_grad()
def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    left: torch.Tensor | None = None,
    final_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimates (Schulman et al. 2016, equation 16), in float64 and rounded once.

    `kernels.gae` does the same for views of a store; this one also runs on a device.

    Parameters
    ----------
    rewards, values : (num_steps, columns) float32
        The steps.
    last_values : (columns,)
        V of the observation behind each column, which bootstraps its last step.
    done : (num_steps, columns) bool
        Whether nothing follows the step.
    gamma, gae_lambda : float
        Discount a step, and the exponent's base of the estimate, 0 to 1.
    left, final_values : (num_steps, columns) bool and float64, or None
        Steps at which an episode ended otherwise. They are bootstrapped with `final_values`, and the chain of lambda
        stops there. None: no such steps.

    Returns
    -------
    tuple of Tensor
        The advantages, and the returns, which are advantage + value: (num_steps, columns) float32.

    Raises
    ------
    ValueError
        `gamma` or `gae_lambda` is not from 0 to 1.
    """
    gamma, gae_lambda = fraction("gamma", gamma), fraction("gae_lambda", gae_lambda)
    steps, columns = rewards.shape
    known = rewards.new_empty((steps + 1, columns), dtype=wide_dtype(rewards.device))
    known[:-1].copy_(values)
    known[-1].copy_(last_values)
    # No products with 0: a NaN behind an end stays in its episode.
    zero = known.new_zeros(())
    following, stops = torch.where(done, zero, known[1:]), done
    if left is not None and final_values is not None:
        following, stops = torch.where(left, final_values.to(known), following), done | left
    value, chain = known[:-1], gamma * gae_lambda
    advantage = rewards.to(known).add_(following, alpha=gamma).sub_(value)
    rows, stopped = advantage.unbind(), stops.unbind()
    for t in range(steps - 2, -1, -1):
        rows[t].add_(torch.where(stopped[t], zero, rows[t + 1]), alpha=chain)
    return advantage.float(), advantage.add_(value).float()


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, which Apple's devices lack."""
    return torch.float32 if device.type == "mps" else torch.float64
