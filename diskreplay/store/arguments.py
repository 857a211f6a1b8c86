"""Checks of the numbers that a store is created with."""

import sys
from typing import Any

import numpy as np

from diskreplay.format.root import Limits


def check_count(name: str, value: Any, least: int, most: int | None) -> None:
    """Refuse what is no whole number in its bounds; None is fine."""
    if value is None:
        return
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number, not {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it must be at least {least}" + (f" and at most {most}" if most else ""))


def check_seconds(name: str, value: Any) -> None:
    """Refuse what is no finite number above 0; None is fine."""
    if value is None:
        return
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ValueError(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; it must be more than 0 and finite")


def checked_limits(capacity: Any, capacity_bytes: Any, max_age_s: Any) -> Limits:
    """Return what a store keeps at most, or raise ValueError."""
    check_count("capacity", capacity, 1, None)
    check_count("capacity_bytes", capacity_bytes, 1, None)
    check_seconds("max_age_s", max_age_s)
    return Limits(as_int(capacity), as_int(capacity_bytes), None if max_age_s is None else float(max_age_s))


def as_int(value: Any) -> int | None:
    """Return a whole number as Python's own."""
    return None if value is None else int(value)
