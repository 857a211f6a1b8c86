"""Make schemas from arrays by path, and Gymnasium spaces from the fields of a schema."""

import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, MissingExtra, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD

if TYPE_CHECKING:
    from gymnasium import Space


def leaves_of(rows: Mapping[str, NDArray[Any]], place: Path, advice: str = "") -> dict[str, Field]:
    """Return the fields of rows ``(n, *shape)`` by path; rewards may be ``(n, 1)``."""
    found = dict[str, Field]()
    for path, values in rows.items():
        if path == REWARD and math.prod(values.shape[1:]) != 1:
            raise FormatError(f"{place}: rewards of shape {values.shape}: a reward is one number a step{advice}")
        try:
            found[path] = Field(() if path == REWARD else values.shape[1:], values.dtype)
        except SchemaError as error:
            raise SchemaError(f"{place}: {path}: {error}{advice}") from None
    return found


def schema_of_leaves(leaves: Mapping[str, Field]) -> Schema:
    for path in leaves:
        *above, _ = accumulate(path.split("/"), "{}/{}".format)
        if fields := [folder for folder in above if folder in leaves]:
            raise SchemaError(f"{fields[0]} is a field, so {path} cannot be one inside of it; rename one of the two")
    trees = {part: field_tree(leaves, part) for part in (OBS, ACTION, REWARD, EXTRA, FIELDS)}
    return Schema(
        trees[OBS], trees[ACTION], trees[REWARD] or None, extra=trees[EXTRA] or None, episode=trees[FIELDS] or None
    )


def field_tree(leaves: Mapping[str, Field], part: str) -> Any:
    """Return the fields of a part, such as "obs": one `Field`, or a nested dict of fields, which may be empty."""
    prefix = f"{part}/"
    below = {path.removeprefix(prefix): field for path, field in leaves.items() if path.startswith(prefix)}
    return leaves[part] if part in leaves else nest(below)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in nested dicts: the key "a/b" becomes the key "b" in the dict "a"."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *keys, last = path.split("/")
        inner = tree
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def space_of(tree: Any) -> "Space[Any]":
    """Return the Gymnasium space of nested fields; a field without a space becomes a Box for any value of its dtype."""
    with MissingExtra.raised_for("a space", "gym"):
        from gymnasium import spaces

    if isinstance(tree, Mapping):
        # For a plain dict, gymnasium would sort the keys.
        return spaces.Dict(OrderedDict((key, space_of(inner)) for key, inner in tree.items()))
    if isinstance(tree, tuple):
        return spaces.Tuple([space_of(inner) for inner in tree])
    assert isinstance(tree, Field)
    space: Mapping[str, Any] = tree.space or {}
    kind = space.get("type")
    if kind == "Discrete" and not tree.shape:
        try:
            return spaces.Discrete(space["n"], start=space["start"], dtype=tree.dtype.type)
        except TypeError:  # before gymnasium 1.2.2, a Discrete is always int64
            return spaces.Discrete(space["n"], start=space["start"])
    if kind == "MultiDiscrete":
        nvec, start = np.asarray(space["nvec"]), np.broadcast_to(space["start"], tree.shape)
        return spaces.MultiDiscrete(nvec, dtype=tree.dtype.type, start=start)
    if kind == "MultiBinary":
        # Stable-Baselines3 does not accept a tuple of one number as the shape of a vector.
        return spaces.MultiBinary(tree.shape if len(tree.shape) > 1 else tree.shape[0])
    low, high = (space["low"], space["high"]) if kind == "Box" else _range(tree.dtype)
    return spaces.Box(_bounds(low, tree), _bounds(high, tree), dtype=tree.dtype.type)


def _range(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        return -math.inf, math.inf
    return (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))


def _bounds(values: Any, field: Field) -> NDArray[Any]:
    # Bounds of floats may be texts, such as "inf": NumPy converts texts to float64. Bounds of integers are not
    # converted to float64, which would round large integers.
    read = np.asarray(values, np.float64 if field.dtype.kind == "f" else field.dtype)
    return np.broadcast_to(read.astype(field.dtype), field.shape)
