"""A replay buffer of Tianshou whose observations and actions are in a store."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay import MissingExtra
from diskreplay.closing import Kept, check_open, closes
from diskreplay.interop.step_values import as_flags, leaves_of, map_leaves

with MissingExtra.raised_for("a replay buffer of Tianshou", "tianshou"):
    import torch
    from tianshou.data import Batch, PrioritizedVectorReplayBuffer, ReplayBufferManager, VectorReplayBuffer

__all__ = ["StorePrioritizedReplayBuffer", "StoreReplayBuffer"]

PathLike = str | os.PathLike[str]
Array = NDArray[Any]

# The keys of Tianshou whose values are in the store: {key: field of a batch of `Transitions`}.
FIELDS = {"obs": "obs", "act": "action", "obs_next": "next_obs"}
# The keys of the arrays that Tianshou keeps in memory. In this class, the array "obs" has the ids of the steps.
KEYS = ("obs", "act", "rew", "terminated", "truncated", "done", "info", "policy")


class InStore(ReplayBufferManager):  # type: ignore[misc]
    """A base class that keeps a buffer's steps in a store. Put this class before Tianshou's in a list of bases."""

    _set_keys: frozenset[str] = frozenset()  # the keys that the user has set; Tianshou's `add` does not write them

    def __init__(
        self,
        store: dr.Store | PathLike,
        total_size: int,
        buffer_num: int = 1,
        *,
        save_only_last_obs: bool = False,
        durability: float | str = 5.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(total_size, buffer_num, **kwargs)
        self._last_frame, self._durability = save_only_last_obs, durability
        self._path = Path(store.path if isinstance(store, dr.Store) else store).absolute()
        self._store = store if isinstance(store, dr.Store) else None
        self._begin()
        self._null = np.zeros(self.maxsize, np.bool_)  # Whether each step has a NaN in the store.
        # The array "obs" has ids, not observations. "act" has no meaning, but Tianshou needs this key in every batch.
        flags = {name: np.zeros(self.maxsize, np.bool_) for name in ("terminated", "truncated", "done", "act")}
        super().set_batch(Batch(obs=np.full(self.maxsize, -1), rew=np.zeros(self.maxsize), **flags))
        if self._store is None:
            with suppress(dr.StoreNotFound):
                self._store = dr.open(self._path, "a")
                self._kept.append(self._store)
        if self._store is not None:
            self._restore(self._store)

    def _begin(self) -> None:
        self._writer: dr.VectorWriter | None = None
        self._samplers: dict[str, dr.Sampler] = {}
        self._kept: Kept = []
        self._close = closes(self, self._kept)

    def close(self) -> None:
        """Close the writer, and the store if a path was given. Closing twice is fine."""
        self._close()

    def _restore(self, store: dr.Store) -> None:
        lanes: list[list[dr.Episode]] = [[] for _ in self.buffers]
        for episode in store.episodes:
            lanes[episode.lane % self.buffer_num].append(episode)
        with dr.Sampler(store, dr.Transitions(n_step=1)) as sampler:
            there = sampler.ids()
        for lane, (episodes, buffer) in enumerate(zip(lanes, self.buffers, strict=True)):
            chosen: list[dr.Episode] = []
            # A lower bound of the number of sampleable steps in `chosen`: the last step of an episode may not be
            # sampleable.
            at_least = 0
            while episodes and at_least < buffer.maxsize:
                chosen.insert(0, episodes.pop())
                at_least += len(chosen[0]) - 1
            if not chosen:
                continue
            ids, rewards = (np.concatenate(part) for part in zip(*((ep.ids, ep.reward) for ep in chosen), strict=True))
            number = np.repeat(np.arange(len(chosen)), [len(episode) for episode in chosen])
            kept = np.flatnonzero(np.isin(ids, there))[-buffer.maxsize :]
            if not len(kept):
                continue
            last = np.append(np.diff(number[kept]) > 0, True)
            terminated = last & np.array([episode.terminated for episode in chosen])[number[kept]]
            flags = {"terminated": terminated, "truncated": last & ~terminated, "act": np.zeros_like(last)}
            super().add(Batch(obs=ids[kept], rew=rewards[kept], **flags), np.full(len(kept), lane))

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(self, batch: Any, buffer_ids: Any = None) -> Any:
        """Add a step of each environment in `buffer_ids`, or of all environments if `buffer_ids` is None.

        Raises
        ------
        SchemaError
            A value differs in shape or dtype from earlier steps; nothing was added.
        StorageFull
            The disk is full; nothing was added.
        """
        check_open(self, self._close)
        lanes = np.arange(self.buffer_num) if buffer_ids is None else np.asarray(buffer_ids)
        obs, after, action = (_tree(batch[key]) for key in ("obs", "obs_next", "act"))
        if self._last_frame:
            obs, after = map_leaves(_newest_frame, obs), map_leaves(_newest_frame, after)
        writer = self._writer or self._opened(obs, action)
        flags = (as_flags(batch[key], key) for key in ("terminated", "truncated"))
        values = obs, action, np.asarray(batch["rew"]), *flags, after
        mask = None
        if not np.array_equal(lanes, np.arange(self.buffer_num)):
            mask = np.isin(np.arange(self.buffer_num), lanes)
            values = tuple(map_leaves(partial(_spread, lanes=lanes, count=len(mask)), tree) for tree in values)
        now, act, reward, ends, cuts, then = values
        writer.append(now, act, reward, ends, cuts, then, mask)
        rows = {key: batch[key] for key in batch.get_keys() if key not in FIELDS}
        rows |= {"obs": writer.last_ids[lanes], "act": np.zeros(len(lanes), np.bool_)}
        result = super().add(Batch(rows), buffer_ids)
        self._null[result[0]] = np.any([_nulls(leaf) for tree in (obs, after, action) for leaf in leaves_of(tree)], 0)
        return result

    def _opened(self, obs: Any, action: Any) -> dr.VectorWriter:
        if self._store is None:
            step = dr.Schema.from_example(map_leaves(_first, obs), map_leaves(_first, action))
            schema = dr.Schema(step.obs, step.action, dr.Field((), "float64"))
            self._store = dr.create(self._path, schema, capacity=2 * self.maxsize, exist_ok=True)
            self._kept.insert(0, self._store)
        self._writer = self._store.writer(self.buffer_num, durability=self._durability)
        self._writer.leave_at_exit()
        self._kept.append(self._writer)
        return self._writer

    def reset(self, keep_statistics: bool = False) -> None:
        """Forget all steps and cut the open episodes. The steps stay in the store."""
        super().reset(keep_statistics)
        if self._writer is not None:
            self._writer.end_episode()

    # --- reading -----------------------------------------------------------------------------------------------------

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        if key not in FIELDS:
            return super().__getattr__(key)
        check_open(self, self._close)
        if key not in self._samplers:
            if self._store is None:
                raise AttributeError(f"the buffer has no steps, and so no {key}")
            sampler = dr.Sampler(self._store, dr.Transitions(n_step=1), fields=(FIELDS[key],), seed=0)
            self._kept.append(sampler)
            self._samplers[key] = sampler
        return Column(super().get, self.maxsize, self._samplers[key], FIELDS[key])

    def get(self, index: Any, key: str, default_value: Any = None, stack_num: int | None = None) -> Any:
        if key not in FIELDS:
            return super().get(index, key, default_value, stack_num)
        column, depth = self.__getattr__(key), self.stack_num if stack_num is None else stack_num
        if depth == 1:
            return column[index]
        stack: list[Any] = []
        indices: Any = np.array(index) if isinstance(index, list) else index
        for _ in range(depth):
            stack.insert(0, column[indices])
            indices = self.prev(indices)
        join: Any = Batch.stack if isinstance(stack[0], Batch) else np.stack
        return join(stack, axis=np.ndim(indices))

    def hasnull(self) -> bool:
        """Return whether the buffer has a NaN.

        The store is not read: `add` has noted the steps with a NaN in an observation or action.
        """
        held = self.sample_indices(0)
        return bool(self._null[held].any()) or bool(len(held) and Batch(self._held(held)).hasnull())

    def _held(self, index: Any) -> dict[str, Any]:
        get, nothing = super().get, object()
        found = {key: get(index, key, nothing, stack_num=1) for key in (*KEYS, *self._set_keys)}
        return {key: value for key, value in found.items() if value is not nothing}

    # --- methods that would change steps -----------------------------------------------------------------------------

    def set_array_at_key(self, seq: Array, key: str, index: Any = None, default_value: float | None = None) -> None:
        """Set a key's values in memory. Raises ReadOnlyError for a key whose values are in the store."""
        if key in FIELDS:
            raise dr.ReadOnlyError(f"{key} cannot be set: the steps of a store never change")
        self._set_keys |= {key} - set(KEYS)
        super().set_array_at_key(seq, key, index, default_value)

    def set_batch(self, batch: Any) -> None:
        raise dr.ReadOnlyError("steps of a store cannot be replaced; add new ones")

    def dropnull(self) -> None:
        raise dr.ReadOnlyError("steps of a store cannot be dropped; store.evict evicts episodes")

    # --- pickles -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Make the steps durable in the store, and return the state without the steps."""
        if self._writer is not None:
            self._writer.flush()
        opened = ("_writer", "_samplers", "_kept", "_close")
        return {name: value for name, value in self.__dict__.items() if name not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin()
        if self._store is not None:
            self._kept.append(self._store)
        # After unpickling, the rings of environments have copies of the buffer's arrays. Replace each copy by a view.
        held = self._held(slice(None))
        super().set_batch(Batch({key: held.pop(key) for key in KEYS if key in held}))
        for key, values in held.items():
            super().set_array_at_key(values, key)

    def save_hdf5(self, path: str, compression: str | None = None) -> None:
        """Save the state of a pickle to an HDF5 file. The file has no steps."""
        plain: Any = SimpleNamespace(**self.__getstate__())
        ReplayBufferManager.save_hdf5(plain, path, compression)


class StoreReplayBuffer(InStore, VectorReplayBuffer):  # type: ignore[misc]
    """A `VectorReplayBuffer` of Tianshou whose steps are in a store: ``Collector(policy, envs, buffer)``.

    Collectors, trainers and off-policy algorithms use this class like Tianshou's own buffer. Indices have the same
    meaning. With equal seeds, batches and n-step returns are equal. Observations and actions are only in the store,
    each observation once. Memory holds the id, reward and flags of each step, and other data of the collector, such as
    infos.

    An existing store is continued: the newest steps of each environment fill the buffer, oldest first. A pickle or a
    file of `save_hdf5` has the ids and the path of the store. `reset` forgets the steps and leaves them in the store.

    Concurrency: one thread of one process. Other processes may read the store.

    Parameters
    ----------
    store : Store or path
        A store that is open with mode "a", or a path. If the path has no store, the first step makes a store with a
        capacity of twice `total_size`. The capacity is larger than `total_size` because an environment that steps less
        often keeps older steps in its ring.
    total_size : int
        Number of steps in the buffer, over all environments.
    buffer_num : int
        Number of environments. Each environment has its own ring.
    stack_num, ignore_obs_next, sample_avail, random_seed
        As for Tianshou's `ReplayBuffer`.
    save_only_last_obs : bool
        Store only the last frame of a stacked observation; `stack_num` stacks frames again.
    durability : float or str
        As for `Store.writer`.

    Raises
    ------
    InvalidIndex
        The store has evicted a step that a method reads. Give the store a larger capacity.
    """


class StorePrioritizedReplayBuffer(InStore, PrioritizedVectorReplayBuffer):  # type: ignore[misc]
    """A `PrioritizedVectorReplayBuffer` of Tianshou whose steps are in a store; see `StoreReplayBuffer`.

    Parameters
    ----------
    alpha, beta, weight_norm
        As for Tianshou's `PrioritizedReplayBuffer`.
    **kwargs
        Other arguments of `StoreReplayBuffer`.
    """


class Column:
    def __init__(self, get: Callable[..., Any], count: int, sampler: dr.Sampler, field: str) -> None:
        self._get, self._count, self._sampler, self._field = get, count, sampler, field

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        """Return an array; for a Dict space, a Batch of arrays. Raises InvalidIndex for an index without a step."""
        ids = np.asarray(self._get(index, "obs", stack_num=1))
        return _shown(self._sampler.gather(ids.reshape(-1))[self._field], ids.shape)


def _shown(tree: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.numpy().reshape((*shape, *tree.shape[1:]))[()]  # as in NumPy, one index gives a number
    return Batch({name: _shown(part, shape) for name, part in tree.items()})


def _tree(value: Any) -> Any:
    return {key: _tree(value[key]) for key in value.get_keys()} if isinstance(value, Batch) else np.asarray(value)


def _first(leaf: Array) -> Any:
    return leaf[0]


def _newest_frame(leaf: Array) -> Array:
    return leaf[:, -1]


def _spread(values: Array, lanes: Array, count: int) -> Array:
    """Return an array with a row per environment: `values` in the rows `lanes`, and zeros in all other rows."""
    rows = np.zeros((count, *values.shape[1:]), values.dtype)
    rows[lanes] = values
    return rows


def _nulls(leaf: Array) -> Array:
    if leaf.dtype.kind != "f":
        return np.zeros(len(leaf), np.bool_)
    return np.asarray(np.isnan(leaf).reshape(len(leaf), -1).any(1))
