"""Functions that flatten, index and compare nested dicts and tuples of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Flat = dict[str, np.ndarray]
"""The leaves of a nested value by path: {"obs": array}, or {"obs/image": array, "obs/state": array}."""


def flat(value: Any, path: str) -> Flat:
    """Return copies of the leaves of nested dicts and tuples, by path. Every path begins with `path`."""
    if isinstance(value, tuple):
        value = {str(index): child for index, child in enumerate(value)}
    if isinstance(value, Mapping):
        return {leaf: x for key, child in value.items() for leaf, x in flat(child, f"{path}/{key}").items()}
    return {path: np.array(value)}


def pick(value: Any, index: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(pick(child, index) for child in value)
    if isinstance(value, Mapping):
        return {key: pick(child, index) for key, child in value.items()}
    return value[index]


def same_values(one: Flat, other: Flat) -> bool:
    """Return whether two flattened values are the same: NaN equals NaN, and 0.0 equals -0.0."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[leaf], other[leaf], equal_nan=one[leaf].dtype.kind == "f") for leaf in one
    )
