"""Numbers that change as batches are delivered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diskreplay.distributions.number_arguments import int_argument, number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Linear:
    """From `start` to `end` in equal steps, then `end` for ever; counted in delivered batches.

    Without state: the sampler counts. Any function from the number of batches delivered before to a number may stand
    in its place.

    Parameters
    ----------
    start, end : float
        The first value and the last.
    steps : int
        Batches from one to the other: batch 0 has `start`, batch `steps` and later ones `end`.

    Raises
    ------
    ValueError
        An argument is invalid.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        object.__setattr__(self, "steps", int_argument("steps", self.steps))

    def __call__(self, batches: int) -> float:
        """Return the value after so many batches."""
        done = min(batches / self.steps, 1.0)
        return (1.0 - done) * self.start + done * self.end

    def __str__(self) -> str:
        return f"{self.start}→{self.end}"


def beta_argument(value: Any) -> float | Schedule:
    """Return beta: a float of at least 0, or a schedule as it is; ValueError where it is neither.

    The ends of a `Linear` keep that limit too.
    """
    if isinstance(value, Linear):
        number("beta.start", value.start, 0.0)
        number("beta.end", value.end, 0.0)
    if callable(value):
        schedule: Schedule = value
        return schedule
    return number("beta", value, 0.0)
