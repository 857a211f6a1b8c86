"""What a store refuses beside values that do not fit its schema: actions outside their space, NaN and infinities."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SchemaError
from diskreplay.schema.schema import Field, Schema


class Check(Protocol):
    """The rule of a leaf's values."""

    def check(self, values: NDArray[Any]) -> None:
        """Raise SchemaError if one of the values, ``(..., *shape)`` in the dtype of their field, breaks the rule."""


NO_CHECKS: Mapping[str, Check] = {}


def checks_of(schema: Schema, validate: str | None) -> Mapping[str, Check]:
    """Return the checks of leaves, by path."""
    if validate is None:
        return NO_CHECKS
    found: dict[str, Check] = {
        path: FiniteCheck(path) for path, leaf in schema.step_leaves.items() if leaf.dtype.kind == "f"
    }
    if validate == "space":
        for path, leaf in schema.step_leaves.items():
            if path.split("/")[0] == "action":
                found[path] = SpaceCheck(path, leaf)
    return found


class FiniteCheck:
    """Refuses NaN and infinities."""

    def __init__(self, path: str) -> None:
        self._path = path

    def check(self, values: NDArray[Any]) -> None:
        """See `Check`."""
        good = np.isfinite(values)
        if not good.all():
            raise SchemaError(
                f"{self._path}: {values[~good].flat[0]} is not finite, and this store takes finite values only"
            )


class SpaceCheck:
    """Refuses values outside the space of a leaf, NaN among them."""

    def __init__(self, path: str, leaf: Field) -> None:
        self._path = path
        self._low, self._high = _bounds(path, leaf)

    def check(self, values: NDArray[Any]) -> None:
        """See `Check`."""
        good = (values >= self._low) & (values <= self._high)
        if not good.all():
            at = np.unravel_index(int(np.argmin(good)), good.shape)
            least, most = (np.broadcast_to(bound, good.shape)[at] for bound in (self._low, self._high))
            raise SchemaError(f"{self._path}: {values[at]} is outside its space, {least} to {most}")


def _bounds(path: str, leaf: Field) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the least and the largest value of each element."""
    space = leaf.space or {}
    try:
        if space["type"] == "Box":
            low, high = (np.array(_numbers(space[name])) for name in ("low", "high"))
            return (low.astype(leaf.dtype), high.astype(leaf.dtype)) if leaf.dtype.kind == "f" else (low, high)
        if space["type"] == "MultiBinary":
            return np.array(0), np.array(1)
        start = np.array(space["start"])
        return start, start + np.array(space["nvec" if space["type"] == "MultiDiscrete" else "n"]) - 1
    except KeyError:
        raise SchemaError(
            f'{path}: validate="space" needs a field that came from a space, as by Schema.from_env or from_spaces'
        ) from None


def _numbers(values: Any) -> Any:
    """Return bounds as they were before JSON, which spells infinities."""
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return float(values) if isinstance(values, str) else values
