"""A storage of TorchRL whose items are the steps of a store."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay import MissingExtra
from diskreplay.closing import Kept, check_open, closes
from diskreplay.interop.step_values import as_flags, row_of
from diskreplay.interop.trajectory_writers import TrajectoryWriters

with MissingExtra.raised_for("a storage of TorchRL", "torchrl"):
    import torch
    from tensordict import TensorDictBase, is_tensor_collection, lazy_stack
    from torchrl.data import ReplayBuffer, StorageCheckpointerBase, TensorStorage

__all__ = ["StoreStorage"]

PathLike = str | os.PathLike[str]
Ints = NDArray[np.int64]
Key = tuple[str, ...]

TRAJECTORY = ("collector", "traj_ids")
FLAGS = ("done", "terminated", "truncated")
FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
# TorchRL keeps its cursor in an int32.
UNBOUNDED = (1 << 31) - 1


class ByReference(StorageCheckpointerBase):  # type: ignore[misc]
    """Saves the uuid of the store and the id at each position. The steps themselves are in the store."""

    def dumps(self, storage: "StoreStorage", path: PathLike) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(storage.state_dict(), Path(path) / "store.pt")

    def loads(self, storage: "StoreStorage", path: PathLike) -> None:
        storage.load_state_dict(torch.load(Path(path) / "store.pt"))


class StoreStorage(TensorStorage):  # type: ignore[misc]
    """A `Storage` of TorchRL whose items are the steps of a store: ``ReplayBuffer(storage=StoreStorage(store), ...)``.

    TorchRL's samplers, transforms and collectors work with this class as with a `LazyTensorStorage`, and equal seeds
    give equal batches. An item is a step: ``add`` and ``extend`` append steps, and a sampled batch has the keys of
    `Batch.to_tensordict`. Memory holds only the id of each step, 8 bytes a step.

    A step never changes, and a new step can be written only at the position of the buffer's cursor. With a capacity,
    the storage is a ring, like TorchRL's other storages, and the store evicts overwritten steps. Only one buffer may
    write to a storage and its store; any number of buffers may read. An existing store is continued: its newest steps
    fill the storage from position 0 on, oldest first. The buffer's cursor is then the position after the newest step.

    An item must have ``"action"``, ``("next", "reward")``, ``("next", "done")``, and observations: keys that are both
    at the root and in ``"next"``. If an item's observation is not the next observation of the item before, the episode
    is cut between the two items. This happens after a reset. Batches show the item before the cut as truncated. Items
    of several environments may come in any order: the key ``("collector", "traj_ids")`` has the trajectory of each
    item.

    Concurrency: one thread writes. Several threads may read, as TorchRL's ``prefetch`` does.

    Parameters
    ----------
    store : Store or path
        A store that is open with mode "a", or a path. If the path has no store, the first item makes a store, whose
        schema has all keys of this item. If the store exists, keys that its schema lacks are left out. An extra field
        of the schema is a key at the root of an item. The key may be nested.
    capacity : int or None
        Capacity of a new store; None: unbounded.
    durability : float or str
        As for `Store.writer`.

    Raises
    ------
    StoreExists
        The store at the path has another capacity.
    """

    supports_conditional_update = False
    shared_init = True  # tells TorchRL that processes can share the storage: each process opens the store by its path
    _store: dr.Store | None

    def __init__(
        self, store: dr.Store | PathLike, *, capacity: int | None = None, durability: float | str = 5.0
    ) -> None:
        self._path = Path(store.path if isinstance(store, dr.Store) else store).absolute()
        self._capacity, self._durability = capacity, durability
        self._begin()
        if isinstance(store, dr.Store):
            self._store = store
        else:
            with suppress(dr.StoreNotFound):
                self._store = dr.open(self._path, "a")
            if self._store is not None:
                self._kept.append(self._store)
                if capacity not in (None, self._store.capacity):
                    # this raises StoreExists, because the capacity differs
                    dr.create(self._path, self._store.schema, capacity=capacity, exist_ok=True)
        if self._store is not None:
            self._capacity = self._store.capacity
            self._attach_sampler(self._store)
            self._place(self._sampler.ids())
        super().__init__(None, self._capacity or UNBOUNDED)

    def _begin(self) -> None:
        self._store = None
        self._kept: Kept = []
        self._close = closes(self, self._kept)
        self._writers = TrajectoryWriters(self._kept, self._durability)
        # the id at each position, in the first `_size` elements
        self._ids: Ints = np.zeros(0, np.int64)
        self._size = self._next = 0
        self._buffers: list[ReplayBuffer] = []
        # The positions of steps that the samplers of the buffers do not know yet. None: the samplers know all steps,
        # and the cursors of the buffers are set.
        self._untold: Ints | None = None

    def _attach_sampler(self, store: dr.Store) -> None:
        fields = (*FIELDS, *store.schema.extra)
        self._sampler = dr.Sampler(store, dr.Transitions(n_step=1), fields=fields, seed=0)
        self._kept.append(self._sampler)

    def close(self) -> None:
        """Close the writers, and the store if a path was given. Closing twice is fine."""
        self._close()

    # --- private names of TorchRL ------------------------------------------------------------------------------------

    # This class is a `TensorStorage`: for a plain subclass of `Storage`, a buffer needs a `collate_fn`. No public
    # method of TorchRL announces added steps to samplers or empties a storage, so this class calls private methods.

    def _tell_samplers(self, newest: int | None = None) -> None:
        if newest is not None:
            self._set_last_cursor(newest)
        self._bump_mutation_revision()

    def _empty(self) -> None:
        if self._store is not None:
            self._writers.close()
            self._store.refresh()
            self._store.evict(lambda _: True)
        self._size = self._next = 0
        self._tell_samplers()

    # --- positions ---------------------------------------------------------------------------------------------------

    def attach(self, buffer: Any) -> None:
        """Attach a buffer. Its cursor will follow the newest step."""
        super().attach(buffer)
        if isinstance(buffer, ReplayBuffer) and buffer not in self._buffers:
            self._buffers.append(buffer)

    def _place(self, ids: Ints) -> Ints:
        """Put ids at the positions after the newest step, and return these positions."""
        limit = self._capacity or UNBOUNDED
        positions = (self._next + np.arange(len(ids))) % limit
        wanted = min(self._size + len(ids), limit)
        if wanted > len(self._ids):
            self._ids = np.resize(self._ids, min(max(wanted, 2 * len(self._ids), 1024), limit))
        self._ids[positions] = ids  # if there are more ids than positions, the newest ids remain
        self._size, self._next = wanted, int(self._next + len(ids)) % limit
        return positions

    def _set_cursors(self) -> None:
        """Set the buffers' cursors to the position after the newest step, and announce new steps to samplers."""
        untold, self._untold = self._untold, None
        for buffer in self._buffers:
            state = buffer.writer.state_dict()
            if "_cursor" in state:
                count = max(state.get("_write_count", 0), self._size)
                buffer.writer.load_state_dict({**state, "_cursor": self._next, "_write_count": count})
            if untold is not None and len(untold):
                buffer.mark_update(torch.as_tensor(untold))

    @property
    def checkpointer(self) -> StorageCheckpointerBase:
        """The object that saves and loads the state. The default saves no steps, since the store has them."""
        return super().checkpointer

    @checkpointer.setter
    def checkpointer(self, value: StorageCheckpointerBase | None) -> None:
        TensorStorage.checkpointer.fset(self, ByReference() if value is None else value)
        # A buffer gets its writer before it sets the checkpointer, so the writer's cursor can be set now.
        self._set_cursors()

    def __len__(self) -> int:
        if self._untold is not None:
            self._set_cursors()
        return self._size

    @property
    def shape(self) -> torch.Size:
        """The shape ``(number of steps,)``."""
        return torch.Size([len(self)])

    def __repr__(self) -> str:
        return f"StoreStorage({str(self._path)!r}, len={self._size}, max_size={self._capacity or UNBOUNDED})"

    # --- writing -----------------------------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append the steps in `data`. `cursor` must have the positions that follow the newest step.

        Raises
        ------
        ReadOnlyError
            `cursor` has other positions, or the store was opened with mode "r".
        SchemaError
            An item is not a step, or does not fit the schema; nothing was appended.
        SchemaError, StorageFull
            `validate` of the store refuses an item, or the disk is full for an item. All earlier items are appended.
        """
        check_open(self, self._close)
        items = _stacked(data)
        positions = np.atleast_1d(range(self.max_size)[cursor] if isinstance(cursor, slice) else _as_numpy(cursor))
        if len(positions) != len(items):
            raise ValueError(f"{len(items)} items do not fit {len(positions)} positions")
        next_ones = (self._next + np.arange(len(items))) % self.max_size
        if not set_cursor or (self._untold is None and not np.array_equal(positions, next_ones)):
            raise dr.ReadOnlyError(
                f"position {positions[0]} cannot be written: the steps of a store never change, and the next one goes "
                f"to position {self._next}, by add or extend of the one buffer that writes to this storage"
            )
        ids: list[int] = []
        whole = False
        try:
            for number in self._append(items):
                ids.append(number)
            whole = True
        finally:
            placed = self._place(np.array(ids, np.int64))
            self._tell_samplers(int(placed[-1]) if len(placed) else None)
            # If all items are appended and the cursors were set before, the buffer itself moves its cursor.
            if self._untold is not None or not whole:
                self._untold = placed if self._untold is None else np.concatenate([self._untold, placed])
        if self._untold is not None:
            self._set_cursors()

    def _append(self, items: TensorDictBase) -> Iterator[int]:
        """Append each item to its episode, and yield the item's id. If an item does not fit, append nothing."""
        store, count = self._opened(items), len(items)
        schema = store.schema
        extra = {name: _values(tree, items, (name,)) for name, tree in schema.extra.items()}

        def cast(part: str, values: Any) -> Any:
            return schema.unflatten(part, schema.cast(part, values, (count,)))

        obs, next_obs = (cast("obs", _observations(schema.obs, items, above)) for above in ((), ("next",)))
        action, extra = cast("action", _values(schema.action, items, ("action",))), cast("extra", extra)
        reward = schema.reward.cast(_column(items, ("next", "reward")), "reward", (count,))
        terminated, truncated = _ends(items)
        trajectories = _column(items, TRAJECTORY).tolist() if TRAJECTORY in items.keys(True) else [0] * count
        for i, trajectory in enumerate(trajectories):
            writer = self._writers.of(store, trajectory)
            ends = bool(terminated[i]), bool(truncated[i])
            writer.append(row_of(obs, i), row_of(action, i), reward[i], *ends, row_of(next_obs, i), **row_of(extra, i))
            if any(ends):
                self._writers.ended(trajectory)
            yield writer.last_id

    def _opened(self, items: TensorDictBase) -> dr.Store:
        if self._store is None:
            self._store = dr.create(self._path, _schema_of(items[0]), capacity=self._capacity, exist_ok=True)
            self._kept.insert(0, self._store)
            self._attach_sampler(self._store)
        return self._store

    # --- reading -----------------------------------------------------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Return the steps at the positions `index`. If `index` is a key, return the values of this key in all steps.

        Raises
        ------
        IndexError
            The position does not exist.
        InvalidIndex
            The store has evicted a step for another reason than its capacity.
        """
        if isinstance(index, tuple) and len(index) == 1 and not isinstance(index[0], str):
            index = index[0]
        if isinstance(index, str | tuple):
            return self.get(slice(None))[index]
        check_open(self, self._close)
        if self._store is None:
            raise IndexError("the storage is empty")
        ids = np.asarray(self._ids[: len(self)][_as_numpy(index)])
        found = self._sampler.gather(ids.reshape(-1)).to_tensordict()
        found = found.exclude("index", "priority_weight")  # samplers of TorchRL add these keys again
        # The flags at the root tell whether the episode ended before the step. They are always false.
        found.update(dict(zip(FLAGS, torch.zeros(3, *found["next", "done"].shape, dtype=torch.bool), strict=True)))
        return found if ids.ndim == 1 else found.reshape(ids.shape)

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Make the steps durable. Return the uuid of the store, the id at each position, and the next position."""
        self._writers.flush()
        return {
            "uuid": None if self._store is None else self._store.uuid,
            "ids": torch.as_tensor(self._ids[: self._size].copy()),
            "next": self._next,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the steps at their positions, followed by the steps that were added after the state was saved.

        Raises
        ------
        StoreNotFound
            The state is of another store.
        """
        uuid = None if self._store is None else self._store.uuid
        if state_dict["uuid"] not in (None, uuid):
            raise dr.StoreNotFound(
                f"the state is of the store {state_dict['uuid']}, and the store at {self._path} is {uuid}"
            )
        ids, self._size, self._next = state_dict["ids"].numpy().copy(), 0, 0
        if self._store is not None:
            there = self._sampler.ids()
            newest = np.flatnonzero(there == (ids[int(state_dict["next"]) - 1] if len(ids) else -1))
            since = there[int(newest[0]) + 1 :] if len(newest) else there
            # Steps that were added since the save take the positions of evicted steps. If fewer steps were added than
            # evicted, all steps get new positions.
            if len(newest) and np.isin(ids, there).sum() >= len(ids) - len(since):
                self._place(ids)
                self._next = int(state_dict["next"])
            self._untold = self._place(since)
        self._tell_samplers()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        for name in ("_kept", "_close", "_writers", "_sampler"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._durability = state["_durability"]
        self._begin()
        super().__setstate__(state)
        if self._store is not None:
            self._kept.append(self._store)
            self._attach_sampler(self._store)


def _schema_of(item: TensorDictBase) -> dr.Schema:
    values: dict[Key, Any] = {}
    for key, value in item.items(include_nested=True, leaves_only=True):
        values[key if isinstance(key, tuple) else (key,)] = value
    own = {"action", "reward", "index", *FLAGS}
    obs = [key for key in values if ("next", *key) in values and key[0] not in own]
    if not obs:
        raise dr.SchemaError(f"an item has no observation (a key both at the root and in 'next'): {list(values)}")
    taken = {("next", name) for name in ("reward", *FLAGS)}.union(obs, (("next", *key) for key in obs))
    kept = [key for key in values if key not in taken and key[0] not in own - {"reward"}]
    action = _nested({key: value for key, value in values.items() if key[0] == "action"})
    if not action:
        raise dr.SchemaError(f"an item has no 'action': {list(values)}")
    lone = obs == [("observation",)]
    tree = values[obs[0]] if lone else _nested({key: values[key] for key in obs})
    return dr.Schema.from_example(tree, action["action"], extra=_nested({key: values[key] for key in kept}))


def _nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        below = tree
        for name in key[:-1]:
            below = below.setdefault(name, {})
        below[key[-1]] = value
    return tree


def _stacked(data: Any) -> TensorDictBase:
    """Return the items in ``data`` as one tensordict with one axis."""
    if isinstance(data, list) and data and is_tensor_collection(data[0]):
        data = lazy_stack(data)
    if not is_tensor_collection(data):
        raise dr.SchemaError(f"items must be TensorDicts, not {type(data).__name__}")
    items: TensorDictBase = data if isinstance(data, TensorDictBase) else data.to_tensordict()
    if items.ndim > 1:
        raise dr.SchemaError(
            f"items must be single steps, and these have the shape {tuple(items.shape[1:])}: extend(data.reshape(-1))"
        )
    return (items if items.ndim else items.unsqueeze(0)).cpu()


def _as_numpy(index: Any) -> Any:
    if isinstance(index, torch.Tensor):
        return index.cpu().numpy()
    return np.asarray(index) if isinstance(index, range | list) else index


def _value(items: TensorDictBase, key: Key) -> torch.Tensor:
    value = items.get(key, None)
    if not isinstance(value, torch.Tensor):
        raise dr.SchemaError(f"an item has no tensor {key[0] if len(key) == 1 else key!r}, which the store holds")
    return value


def _values(tree: Any, items: TensorDictBase, key: Key) -> Any:
    if isinstance(tree, dr.Field):
        return _value(items, key)
    parts = tree.items() if isinstance(tree, Mapping) else ((str(i), part) for i, part in enumerate(tree))
    return {name: _values(part, items, (*key, name)) for name, part in parts}


def _observations(tree: Any, items: TensorDictBase, above: Key) -> Any:
    return _values(tree, items, (*above, "observation") if isinstance(tree, dr.Field) else above)


def _column(items: TensorDictBase, key: Key) -> NDArray[Any]:
    """Return the values of a key as ``(n,)``. In TorchRL, the shape of a key with one number per item is ``(n, 1)``."""
    value = _value(items, key)
    if value.numel() != len(items):
        raise dr.SchemaError(f"{key} has the shape {tuple(value.shape)}, and needs one number an item")
    return value.detach().reshape(-1).numpy()


def _ends(items: TensorDictBase) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two masks of items: where the episode terminates, and where the episode is truncated.

    Without the key "terminated", an item that is done and not truncated terminates its episode.
    """
    keys = {name: ("next", name) for name in FLAGS if ("next", name) in items.keys(True)}
    flags = {name: as_flags(_column(items, key), name) for name, key in keys.items()}
    if not flags:
        raise dr.SchemaError("an item has no tensor ('next', 'done'), which says whether its episode ends")
    done = flags.get("done", np.zeros(len(items), np.bool_))
    terminated = flags.get("terminated", done & ~flags.get("truncated", np.zeros_like(done)))
    return terminated, flags.get("truncated", np.zeros_like(done)) | (done & ~terminated)
