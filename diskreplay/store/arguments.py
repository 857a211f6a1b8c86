"""Checks of the numbers that a caller gives for a store."""

import sys
from typing import Any

import numpy as np


def check_count(name: str, value: Any, least: int, most: int | None) -> None:
    """Check a whole number, or None; see the message for what is refused."""
    if value is None:
        return
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number, not {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it must be at least {least}" + (f" and at most {most}" if most else ""))


def check_seconds(name: str, value: Any) -> None:
    """Check a finite number of seconds above 0, or None."""
    if value is None:
        return
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ValueError(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; it must be more than 0 and finite")


def as_int(value: Any) -> int | None:
    """Return a plain int, or None."""
    return None if value is None else int(value)
