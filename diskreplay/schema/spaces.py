"""One leaf of a schema: its shape and dtype, how a value is cast to it, and what becomes of a gymnasium space.

Of a tuple of fields, values have the keys under which the fields are stored.
"""

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
    """Describe one step's value of one leaf, without any leading axis.

    Parameters
    ----------
    shape : int or tuple of int
        Shape of one step's value; ``()`` is a scalar, an int is one axis.
    dtype : str or numpy.dtype
        bool, an integer of 8 to 64 bits, or a float of 16 to 64 bits.
    space : dict, optional
        Bounds of the space that the values come from, as plain JSON; enforced for actions
        where a store is created with ``validate="space"``.

    Raises
    ------
    SchemaError
        If the shape or dtype cannot be stored, or ``space`` is not JSON.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: dict[str, Any] | None
    row_bytes: int = field(repr=False, compare=False)

    def __init__(self, shape: Any, dtype: Any, space: dict[str, Any] | None = None) -> None:
        """Check and normalise the description."""
        set_once = object.__setattr__
        set_once(self, "shape", _checked_shape(shape))
        set_once(self, "dtype", _checked_dtype(dtype))
        set_once(self, "space", _checked_space(space))
        set_once(self, "row_bytes", math.prod(self.shape) * self.dtype.itemsize)
        if self.row_bytes > MAX_ROW_BYTES:
            raise SchemaError(f"a field has at most {MAX_ROW_BYTES} bytes a step, not {self.row_bytes}")

    def cast(self, value: Any, name: str, leading: tuple[int, ...] = ()) -> np.ndarray:
        """Turn a value into an array of exactly this field's dtype.

        Parameters
        ----------
        value : array-like or tensor
            Tensors are detached and copied to the CPU.
        name : str
            The leaf's path, for the error message.
        leading : tuple of int
            Axes before the field's shape, such as the number of environments.

        Returns
        -------
        numpy.ndarray
            ``(*leading, *shape)``, C-contiguous; the very value where it fits already.

        Raises
        ------
        SchemaError
            If the shape differs, or the values cannot enter the dtype: a finite one does not become infinite.
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
        # Not ascontiguousarray: it would give a scalar an axis.
        return array.astype(self.dtype, order="C", copy=False)


def _as_floats(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Return the numbers as floats of a dtype, or raise SchemaError where a finite one would become infinite."""
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
        sizes = tuple(operator.index(size) for size in items)
    except TypeError:
        raise SchemaError(f"a field's shape is a tuple of integers, not {shape!r:.80}") from None
    if len(sizes) > MAX_DIMENSIONS or any(isinstance(size, bool) or size < 1 for size in (*items, *sizes)):
        raise SchemaError(f"a field's shape is at most {MAX_DIMENSIONS} integers of 1 or more, not {shape!r:.80}")
    return sizes


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        # None would be float64 to numpy, "f4,f4" a record.
        name = "None" if dtype is None else np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):
        name = repr(dtype)[:80]
    if name not in DTYPE_NAMES:
        raise SchemaError(f"a field's dtype is one of {', '.join(DTYPE_NAMES)}, not {name}")
    return np.dtype(name)


def _checked_space(space: Any) -> dict[str, Any] | None:
    if space is None:
        return None
    if not isinstance(space, dict):
        raise SchemaError(f"a field's space is a dict or None, not {type(space).__name__}")
    try:
        # The round trip makes what is compared now equal to what is read back from disk.
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
    """Return which dtypes are stored as which others; SchemaError where values of one cannot enter the other."""
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
    """Turn a gymnasium space into a tree of fields, whose dtypes are the space's or what `dtypes` has for them.

    ``space`` is a Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these, nested; ``name`` the leaf's
    path, for the error message. Raises SchemaError if the space, or one inside it, is of another kind.
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
    """Return bounds as values at them are stored: rounded as these, no value is outside that was inside."""
    if dtype.kind != "f":
        return _numbers(values)
    with np.errstate(over="ignore"):
        return _numbers(values.astype(dtype))


def tree_from_example(value: Any, name: str) -> Any:
    """Turn one step's value into a tree of fields: see `Schema.from_example`."""
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
    """Spell what JSON has no number for: infinities and NaN."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


# --- values of a tuple of fields, as batches and episodes have them ---------------------------------------------------


class TupleRecord(tuple[Any, ...]):
    """A tuple whose items also have the keys that they are stored under: ``pair["0"]`` is ``pair[0]``.

    Iterating and unpacking give the items, ``keys`` and ``items`` are those of a dict: ``dict(pair)`` has both.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, key: SupportsIndex | str | slice) -> Any:
        """Return the item at a place or key; KeyError where there is no such key."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.keys():
            raise KeyError(key)
        return super().__getitem__(int(key))

    def __contains__(self, key: object) -> bool:
        """Tell whether there is an item of this key; of anything else, whether it is an item."""
        return key in self.keys() if isinstance(key, str) else super().__contains__(key)

    def keys(self) -> tuple[str, ...]:
        """Return "0", "1", ..., one key an item."""
        return tuple(map(str, range(len(self))))

    def values(self) -> tuple[Any, ...]:
        """Return the items."""
        return tuple(self)

    def items(self) -> tuple[tuple[str, Any], ...]:
        """Return keys and items, pair by pair."""
        return tuple(zip(self.keys(), self, strict=True))
