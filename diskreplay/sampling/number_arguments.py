"""Arguments that are numbers, in their plain form or refused by name."""

import math
from numbers import Integral, Real
from typing import Any


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> float:
    """Return a finite float within limits; ValueError where it is none."""
    good = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if good and least <= float(value) <= most and float(value) > above:
        return float(value)
    if above > -math.inf:
        limits = f" above {above:g}"
    elif most < math.inf:
        limits = f" from {least:g} to {most:g}"
    else:
        limits = f" of at least {least:g}" if least > -math.inf else ""
    raise ValueError(f"{name} must be a finite number{limits}, not {value!r}")


def int_argument(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Return an int of at least `least`; ValueError where it is none. `otherwise` says what else may be given."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(
            f"{name} must be an int of at least {least}{f', {otherwise}' if otherwise else ''}, not {value!r}"
        )
    return int(value)
