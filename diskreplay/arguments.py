"""Checks of arguments: the limits and the compression of a store, and the argument `where`."""

import sys
from typing import Any

import numpy as np

from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Limits
from diskreplay.segments.shards import zstd


def check_count(name: str, value: Any, least: int, most: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name} is {value}; it must be at least {least}" + (f" and at most {most}" if most else ""))


def check_seconds(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number of seconds, not {value!r}")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; it must be more than 0 and finite")


def check_where(where: object) -> None:
    """Raise ValueError if ``where`` is not callable. Only the command line accepts an expression as text."""
    if not callable(where):
        example = ", such as lambda episode: episode.total_reward > 20"
        raise ValueError(f"where must be a function of an episode{example}, not {where!r:.80}")


def checked_limits(capacity: Any, capacity_bytes: Any, max_age_s: Any) -> Limits:
    check_count("capacity", capacity, 1, None)
    check_count("capacity_bytes", capacity_bytes, 1, None)
    check_seconds("max_age_s", max_age_s)
    return Limits(as_int(capacity), as_int(capacity_bytes), None if max_age_s is None else float(max_age_s))


def compression_argument(level: int | None) -> tuple[str, int] | None:
    """Return the argument ``compression`` of `create` for a level of zstd; None for no compression."""
    return None if level is None else ("zstd", level)


def compression_level(value: Any) -> int | None:
    """Return the level of zstd for the argument ``compression`` of `create`; None for no compression."""
    if value is None:
        return None
    name, level = value if isinstance(value, tuple) and len(value) == 2 else (value, layout.ZSTD_LEVELS[0])
    if name != "zstd":
        raise ValueError(f'compression must be "zstd", ("zstd", level) or None, not {value!r}')
    if level is None:
        raise ValueError(f"the level of zstd must be a whole number, not {level!r}")
    check_count("the level of zstd", level, *layout.ZSTD_LEVELS)
    zstd()
    return int(level)


def as_int(value: Any) -> int | None:
    return None if value is None else int(value)
