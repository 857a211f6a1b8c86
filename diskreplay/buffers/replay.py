"""A replay buffer: experiences are added one at a time, and batches are drawn at random."""

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
"""The name under which the store keeps the state of the buffer's sampler, with the priorities."""

SAVE_EVERY_S = 60.0
"""The least number of seconds between two saves of the priorities by `update_priorities`.

A crash loses the updates after the last save.
"""

BETA = Linear(0.4, 1.0, 1_000_000)

# The fields of `Transitions`, and their names in the buffer's batches. The buffer's batches have `discounts`, and no
# `truncated`.
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
    """One step of an environment. If `done` is True, the step terminated the episode, and is not bootstrapped.

    Examples
    --------
    >>> buffer = dr.ReplayBuffer(1000)
    >>> buffer.push(dr.Experience(np.zeros(4), 0, 1.0, np.zeros(4), True))
    >>> buffer[0].reward.item()
    1.0
    """

    state: Any
    action: Any
    reward: Any
    next_state: Any
    done: Any


class ReplayBuffer(Backed, Sequence[Experience]):
    """The newest `capacity` steps, drawn at random; also a sequence of `Experience`, oldest first.

    The first step defines shapes and dtypes that are not given. float64 values and all rewards are stored as float32.
    Python's bools and ints are stored as int64. Other dtypes are kept. Observations and actions may be dicts and
    tuples, nested like Gymnasium's Dict and Tuple spaces. A list counts as an array.

    With one environment, states may have a leading axis of length 1, the axis of environments. The buffer drops this
    axis from states and actions. Give `obs_shape` if each observation itself begins with an axis of length 1. With
    `num_envs` above 1, every value has a leading axis of `num_envs`, and each environment has its own episodes.

    A step's observation must have the same bytes as the previous `next_obs` of its environment, unless the previous
    step was done or truncated. If the bytes differ, the episode is cut there, with a warning the first time. For
    example, if a buffer with ``num_envs=1`` gets steps of several environments in turn, an episode is cut after each
    step, and every return has a single step.

    With ``prioritized=True`` and a `path`, the next buffer at the path continues with the priorities, the random state
    and the place in beta's schedule. `close` and `save` save this state, and `update_priorities` saves it once a
    minute. A process that ends without `close` loses the updates after its last save. Steps that were added after the
    last save get the largest priority so far.

    Concurrency: only one thread may add steps; any thread may call the other methods. Other processes may read the
    store at `path`.

    Parameters
    ----------
    capacity : int
        The largest number of steps to keep, of all environments together.
    obs_shape, action_shape : tuple of int or None
        Shapes of one step's observation and action; None: as in the first step.
    num_envs : int
        Number of environments whose steps are added together.
    path : path or None
        The path of the store; an existing store is continued. None: a temporary folder, which exists until the buffer
        is closed or garbage-collected, or the process exits.
    device : torch.device or str or None
        The device of batches; None is the CPU.
    n_step : int, (int, int) or None
        Number of steps in a return; see `Transitions`.
    gamma : float
        Discount per step.
    prioritized : bool
        Whether steps are drawn by their priorities; see `Prioritized` and `update_priorities`. You may also set this
        attribute later.
    alpha, beta, eps : float
        Arguments of `Prioritized`. beta may be a schedule; by default it rises from 0.4 to 1 over a million batches.
    obs_dtype, action_dtype : dtype or None
        Stored dtypes of observations and actions; None: by the rules above.
    seed : int or None
        The seed of the draws: the same seed and calls give the same batches. None: an arbitrary seed.

    Raises
    ------
    ValueError
        An argument is invalid, or the store at `path` has another capacity.
    SchemaError
        A shape or dtype cannot be stored, or differs from the shape or dtype in the store at `path`.
    FormatError
        The store at `path`, or its saved priorities, are damaged.

    Examples
    --------
    >>> buffer = dr.ReplayBuffer(1000, prioritized=True, n_step=3)
    >>> for t in range(20):
    ...     buffer.add(np.zeros(4), 0, 1.0, np.zeros(4), t == 19)
    >>> batch = buffer.sample(8)
    >>> batch.states.shape, batch.rewards.shape
    (torch.Size([8, 4]), torch.Size([8, 1]))
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
        self._mark = 0  # steps with lower ids were cleared
        self._sampler: Sampler | None = None
        self._saved_at = monotonic()
        # A snapshot and a view, and the ids that can be sampled from them.
        self._ids: tuple[Any, NDArray[np.int64]] | None = None
        super().__init__(path, device, given, capacity)

    def _begin(self, store: Store) -> None:
        # refresh=False: the buffer itself refreshes the store before every use of its samplers
        sampler = Sampler(store, self._view, self._drawn, device=self._device, seed=self._seed, refresh=False)
        self._load(sampler, store)
        sampler.distribution = self._drawn
        self._sampler = sampler
        self._steps = Sampler(store, Transitions(n_step=1), device=self._device, refresh=False)

    def _load(self, sampler: Sampler, store: Store) -> None:
        try:
            state = store.load_sampler_state(STATE)
        except StoreNotFound:
            return
        with state_of("a replay buffer"):
            drawn = state["planner"]["distribution"]
        # To load the state, the sampler needs a distribution of the state's class.
        sampler.distribution = self._uniform if drawn == type(self._uniform).__name__ else self._priorities
        sampler.load_state_dict(state)
        sampler.distribution = self._priorities

    # --- drawing -----------------------------------------------------------------------------------------------------

    @property
    def view(self) -> Transitions:
        """The view of the sampled steps, with its `n_step` and `gamma`. You may set this at any time."""
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
        """Whether steps are drawn by their priorities. You may set this attribute at any time; priorities are kept."""
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
        """Exponent of the priorities. You may set it at any time."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._priorities.alpha = alpha

    @property
    def beta(self) -> float | Schedule:
        """Exponent of the weights: a number, or a schedule over the batches so far. You may set it at any time."""
        return self._priorities.beta

    @beta.setter
    def beta(self, beta: float | Schedule) -> None:
        self._priorities.beta = beta

    @property
    def eps(self) -> float:
        """A number that is added to the absolute value of each error."""
        return self._priorities.eps

    # --- adding ------------------------------------------------------------------------------------------------------

    def push(self, experience: Any, *values: Any) -> None:
        """Add one step, as an `Experience` or as its five values; see `add`."""
        self.add(*Experience(*experience) if not values else Experience(experience, *values))

    def add(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any, truncated: Any = False, *, mask: Any = None
    ) -> None:
        """Add one step. With `n_step` above 1, the step can be sampled n - 1 steps later, else immediately.

        With `num_envs` above 1, add one step of each environment: all values have a leading axis of `num_envs`.

        Parameters
        ----------
        obs, action, reward, next_obs : array_like or Tensor
            The values of the step. `next_obs` is the observation after the action. At the end of an episode, `next_obs`
            is the final observation, not the observation after the reset. `next_obs` may be None if `done` is True.
        done : bool
            Whether the step terminated its episode. A terminated step is not bootstrapped. Flags may also be 1 and 0.
        truncated : bool
            Whether the episode ended without termination, for example by a time limit. A truncated step is bootstrapped
            from `next_obs`.
        mask : (num_envs,) bool, optional
            Environments with False are skipped, for example if they were only reset (NEXT_STEP autoreset).

        Raises
        ------
        SchemaError
            A value does not fit the first step; nothing was added.
        ValueError
            `next_obs` is None, but a step is not done.
        """
        self._check_open()
        if self._num_envs > 1:  # with one environment, each value is copied from its device later
            obs, action, reward, next_obs, done, truncated, mask = fetched(
                obs, action, reward, next_obs, done, truncated, mask
            )
        mask = None if mask is None else self._flags(mask, "mask")
        lanes = None if mask is None else np.flatnonzero(mask)
        flags = self._flags(done, "done", lanes, reward), self._flags(truncated, "truncated", lanes, reward)
        if next_obs is None and not (flags[0] if mask is None else flags[0] | ~mask).all():
            raise ValueError("next_obs may be None only where done is true: other steps are bootstrapped from it")
        if mask is not None and not mask.any():
            return
        schema = self._schema(obs, action, self._num_envs)
        # All values are cast before anything changes, so that an invalid value changes nothing.
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
        if self._num_envs > 1 and plain(value).ndim == 0:
            value = np.repeat(plain(value), self._num_envs)
        return flags_of(value, name, self._num_envs, lanes, reward)

    # --- reading -----------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Batch:
        """Draw a batch: distinct steps, or steps drawn by priority if the buffer is prioritized.

        Returns
        -------
        Batch
            `states`, `actions`, `rewards`, `next_states`, `dones`, `discounts`, `weights` and `n_steps`. Scalars are
            (batch_size, 1), and `dones` is float32. `index`, (batch_size,), has the ids for `update_priorities`. With
            `n_step` above 1, rewards are n-step returns. ``rewards + discounts * V(next_states)`` is the target for
            every n, also at the end of an episode. Weights are 1 if the buffer is not prioritized.

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
        """Set priorities from the errors of sampled steps; see `Sampler.update_priorities`.

        Raises
        ------
        ValueError
            The buffer has never been prioritized, or an error is not finite.
        StorageFull
            The disk is full: the priorities were updated, but could not be saved.
        """
        if not self._prioritized and self._priorities.is_new:
            raise ValueError("this buffer has no priorities: make it with prioritized=True, or set that attribute")
        if self._sampler is None:
            raise NotEnoughData("the buffer has 0 steps, so there are no priorities to update: add steps first")
        skipped = self._sampler.update_priorities(index, td_error)
        if monotonic() - self._saved_at >= SAVE_EVERY_S:
            self._save_priorities()
        return skipped

    def __len__(self) -> int:
        """Return the number of steps that can be sampled. With `n_step` above 1, the newest steps do not count yet."""
        if self._refreshed() is None or self._sampler is None:
            return 0
        return self._sampler.sampleable

    @overload
    def __getitem__(self, index: int) -> Experience: ...
    @overload
    def __getitem__(self, index: slice) -> list[Experience]: ...
    def __getitem__(self, index: int | slice) -> Experience | list[Experience]:
        """Return a step that can be sampled, or a list of steps for a slice; the oldest step has index 0.

        Returned experiences are single steps, whatever `n_step` is. The values of the experiences are on the buffer's
        device.

        Raises
        ------
        IndexError
            The index is out of range.
        """
        steps = len(self)
        if isinstance(index, slice):
            chosen = range(*index.indices(steps))
            return self._experiences(chosen) if chosen else []
        place = operator.index(index)
        if not -steps <= place < steps:
            raise IndexError(f"index {place} is out of range: the buffer has {steps} steps that can be sampled")
        return self._experiences(range(place % steps, place % steps + 1))[0]

    def _experiences(self, places: range) -> list[Experience]:
        batch = self._steps.gather(self._sampleable_ids()[places])
        columns = batch.obs, batch.action, batch.reward, batch.next_obs, batch.terminated.float()
        return [Experience(*(map_tree(operator.itemgetter(i), part) for part in columns)) for i in range(len(places))]

    def _sampleable_ids(self) -> NDArray[np.int64]:
        """Return the ids of the steps that can be sampled, oldest first."""
        assert self._store is not None
        assert self._sampler is not None
        known = self._store.snapshot, self._sampler.view
        if self._ids is None or self._ids[0] != known:
            self._ids = known, self._sampler.ids()
        return self._ids[1]

    # --- forgetting and keeping --------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget all steps: only later steps are sampled and counted.

        The store keeps the old steps until later steps replace them. A buffer that is opened at the path later may have
        these old steps.
        """
        store = self._refreshed()
        if store is None or self._sampler is None or not len(store):
            return
        if isinstance(self._writer, VectorWriter):
            # In this segment, the next ids of shorter lanes may be below the mark. A new writer begins a new segment,
            # and all ids of that segment are above the mark.
            self._writer.close()
            self._writer = None
        elif self._writer is not None:
            self._writer.end_episode()  # otherwise a step of a new episode would cause a warning
        episodes = store.snapshot.episodes
        self._mark = int((episodes.first + (episodes.steps - 1) * episodes.stride).max()) + 1
        self._sampler.view = Since(**_arguments(self._view), mark=self._mark)

    def save(self) -> None:
        """Make all steps durable, and save the priorities; the next buffer at `path` continues from this state.

        The steps and the priorities are durable when this method returns. After a crash during the call, the
        next buffer continues from the previous save or from this save.

        Raises
        ------
        ValueError
            The buffer is in a temporary folder.
        StorageFull
            The disk is full. The previous save is unchanged.
        """
        self._check_open()
        if self._path is None:
            raise ValueError("this buffer is in a temporary folder, which is removed with it: make it with path=")
        if self._writer is not None:
            self._writer.flush()
        self._save_priorities()

    def _save_priorities(self) -> None:
        self._saved_at = monotonic()
        if self._path is not None and self._sampler is not None and not self._priorities.is_new:
            self._sampler.save(STATE)

    def close(self) -> None:
        """Save the priorities and close the store, or remove a temporary store.

        Batches stay valid. Closing twice is fine.

        Raises
        ------
        StorageFull
            The disk has no room for the priorities. The buffer is closed nevertheless.
        """
        try:
            if not self._closed:
                self._save_priorities()
        finally:
            super().close()


@dataclass(frozen=True, repr=False)
class Since(Transitions):
    """`Transitions` without the ids below `mark`. `ReplayBuffer.clear` sets `mark`."""

    mark: int = 0

    def __repr__(self) -> str:
        return repr(Transitions(**_arguments(self)))

    @property
    def starts(self) -> Starts:
        return super().starts._replace(since=self.mark)


def _arguments(view: Transitions) -> dict[str, Any]:
    return {field.name: vars(view)[field.name] for field in fields(Transitions)}
