"""Spaces of gymnasium for the fields of a schema, and what of Minari's spaces a store holds."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, MissingExtra, SchemaError

with MissingExtra.raised_for("a data set of Minari", "minari"):
    from gymnasium import Space, spaces

__all__ = ["space_of", "without_texts"]

AnySpace = Space[Any]


def space_of(tree: Any) -> AnySpace:
    """Return the space of a tree of fields; of a field that came from no space, all values of its dtype."""
    if isinstance(tree, Mapping):
        return spaces.Dict(OrderedDict((key, space_of(inner)) for key, inner in tree.items()))
    if isinstance(tree, tuple):
        return spaces.Tuple([space_of(inner) for inner in tree])
    known = tree.space or {}
    kind = known.get("type")
    if kind == "Discrete":
        return spaces.Discrete(known["n"], start=known["start"], dtype=tree.dtype.type)
    if kind == "MultiDiscrete":
        nvec = np.broadcast_to(known["nvec"], tree.shape)
        return spaces.MultiDiscrete(nvec, dtype=tree.dtype.type, start=np.broadcast_to(known["start"], tree.shape))
    if kind == "MultiBinary":
        return spaces.MultiBinary(tree.shape)
    if kind == "Box":
        low, high = (_bounds(tree, known[name]) for name in ("low", "high"))
    else:
        low, high = _whole_range(tree)
    return spaces.Box(low, high, tree.shape, tree.dtype.type)


def _bounds(leaf: Field, given: Any) -> NDArray[Any]:
    # Infinities are texts in the schema.
    values = np.array(given, np.float64 if leaf.dtype.kind == "f" else leaf.dtype)
    return np.broadcast_to(values.astype(leaf.dtype), leaf.shape)


def _whole_range(leaf: Field) -> tuple[Any, Any]:
    if leaf.dtype.kind == "f":
        return -np.inf, np.inf
    if leaf.dtype.kind == "b":
        return 0, 1
    bounds = np.iinfo(leaf.dtype)
    return bounds.min, bounds.max


def without_texts(space: AnySpace, name: str) -> tuple[AnySpace, list[str]]:
    """Return a space without the texts in its dicts, and their paths, joined by slashes.

    Raises
    ------
    SchemaError
        Nothing else is in the space, which is called ``name``.
    """
    kept, texts = _without_texts(space, "")
    if kept is None:
        raise SchemaError(f"{name}: a {type(space).__name__} space of texts alone cannot be stored")
    return kept, texts


def _without_texts(space: AnySpace, path: str) -> tuple[AnySpace | None, list[str]]:
    if isinstance(space, spaces.Text):
        return None, [path]
    if not isinstance(space, spaces.Dict):
        return space, []
    kept, texts = OrderedDict(), []
    for key, inner in space.spaces.items():
        rest, found = _without_texts(inner, f"{path}/{key}" if path else key)
        texts += found
        if rest is not None:
            kept[key] = rest
    return (spaces.Dict(kept) if kept else None), texts
