"""A rollout buffer, which is filled with the steps of all environments, read as a whole, and emptied."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from diskreplay.buffers.backing import Backed
from diskreplay.buffers.columns import ColumnMemory, Columns, leaf_rows, tensor_of
from diskreplay.buffers.estimates import (
    NO_FINAL_VALUES,
    FinalObservations,
    NextRows,
    advantages,
    final_values_argument,
    last_values_argument,
    work_memory,
)
from diskreplay.buffers.recorder import FLAGS, Recorder
from diskreplay.buffers.values import Given, flags_of, renamed
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.errors import BufferFull, NotEnoughData, SchemaError, warn_caller
from diskreplay.sampling.batch import Batch, map_tree, sequences_of
from diskreplay.schema.schema import Schema
from diskreplay.schema.spaces import Field
from diskreplay.store.store import PathLike, Store
from diskreplay.writing.episode_writer import DISCONTINUITY, same_rows
from diskreplay.writing.vector_writer import VectorWriter

# The least number of rollouts that a full store keeps.
KEPT = 8
LEAST_SEGMENT_STEPS = 1024

SCALARS = ("value", "log_prob")
PRIVILEGED = "privileged_obs"

# The store's fields, and their names in batches. ADDED is for steps that `add` added, and PUSHED is for steps that
# `push` added.
ADDED = {
    "obs": "observations",
    PRIVILEGED: "privileged_observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "dones",
    "value": "values",
    "log_prob": "log_probs",
}
HIDDEN = ("truncated",)
ESTIMATES = ("advantages", "returns")
PUSHED = {"obs": "states", "action": "actions", "reward": "rewards", "next_obs": "next_states", "terminated": "dones"}


class RolloutBuffer(Backed):
    """A buffer for on-policy learning, with `num_steps` steps of each of `num_envs` environments.

    The steps are in tensors on the device. The first step makes the tensors. It also defines the shapes and dtypes that
    are not given, by the rules of `ReplayBuffer`. Values and log probabilities are float32 scalars. With one
    environment, `add` also takes values without the axis of environments.

    Attributes such as `rewards` share the memory of these tensors, (steps so far, num_envs, ...). `clear` does not
    change tensors that you still reference.

    With a `path`, a thread also appends the steps to a store, for later runs and other processes. Reading a field or
    `store` waits for that thread. If a step cannot be stored, the next call raises the error. The store then lacks the
    failed step and the steps that waited behind it. The buffer still has all steps.

    On a CUDA device, `add` copies tensors of that device on the current stream. `add` waits for the device only if
    final observations are given. With a `path`, the thread copies the steps to the CPU on another stream.

    Concurrency: only one thread may use the buffer.

    Parameters
    ----------
    num_envs : int
        Number of environments whose steps are added together.
    num_steps : int or None
        Number of steps of each environment in a full buffer.
    obs_shape, action_shape : tuple of int or None
        Shapes of one environment's observation and action; None: as in the first step.
    capacity : int or None
        Number of steps of all environments together in a full buffer. Give either `capacity` or `num_steps`.
    num_privileged_obs : int
        Length of the critic's own observation; 0: the critic has the same observation as the policy.
    extra : dict of Field, optional
        More fields of a step by name; `add` takes their values as arguments. An example is a recurrent state,
        ``{"hidden": dr.Field((64,), "float32")}``.
    path : path or None
        The path of a store that keeps the newest rollouts, at least eight; None: no store. A buffer begins empty, even
        if the store has steps of an earlier buffer. Two buffers must not use the same path at the same time.
    device : torch.device or str or None
        The device of tensors; None is the CPU.

    Raises
    ------
    ValueError
        An argument is invalid, or the store at `path` has rollouts of another size.
    SchemaError
        A shape cannot be stored, or differs from the shape in the store at `path`.

    Examples
    --------
    >>> buffer = dr.RolloutBuffer(num_envs=4, num_steps=16)
    >>> zeros = torch.zeros(4)
    >>> for _ in range(16):
    ...     buffer.add(torch.zeros(4, 3), zeros, torch.ones(4), zeros, values=zeros, log_probs=zeros)
    >>> buffer.compute_returns_and_advantages(zeros)
    >>> rollout = buffer.sample()
    >>> [len(part.advantages) for part in rollout.minibatches(32, epochs=1, seed=0)]
    [32, 32]
    """

    def __init__(
        self,
        num_envs: int = 1,
        num_steps: int | None = None,
        obs_shape: Any = None,
        action_shape: Any = None,
        *,
        capacity: int | None = None,
        num_privileged_obs: int = 0,
        extra: Mapping[str, Field] = MappingProxyType({}),
        path: PathLike | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._num_envs = int_argument("num_envs", num_envs)
        self._num_steps = _num_steps(self._num_envs, num_steps, capacity)
        self._privileged = int_argument("num_privileged_obs", num_privileged_obs, 0)
        self._warned = set[str]()
        self._first = 0  # the number of steps that were added before the last `clear`
        self._memory: ColumnMemory | None = None
        self._work: ColumnMemory  # made with `_memory`
        self._fields: Schema | None = None  # the schema of the first step
        self._recorder = None if path is None else Recorder()
        self._forget()
        fields = {name: Field((), "float32") for name in SCALARS}
        if self._privileged:
            fields[PRIVILEGED] = Field((self._privileged,), "float32")
        known = {*fields, *ADDED.values(), *PUSHED.values(), *ESTIMATES, "final_observations"}
        if taken := sorted(known & extra.keys()):
            raise ValueError(f"extra names {taken[0]!r}, which is already a field of batches: choose another name")
        steps = max(self._num_envs * self._num_steps, LEAST_SEGMENT_STEPS)
        super().__init__(path, device, Given(obs_shape, action_shape), KEPT * steps, steps, {**fields, **extra})

    def _begin(self, store: Store) -> None:
        """Ignore the steps in the store: a buffer begins empty."""

    def _forget(self) -> None:
        self._steps = 0
        self._columns: Columns = {}
        self._final = FinalObservations()
        self._expected: Columns | None = None  # The next state of the last pushed step.
        self._pushed = True  # True if all steps so far came from `push`.
        self._has_truncated = False
        self._has_unchecked = False
        self._batch: Batch | None = None
        self._estimates: tuple[torch.Tensor, torch.Tensor] | None = None

    def __repr__(self) -> str:
        if self._path is not None:
            return super().__repr__()
        return f"RolloutBuffer({self._steps} of {self._num_steps} steps, num_envs={self._num_envs}, {self._device})"

    @property
    def store(self) -> Store | None:
        """The store at the path, with all steps so far; None without a path, or before the first step."""
        self._wait()
        return self._store

    def _wait(self) -> None:
        if self._recorder is not None:
            self._recorder.wait()

    # --- filling -----------------------------------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        dones: Any,
        values: Any,
        log_probs: Any,
        privileged_observations: Any = None,
        truncated: Any = None,
        final_observations: Any = None,
        **extra: Any,
    ) -> None:
        """Add one step of every environment: arrays or tensors with a leading axis of `num_envs`.

        Parameters
        ----------
        observations, actions, rewards : (num_envs, ...)
            The observations, the actions taken on them, and the rewards of these actions.
        dones : (num_envs,)
            Whether the step terminated the environment's episode. A terminated step is not bootstrapped. If `truncated`
            is None, `dones` says whether the episode ended in any way. Flags may also be 1 and 0.
        values, log_probs : (num_envs,) or (num_envs, 1)
            The critic's value of the observation, and the logarithm of the action's probability.
        privileged_observations : (num_envs, num_privileged_obs) or None
            The critic's observation; None if `num_privileged_obs` is 0.
        truncated : (num_envs,) or None
            Whether each episode ended without termination, for example by a time limit. A truncated step is
            bootstrapped from the final observation, unless `dones` is also true.
        final_observations : (num_envs, ...) or None
            The final observations of the truncated episodes; the rows of other environments are ignored. Gymnasium's
            ``info["final_obs"]`` of SAME_STEP autoreset can be passed.
        **extra : (num_envs, ...)
            A value for each name of the buffer's `extra`.

        Raises
        ------
        BufferError
            The buffer is full; nothing was added.
        SchemaError
            A value does not fit the first step; nothing was added. Flags in tensors on a device are only checked by
            `compute_returns_and_advantages`.
        StorageFull
            The store had no room for an earlier step. The given step was not added; you may add it again.
        """
        if (privileged_observations is None) != (self._privileged == 0):
            needed = "must be None" if not self._privileged else f"needs {self._privileged} values"
            raise SchemaError(f"privileged_observations {needed}: num_privileged_obs is {self._privileged}")
        values = {"value": values, "log_prob": log_probs, **extra}
        if self._privileged:
            values[PRIVILEGED] = privileged_observations
        self._append(observations, actions, rewards, dones, None, values, truncated, final_observations)

    def push(self, experience: Any) -> None:
        """Add an `Experience` of a single environment, with value 0 and log probability 0.

        Raises
        ------
        ValueError
            `num_envs` is not 1.
        BufferError, SchemaError
            See `add`.
        """
        if self._num_envs != 1:
            raise ValueError(f"push adds a step of one environment, and this buffer has {self._num_envs}: use add")
        state, action, reward, next_state, done = experience
        extra = {name: np.zeros(field.shape, field.dtype) for name, field in self._extra.items()}
        self._append(state, action, reward, done, next_state, extra)

    def _append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        done: Any,
        next_obs: Any,
        extra: dict[str, Any],
        truncated: Any = None,
        final_obs: Any = None,
    ) -> None:
        self._check_open()
        if self._recorder is not None:
            self._recorder.check()
        if self._steps == self._num_steps:
            raise BufferFull(f"the rollout buffer is full, with {len(self)} steps: call clear() before the next one")
        schema = self._fields or self._schema(obs, action, self._num_envs, reward)
        lanes = (self._num_envs,)
        # All values are cast before anything changes, so that an invalid value changes nothing.
        ended = self._flags(done, "dones", reward)
        rows = {"terminated": ended}
        if truncated is not None:
            rows["truncated"] = self._flags(truncated, "truncated", reward)
        for part, value in (("obs", obs), ("action", action), ("reward", reward), ("extra", extra)):
            rows.update(leaf_rows(schema, part, value, lanes))
        next_rows = None
        if next_obs is not None:
            next_rows = NextRows.of_flagged(self._steps, torch.ones(lanes), schema, next_obs, self._device)
        elif final_obs is not None and truncated is not None:
            next_rows = NextRows.of_flagged(self._steps, rows["truncated"], schema, final_obs, self._device)
        columns = self._columns = self._columns or self._new_columns(schema)
        for path, row in rows.items():
            columns[path][self._steps].copy_(row)
        if self._expected is not None:
            self._cut_unless_continued(self._expected)
        if self._recorder is not None:
            self._record(self._recorder, schema, next_rows)  # before the changes below, because it may raise an error
        self._expected = (
            next_rows.rows if next_obs is not None and next_rows is not None and not bool(ended[0]) else None
        )
        if next_rows is not None:
            self._final.add(next_rows)
        self._has_truncated |= truncated is not None
        self._pushed &= next_obs is not None
        self._steps += 1
        self._batch = self._estimates = None

    def _flags(self, value: Any, name: str, reward: Any) -> torch.Tensor:
        """Return flags, (num_envs,), as 0 and 1 in any dtype; flags on a device are checked later."""
        if (
            isinstance(value, torch.Tensor)
            and "cpu" not in (value.device.type, self._device.type)
            and value.numel() == self._num_envs
            and not value.is_complex()
        ):
            self._has_unchecked = True  # reading the values now would wait for the device
            return value.detach().reshape(-1)
        return tensor_of(flags_of(value, name, self._num_envs, reward=reward))

    def _new_columns(self, schema: Schema) -> Columns:
        if self._memory is None:
            flags = dict.fromkeys(FLAGS, Field((), "float32"))
            leading = (self._num_steps, self._num_envs)
            self._memory = ColumnMemory({**schema.step_leaves, **flags}, leading, self._device)
            self._work = work_memory(self._num_steps, self._num_envs, self._device)
            self._fields = schema
        columns = self._memory.columns()
        columns["truncated"].zero_()
        return columns

    def _cut_unless_continued(self, expected: Columns) -> None:
        now = {path: self._columns[path][self._steps] for path in expected}
        if all(same_rows(now[path].cpu().numpy(), rows.cpu().numpy()).all() for path, rows in expected.items()):
            return
        self._columns["truncated"][self._steps - 1] = 1.0
        self._has_truncated = True
        self._warn("cut", DISCONTINUITY)

    def _record(self, recorder: Recorder, schema: Schema, next_rows: NextRows | None) -> None:
        rows = {path: tensor[self._steps] for path, tensor in self._columns.items()}
        recorder.append(schema, rows, next_rows, lambda: self._new_writer(schema))

    def _new_writer(self, schema: Schema) -> VectorWriter:
        self._writer = None
        return self._writer_of(schema, self._num_envs)

    def clear(self) -> None:
        """Empty the buffer. Tensors that the buffer returned stay valid."""
        self._first += len(self)
        self._forget()

    def empty(self) -> None:
        """Empty the buffer, as `clear` does."""
        self.clear()

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of steps of all environments together."""
        return self._steps * self._num_envs

    def compute_returns_and_advantages(
        self,
        last_values: Any,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        *,
        value_fn: Callable[[Any], Any] | None = None,
        final_values: Any = None,
    ) -> None:
        """Compute generalized advantage estimates and returns of the steps so far (Schulman et al. 2016, equation 16).

        A truncated step is bootstrapped with the value of its final observation (partial-episode bootstrapping, Pardo
        et al. 2018, section 3.2). The advantage of a truncated step does not depend on later steps. The value of a
        final observation comes from `value_fn` or from `final_values`. If both are None, the value of the truncated
        step's own observation is used, with a warning the first time. This is a good approximation if an observation
        differs little from the next observation.

        Parameters
        ----------
        last_values : (num_envs,) or (num_envs, 1)
            The critic's values of the observations after the last step. The values are ignored for environments whose
            last step ended an episode.
        gamma, gae_lambda : float
            Discount per step, and lambda. Both are 0 to 1.
        value_fn : callable or None
            A function that returns the values, (n,) or (n, 1), of n final observations. The function gets the final
            observations given to `add`, as tensors (n, ...), nested like the observations. `value_fn` is called at most
            once, without gradients.
        final_values : (steps so far, num_envs) or None
            The values of the final observations, for a critic that needs more than observations. The values at steps
            that were not truncated are ignored.

        Raises
        ------
        NotEnoughData
            The buffer is empty. This error is also a BufferError.
        ReplayError
            `value_fn` is given, but the final observation of a truncated step was not given to `add`.
        ValueError
            An argument is invalid.
        """
        # If `inference_mode` were a decorator here, warnings would name a line of torch and not the caller's line.
        with torch.inference_mode(False):
            self._estimates = self._estimated(last_values, gamma, gae_lambda, value_fn, final_values)

    def _estimated(
        self, last_values: Any, gamma: float, gae_lambda: float, value_fn: Any, final_values: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = last_values_argument(last_values, self._num_envs, self._device)
        if value_fn is not None and final_values is not None:
            raise ValueError("value_fn and final_values both give the values of final observations: give one of them")
        batch, schema = self._gathered(), self._fields
        assert schema is not None
        dones, truncated = batch["terminated"], batch["truncated"]
        if self._has_unchecked and bool(((dones != 0) & (dones != 1) | (truncated != 0) & (truncated != 1)).any()):
            raise SchemaError("dones and truncated must be bools, or 0 and 1")
        done = dones != 0
        bootstraps = (truncated != 0) & ~done if self._has_truncated else torch.zeros_like(done)
        any_bootstraps = self._has_truncated and bool(bootstraps.any())
        if self._has_truncated and not any_bootstraps and bool(truncated.any()):
            self._warn(
                "ends",
                "every truncated step is done as well, and so none is bootstrapped: if truncated is given, dones must "
                "be true only for steps that terminated",
            )
        final = batch["value"]
        if final_values is not None:
            final = final_values_argument(final_values, bootstraps)
        elif any_bootstraps and value_fn is None:
            self._warn("unknown", NO_FINAL_VALUES.format(*bootstraps.nonzero()[0].tolist()))
        elif any_bootstraps:
            final = self._final.values(schema, bootstraps, value_fn)
        ends = (bootstraps, final) if any_bootstraps else ()
        return advantages(batch["reward"], batch["value"], last, done, gamma, gae_lambda, self._work.columns(), *ends)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn_caller(message)

    @torch.inference_mode(False)
    def sample(self) -> Batch:
        """Return all steps as a flat batch: step 0 of every environment, then step 1 of every environment, and so on.

        The steps stay in the buffer until `clear`. ``sample().minibatches(size, epochs)`` shuffles the steps.
        `sequences` keeps the order of the steps, for recurrent networks.

        Returns
        -------
        Batch
            `observations`, `privileged_observations` (if `num_privileged_obs` is not 0), `actions`, `rewards`, `dones`,
            `values`, `log_probs` and the fields of `extra`, (len(buffer), ...), and, once they are computed,
            `advantages` and `returns`. Scalars are (len(buffer), 1), and `dones` is float32. `index`, (len(buffer),),
            has the number of each step among all steps ever added. If all steps were pushed, the fields are named as in
            `Experience`: `states`, `actions`, `rewards`, `next_states`, `dones`.

        Raises
        ------
        NotEnoughData
            The buffer is empty. This error is also a BufferError.
        """
        fields = map_tree(lambda tensor: tensor.flatten(0, 1), self._shown())
        if self._pushed:
            assert self._fields is not None
            following = Batch({"next_obs": self._final.nested(self._fields), "index": fields["index"]})
            fields |= renamed(following, PUSHED, ())
        return Batch(fields)

    def sequences(
        self,
        size: int,
        epochs: int = 1,
        seed: int | None = None,
        *,
        length: int | None = None,
        start_only: Sequence[str] = (),
    ) -> Iterator[Batch]:
        """Return an iterator over sequences of the buffer's steps, for recurrent networks.

        A sequence has successive steps of one episode of one environment. The steps stay in the buffer until `clear`.
        For all arguments see `Batch.sequences`. With a recurrent state in `extra`, ``start_only=("hidden",)`` gives the
        initial state of each sequence.

        Returns
        -------
        iterator of Batch
            The fields of `sample` except `next_states`, (B, L, ...), with zeros after the end of a sequence. Scalars
            are (B, L, 1). `mask`, (B, L, 1) bool, is True at real steps. Fields in `start_only` are (B, ...), and
            `index` is (B,).

        Raises
        ------
        NotEnoughData
            The buffer is empty. This error is also a BufferError.
        ValueError
            An argument is invalid.
        """
        batch = self._gathered()
        ends = (batch["terminated"] + batch["truncated"]).cpu().numpy() != 0
        found = sequences_of(Batch(self._shown()), ends, size, epochs, seed, length, start_only)
        return (Batch({**{name: part[name] for name in part}, "mask": part["mask"].unsqueeze(-1)}) for part in found)

    def _shown(self) -> dict[str, Any]:
        """Return the tensors, (steps so far, num_envs, ...), by their names in batches."""
        batch = self._gathered()
        if self._pushed:
            fields = renamed(batch, PUSHED, {*HIDDEN, *self._extra})
        else:
            fields = renamed(batch, ADDED, HIDDEN)
        if self._estimates is not None:
            fields |= zip(ESTIMATES, (tensor.unsqueeze(-1) for tensor in self._estimates), strict=True)
        return fields

    def get_all_data(self) -> dict[str, Any]:
        """Return the tensors of the buffer by attribute name; None for tensors that are missing or not yet computed.

        Raises
        ------
        NotEnoughData
            The buffer is empty. This error is also a BufferError.
        """
        names = ("observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs")
        return {name: getattr(self, name) for name in (*names, "advantages", "returns")}

    @property
    def observations(self) -> Any:
        """Observations, (steps so far, num_envs, *obs_shape). Fields of an empty buffer raise NotEnoughData."""
        return self._gathered()["obs"]

    @property
    def privileged_observations(self) -> Any:
        """Observations of the critic, (steps so far, num_envs, num_privileged_obs), or None."""
        batch = self._gathered()
        return batch[PRIVILEGED] if self._privileged else None

    @property
    def actions(self) -> Any:
        """Actions, (steps so far, num_envs, *action_shape)."""
        return self._gathered()["action"]

    @property
    def rewards(self) -> torch.Tensor:
        """Rewards, (steps so far, num_envs) float32."""
        return self._tensor("reward")

    @property
    def dones(self) -> torch.Tensor:
        """1 for each step that was added with a true flag in `dones`, else 0, (steps so far, num_envs) float32."""
        return self._tensor("terminated")

    @property
    def truncated(self) -> torch.Tensor:
        """1 if the step ended an episode without termination, else 0, (steps so far, num_envs) float32."""
        return self._tensor("truncated")

    @property
    def values(self) -> torch.Tensor:
        """The critic's values, (steps so far, num_envs) float32."""
        return self._tensor("value")

    @property
    def log_probs(self) -> torch.Tensor:
        """Logarithms of the actions' probabilities, (steps so far, num_envs) float32."""
        return self._tensor("log_prob")

    @property
    def advantages(self) -> torch.Tensor | None:
        """Advantages, (steps so far, num_envs) float32; None before `compute_returns_and_advantages`."""
        return None if self._estimates is None else self._estimates[0]

    @property
    def returns(self) -> torch.Tensor | None:
        """Advantages + values, (steps so far, num_envs) float32; None before `compute_returns_and_advantages`."""
        return None if self._estimates is None else self._estimates[1]

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._gathered()[name]
        return tensor

    @torch.inference_mode(False)
    def _gathered(self) -> Batch:
        """Return a batch of the steps, (steps so far, num_envs, ...), with the names of the store's fields."""
        self._check_open()
        self._wait()
        schema = self._fields
        if not self._steps or schema is None:
            raise NotEnoughData("the rollout buffer has 0 steps, and reading it needs 1: add some")
        if self._batch is None:
            columns = {path: tensor[: self._steps] for path, tensor in self._columns.items()}
            fields = {part: schema.unflatten(part, columns) for part in ("obs", "action", "reward")}
            fields |= schema.unflatten("extra", columns)
            fields |= {name: columns[name] for name in FLAGS}
            numbers = torch.arange(self._first, self._first + len(self), device=self._device)
            self._batch = Batch({**fields, "index": numbers.view(self._steps, self._num_envs)})
        return self._batch

    def close(self) -> None:
        """Write the waiting steps to the store, and close the store.

        Tensors that the buffer returned stay valid. Closing twice is fine.

        Raises
        ------
        StorageFull
            The store had no room for a step. The buffer is closed nevertheless.
        """
        try:
            if self._recorder is not None:
                self._recorder.close()
        finally:
            super().close()
            self._forget()


def _num_steps(num_envs: int, num_steps: Any, capacity: Any) -> int:
    if (num_steps is None) == (capacity is None):
        raise ValueError("give either num_steps, the steps of each environment, or capacity, the steps of all together")
    if num_steps is not None:
        return int_argument("num_steps", num_steps)
    steps, rest = divmod(int_argument("capacity", capacity), num_envs)
    if rest:
        raise ValueError(f"capacity must be a multiple of num_envs, {num_envs}, not {capacity}")
    return steps
