"""Read and write episodes of Minari in Arrow and Parquet.

A file has one row for each observation. In the row of a final observation, the action, the reward and the flags have no
meaning. The first row of the infos belongs to the reset.

Minari's own functions are slower: they copy arrays, and look at all files of the data set after each episode. Minari's
functions also read an episode of more than 131072 steps in parts.
"""

import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, MissingExtra
from diskreplay.interop.exchange.foreign import reading

with MissingExtra.raised_for("a data set of Minari", "minari"):
    import pyarrow as pa
    import pyarrow.dataset as arrow_dataset
    from gymnasium import Space, spaces
    from PIL import Image

    from diskreplay.interop.arrow_arrays import from_arrow, to_arrow

INFOS, METADATA, ENDS = "infos", "metadata", ("terminations", "truncations")

_IMAGES = ("JPEG", "PNG")

AnySpace = Space[Any]
Raw = dict[str, Any]  # an episode in Minari's form

_ARRAYS = spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary


# --- reading ---------------------------------------------------------------------------------------------------------


def read_file(
    folder: Path, data_format: str, observations: AnySpace, actions: AnySpace, is_jpeg: bool, steps: int
) -> Raw:
    """Return the episode of ``steps`` steps in a folder; arrays of an Arrow file are views of the mapped file."""
    with reading(folder):
        table = _read_table(folder, data_format)
    if table.num_rows not in (steps, steps + 1):
        raise FormatError(f"{folder} has {table.num_rows} observations, and its metadata.json says {steps} steps")
    column = {name: _whole(table.column(name)) for name in table.column_names}
    return {
        "observations": _decode(observations, column["observations"], is_jpeg),
        "actions": _decode(actions, column["actions"][:steps], is_jpeg),
        **{name: from_arrow(column[name][:steps], name) for name in ("rewards", *ENDS)},
        INFOS: _decode_infos(column[INFOS]) if INFOS in column else {},
    }


def _read_table(folder: Path, data_format: str) -> Any:
    files = sorted(map(str, folder.glob(f"*.{data_format}")))
    if not files:
        raise FileNotFoundError(f"there is no .{data_format} file in it")
    if data_format != "arrow":
        return arrow_dataset.dataset(files, format=data_format).to_table()
    table = pa.concat_tables([pa.ipc.open_file(pa.memory_map(file)).read_all() for file in files])
    table.validate(full=True)  # offsets in a damaged file could point outside of the mapping
    return table


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _decode(space: AnySpace, column: Any, is_jpeg: bool) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _decode(inner, column.field(key), is_jpeg) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_decode(inner, column.field(str(i)), is_jpeg) for i, inner in enumerate(space.spaces))
    if isinstance(space, spaces.Text):
        return column.to_pylist()
    if is_jpeg and pa.types.is_binary(column.type):
        return decode_images(column.to_pylist())
    rows = from_arrow(column, "of observations or actions")
    return rows.reshape(len(rows), *(space.shape or ()))


def decode_images(files: Iterable[bytes]) -> NDArray[Any]:
    return np.stack([np.asarray(Image.open(io.BytesIO(file), formats=_IMAGES)) for file in files])


def _decode_infos(column: Any) -> Raw:
    found: Raw = {}
    for at, field in enumerate(column.type):
        values = column.field(at)
        if pa.types.is_struct(field.type):
            found[field.name] = _decode_infos(values)
        elif values.null_count or pa.types.is_string(field.type) or pa.types.is_list(field.type):
            found[field.name] = values.to_pylist()
        else:
            rows = from_arrow(values, field.name)
            shape = (field.metadata or {}).get(b"shape")
            sizes = [] if not shape else [int(size) for size in shape.split(b",")]
            found[field.name] = rows if shape is None else rows.reshape(len(rows), *sizes)
    return found


# --- writing ---------------------------------------------------------------------------------------------------------


def write_file(folder: Path, data_format: str, observations: AnySpace, actions: AnySpace, raw: Raw) -> None:
    rows = len(raw["rewards"]) + 1
    columns = {
        "observations": _encode(observations, raw["observations"], rows),
        "actions": _encode(actions, raw["actions"], rows),
        **{name: to_arrow(_padded(raw[name], rows)) for name in ("rewards", *ENDS)},
    }
    if raw[INFOS]:
        columns[INFOS] = _encode_infos(raw[INFOS])
    batch = pa.RecordBatch.from_pydict(columns)
    arrow_dataset.write_dataset(batch, folder, format=data_format)


def _encode(space: AnySpace, values: Any, rows: int) -> Any:
    """Encode values as an Arrow column of ``rows`` rows; rows after the last value are zeros or nulls."""
    if isinstance(space, spaces.Dict):
        return _struct({key: _encode(inner, values[key], rows) for key, inner in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return _struct({str(i): _encode(inner, values[i], rows) for i, inner in enumerate(space.spaces)})
    if isinstance(space, spaces.Text):
        return pa.array([*values, *[None] * (rows - len(values))])
    padded = _padded(np.asarray(values, space.dtype), rows)
    return to_arrow(padded.reshape(rows, math.prod(space.shape or ())) if isinstance(space, _ARRAYS) else padded)


def _padded(values: NDArray[Any], rows: int) -> NDArray[Any]:
    if len(values) == rows:
        return values
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded


def _struct(columns: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Any:
    fields = [pa.field(name, column.type, metadata=(metadata or {}).get(name)) for name, column in columns.items()]
    return pa.StructArray.from_arrays(list(columns.values()), fields=fields)


def _encode_infos(infos: Mapping[str, Any]) -> Any:
    columns, shapes = {}, {}
    for name, values in infos.items():
        if isinstance(values, Mapping):
            columns[name] = _encode_infos(values)
        elif isinstance(values, tuple):
            columns[name] = _encode_infos({str(i): value for i, value in enumerate(values)})
        elif isinstance(values, np.ndarray):
            columns[name] = to_arrow(values.reshape(len(values), -1) if values.ndim > 1 else values)
            if values.ndim > 1:
                shapes[name] = {"shape": ",".join(map(str, values.shape[1:]))}
        else:
            columns[name] = pa.array(list(values))
    return _struct(columns, shapes)
