"""A buffer of an expert's observations and actions."""

import threading
from typing import Any

import numpy as np
import torch

from diskreplay.buffers.backing import Backed, seed_argument
from diskreplay.buffers.columns import ColumnMemory, Columns, leaf_rows
from diskreplay.buffers.values import Given, checked, shapes_of
from diskreplay.device_tensors import fetched
from diskreplay.distributions.base import Distinct
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.errors import NotEnoughData, SchemaError
from diskreplay.sampling.sampler import Sampler
from diskreplay.schema.schema import Schema
from diskreplay.store.store import PathLike, Store
from diskreplay.views.transitions import Transitions


class DistillationBuffer(Backed):
    """The newest `capacity` pairs of observation and action, drawn at random.

    The pairs are in tensors on the device. The first pair makes the tensors. With a `path`, the pairs are in a store
    instead: each call of `add` writes an episode. Rewards and ends of these episodes have no meaning.

    dtypes and shapes follow the rules of `ReplayBuffer`. But without `obs_shape`, observations with two axes or more
    are a batch if observations and actions have the same length.

    Concurrency: only one thread may call `add`; any thread may call the other methods.

    Parameters
    ----------
    capacity, obs_shape, action_shape, device, obs_dtype, action_dtype, seed
        See `ReplayBuffer`.
    path : path or None
        The path of a store for the pairs; an existing store is continued. None: no store.

    Raises
    ------
    ValueError
        An argument is invalid, or the store at `path` has another capacity.
    SchemaError
        A shape or dtype cannot be stored, or differs from the shape or dtype in the store at `path`.

    Examples
    --------
    >>> buffer = dr.DistillationBuffer(1000)
    >>> buffer.add(torch.zeros(10, 3), torch.zeros(10, 2))
    >>> obs, action = buffer.sample(4)
    >>> obs.shape, action.shape
    (torch.Size([4, 3]), torch.Size([4, 2]))
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
        self._fields: Schema | None = None  # The schema of the first pair, or of the store.
        self._columns: Columns = {}  # The tensors of the pairs; empty if there is a path.
        self._added = 0
        self._lock = threading.Lock()
        self._rng = np.random.default_rng(self._seed)
        super().__init__(path, device, given, capacity)

    def _begin(self, store: Store) -> None:
        self._fields = store.schema
        view = Transitions(n_step=1)
        fields = ("obs", "action")
        self._sampler = Sampler(store, view, Distinct(), device=self._device, seed=self._seed, fields=fields)

    def add(self, obs: Any, action: Any) -> None:
        """Add one pair, or a batch of pairs: arrays with a leading axis of the same length.

        Raises
        ------
        SchemaError
            A value does not fit the first pair; nothing was added.
        """
        self._check_open()
        if self._path is not None:
            obs, action = fetched(obs, action)
        count = self._count(obs, action)
        schema = self._fields
        if schema is None:
            schema = Schema(self._given.field("obs", obs, count), self._given.field("action", action, count))
        rows = (1 if count is None else count,)
        if self._path is None:
            pairs = dict([*leaf_rows(schema, "obs", obs, rows), *leaf_rows(schema, "action", action, rows)])
            with self._lock:
                self._put(schema, pairs, *rows)
        else:
            obs, action = checked(schema, "obs", obs, rows), checked(schema, "action", action, rows)
            self._writer_of(schema).append_episode(obs, action, np.zeros(rows, np.float32), terminated=True)

    def _put(self, schema: Schema, pairs: Columns, count: int) -> None:
        """Write `count` pairs to the tensors. If the tensors are full, the new pairs replace the oldest pairs."""
        if not self._columns:
            fields = {path: schema.leaves[path] for path in pairs}
            self._columns = ColumnMemory(fields, (self._capacity,), self._device).columns()
            self._fields = schema
        newest = min(count, self._capacity)
        first = (self._added + count - newest) % self._capacity
        head = min(newest, self._capacity - first)
        for path, rows in pairs.items():
            kept, column = rows[count - newest :], self._columns[path]
            column[first : first + head].copy_(kept[:head])
            column[: newest - head].copy_(kept[head:])
        self._added += count

    def _count(self, obs: Any, action: Any) -> int | None:
        """Return the number of pairs, or None for a single pair without a leading axis."""
        given, acted = shapes_of(obs)[0], shapes_of(action)[0]
        shape = self._given.obs_shape
        if self._fields is not None:
            leaves = self._fields.leaves.items()
            shape = next(field.shape for path, field in leaves if path.split("/")[0] == "obs")
        if shape is None:
            batch = len(given) >= 2 and acted[:1] == given[:1]
        elif given in (shape, given[:1] + shape):
            batch = given != shape
        else:
            raise SchemaError(f"obs: got shape {given}, needs {shape}, or a batch of these")
        if batch and not given[0]:
            raise SchemaError("obs and action hold no pair")
        return given[0] if batch else None

    def sample(self, batch_size: int) -> tuple[Any, Any]:
        """Draw distinct pairs at random; return observations and actions, (batch_size, ...) each.

        Raises
        ------
        NotEnoughData
            There are fewer than `batch_size` pairs.
        """
        batch_size = int_argument("batch_size", batch_size)
        pairs = len(self)
        if pairs < batch_size:
            raise NotEnoughData(f"the buffer has {pairs} pairs, and a batch of {batch_size} needs {batch_size}")
        if self._path is not None:
            batch = self._sampler.sample(batch_size)
            return batch.obs, batch.action
        with self._lock:
            index = torch.from_numpy(self._rng.choice(len(self), batch_size, replace=False)).to(self._device)
            assert self._fields is not None
            drawn = {path: column[index] for path, column in self._columns.items()}
            return self._fields.unflatten("obs", drawn), self._fields.unflatten("action", drawn)

    def __len__(self) -> int:
        if self._path is None:
            self._check_open()
            return min(self._added, self._capacity)
        store = self._refreshed()
        return 0 if store is None else len(store)

    def close(self) -> None:
        """Close the store, or release the tensors. Results of `sample` stay valid. Closing twice is fine."""
        super().close()
        self._columns = {}

    def __repr__(self) -> str:
        if self._path is not None:
            return super().__repr__()
        return f"DistillationBuffer({min(self._added, self._capacity)} of {self._capacity} pairs, {self._device})"
