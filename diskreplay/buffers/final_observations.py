"""The observations that steps of a rollout led to, where the next step does not have them, and their values."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from diskreplay.buffers.columns import Columns, leaf_rows, torch_dtype
from diskreplay.buffers.estimates import wide_dtype
from diskreplay.buffers.values import rows_of
from diskreplay.errors import ReplayError
from diskreplay.sampling.batch import map_tree, torch_values
from diskreplay.schema.schema import Schema
from diskreplay.views.rollouts import evaluated


class Behind(NamedTuple):
    """The observations that a step led to, of the environments in `lanes`, (n,)."""

    step: int
    lanes: torch.Tensor
    rows: Columns

    @classmethod
    def of_flagged(
        cls, step: int, flags: torch.Tensor, schema: Schema, obs: Any, device: torch.device
    ) -> "Behind | None":
        """Return copies of the observations of the environments with a flag, (num_envs,); None if there are no such.

        Raises SchemaError if they do not fit the schema.
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
    """The observations behind steps of a rollout, in the order of steps and environments. Not thread-safe."""

    def __init__(self) -> None:
        self._behind: list[Behind] = []

    def add(self, behind: Behind) -> None:
        """Take in the observations behind a step."""
        self._behind.append(behind)

    def nested(self, schema: Schema) -> Any:
        """Return all of them, (n, ...), nested as the observations of the schema."""
        rows = [behind.rows for behind in self._behind]
        return schema.unflatten("obs", {path: torch.cat([each[path] for each in rows]) for path in rows[0]})

    def values(self, schema: Schema, left: torch.Tensor, value_fn: Callable[[Any], Any]) -> torch.Tensor:
        """Return the values of those behind some steps, zeros elsewhere.

        Parameters
        ----------
        schema : Schema
            Of the rollout.
        left : (steps, num_envs) bool Tensor
            Which steps these are.
        value_fn : callable
            Computes values of observations, (n, ...) to (n,) or (n, 1). It is called once.

        Returns
        -------
        (steps, num_envs) Tensor
            float64, or float32 on a device that has no wider floats.

        Raises
        ------
        ReplayError
            The observation behind one of these steps is not there.
        ValueError
            `value_fn` returned another shape.
        """
        lacking = left.clone()
        for step, lanes, _ in self._behind:
            lacking[step, lanes] = False
        if bool(lacking.any()):
            step, env = lacking.nonzero()[0].tolist()
            raise ReplayError(
                f"step {step} of environment {env} was truncated, and its final observation, which value_fn would be "
                "given, was not added: give final_observations to add, or final_values"
            )
        steps = torch.cat([torch.full_like(lanes, step) for step, lanes, _ in self._behind])
        lanes = torch.cat([lanes for _, lanes, _ in self._behind])
        wanted = left[steps, lanes]
        obs = map_tree(lambda tensor: tensor[wanted].cpu().numpy(), self.nested(schema))
        found = torch.zeros(left.shape, dtype=wide_dtype(left.device), device=left.device)
        fresh = evaluated(torch_values(value_fn, left.device), obs, int(wanted.sum()))
        found[steps[wanted], lanes[wanted]] = torch.from_numpy(fresh).to(found)
        return found
