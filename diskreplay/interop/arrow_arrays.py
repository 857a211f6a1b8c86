"""Convert NumPy arrays to Arrow columns and back, without a loop over rows.

A field with a shape becomes nested lists of fixed size, so that any reader of Arrow sees the shape. Large fields, such
as images, can be columns of bytes, because Parquet takes several times as long for lists.
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from diskreplay import FormatError

Shape = tuple[int, ...]


def to_arrow(rows: NDArray[Any]) -> pa.Array:
    """Convert an array ``(n, *shape)`` to a column of n numbers, or of n nested lists of fixed size."""
    column = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def to_arrow_bytes(rows: NDArray[Any]) -> pa.Array:
    """Convert an array ``(n, *shape)`` to a column of n binary values: the bytes of each row, in C order."""
    data = np.ascontiguousarray(rows)
    row_bytes = math.prod(rows.shape[1:]) * rows.dtype.itemsize
    return pa.Array.from_buffers(pa.binary(row_bytes), len(rows), [None, pa.py_buffer(data)])


def from_arrow_bytes(column: pa.Array | pa.ChunkedArray, name: str, dtype: np.dtype[Any], shape: Shape) -> NDArray[Any]:
    """Convert a column of bytes of fixed size to an array ``(n, *shape)``.

    FormatError is raised if the column has another type, or has nulls.
    """
    row_bytes = math.prod(shape) * dtype.itemsize
    if column.type != pa.binary(row_bytes):
        raise FormatError(f"the column {name} has values of the type {column.type}, not of {row_bytes} bytes each")
    parts = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = []
    for part in parts:
        _check_complete(part, name)
        start = part.offset * row_bytes
        data = np.frombuffer(part.buffers()[1], np.uint8)[start : start + len(part) * row_bytes]
        arrays.append(data.view(dtype).reshape(len(part), *shape))
    return arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty((0, *shape), dtype)])


def with_missing(column: pa.Array, is_present: NDArray[np.bool_]) -> pa.Array:
    """Spread the rows of ``column``, in order, over the rows where ``is_present`` is true; all other rows are null.

    In a column of lists, a null row is a list of nulls, since pyarrow before 26 cannot write a null list of fixed size.
    """
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        return pa.FixedSizeListArray.from_arrays(with_missing(column.flatten(), np.repeat(is_present, size)), size)
    return column.take(pa.array(np.cumsum(is_present) - 1, pa.int64(), mask=~is_present))


def without_missing(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, NDArray[np.bool_]]:
    """Return the rows of a column that are neither null nor a list of nulls, and a mask of these rows in the column."""
    is_present: NDArray[np.bool_] = column.is_valid().to_numpy()
    rows = numbers = column.drop_null()
    while pa.types.is_fixed_size_list(numbers.type):
        numbers = pa.chunked_array([chunk.flatten() for chunk in numbers.chunks], numbers.type.value_type)
    if numbers.null_count:
        complete = numbers.is_valid().to_numpy()
        # If some inner lists are null, leave the rows as they are: `from_arrow` refuses them.
        if len(complete) % len(rows) == 0:
            kept = complete.reshape(len(rows), -1).any(axis=1)
            rows, is_present[is_present] = rows.filter(pa.array(kept)), kept
    return rows, is_present


def from_arrow(column: pa.Array | pa.ChunkedArray, name: str) -> NDArray[Any]:
    """Convert a column of numbers, or of nested lists of fixed size, to an array ``(n, *shape)``.

    FormatError is raised if the column has another type, or has nulls.
    """
    parts = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    shape = _shape(column.type, name)
    arrays = [_part(part, shape, name) for part in parts]
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else _part(pa.array([], column.type), shape, name)


def _shape(kind: pa.DataType, name: str) -> Shape:
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise FormatError(f"the column {name} has values of the type {kind}, which cannot become an array")
    return tuple(shape)


def _part(part: pa.Array, shape: Shape, name: str) -> NDArray[Any]:
    count = len(part)
    for _ in shape:
        _check_complete(part, name)
        part = part.flatten()
    _check_complete(part, name)
    values: NDArray[Any] = part.to_numpy(zero_copy_only=not pa.types.is_boolean(part.type))
    assert len(values) == count * math.prod(shape)
    return values.reshape(count, *shape)


def _check_complete(part: pa.Array, name: str) -> None:
    if part.null_count:
        raise FormatError(f"the column {name} has {part.null_count} null values")
