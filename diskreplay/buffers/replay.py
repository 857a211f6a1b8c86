"""A replay buffer: one experience goes in at a time, random batches come out."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import torch

from diskreplay.buffers.backing import Backed, seed_argument
from diskreplay.buffers.values import Given, bytes_of, checked, fitted, has_one_environments_axis, with_aliases
from diskreplay.errors import NotEnoughData
from diskreplay.format.schema import Schema
from diskreplay.loading.batch import Batch, map_tree
from diskreplay.loading.sampler import Sampler
from diskreplay.sampling.distinct import Distinct, PrioritizedOfEnough
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.sampling.schedule import Linear
from diskreplay.store.store import PathLike, Store
from diskreplay.store.writing.casting import as_flag
from diskreplay.views.base import Starts
from diskreplay.views.transitions import Transitions


class Experience(NamedTuple):
    """One step of an environment: `done` says that it terminated, so that nothing follows `next_state`."""

    state: Any
    action: Any
    reward: Any
    next_state: Any
    done: Any


class ReplayBuffer(Backed, Sequence[Experience]):
    """The newest `capacity` steps, drawn at random; also a sequence of `Experience`, oldest first.

    What it is to hold is read off the first step. A leading axis of 1 of a state is one environment's and is dropped,
    with that of the action; give `obs_shape` for observations that begin with such an axis themselves. Floats are
    stored as float32 unless a dtype is given, float16 as it is; bools and ints of Python are int64; rewards float32;
    other arrays keep their dtype. Observations and actions may be dicts, nested.

    A step whose observation is not the next observation of the step before begins an episode: several environments'
    steps may be added in turn. With `n_step` above 1 add one environment's only, since returns end with episodes.

    Concurrency: one thread adds; any thread may do all else. Of a store at a `path` other processes may be readers.

    Parameters
    ----------
    capacity : int
        The most steps to keep.
    obs_shape, action_shape : tuple of int or None
        Shapes of one step's observation and action; None: those of the first step.
    path : path or None
        Where to keep the steps: a store that is there is continued. None is a temporary folder, removed by `close`,
        with the buffer, or at exit.
    device : torch.device or str or None
        Where batches are delivered; None is the CPU.
    n_step : int or None
        Steps of a return; see `Transitions`.
    gamma : float
        Discount a step.
    prioritized : bool
        Whether steps are drawn by the errors that `update_priorities` was told, with alpha 0.6, beta from 0.4 to 1 over
        a million batches, and eps 1e-6; see `Prioritized`.
    obs_dtype, action_dtype : dtype or None
        How observations and actions are stored; None: as said above.
    seed : int or None
        Makes the draws a function of the seed and the calls; None is different each time.

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
        n_step: int | None = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        obs_dtype: Any = None,
        action_dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        capacity = int_argument("capacity", capacity)
        self._view = Transitions(n_step=n_step, gamma=gamma)
        given = Given(obs_shape, action_shape, obs_dtype, action_dtype)
        self._prioritized = bool(prioritized)
        self._seed = seed_argument(seed)
        self._following: bytes | None = None  # the last step's next observation, if it must continue there
        self._mark = 0  # ids below were cleared
        self._order: _Order | None = None
        super().__init__(path, device, given, capacity)

    def _begin(self, store: Store) -> None:
        drawn = PrioritizedOfEnough(0.6, Linear(0.4, 1.0, 1_000_000), 1e-6) if self._prioritized else Distinct()
        # `len` has looked for new steps whenever they are asked.
        self._sampler = Sampler(store, self._view, drawn, device=self._device, seed=self._seed, refresh=False)
        self._steps = Sampler(store, Transitions(n_step=1), device=self._device, refresh=False)

    def push(self, experience: Any, *values: Any) -> None:
        """Add an `Experience`, or its five values; see `add`."""
        self.add(*Experience(*experience) if not values else Experience(experience, *values))

    def add(self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any, truncated: Any = False) -> None:
        """Add one step, which can be sampled at once (with `n_step` above 1: once so many more are there).

        Parameters
        ----------
        obs, action, reward, next_obs : array_like or Tensor
            The step. `next_obs` may be None where it is done.
        done : bool
            Whether the step terminated its episode: nothing is bootstrapped behind it.
        truncated : bool
            Whether the episode ended otherwise, by a time limit for example: `next_obs` is bootstrapped.

        Raises
        ------
        SchemaError
            A value does not fit those of the first step; nothing was added.
        ValueError
            `next_obs` is None where the step is not done.
        """
        self._check_open()
        if next_obs is None and not as_flag(done, "done"):
            raise ValueError("next_obs may be None only where done is true: there is nothing to bootstrap from")
        schema = self._first_schema(obs, action) if self._store is None else self._store.schema
        # All is cast before anything changes: what does not fit is refused here.
        obs, next_obs = fitted(schema.obs, obs), None if next_obs is None else fitted(schema.obs, next_obs)
        seen, action = bytes_of(schema, obs), checked(schema, "action", action)
        reward = fitted(schema.reward, reward)
        schema.reward.cast(reward, "reward")
        following = None if next_obs is None else bytes_of(schema, next_obs)
        ended = as_flag(done, "done") | as_flag(truncated, "truncated")
        writer = self._writer_of(schema)
        if self._following not in (None, seen):
            self._following = None
            writer.end_episode()
        writer.append(obs, action, reward, done, truncated, next_obs)
        self._following = None if ended else following

    def _first_schema(self, obs: Any, action: Any) -> Schema:
        one = has_one_environments_axis(obs, self._given.obs_shape)
        found = self._given.field("obs", obs, 1 if one else None)
        one = one and has_one_environments_axis(action, self._given.action_shape, batched=True)
        return Schema(found, self._given.field("action", action, 1 if one else None))

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch of different steps, or where prioritized, by their priorities.

        Returns
        -------
        Batch
            The fields of `Transitions`, and under other names `states`, `actions`, `rewards`, `next_states` and
            `dones`: scalars as (batch_size, 1), dones float32. With `n_step` above 1, rewards are n-step returns, and
            ``reward + discount * V(next_obs)`` is the target.

        Raises
        ------
        NotEnoughData
            Fewer than `batch_size` steps can be sampled.
        """
        batch_size = int_argument("batch_size", batch_size)
        steps = len(self)
        if steps < batch_size:
            raise NotEnoughData(f"the buffer has {steps} steps, and a batch of {batch_size} needs {batch_size}")
        batch = self._sampler.sample(batch_size)
        return with_aliases({name: batch[name] for name in batch})

    def update_priorities(self, index: Any, td_error: Any) -> int:
        """Tell the errors of sampled steps; see `Sampler.update_priorities`.

        Raises
        ------
        ValueError
            The buffer was not made with ``prioritized=True``, or an error is not finite.
        """
        if not self._prioritized:
            raise ValueError("this buffer has no priorities: make it with prioritized=True")
        if self._store is None:
            raise NotEnoughData("the buffer has 0 steps, none that could be given a priority")
        return self._sampler.update_priorities(index, td_error)

    def __len__(self) -> int:
        """Return the number of steps."""
        store = self._refreshed()
        if store is None:
            return 0
        return self._ordered(store).size if self._mark else len(store)

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> list[Experience]: ...
    def __getitem__(self, index: int | slice) -> Experience | list[Experience]:
        """Return the step at a place, the oldest at 0, or a list of steps; values are tensors on the device.

        Raises
        ------
        IndexError
            There is no such place.
        """
        steps = len(self)
        if isinstance(index, slice):
            chosen = range(*index.indices(steps))
            return self._experiences(chosen) if chosen else []
        place = operator.index(index)
        if not -steps <= place < steps:
            raise IndexError(f"the buffer has {steps} steps, none at {place}")
        return self._experiences(range(place % steps, place % steps + 1))[0]

    def _experiences(self, places: range) -> list[Experience]:
        assert self._store is not None
        batch = self._steps.gather(self._ordered(self._store).ids(places))
        columns = batch.obs, batch.action, batch.reward, batch.next_obs, batch.terminated.float()
        return [Experience(*(map_tree(operator.itemgetter(i), part) for part in columns)) for i in range(len(places))]

    def _ordered(self, store: Store) -> "_Order":
        snapshot = store.snapshot
        if self._order is None or self._order.snapshot is not snapshot or self._order.mark != self._mark:
            self._order = _Order(snapshot, self._mark)
        return self._order

    def clear(self) -> None:
        """Forget all steps: only those added from now on are sampled and counted.

        The store keeps them until later ones take their place, so a buffer that is opened at its path shows them.
        """
        if self._store is None or not len(self):
            return
        episodes = self._store.snapshot.episodes
        self._mark = int((episodes.first + (episodes.steps - 1) * episodes.stride).max()) + 1
        self._sampler.view = Since(self._view.n_step, self._view.gamma, mark=self._mark)


@dataclass(frozen=True, repr=False)
class Since(Transitions):
    """Transitions without their ids below `mark`."""

    mark: int = 0

    def __str__(self) -> str:
        return str(Transitions(self.n_step, self.gamma))

    @property
    def starts(self) -> Starts:
        """Those of transitions from `mark` on."""
        return super().starts._replace(since=self.mark)


class _Order:
    """The steps of a snapshot from `mark` on as one line, oldest first."""

    def __init__(self, snapshot: Any, mark: int) -> None:
        self.snapshot, self.mark = snapshot, mark
        episodes = snapshot.episodes
        hidden = np.clip(-((episodes.first - mark) // episodes.stride), 0, episodes.steps)
        self._first, self._stride = episodes.first + hidden * episodes.stride, episodes.stride
        self._before = np.concatenate([[0], np.cumsum(episodes.steps - hidden)])
        self.size = int(self._before[-1])

    def ids(self, places: range) -> Any:
        """Return the ids of the steps at these places."""
        wanted = np.array(places)
        episode = np.searchsorted(self._before, wanted, "right") - 1
        return self._first[episode] + (wanted - self._before[episode]) * self._stride[episode]
