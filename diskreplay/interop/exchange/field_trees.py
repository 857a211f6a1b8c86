"""Schemas of arrays that are told by the paths of their leaves."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from diskreplay import Field, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD


def schema_of(steps: Mapping[str, NDArray[Any]], fields: Mapping[str, NDArray[Any]] | None = None) -> Schema:
    """Return the schema of arrays by the paths of its leaves; dicts are nested by the slashes in them.

    Parameters
    ----------
    steps : mapping of str to array
        ``"obs"`` or ``"obs/image"``, ``"action"``, ``"extra/log_prob"``, ..., each ``(T, ...)``; ``"reward"`` may lack.
    fields : mapping of str to array, optional
        Episode fields, ``"episode/seed"``, each ``(episodes, ...)``.

    Raises
    ------
    SchemaError
        An array, or its path, is not one that can be stored.
    """
    return schema_of_leaves(
        {path: Field(rows.shape[1:], rows.dtype) for path, rows in {**steps, **(fields or {})}.items()}
    )


def schema_of_leaves(leaves: Mapping[str, Field]) -> Schema:
    """Return the schema of leaves by their paths; raises as `schema_of`."""
    for path in leaves:
        *above, _ = accumulate(path.split("/"), "{}/{}".format)
        if fields := [folder for folder in above if folder in leaves]:
            raise SchemaError(f"{fields[0]} is a field, so {path} cannot be one inside of it; rename one of the two")
    trees = {part: field_tree(leaves, part) for part in (OBS, ACTION, REWARD, EXTRA, FIELDS)}
    return Schema(
        trees[OBS], trees[ACTION], trees[REWARD] or None, extra=trees[EXTRA] or None, episode=trees[FIELDS] or None
    )


def field_tree(leaves: Mapping[str, Field], part: str) -> Any:
    """Return the tree of a part: the field that is the part, or a dict of those below it, which may be empty."""
    if part in leaves:
        return leaves[part]
    tree: dict[str, Any] = {}
    for path, field in leaves.items():
        if path.startswith(f"{part}/"):
            *above, name = path.split("/")[1:]
            inner = tree
            for key in above:
                inner = inner.setdefault(key, {})
            inner[name] = field
    return tree
