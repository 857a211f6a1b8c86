"""The fields of a schema: their shapes and dtypes, casts of values, and conversion from gymnasium spaces."""

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

import numpy as np

from diskreplay.bounded_json import parse_json
from diskreplay.errors import MissingExtra, SchemaError

DTYPE_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
MAX_ROW_BYTES = 1 << 40
MAX_DIMENSIONS = 16

_SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"


@dataclass(frozen=True, init=False)
class Field:
    """Describe one leaf of a schema: the shape and dtype of its value in one step or episode.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of one value, without a batch axis; ``()`` is a scalar, an int is one axis.
    dtype : str or numpy.dtype
        bool, an integer of 8 to 64 bits, or a float of 16 to 64 bits.
    space : dict, optional
        The Gymnasium space of the values, as plain JSON. If the store was created with ``validate="space"``, actions
        outside the space are refused.

    Raises
    ------
    SchemaError
        If the shape or dtype cannot be stored, or ``space`` is not JSON.

    Examples
    --------
    >>> dr.Field((84, 84), "uint8").shape
    (84, 84)
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: dict[str, Any] | None
    row_bytes: int = field(repr=False, compare=False)

    def __init__(self, shape: Any, dtype: Any, space: dict[str, Any] | None = None) -> None:
        set_once = object.__setattr__
        set_once(self, "shape", _checked_shape(shape))
        set_once(self, "dtype", _checked_dtype(dtype))
        set_once(self, "space", None if space is None else _checked_space(space))
        set_once(self, "row_bytes", math.prod(self.shape) * self.dtype.itemsize)
        if self.row_bytes > MAX_ROW_BYTES:
            raise SchemaError(f"a field has at most {MAX_ROW_BYTES} bytes a step, not {self.row_bytes}")

    def cast(self, value: Any, name: str, leading: tuple[int, ...] = ()) -> np.ndarray:
        """Cast a value to an array of exactly this field's dtype.

        Parameters
        ----------
        value : array-like or tensor
            The value to cast. Tensors are detached and copied to the CPU.
        name : str
            The leaf's path, for the error message.
        leading : tuple of int
            Axes before the field's shape, such as the number of environments.

        Returns
        -------
        numpy.ndarray
            An array ``(*leading, *shape)``, C-contiguous. If the value already fits, the value itself is returned.

        Raises
        ------
        SchemaError
            If the shape differs, or a value does not fit the dtype. A finite value never becomes infinite.
        """
        shape = leading + self.shape
        if type(value) is np.ndarray:
            if value.dtype == self.dtype and value.shape == shape and value.flags.c_contiguous:
                return value
        elif not shape:
            kind, needed = type(value), self.dtype.kind
            if kind is bool or (kind is int and needed != "b") or (kind is float and needed == "f"):
                try:
                    with np.errstate(over="raise"):
                        return np.array(value, self.dtype)
                except (OverflowError, FloatingPointError):
                    raise SchemaError(f"{name}: {value} does not fit {self.dtype}") from None
        array = _as_array(value, name, self, shape)
        if array.shape != shape:
            raise SchemaError(_mismatch(array, name, self, shape))
        return self._cast_values(array, name, shape)

    def _cast_values(self, array: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if array.dtype != self.dtype and array.size:
            came, needed = array.dtype.kind, self.dtype.kind
            if came not in "biuf" or (came == "f" and needed != "f"):
                raise SchemaError(_mismatch(array, name, self, shape))
            if not np.can_cast(array.dtype, self.dtype, "safe"):
                if needed == "f":
                    return _as_floats(array, self.dtype, name)
                low, high = (0, 1) if needed == "b" else (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
                least, most = int(array.min()), int(array.max())
                if least < low or most > high:
                    raise SchemaError(f"{name}: {least if least < low else most} does not fit {self.dtype}")
        # np.ascontiguousarray would add an axis to a scalar.
        return array.astype(self.dtype, order="C", copy=False)


def _as_floats(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Cast numbers to a float dtype; raises SchemaError if a finite number would become infinite."""
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype, order="C")
    except FloatingPointError:
        with np.errstate(over="ignore"):
            lost = array[np.isinf(array.astype(dtype)) & np.isfinite(array)]
        raise SchemaError(f"{name}: {lost[0]} does not fit {dtype}") from None


def _checked_shape(shape: Any) -> tuple[int, ...]:
    items = shape if isinstance(shape, (tuple, list)) else (shape,)
    try:
        sizes = tuple(map(operator.index, items))
    except TypeError:
        raise SchemaError(f"a field's shape is a tuple of integers, not {shape!r:.80}") from None
    if len(sizes) > MAX_DIMENSIONS or bool in map(type, items) or min(sizes, default=1) < 1:
        raise SchemaError(f"a field's shape is at most {MAX_DIMENSIONS} integers of 1 or more, not {shape!r:.80}")
    return sizes


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        # numpy reads None as float64, and "f4,f4" as a structured dtype.
        name = "None" if dtype is None else np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):
        name = repr(dtype)[:80]
    if name not in DTYPE_NAMES:
        raise SchemaError(f"a field's dtype is one of {', '.join(DTYPE_NAMES)}, not {name}")
    return np.dtype(name)


