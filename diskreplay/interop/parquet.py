"""Data sets of Parquet files: a table of steps and a table of episodes, with all data of a store.

``steps/`` has files with one row for each step. The columns ``episode`` and ``step`` are numbers from 0. Each leaf of a
step has a column. The leaf's path is the name of the column, such as ``obs/image`` or ``extra/log_prob``. A field with
a shape is stored as a nested list of fixed size. A field of more than 256 numbers is stored as bytes of fixed size, in
C order: bytes are read several times as fast as lists. The column ``priority`` exists if steps were appended with
priorities.

``episodes/`` has files with one row for each episode. The columns are ``episode``, ``length``, ``terminated``,
``truncated``, episode fields such as ``episode/seed``, and ``notes`` as JSON text. Columns with the paths of
observations, such as ``obs/image``, have the observation after the episode's last step. An episode that is neither
terminated nor truncated was cut. A missing value is null or, if the field has a shape, a nested list with null for each
number.

``dataset.json`` has the schema, as `docs/format.md` describes it. The files in ``steps/`` also have the schema in
their metadata.

An export marks hidden steps in the column ``hidden`` of ``steps/``. An import does not read this column.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, MissingExtra, Schema, Store
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.description import DescribedSource, describe
from diskreplay.interop.exchange.episode_data import HIDDEN, PRIORITY, EpisodeData, is_obs
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.foreign import reading
from diskreplay.interop.exchange.importing import Imported, import_into
from diskreplay.interop.exchange.threads import read_ahead, write_behind
from diskreplay.interop.step_values import as_flags

with MissingExtra.raised_for("a data set of Parquet", "parquet"):
    import pyarrow as pa
    from pyarrow import parquet

    from diskreplay.interop.arrow_arrays import (
        from_arrow,
        from_arrow_bytes,
        to_arrow,
        to_arrow_bytes,
        with_missing,
        without_missing,
    )

__all__ = ["export_dataset", "import_dataset"]

NAME = "parquet"
_COMPRESSIONS = "snappy", "zstd", "gzip", "brotli", "lz4", "none"
_STEPS, _EPISODES = "steps", "episodes"
_EPISODE, _STEP, _LENGTH, _TERMINATED, _TRUNCATED, _NOTES = (
    *("episode", "step", "length"),
    *("terminated", "truncated", "notes"),
)
_MOST_LISTED = 256  # a field of at most this many numbers is written as lists, and a larger field as bytes
_FILE_BYTES = 16 << 20  # a file is written when its episodes take this number of bytes


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a folder of Parquet files into a new store, or resume an interrupted import.

    Parameters
    ----------
    source : path
        The folder that `export_dataset` wrote.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this folder.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such data set.
    FormatError
        The data set cannot be read.
    StoreExists
        Something else is at ``path``.
    """
    return import_into(path, source, _DataSet, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    compression: str | None = "snappy",
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a folder of Parquet files.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    compression : str or None
        A compression of pyarrow: "snappy", "zstd", "gzip", "brotli" or "lz4". None, or "none": no compression.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        Something is at ``path``.
    SchemaError
        ``compression`` is not one of the values above.
    """
    kind = "none" if compression is None else compression
    check_option("compression", kind, _COMPRESSIONS)
    made = Format({}, partial(_write, kind), marks_hidden=True)
    return export_from(store_or_path, path, lambda *_: made, options)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write(compression: str, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    for name in (_STEPS, _EPISODES):
        (plan.path / name).mkdir(parents=True)

    def write_files(first: int, some: list[EpisodeData]) -> None:
        for name, table in ((_STEPS, _steps(plan.schema, first, some)), (_EPISODES, _ends(plan.schema, first, some))):
            file = plan.path / name / f"{first:08d}.parquet"
            # Most values are floats, and few of them are equal, so dictionary encoding does not help.
            parquet.write_table(table, file, compression=compression, use_dictionary=False)

    write_behind(episodes, write_files, _FILE_BYTES)
    describe(plan, NAME)


def _steps(schema: Schema, first: int, episodes: list[EpisodeData]) -> pa.Table:
    lengths = [len(episode) for episode in episodes]
    columns: dict[str, pa.Array] = {
        _EPISODE: pa.array(np.repeat(np.arange(first, first + len(lengths)), lengths)),
        _STEP: pa.array(np.concatenate([np.arange(length) for length in lengths])),
    }
    columns[HIDDEN] = pa.array(np.concatenate([episode.hidden for episode in episodes]))
    for path, leaf in schema.step_leaves.items():
        rows = [episode.steps[path][: len(episode)] for episode in episodes]
        columns[path] = _column(leaf, _joined(rows))
    if any(episode.priority is not None for episode in episodes):
        given = [np.full(len(each), np.nan) if each.priority is None else each.priority for each in episodes]
        columns[PRIORITY] = to_arrow(np.concatenate(given))
    about = {"diskreplay": json.dumps(schema.to_json())}
    return pa.table(columns).replace_schema_metadata(about)


def _ends(schema: Schema, first: int, episodes: list[EpisodeData]) -> pa.Table:
    columns: dict[str, pa.Array] = {
        _EPISODE: pa.array(range(first, first + len(episodes)), pa.int64()),
        _LENGTH: pa.array([len(episode) for episode in episodes], pa.int64()),
        _TERMINATED: pa.array([episode.terminated for episode in episodes], pa.bool_()),
        _TRUNCATED: pa.array([episode.truncated for episode in episodes], pa.bool_()),
    }
    has_final = np.array([episode.has_final_obs for episode in episodes])
    for path, leaf in schema.leaves.items():
        if is_obs(path):
            values, there = [each.steps[path][-1] for each in episodes if each.has_final_obs], has_final
        elif path not in schema.step_leaves:
            there = np.array([path in episode.fields for episode in episodes])
            values = [episode.fields[path] for episode in episodes if path in episode.fields]
        else:
            continue
        rows = np.array(values, leaf.dtype).reshape(len(values), *leaf.shape)
        columns[path] = with_missing(_column(leaf, rows), there)
    notes = [None if episode.notes is None else json.dumps(episode.notes) for episode in episodes]
    columns[_NOTES] = pa.array(notes, pa.string())
    return pa.table(columns)


def _joined(rows: list[NDArray[Any]]) -> NDArray[Any]:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _is_wide(leaf: Field) -> bool:
    return int(np.prod(leaf.shape)) > _MOST_LISTED


def _column(leaf: Field, rows: NDArray[Any]) -> pa.Array:
    return to_arrow_bytes(rows) if _is_wide(leaf) else to_arrow(rows)


# --- reading ---------------------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """The schema of a data set, and the paths of the leaves that the options keep."""

    schema: Schema
    paths: Collection[str]

    @property
    def steps(self) -> dict[str, Field]:
        return {path: leaf for path, leaf in self.schema.step_leaves.items() if path in self.paths}

    @property
    def episodes(self) -> dict[str, Field]:
        """The kept leaves in the table of episodes, by path: final observations and episode fields."""
        of_episodes = {path: leaf for path, leaf in self.schema.leaves.items() if path in self.paths}
        return {path: leaf for path, leaf in of_episodes.items() if is_obs(path) or path not in self.steps}


def _files(folder: Path) -> list[Path]:
    """Return the files of the table of episodes, in the order of episodes. Files of steps have the same names."""
    return sorted((folder / _EPISODES).glob("[0-9]*.parquet"))


class _DataSet(DescribedSource):
    format = NAME

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        kept, files = _Wanted(self.schema, wanted), _files(self.place)
        starts = [int(file.stem) for file in files]  # the name of a file is the number of its first episode
        spans = [span for span in zip(files, starts, [*starts[1:], self.episodes], strict=True) if span[2] > first]
        if not spans or spans[0][1] > first:
            raise FormatError(f"{self.place} has no file of episode {first}")
        tables = read_ahead(partial(_tables, self.place, file.name, kept) for file, _, _ in spans)
        for (file, start, stop), (steps, ends) in zip(spans, tables, strict=True):
            if ends.num_rows > stop - start:
                raise FormatError(f"{file} has {ends.num_rows} episodes, more than the expected {stop - start}")
            yield from _episodes(self.place / _STEPS / file.name, steps, ends, kept, max(first - start, 0))
            if ends.num_rows < stop - start:
                raise FormatError(f"{self.place} has no file of episode {start + ends.num_rows}")


def _tables(folder: Path, name: str, wanted: _Wanted) -> tuple[pa.Table, pa.Table]:
    columns = {_STEPS: [_EPISODE, _STEP, *wanted.steps, PRIORITY]}
    columns[_EPISODES] = [_EPISODE, *wanted.episodes, _LENGTH, _TERMINATED, _TRUNCATED, _NOTES]
    tables = []
    for kind, names in columns.items():
        file = folder / kind / name
        with reading(file), parquet.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            tables.append(opened.read([column for column in names if column in there]))
    return tables[0], tables[1]


def _episodes(path: Path, steps: pa.Table, ends: pa.Table, wanted: _Wanted, skipped: int) -> Iterator[EpisodeData]:
    lacking = [leaf for leaf in wanted.steps if leaf not in steps.column_names]
    if lacking:
        raise FormatError(f"{path} has no column {lacking[0]}")
    rows = {path: _array(steps.column(path), path, leaf) for path, leaf in wanted.steps.items()}
    priority = from_arrow(steps.column(PRIORITY), PRIORITY) if PRIORITY in steps.column_names else None
    beside = {path: _with_places(ends.column(path), path, leaf) for path, leaf in wanted.episodes.items()}
    stops = np.cumsum(_lengths(path, steps, ends))
    terminated, truncated = (
        as_flags(from_arrow(ends.column(key), key), key, FormatError) for key in (_TERMINATED, _TRUNCATED)
    )
    notes = ends.column(_NOTES).to_pylist()
    for at in range(skipped, len(stops)):
        part = slice(int(stops[at - 1]) if at else 0, int(stops[at]))
        found = {path: values[places[at]] for path, (values, places) in beside.items() if places[at] >= 0}
        given = None if priority is None or np.isnan(priority[part]).all() else priority[part]
        yield EpisodeData(
            {path: _with_final(values[part], found.get(path)) for path, values in rows.items()},
            bool(terminated[at]),
            bool(truncated[at]),
            {path: value for path, value in found.items() if not is_obs(path)},
            given,
            None if notes[at] is None else parse_json(notes[at]),
        )


def _lengths(path: Path, steps: pa.Table, ends: pa.Table) -> NDArray[Any]:
    """Return the number of steps of each episode; raise FormatError if ``steps`` has other rows or another order."""
    lengths = from_arrow(ends.column(_LENGTH), _LENGTH)
    if lengths.dtype.kind not in "iu" or (lengths < 1).any() or int(lengths.sum()) != steps.num_rows:
        raise FormatError(f"{path} has {steps.num_rows} rows, and its episodes have the lengths {lengths[:8].tolist()}")
    if {_EPISODE, _STEP} <= {*steps.column_names} and _EPISODE in ends.column_names:
        numbers, at = (from_arrow(steps.column(name), name) for name in (_EPISODE, _STEP))
        wrong = numbers != np.repeat(from_arrow(ends.column(_EPISODE), _EPISODE), lengths)
        wrong |= at != np.concatenate([np.arange(length) for length in lengths])
        if wrong.any():
            first = int(np.argmax(wrong))
            raise FormatError(
                f"row {first} of {path} is step {at[first]} of episode {numbers[first]}: the rows are out of order"
            )
    return lengths


def _array(column: Any, path: str, leaf: Field) -> NDArray[Any]:
    rows = from_arrow_bytes(column, path, leaf.dtype, leaf.shape) if _is_wide(leaf) else from_arrow(column, path)
    if rows.shape[1:] != leaf.shape:
        raise FormatError(f"the column {path} has rows of shape {rows.shape[1:]}, not {leaf.shape}")
    return rows


def _with_places(column: Any, path: str, leaf: Field) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return a column's values without nulls, and the index of each row's value; -1 for a null row."""
    rows, there = without_missing(column)
    return _array(rows, path, leaf), np.where(there, np.cumsum(there) - 1, -1)


def _with_final(rows: NDArray[Any], final: NDArray[Any] | None) -> NDArray[Any]:
    return rows if final is None else np.concatenate([rows, final[None]])
