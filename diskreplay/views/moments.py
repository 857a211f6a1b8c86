"""Means and variances of what a store's steps hold, kept up to date at the cost of what is new."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.saved_state import state_of
from diskreplay.errors import SegmentGone
from diskreplay.ids import EpisodeTable, Floats, Ints, places_of
from diskreplay.kernels.runs import lane_keys
from diskreplay.kernels.table import chosen
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Field
from diskreplay.views.gather_plan import GatherPlan, row_plan
from diskreplay.views.successors import place

RETURN = "return"
"""The name of the moments of returns, beside those of leaves by path."""
# Of rows that are read at once.
PIECE_BYTES = 8 << 20
# A value this many times farther from the mean than the deviation of the others, or than 1, makes a deviation useless.
_FAR = 1e6
# So many times smaller ones are no such values.
_ALIKE = 1e3
# Larger values are left out as infinities are: sums of squares of returns of them would be infinite.
_LARGEST = 1e140


class Moments(NamedTuple):
    """How many values there were, and their mean and (biased) variance, float64 of the shape of one."""

    count: float  # type: ignore[assignment]
    mean: Floats
    var: Floats

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Moments":
        """Return those of no value: mean 0 and variance 1 leave what is normalised by them as it is."""
        return cls(0.0, np.zeros(shape), np.ones(shape))

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Moments":
        """Return those of values, (n, *shape)."""
        exact = values.astype(np.float64)
        return cls(float(len(exact)), np.asarray(exact.mean(axis=0)), np.asarray(exact.var(axis=0)))

    def merged(self, other: "Moments") -> "Moments":
        """Return those of both together (Chan, Golub & LeVeque 1983, equation 2.1)."""
        if not other.count:
            return self
        total = self.count + other.count
        delta = other.mean - self.mean
        squares = self.var * self.count + other.var * other.count + delta**2 * (self.count * other.count / total)
        # Of scalars numpy makes numbers that are no arrays.
        return Moments(total, np.asarray(self.mean + delta * (other.count / total)), np.asarray(squares / total))


class _Runs(NamedTuple):
    """New steps, lane by lane and each in order: runs of ids within episodes, and what is behind a run's last step.

    `place` is that of the lane among all, `before` the return that an episode's last counted step ended.
    """

    place: Ints
    first: Ints
    stride: Ints
    steps: Ints
    before: Floats

    def select(self, which: Ints) -> "_Runs":
        """Return the runs at these places."""
        return _Runs(self.place[which], self.first[which], self.stride[which], self.steps[which], self.before[which])

    @property
    def ids(self) -> Ints:
        """The ids of all steps."""
        number = places_of(np.zeros_like(self.steps), self.steps)
        ids: Ints = np.repeat(self.first, self.steps) + number * np.repeat(self.stride, self.steps)
        return ids


class StoreMoments:
    """Moments of fields over a store's steps, and of their returns. Not thread-safe.

    Each step counts once, when a snapshot that is followed first has it, and for good: also when it is evicted later.
    The return of a step is the discounted sum of the rewards of its episode so far, R_t = r_t + gamma R_{t-1}.

    Parameters
    ----------
    fields : dict of str to Field
        The leaves that are averaged.
    rewards : sequence of (str, dtype, float)
        Paths, dtypes and weights of the fields that make up a reward; none: there are no returns.
    gamma : float
        Discount a step.

    Attributes
    ----------
    moments : dict of str to Moments
        By leaf, and `RETURN`. Replaced as a whole when steps come.
    not_finite : int
        Steps with NaN, an infinity or a number beyond 1e140 in a leaf or a reward. The moments of that leaf, or of
        returns, leave them out; such a reward counts as 0 in the returns of later steps.
    """

    def __init__(self, fields: Mapping[str, Field], rewards: Sequence[tuple[str, Any, Any]], gamma: float) -> None:
        self._fields, self._weights, self._gamma = list(fields), [weight for *_, weight in rewards], gamma
        self._leaves = [*fields, *(leaf for leaf, *_ in rewards)]
        self._row_bytes = sum(field.row_bytes for field in fields.values()) + 8 * len(self._weights)
        self.moments = {leaf: Moments.none(field.shape) for leaf, field in fields.items()}
        if self._weights:
            self.moments[RETURN] = Moments.none(())
        # By lane: the id of the newest step that was counted, -1 for none, and the return that it ended.
        self._newest, self._returns = np.zeros(0, np.int64), np.zeros(0)
        self.not_finite = 0
        self._warned: set[str] = set()
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Look for new steps everywhere at the next snapshot."""
        self._snapshot: Snapshot | None = None
        self._plan: GatherPlan | None = None
        self._read = 0  # episodes of the log that were looked at

    def __getstate__(self) -> dict[str, Any]:
        # A plan has addresses.
        return {**self.__dict__, "_snapshot": None, "_plan": None, "_read": 0}

    def follow(self, snapshot: Snapshot) -> None:
        """Count the steps that are new in a snapshot, unless segments are evicted meanwhile: then at the next one."""
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
        """Tell whether a snapshot is one from before that which was followed, where lanes had other places."""
        if self._snapshot is None:
            return False
        return (snapshot.generation, len(snapshot.oldest)) < (self._snapshot.generation, len(self._newest))

    def _list_lanes(self, snapshot: Snapshot) -> None:
        """Put what is known of lanes where these are in a snapshot of another generation."""
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
        goes_on = (counted > 0) & (skipped == counted)
        before = np.where(goes_on, self._returns[lane], 0.0)
        runs = _Runs(lane, first + skipped * stride, stride, steps - skipped, before)
        # By id: places depend on when a segment was found.
        order = np.argsort(lane_keys(first, snapshot.origin, snapshot.lanes), kind="stable")
        order = order[(runs.steps[order] > 0) & (lane[order] >= 0)]
        return runs.select(order)

    def _counted(self, snapshot: Snapshot, runs: _Runs) -> tuple[dict[str, Moments], Floats, int]:
        """Return the moments with those of these steps, the returns that these end, and how many are not finite."""
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
            summands = zip(self._weights, values[len(self._fields) :], strict=True)
            rewards.append(sum((weight * column.astype(np.float64) for weight, column in summands), np.zeros(1)))
        returns = np.zeros(len(ids))
        if self._weights:
            reward = np.concatenate(rewards)
            good = _are_countable(reward)
            chosen("discounted")(np.where(good, reward, 0.0), runs.steps, runs.before, self._gamma, returns)
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
        """Return moments with more values, (n, *shape); warn if a few large ones alone make the deviation."""
        if not len(values):
            return known
        if name not in self._warned and (far := _far_value(known, values)):
            self._warn(
                name,
                f"{name} has a value of {far[0]:g} where its standard deviation is {far[1]:g}: normalised by all of "
                "them, the others become nearly equal",
            )
        return known.merged(Moments.of(values))

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(message, UserWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Return moments, and which steps were counted: arrays and numbers."""
        known = self._newest >= 0
        return {
            "moments": {name: found._asdict() for name, found in self.moments.items()},
            "newest": self._newest[known],
            "returns": self._returns[known],
            "not_finite": self.not_finite,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ValueError, and no change, where it is none, or that of other fields."""
        with state_of("the moments of a store"):
            moments = {str(name): loaded(found) for name, found in state["moments"].items()}
            newest, returns = np.array(state["newest"], np.int64), np.array(state["returns"], np.float64)
            not_finite = int(state.get("not_finite", 0))
            if newest.ndim != 1 or newest.shape != returns.shape or (newest < 0).any():
                raise ValueError("newest and returns are not one id and one number a lane")
        self.replace(moments)
        self._newest, self._returns = newest, returns
        self.not_finite = not_finite
        self._start_afresh()

    def replace(self, moments: Mapping[str, Moments]) -> None:
        """Go on from other moments; ValueError where they are of other fields, or other shapes."""
        expected = {name: found.mean.shape for name, found in self.moments.items()}
        given = {name: found.mean.shape for name, found in moments.items()}
        if given != expected:
            raise ValueError(f"these are moments of {given}, and needed are those of {expected}")
        self.moments = {name: moments[name] for name in expected}


def _are_countable(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which values are finite, and no larger than `_LARGEST`."""
    found = np.isfinite(values)
    if values.dtype.kind == "f" and values.dtype.itemsize > 4:
        found &= np.abs(values) <= _LARGEST
    return np.asarray(found)


def _far_value(known: Moments, values: NDArray[Any]) -> tuple[float, float] | None:
    """Return the largest value of a column that is `_FAR` from most others, and the deviation of these.

    Values of about its size are not among the others. None: no column has one.
    """
    flat = values.reshape(len(values), -1)
    means, deviations = known.mean.reshape(-1), np.sqrt(known.var.reshape(-1))
    most, total = np.abs(flat).max(axis=0), known.count + len(flat)
    # Of few columns: most values are small, and so this is cheap.
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
    """Return moments from count, mean and var by name; ValueError where they are none."""
    count, mean, var = float(state["count"]), np.array(state["mean"], np.float64), np.array(state["var"], np.float64)
    if not (np.isfinite(count) and count >= 0) or mean.shape != var.shape or (var < 0).any():
        raise ValueError(f"count is {count}, mean {mean.shape} and var {var.shape}, at least {var.min(initial=0)}")
    return Moments(count, mean, var)
