"""Arguments that are numbers, or change as batches are delivered: in their plain form, or refused by name."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> float:
    """Return a finite float within limits; ValueError where it is not one."""
    good = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if good and least <= float(value) <= most and float(value) > above:
        return float(value)
    if above > -math.inf:
        limits = f"finite number above {above:g}"
    elif most < math.inf:
        limits = f"number from {least:g} to {most:g}"
    else:
        limits = f"finite number of at least {least:g}" if least > -math.inf else "finite number"
    raise ValueError(f"{name} must be a {limits}, not {value!r}")


def fraction(name: str, value: Any) -> float:
    """Return a float of 0 to 1; ValueError where it is not one."""
    return number(name, value, 0.0, 1.0)


def int_argument(name: str, value: Any, least: int = 1, most: int | None = None, otherwise: str = "") -> int:
    """Return an int within limits; ValueError where it is not one. `otherwise` says what else may be given."""
    good = not isinstance(value, bool) and isinstance(value, Integral)
    if good and least <= value and (most is None or value <= most):
        return int(value)
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} must be an int {limits}{f', {otherwise}' if otherwise else ''}, not {value!r}")


def int_or_none(name: str, value: Any, none: str) -> int | None:
    """Return an int of at least 1, or None, which stands for `none`; ValueError where it is neither."""
    return None if value is None else int_argument(name, value, otherwise=f"or None for {none}")


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
