"""Checks of arguments that are numbers or schedules; their errors name the argument."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> float:
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
    return number(name, value, 0.0, 1.0)


def int_argument(name: str, value: Any, least: int = 1, most: int | None = None, otherwise: str = "") -> int:
    good = not isinstance(value, bool) and isinstance(value, Integral)
    if good and least <= value and (most is None or value <= most):
        return int(value)
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} must be an int {limits}{f', {otherwise}' if otherwise else ''}, not {value!r}")


def int_or_none(name: str, value: Any, none: str) -> int | None:
    return None if value is None else int_argument(name, value, otherwise=f"or None for {none}")


Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Linear:
    """A schedule that goes from `start` to `end` in equal steps, one per delivered batch, and then stays at `end`.

    A `Linear` has no state: the sampler counts batches. Any function from the number of earlier batches to a number is
    a schedule, too.

    Parameters
    ----------
    start, end : float
        The first and the last value.
    steps : int
        Number of batches from `start` to `end`: batch 0 has `start`, batch `steps` and later batches have `end`.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> beta = dr.Linear(0.4, 1.0, steps=100)
    >>> beta(0), beta(50), beta(1000)
    (0.4, 0.7, 1.0)
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        object.__setattr__(self, "steps", int_argument("steps", self.steps))

    def __call__(self, batches: int) -> float:
        done = min(batches / self.steps, 1.0)
        return (1.0 - done) * self.start + done * self.end

    def __str__(self) -> str:
        return f"{self.start}→{self.end}"


def beta_argument(value: Any) -> float | Schedule:
    if isinstance(value, Linear):
        number("beta.start", value.start, 0.0)
        number("beta.end", value.end, 0.0)
    if callable(value):
        schedule: Schedule = value
        return schedule
    return number("beta", value, 0.0)
