"""The base class of buffers, which opens a buffer's store and writer."""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, overload

import torch

from diskreplay.buffers.values import Given, has_one_environments_axis, plain
from diskreplay.closing import Closing, Kept, closes
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.errors import Closed, SchemaError, StoreNotFound
from diskreplay.sampling.arguments import device_argument
from diskreplay.schema.schema import Schema
from diskreplay.schema.spaces import Field
from diskreplay.store.opening import create, open as open_store
from diskreplay.store.store import PathLike, Store
from diskreplay.writing.marker import DEFAULT_DURABILITY_S, Durability
from diskreplay.writing.vector_writer import VectorWriter
from diskreplay.writing.writer import Writer


class Backed(ABC):
    """The base class of buffers. Each buffer has at most one store, and one writer of the store.

    `__init__` opens the store at the path. If there is no store yet, `_writer_of` makes a store with the first step. A
    buffer that keeps its steps in tensors calls `_writer_of` only if there is a path. `close`, garbage collection and
    the exit of the process remove a temporary folder. A killed process leaves the folder behind.

    Parameters
    ----------
    path : path or None
        The path of the store; None: a temporary folder.
    device : torch.device or str or None
        The device of the buffer's tensors; None is the CPU.
    given : Given
        The user's shapes and dtypes of observations and actions.
    extra : dict of Field
        Fields of each step by name, in addition to observation, action and reward.
    capacity, segment_steps : int
        Arguments of `create` for a new store.
    """

    def __init__(
        self,
        path: PathLike | None,
        device: torch.device | str | None,
        given: Given,
        capacity: int,
        segment_steps: int | None = None,
        extra: Mapping[str, Field] = MappingProxyType({}),
    ) -> None:
        self._path = None if path is None else Path(path)
        self._device = device_argument(device)
        self._given, self._extra = given, dict(extra)
        self._capacity, self._segment_steps = capacity, segment_steps
        self._closed = False
        self._writer: Writer | VectorWriter | None = None
        # Closes and removes a temporary store, when called, at exit, or when the buffer is garbage-collected.
        self._remove: Closing | None = None
        self._kept: Kept = []
        self._store: Store | None = None
        if self._path is not None:
            with suppress(StoreNotFound):
                self._store = open_store(self._path, "a")
        if self._store is not None:
            try:
                self._check(self._store)
                self._begin(self._store)
            except BaseException:
                self.close()
                raise

    @abstractmethod
    def _begin(self, store: Store) -> None:
        """Prepare the buffer for its store. The store was opened, or made for the first step."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store})"

    @property
    def store(self) -> Store | None:
        """The store of the steps; None before the first step. Closing the buffer closes the store."""
        return self._store

    def _check(self, store: Store) -> None:
        if store.capacity != self._capacity:
            raise ValueError(f"the store at {store.path} keeps {store.capacity} steps, not {self._capacity}")
        self._given.check(store.schema)
        if set(store.schema.extra) != set(self._extra):
            raise SchemaError(
                f"the store at {store.path} has the extra fields {sorted(store.schema.extra)}, not "
                f"{sorted(self._extra)}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"this {type(self).__name__} is closed; make another")

    def _schema(self, obs: Any, action: Any, num_envs: int, reward: Any = 0.0) -> Schema:
        """Return the store's schema. If there is no store yet, return the schema of a first step with these values.

        With a single environment, the values may have or lack a leading axis of environments. If `reward` has an axis,
        a first axis of length 1 in `obs` is the axis of environments.
        """
        if self._store is not None:
            return self._store.schema
        batched = plain(reward).ndim > 0
        lanes = num_envs if num_envs > 1 or has_one_environments_axis(obs, self._given.obs_shape, batched) else None
        found = self._given.field("obs", obs, lanes)
        if lanes == 1 and not has_one_environments_axis(action, self._given.action_shape, batched=True):
            lanes = None
        return Schema(found, self._given.field("action", action, lanes), extra=self._extra)

    @overload
    def _writer_of(self, schema: Schema) -> Writer: ...
    @overload
    def _writer_of(self, schema: Schema, num_envs: int) -> VectorWriter: ...
    def _writer_of(self, schema: Schema, num_envs: int | None = None) -> Writer | VectorWriter:
        """Return the writer of the store. If there is no store yet, make a store with this schema.

        With `num_envs`, the writer appends one step of each environment at a time.
        """
        if self._store is None:
            self._store = self._make(schema)
            self._begin(self._store)
        if self._writer is None:
            # A temporary store does not outlive the process, so its steps need not be durable.
            durability: Durability = "none" if self._path is None else DEFAULT_DURABILITY_S
            if num_envs is None:
                self._writer = self._store.writer(durability=durability)
            else:
                self._writer = self._store.writer(num_envs, durability=durability)
            if self._remove is not None:
                self._writer.leave_at_exit()
                self._kept.append(self._writer)
        return self._writer

    def _make(self, schema: Schema) -> Store:
        folder = tempfile.mkdtemp(prefix="diskreplay-") if self._path is None else None
        path = self._path or Path(str(folder)) / "store"
        try:
            store = create(path, schema, capacity=self._capacity, segment_steps=self._segment_steps)
        except BaseException:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if folder is not None:
            self._kept.append(store)
            self._remove = closes(self, self._kept, folder)
        return store

    def _refreshed(self) -> Store | None:
        if self._store is not None:
            self._store.refresh()
        return self._store

    def close(self) -> None:
        """Close the store, and remove it if it is temporary. Batches stay valid. Closing twice is fine."""
        self._closed = True
        if self._remove is not None:
            self._remove()
        elif self._store is not None:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seed_argument(seed: Any) -> int | None:
    return None if seed is None else int_argument("seed", seed, 0)
