"""Casts the values of a step for a writer: arrays to bytes, scalars to numbers, and truth values to bools.

To save time, a caster converts the most common values itself, and calls `Field.cast` for all other values. The rules
and errors are the same as in `Field.cast`.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SchemaError
from diskreplay.schema.schema import Field, Schema
from diskreplay.segments.documents import layout
from diskreplay.segments.segment_column import is_bytes

Items = list[Any]


# --- values that a store refuses although they fit its schema --------------------------------------------------------

Check = Callable[[NDArray[Any]], None]
"""A function of an array with values of a leaf, ``(..., *shape)``: it raises SchemaError if a value is invalid."""

NO_CHECKS: Mapping[str, Check] = {}


def checks_of(schema: Schema, validate: str | None) -> Mapping[str, Check]:
    """Return the checks that a store's ``validate`` asks for, by the path of the leaf."""
    if validate is None:
        return NO_CHECKS
    found: dict[str, Check] = {
        path: partial(_check_finite, path) for path, leaf in schema.step_leaves.items() if leaf.dtype.kind == "f"
    }
    if validate == "space":
        for path, leaf in schema.step_leaves.items():
            if path.split("/")[0] == "action":
                found[path] = partial(_check_bounds, path, *_bounds(path, leaf))
    return found


def _check_finite(path: str, values: NDArray[Any]) -> None:
    good = np.isfinite(values)
    if not good.all():
        raise SchemaError(f"{path}: {values[~good].flat[0]} is not finite, and this store takes finite values only")


def _check_bounds(path: str, low: NDArray[Any], high: NDArray[Any], values: NDArray[Any]) -> None:
    good = (values >= low) & (values <= high)
    if not good.all():
        at = np.unravel_index(int(np.argmin(good)), good.shape)
        least, most = (np.broadcast_to(bound, good.shape)[at] for bound in (low, high))
        raise SchemaError(f"{path}: {values[at]} is outside its space, {least} to {most}")


def _bounds(path: str, leaf: Field) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the smallest and the largest value of each element in the space of a leaf.

    Raises SchemaError if the leaf has no space.
    """
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
            f'{path}: validate="space" needs a field that came from a space; use Schema.from_env or from_spaces'
        ) from None


def _numbers(values: Any) -> Any:
    """Return nested lists from JSON with each string replaced by a float: JSON has infinities only as strings."""
    if isinstance(values, list):
        return [_numbers(value) for value in values]
    return float(values) if isinstance(values, str) else values


# --- casters ---------------------------------------------------------------------------------------------------------


class LeafCaster:
    """Casts a value of one leaf to an item: the bytes of the value, or a number that fits the leaf's dtype."""

    __slots__ = ("_check", "_field", "_is_bytes", "_path")

    def __init__(self, field: Field, path: str, check: Check | None = None) -> None:
        self._field, self._path, self._check = field, path, check
        self._is_bytes = is_bytes(path, field.shape)

    def item(self, value: Any) -> Any:
        array = self._field.cast(value, self._path)
        if self._check is not None:
            self._check(array)
        return array.tobytes() if self._is_bytes else array

    def items(self, value: Any) -> Items:
        """Return the item in a list, as the caster of a part of the schema."""
        return [self.item(value)]


class BytesCaster(LeafCaster):
    """Casts values of an observation or an array, without a check."""

    __slots__ = ("_dtype", "_shape")

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path)
        self._dtype, self._shape = field.dtype, field.shape

    def items(self, value: Any) -> Items:
        if type(value) is np.ndarray and value.dtype is self._dtype and value.shape == self._shape:
            return [value.tobytes()]
        return [self.item(value)]


class NumberCaster(LeafCaster):
    """Casts values of a scalar that is not part of the observation, without a check."""

    __slots__ = ("_exact", "_high", "_low", "_others", "_usual")

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path)
        self._exact = field.dtype.type
        self._usual, self._others, (self._low, self._high) = _python_numbers(field.dtype)

    def items(self, value: Any) -> Items:
        kind = type(value)
        if (kind is self._usual and self._low <= value <= self._high) or kind is self._exact:
            return [value]
        if kind in self._others and self._low <= value <= self._high:
            return [value]
        return [self.item(value)]


def leaf_caster(field: Field, path: str, check: Check | None = None) -> LeafCaster:
    if check is not None:
        return LeafCaster(field, path, check)
    return BytesCaster(field, path) if is_bytes(path, field.shape) else NumberCaster(field, path)


def _python_numbers(dtype: np.dtype[Any]) -> tuple[type, tuple[type, ...], tuple[Any, Any]]:
    """Return the types of numbers that need no cast to a dtype, and the bounds of such numbers.

    The first value is the most common type, and the second value has all other types. The bounds are the smallest and
    the largest number of the dtype. `Field.cast` handles NaN and infinities, because they are not between the bounds.
    """
    if dtype.kind == "b":
        return bool, (), (False, True)
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return float, (int, np.float64, bool), (-most, most)
    bounds = np.iinfo(dtype)
    return int, (bool,), (int(bounds.min), int(bounds.max))


