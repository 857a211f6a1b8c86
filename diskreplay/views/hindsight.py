"""Hindsight: replace the goal of a transition by a goal reached in its episode, and recompute the reward."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import fraction
from diskreplay.ids import Ints
from diskreplay.kernels import gathering as cols
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.arguments import check_fields
from diskreplay.views.base import Block, Pages, Reader, View
from diskreplay.views.gather_plan import LONGEST, GatherPlan, row_plan
from diskreplay.views.requested import RETURNS
from diskreplay.views.windows import TO_THE_END, Bounds, Copy, Windows, windows_of

ACHIEVED, DESIRED = "obs/achieved_goal", "obs/desired_goal"
STRATEGIES = ("future", "final", "episode")


@dataclass(frozen=True, repr=False)
class Hindsight:
    """Hindsight experience replay: relabel sampled transitions with goals that the episode reached.

    An item of a batch is relabelled with probability `ratio`, independently of the other items. The new goal of this
    item, in ``obs`` and ``next_obs``, is the ``achieved_goal`` of the observation after some step of the same episode.
    The rewards of the item's steps are recomputed. With `terminated_fn`, `terminated` and `discount` are recomputed,
    too. Without `terminated_fn`, these two fields stay as recorded: a step that reaches its new goal bootstraps. No
    other field changes, and nothing is written to the store.

    Observations must be goal-conditioned, like the observations of gymnasium-robotics: a dict with "observation",
    "achieved_goal" and "desired_goal". Both goals must be single arrays of the same dtype and shape.

    A `Hindsight` is immutable. Any thread may use it, if `reward_fn` and `terminated_fn` may be called by any thread.

    Parameters
    ----------
    strategy : {"future", "final", "episode"}
        The steps whose next observation may give the new goal, each with the same probability. "future": from the
        item's own step to the episode's last step. "final": the last step. "episode": any step of the episode,
        including steps that the capacity of the store hides.
    ratio : float
        Probability that an item is relabelled, 0 to 1. The paper (see Notes) uses k new goals for each real goal. This
        is a `ratio` of k / (k + 1).
    reward_fn : callable
        ``reward_fn(achieved_goal, desired_goal)`` returns the rewards of M steps: (M,), or an array that broadcasts to
        it. Both arguments are (M, *goal_shape) in the dtype of the store. `reward_fn` is called once per batch, for all
        steps of all relabelled items. The achieved goal comes from the observation after the step. A function that
        needs a third argument, such as gymnasium-robotics' ``env.compute_reward``, gets ``{}`` as its info.
    terminated_fn : callable or None
        ``terminated_fn(achieved_goal, desired_goal)`` returns whether each of M steps terminates, (M,) bool. It is
        called like `reward_fn`. An n-step window ends at its first step that terminates: later rewards do not count,
        `terminated` is true, and `discount` is 0. If no step terminates, `terminated` is false, and the item
        bootstraps. `next_obs` and `n_steps` do not change.

    Raises
    ------
    ValueError
        An argument is invalid.

    Notes
    -----
    The rule is from section 3.3 of Andrychowicz et al. 2017, "Hindsight Experience Replay", and the strategies are from
    section 4.5. "future" includes the item's own step, so the new goal may be the goal that this step reaches.

    An item is not relabelled if its window reaches the end of an episode that terminated without a final observation:
    the goal achieved by the last step is not known.

    Examples
    --------
    >>> def reward_fn(achieved, desired):
    ...     return np.where(np.linalg.norm(achieved - desired, axis=-1) < 0.05, 0.0, -1.0)
    >>> view = dr.Transitions(relabel=dr.Hindsight(strategy="future", ratio=0.8, reward_fn=reward_fn))
    """

    strategy: str = "future"
    ratio: float = 0.8
    reward_fn: Callable[..., Any] | None = None
    terminated_fn: Callable[..., Any] | None = None
    _extra: tuple[Any, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in STRATEGIES:
            raise ValueError(f'strategy must be "future", "final" or "episode", not {self.strategy!r}')
        check_fields(self, ratio=fraction)
        object.__setattr__(self, "_extra", _extra_arguments(self.reward_fn))
        if self.terminated_fn is not None and not callable(self.terminated_fn):
            raise ValueError(
                f"terminated_fn must be None or a function of (achieved_goal, desired_goal), not {self.terminated_fn!r}"
            )

    def __repr__(self) -> str:
        ends = "" if self.terminated_fn is None else f", terminated_fn={_name_of(self.terminated_fn)}"
        return f"Hindsight(strategy={self.strategy!r}, ratio={self.ratio}, reward_fn={_name_of(self.reward_fn)}{ends})"

    def rewards(self, achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[np.float64]:
        """Return the rewards of M steps, (M,), for their achieved and desired goals, both (M, *goal_shape).

        Raises ValueError if `reward_fn` returns anything but M finite numbers.
        """
        assert self.reward_fn is not None  # for the type checker: __post_init__ refuses None
        count = len(achieved)
        returned = self.reward_fn(achieved, desired, *self._extra)
        wanted = f"reward_fn must return one finite number for each of the {count} given steps"
        try:
            found = np.asarray(returned)
        except ValueError:
            raise ValueError(f"{wanted}, not {type(returned).__name__}: a ragged list") from None
        if found.dtype.kind not in "biuf":
            raise ValueError(f"{wanted}, not {type(returned).__name__} of dtype {found.dtype}")
        try:
            rewards = np.broadcast_to(found, (count,)).astype(np.float64)
        except ValueError:
            raise ValueError(f"{wanted}, shape ({count},), not an array of shape {found.shape}") from None
        finite = np.isfinite(rewards)
        if not finite.all():
            raise ValueError(f"{wanted}, and returned {rewards[~finite][0]} for {np.count_nonzero(~finite)} of them")
        return rewards

    def terminations(self, achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[np.bool_]:
        """Return whether each of M steps terminates, (M,); ValueError if `terminated_fn` returns anything else."""
        assert self.terminated_fn is not None
        found = np.asarray(self.terminated_fn(achieved, desired))
        if found.dtype.kind != "b" or found.shape not in ((), (len(achieved),)):
            raise ValueError(
                f"terminated_fn must return one bool for each of the {len(achieved)} given steps, "
                f"not {found.dtype}{list(found.shape)}"
            )
        return np.broadcast_to(found, (len(achieved),))


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _extra_arguments(reward_fn: Any) -> tuple[Any, ...]:
    """Return the arguments that a reward function gets after the two goals: none, or `{}` as its info."""
    if not callable(reward_fn):
        raise ValueError(f"reward_fn must be a function of (achieved_goal, desired_goal), not {reward_fn!r}")
    try:
        signature = inspect.signature(reward_fn)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return ()
    choices: tuple[tuple[Any, ...], ...] = ((), ({},))
    for extra in choices:
        try:
            signature.bind(None, None, *extra)
        except TypeError:
            continue
        return extra
    raise ValueError(
        f"reward_fn must take (achieved_goal, desired_goal), or these and info, and {reward_fn!r} takes {signature}"
    )


class ReturnsReader(Reader):
    """A reader of items with a return: the discounted sum of the rewards from an item's first step on.

    `weights` are path, dtype and weight of each field in the reward. `discount` is path and dtype of the field with the
    environment's discounts, or None. `gamma` is the agent's discount per step. Error messages name `view`.
    """

    view: View
    gamma: float
    weights: Sequence[tuple[str, np.dtype[Any], np.float64]]
    discount: tuple[str, np.dtype[Any]] | None

    @property
    @abstractmethod
    def windows(self) -> Windows:
        """The windows of the last batch."""


class HindsightReader(Reader):
    """Gathers transitions with the reader `plain`, and relabels them. Not thread-safe.

    `fill` relabels only after a call of `seed`. The same seed, snapshot and ids give the same batch.
    """

    def __init__(self, hindsight: Hindsight, plain: ReturnsReader, schema: Schema) -> None:
        _check_goals(schema)
        self._hindsight, self._plain, self._view = hindsight, plain, plain.view
        self.leaves, self.paths = self._plain.leaves, self._plain.paths
        place = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        for name in RETURNS:
            if (name,) in place and name not in schema.extra:
                raise ValueError(
                    f"fields names {name!r}, which batches with relabel do not have: rewards after the window are not "
                    "relabelled"
                )
        shown = (("obs", "desired_goal"), ("next_obs", "desired_goal"))
        self._shown = [place[path] for path in shown if path in place]
        self._reward = place.get(("reward",), -1)
        self._calls_reward_fn = self._reward >= 0 and any(leaf == "reward" for leaf, _, _ in self._plain.weights)
        self._terminated, self._discount = place.get(("terminated",), -1), place.get(("discount",), -1)
        others = [leaf for leaf, *_ in self._plain.weights if leaf != "reward"]
        if self._plain.discount is not None:
            others.append(self._plain.discount[0])
        self._goals = row_plan([ACHIEVED], cols.OWN, cols.OWN_STOP)
        self._steps = GatherPlan(
            [
                Copy(ACHIEVED, cols.ROW, cols.OWN_STOP, 1, 1, 0),
                *(Copy(leaf, cols.ROW, cols.OWN, 0, 1, target) for target, leaf in enumerate(others, 1)),
            ]
        )
        self._entropy: int | None = None

    def seed(self, entropy: int | None) -> None:
        self._entropy = entropy

    def fill(self, snapshot: Snapshot, ids: Ints, block: Block) -> None:
        entropy, self._entropy = self._entropy, None
        self._plain.threads = self.threads
        if entropy is None:
            self._plain.seed(None)
            self._plain.fill(snapshot, ids, block)
            return
        # Random numbers are drawn for all items, so that the result of an item does not depend on the other items.
        generator = np.random.Generator(np.random.PCG64(entropy))
        chance, choice = generator.random((2, len(ids)))
        self._plain.seed(int(generator.integers(1 << 62)))
        self._plain.fill(snapshot, ids, block)
        items = np.flatnonzero(chance < self._hindsight.ratio)
        windows = self._find(snapshot, ids[items], looks_back=self._hindsight.strategy == "episode")
        k = self._plain.windows.k[items]
        last = windows.after - (windows.obs_stop == 0)  # each episode's last row with an observation
        known = np.flatnonzero(windows.row + k <= last)
        if len(known) < len(items):
            items, k, last, windows = items[known], k[known], last[known], windows.select(known)
        if len(items):
            self._relabel(snapshot, windows, k, last, choice[items], items, block)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return the pages of `plain`. Rows of new goals are left out, because only `fill` draws the goals."""
        return self._plain.pages(snapshot, ids)

    def check(self, snapshot: Snapshot, ids: Ints) -> None:
        self._find(snapshot, ids)
        self._plain.check(snapshot, ids)

    def _find(self, snapshot: Snapshot, ids: Ints, looks_back: bool = False) -> Windows:
        """Return the windows from these steps to the ends of their episodes.

        With `looks_back`, the `floor` of each window is the row of its episode's first step.
        """
        return windows_of(snapshot, ids, Bounds(TO_THE_END, LONGEST if looks_back else 1), self._view)

    def _relabel(
        self,
        snapshot: Snapshot,
        windows: Windows,
        k: Ints,
        last: Ints,
        choice: NDArray[np.float64],
        items: Ints,
        block: Block,
    ) -> None:
        """Replace the goals of these items of the block, and the fields that depend on the goals.

        `windows` reach from each item's first step to the end of its episode. `k` has the number of steps of each item.
        `last` has the last row with an observation of each item's episode. `choice` has a random number in [0, 1) for
        each item, which selects the item's goal.
        """
        strategy = self._hindsight.strategy
        # A goal comes from the observation after a step. This observation is in the row after the step's row.
        first = last if strategy == "final" else (windows.row if strategy == "future" else windows.floor) + 1
        row = first + (choice * (last - first + 1)).astype(np.int64)
        windows.own[:], windows.own_stop[:] = row, row + 1
        goals = self._goals.rows(snapshot, windows)[0][:, 0]
        for place in self._shown:
            shown = block.arrays[place]
            frames = (1,) * (shown.ndim - goals.ndim)
            shown[items] = goals.reshape(len(items), *frames, *goals.shape[1:])
        if self._hindsight.terminated_fn is not None:
            wanted: tuple[int, ...] = (self._reward, self._terminated, self._discount)
        else:
            wanted = (self._reward if self._calls_reward_fn else -1,)
        if max(wanted) >= 0:
            returns, terminated, discount = self._returns(snapshot, windows, k, goals)
            for at, values in zip(wanted, (returns, terminated, discount), strict=False):
                if at >= 0:
                    block.arrays[at].reshape(-1)[items] = values

    def _returns(
        self, snapshot: Snapshot, windows: Windows, k: Ints, goals: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.float64]]:
        size, width = len(k), int(k.max())
        inside = np.arange(width) < k[:, None]
        windows.own[:], windows.own_stop[:] = windows.row + k, windows.row + k + 1
        self._steps.set_lengths(width)
        achieved, *others = self._steps.rows(snapshot, windows)
        desired = np.repeat(goals, k, axis=0)
        rewards = np.zeros(len(desired))
        if self._calls_reward_fn:
            rewards = self._hindsight.rewards(achieved[inside], desired)
        reached = np.zeros((size, width), np.bool_)
        if self._hindsight.terminated_fn is not None:
            reached[inside] = self._hindsight.terminations(achieved[inside], desired)
        r = np.zeros((size, width))
        for leaf, _, weight in self._plain.weights:
            if leaf == "reward":
                r[inside] += rewards * weight
            else:
                r += others.pop(0) * weight
        terminated: NDArray[np.bool_] = np.asarray(reached.any(axis=1))
        discount: NDArray[np.float64] = np.power(self._plain.gamma, k.astype(np.float64))
        if self._plain.discount is not None:
            given = np.cumprod(np.where(inside, others.pop(0), 1.0), axis=1, dtype=np.float64)
            r[:, 1:] *= given[:, :-1]
            discount *= given[:, -1]
        r[:, 1:][np.logical_or.accumulate(reached, axis=1)[:, :-1]] = 0.0
        found = np.empty(size, np.float32)
        get_kernel("nstep")(r, k, self._plain.gamma, found)
        return found, terminated, np.where(terminated, 0.0, discount)


def _check_goals(schema: Schema) -> None:
    wanted = 'relabel needs observations that are a dict with "observation", "achieved_goal" and "desired_goal"'
    names = [leaf.split("/")[1:] for leaf in schema.leaves if leaf.split("/")[0] == "obs"]
    if [] in names:
        raise ValueError(f"{wanted}; the observation of this store is one array")
    keys = list(dict.fromkeys(path[0] for path in names))
    for key in ("observation", "achieved_goal", "desired_goal"):
        if key not in keys:
            raise ValueError(f"{wanted}; this store has no {key!r}, but {', '.join(map(repr, keys))}")
        if key != "observation" and [key] not in names:
            raise ValueError(f"relabel needs goals that are one array each; {key!r} of this store is nested")
    achieved, desired = schema.leaves[ACHIEVED], schema.leaves[DESIRED]
    if (achieved.dtype, achieved.shape) != (desired.dtype, desired.shape):
        raise ValueError(
            f"relabel needs goals of one dtype and shape; in this store achieved_goal is {achieved.dtype}"
            f"{list(achieved.shape)} and desired_goal {desired.dtype}{list(desired.shape)}"
        )
