"""Functions that compute the advantages of a rollout's steps, and the values of final observations.

The tensors of a rollout's steps lack the final observations of episodes. After the last step of an episode, the tensors
continue with the first step of the next episode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from diskreplay.buffers.columns import ColumnMemory, Columns, leaf_rows, tensor_of, torch_dtype
from diskreplay.buffers.values import plain, rows_of
from diskreplay.distributions.number_arguments import fraction
from diskreplay.errors import ReplayError
from diskreplay.sampling.batch import map_tree, torch_values, wide_dtype
from diskreplay.schema.schema import Schema
from diskreplay.schema.spaces import Field
from diskreplay.views.rollouts import evaluated

NO_FINAL_VALUES = (
    "step {} of environment {} was truncated, and the value of its final observation is unknown: such steps are "
    "bootstrapped with the values of their own observations. Give value_fn, which computes it, or final_values; "
    "final_values=buffer.values does the same without this warning"
)


def work_memory(num_steps: int, num_envs: int, device: torch.device) -> ColumnMemory:
    """Return memory for the argument `work` of `advantages`, for up to `num_steps` steps.

    The memory is reused. If `advantages` made large tensors, the C library might give their pages back to the system
    after each call. With 4,096 environments, the page faults of the next call took up to a third of its rollout's time.
    """
    dtype = "float32" if wide_dtype(device) is torch.float32 else "float64"
    return ColumnMemory(dict.fromkeys(("values", "advantages"), Field((), dtype)), (num_steps + 1, num_envs), device)


@torch.no_grad()
def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    last_values: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    work: Columns,
    bootstraps: torch.Tensor | None = None,
    final_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimates (Schulman et al. 2016, equation 16) in float64, and round them once.

    `kernels.returns.gae` computes the same estimates for the view `Rollouts` of a store. This function computes on the
    device of its arguments.

    Parameters
    ----------
    rewards, values : (num_steps, columns) float32
        The rewards of the steps, and the values of their observations.
    last_values : (columns,)
        For each column (environment), the value of the observation after the rollout's last step. The last step is
        bootstrapped with this value.
    done : (num_steps, columns) bool
        True at steps that ended their episode and are not bootstrapped.
    work : dict of Tensor
        Tensors from `work_memory`, which are overwritten.
    bootstraps, final_values : (num_steps, columns) bool and float64, or None
        `bootstraps` is True at steps that are bootstrapped with `final_values`. The advantages of these steps do not
        depend on later steps. None: no step is bootstrapped with `final_values`.

    Returns
    -------
    tuple of Tensor
        The advantages, and the returns (advantage + value), (num_steps, columns) float32.
    """
    gamma, gae_lambda = fraction("gamma", gamma), fraction("gae_lambda", gae_lambda)
    steps = len(rewards)
    known, advantage = work["values"][: steps + 1], work["advantages"][:steps]
    known[:-1].copy_(values)
    known[-1].copy_(last_values)
    # `where` is used because NaN times 0 is NaN.
    zero, stops = known.new_zeros(()), done
    torch.where(done, zero, known[1:], out=advantage)  # the values that follow the steps
    if bootstraps is not None and final_values is not None:
        torch.where(bootstraps, final_values.to(known), advantage, out=advantage)
        stops = done | bootstraps
    value, chain = known[:-1], gamma * gae_lambda
    advantage.mul_(gamma).add_(rewards).sub_(value)
    rows, stopped = advantage.unbind(), stops.unbind()
    for t in range(steps - 2, -1, -1):
        rows[t].add_(torch.where(stopped[t], zero, rows[t + 1]), alpha=chain)
    # `work` may have float32, too, so the results are copies.
    return advantage.to(torch.float32, copy=True), advantage.add_(value).to(torch.float32, copy=True)


def last_values_argument(values: Any, num_envs: int, device: torch.device) -> torch.Tensor:
    given = _numbers(values, device)
    if given.numel() != num_envs or given.ndim > 2:
        raise ValueError(f"last_values must be one value for each of {num_envs} environments, not {tuple(given.shape)}")
    return given.reshape(-1)


