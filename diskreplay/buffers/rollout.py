"""A rollout buffer: filled with the steps of all environments, read whole, emptied."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.buffers.backing import Backed
from diskreplay.buffers.rollout_reading import RolloutReading
from diskreplay.buffers.values import Given, checked, fitted, flags_of, plain, renamed, rows_of
from diskreplay.errors import (
    BufferFull,
    InvalidIndex,
    NotEnoughData,
    ReplayError,
    SchemaError,
    StorageFull,
    warn_caller,
)
from diskreplay.format.schema import Schema
from diskreplay.format.spaces import Field
from diskreplay.loading.batch import Batch, map_tree, sequences_of, torch_values
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.store.store import PathLike, Store
from diskreplay.views.rollouts import advantages, evaluated

# The store keeps so many rollouts. A rollout may lie in the newest three segments, of which the first two have at most
# twice and a third once the rows of a segment, one row of every lane aside; the oldest steps of all must not be its.
KEPT = 8
LEAST_SEGMENT_STEPS = 1024

SCALARS = ("value", "log_prob")
PRIVILEGED = "privileged_obs"

# What batches call the fields of the store: as the arguments of `add`, or as `Experience` does.
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
    """`num_steps` steps of `num_envs` environments side by side, for on-policy learning.

    What it is to hold is read off the first step, as `ReplayBuffer` does; values and log probabilities are float32
    scalars. With one environment, `add` also takes values without the axis of environments.

    The attributes are tensors on the device, (steps so far, num_envs, ...), gathered when first asked for.

    Concurrency: one thread.

    Parameters
    ----------
    num_envs : int
        Environments that step together.
    num_steps : int or None
        Steps of each until the buffer is full.
    obs_shape, action_shape : tuple of int or None
        Shapes of one environment's observation and action; None: those of the first step.
    capacity : int or None
        Steps of all environments together until it is full: instead of `num_steps`.
    num_privileged_obs : int
        Length of the critic's observation; 0: there is none.
    extra : dict of Field, optional
        Further values of a step by name, arguments of `add`: a recurrent state, ``{"hidden": dr.Field((64,),
        "float32")}``.
    path : path or None
        Where to keep the newest rollouts, eight or more; a buffer made there begins empty, and no two may be in use
        there at once. None is a temporary folder, removed by `close`, with the buffer, or at exit.
    device : torch.device or str or None
        Where tensors are; None is the CPU.

    Raises
    ------
    ValueError
        An argument is invalid, or the store at `path` is of rollouts of another size.
    SchemaError
        A shape cannot be stored, or is not that of the store at `path`.
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
        self._warned = False
        self._forget()
        fields = {name: Field((), "float32") for name in SCALARS}
        if self._privileged:
            fields[PRIVILEGED] = Field((self._privileged,), "float32")
        known = {*fields, *ADDED.values(), *PUSHED.values(), *ESTIMATES, "final_observations"}
        if taken := sorted(known & extra.keys()):
            raise ValueError(f"extra names {taken[0]!r}, which a batch has already: choose another name")
        steps = max(self._num_envs * self._num_steps, LEAST_SEGMENT_STEPS)
        super().__init__(path, device, Given(obs_shape, action_shape), KEPT * steps, steps, {**fields, **extra})

    def _begin(self, store: Store) -> None:
        self._reading = RolloutReading(store, self._device)

    def _forget(self) -> None:
        self._steps = 0
        self._pushed = True  # whether all steps so far came with what they led to
        self._batch: Batch | None = None
        self._estimates: tuple[torch.Tensor, torch.Tensor] | None = None

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
            The step.
        dones : (num_envs,)
            Whether the step terminated each environment's episode: nothing is bootstrapped behind it. Without
            `truncated`, give whether it ended in any way. Numbers are 0 or 1.
        values, log_probs : (num_envs,) or (num_envs, 1)
            The critic's value of the observation, and the logarithm of the action's probability.
        privileged_observations : (num_envs, num_privileged_obs) or None
            What the critic saw; None where `num_privileged_obs` is 0.
        truncated : (num_envs,) or None
            Whether each episode ended otherwise, by a time limit for example: it is bootstrapped from its final
            observation. A step that is done as well is not.
        final_observations : (num_envs, ...) or None
            The final observations of the truncated episodes; other rows may hold anything. Gymnasium's
            ``info["final_obs"]`` of SAME_STEP autoreset will do.
        **extra : (num_envs, ...)
            The values that `extra` of the buffer names, all of them.

        Raises
        ------
        BufferError
            The buffer is full; nothing was added.
        SchemaError
            A value does not fit those of the first step; nothing was added.
        StorageFull
            There is no room. Nothing was added; if `final_observations` were stored, the buffer is empty.
        """
        if (privileged_observations is None) != (self._privileged == 0):
            needed = "must be None" if not self._privileged else f"needs {self._privileged} values"
            raise SchemaError(f"privileged_observations {needed}: num_privileged_obs is {self._privileged}")
        values = {"value": values, "log_prob": log_probs, **extra}
        if self._privileged:
            values[PRIVILEGED] = privileged_observations
        self._append(observations, actions, rewards, dones, None, values, truncated, final_observations)

    def push(self, experience: Any) -> None:
        """Add an `Experience` of a single environment, with its next state; value and log probability are 0.

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
        if self._steps == self._num_steps:
            raise BufferFull(f"the rollout buffer has all its {len(self)} steps: clear() it before the next")
        schema = self._schema(obs, action, self._num_envs, reward)
        lanes = (self._num_envs,)
        ended = flags_of(done, "dones", self._num_envs, reward=reward)
        cut = np.zeros(lanes, np.bool_)
        if truncated is not None:
            cut = flags_of(truncated, "truncated", self._num_envs, reward=reward)
        # All is cast before anything changes: what does not fit is refused here.
        obs, action, extra = (
            checked(schema, part, value, lanes) for part, value in (("obs", obs), ("action", action), ("extra", extra))
        )
        reward = fitted(schema.reward, reward, lanes)
        schema.reward.cast(reward, "reward", lanes)
        if next_obs is not None:
            next_obs = checked(schema, "obs", next_obs, lanes)
        values = {"obs": obs, "action": action, "reward": reward, "terminated": ended, "truncated": cut, **extra}
        if final_obs is not None and cut.any():
            self._append_with_final(schema, values, cut, checked(schema, "obs", rows_of(schema, final_obs, cut), lanes))
        else:
            self._writer_of(schema, self._num_envs).append(**values, next_obs=next_obs)
        self._pushed &= next_obs is not None
        self._steps += 1
        self._batch = self._estimates = None

    def _append_with_final(
        self, schema: Schema, values: dict[str, Any], cut: NDArray[np.bool_], final_obs: Any
    ) -> None:
        """Append a step of which some lanes have their final observation, and the others' next ones are to come."""
        writer = self._writer_of(schema, self._num_envs)
        writer.append(**values, next_obs=final_obs, mask=cut)
        try:
            writer.append(**values, mask=~cut)
        except BaseException:
            # Lanes of unequal length make no rollout: the next step is the first one of another writer's.
            with suppress(StorageFull):
                writer.close()
            self._writer = None
            assert self._store is not None
            self._begin(self._store)
            self._forget()
            raise

    def clear(self) -> None:
        """Empty the buffer."""
        if self._steps:
            self._reading.skip(self._steps)
        self._forget()

    def empty(self) -> None:
        """Empty the buffer; the same as `clear`."""
        self.clear()

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of steps, those of all environments together."""
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

        A truncated step is bootstrapped with the value of its final observation, and the chain of lambda stops there
        (partial-episode bootstrapping, Pardo et al. 2018, section 3.2). That value comes from `value_fn` or from
        `final_values`. Without either it is the value of the step's own observation, which is close where little
        changes in a step, and the first time a warning.

        Parameters
        ----------
        last_values : (num_envs,) or (num_envs, 1)
            The critic's values of the observations behind the last step. Where that step ended an episode, they are not
            read.
        gamma, gae_lambda : float
            Discount a step, and the exponent's base of the estimate, 0 to 1.
        value_fn : callable or None
            Computes the values of the final observations that `add` was given: tensors (n, ...), nested as the
            observations are, to (n,) or (n, 1). It is called at most once, without gradients.
        final_values : (steps so far, num_envs) or None
            Those values; other steps' may be anything. For a critic that sees more than observations.

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        ReplayError
            `value_fn` is given, and the final observation of a truncated step was not.
        ValueError
            An argument is invalid.
        """
        last = plain(last_values)
        if last.size != self._num_envs or last.ndim > 2:
            raise ValueError(
                f"last_values must be one value for each of {self._num_envs} environments, not {last.shape}"
            )
        if value_fn is not None and final_values is not None:
            raise ValueError("value_fn and final_values both tell the values of final observations: give one of them")
        batch = self._gathered()
        names = ("reward", "value", "terminated", "truncated")
        rewards, values, dones, truncated = (batch[name].cpu().numpy() for name in names)
        left = truncated & ~dones
        if truncated.any() and not left.any():
            self._warn(
                "every truncated step is done as well, and so none is bootstrapped: where truncated is given, dones "
                "says which steps terminated, and not which ones ended"
            )
        final = self._final_values(left, values, value_fn, final_values)
        found = advantages(rewards, values, last.reshape(-1), dones, gamma, gae_lambda, left, final)
        self._estimates = tuple(torch.from_numpy(array).to(self._device) for array in found)  # type: ignore[assignment]

    def _warn(self, message: str) -> None:
        """Warn of a rollout's ends, once a buffer."""
        if not self._warned:
            self._warned = True
            warn_caller(message)

    def _final_values(self, left: NDArray[np.bool_], values: Any, value_fn: Any, final_values: Any) -> Any:
        """Return the values of the final observations of steps, (steps so far, num_envs); elsewhere they are any."""
        if final_values is not None:
            given = plain(final_values)
            if given.size != left.size or given.shape[:2] != left.shape:
                raise ValueError(f"final_values must be {list(left.shape)}, one for each step, not {list(given.shape)}")
            return given.reshape(left.shape)
        if not left.any():
            return 0.0
        if value_fn is None:
            step, env = np.argwhere(left)[0]
            self._warn(
                f"step {step} of environment {env} was truncated, and nothing tells the value of its final "
                "observation: such steps are bootstrapped with the values of their own observations. Give value_fn, "
                "which computes it, or final_values; final_values=buffer.values says that this is meant"
            )
            return values
        ids = self._gathered()["index"].cpu()[torch.from_numpy(left)]
        try:
            final_obs = self._reading.next_obs(ids)
        except InvalidIndex as error:
            raise ReplayError(
                f"a step was truncated, and the final observation, which value_fn would be given, was not added "
                f"({error}): give final_observations to add, or final_values"
            ) from None
        found = np.zeros(left.shape)
        arrays = map_tree(lambda tensor: tensor.cpu().numpy(), final_obs)
        found[left] = evaluated(torch_values(value_fn, self._device), arrays, len(ids))
        return found

    def sample(self) -> Batch:
        """Return all steps as a flat batch, step after step; none is consumed.

        ``sample().minibatches(size, epochs)`` shuffles them; `sequences` keeps their order, for recurrent networks.

        Returns
        -------
        Batch
            `observations`, `privileged_observations` where there are such, `actions`, `rewards`, `dones`, `values`,
            `log_probs`, those of `extra`, and `advantages` and `returns` once they are computed: (len(buffer), ...),
            scalars (len(buffer), 1), dones float32. Also `index`, (len(buffer),), the ids of the steps. Where all steps
            were pushed, it has the names of an `Experience` instead: `states`, `actions`, `rewards`, `next_states`,
            `dones`.

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        """
        fields = map_tree(lambda tensor: tensor.flatten(0, 1), self._shown())
        if self._pushed:
            following = Batch({"next_obs": self._reading.next_obs(fields["index"]), "index": fields["index"]})
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
        """Return an iterator over the steps so far as whole sequences, for recurrent networks; none is consumed.

        A sequence is the steps of one environment's episode in order; see `Batch.sequences` for all arguments. With a
        recurrent state in `extra`, ``start_only=("hidden",)`` gives the state that each sequence starts with.

        Returns
        -------
        iterator of Batch
            The fields of `sample` but `next_states`, (B, L, ...), scalars (B, L, 1), zeros behind a sequence's end;
            `mask`, (B, L, 1) bool, tells which steps are real. Those of `start_only` are (B, ...), `index` (B,).

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        ValueError
            An argument is invalid.
        """
        batch = self._gathered()
        ends = (batch["terminated"] | batch["truncated"]).cpu().numpy()
        found = sequences_of(Batch(self._shown()), ends, size, epochs, seed, length, start_only)
        return (Batch({**{name: part[name] for name in part}, "mask": part["mask"].unsqueeze(-1)}) for part in found)

    def _shown(self) -> dict[str, Any]:
        """Return the fields of batches, (steps so far, num_envs, ...)."""
        batch = self._gathered()
        if self._pushed:
            fields = renamed(batch, PUSHED, {*HIDDEN, *self._extra})
        else:
            fields = renamed(batch, ADDED, HIDDEN)
        if self._estimates is not None:
            fields |= zip(ESTIMATES, (tensor.unsqueeze(-1) for tensor in self._estimates), strict=True)
        return fields

    def get_all_data(self) -> dict[str, Any]:
        """Return the attributes by name; what is not there, or not computed yet, is None.

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        """
        names = ("observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs")
        return {name: getattr(self, name) for name in (*names, "advantages", "returns")}

    @property
    def observations(self) -> Any:
        """Observations, (steps so far, num_envs, *obs_shape); NotEnoughData on an empty buffer, as all of these."""
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
        """1 where `add` was given that a step is done, else 0, (steps so far, num_envs) float32."""
        return self._tensor("terminated").float()

    @property
    def truncated(self) -> torch.Tensor:
        """1 where an episode ended otherwise than by termination, else 0, (steps so far, num_envs) float32."""
        return self._tensor("truncated").float()

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
        """What `compute_returns_and_advantages` found, (steps so far, num_envs) float32; None before."""
        return None if self._estimates is None else self._estimates[0]

    @property
    def returns(self) -> torch.Tensor | None:
        """Advantages + values, (steps so far, num_envs) float32; None before they are computed."""
        return None if self._estimates is None else self._estimates[1]

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._gathered()[name]
        return tensor

    def _gathered(self) -> Batch:
        """Return the steps so far, gathered once."""
        if not self._steps:
            raise NotEnoughData("the rollout buffer has 0 steps, and reading it needs 1: add some")
        if self._batch is None:
            self._batch = self._reading.gather(self._steps)
        return self._batch


def _num_steps(num_envs: int, num_steps: Any, capacity: Any) -> int:
    if (num_steps is None) == (capacity is None):
        raise ValueError("give num_steps, the steps of each environment, or capacity, those of all together")
    if num_steps is not None:
        return int_argument("num_steps", num_steps)
    steps, rest = divmod(int_argument("capacity", capacity), num_envs)
    if rest:
        raise ValueError(f"capacity must be a multiple of num_envs, {num_envs}, not {capacity}")
    return steps
