"""The view of n-step transitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diskreplay.format.schema import Schema
from diskreplay.kernels.runs import Starts
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.views.arguments import described, fraction, frame_stack_argument, names, reward_argument
from diskreplay.views.base import Reader, View
from diskreplay.views.hindsight import Hindsight


@dataclass(frozen=True, repr=False)
class Transitions(View):
    """n-step transitions: an id is that of the step they start at.

    Immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    n_step : int or None
        Steps of the return. Fewer are summed where the episode ends first. None sums to the episode's end (the
        Monte-Carlo return); then only ended episodes are sampled.
    gamma : float
        Discount a step, 0 to 1.
    frame_stack : int or dict
        Frames of each observation, oldest first, (batch, frame_stack, *shape); before the episode's start its first
        frame repeats. An int stacks every observation leaf, a dict names leaves ("image", "camera/left"); 1 adds no
        axis.
    reward : dict or None
        What is summed: weights by name, over "reward" and scalar extra fields. None is {"reward": 1.0}.
    next_fields : sequence of str
        Step fields of which a batch also holds the value n steps later, as next_<name>; zeros at an episode's end.
    relabel : Hindsight or None
        Replaces goals by ones that were reached; then only ended episodes are sampled, since the goals that an episode
        will reach are not known before. `Sampler.gather` returns what is stored, whatever this is.

    Raises
    ------
    ValueError
        An argument is none of these.
    """

    n_step: int | None = 1
    gamma: float = 0.99
    frame_stack: int | Mapping[str, int] = 1
    reward: Mapping[str, float] | None = None
    next_fields: Sequence[str] = ()
    relabel: Hindsight | None = None

    def __post_init__(self) -> None:
        if self.n_step is not None:
            object.__setattr__(
                self, "n_step", int_argument("n_step", self.n_step, otherwise="or None for the return to the end")
            )
        object.__setattr__(self, "gamma", fraction("gamma", self.gamma))
        object.__setattr__(self, "frame_stack", frame_stack_argument(self.frame_stack))
        object.__setattr__(self, "reward", reward_argument(self.reward))
        object.__setattr__(self, "next_fields", names("next_fields", self.next_fields))
        if "obs" in self.next_fields:
            raise ValueError("next_fields must not name 'obs': a batch always has next_obs")
        if self.relabel is not None and not isinstance(self.relabel, Hindsight):
            raise ValueError(f"relabel must be None or Hindsight(...), not {self.relabel!r}")

    def __repr__(self) -> str:
        return described(self, ("n_step",))

    @property
    def kind(self) -> tuple[str]:
        """All transitions share one table of priorities, whatever n and gamma."""
        return ("transitions",)

    @property
    def item_steps(self) -> int:
        """One: the step that a transition starts at."""
        return 1

    @property
    def starts(self) -> Starts:
        """Every step whose window is known."""
        if self.n_step is None or self.relabel is not None:
            return Starts()
        return Starts(open_rows=self.n_step + 1, observed=not self.next_fields)

    @property
    def random(self) -> bool:
        """Whether goals are replaced."""
        return self.relabel is not None

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; with `relabel`, one of goal-conditioned observations."""
        # Here and not above: the reader's kernels load numba, which nobody needs to make or describe a view.
        from diskreplay.views.hindsight_reader import HindsightReader
        from diskreplay.views.transitions_reader import TransitionsReader

        if self.relabel is not None:
            return HindsightReader(self, self.relabel, schema, fields)
        return TransitionsReader(self, schema, fields)