def final_values_argument(values: Any, bootstraps: torch.Tensor) -> torch.Tensor:
    given = _numbers(values, bootstraps.device)
    if given.numel() != bootstraps.numel() or given.shape[:2] != bootstraps.shape:
        raise ValueError(f"final_values must be {list(bootstraps.shape)}, one for each step, not {list(given.shape)}")
    return given.reshape(bootstraps.shape)


def _numbers(values: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        values = tensor_of(np.asarray(plain(values), np.float64))
    moved: torch.Tensor = values.detach().to(device)
    return moved


class NextRows(NamedTuple):
    """The next observations of some environments, after one step of a rollout.

    `step` is the index of the step in its rollout, and `lanes`, (n,), has the indices of the environments. `rows` has
    the next observations: a tensor (n, ...) for each path.
    """

    step: int
    lanes: torch.Tensor
    rows: Columns

    @classmethod
    def of_flagged(
        cls, step: int, flags: torch.Tensor, schema: Schema, obs: Any, device: torch.device
    ) -> "NextRows | None":
        """Return copies of the observations of environments whose flag is not 0; None if all flags are 0.

        `flags` is (num_envs,), and `obs` has an observation for each environment.
        """
        lanes = flags.nonzero().flatten()
        if not len(lanes):
            return None
        if isinstance(obs, np.ndarray) and obs.dtype == object:
            obs = rows_of(schema, obs, flags.cpu().numpy() != 0)
        rows = {}
        for path, tensor in leaf_rows(schema, "obs", obs, tuple(flags.shape)):
            rows[path] = tensor[lanes.to(tensor.device)].to(device, torch_dtype(schema.leaves[path].dtype))
        return cls(step, lanes.to(device), rows)


class FinalObservations:
    """Next observations of some steps of a rollout, in the order of their addition. Not thread-safe."""

    def __init__(self) -> None:
        self._next_rows: list[NextRows] = []

    def add(self, next_rows: NextRows) -> None:
        self._next_rows.append(next_rows)

    def nested(self, schema: Schema) -> Any:
        """Return all added observations, (n, ...), nested like the schema's `obs`."""
        rows = [next_rows.rows for next_rows in self._next_rows]
        return schema.unflatten("obs", {path: torch.cat([each[path] for each in rows]) for path in rows[0]})

    def values(self, schema: Schema, bootstraps: torch.Tensor, value_fn: Callable[[Any], Any]) -> torch.Tensor:
        """Return the values of next observations, (steps, num_envs); 0 where `bootstraps` is False.

        `bootstraps`, (steps, num_envs) bool, is True at steps that are bootstrapped with the value of their next
        observation. `value_fn` is called once, with observations (n, ...), and returns their values, (n,) or (n, 1).
        The result is float64, or float32 on a device without float64.
        """
        lacking = bootstraps.clone()
        for step, lanes, _ in self._next_rows:
            lacking[step, lanes] = False
        if bool(lacking.any()):
            step, env = lacking.nonzero()[0].tolist()
            raise ReplayError(
                f"step {step} of environment {env} was truncated, and its final observation was not added, so value_fn "
                "cannot compute its value: give final_observations to add, or final_values"
            )
        steps = torch.cat([torch.full_like(lanes, step) for step, lanes, _ in self._next_rows])
        lanes = torch.cat([lanes for _, lanes, _ in self._next_rows])
        wanted = bootstraps[steps, lanes]
        obs = map_tree(lambda tensor: tensor[wanted].cpu().numpy(), self.nested(schema))
        found = torch.zeros(bootstraps.shape, dtype=wide_dtype(bootstraps.device), device=bootstraps.device)
        fresh = evaluated(torch_values(value_fn, bootstraps.device), obs, int(wanted.sum()))
        found[steps[wanted], lanes[wanted]] = torch.from_numpy(fresh).to(found)
        return found
