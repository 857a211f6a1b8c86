"""A rollout buffer: filled with the steps of all environments, read whole, emptied."""

from typing import Any

import numpy as np
import torch

from diskreplay.buffers.backing import Backed
from diskreplay.buffers.rollout_reading import RolloutReading
from diskreplay.buffers.values import (
    Given,
    bytes_of,
    checked,
    fitted,
    has_one_environments_axis,
    plain,
    with_aliases,
)
from diskreplay.errors import BufferFull, NotEnoughData, SchemaError
from diskreplay.format.schema import Schema
from diskreplay.format.spaces import Field
from diskreplay.loading.batch import Batch, map_tree
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.store.store import PathLike, Store
from diskreplay.store.writing.casting import as_flags
from diskreplay.views.rollouts import advantages

# The store keeps so many rollouts. A rollout may lie in the newest three segments, of which the first two have at most
# twice and a third once the rows of a segment, one row of every lane aside; the oldest steps of all must not be its.
KEPT = 8
LEAST_SEGMENT_STEPS = 1024

SCALARS = ("value", "log_prob")
PRIVILEGED = "privileged_obs"


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
        path: PathLike | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._num_envs = int_argument("num_envs", num_envs)
        self._num_steps = _num_steps(self._num_envs, num_steps, capacity)
        self._privileged = int_argument("num_privileged_obs", num_privileged_obs, 0)
        self._following: bytes | None = None  # of a pushed step: the observation of the next one, if it continues there
        self._forget()
        extra = {name: Field((), "float32") for name in SCALARS}
        if self._privileged:
            extra[PRIVILEGED] = Field((self._privileged,), "float32")
        steps = max(self._num_envs * self._num_steps, LEAST_SEGMENT_STEPS)
        super().__init__(path, device, Given(obs_shape, action_shape), KEPT * steps, steps, extra)

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
    ) -> None:
        """Add one step of every environment: arrays or tensors with a leading axis of `num_envs`.

        Parameters
        ----------
        observations, actions, rewards : (num_envs, ...)
            The step.
        dones : (num_envs,)
            Whether the step ended each environment's episode: nothing is bootstrapped behind it.
        values, log_probs : (num_envs,) or (num_envs, 1)
            The critic's value of the observation, and the logarithm of the action's probability.
        privileged_observations : (num_envs, num_privileged_obs) or None
            What the critic saw; None where `num_privileged_obs` is 0.

        Raises
        ------
        BufferError
            The buffer is full; nothing was added.
        SchemaError
            A value does not fit those of the first step; nothing was added.
        """
        if (privileged_observations is None) != (self._privileged == 0):
            needed = "must be None" if not self._privileged else f"needs {self._privileged} values"
            raise SchemaError(f"privileged_observations {needed}: num_privileged_obs is {self._privileged}")
        extra = {"value": values, "log_prob": log_probs}
        if self._privileged:
            extra[PRIVILEGED] = privileged_observations
        self._append(observations, actions, rewards, dones, None, extra)

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

    def _append(self, obs: Any, action: Any, reward: Any, done: Any, next_obs: Any, extra: dict[str, Any]) -> None:
        self._check_open()
        if self._steps == self._num_steps:
            raise BufferFull(f"the rollout buffer has all its {len(self)} steps: clear() it before the next")
        schema = self._first_schema(obs, action, reward) if self._store is None else self._store.schema
        lanes = (self._num_envs,)
        # All is cast before anything changes: what does not fit is refused here.
        obs, reward = fitted(schema.obs, obs, lanes), fitted(schema.reward, reward, lanes)
        seen, action = bytes_of(schema, obs, lanes), checked(schema, "action", action, lanes)
        schema.reward.cast(reward, "reward", lanes)
        extra = checked(schema, "extra", extra, lanes)
        ended = as_flags(plain(done).reshape(-1), "dones", self._num_envs)
        following = None
        if next_obs is not None:
            next_obs = fitted(schema.obs, next_obs, lanes)
            following = bytes_of(schema, next_obs, lanes)
        writer = self._writer_of(schema, self._num_envs)
        if self._following not in (None, seen):
            self._following = None
            writer.end_episode()
        writer.append(obs, action, reward, ended, next_obs=next_obs, **extra)
        self._following = None if ended.all() else following
        self._pushed &= next_obs is not None
        self._steps += 1
        self._batch = self._estimates = None

    def _first_schema(self, obs: Any, action: Any, reward: Any) -> Schema:
        lanes: int | None = self._num_envs
        batched = plain(reward).ndim > 0
        if lanes == 1 and not has_one_environments_axis(obs, self._given.obs_shape, batched):
            lanes = None
        found = self._given.field("obs", obs, lanes)
        if lanes == 1 and not has_one_environments_axis(action, self._given.action_shape, batched=True):
            lanes = None
        return Schema(found, self._given.field("action", action, lanes), extra=self._extra)

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

    def compute_returns_and_advantages(self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95) -> None:
        """Compute generalized advantage estimates and returns of the steps so far (Schulman et al. 2016, equation 16).

        Parameters
        ----------
        last_values : (num_envs,) or (num_envs, 1)
            The critic's values of the observations behind the last step.
        gamma, gae_lambda : float
            Discount a step, and the exponent's base of the estimate, 0 to 1.

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        ValueError
            A shape or number is invalid.
        """
        last = plain(last_values)
        if last.size != self._num_envs:
            raise ValueError(
                f"last_values must be one value for each of {self._num_envs} environments, not {last.shape}"
            )
        batch = self._gathered()
        columns = (batch[name].cpu().numpy() for name in ("reward", "value", "terminated"))
        rewards, values, dones = columns
        found = advantages(rewards, values, last.reshape(-1), dones, gamma, gae_lambda)
        self._estimates = tuple(torch.from_numpy(array).to(self._device) for array in found)  # type: ignore[assignment]

    def sample(self) -> Batch:
        """Return all steps as a flat batch, step after step; none is consumed.

        Returns
        -------
        Batch
            `obs`, `action`, `reward`, `terminated`, `value`, `log_prob`, `index`, (len(buffer), ...), `privileged_obs`
            where there are such, and `advantage` and `ret` once they are computed. Under other names `states`,
            `actions`, `rewards` and `dones`: scalars as (len(buffer), 1), dones float32. Where all steps were pushed,
            `next_obs` and `next_states` too.

        Raises
        ------
        NotEnoughData
            The buffer is empty. It is a BufferError.
        """
        batch = self._gathered()
        fields = {name: map_tree(lambda tensor: tensor.flatten(0, 1), batch[name]) for name in batch}
        if self._pushed:
            fields["next_obs"] = self._reading.next_obs(fields["index"])
        if self._estimates is not None:
            fields["advantage"], fields["ret"] = (tensor.flatten() for tensor in self._estimates)
        return with_aliases(fields)

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
        """1 where a step ended its episode, else 0, (steps so far, num_envs) float32."""
        return self._tensor("terminated").float()

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
