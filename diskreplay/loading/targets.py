"""Targets inside windows of steps."""

from typing import Any

import torch

from diskreplay.sampling.number_arguments import fraction, int_argument


def nstep_targets(
    reward: torch.Tensor,
    terminated: torch.Tensor,
    values: torch.Tensor,
    n: int,
    gamma: float,
    mask: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the n-step target of every step of a batch of windows (Kapturowski et al. 2019, section 2.3).

    The target of step t is ``sum(gamma**i * reward[t + i] for i in range(k)) + gamma**k * values[t + k]``, without the
    last term where one of the k steps terminated. k is n, or fewer: the sum ends with the window, with the last step
    that `mask` shows as real, and with a terminated or truncated step. So the last steps of a window that lies inside
    an episode have targets of fewer steps, and a truncated episode bootstraps from its final observation.

    Nothing is detached: where `values` carries a gradient, so do the targets. Call it under ``torch.no_grad()``, or
    with ``values.detach()``, for targets that are held fixed. With R2D2's rescaling h of values, pass the values
    through its inverse and the targets through h.

    Parameters
    ----------
    reward : Tensor
        (batch, length), any dtype.
    terminated : Tensor
        (batch, length), bool, or numbers of which 0 is False.
    values : Tensor
        (batch, length + 1) float: of the observation of each step, and of that behind the last one. Behind an episode's
        end stands the value of its final observation. With a batch of `Sequences`, these are the values of
        ``torch.cat([batch.obs, batch.next_obs[:, -1:]], 1)``.
    n : int
        Steps of a sum.
    gamma : float
        Discount a step, 0 to 1.
    mask : Tensor or None
        (batch, length), true at real steps; None: all are. Targets of the others are 0.
    truncated : Tensor or None
        (batch, length): where an episode was cut short. In a batch of `Sequences` the mask says the same.

    Returns
    -------
    Tensor
        (batch, length), of the dtype that reward and values promote to; sums are float64.

    Raises
    ------
    ValueError
        A shape does not fit, `values` is no float, or n or gamma is invalid.
    """
    n, gamma = int_argument("n", n), fraction("gamma", gamma)
    _check_shapes(reward, values, {"terminated": terminated, "mask": mask, "truncated": truncated})
    length = reward.shape[1]
    if reward.numel() == 0:
        return reward.to(torch.result_type(reward, values))
    ended = terminated != 0
    real = torch.ones_like(ended) if mask is None else mask != 0
    stops = ended if truncated is None else ended | (truncated != 0)
    steps = torch.arange(length, device=reward.device)
    last = _last_steps(steps, real, stops)
    k = torch.clamp(last - steps + 1, max=n)

    wide = torch.where(real, reward.double(), 0.0)
    total = torch.zeros_like(wide)
    # Step i of every sum at once: the rewards moved i places to the left.
    for i in range(min(n, length)):
        total[:, : length - i] += torch.where(i < k[:, : length - i], gamma**i * wide[:, i:], 0.0)
    after = steps + k
    bootstraps = ~(ended.gather(1, last) & (after > last))
    discounts = torch.pow(torch.tensor(gamma, dtype=torch.float64, device=reward.device), k)
    # Chosen and not multiplied by 0: a value that nobody needs may be NaN.
    targets = total + torch.where(bootstraps, discounts * values.double().gather(1, after), 0.0)
    return torch.where(real, targets, 0.0).to(torch.result_type(reward, values))


def _last_steps(steps: torch.Tensor, real: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return, for each step, the last one that a sum from there may hold: itself where it is not real."""
    length = len(steps)
    ends = stops.clone()
    ends[:, -1] = True
    ends[:, :-1] |= ~real[:, 1:]
    # The nearest end at or behind each step is the smallest number to its right.
    numbers = torch.where(ends, steps, length)
    nearest = torch.cummin(numbers.flip(1), dim=1).values.flip(1)
    return torch.where(real, nearest, steps)


def _check_shapes(reward: Any, values: Any, others: dict[str, Any]) -> None:
    for name, tensor in {"reward": reward, "values": values, **others}.items():
        if not isinstance(tensor, torch.Tensor) and not (tensor is None and name in ("mask", "truncated")):
            raise ValueError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if reward.ndim != 2:
        raise ValueError(f"reward must be (batch, length), not {tuple(reward.shape)}")
    if not values.is_floating_point():
        raise ValueError(f"values must be floats, not {values.dtype}")
    batch, length = reward.shape
    if tuple(values.shape) != (batch, length + 1):
        raise ValueError(
            f"values must be {(batch, length + 1)}, one more than the steps of reward, not {tuple(values.shape)}"
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != reward.shape:
            raise ValueError(f"{name} must have the shape of reward, {(batch, length)}, not {tuple(tensor.shape)}")
