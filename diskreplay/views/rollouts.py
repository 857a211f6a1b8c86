"""The view of rollouts: the steps of all lanes side by side, each given once, with advantages."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diskreplay.format.schema import Schema
from diskreplay.kernels.runs import ALL_STEPS, Starts
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.views.arguments import described, fraction, frame_stack_argument, reward_argument
from diskreplay.views.base import Reader, View

if TYPE_CHECKING:
    from diskreplay.sampling.episode_filter import EpisodeFilter
    from diskreplay.views.rollout_cursor import RolloutCursor


@dataclass(frozen=True, repr=False)
class Rollouts(View):
    """The oldest unseen `num_steps` steps of every lane, (num_steps, num_envs, ...), with advantages and returns.

    Advantages are generalized advantage estimates (Schulman et al. 2016, equation 16) of the stored values; ret is
    advantage + value. Sums are in float64 and rounded once. Columns are in the order of (writer, lane); a lane goes on
    across its writer's segments. A lane of a writer that is not closed is waited for: from the writer's first step on,
    or, where each episode has a segment, from its own. What a step is bootstrapped with, V(next), is

    - 0 where it terminated, also if it was truncated as well,
    - else `value_fn` of the observation behind it, where given: for the last step of an episode or of a column,
    - else its own field `next_value`, where named: then the field holds V of what each step led to,
    - else the stored value of the lane's next step, of the same episode or of its continuation after a length cut.

    The chain of lambda stops at the end of an episode; a length cut is none. `truncated` is true wherever a column's
    chain stops and the step did not terminate.

    Immutable: any thread may use it, and several samplers may share it; which steps were given is a sampler's state.

    Parameters
    ----------
    num_steps : int
        Steps a lane and batch.
    gamma, gae_lambda : float
        Discount a step, and the exponent's base of the estimate, 0 to 1.
    value : str
        The scalar extra field that holds V of each step's observation, as the collector computed it.
    value_fn : callable or None
        Computes V of a batch of observations: tensors (n, ...), nested as the space is, to (n,) or (n, 1). It is
        called once a batch, without gradients, unless no step needs it.
    next_value : str or None
        A scalar extra field that holds V of what each step led to.
    frame_stack : int or dict
        Frames of each observation; see `Transitions`.
    reward : dict or None
        What is summed: weights by name, over "reward" and scalar extra fields. None is {"reward": 1.0}.

    Raises
    ------
    ValueError
        An argument is none of these.
    """

    num_steps: int
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value: str = "value"
    value_fn: Callable[[Any], Any] | None = None
    next_value: str | None = None
    frame_stack: int | Mapping[str, int] = 1
    reward: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_steps", int_argument("num_steps", self.num_steps))
        object.__setattr__(self, "gamma", fraction("gamma", self.gamma))
        object.__setattr__(self, "gae_lambda", fraction("gae_lambda", self.gae_lambda))
        object.__setattr__(self, "frame_stack", frame_stack_argument(self.frame_stack))
        object.__setattr__(self, "reward", reward_argument(self.reward))
        if not isinstance(self.value, str):
            raise ValueError(f"value must be the name of an extra field, not {self.value!r}")
        if self.next_value is not None and not isinstance(self.next_value, str):
            raise ValueError(f"next_value must be None or the name of an extra field, not {self.next_value!r}")
        if self.value_fn is not None and not callable(self.value_fn):
            raise ValueError(f"value_fn must be None or a function of observations, not {self.value_fn!r}")

    def __repr__(self) -> str:
        return described(self, ("num_steps",))

    @property
    def kind(self) -> tuple[str]:
        """Rollouts have no priorities."""
        return ("rollouts",)

    @property
    def item_steps(self) -> int:
        """One."""
        return 1

    @property
    def starts(self) -> Starts:
        """Every step."""
        return Starts(last=ALL_STEPS, open_rows=1, observed=False)

    @property
    def prefetchable(self) -> bool:
        """No: what they are bootstrapped with is to be the policy's as it is."""
        return False

    def own_distribution(self, admission: "EpisodeFilter") -> "RolloutCursor":
        """Return what gives each lane's steps once, in order."""
        # Here and not above, as the reader below: following lanes loads the store.
        from diskreplay.views.rollout_cursor import RolloutCursor

        return RolloutCursor(self, admission)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names what a batch holds, None all."""
        # Here and not above: the reader's kernels load numba, which nobody needs to make or describe a view.
        from diskreplay.views.rollouts_reader import RolloutsReader

        return RolloutsReader(self, schema, fields)
