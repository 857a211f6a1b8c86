"""The view of whole episodes."""

from collections.abc import Sequence
from dataclasses import dataclass

from diskreplay.format.schema import Schema
from diskreplay.kernels.runs import FIRST_ONLY, Starts
from diskreplay.sampling.number_arguments import int_argument
from diskreplay.views.arguments import described
from diskreplay.views.base import Reader, View


@dataclass(frozen=True, repr=False)
class Episodes(View):
    """Whole ended episodes: an id is that of an episode's first step.

    The batch has the fields of `Sequences`, (batch, L, ...), where L is the length of its longest episode, in steps.
    An episode whose first steps a capacity has hidden is not sampled.

    Immutable: any thread may use it, and several samplers may share it.

    Parameters
    ----------
    max_length : int or None
        Of longer episodes only the first `max_length` steps are gathered. None: all of them; then one long episode
        makes every item of its batch as long.

    Raises
    ------
    ValueError
        `max_length` is none of these.
    """

    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None:
            object.__setattr__(
                self, "max_length", int_argument("max_length", self.max_length, otherwise="or None for no limit")
            )

    def __repr__(self) -> str:
        return described(self, ())

    @property
    def kind(self) -> tuple[str]:
        """All episodes share one table of priorities, whatever their `max_length`."""
        return ("episodes",)

    @property
    def item_steps(self) -> None:
        """None: as many as the episode has."""
        return None

    @property
    def starts(self) -> Starts:
        """The first step of each ended episode."""
        return Starts(last=FIRST_ONLY)

    def reader(self, schema: Schema, fields: Sequence[str] | None = None) -> Reader:
        """Bind the view to a schema; `fields` names what a batch holds, None all."""
        # Here and not above: the reader's kernels load numba, which nobody needs to make or describe a view.
        from diskreplay.views.sequences_reader import EpisodesReader

        return EpisodesReader(self, schema, fields)
