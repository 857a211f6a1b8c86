"""What of Minari's spaces a store holds."""

from collections import OrderedDict
from typing import Any

from diskreplay import MissingExtra, SchemaError

with MissingExtra.raised_for("a data set of Minari", "minari"):
    from gymnasium import Space, spaces

__all__ = ["with_one_bound", "without_texts"]

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


def with_one_bound(space: AnySpace) -> AnySpace:
    """Return a space of whose boxes only the first number is left.

    What Minari's JSON keeps of a space it keeps of this one, without the many thousand bounds of an image.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict(OrderedDict((key, with_one_bound(inner)) for key, inner in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([with_one_bound(inner) for inner in space.spaces])
    if isinstance(space, spaces.Box):
        low, high = (bounds.reshape(-1)[:1] for bounds in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type)
    return space