def _checked_space(space: Any) -> dict[str, Any]:
    if not isinstance(space, dict):
        raise SchemaError(f"a field's space is a dict or None, not {type(space).__name__}")
    try:
        # The space is converted to JSON and back, so that it equals the space that is later read from the disk.
        return dict(parse_json(json.dumps(space, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a field's space holds plain JSON only: {error}") from None


def _as_array(value: Any, name: str, needed: Field, shape: tuple[int, ...]) -> np.ndarray:
    try:
        if hasattr(value, "detach"):
            value = _tensor_to_numpy(value)
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SchemaError(f"{name}: {type(value).__name__} {error}; needs {needed.dtype} of shape {shape}") from None


def _tensor_to_numpy(tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    try:
        return tensor.numpy()
    except TypeError:
        # bfloat16 and the 8-bit floats have no numpy dtype; float32 holds all their values.
        return tensor.float().numpy()


def _mismatch(array: np.ndarray, name: str, needed: Field, shape: tuple[int, ...]) -> str:
    return f"{name}: got {array.dtype} of shape {array.shape}, needs {needed.dtype} of shape {shape}"


DtypeMap = Mapping[np.dtype[Any], np.dtype[Any]]


def dtype_map_argument(dtype_map: Any) -> DtypeMap:
    """Return ``dtype_map`` with numpy dtypes in place of their names; {} for None.

    Raises SchemaError if ``dtype_map`` is not a dict of dtypes, or maps floats to integers or bool.
    """
    if dtype_map is None:
        return {}
    if not isinstance(dtype_map, Mapping):
        raise SchemaError(f'dtype_map: needs a dict such as {{"float64": "float32"}}, not {dtype_map!r:.80}')
    found = {_checked_dtype(came): _checked_dtype(stored) for came, stored in dtype_map.items()}
    for came, stored in found.items():
        if came.kind == "f" and stored.kind != "f":
            raise SchemaError(f"dtype_map: {came} values cannot be stored as {stored}; map them to a float dtype")
    return found


def tree_from_space(space: Any, name: str, dtypes: DtypeMap) -> Any:
    """Convert a gymnasium space to a tree of fields; ``dtypes`` maps the space's dtypes to stored dtypes.

    ``name`` is the path of the space in the schema, for the error message. Raises SchemaError if a space cannot be
    stored.
    """
    with MissingExtra.raised_for("a schema of gymnasium spaces", "gym"):
        from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: tree_from_space(inner, f"{name}/{key}", dtypes) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(tree_from_space(inner, f"{name}/{i}", dtypes) for i, inner in enumerate(space.spaces))
    dtype = dtypes.get(space.dtype, space.dtype)
    if isinstance(space, spaces.Box):
        bounds = {"type": "Box", "low": _bounds(space.low, dtype), "high": _bounds(space.high, dtype)}
    elif isinstance(space, spaces.Discrete):
        bounds = {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    elif isinstance(space, spaces.MultiDiscrete):
        bounds = {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": _numbers(space.start)}
    elif isinstance(space, spaces.MultiBinary):
        bounds = {"type": "MultiBinary"}
    else:
        raise SchemaError(f"{name}: a {type(space).__name__} space cannot be stored; supported are {_SUPPORTED}")
    try:
        return Field(space.shape, dtype, bounds)
    except SchemaError as error:
        raise SchemaError(f"{name}: {error}") from None


def _bounds(values: np.ndarray, dtype: np.dtype[Any]) -> Any:
    """Return bounds as JSON, rounded to the stored dtype.

    Stored values are rounded in the same way, so they stay within the bounds.
    """
    if dtype.kind != "f":
        return _numbers(values)
    with np.errstate(over="ignore"):
        return _numbers(values.astype(dtype))


def tree_from_example(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: tree_from_example(inner, f"{name}/{key}") for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(tree_from_example(inner, f"{name}/{i}") for i, inner in enumerate(value))
    if isinstance(value, Field):
        raise SchemaError(f"{name}: an example is a value, not a Field; give Fields to Schema itself")
    try:
        array = np.asarray(_tensor_to_numpy(value) if hasattr(value, "detach") else value)
        is_typed = hasattr(value, "dtype")
        return Field(array.shape, array.dtype if is_typed or array.dtype.kind != "f" else "float32")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SchemaError(f"{name}: no field can be made of this {type(value).__name__}: {error}") from None


def _numbers(values: np.ndarray) -> Any:
    if values.size and (values == values.flat[0]).all():
        return _plain(values.flat[0].item())
    return _plain(values.tolist())


def _plain(value: Any) -> Any:
    """Return values with infinities and NaN as strings, because JSON has no numbers for them."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- values of a tuple of fields, in batches and episodes ------------------------------------------------------------


class TupleRecord(tuple[Any, ...]):
    """A tuple whose items also have the keys under which they are stored: ``pair["0"]`` is ``pair[0]``.

    Iterating and unpacking yield the items. ``keys``, ``values`` and ``items`` work as in a dict, so ``dict(pair)``
    works.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.keys():
            raise KeyError(key)
        return super().__getitem__(int(key))

    def __contains__(self, key: object) -> bool:
        """Return whether ``key`` is one of the keys if it is a str, or one of the values if it is not."""
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self))))

    def values(self) -> tuple[Any, ...]:
        return tuple(self)

    def items(self) -> tuple[tuple[str, Any], ...]:
        return tuple(zip(self.keys(), self, strict=True))
