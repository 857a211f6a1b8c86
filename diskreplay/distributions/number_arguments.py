"""Arguments that are numbers, in their plain form or refused by name."""

import math
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
