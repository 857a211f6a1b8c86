"""Replay buffers for Stable-Baselines3 and CleanRL whose steps are in a store."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.closing import Kept, check_open, closes
from diskreplay.interop.step_values import as_flags, map_leaves

with dr.MissingExtra.raised_for("a buffer of Stable-Baselines3", "sb3"):
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer

__all__ = ["DiskDictReplayBuffer", "DiskHerReplayBuffer", "DiskReplayBuffer"]

PathLike = str | os.PathLike[str]
Array = NDArray[Any]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

_FIELDS = ("obs", "action", "reward", "next_obs", "terminated")
# Attributes that are not pickled: their values are in the store, or belong to this process.
_LEFT_OUT = {
    "_ids",
    "_last",
    "rewards",
    "dones",
    "timeouts",
    "_store",
    "_writer",
    "_sampler",
    "_relabelled",
    "_kept",
    "_close",
    "env",
}


# An `NStepReplayBuffer` gets these attributes of a `DiskReplayBuffer`, so that it draws the same steps.
_SHARED = (
    *("buffer_size", "pos", "full"),
    *("observations", "next_observations", "actions", "rewards", "dones", "timeouts"),
)


class Column:
    """A field of a buffer's steps, read from the store by position and environment: ``column[positions, envs]``.

    A position without a step raises InvalidIndex.
    """

    def __init__(self, buffer: "DiskReplayBuffer", field: str, shape: tuple[int, ...]) -> None:
        self._buffer, self._field, self._shape = buffer, field, shape

    def __getitem__(self, index: Any) -> Array:
        ids = np.asarray(self._buffer._ids[index])
        values: Array = self._buffer._gathered(ids.reshape(-1))[self._field].numpy()
        return values.reshape(*ids.shape, *self._shape)


class Columns:
    """A descriptor. Its value is a `Column` of a buffer or, for a Dict space, a dict of columns.

    `ReplayBuffer.__init__` hides the descriptor by an attribute of the same name.
    """

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, buffer: "DiskReplayBuffer | None", owner: type) -> Any:
        if buffer is None:
            return self
        shape: Any = (buffer.action_dim,) if self._field == "action" else buffer.obs_shape
        if isinstance(shape, dict):
            return {key: Column(buffer, f"{self._field}/{key}", part) for key, part in shape.items()}
        return Column(buffer, self._field, shape)


class DiskReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of Stable-Baselines3 whose steps are in a store.

    Give this class to DQN, SAC or TD3 as ``replay_buffer_class=DiskReplayBuffer, replay_buffer_kwargs={"path":
    "run.replay"}``; for Dict observations there is `DiskDictReplayBuffer`. CleanRL's scripts take this class in place
    of the `ReplayBuffer` that the scripts import. As in Stable-Baselines3, numpy's global generator draws positions.
    With equal seeds, batches and trained networks are the same as with the library's own buffer, bit for bit.

    Observations and actions are only in the store, each observation once. Memory holds the id, the reward and the flags
    of each position, 20 bytes a position. An existing store is continued: its newest steps fill the buffer, so a killed
    run and a loaded model continue with these steps. A pickle of ``save_replay_buffer`` has the path of the store and
    the position of the next step, but no steps. After loading, the buffer also has the steps that were added later.

    If a step's observation is not the next observation of the step before, the episode is cut between the two steps.
    This happens after a reset. The step before the cut bootstraps from its next observation. If a store was written
    with a different number of environments, its steps are assigned to environments in the order of time. Then
    successive steps of an environment may belong to different episodes. A return over several steps ends between two
    such steps.

    Concurrency: one thread of one process, as in Stable-Baselines3. Other processes may read the store.

    Parameters
    ----------
    buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination
        As for `ReplayBuffer`.
    optimize_memory_usage : bool
        No effect: each observation is always stored once, also with `handle_timeout_termination`, and every step can be
        drawn.
    path : path, Store or None
        The store, or the path of a store. If the path has no store, the first step makes one. If a Store is given, the
        buffer opens the store again by its path. None: a temporary folder that is removed with the buffer.
    n_steps : int
        Number of steps in a return, as for `NStepReplayBuffer`.
    gamma : float
        Discount per step in a return.
    durability : float or str
        As for `Store.writer`. Nothing is made durable in a temporary folder.
    **kwargs
        Other arguments of the Stable-Baselines3 buffer that a subclass extends.

    Raises
    ------
    ValueError
        `n_steps` is less than 1, or the observation space is a Dict.
    StoreExists
        The store at the path has other spaces, or keeps fewer steps than `buffer_size`.
    """

    n_steps: int
    observations = Columns("obs")
    """Observations, indexed as `buffer.observations[positions, environments]`; a dict for a Dict space."""
    next_observations = Columns("next_obs")
    """Next observations, indexed like `observations`."""
    actions = Columns("action")
    """Actions, indexed like `observations`."""
    _samples: Callable[..., Any] = ReplayBufferSamples

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = True,
        handle_timeout_termination: bool = True,
        *,
        path: PathLike | dr.Store | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        durability: float | str = 5.0,
        **kwargs: Any,
    ) -> None:
        if n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, not {n_steps!r}")
        if isinstance(observation_space, spaces.Dict) and not isinstance(self, DictReplayBuffer):
            raise ValueError(
                f"the observation space must not be a Dict: take DiskDictReplayBuffer for {observation_space}"
            )
        kwargs |= {"device": device, "n_envs": n_envs, "handle_timeout_termination": handle_timeout_termination}
        super().__init__(n_envs, observation_space, action_space, **kwargs)
        # Delete the arrays of `ReplayBuffer.__init__`. Then the names refer to the `Columns` of the class.
        del self.observations, self.next_observations, self.actions
        self._capacity = max(buffer_size, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = True
        self.n_steps, self.gamma = n_steps, gamma
        self._path = None if path is None else Path(path.path if isinstance(path, dr.Store) else path).absolute()
        self._durability: Any = "none" if path is None else durability
        self._uuid: str | None = None
        # The shapes of the actions and observations of one step, with a leading axis of environments.
        self._action_shape = (n_envs, *(action_space.shape or ()))
        self._obs_shape = (
            {key: (n_envs, *(part.shape or ())) for key, part in observation_space.items()}
            if isinstance(observation_space, spaces.Dict)
            else (n_envs, *(observation_space.shape or ()))
        )
        self._no_timeouts = np.zeros(n_envs, np.bool_)
        self._begin()
        self._restore()

    # --- the store ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._store: dr.Store | None = None
        self._writer: dr.Writer | dr.VectorWriter | None = None
        self._kept: Kept = []
        self._close = closes(self, self._kept)
        self._forget()
        if self._path is not None:
            with suppress(dr.StoreNotFound):
                # `open` raises StoreNotFound if the store does not exist: the first step makes the store
                dr.open(self._path).close()
                self._open(self._path, found=True)

    def _forget(self) -> None:
        shape = self.buffer_size, self.n_envs
        self.pos, self.full = 0, False
        self._ids: Ints = np.full(shape, -1, np.int64)
        self.rewards, self.dones, self.timeouts = np.zeros((3, *shape), np.float32)
        self._last: tuple[Ints, dr.Batch] | None = None
        self._unseen = 0  # the number of positions that were filled since the last refresh of the store

    def _open(self, path: Path, found: bool, folder: str | None = None) -> None:
        """Open the store at ``path`` if ``found`` is true, otherwise make a store there.

        ``folder`` is a temporary folder to remove when the buffer is closed.
        """
        space, action = self.observation_space, self.action_space
        obs = {key: _field(part) for key, part in space.items()} if isinstance(space, spaces.Dict) else _field(space)
        dtype = np.dtype(np.float32) if action.dtype == np.float64 else action.dtype  # `ReplayBuffer` does the same
        schema = dr.Schema(obs, dr.Field(action.shape, dtype))
        self._store = store = dr.create(path, schema, capacity=None if found else self._capacity, exist_ok=found)
        self._uuid = store.uuid
        self._kept.append(store)
        if folder is not None:
            self._close.detach()
            self._close = closes(self, self._kept, folder)
        if store.capacity is not None and store.capacity < self._capacity:
            capacity = store.capacity
            self.close()
            raise dr.StoreExists(
                f"the store at {path} keeps {capacity} steps, fewer than buffer_size={self._capacity}: give it a new "
                f'path, or change it with diskreplay.open(path, "a").resize(capacity={self._capacity})'
            )
        self._sampler = self._sampler_of(_Steps())

    def _sampler_of(self, view: dr.Transitions, seed: int = 0) -> dr.Sampler:
        assert self._store is not None
        # The buffer itself refreshes the store when a batch needs steps that were added since the last refresh. A
        # sampler that relabels draws ids itself, and refreshes the store for each batch.
        sampler = dr.Sampler(self._store, view, fields=_FIELDS, seed=seed, refresh=view.relabel is not None)
        self._kept.append(sampler)
        return sampler

    def _opened_writer(self) -> dr.Writer | dr.VectorWriter:
        check_open(self, self._close)
        if self._store is None:
            folder = tempfile.mkdtemp(prefix="diskreplay-") if self._path is None else None
            self._open(self._path or Path(str(folder)) / "store", False, folder)
        assert self._store is not None
        if self.n_envs == 1:
            writer: dr.Writer | dr.VectorWriter = self._store.writer(durability=self._durability)
        else:
            writer = self._store.writer(self.n_envs, durability=self._durability)
        writer.leave_at_exit()
        writer.report_cuts_to(self._note_cut)
        self._kept.append(writer)
        self._writer = writer
        return writer

    def __repr__(self) -> str:
        path = None if self._path is None else str(self._path)
        return f"{type(self).__name__}({path!r}, size={self.size()}, n_envs={self.n_envs})"

    @property
    def store(self) -> dr.Store | None:
        """The store with the steps, or None before the first step. Closing the buffer closes the store."""
        return self._store

    def close(self) -> None:
        """Close the store, and delete it if it is temporary; batches stay valid. Closing twice is fine."""
        self._close()

    def reset(self) -> None:
        """Forget all steps, and evict them from the store."""
        check_open(self, self._close)
        if self._writer is not None:
            self._kept.remove(self._writer)
            self._writer.close()
            self._writer = None
        if self._store is not None:
            self._store.refresh()
            self._store.evict(lambda _: True)
        self._forget()

    def _restore(self) -> None:
        """Fill the buffer with the newest steps of the store; the oldest of these steps gets position 0."""
        store = self._store
        if store is None:
            return
        ids, episodes = self._sampler.ids(), list(store.episodes)
        lanes = 1 + max((episode.lane for episode in episodes), default=-1)
        if lanes > 1 and (lanes != self.n_envs or len(ids) % lanes) and store.capacity is not None:
            # Steps that were added together are evicted together. If the store has more lanes than the buffer has
            # environments, such steps are at several positions. With more capacity, no step is evicted before the
            # buffer overwrites it.
            store.resize(capacity=max(store.capacity, self._capacity + lanes))
        ids, number = self._by_position(ids, episodes)
        count = len(ids)
        if not count:
            return
        with dr.Sampler(store, dr.Transitions(n_step=1), fields=("reward", "terminated")) as sampler:
            batch = sampler.gather(ids.reshape(-1))
            reward, terminated = (batch[name].numpy().reshape(ids.shape) for name in ("reward", "terminated"))
        last = np.ones(ids.shape, np.bool_)  # true at the last step of an episode, and at the newest position
        last[:-1] = number[1:] != number[:-1]
        self._ids[:count], self.rewards[:count] = ids, reward
        self.dones[:count], self.timeouts[:count] = last, last & ~terminated
        self.pos, self.full = count % self.buffer_size, count == self.buffer_size

    def _by_position(self, ids: Ints, episodes: list[dr.Episode]) -> tuple[Ints, Ints]:
        """Return the newest ids, and the number of each id's episode; both are ``(positions, environments)``.

        ``ids`` are the ids of all sampleable steps, oldest first. An episode's number is its index in ``episodes``.
        """
        shape = -1, self.n_envs
        ids = ids[len(ids) % self.n_envs :]
        known: Ints = np.concatenate([np.zeros(0, np.int64), *(episode.ids for episode in episodes)])
        number = np.repeat(np.arange(len(episodes)), [len(episode) for episode in episodes])
        order = np.argsort(known)
        number = number[order[np.searchsorted(known, ids, sorter=order)]]
        # Environments step together, so the steps of one position are successive in ``ids``.
        lanes = np.array([episode.lane for episode in episodes], np.int64)[number]
        column = np.argsort(lanes.reshape(shape), axis=1, kind="stable")
        found = [np.take_along_axis(x.reshape(shape), column, 1)[-self.buffer_size :] for x in (ids, number)]
        return found[0], found[1]

    # --- pickles -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._path is None:
            raise ValueError(
                "this buffer is in a temporary folder, which is removed with it: to save it, make it with a path, "
                'replay_buffer_kwargs={"path": ...}'
            )
        if self._writer is not None:
            self._writer.flush()
        state = {name: value for name, value in vars(self).items() if name not in _LEFT_OUT}
        return {**state, "_newest": self._ids[self.pos - 1].copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the store, and fill the buffer with the newest steps, even steps that were added after pickling."""
        newest, pos, uuid = state.pop("_newest"), state["pos"], state["_uuid"]
        self.__dict__.update(state)
        self._begin()
        if uuid is not None and (self._store is None or self._uuid != uuid):
            self.close()
            raise dr.StoreNotFound(f"the store of this buffer is not at {self._path}: move it back there")
        self._restore()
        since = np.flatnonzero((self._ids == newest).all(1))
        if self.full and len(since):
            # A step must keep its position, since later draws depend on positions.
            self.pos = (pos - 1 - int(since[0])) % self.buffer_size
            for name in ("_ids", "rewards", "dones", "timeouts"):
                self.__dict__[name] = np.roll(self.__dict__[name], self.pos, axis=0)

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(
        self, obs: Any, next_obs: Any, action: Array, reward: Array, done: Array, infos: list[dict[str, Any]]
    ) -> None:
        """Add a step of every environment.

        Raises
        ------
        SchemaError
            A value does not fit the space; nothing was added.
        StorageFull
            The disk is full; nothing was added.
        """
        writer, pos = self._writer or self._opened_writer(), self.pos
        action = action.reshape(self._action_shape)
        try:
            if isinstance(writer, dr.VectorWriter):
                self._add_to_lanes(writer, obs, next_obs, action, reward, done, infos)
            else:
                # For one step, a Writer is ten times as fast as a VectorWriter.
                ends, now, then = bool(as_flags(done, "done")[0]), self._first(obs), self._first(next_obs)
                cuts = self.handle_timeout_termination and bool(infos[0].get("TimeLimit.truncated", False))
                writer.append(now, action[0], reward[0], ends and not cuts, ends and cuts, then)
                self._ids[pos, 0], self.rewards[pos, 0] = writer.last_id, reward[0]
                if ends or cuts or self.full:
                    self.dones[pos, 0], self.timeouts[pos, 0] = ends, cuts
        except dr.Closed:
            check_open(self, self._close)
            raise
        self._unseen += 1
        self.pos = pos + 1
        if self.pos == self.buffer_size:
            self.pos, self.full = 0, True

    def _add_to_lanes(
        self,
        writer: dr.VectorWriter,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        ended, timeouts = as_flags(done, "done"), self._no_timeouts
        if self.handle_timeout_termination:
            timeouts = np.array([info.get("TimeLimit.truncated", False) for info in infos], np.bool_)
        cuts = ended & timeouts
        writer.append(self._by_lane(obs), action, reward, ended ^ cuts, cuts, self._by_lane(next_obs))
        pos = self.pos
        self._ids[pos], self.rewards[pos] = writer.last_ids, reward
        self.dones[pos], self.timeouts[pos] = ended, timeouts

    def _by_lane(self, obs: Any) -> Any:
        shape = self._obs_shape
        if isinstance(shape, dict):
            return {key: _with_lanes(obs[key], each) for key, each in shape.items()}
        return _with_lanes(obs, shape)

    def _first(self, obs: Any) -> Any:
        if type(obs) is np.ndarray and obs.shape == self._obs_shape:
            return obs[0]
        obs = self._by_lane(obs)
        return {key: leaf[0] for key, leaf in obs.items()} if isinstance(obs, dict) else obs[0]

    def _note_cut(self, lane: int) -> None:
        """Mark the newest step of an environment as the last step of a truncated episode."""
        self.dones[self.pos - 1, lane] = self.timeouts[self.pos - 1, lane] = True

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw steps, as `ReplayBuffer.sample` does; `env` normalizes observations and rewards."""
        try:
            if self.n_steps > 1:
                return self._n_step_buffer().sample(batch_size, env)
            positions = np.random.randint(0, self.size(), size=batch_size)
            environments = np.random.randint(0, self.n_envs, size=batch_size)
            if self._unseen and self._some_unseen(positions):
                self._see()
            at = positions if self.n_envs == 1 else positions * self.n_envs + environments
            return self._shown(self._sampler.gather(self._ids.reshape(-1).take(at)), env)
        except ValueError:
            check_open(self, self._close)
            raise

    def _n_step_buffer(self) -> NStepReplayBuffer:
        """Return a buffer of Stable-Baselines3 with the columns of this object.

        It computes returns over several steps.
        """
        spaces_of_steps = self.observation_space, self.action_space
        buffer = NStepReplayBuffer(
            self.n_envs, *spaces_of_steps, self.device, self.n_envs, n_steps=self.n_steps, gamma=self.gamma
        )
        for name in _SHARED:
            setattr(buffer, name, getattr(self, name))
        return buffer

    def _some_unseen(self, positions: Ints) -> bool:
        oldest = self.pos - self._unseen
        if not self.full:
            return bool(positions.max() >= oldest)
        return bool(((positions - oldest) % self.buffer_size < self._unseen).any())

    def _see(self) -> None:
        assert self._store is not None
        self._store.refresh()
        self._unseen = 0

    def _shown(self, batch: dr.Batch, env: VecNormalize | None) -> Any:
        """Return a batch of `_Steps` in the form of Stable-Baselines3, normalized by `env`."""
        obs, next_obs, action, reward = batch["obs"], batch["next_obs"], batch["action"], batch["reward"]
        # NumPy converts bool to float32 twice as fast as torch.
        done = torch.from_numpy(batch["terminated"].numpy().astype(np.float32))
        if env is not None:
            obs, next_obs = [
                map_leaves(self.to_torch, env.normalize_obs(map_leaves(np.asarray, x))) for x in (obs, next_obs)
            ]
            reward = self.to_torch(env.normalize_reward(reward.numpy()).astype(np.float32))
        if self.device.type != "cpu":
            obs, action, next_obs, done, reward = (
                map_leaves(lambda x: x.to(self.device), each) for each in (obs, action, next_obs, done, reward)
            )
        return self._samples(observations=obs, actions=action, next_observations=next_obs, dones=done, rewards=reward)

    def _gathered(self, ids: Ints) -> dr.Batch:
        # Keep the last batch: callers read several columns with the same ids.
        if self._last is None or not np.array_equal(self._last[0], ids):
            check_open(self, self._close)
            if self._unseen:
                self._see()
            self._last = ids, self._sampler.gather(ids)
        return self._last[1]


class _Steps(dr.Transitions):
    """Transitions of one step in the shapes of Stable-Baselines3: scalars are ``(1,)``, and actions are flat."""

    def reader(self, schema: dr.Schema, fields: Sequence[str] | None = None) -> Any:
        reader = super().reader(schema, fields)
        reader.leaves = [
            replace(leaf, shape=(prod(leaf.shape),) if leaf.path[0] == "action" else leaf.shape or (1,))
            for leaf in reader.leaves
        ]
        return reader


class DiskDictReplayBuffer(DiskReplayBuffer, DictReplayBuffer):
    """A `DictReplayBuffer` of Stable-Baselines3 whose steps are in a store; see `DiskReplayBuffer`.

    Parameters
    ----------
    relabel : Hindsight or None
        How goals of sampled steps are replaced. With a `Hindsight`, the buffer draws only steps of ended episodes. The
        seed is from numpy's global generator. Batches have the same distribution as in `HerReplayBuffer`.
        `DiskHerReplayBuffer` makes a `Hindsight` with the environment's own rewards.
    **kwargs
        Other arguments of `DiskReplayBuffer`, except `n_steps`. As in Stable-Baselines3, a return is over one step.

    Raises
    ------
    ValueError
        `n_steps` is not 1, or the observation space is not a Dict.
    """

    _samples = DictReplayBufferSamples

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        *args: Any,
        relabel: dr.Hindsight | None = None,
        n_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        if not isinstance(observation_space, spaces.Dict):
            raise ValueError(f"the observation space must be a Dict, not {observation_space}: take DiskReplayBuffer")
        if n_steps != 1:
            raise ValueError(f"n_steps must be 1 with Dict observations, not {n_steps}")
        super().__init__(buffer_size, observation_space, *args, **kwargs)
        self._relabel = relabel

    def _begin(self) -> None:
        self._relabelled: dr.Sampler | None = None
        super()._begin()

    def _hindsight(self) -> dr.Hindsight | None:
        return self._relabel

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw steps like `DictReplayBuffer.sample`; with `relabel`, like `HerReplayBuffer.sample`.

        Raises
        ------
        NotEnoughData
            `relabel` is given, and no episode has ended: use a `learning_starts` above the length of episodes.
        """
        check_open(self, self._close)
        if self._relabelled is None:
            hindsight = self._hindsight()
            if hindsight is None:
                return super().sample(batch_size, env)
            if self._store is None:
                raise dr.NotEnoughData("the buffer has 0 steps, and a batch needs an ended episode")
            self._relabelled = self._sampler_of(_Steps(relabel=hindsight), np.random.randint(1 << 31))
        return self._shown(self._relabelled.sample(batch_size), env)


class DiskHerReplayBuffer(DiskDictReplayBuffer, HerReplayBuffer):
    """A `HerReplayBuffer` of Stable-Baselines3 whose steps are in a store; see `DiskReplayBuffer`.

    The buffer draws steps of ended episodes, and replaces goals by `dr.Hindsight`. The environment's ``compute_reward``
    computes the new rewards. Batches have the same distribution as in `HerReplayBuffer`, with one exception: each step
    is relabelled with the same probability, so the number of relabelled steps varies.

    Parameters
    ----------
    buffer_size, observation_space, action_space, env, device, n_envs, n_sampled_goal, goal_selection_strategy
        As for `HerReplayBuffer`.
    copy_info_dict : bool
        Must be False: infos are not in the store, and rewards cannot depend on them.
    **kwargs
        Other arguments of `DiskReplayBuffer`.

    Raises
    ------
    ValueError
        `copy_info_dict` is true, or another argument is invalid.
    """

    env: VecEnv | None

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = True,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **kwargs: Any,
    ) -> None:
        if copy_info_dict:
            raise ValueError("copy_info_dict must be False: a store holds no infos, so rewards cannot depend on them")
        strategy = goal_selection_strategy
        self._strategy = strategy.lower() if isinstance(strategy, str) else strategy.name.lower()
        # this check raises an error for invalid arguments
        dr.Hindsight(self._strategy, n_sampled_goal / (n_sampled_goal + 1), _no_reward)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            env=env,
            n_sampled_goal=n_sampled_goal,
            goal_selection_strategy=goal_selection_strategy,
            **kwargs,
        )
        self.env = env

    def _begin(self) -> None:
        self.env = None  # the environment is not pickled; `load_replay_buffer` sets it later
        super()._begin()

    def _hindsight(self) -> dr.Hindsight:
        if self.env is None:
            raise ValueError("the environment computes the rewards of relabelled steps: call set_env(env) first")
        return dr.Hindsight(self._strategy, self.her_ratio, partial(_reward, self.env))

    def truncate_last_trajectory(self) -> None:
        """Cut the open episodes. A loaded buffer has no open episodes, since loading cuts them."""
        if self._writer is not None:
            self._writer.end_episode()
            for lane in np.flatnonzero(self.dones[self.pos - 1] == 0).tolist():
                self._note_cut(lane)


def _reward(env: VecEnv, achieved: Array, desired: Array) -> Any:
    return env.env_method("compute_reward", achieved, desired, [{} for _ in achieved], indices=[0])[0]


def _no_reward(achieved: Array, desired: Array) -> Any:
    return np.zeros(len(achieved))


def _field(space: spaces.Space[Any]) -> dr.Field:
    return dr.Field(space.shape, space.dtype)


def _with_lanes(value: Any, shape: tuple[int, ...]) -> Array:
    """Return ``value`` with a leading axis of environments. For a single environment, ``value`` may lack this axis."""
    array = np.asarray(value)
    if len(shape) == 1 or (1, *array.shape) == shape:
        return array.reshape(shape)
    return array
