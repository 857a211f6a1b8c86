"""A replay buffer: one experience goes in at a time, random batches come out."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from time import monotonic
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.buffers.backing import Backed, seed_argument
from diskreplay.buffers.values import Given, checked, flags_of, plain, renamed
from diskreplay.device_tensors import fetched
from diskreplay.distributions.base import Distinct, Distribution
from diskreplay.distributions.number_arguments import Linear, Schedule, int_argument
from diskreplay.distributions.prioritized import PrioritizedOfEnough
from diskreplay.distributions.saved_state import state_of
from diskreplay.errors import NotEnoughData, StoreNotFound
from diskreplay.sampling.batch import Batch, map_tree
from diskreplay.sampling.sampler import Sampler
from diskreplay.store.store import PathLike, Store
from diskreplay.views.base import Starts
from diskreplay.views.transitions import Transitions
from diskreplay.writing.vector_writer import VectorWriter

STATE = "replay-buffer"
"""The name under which priorities are saved in the store."""

SAVE_EVERY_S = 60.0
"""While priorities are updated they are saved so often: a crash loses the updates since."""

BETA = Linear(0.4, 1.0, 1_000_000)

# What batches call the fields of `Transitions`; what `truncated` is for, `discounts` do.
NAMES = {
    "obs": "states",
    "action": "actions",
    "reward": "rewards",
    "next_obs": "next_states",
    "next_action": "next_actions",
    "terminated": "dones",
    "discount": "discounts",
    "weight": "weights",
}
HIDDEN = ("truncated",)


class Experience(NamedTuple):
    """One step of an environment: `done` says that it terminated, so that nothing follows `next_state`."""

    state: Any
    action: Any
    reward: Any
    next_state: Any
    done: Any


class ReplayBuffer(Backed, Sequence[Experience]):
    """The newest `capacity` steps, drawn at random; also a sequence of `Experience`, oldest first.

    What it is to hold is read off the first step. Floats are stored as float32 unless a dtype is given, float16 as it
    is; bools and ints of Python are int64; rewards float32; other arrays keep their dtype. Observations and actions may
    be dicts and tuples, nested as Gymnasium's Dict and Tuple spaces are; a list is an array.

    With one environment a leading axis of 1 of a state is that environment's, and is dropped with that of the action;
    give `obs_shape` for observations that begin with such an axis themselves. With `num_envs` above 1 every value has a
    leading axis of `num_envs`, and each environment's steps are kept apart.

    The observation of a step must be the next observation of the step before in the same environment, byte for byte,
    unless that one was done or truncated. Where it is not, the episode is cut there, which the first time is a warning:
    steps of several environments added in turn, for example, give returns of a single step only.

    With ``prioritized=True`` at a `path`, priorities and what goes with them (the batches that beta's schedule has
    counted, the random state) outlive the buffer. They are saved by `close`, by `save`, and while they are updated,
    every minute. A process that is killed, or ends without `close`, loses the updates since: the buffer goes on from
    what was saved last, and steps that were added later begin with the largest priority given.

    Concurrency: one thread adds; any thread may do all else. Of a store at a `path` other processes may be readers.

    Parameters
    ----------
    capacity : int
        The most steps to keep, of all environments together.
    obs_shape, action_shape : tuple of int or None
        Shapes of one step's observation and action; None: those of the first step.
    num_envs : int
        Environments that step together.
    path : path or None
        Where to keep the steps: a store that is there is continued. None is a temporary folder, removed by `close`,
        with the buffer, or at exit.
    device : torch.device or str or None
        Where batches are delivered; None is the CPU.
    n_step : int, (int, int) or None
        Steps of a return; see `Transitions`.
    gamma : float
        Discount a step.
    prioritized : bool
        Whether steps are drawn by the errors that `update_priorities` was told; see `Prioritized`. It may be set at run
        time.
    alpha, beta, eps : float
        Of `Prioritized`. By default beta goes from 0.4 to 1 over a million batches; it may be a number too.
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
    FormatError
        The store at `path`, or what was saved of priorities there, is damaged.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Any = None,
        action_shape: Any = None,
        *,
        num_envs: int = 1,
        path: PathLike | None = None,
        device: torch.device | str | None = None,
        n_step: int | tuple[int, int] | None = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: float | Schedule = BETA,
        eps: float = 1e-6,
        obs_dtype: Any = None,
        action_dtype: Any = None,
        seed: int | None = None,
    ) -> None:
        capacity = int_argument("capacity", capacity)
        self._num_envs = int_argument("num_envs", num_envs)
        self._lanes = () if self._num_envs == 1 else (self._num_envs,)
        self._view = Transitions(n_step=n_step, gamma=gamma)
        given = Given(obs_shape, action_shape, obs_dtype, action_dtype)
        self._uniform, self._priorities = Distinct(), PrioritizedOfEnough(alpha, beta, eps)
        self._prioritized = bool(prioritized)
        self._seed = seed_argument(seed)
        self._mark = 0  # ids below were cleared
        self._sampler: Sampler | None = None
        self._saved_at = monotonic()
        self._ids: tuple[Any, NDArray[np.int64]] | None = None  # of a snapshot
        super().__init__(path, device, given, capacity)

    def _begin(self, store: Store) -> None:
        # `len` has looked for new steps whenever they are asked.
        sampler = Sampler(store, self._view, self._drawn, device=self._device, seed=self._seed, refresh=False)
        self._load(sampler, store)
        sampler.distribution = self._drawn
        self._sampler = sampler
        self._steps = Sampler(store, Transitions(n_step=1), device=self._device, refresh=False)

    def _load(self, sampler: Sampler, store: Store) -> None:
        """Go on from what was saved at the path, if anything was."""
        try:
            state = store.load_sampler_state(STATE)
        except StoreNotFound:
            return
        with state_of("a replay buffer"):
            drawn = state["planner"]["distribution"]
        # A state is loaded by a sampler that draws as the one that saved it.
        sampler.distribution = self._uniform if drawn == type(self._uniform).__name__ else self._priorities
        sampler.load_state_dict(state)
        sampler.distribution = self._priorities

    # --- what is drawn, and how --------------------------------------------------------------------------------------

    @property
    def view(self) -> Transitions:
        """What a sampled step is: n, gamma, stacks of frames. Set another `Transitions` at any time."""
        return self._view

    @view.setter
    def view(self, view: Transitions) -> None:
        if not isinstance(view, Transitions):
            raise ValueError(f"view must be Transitions(...), not {view!r}: a Sampler of buffer.store takes any view")
        if self._sampler is not None:
            self._sampler.view = Since(**_arguments(view), mark=self._mark)
        self._view = view

    @property
    def prioritized(self) -> bool:
        """Whether steps are drawn by their priorities. It may be set at any time; priorities are kept meanwhile."""
        return self._prioritized

    @prioritized.setter
    def prioritized(self, prioritized: bool) -> None:
        self._prioritized = bool(prioritized)
        if self._sampler is not None:
            self._sampler.distribution = self._drawn

    @property
    def _drawn(self) -> Distribution:
        return self._priorities if self._prioritized else self._uniform

    @property
    def alpha(self) -> float:
        """Exponent of the priorities; it may be set at any time."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._priorities.alpha = alpha

    @property
    def beta(self) -> float | Schedule:
        """Exponent of the weights, or a schedule over the batches so far; it may be set at any time."""
        return self._priorities.beta

    @beta.setter
    def beta(self, beta: float | Schedule) -> None:
        self._priorities.beta = beta

    @property
    def eps(self) -> float:
        """What is added to the size of each error."""
        return self._priorities.eps

    # --- adding ------------------------------------------------------------------------------------------------------

    def push(self, experience: Any, *values: Any) -> None:
        """Add an `Experience`, or its five values; see `add`."""
        self.add(*Experience(*experience) if not values else Experience(experience, *values))

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any, truncated: Any = False, *, mask: Any = None
    ) -> None:
        """Add one step, which can be sampled at once (with `n_step` above 1: once so many more are there).

        With `num_envs` above 1 it is one step of each environment, and all values have a leading axis of that length.

        Parameters
        ----------
        obs, action, reward, next_obs : array_like or Tensor
            The step. `next_obs` is what the action led to, the final observation of an episode that ended and not that
            of the reset behind it; it may be None where it is done.
        done : bool
            Whether the step terminated its episode: nothing is bootstrapped behind it. A number is 0 or 1.
        truncated : bool
            Whether the episode ended otherwise, by a time limit for example: `next_obs` is bootstrapped.
        mask : (num_envs,) bool, optional
            Environments where it is False are passed over, such as one that was only reset (NEXT_STEP autoreset).

        Raises
        ------
        SchemaError
            A value does not fit those of the first step; nothing was added.
        ValueError
            `next_obs` is None where a step is not done.
        """
        self._check_open()
        if self._num_envs > 1:  # of one it is little, and so is an add
            obs, action, reward, next_obs, done, truncated, mask = fetched(
                obs, action, reward, next_obs, done, truncated, mask
            )
        mask = None if mask is None else self._flags(mask, "mask")
        lanes = None if mask is None else np.flatnonzero(mask)
        flags = self._flags(done, "done", lanes, reward), self._flags(truncated, "truncated", lanes, reward)
        if next_obs is None and not (flags[0] if mask is None else flags[0] | ~mask).all():
            raise ValueError("next_obs may be None only where done is true: there is nothing to bootstrap from")
        if mask is not None and not mask.any():
            return
        schema = self._schema(obs, action, self._num_envs)
        # All is cast before anything changes: what does not fit is refused here.
        obs, action = checked(schema, "obs", obs, self._lanes), checked(schema, "action", action, self._lanes)
        reward = checked(schema, "reward", reward, self._lanes)
        next_obs = None if next_obs is None else checked(schema, "obs", next_obs, self._lanes)
        if self._num_envs == 1:
            ended, cut = (bool(flag[0]) for flag in flags)
            self._writer_of(schema).append(obs, action, reward, ended, cut, next_obs)
        else:
            writer = self._writer_of(schema, self._num_envs)
            writer.append(obs, action, reward, *flags, next_obs=next_obs, mask=mask)

    def _flags(
        self, value: Any, name: str, lanes: NDArray[np.int64] | None = None, reward: Any = None
    ) -> NDArray[np.bool_]:
        """Return the truth values of all environments, (num_envs,); one stands for all."""
        if self._num_envs > 1 and plain(value).ndim == 0:
            value = np.repeat(plain(value), self._num_envs)
        return flags_of(value, name, self._num_envs, lanes, reward)

    # --- reading -----------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch of different steps, or where prioritized, by their priorities.

        Returns
        -------
        Batch
            `states`, `actions`, `rewards`, `next_states`, `dones`, `discounts`, `weights` and `n_steps`, scalars as
            (batch_size, 1), dones float32, and `index`, (batch_size,), for `update_priorities`. With `n_step` above 1,
            rewards are n-step returns; ``rewards + discounts * V(next_states)`` is the target for every n, and knows of
            terminations. Weights are 1 where not prioritized.

        Raises
        ------
        NotEnoughData
            Fewer than `batch_size` steps can be sampled.
        """
        batch_size = int_argument("batch_size", batch_size)
        steps = len(self)
        if self._sampler is None or steps < batch_size:
            raise NotEnoughData(
                f"the buffer has {steps} steps that can be sampled, and a batch of {batch_size} needs {batch_size}"
            )
        batch = self._sampler.sample(batch_size)
        return Batch(renamed(batch, NAMES, HIDDEN), batch.kind)

    def update_priorities(self, index: Any, td_error: Any) -> int:
        """Tell the errors of sampled steps; see `Sampler.update_priorities`.

        Raises
        ------
        ValueError
            The buffer has never been prioritized, or an error is not finite.
        StorageFull
            There is no room to save priorities, which was due; they were updated.
        """
        if not self._prioritized and self._priorities.is_new:
            raise ValueError("this buffer has no priorities: make it with prioritized=True, or set that")
        if self._sampler is None:
            raise NotEnoughData("the buffer has 0 steps, none that could be given a priority")
        skipped = self._sampler.update_priorities(index, td_error)
        if monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._save_priorities()
        return skipped

    def __len__(self) -> int:
        """Return the number of steps that can be sampled: with `n_step` above 1 not yet the newest ones."""
        if self._refreshed() is None or self._sampler is None:
            return 0
        return self._sampler.sampleable

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> list[Experience]: ...
    def __getitem__(self, index: int | slice) -> Experience | list[Experience]:
        """Return one of the steps that can be sampled, the oldest at 0, or a list of them; values are on the device.

        It is a single step, whatever `n_step` is.

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
            raise IndexError(f"the buffer has {steps} steps that can be sampled, none at {place}")
        return self._experiences(range(place % steps, place % steps + 1))[0]

    def _experiences(self, places: range) -> list[Experience]:
        batch = self._steps.gather(self._sampleable_ids()[places])
        columns = batch.obs, batch.action, batch.reward, batch.next_obs, batch.terminated.float()
        return [Experience(*(map_tree(operator.itemgetter(i), part) for part in columns)) for i in range(len(places))]

    def _sampleable_ids(self) -> NDArray[np.int64]:
        """Return the ids of the steps that can be sampled, oldest first: sorted once a snapshot."""
        assert self._store is not None
        assert self._sampler is not None
        known = self._store.snapshot, self._sampler.view
        if self._ids is None or self._ids[0] != known:
            self._ids = known, self._sampler.ids()
        return self._ids[1]

    # --- forgetting and keeping --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all steps: only those added from now on are sampled and counted.

        The store keeps them until later ones take their place, so a buffer that is opened at its path shows them.
        """
        store = self._refreshed()
        if store is None or self._sampler is None or not len(store):
            return
        if isinstance(self._writer, VectorWriter):
            # Lanes are not equally far, so their next ids need not be above all of these: those of a new segment are.
            self._writer.close()
            self._writer = None
        elif self._writer is not None:
            self._writer.end_episode()  # a step that does not continue what is forgotten is nothing to warn of
        episodes = store.snapshot.episodes
        self._mark = int((episodes.first + (episodes.steps - 1) * episodes.stride).max()) + 1
        self._sampler.view = Since(**_arguments(self._view), mark=self._mark)

    def save(self) -> None:
        """Make all steps durable, and save priorities and what goes with them; a buffer opened at `path` goes on there.

        It is durable when this returns. A crash leaves what was saved before or this.

        Raises
        ------
        ValueError
            The buffer is in a temporary folder.
        StorageFull
            There is no room; what was saved before is untouched.
        """
        self._check_open()
        if self._path is None:
            raise ValueError("this buffer is in a temporary folder, which nothing outlives: make it with path=")
        if self._writer is not None:
            self._writer.flush()
        self._save_priorities()

    def _save_priorities(self) -> None:
        """Save the state of the sampler, if there are priorities and something outlives the buffer."""
        self._saved_at = monotonic()
        if self._path is not None and self._sampler is not None and not self._priorities.is_new:
            self._sampler.save(STATE)

    def close(self) -> None:
        """Save priorities and close the store, or remove it where it is temporary; batches stay valid.

        Closing twice is fine. Raises StorageFull where there is no room for the priorities; the buffer is closed.
        """
        try:
            if not self._closed:
                self._save_priorities()
        finally:
            super().close()


@dataclass(frozen=True, repr=False)
class Since(Transitions):
    """Transitions without their ids below `mark`."""

    mark: int = 0

    def __repr__(self) -> str:
        return repr(Transitions(**_arguments(self)))

    @property
    def starts(self) -> Starts:
        """Those of transitions from `mark` on."""
        return super().starts._replace(since=self.mark)


def _arguments(view: Transitions) -> dict[str, Any]:
    return {field.name: vars(view)[field.name] for field in fields(Transitions)}
