"""Reading episodes of Minari from HDF5, Arrow and Parquet."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from diskreplay import FormatError, MissingExtra
from diskreplay.interop.minari.spaces import AnySpace

with MissingExtra.raised_for("a data set of Minari", "minari"):
    import pyarrow as pa
    import pyarrow.dataset as arrow_dataset
    from gymnasium import spaces
    from PIL import Image

    from diskreplay.interop.arrow_arrays import from_arrow

if TYPE_CHECKING:
    from minari.dataset.minari_storage import MinariStorage

__all__ = ["read_episodes"]

INFOS, METADATA, ENDS = "infos", "metadata", ("terminations", "truncations")

Raw = dict[str, Any]  # an episode as Minari has it, and its "metadata"


def read_episodes(storage: "MinariStorage", first: int) -> Iterator[Raw]:
    """Yield the episodes of a data set from number ``first`` on, each with its "metadata"."""
    numbers = range(first, storage.total_episodes)
    if storage.FORMAT == "hdf5":
        found: Iterator[Raw] = iter(storage.get_episodes(numbers))
    else:
        # Minari's own reader gives an episode of more than 131072 steps in parts.
        found = (_read_arrow(storage, number) for number in numbers)
    for raw, metadata in zip(found, storage.get_episode_metadata(numbers), strict=True):
        yield {**raw, INFOS: raw[INFOS] or {}, METADATA: metadata}


def _read_arrow(storage: "MinariStorage", number: int) -> Raw:
    folder = storage.data_path / str(number)
    try:
        files = sorted(folder.glob(f"*.{storage.FORMAT}"))
        table = arrow_dataset.dataset([str(file) for file in files], format=storage.FORMAT).to_table()
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"{folder} cannot be read: {error}") from error
    column = {name: _whole(table.column(name)) for name in table.column_names}
    is_jpeg = storage.jpeg_encoding
    return {
        "observations": _decode(storage.observation_space, column["observations"], is_jpeg),
        "actions": _decode(storage.action_space, column["actions"][:-1], is_jpeg),
        **{name: from_arrow(column[name][:-1], name) for name in ("rewards", *ENDS)},
        INFOS: _decode_infos(column[INFOS]) if INFOS in column else {},
    }


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
        return np.stack([np.asarray(Image.open(io.BytesIO(frame))) for frame in column.to_pylist()])
    rows = from_arrow(column, "of observations or actions")
    return rows.reshape(len(rows), *(space.shape or ()))


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
