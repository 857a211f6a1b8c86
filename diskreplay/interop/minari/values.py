"""Convert Minari's texts, options and other values that are not arrays to JSON and back; simplify spaces."""

import base64
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import MissingExtra, SchemaError

with MissingExtra.raised_for("a data set of Minari", "minari"):
    from gymnasium import Space, spaces

__all__ = ["flat", "from_json", "to_json", "with_one_bound", "without_texts"]

_ARRAY, _TEXTS, _COUNT = "@array", "@texts", "@count"


def to_json(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {str(key): to_json(item, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple) and not all(isinstance(item, str | bytes) for item in value):
        return [to_json(item, name) for item in value]
    return _array_to_json(np.asarray(value), name)


def _array_to_json(array: NDArray[Any], name: str) -> Any:
    if array.dtype.kind in "biuf":
        return {_ARRAY: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
    if array.ndim <= 1 and array.dtype.kind in "OSU":
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
        if all(isinstance(text, str) for text in texts):
            if len(set(texts)) == 1 < len(texts):
                return {_TEXTS: texts[:1], _COUNT: len(texts)}
            return {_TEXTS: texts} if array.ndim else texts[0]
        return [to_json(item, name) for item in array.tolist()]
    raise SchemaError(f"{name}: values of the type {array.dtype} cannot be imported")


def from_json(value: Any) -> Any:
    """Return the value that `to_json` converted to ``value``; an array of texts becomes a list."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        dtype, shape, data = value[_ARRAY]
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)[()]
    if _TEXTS in value:
        return value[_TEXTS] * int(value.get(_COUNT, 1))
    return {key: from_json(item) for key, item in value.items()}


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested dicts and tuples by path, such as "a/0" for item 0 of the tuple "a"."""
    if isinstance(tree, tuple):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in flat(item, f"{path}/{key}" if path else key).items()
    }


AnySpace = Space[Any]


def without_texts(space: AnySpace, name: str) -> tuple[AnySpace, list[str]]:
    """Return a space without the texts in its dicts, and the paths of these texts, with slashes between the keys.

    SchemaError is raised if the space has only texts. The message calls the space ``name``.
    """
    kept, texts = _without_texts(space, "")
    if kept is None:
        raise SchemaError(f"{name}: a {type(space).__name__} space with only texts cannot be stored")
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
    """Return a copy of a space; a Box becomes a Box of one number, with the bounds of the old Box's first number.

    If Minari's JSON keeps the copy exactly, it keeps the space exactly, too. The copy is converted faster: a Box may
    have many thousand bounds.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict(OrderedDict((key, with_one_bound(inner)) for key, inner in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([with_one_bound(inner) for inner in space.spaces])
    if isinstance(space, spaces.Box):
        low, high = (bounds.reshape(-1)[:1] for bounds in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type)
    return space
