"""Normalising by running statistics, as VecNormalize of stable-baselines3 does."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from diskreplay.distributions.base import OneOwner
from diskreplay.distributions.number_arguments import fraction, number
from diskreplay.distributions.saved_state import state_of
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, Tree, map_paths
from diskreplay.sampling.transforms import Arrays, Result, Transform, changed_observations, obs_leaves
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import names, reward_leaves, weights_or_none
from diskreplay.views.base import View
from diskreplay.views.moments import RETURN, Moments, StoreMoments, loaded
from diskreplay.views.rollouts import Rollouts


class RunningMeanStd(Protocol):
    """Statistics of stable-baselines3: numbers, or arrays of one value's shape."""

    count: float
    mean: Any
    var: Any


class VecNormalizeLike(Protocol):
    """What is read of a VecNormalize; `obs_rms` is by key for observations that are dicts."""

    norm_obs: bool
    norm_reward: bool
    obs_rms: RunningMeanStd | Mapping[str, RunningMeanStd]
    ret_rms: RunningMeanStd
    clip_obs: float
    clip_reward: float
    gamma: float
    epsilon: float


class Normalize(OneOwner, Transform):
    """Normalise observations, and rewards if asked, by running statistics of the store, as VecNormalize does.

    Observations become (x - mean) / sqrt(var + epsilon), over all steps of the store; rewards r / sqrt(var + epsilon),
    where var is that of the returns R_t = r_t + gamma R_{t-1} from the beginning of each episode to each step (Engstrom
    et al. 2020, section 3). Both are computed in float64 and clipped; floats keep their dtype, others become float32.

    The statistics follow the store as it grows: each step counts once and for good, when the sampler first sees it,
    whether it is drawn or not. What is new is merged in when a batch is drawn, before it is made; the first batch reads
    all that is there. They are part of the sampler's saved state. A batch is normalised by those of its draw, and what
    is in the store stays as it is. Padding, and observations that are not there, are zeros before they are normalised.

    A step with NaN, an infinity or a number beyond 1e140 is left out of the statistics of that leaf, or of returns.
    The first one is a warning; `Sampler.stats` counts such steps in `steps_not_finite`. A few values that are a million
    times larger than the others make a deviation useless: this is a warning, too.

    It belongs to one sampler; ``copy.deepcopy`` makes one for another with the same statistics.

    Parameters
    ----------
    obs : bool or sequence of str
        Whether observations are normalised: all leaves of floats, or those named, such as "state" or "arm/joints"
        ("obs" for a lone array).
    reward : bool or dict
        Whether `reward` is; a dict has weights by name as that of `Transitions`, for batches that sum several fields.
        n-step returns are divided, and clipped, as they are. Not for `Rollouts`: advantages are of what is stored.
    clip_obs, clip_reward : float or None
        The largest absolute values of the results; None: any.
    gamma : float
        Discount a step of the returns.
    epsilon : float
        Is added to each variance.

    Attributes
    ----------
    frozen : bool
        Whether the statistics stay as they are; may be set. Steps that come meanwhile count when it is false again.

    Raises
    ------
    ValueError
        An argument is invalid; by the sampler also where `obs` names what the store has not, or it has no floats.
    """

    keeps_state = True

    def __init__(
        self,
        obs: bool | Sequence[str] = True,
        reward: bool | Mapping[str, float] = False,
        *,
        clip_obs: float | None = 10.0,
        clip_reward: float | None = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
    ) -> None:
        self._obs = obs if isinstance(obs, bool) else names("obs", obs)
        self._reward = reward if isinstance(reward, bool) else weights_or_none("reward", reward)
        if not self._obs and not self._reward:
            raise ValueError("obs and reward are both false: nothing would be normalised")
        self._clip_obs, self._clip_reward = _clip("clip_obs", clip_obs), _clip("clip_reward", clip_reward)
        self._gamma, self._epsilon = fraction("gamma", gamma), number("epsilon", epsilon, 0.0)
        self.frozen = False
        self._store: StoreMoments | None = None
        self._given: Mapping[str, Moments] | None = None  # until there is a store
        self._prepared: Arrays = {}

    def __repr__(self) -> str:
        return f"Normalize(obs={self._obs!r}, reward={self._reward!r})"

    @classmethod
    def from_vecnormalize(cls, source: VecNormalizeLike) -> "Normalize":
        """Normalise by the statistics of a VecNormalize, and of anything with its attributes; they are frozen.

        They count what its environments did. If these steps are in the store too, they would count twice when `frozen`
        is set to false.

        Raises
        ------
        ValueError
            Its arguments or statistics are invalid.
        """
        keys = None
        moments = {}
        if source.norm_obs:
            by_key = source.obs_rms if isinstance(source.obs_rms, Mapping) else {"": source.obs_rms}
            keys = [key or "obs" for key in by_key]
            moments = {f"obs/{key}" if key else "obs": _moments(found) for key, found in by_key.items()}
        if source.norm_reward:
            moments[RETURN] = _moments(source.ret_rms)
        made = cls(
            False if keys is None else keys,
            bool(source.norm_reward),
            clip_obs=source.clip_obs if np.isfinite(source.clip_obs) else None,
            clip_reward=source.clip_reward if np.isfinite(source.clip_reward) else None,
            gamma=source.gamma,
            epsilon=source.epsilon,
        )
        made._given, made.frozen = moments, True
        made._publish(moments)
        return made

    @property
    def moments(self) -> dict[str, Moments]:
        """The statistics, (count, mean, var) in float64: "obs" or "obs/state" by leaf, and "return"."""
        found = self._given if self._store is None else self._store.moments
        return dict(found or {})

    # --- the contract of transforms ----------------------------------------------------------------------------------

    def bind(self, schema: Schema, view: View) -> list[str]:
        """Return the leaves that are normalised."""
        if self._reward and isinstance(view, Rollouts):
            raise ValueError(
                "Normalize(reward=...) means nothing to Rollouts, whose advantages are made of the stored rewards: "
                "normalise rewards before they are appended"
            )
        named = None if isinstance(self._obs, bool) else self._obs
        fields = {}
        if self._obs:
            fields = obs_leaves(schema, "obs", named, lambda field: field.dtype.kind == "f", "of floats")
        if self._store is None:
            weights = reward_leaves(schema, None if self._reward is True else self._reward) if self._reward else []
            store = StoreMoments(fields, weights, self._gamma)
            if self._given is not None:
                store.replace(self._given)
            self._store = store
            self._publish(store.moments)
        return [*fields]

    def prepare(self, snapshot: Snapshot) -> Arrays:
        """Count what is new, and return mean and variance of each leaf and of returns, (2, *shape)."""
        if not self.frozen and self._store is not None:
            before = self._store.moments
            self._store.follow(snapshot)
            if self._store.moments is not before:
                self._publish(self._store.moments)
        return self._prepared

    def _publish(self, moments: Mapping[str, Moments]) -> None:
        self._prepared = {name: np.stack([found.mean, found.var]) for name, found in moments.items()}

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the observations and the reward, normalised."""
        found = changed_observations(batch, leaves, lambda path, leaf: self._normalized(leaf, prepared[path]))
        if self._reward and "reward" in batch:
            found["reward"] = self._scaled(batch["reward"], prepared)
        return found

    def stats(self) -> dict[str, float]:
        """Return `steps_not_finite`: how many steps have NaN or an infinity, and are left out of the statistics."""
        return {"steps_not_finite": 0 if self._store is None else self._store.not_finite}

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and which steps they count."""
        own = StoreMoments({}, [], self._gamma) if self._store is None else self._store
        return {"frozen": self.frozen, **own.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state; ValueError, and no change, where it is that of other fields."""
        with state_of("Normalize"):
            frozen = bool(state["frozen"])
            if self._store is not None:
                self._store.load_state_dict(state)
                self._publish(self._store.moments)
            self.frozen = frozen

    # --- for those who act -------------------------------------------------------------------------------------------

    def normalize_obs(self, obs: Tree) -> Tree:
        """Normalise observations by the statistics of now, for a policy that acts.

        Parameters
        ----------
        obs : array or Tensor, or nested as the store's observations
            With any leading axes.

        Returns
        -------
        Arrays or tensors, as they came.
        """
        return self._each(obs, self._normalized)

    def unnormalize_obs(self, obs: Tree) -> Tree:
        """Undo `normalize_obs`, but for what was clipped."""
        return self._each(obs, self._restored)

    def normalize_reward(self, reward: Tree) -> Tree:
        """Normalise rewards, arrays or tensors of any shape, by the statistics of now."""
        return _as_came(reward, lambda tensor: self._scaled(tensor, self._prepared))

    def unnormalize_reward(self, reward: Tree) -> Tree:
        """Undo `normalize_reward`, but for what was clipped."""
        if not self._reward:
            return reward
        var = self._prepared[RETURN][1]
        return _as_came(reward, lambda tensor: _result(_exact(tensor) * np.sqrt(var + self._epsilon), tensor, None))

    def _each(self, obs: Tree, change: Any) -> Tree:
        prepared = self._prepared

        def changed(path: str, leaf: Tree) -> Tree:
            return _as_came(leaf, lambda tensor: change(tensor, prepared[path])) if path in prepared else leaf

        return map_paths(changed, obs, "obs")

    def _normalized(self, leaf: torch.Tensor, moments: np.ndarray) -> torch.Tensor:
        mean, std = self._mean_and_std(leaf, moments)
        return _result((_exact(leaf) - mean) / std, leaf, self._clip_obs)

    def _restored(self, leaf: torch.Tensor, moments: np.ndarray) -> torch.Tensor:
        mean, std = self._mean_and_std(leaf, moments)
        return _result(_exact(leaf) * std + mean, leaf, None)

    def _mean_and_std(self, leaf: torch.Tensor, moments: np.ndarray) -> torch.Tensor:
        both = np.stack([moments[0], np.sqrt(moments[1] + self._epsilon)])
        return torch.from_numpy(both).to(leaf.device, _exact_dtype(leaf))

    def _scaled(self, reward: torch.Tensor, prepared: Arrays) -> torch.Tensor:
        if not self._reward:
            return reward
        std = float(np.sqrt(prepared[RETURN][1] + self._epsilon))
        return _result(_exact(reward) / std, reward, self._clip_reward)


def _clip(name: str, value: float | None) -> float | None:
    return None if value is None else number(name, value, above=0.0)


def _moments(found: RunningMeanStd) -> Moments:
    with state_of("RunningMeanStd"):
        return loaded({"count": found.count, "mean": found.mean, "var": found.var})


def _exact_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # which has no float64


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_exact_dtype(tensor))


def _result(exact: torch.Tensor, came: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Return what was computed, clipped, in the dtype that came if that is of floats."""
    if clip is not None:
        exact = exact.clamp_(-clip, clip)
    return exact.to(came.dtype if came.is_floating_point() else torch.float32)


def _as_came(value: Any, change: Any) -> Any:
    """Return a tensor that was changed, or the array of one for an array."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return change(torch.from_numpy(np.array(value))).numpy()
