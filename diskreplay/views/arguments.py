"""Argument checks that several views use. Each check returns the normalized value or raises ValueError."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import int_argument, number
from diskreplay.ids import Floats
from diskreplay.schema.schema import Schema


def switch(name: str, value: Any) -> bool:
    """Return `value` as a bool. Numbers are refused, because a length in the place of a bool would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Return distinct field names as a tuple. A single string is refused: it would be read letter by letter."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f'{name} must be a sequence of field names, such as ("action",), not {value!r}')
    if len(set(value)) != len(value):
        raise ValueError(f"{name} names a field twice: {value!r}")
    return tuple(value)


def stack_depths(name: str, value: Any) -> int | dict[str, int]:
    if not isinstance(value, Mapping):
        return int_argument(name, value, otherwise="or a dict of them by observation leaf")
    return {str(leaf): int_argument(f"{name}[{leaf!r}]", depth) for leaf, depth in value.items()}


def weights_or_none(name: str, value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{name} must be None or weights by field, such as {{"reward": 1.0}}, not {value!r}')
    return {str(field): number(f"{name}[{field!r}]", weight) for field, weight in value.items()}


def name_or_none(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be None or the name of an extra field, not {value!r}")
    return value


def check_fields(view: Any, **checks: Callable[[str, Any], Any]) -> None:
    """Check attributes of a frozen view: ``name=check`` replaces the attribute's value by ``check(name, value)``."""
    for name, check in checks.items():
        object.__setattr__(view, name, check(name, getattr(view, name)))


def frame_stack_depths(
    frame_stack: int | Mapping[str, int], observations: Mapping[tuple[str, ...], str]
) -> dict[tuple[str, ...], int]:
    if isinstance(frame_stack, int):
        return dict.fromkeys(observations, frame_stack)
    known = {"/".join(path[1:]): path for path in observations}
    for name in frame_stack:
        if not name or name not in known:
            if "" in known:
                raise ValueError(f"frame_stack names {name!r}, but the observation is one array: give an int")
            leaves = ", ".join(map(repr, known))
            raise ValueError(f"frame_stack names {name!r}; the observation leaves of this store are {leaves}")
    return {known[name]: depth for name, depth in frame_stack.items()}


def scalar_leaf(schema: Schema, argument: str, name: str, others: Sequence[str] = ()) -> str:
    """Return the path of the scalar field `name`: an extra field, or one of `others`."""
    path = name if name in others else f"extra/{name}"
    field = schema.leaves.get(path)
    if field is None or field.shape != ():
        scalars = [leaf for leaf, f in schema.leaves.items() if leaf.startswith("extra/") and f.shape == ()]
        known = ", ".join([*others, *(leaf.removeprefix("extra/") for leaf in scalars)]) or "none"
        what = "is not scalar" if field is not None else "is not an extra field"
        fields = "scalar fields" if others else "scalar extra fields"
        raise ValueError(f"{argument} names {name!r}, which {what}; the {fields} of this store are {known}")
    return path


def reward_leaves(schema: Schema, weights: Any) -> list[tuple[str, np.dtype[Any], np.float64]]:
    """Return path, dtype and weight of each field in the weighted sum that is the reward."""
    found = []
    for name, weight in (weights or {"reward": 1.0}).items():
        path = scalar_leaf(schema, "reward", name, ("reward",))
        # The weight is a numpy scalar: with a Python float, numpy would compute products in the field's own precision.
        found.append((path, schema.leaves[path].dtype, np.float64(weight)))
    return found


def weighed(columns: Sequence[NDArray[Any]], weights: Sequence[np.float64]) -> Floats:
    """Return the weighted sum of `columns` in float64. Each column has the values of one field."""
    total = np.zeros(columns[0].shape)
    for column, weight in zip(columns, weights, strict=True):
        total += column.astype(np.float64) * weight
    return total


def discount_leaf(schema: Schema, name: str | None) -> tuple[str, np.dtype[Any]] | None:
    if name is None:
        return None
    path = scalar_leaf(schema, "discount", name)
    return path, schema.leaves[path].dtype


def described(view: Any, always: Sequence[str]) -> str:
    values = {field.name: getattr(view, field.name) for field in fields(view)}
    shown = [field.name for field in fields(view) if field.name in always or values[field.name] != field.default]
    return f"{type(view).__name__}({', '.join(f'{name}={_written(values[name])}' for name in shown)})"


def _written(value: Any) -> str:
    """Return a callable's name, or the repr of another value; a method's repr would contain its object's repr."""
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
