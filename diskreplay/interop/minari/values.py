"""Values of Minari that no array of a store holds, as JSON: texts, options, arrays of other lengths."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from diskreplay import SchemaError

__all__ = ["flat", "from_json", "nest", "to_json"]

_ARRAY, _TEXTS, _COUNT = "@array", "@texts", "@count"


def to_json(value: Any, name: str) -> Any:
    """Return a value as JSON that `from_json` makes the same again.

    Raises
    ------
    SchemaError
        There is no JSON for it; the message says ``name``.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {str(key): to_json(item, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple) and not all(isinstance(item, str | bytes) for item in value):
        return [to_json(item, name) for item in value]
    array = np.asarray(value)
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
    """Return the value that `to_json` was given; texts of an array as a list."""
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
    """Return the values of nested dicts and tuples by their keys, joined by slashes; the items of tuples by number."""
    if isinstance(tree, tuple):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in flat(item, f"{path}/{key}" if path else key).items()
    }


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by joined keys as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *keys, last = path.split("/")
        inner = tree
        for key in keys:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree
