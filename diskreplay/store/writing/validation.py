"""What a store refuses beside values that do not fit its schema: actions outside their space, NaN and infinities."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SchemaError
from diskreplay.format.schema import Field, Schema

Check = Callable[[NDArray[Any]], None]
NO_CHECKS: Mapping[str, Check] = {}


def checks_of(schema: Schema, validate: str | None) -> Mapping[str, Check]:
    """Return what raises SchemaError for invalid values of a leaf, by the paths of those that have such a check.

    Each is given an array of any number of values, ``(..., *shape)``, in the dtype of its field.
    """
    if validate is None:
        return NO_CHECKS
    found = {path: _finite(path) for path, leaf in schema.step_leaves.items() if leaf.dtype.kind == "f"}
    if validate == "space":
        for path, leaf in schema.step_leaves.items():
            if path.split("/")[0] == "action":
                found[path] = _inside(path, leaf)
    return found


def _finite(path: str) -> Check:
    def check(values: NDArray[Any]) -> None:
        good = np.isfinite(values)
        if not good.all():
            raise SchemaError(f"{path}: {values[~good].flat[0]} is not finite, and this store takes finite values only")

    return check


def _inside(path: str, leaf: Field) -> Check:
    low, high = _bounds(path, leaf)

    def check(values: NDArray[Any]) -> None:
        good = (values >= low) & (values <= high)  # NaN is not
        if not good.all():
            at = np.unravel_index(int(np.argmin(good)), good.shape)
            least, most = (np.broadcast_to(bound, good.shape)[at] for bound in (low, high))
            raise SchemaError(f"{path}: {values[at]} is outside its space, {least} to {most}")

    return check


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
