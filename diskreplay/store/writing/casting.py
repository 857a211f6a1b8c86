"""What a writer makes of the values of a step: rows as bytes, scalars as numbers, truth values as flags.

Casters are prepared once a schema. Each takes the short way for a value that needs nothing, and asks `Field.cast` about
every other one; so the rules and the errors are its own.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SchemaError
from diskreplay.format import layout
from diskreplay.format.schema import Field, Schema
from diskreplay.format.segment_column import is_bytes
from diskreplay.store.writing.validation import NO_CHECKS, Check

Caster = Callable[[Any], Any]
Items = list[Any]
PartCaster = Callable[[Any], Items]


def leaf_caster(field: Field, path: str, check: Check | None = None) -> Caster:
    """Return what casts one step's value of a leaf: to the bytes of its row, or to a number that fits the dtype.

    It raises as `Field.cast`, and as the check of its values.
    """
    if check is not None:
        return _checked_caster(field, path, check)
    return _bytes_caster(field, path) if is_bytes(path, field.shape) else _number_caster(field, path)


def _checked_caster(field: Field, path: str, check: Check) -> Caster:
    def to_item(value: Any) -> Any:
        array = field.cast(value, path)
        check(array)
        return array.tobytes() if is_bytes(path, field.shape) else array

    return to_item


def _bytes_caster(field: Field, path: str) -> Caster:
    ndarray, dtype, shape, cast = np.ndarray, field.dtype, field.shape, field.cast

    def to_bytes(value: Any) -> bytes:
        if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
            return value.tobytes()
        return cast(value, path).tobytes()

    return to_bytes


def _number_caster(field: Field, path: str) -> Caster:
    exact, cast = field.dtype.type, field.cast
    usual, others, (low, high) = _python_numbers(field.dtype)

    def to_number(value: Any) -> Any:
        kind = type(value)
        if (kind is usual and low <= value <= high) or kind is exact or (kind in others and low <= value <= high):
            return value
        return cast(value, path)

    return to_number


def _python_numbers(dtype: np.dtype[Any]) -> tuple[type, tuple[type, ...], tuple[Any, Any]]:
    """Return types whose values enter the dtype as they are between two bounds; NaN and infinities go the long way."""
    if dtype.kind == "b":
        return bool, (), (False, True)
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        return float, (int, np.float64, bool), (-most, most)
    bounds = np.iinfo(dtype)
    return int, (bool,), (int(bounds.min), int(bounds.max))


def part_caster(schema: Schema, part: str, checks: Mapping[str, Check] = NO_CHECKS) -> PartCaster:
    """Return what casts one step's value of "obs", "action", "reward" or "extra" to the items of its leaves, in order.

    It raises as `Schema.flatten`, `Field.cast` and the checks, by path.
    """
    leaves = {path: leaf for path, leaf in schema.leaves.items() if path.split("/")[0] == part}
    casters = {path: leaf_caster(leaf, path, checks.get(path)) for path, leaf in leaves.items()}
    if part in casters:
        caster = casters[part]
        return lambda value: [caster(value)]
    names = [path.split("/", 1)[1] for path in casters]
    nested = any("/" in name for name in names) or not isinstance(getattr(schema, part), Mapping)

    def slow(value: Any) -> Items:
        return [casters[path](raw) for path, raw in schema.flatten(part, value)]

    return slow if nested else _flat(dict(zip(names, casters.values(), strict=True)), slow)


def _flat(casters: dict[str, Caster], slow: PartCaster) -> PartCaster:
    pairs, names = list(casters.items()), casters.keys()

    def flat(value: Any) -> Items:
        if type(value) is not dict or value.keys() != names:
            return slow(value)
        return [caster(value[name]) for name, caster in pairs]

    return flat


_BOOL = np.dtype(np.bool_)  # a comparison with np.bool_ would look it up each time
_PRIORITY = Field((), "float64")
_cast_priority = leaf_caster(_PRIORITY, "priority")


def as_priority(value: Any) -> float:
    """Return a step's initial priority, |td|, as it is stored, None too; SchemaError if it is not finite."""
    if value is None:
        return 0.0
    priority = abs(float(_cast_priority(value)))
    if not priority <= sys.float_info.max:
        raise SchemaError(f"priority is {value!r:.80}; give the absolute TD error, a finite number, or None")
    return max(priority, layout.LEAST_PRIORITY)


def as_priorities(values: Any, count: int, chosen: Any = slice(None), may_lack: bool = False) -> NDArray[np.float64]:
    """Return the initial priorities of ``count`` steps as they are stored, ``(count,)``; of None, that there are none.

    What is not ``chosen`` does not matter. With ``may_lack``, NaN says that a step has none. SchemaError if another one
    is not finite.
    """
    if values is None:
        return np.zeros(count)
    priorities: NDArray[np.float64] = np.abs(_PRIORITY.cast(values, "priority", (count,)))
    bad = np.zeros(count, np.bool_)
    bad[chosen] = ~np.isfinite(priorities[chosen])
    if may_lack:
        bad &= ~np.isnan(priorities)
    if bad.any():
        at = int(np.argmax(bad))
        lacking = ", or NaN for a lane that has none" if may_lack else ""
        raise SchemaError(f"priority[{at}] is {priorities[at]}; give absolute TD errors, finite numbers{lacking}")
    return np.where(np.isnan(priorities), 0.0, np.maximum(priorities, layout.LEAST_PRIORITY))


def as_flag(value: Any, name: str, reward: Any = None, floats: bool = False) -> bool:
    """Return a bool from a truth value: a bool, or 0 or 1 of any library's integers, alone or in an array of one.

    With ``floats`` also 0.0 or 1.0. SchemaError for any other value. The message shows the reward, too: callers swap
    the two easily.
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
    """Return one bool a lane, ``(count,)``, perhaps the very array; tensors on any device are fine.

    The values of lanes that are not ``chosen`` do not matter. SchemaError and all else as of `as_flag`.
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
    return kind == "b" or (kind in ("iuf" if floats else "iu") and not ((array != 0) & (array != 1)).any())


def _shown(name: str, value: Any, reward: Any) -> str:
    given = {name: value} if reward is None else {"reward": reward, name: value}
    return " and ".join(f"{key}={' '.join(repr(one).split()):.80}" for key, one in given.items())


def length(value: Any, name: str) -> int:
    """Return the rows of a field of a whole episode."""
    try:
        return len(value)
    except TypeError:
        raise SchemaError(f"{name} of a whole episode has a row for each step, not {type(value).__name__}") from None


def _plain(value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):  # no numbers, or of a dtype that numpy lacks: no truth value of any kind
        return np.array(None)
