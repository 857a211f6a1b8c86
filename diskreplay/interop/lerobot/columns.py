"""Convert columns of a parquet table to arrays of steps, and back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from diskreplay import FormatError
from diskreplay.interop import arrow_arrays
from diskreplay.interop.exchange.episode_data import Json
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.features import Column, sides_of

Array = NDArray[Any]

_FILES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
Texts = Mapping[str, Sequence[str]]


def arrow_type(column: Column) -> pa.DataType:
    if column.kind == "image":
        return _FILES
    if column.kind == "text":
        return pa.string()
    value, shape = pa.from_numpy_dtype(column.field.dtype), column.shape
    if shape == (1,):
        return value
    if len(shape) == 1:
        return pa.list_(value, shape[0])
    for _ in shape:
        value = pa.list_(value)
    return value


def library_type(column: Column) -> dict[str, Json]:
    """Return the type of a column for the library `datasets`, as JSON: without a type, `datasets` reads plain lists."""
    if column.kind == "image":
        return {"_type": "Image"}
    dtype, shape = "string" if column.kind == "text" else column.field.dtype.name, column.shape
    value = {"dtype": dtype, "_type": "Value"}
    if shape == (1,) or column.kind == "text":
        return value
    if len(shape) == 1:
        return {"feature": value, "length": shape[0], "_type": "List"}
    return {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}


def to_arrow(column: Column, rows: Array, texts: Texts) -> pa.Array:
    """Convert rows ``(T, *shape)`` to an Arrow column; ``texts`` has the texts of each text feature, by name."""
    if column.kind == "image":
        files = images.to_png(images.as_rows_first(rows, column.channels_first))
        names = [f"frame-{t:06d}.png" for t in range(len(files))]
        return pa.StructArray.from_arrays(
            [pa.array(files, pa.binary()), pa.array(names, pa.string())], fields=list(_FILES)
        )
    if column.kind == "text":
        return pa.array(np.asarray(texts[column.key], object)[rows], pa.string())
    rows = rows.reshape(len(rows), *column.shape)
    if len(column.shape) > 1:
        return nested_lists(rows)
    return arrow_arrays.to_arrow(rows[:, 0] if column.shape == (1,) else rows)


def nested_lists(rows: Array) -> pa.Array:
    """Convert rows ``(T, *shape)`` to nested lists of variable length, which `datasets` uses for arrays."""
    values = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for axis in range(rows.ndim - 1, 0, -1):
        count = int(np.prod(rows.shape[:axis], dtype=np.int64))
        values = pa.ListArray.from_arrays(np.arange(count + 1, dtype=np.int32) * rows.shape[axis], values)
    return values


def from_arrow(column: Column, values: pa.ChunkedArray, texts: Texts, what: str) -> Array:
    """Convert an Arrow column to rows ``(T, *shape)`` of a leaf."""
    if column.kind == "text":
        codes = pc.index_in(values, value_set=pa.array(texts[column.key], pa.string()))
        return _plain(codes, what).astype(np.int64)
    if column.kind == "image":
        return _from_files(column, values, what)
    count, flat = len(values), values.combine_chunks()
    if isinstance(flat, pa.ChunkedArray):  # no chunk, or too many bytes for one chunk
        flat = pa.concat_arrays(flat.chunks) if flat.num_chunks else pa.array([], flat.type)
    size = int(np.prod(column.shape, dtype=np.int64))
    lengths = column.shape if pa.types.is_nested(flat.type) else ()
    for length in lengths:
        if not _is_list(flat.type):
            raise _mismatch(column, values.type, what)
        if flat.null_count or (len(flat) and not _all_of_length(flat, length)):
            raise FormatError(f"{what} has rows that are not of the shape {column.shape}, which info.json says")
        flat = flat.flatten()
    if _is_list(flat.type) or (not lengths and size != 1):
        raise _mismatch(column, values.type, what)
    array = _plain(flat, what)
    if array.dtype != column.field.dtype:
        raise _mismatch(column, values.type, what)
    return array.reshape(count, *column.field.shape)


def _from_files(column: Column, values: pa.ChunkedArray, what: str) -> Array:
    if not pa.types.is_struct(values.type) or values.type.get_field_index("bytes") < 0:
        raise _mismatch(column, values.type, what)
    files = pc.struct_field(values, "bytes").to_pylist()
    first = column.channels_first
    shape = (*sides_of(column.field.shape), column.field.shape[0 if first else 2])
    return images.as_stored(images.from_files(files, shape, what), first)


def _plain(values: pa.Array, what: str) -> Array:
    if values.null_count:
        raise FormatError(f"{what} has rows without a value")
    array: Array = values.to_numpy(zero_copy_only=False)
    return array


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in kinds)


def _all_of_length(lists: pa.Array, length: int) -> bool:
    if pa.types.is_fixed_size_list(lists.type):
        size: int = lists.type.list_size
        return size == length
    sizes: NDArray[np.int64] = pc.list_value_length(lists).to_numpy()
    return bool((sizes == length).all())


def _mismatch(column: Column, kind: pa.DataType, what: str) -> FormatError:
    wanted = "images" if column.kind == "image" else f"{column.field.dtype} of the shape {column.shape}"
    return FormatError(f"{what} is of type {kind}, but info.json says {wanted}")
