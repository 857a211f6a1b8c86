"""What of Minari's spaces a store holds."""

from collections import OrderedDict
from typing import Any

from diskreplay import MissingExtra, SchemaError

with MissingExtra.raised_for("a data set of Minari", "minari"):
    from gymnasium import Space, spaces

__all__ = ["without_texts"]

AnySpace = Space[Any]


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