class TreeCaster:
    """Casts a step's value of a part that is a tree of fields: one item per leaf, in the schema's order."""

    def __init__(self, schema: Schema, part: str, checks: Mapping[str, Check]) -> None:
        self._schema, self._part = schema, part
        leaves = {path: leaf for path, leaf in schema.leaves.items() if path.split("/")[0] == part}
        self._casters = {path: leaf_caster(leaf, path, checks.get(path)) for path, leaf in leaves.items()}
        self._by_name = [(path.partition("/")[2], caster) for path, caster in self._casters.items()]
        is_flat = isinstance(getattr(schema, part), Mapping) and not any("/" in name for name, _ in self._by_name)
        self._names = dict(self._by_name).keys() if is_flat else None  # None for nested mappings

    def items(self, value: Any) -> Items:
        items: Items = []
        if type(value) is dict and value.keys() == self._names:
            for name, caster in self._by_name:
                items += caster.items(value[name])
        else:
            for path, raw in self._schema.flatten(self._part, value):
                items += self._casters[path].items(raw)
        return items


def part_caster(schema: Schema, part: str, checks: Mapping[str, Check] = NO_CHECKS) -> LeafCaster | TreeCaster:
    """Return the caster of ``part`` ("obs", "action", "reward" or "extra")."""
    field = schema.leaves.get(part)
    return TreeCaster(schema, part, checks) if field is None else leaf_caster(field, part, checks.get(part))


_BOOL = np.dtype(np.bool_)  # made once, as a comparison with np.bool_ would look up this dtype each time
_PRIORITY = Field((), "float64")


def as_priority(value: Any) -> float:
    """Return the number to store as a step's priority: |value|, but at least `LEAST_PRIORITY`; 0.0 for None.

    Raises SchemaError if the value is not finite.
    """
    if value is None:
        return 0.0
    priority = abs(float(value if isinstance(value, float) else _PRIORITY.cast(value, "priority")))
    if not priority <= sys.float_info.max:
        raise SchemaError(f"priority is {value!r:.80}; give the absolute TD error, a finite number, or None")
    return max(priority, layout.LEAST_PRIORITY)


def as_priorities(values: Any, count: int, chosen: Any = slice(None)) -> NDArray[np.float64]:
    """Return the numbers to store as the priorities of ``count`` steps, ``(count,)``: see `as_priority`.

    NaN in ``values`` stands for a step without a priority. If ``values`` is None, no step has a priority. A step
    without a priority gets 0.0. Raises SchemaError if a priority at one of the indices ``chosen`` is infinite.
    """
    if values is None:
        return np.zeros(count)
    priorities: NDArray[np.float64] = np.abs(_PRIORITY.cast(values, "priority", (count,)))
    bad = np.zeros(count, np.bool_)
    bad[chosen] = np.isinf(priorities[chosen])
    if bad.any():
        at = int(np.argmax(bad))
        raise SchemaError(
            f"priority[{at}] is {priorities[at]}; give absolute TD errors, finite ones, or NaN for a step without one"
        )
    return np.where(np.isnan(priorities), 0.0, np.maximum(priorities, layout.LEAST_PRIORITY))


def as_flag(value: Any, name: str, reward: Any = None, floats: bool = False) -> bool:
    """Return a truth value as a bool.

    ``value`` may be a bool, a 0 or 1 of any library, or an array with one such value. If ``floats`` is True, 0.0 and
    1.0 are truth values too. Raises SchemaError for any other value. The message of the error also shows ``reward`` if
    it is given, as callers may have swapped the reward and a flag.
    """
    if type(value) is bool:
        return value
    if type(value) is np.bool_:
        return bool(value)
    array = _plain(value)
    if array.size != 1 or not _are_flags(array, floats):
        raise SchemaError(f"{name} is one truth value a step, a bool or 0 or 1; got {_shown(name, value, reward)}")
    return bool(array.item())


def as_flags(
    value: Any,
    name: str,
    count: int,
    chosen: NDArray[np.int64] | None = None,
    reward: Any = None,
    floats: bool = False,
) -> NDArray[np.bool_]:
    """Return one bool per lane, ``(count,)``: ``value`` itself if it has this type and shape.

    Only the values of the lanes ``chosen`` are checked (None: all lanes). For the other arguments see `as_flag`.
    """
    if type(value) is np.ndarray and value.dtype is _BOOL and value.shape == (count,):
        return value
    flags = _plain(value)
    if flags.shape != (count,) or not _are_flags(flags if chosen is None else flags[chosen], floats):
        given = f"{flags.dtype} {flags.shape}, {_shown(name, value, reward)}"
        raise SchemaError(f"{name} needs shape ({count},), one truth value a lane, bools or 0 and 1; got {given}")
    return flags.astype(np.bool_)


def _are_flags(array: NDArray[Any], floats: bool) -> bool:
    kind = array.dtype.kind
    return kind == "b" or (kind in ("iuf" if floats else "iu") and not np.count_nonzero((array != 0) & (array != 1)))


def _shown(name: str, value: Any, reward: Any) -> str:
    given = {name: value} if reward is None else {"reward": reward, name: value}
    return " and ".join(f"{key}={' '.join(repr(one).split()):.80}" for key, one in given.items())


def length(value: Any, name: str) -> int:
    try:
        return len(value)
    except TypeError:
        raise SchemaError(f"{name} of a whole episode needs a row for each step, not {type(value).__name__}") from None


def _plain(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):  # numpy cannot make an array, so the value is no truth value
        return np.array(None)
