"""The store behind a buffer: at a path of the user's, or in a temporary folder."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch

from diskreplay.buffers.values import Given
from diskreplay.errors import Closed, SchemaError, StoreNotFound
from diskreplay.format.schema import Schema
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.store.opening import create, open as open_store
from diskreplay.store.store import PathLike, Store
from diskreplay.store.writing.marker import DEFAULT_DURABILITY_S, Durability


class Backing:
    """Opens the store at a path, or makes one when the first step comes; at None in a temporary folder.

    That folder is removed by `close`, when the buffer is garbage, or when the process exits; a process that is killed
    leaves it. Not thread-safe.
    """

    def __init__(self, path: PathLike | None) -> None:
        self._path = None if path is None else Path(path)
        self._closed = False
        self._remove: weakref.finalize[Any, Any] | None = None
        self._kept: list[Any] = []  # by `_remove`, so that it is what ends the writers of a temporary store
        self.store: Store | None = None
        if self._path is not None:
            with suppress(StoreNotFound):
                self.store = open_store(self._path, "a")

    def make(self, schema: Schema, **options: Any) -> Store:
        """Make the store; see `create`."""
        self.check_open()
        if self._path is not None:
            self.store = create(self._path, schema, **options)
            return self.store
        folder = tempfile.mkdtemp(prefix="diskreplay-")
        try:
            self.store = create(Path(folder) / "store", schema, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._remove = weakref.finalize(self, _discard, folder, self.store, os.getpid(), self._kept)
        return self.store

    def writer(self, num_envs: int | None = None) -> Any:
        """Return a writer of the store; nobody need close that of a temporary one."""
        assert self.store is not None
        # A temporary folder has nothing to outlive.
        durability: Durability = "none" if self._path is None else DEFAULT_DURABILITY_S
        writer: Any
        if num_envs is None:
            writer = self.store.writer(durability=durability)
        else:
            writer = self.store.writer(num_envs, durability=durability)
        if self._remove is not None:
            writer.leave_at_exit()
            self._kept.append(writer)
        return writer

    def check(self, store: Store, capacity: int, given: Given, extra: Collection[str] = ()) -> None:
        """Close a store that is not what a buffer would have made, and raise.

        ValueError where it has another capacity, SchemaError where it has other fields.
        """
        try:
            if store.capacity != capacity:
                raise ValueError(f"the store at {store.path} keeps {store.capacity} steps, not {capacity}")
            given.check(store.schema)
            if set(store.schema.extra) != set(extra):
                raise SchemaError(
                    f"the store at {store.path} has the extra fields {sorted(store.schema.extra)}, not {sorted(extra)}"
                )
        except ValueError:
            self.close()
            raise

    def check_open(self) -> None:
        """Raise Closed where the buffer is."""
        if self._closed:
            raise Closed("this buffer is closed; make another")

    def close(self) -> None:
        """Close the store, and remove it where it is temporary. Closing twice is fine."""
        self._closed = True
        if self._remove is not None:
            self._remove()
        elif self.store is not None:
            self.store.close()


class Backed:
    """What every buffer has: a store, which is closed with it, and a device where its tensors are.

    Made last in a buffer's constructor: a store that is at the path is taken up at once.
    """

    def __init__(self, path: PathLike | None, device: torch.device | str | None) -> None:
        self._device = torch.device("cpu" if device is None else device)
        self._backing = Backing(path)
        if self._backing.store is not None:
            self._begin(self._backing.store)

    def _begin(self, store: Store) -> None:
        """Take up a store, new or found at the path."""
        raise NotImplementedError

    @property
    def store(self) -> Store | None:
        """The store that holds the steps, None before the first; it is closed with the buffer."""
        return self._backing.store

    def close(self) -> None:
        """Close the store, and remove it where it is temporary; batches stay valid. Closing twice is fine."""
        self._backing.close()

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the buffer."""
        self.close()


def seed_argument(seed: Any) -> int | None:
    """Return a seed of at least 0, or None; anything else is a ValueError."""
    return None if seed is None else int_argument("seed", seed, 0)


def _discard(folder: str, store: Store, pid: int, writers: list[Any]) -> None:
    if os.getpid() != pid:
        return  # a forked child: the folder is its parent's
    # Removed first: what is not there need not be made durable by sealing it, which then fails at once.
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(Exception):
        store.close()
    writers.clear()
    shutil.rmtree(folder, ignore_errors=True)
