"""A buffer of what an expert saw and did."""

from typing import Any

import numpy as np
import torch

from diskreplay.buffers.backing import Backed, seed_argument
from diskreplay.buffers.values import Given, checked, leaves_of
from diskreplay.errors import NotEnoughData, SchemaError
from diskreplay.format.schema import Schema
from diskreplay.loading.sampler import Sampler
from diskreplay.sampling.distinct import Distinct
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.store.store import PathLike, Store
from diskreplay.views.transitions import Transitions


class DistillationBuffer(Backed):
    """The newest `capacity` pairs of observation and action, drawn at random.

    Pairs are stored as steps without a reward, each add as an episode: only `obs` and `action` of the store mean
    anything. dtypes and shapes are those of `ReplayBuffer`, shapes with this difference: without `obs_shape`, an add of
    observations with two axes or more whose first is as long as the actions' first is taken for a batch.

    Concurrency: one thread adds; any thread may do all else.

    Parameters
    ----------
    capacity, obs_shape, action_shape, path, device, obs_dtype, action_dtype, seed
        See `ReplayBuffer`.

    Raises
    ------
    ValueError
        An argument is invalid, or the store at `path` has another capacity.
    SchemaError
        A shape or dtype cannot be stored, or is not that of the store at `path`.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Any = None,
        action_shape: Any = None,
        *,
        path: PathLike | None = None,
        device: torch.device | str | None = None,
        obs_dtype: Any = None,
        action_dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        capacity = int_argument("capacity", capacity)
        given = Given(obs_shape, action_shape, obs_dtype, action_dtype)
        self._seed = seed_argument(seed)
        super().__init__(path, device, given, capacity)

    def _begin(self, store: Store) -> None:
        view = Transitions(n_step=1)
        fields = ("obs", "action")
        self._sampler = Sampler(store, view, Distinct(), device=self._device, seed=self._seed, fields=fields)

    def add(self, obs: Any, action: Any) -> None:
        """Add one pair, or a batch of them: arrays with a leading axis of the same length.

        Raises
        ------
        SchemaError
            A value does not fit those that came first; nothing was added.
        """
        self._check_open()
        count = self._count(obs, action)
        if self._store is None:
            schema = Schema(self._given.field("obs", obs, count), self._given.field("action", action, count))
        else:
            schema = self._store.schema
        rows = (1 if count is None else count,)
        obs, action = checked(schema, "obs", obs, rows), checked(schema, "action", action, rows)
        self._writer_of(schema).append_episode(obs, action, np.zeros(rows, np.float32), terminated=True)

    def _count(self, obs: Any, action: Any) -> int | None:
        """Return how many pairs these are, None for a pair without that axis."""
        leaf, acted = leaves_of(obs)[0], leaves_of(action)[0]
        shape = self._given.obs_shape
        if self._store is not None:
            leaves = self._store.schema.leaves.items()
            shape = next(field.shape for path, field in leaves if path.split("/")[0] == "obs")
        if shape is None:
            batch = leaf.ndim >= 2 and acted.shape[:1] == leaf.shape[:1]
        elif leaf.shape in (shape, leaf.shape[:1] + shape):
            batch = leaf.shape != shape
        else:
            raise SchemaError(f"obs: got shape {leaf.shape}, needs {shape}, or a batch of these")
        if batch and not leaf.shape[0]:
            raise SchemaError("obs and action hold no pair")
        return leaf.shape[0] if batch else None

    def sample(self, batch_size: int) -> tuple[Any, Any]:
        """Draw different pairs; return observations and actions, (batch_size, ...) each.

        Raises
        ------
        NotEnoughData
            There are fewer than `batch_size` pairs.
        """
        batch_size = int_argument("batch_size", batch_size)
        pairs = len(self)
        if pairs < batch_size:
            raise NotEnoughData(f"the buffer has {pairs} pairs, and a batch of {batch_size} needs {batch_size}")
        batch = self._sampler.sample(batch_size)
        return batch.obs, batch.action

    def __len__(self) -> int:
        """Return the number of pairs."""
        store = self._refreshed()
        return 0 if store is None else len(store)
