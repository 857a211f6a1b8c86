"""Hindsight: which goals of its own episode replace a transition's goal, and what reward it then earns."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.views.arguments import fraction

STRATEGIES = ("future", "final", "episode")


@dataclass(frozen=True, repr=False)
class Hindsight:
    """Hindsight experience replay: transitions relabelled, as they are sampled, with goals that were reached.

    An item of a batch is relabelled with probability `ratio`, independently of the others. Its goal becomes the
    ``achieved_goal`` of an observation that follows a step of the same episode, in ``obs`` and ``next_obs`` alike, and
    its rewards are computed anew. Nothing else of it changes: terminated, truncated and discount stay those of the
    episode as it was. Nothing is written to the store.

    Observations must be goal-conditioned, as those of gymnasium-robotics are: a dict with "observation",
    "achieved_goal" and "desired_goal", where the goals are single arrays of one dtype and shape.

    Immutable: any thread may use it, if `reward_fn` allows that.

    Parameters
    ----------
    strategy : {"future", "final", "episode"}
        The steps whose outcome may become the goal, each with the same probability: from the item's own step to the
        episode's last one, the last one alone, or any step of the episode. Steps that retention has taken are none of
        them.
    ratio : float
        Probability that an item is relabelled, 0 to 1; k goals a real one in the paper's notation are k / (k + 1).
    reward_fn : callable
        ``reward_fn(achieved_goal, desired_goal)``, both (M, *goal_shape) in the dtype of the store, returns the
        rewards of M steps: (M,), or what broadcasts to it. It is called once a batch, for all steps of all relabelled
        items. The achieved goal is that of the observation after the step. A function that needs a third argument,
        such as gymnasium-robotics' ``env.compute_reward``, gets ``{}`` as its info.

    Raises
    ------
    ValueError
        An argument is none of these.

    Notes
    -----
    Andrychowicz et al. 2017, "Hindsight Experience Replay": the rule is that of section 3.3, the strategies are those
    of section 4.5. "future" counts the item's own step, so that the goal may be the one it reaches.

    An item stays as it is where its episode terminated without a final observation and its window reaches that end:
    what the last step achieved is not known.
    """

    strategy: str = "future"
    ratio: float = 0.8
    reward_fn: Callable[..., Any] | None = None
    _extra: tuple[Any, ...] = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, str) or self.strategy not in STRATEGIES:
            raise ValueError(f'strategy must be "future", "final" or "episode", not {self.strategy!r}')
        object.__setattr__(self, "ratio", fraction("ratio", self.ratio))
        object.__setattr__(self, "_extra", _extra_arguments(self.reward_fn))

    def __repr__(self) -> str:
        name = getattr(self.reward_fn, "__qualname__", None) or type(self.reward_fn).__qualname__
        return f"Hindsight(strategy={self.strategy!r}, ratio={self.ratio}, reward_fn={name})"

    def rewards(self, achieved: NDArray[Any], desired: NDArray[Any]) -> NDArray[np.float64]:
        """Return the rewards (M,) of steps that achieved (M, *goal_shape) while that was desired.

        Raises ValueError where `reward_fn` returns something else than M finite numbers.
        """
        assert self.reward_fn is not None  # for the type checker: __post_init__ refuses it
        count = len(achieved)
        returned = self.reward_fn(achieved, desired, *self._extra)
        wanted = f"reward_fn must return one finite number for each of the {count} steps that it is given"
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


def _extra_arguments(reward_fn: Any) -> tuple[Any, ...]:
    """Return what a reward function is given behind its two goals."""
    if not callable(reward_fn):
        raise ValueError(f"reward_fn must be a function of (achieved_goal, desired_goal), not {reward_fn!r}")
    try:
        signature = inspect.signature(reward_fn)
    except (TypeError, ValueError):  # some that are written in C have none
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
