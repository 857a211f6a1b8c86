"""Normalisation by running statistics of a store, like VecNormalize of stable-baselines3."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.distributions.base import OneOwner
from diskreplay.distributions.number_arguments import fraction, number
from diskreplay.distributions.saved_state import state_of
from diskreplay.errors import NotEnoughData, SegmentGone
from diskreplay.ids import EpisodeTable, Floats, Ints, places_of
from diskreplay.kernels.runs import lane_keys
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, Tree, map_paths, wide_dtype
from diskreplay.sampling.transforms import Arrays, Result, Transform, changed_observations, obs_leaves
from diskreplay.schema.schema import Field, Schema
from diskreplay.views.arguments import names, reward_leaves, weighed, weights_or_none
from diskreplay.views.base import View
from diskreplay.views.gather_plan import GatherPlan, row_plan
from diskreplay.views.rollouts import Rollouts
from diskreplay.views.successors import place

RETURN = "return"
"""The key of the moments of returns. The key of a leaf's moments is the leaf's path."""
# The largest number of bytes of rows that are read at once.
PIECE_BYTES = 8 << 20
# An outlier is farther from the mean of the other values than this factor times max(1, the standard deviation of the
# other values). An outlier makes the standard deviation of all values useless.
_FAR = 1e6
# Values whose magnitude is at least the outlier's magnitude divided by this factor do not count as other values.
_ALIKE = 1e3
# Larger magnitudes are treated as infinities, because a sum of their squares could become infinite.
_LARGEST = 1e140


class Moments(NamedTuple):
    """The number of values, and their mean and (biased) variance: float64 arrays with the shape of one value."""

    count: float  # type: ignore[assignment]
    mean: Floats
    var: Floats

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """Return the moments of no values, with mean 0 and variance 1."""
        return cls(0.0, np.zeros(shape), np.ones(shape))

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Moments":
        exact = values.astype(np.float64)
        return cls(float(len(exact)), np.asarray(exact.mean(axis=0)), np.asarray(exact.var(axis=0)))

    def merged(self, other: "Moments") -> "Moments":
        """Return the moments of the values of `self` and `other` together (Chan et al. 1983, equation 2.1)."""
        if not other.count:
            return self
        total = self.count + other.count
        delta = other.mean - self.mean
        squares = self.var * self.count + other.var * other.count + delta**2 * (self.count * other.count / total)
        # `np.asarray` is needed because numpy's operations turn arrays without axes into numbers.
        return Moments(total, np.asarray(self.mean + delta * (other.count / total)), np.asarray(squares / total))


class _Runs(NamedTuple):
    """Runs of successive new steps within episodes, sorted by lane, then by step.

    `place` has the index of each run's lane among all lanes of the snapshot. `before` is the return at the step before
    the run; 0 if the run begins its episode, or if that step was not counted.
    """

    place: Ints
    first: Ints
    stride: Ints
    steps: Ints
    before: Floats

    def select(self, which: Ints) -> "_Runs":
        return _Runs(self.place[which], self.first[which], self.stride[which], self.steps[which], self.before[which])

    @property
    def ids(self) -> Ints:
        number = places_of(np.zeros_like(self.steps), self.steps)
        ids: Ints = np.repeat(self.first, self.steps) + number * np.repeat(self.stride, self.steps)
        return ids


class StoreMoments:
    """The moments of leaves and of returns, over all counted steps of a store. Not thread-safe.

    Each step counts once, when `follow` is first called with a snapshot that has it. Evicted steps still count. The
    return of a step is the discounted sum of its episode's rewards so far, R_t = r_t + gamma R_{t-1}.

    Parameters
    ----------
    fields : dict of str to Field
        The leaves whose moments are computed, by path.
    rewards : sequence of (str, dtype, float)
        Path, dtype and weight of each field; the reward is the weighted sum of these fields. If `rewards` is empty,
        there are no moments of returns.

    Attributes
    ----------
    moments : dict of str to Moments
        The moments of each leaf by path, and the moments of returns as `RETURN`. `follow` makes a new dict and does not
        change the old dict.
    not_finite : int
        The number of steps with NaN, an infinity or a number beyond 1e140 in a leaf or a reward. The moments of that
        leaf leave the step out. The moments of returns leave out steps with such a reward. Later returns count this
        reward as 0.
    """

    def __init__(self, fields: Mapping[str, Field], rewards: Sequence[tuple[str, Any, Any]], gamma: float) -> None:
        self._fields, self._weights, self._gamma = list(fields), [weight for *_, weight in rewards], gamma
        self._leaves = [*fields, *(leaf for leaf, *_ in rewards)]
        self._row_bytes = sum(field.row_bytes for field in fields.values()) + 8 * len(self._weights)
        self.moments = {leaf: Moments.none(field.shape) for leaf, field in fields.items()}
        if self._weights:
            self.moments[RETURN] = Moments.none(())
        # For each lane, the id of the newest counted step (-1: no step was counted), and the return at that step.
        self._newest, self._returns = np.zeros(0, np.int64), np.zeros(0)
        self.not_finite = 0
        self._warned: set[str] = set()
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Forget the last snapshot, so that the next `follow` searches all episodes for new steps."""
        self._snapshot: Snapshot | None = None
        self._plan: GatherPlan | None = None
        self._read = 0  # number of ended episodes, in `snapshot.log`, that were searched

    def __getstate__(self) -> dict[str, Any]:
        # A gather plan has addresses of memory, so it cannot be pickled.
        return {**self.__dict__, "_snapshot": None, "_plan": None, "_read": 0}

    def follow(self, snapshot: Snapshot) -> None:
        """Count the new steps of a snapshot. If a segment is evicted meanwhile, a later call counts the steps."""
        if snapshot is self._snapshot or self._is_older(snapshot):
            return
        if self._snapshot is None or snapshot.generation != self._snapshot.generation:
            self._list_lanes(snapshot)
        new = len(snapshot.oldest) - len(self._newest)
        self._newest = np.append(self._newest, np.full(new, -1))
        self._returns = np.append(self._returns, np.zeros(new))
        runs = self._new_runs(snapshot)
        if len(runs.place):
            try:
                moments, returns, not_finite = self._counted(snapshot, runs)
            except SegmentGone:
                return
            last = np.append(runs.place[1:] != runs.place[:-1], True)
            ends = np.cumsum(runs.steps)[last] - 1
            self._newest[runs.place[last]] = (runs.first + (runs.steps - 1) * runs.stride)[last]
            self._returns[runs.place[last]] = returns[ends] if self._weights else 0.0
            self.moments = moments
            self.not_finite += not_finite
        self._snapshot, self._read = snapshot, len(snapshot.log)

    def _is_older(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is older than the last snapshot whose steps were counted.

        The lanes of an older snapshot may have other indices, so its steps are not counted.
        """
        if self._snapshot is None:
            return False
        return (snapshot.generation, len(snapshot.oldest)) < (self._snapshot.generation, len(self._newest))

    def _list_lanes(self, snapshot: Snapshot) -> None:
        """Move the values of each lane to the lane's index in this snapshot."""
        known = self._newest >= 0
        newest, returns = self._newest[known], self._returns[known]
        at = snapshot.visible.places(newest)
        there = at >= 0
        self._start_afresh()
        self._newest, self._returns = np.full(len(snapshot.oldest), -1), np.zeros(len(snapshot.oldest))
        self._newest[at[there]], self._returns[at[there]] = newest[there], returns[there]

    def _new_runs(self, snapshot: Snapshot) -> _Runs:
        ended = snapshot.log.select(slice(self._read, None)).without_discarded()
        episodes = EpisodeTable.concatenate([ended, snapshot.open])
        first, stride, steps = episodes.first, episodes.stride, episodes.steps
        lane = snapshot.visible.places(first)
        newest = self._newest[lane]
        counted = (newest - first) // stride + 1
        skipped = np.clip(np.maximum(counted, snapshot.hidden_steps(episodes)), 0, steps)
        is_continued = (counted > 0) & (skipped == counted)
        before = np.where(is_continued, self._returns[lane], 0.0)
        runs = _Runs(lane, first + skipped * stride, stride, steps - skipped, before)
        # Runs are not sorted by the lane's index, because this index depends on the order in which segments were found.
        order = np.argsort(lane_keys(first, snapshot.origin, snapshot.lanes), kind="stable")
        order = order[(runs.steps[order] > 0) & (lane[order] >= 0)]
        return runs.select(order)

    def _counted(self, snapshot: Snapshot, runs: _Runs) -> tuple[dict[str, Moments], Floats, int]:
        """Return the moments with the steps of `runs`, the returns of these steps, and how many are not finite."""
        ids, moments, rewards = runs.ids, dict(self.moments), []
        is_finite = np.ones(len(ids), np.bool_)
        if self._plan is None:
            self._plan = row_plan(self._leaves)
        piece = max(1, PIECE_BYTES // self._row_bytes)
        for start in range(0, len(ids), piece):
            read = self._plan.rows(snapshot, place(snapshot, ids[start : start + piece]))
            values = [array[:, 0] for array in read]
            for leaf, column in zip(self._fields, values, strict=False):
                good = _are_countable(column).reshape(len(column), -1).all(axis=1)
                moments[leaf] = self._merged(leaf, moments[leaf], column if good.all() else column[good])
                is_finite[start : start + piece] &= good
            if self._weights:
                rewards.append(weighed(values[len(self._fields) :], self._weights))
        returns = np.zeros(len(ids))
        if self._weights:
            reward = np.concatenate(rewards)
            good = _are_countable(reward)
            get_kernel("discounted")(np.where(good, reward, 0.0), runs.steps, runs.before, self._gamma, returns)
            moments[RETURN] = self._merged(RETURN, moments[RETURN], returns[good])
            is_finite &= good
        not_finite = int(np.count_nonzero(~is_finite))
        if not_finite:
            self._warn(
                "not finite",
                f"step {ids[~is_finite][0]} has NaN or an infinity, or a number beyond {_LARGEST:g}: Normalize leaves "
                "such steps out of its statistics, and stats() counts them in steps_not_finite",
            )
        return moments, returns, not_finite

    def _merged(self, name: str, known: Moments, values: NDArray[Any]) -> Moments:
        if not len(values):
            return known
        if name not in self._warned and (far := _far_value(known, values)):
            self._warn(
                name,
                f"{name} has a value of {far[0]:g}, and the standard deviation of the others is {far[1]:g}: after "
                "normalisation by all of them, the others are nearly equal",
            )
        return known.merged(Moments.of(values))

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, UserWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        known = self._newest >= 0
        return _SavedMoments(self.moments, self._newest[known], self._returns[known], self.not_finite).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replace(_SavedMoments.read(state))

    def replace(self, saved: "_SavedMoments") -> None:
        expected = {name: found.mean.shape for name, found in self.moments.items()}
        given = {name: found.mean.shape for name, found in saved.moments.items()}
        if given != expected:
            raise ValueError(f"these are moments of {given}, not of {expected}")
        self.moments = {name: saved.moments[name] for name in expected}
        self._newest, self._returns, self.not_finite = saved.newest, saved.returns, saved.not_finite
        self._start_afresh()


class _SavedMoments(NamedTuple):
    """The values of a state of `StoreMoments`."""

    moments: Mapping[str, Moments]
    newest: Ints
    returns: Floats
    not_finite: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "moments": {name: found._asdict() for name, found in self.moments.items()}}

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "_SavedMoments":
        with state_of("the moments of a store"):
            moments = {str(name): loaded(found) for name, found in state["moments"].items()}
            newest, returns = np.array(state["newest"], np.int64), np.array(state["returns"], np.float64)
            if newest.ndim != 1 or newest.shape != returns.shape or (newest < 0).any():
                raise ValueError("newest and returns are not one id and one number a lane")
            return cls(moments, newest, returns, int(state.get("not_finite", 0)))


def _are_countable(values: NDArray[Any]) -> NDArray[np.bool_]:
    found = np.isfinite(values)
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        found &= np.abs(values) <= _LARGEST
    return np.asarray(found)


def _far_value(known: Moments, values: NDArray[Any]) -> tuple[float, float] | None:
    """Return an outlier (see `_FAR`) and the standard deviation of the other values; None without an outlier.

    The outlier is the largest magnitude in a column of `values`. The other values are the smaller values of the column
    (see `_ALIKE`), and all earlier values, with the moments `known`. The other values must be at least half of all
    values.
    """
    flat = values.reshape(len(values), -1)
    means, deviations = known.mean.reshape(-1), np.sqrt(known.var.reshape(-1))
    most, total = np.abs(flat).max(axis=0), known.count + len(flat)
    # This loop is fast, because few columns have such large values.
    for at in np.flatnonzero(most >= _FAR * (np.maximum(1.0, deviations) if known.count else 1.0)):
        column = flat[:, at].astype(np.float64)
        alike = np.abs(column) >= np.abs(column).max() / _ALIKE
        if total > 2 and 2 * np.count_nonzero(alike) <= total:
            before = Moments(known.count, means[at], deviations[at] ** 2)
            others = before if alike.all() else before.merged(Moments.of(column[~alike]))
            value, deviation = float(column[np.abs(column).argmax()]), float(np.sqrt(others.var))
            if abs(value - others.mean) > _FAR * max(1.0, deviation):
                return value, deviation
    return None


def loaded(state: Mapping[str, Any]) -> Moments:
    count, mean, var = float(state["count"]), np.array(state["mean"], np.float64), np.array(state["var"], np.float64)
    if not (np.isfinite(count) and count >= 0) or mean.shape != var.shape or (var < 0).any():
        raise ValueError(f"count is {count}, mean {mean.shape} and var {var.shape}, at least {var.min(initial=0)}")
    return Moments(count, mean, var)


class RunningMeanStd(Protocol):
    """Statistics as in stable-baselines3: `mean` and `var` are numbers, or arrays of one value's shape."""

    count: float
    mean: Any
    var: Any


class VecNormalizeLike(Protocol):
    """The attributes of a VecNormalize that `Normalize` reads; `obs_rms` is a dict by key if observations are dicts."""

    norm_obs: bool
    norm_reward: bool
    obs_rms: RunningMeanStd | Mapping[str, RunningMeanStd]
    ret_rms: RunningMeanStd
    clip_obs: float
    clip_reward: float
    gamma: float
    epsilon: float


class Normalize(OneOwner, Transform):
    """Normalise observations, and optionally rewards, by running statistics of the store, like VecNormalize.

    Observations become (x - mean) / sqrt(var + epsilon), with the mean and variance of all steps of the store. Rewards
    become r / sqrt(var + epsilon), with the variance of the returns R_t = r_t + gamma R_{t-1} from the beginning of
    each episode (Engstrom et al. 2020, section 3). Normalised values are computed in float64 and clipped. Floats keep
    their dtype, and other dtypes become float32.

    The statistics follow the store as it grows. Each step counts once, when the sampler first sees it, even if it is
    never drawn. Evicted steps still count. New steps are added to the statistics when a batch is drawn, so the first
    batch reads the whole store. A batch is normalised by the statistics that were current when the batch was drawn. The
    statistics are part of the sampler's saved state. Stored values never change. Padding and missing observations are
    zeros before normalisation.

    A step with NaN, an infinity or a number beyond 1e140 in a leaf is left out of the statistics of that leaf. A step
    with such a reward is left out of the statistics of returns. The first such step causes a warning. In
    `Sampler.stats`, `steps_not_finite` is the number of such steps. A few values that are a million times larger than
    the others make the standard deviation useless, and cause a warning.

    A `Normalize` belongs to one sampler. ``copy.deepcopy`` makes a copy with the same statistics for another sampler.

    Parameters
    ----------
    obs : bool or sequence of str
        Whether to normalise observations. True: all leaves of floats. Names select leaves, such as "state" or
        "arm/joints" ("obs" if the observation is one array).
    reward : bool or dict
        Whether to normalise `reward`. If the reward of the view is a weighted sum of fields, give the same dict of
        weights as to the view. n-step returns are divided and clipped as a whole. The view `Rollouts` refuses `reward`,
        because advantages are computed from stored rewards.
    clip_obs, clip_reward : float or None
        The largest absolute values of the results; None: no limit.
    gamma : float
        Discount per step in the returns.
    epsilon : float
        A number that is added to each variance.

    Attributes
    ----------
    frozen : bool
        If True, new steps do not change the statistics. You may set `frozen`. When you set `frozen` to False, the steps
        that arrived in between are counted.

    Raises
    ------
    ValueError
        An argument is invalid. The sampler also raises ValueError if `obs` names a leaf that the store lacks, or the
        store has no observations of floats.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions(), batch_size=256, seed=0, transform=dr.Normalize())
    >>> bool(sampler.sample().obs.mean().abs() < 0.5)
    True
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
        # The statistics until `bind` makes `_store`. They are empty if no statistics were given or loaded.
        self._given = _SavedMoments({}, np.zeros(0, np.int64), np.zeros(0))
        self._prepared: Arrays = {}

    def __repr__(self) -> str:
        return f"Normalize(obs={self._obs!r}, reward={self._reward!r})"

    @classmethod
    def from_vecnormalize(cls, source: VecNormalizeLike) -> "Normalize":
        """Return a frozen Normalize with the statistics of a VecNormalize, or of an object with its attributes.

        The statistics already count the steps of the VecNormalize's environments. If the store has these steps, too,
        they count twice after `frozen` is set to False.

        Raises
        ------
        ValueError
            The arguments or statistics of `source` are invalid.
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
        made._given, made.frozen = made._given._replace(moments=moments), True
        made._publish(moments)
        return made

    @property
    def moments(self) -> dict[str, Moments]:
        """The statistics, (count, mean, var) in float64, by path of the leaf. The key of returns is "return"."""
        return dict((self._given if self._store is None else self._store).moments)

    def bind(self, schema: Schema, view: View) -> list[str]:
        """Return the paths of the leaves to normalise."""
        if self._reward and isinstance(view, Rollouts):
            raise ValueError(
                "Normalize(reward=...) does not apply to Rollouts, whose advantages come from the stored rewards: "
                "normalise rewards before they are appended"
            )
        named = None if isinstance(self._obs, bool) else self._obs
        fields = {}
        if self._obs:
            fields = obs_leaves(schema, "obs", named, lambda field: field.dtype.kind == "f", "of floats")
        if self._store is None:
            weights = reward_leaves(schema, None if self._reward is True else self._reward) if self._reward else []
            store = StoreMoments(fields, weights, self._gamma)
            if self._given.moments:
                store.replace(self._given)
            self._store = store
            self._publish(store.moments)
        return [*fields]

    def prepare(self, snapshot: Snapshot) -> Arrays:
        """Count new steps, and return arrays (2, *shape) with the mean and the variance of each leaf and of returns."""
        if not self.frozen and self._store is not None:
            before = self._store.moments
            self._store.follow(snapshot)
            if self._store.moments is not before:
                self._publish(self._store.moments)
        return self._prepared

    def _publish(self, moments: Mapping[str, Moments]) -> None:
        self._prepared = {name: np.stack([found.mean, found.var]) for name, found in moments.items()}

    def apply(self, batch: Batch, leaves: Sequence[str], prepared: Arrays, entropy: Sequence[int]) -> Result:
        """Return the normalised observations and reward."""
        found = changed_observations(batch, leaves, lambda path, leaf: self._normalized(leaf, prepared[path]))
        if self._reward and "reward" in batch:
            found["reward"] = self._scaled(batch["reward"], prepared)
        return found

    def stats(self) -> dict[str, float]:
        """Return `steps_not_finite`, the number of steps with values that the statistics leave out; see `Normalize`."""
        return {"steps_not_finite": (self._given if self._store is None else self._store).not_finite}

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, and the newest counted step of each lane."""
        return {"frozen": self.frozen, **(self._given if self._store is None else self._store).state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state. Raises ValueError, and changes nothing, if `state` is invalid or of other leaves.

        A `Normalize` without a sampler can also load a state, for example to normalise the observations of a policy
        that acts.
        """
        with state_of("Normalize"):
            frozen = bool(state["frozen"])
            if self._store is not None:
                self._store.load_state_dict(state)
            else:
                given = _SavedMoments.read(state)
                kinds = RETURN in given.moments, bool(given.moments.keys() - {RETURN})
                if given.moments and kinds != (bool(self._reward), bool(self._obs)):
                    raise ValueError(
                        f"these are moments of {[*given.moments]}, and reward is {self._reward!r}, obs {self._obs!r}"
                    )
                self._given = given
            self._publish(self.moments)
            self.frozen = frozen

    def normalize_obs(self, obs: Tree) -> Tree:
        """Normalise observations by the current statistics, for a policy that acts.

        Parameters
        ----------
        obs : array or Tensor, or nested like the store's observations
            Observations with any leading axes.

        Returns
        -------
        array or Tensor, or nested like `obs`
            Arrays if `obs` has arrays, and tensors if `obs` has tensors.

        Raises
        ------
        NotEnoughData
            There are no statistics yet, because no sampler has this `Normalize`, and no state was loaded.
        ValueError
            `obs` lacks a leaf of the statistics, or the leaf has another shape.
        """
        return self._each(obs, self._normalized)

    def unnormalize_obs(self, obs: Tree) -> Tree:
        """Undo `normalize_obs`, except for clipping."""
        return self._each(obs, self._restored)

    def normalize_reward(self, reward: Tree) -> Tree:
        """Normalise rewards, an array or tensor of any shape, by the current statistics."""
        if not self._reward:
            return reward
        prepared = self._current()
        return _as_came(reward, lambda tensor: self._scaled(tensor, prepared))

    def unnormalize_reward(self, reward: Tree) -> Tree:
        """Undo `normalize_reward`, except for clipping."""
        if not self._reward:
            return reward
        var = self._current()[RETURN][1]
        return _as_came(reward, lambda tensor: _result(_exact(tensor) * np.sqrt(var + self._epsilon), tensor, None))

    def _current(self) -> Arrays:
        if not self._prepared:
            raise NotEnoughData(f"{self} has no statistics yet: give it to a sampler, or load a state, first")
        return self._prepared

    def _each(self, obs: Tree, change: Any) -> Tree:
        prepared, shapes = self._current(), dict[str, tuple[int, ...]]()
        map_paths(lambda path, leaf: shapes.update({path: tuple(np.shape(leaf))}), obs, "obs")
        wanted = {path: both.shape[1:] for path, both in prepared.items() if path != RETURN}
        for path, shape in wanted.items():
            if path not in shapes or shapes[path][len(shapes[path]) - len(shape) :] != shape:
                raise ValueError(f"the observations have leaves of the shapes {shapes}, and {self} normalises {wanted}")

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
        return torch.from_numpy(both).to(leaf.device, wide_dtype(leaf.device))

    def _scaled(self, reward: torch.Tensor, prepared: Arrays) -> torch.Tensor:
        std = float(np.sqrt(prepared[RETURN][1] + self._epsilon))
        return _result(_exact(reward) / std, reward, self._clip_reward)


def _clip(name: str, value: float | None) -> float | None:
    return None if value is None else number(name, value, above=0.0)


def _moments(found: RunningMeanStd) -> Moments:
    with state_of("RunningMeanStd"):
        return loaded({"count": found.count, "mean": found.mean, "var": found.var})


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(wide_dtype(tensor.device))


def _result(exact: torch.Tensor, given: torch.Tensor, clip: float | None) -> torch.Tensor:
    if clip is not None:
        exact = exact.clamp_(-clip, clip)
    return exact.to(given.dtype if given.is_floating_point() else torch.float32)


def _as_came(value: Any, change: Any) -> Any:
    """Return ``change(value)``, where `change` is a function of tensors; the result for an array is an array."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return change(torch.from_numpy(np.array(value))).numpy()
