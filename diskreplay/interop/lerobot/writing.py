"""Write a LeRobot data set of version 3.0.

A file holds consecutive episodes, up to about 100 MB. File k of ``meta/episodes`` lists the episodes in file k of
``data`` and in file k of each video feature.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diskreplay import Field
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.episode_data import EpisodeData, Json
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.columns import arrow_type, library_type, nested_lists, to_arrow
from diskreplay.interop.lerobot.features import (
    COUNTERS,
    DONE,
    EPISODE,
    FRAME,
    INDEX,
    TASK,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    Column,
    sides_of,
)
from diskreplay.interop.lerobot.metadata import DATA_PATH, EPISODES, FILE, INFO, STATS, TASKS, VIDEO_PATH

Array = NDArray[Any]
Numbers = NDArray[np.float64]
Statistics = dict[str, Numbers]

_FILES_A_CHUNK = 1000
_DATA_MB, _VIDEO_MB = 100, 200
_EPISODES_A_FILE = 8192
_STATS = "stats/"
# At most `_MOST_IMAGES` images of an episode are used for statistics. Images with a side of more than `_LONGEST_SIDE`
# pixels are subsampled.
_MOST_IMAGES, _LONGEST_SIDE = 64, 128


@dataclass(frozen=True)
class Contents:
    """The contents of a data set to write.

    Attributes
    ----------
    fields : dict of str to str
        Names of columns in the table of episodes, by the path of the episode field.
    flags : tuple of str
        The names of the columns that tell how episodes ended.
    task : str
        The text of the task, if ``noted`` has no tasks.
    noted : dict
        The metadata of the LeRobot data set that the store was imported from; empty for other stores.
    """

    columns: list[Column]
    fields: Mapping[str, str]
    flags: tuple[str, ...]
    fps: float
    task: str
    noted: Mapping[str, Json] = field(default_factory=dict)

    @property
    def stored(self) -> list[Column]:
        """The columns in the files of steps: leaves except videos, ``flags``, and `COUNTERS` that are not leaves."""
        made = [Column(name, "", Field((), "bool")) for name in self.flags]
        made += [Column(name, "", leaf) for name, leaf in COUNTERS.items() if name not in self._keys]
        return [column for column in self.columns if column.kind != "video"] + made

    @property
    def videos(self) -> list[Column]:
        return [column for column in self.columns if column.kind == "video"]

    @property
    def _keys(self) -> set[str]:
        return {column.key for column in self.columns}

    @property
    def texts(self) -> Mapping[str, Sequence[str]]:
        """The list of texts of each text feature, by the feature's name."""
        texts: Mapping[str, Sequence[str]] = self.noted.get("texts", {})
        return texts

    @property
    def tasks(self) -> dict[int, str]:
        noted = {int(number): text for number, text in self.noted.get("tasks", {}).items()}
        return noted or {0: self.task}


def write(contents: Contents, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    with closing(_DataSet(plan, contents)) as data_set:
        for episode in episodes:
            data_set.add(episode)
        data_set.finish()


class _DataSet:
    def __init__(self, plan: Plan, contents: Contents) -> None:
        self._root, self._plan, self._contents = plan.path, plan, contents
        self._stored, self._videos = contents.stored, contents.videos
        made = COUNTERS.keys() - {column.key for column in contents.columns}
        self._counted = [
            each for each in (*self._stored, *self._videos) if each.kind != "text" and each.key not in made
        ]
        self._schema = _arrow_schema(self._stored)
        self._tasks = contents.tasks
        self._episodes = self._rows = self._number = 0
        self._statistics: dict[str, Statistics] = {}
        self._file: _File | None = None

    def add(self, episode: EpisodeData) -> None:
        if self._file is None:
            self._file = _File(self._root, self._number, self._schema, self._videos, self._contents.fps)
        length = len(episode)
        rows = {column.key: episode.steps[column.path] for column in self._contents.columns}
        rows |= self._flags(episode)
        counters = {name: values for name, values in self._counters(length).items() if name not in rows}
        counted = {name: _of_counter(each[0], each[-1], length) for name, each in counters.items()}
        rows |= counters
        tasks = self._texts_of(rows[TASK])
        found = {each.key: _of_column(each, rows[each.key]) for each in self._counted} | counted
        arrays = [to_arrow(column, rows[column.key], self._contents.texts) for column in self._stored]
        line: dict[str, Any] = {EPISODE: self._episodes, "tasks": tasks, "length": length}
        line |= {"dataset_from_index": self._rows, "dataset_to_index": self._rows + length}
        line |= {name: _as_list(episode.fields.get(path)) for path, name in self._contents.fields.items()}
        line |= self._file.add(pa.Table.from_arrays(arrays, schema=self._schema), rows)
        self._file.lines.append(line)
        self._file.statistics.append(found)
        self._episodes, self._rows = self._episodes + 1, self._rows + length
        if self._file.is_full:
            self._close_file()

    def finish(self) -> None:
        self._close_file()
        meta = self._root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        pq.write_table(_tasks_table(self._tasks), self._root / TASKS)
        found = _as_json(self._statistics)
        noted = parse_json(self._contents.noted.get("stats") or "{}")
        stats = noted if _agree(self._statistics, noted) else found
        (self._root / STATS).write_text(json.dumps(stats, indent=4))
        (self._root / INFO).write_text(json.dumps(self._info(), indent=4, ensure_ascii=False), encoding="utf-8")

    def close(self) -> None:
        """After an error, close the files that `finish` has not closed."""
        if self._file is not None:
            self._file.close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._merge(self._file.finish(self._fields()))
            self._file = None
            self._number += 1

    def _fields(self) -> dict[str, pa.DataType]:
        leaves = self._plan.schema.leaves
        kinds = {name: arrow_type(Column(name, path, leaves[path])) for path, name in self._contents.fields.items()}
        # An episode may lack a field, and pyarrow before 26 cannot write a null in a column of lists of fixed size.
        return {
            name: pa.list_(kind.value_type) if pa.types.is_fixed_size_list(kind) else kind
            for name, kind in kinds.items()
        }

    def _flags(self, episode: EpisodeData) -> dict[str, Array]:
        ends = {
            DONE: episode.terminated or episode.truncated,
            TERMINATED: episode.terminated,
            TRUNCATED: episode.truncated,
        }
        rows = {name: np.zeros(len(episode), np.bool_) for name in self._contents.flags}
        for name, flags in rows.items():
            flags[-1] = ends[name]
        return rows

    def _counters(self, length: int) -> dict[str, Array]:
        frames = np.arange(length)
        return {
            TIMESTAMP: (frames / self._contents.fps).astype(np.float32),
            FRAME: frames,
            EPISODE: np.full(length, self._episodes),
            INDEX: frames + self._rows,
            TASK: np.zeros(length, np.int64),
        }

    def _texts_of(self, numbers: Array) -> list[str]:
        unique = dict.fromkeys(numbers.tolist())
        return [self._tasks.setdefault(number, str(number)) for number in unique]

    def _merge(self, found: Mapping[str, Statistics]) -> None:
        for key, each in found.items():
            parts = [_merged(each)] + ([self._statistics[key]] if key in self._statistics else [])
            self._statistics[key] = _merged(_stacked(parts))

    def _info(self) -> dict[str, Json]:
        noted, fps = self._contents.noted.get("info", {}), self._contents.fps
        known: Mapping[str, Json] = noted.get("features", {})
        features = {each.key: each.feature(known.get(each.key)) for each in (*self._contents.columns, *self._stored)}
        for column in self._videos:
            features[column.key]["info"] = images.video_info(sides_of(column.field.shape), fps)
        old = {"total_chunks", "total_videos"}
        return {
            **{name: value for name, value in noted.items() if name not in old},
            "codebase_version": "v3.0",
            "robot_type": noted.get("robot_type"),
            "total_episodes": self._episodes,
            "total_frames": self._rows,
            "total_tasks": len(self._tasks),
            "chunks_size": _FILES_A_CHUNK,
            "data_files_size_in_mb": _DATA_MB,
            "video_files_size_in_mb": _VIDEO_MB,
            "fps": int(fps) if fps == int(fps) else fps,
            "splits": {"train": f"0:{self._episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._videos else None,
            "features": features,
        }


class _File:
    """The files of consecutive episodes: steps, videos, and a part of the table of episodes."""

    def __init__(self, root: Path, number: int, schema: pa.Schema, videos: Sequence[Column], fps: float) -> None:
        self._root, self._number, self._fps = root, number, fps
        self.lines: list[dict[str, Any]] = []
        self.statistics: list[dict[str, Statistics]] = []
        path = root / "data" / _file_name(number, "parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = pa.OSFile(str(path), "wb")
        # Columns of floats are not dictionary-encoded, since most of their values are different.
        few = [
            each.name for each in schema if not pa.types.is_nested(each.type) and not pa.types.is_floating(each.type)
        ]
        self._writer = pq.ParquetWriter(self._sink, schema, compression="snappy", use_dictionary=few)
        self._videos = {column.key: (column, self._open(column)) for column in videos}

    @property
    def is_full(self) -> bool:
        largest = max((writer.nbytes for _, writer in self._videos.values()), default=0)
        return (
            self._sink.tell() >= _DATA_MB << 20 or largest >= _VIDEO_MB << 20 or len(self.lines) + 1 >= _EPISODES_A_FILE
        )

    def add(self, table: pa.Table, rows: Mapping[str, Array]) -> dict[str, Json]:
        """Append an episode as a row group; return the episode's files and times for the table of episodes."""
        chunk, file = divmod(self._number, _FILES_A_CHUNK)
        where: dict[str, Json] = {}
        for part in ("data", "meta/episodes", *(f"videos/{key}" for key in self._videos)):
            where |= {f"{part}/chunk_index": chunk, f"{part}/file_index": file}
        self._writer.write_table(table)
        for key, (column, writer) in self._videos.items():
            where[f"videos/{key}/from_timestamp"] = writer.count / self._fps
            writer.add(images.as_rows_first(rows[key], column.channels_first))
            where[f"videos/{key}/to_timestamp"] = writer.count / self._fps
        return where

    def finish(self, fields: Mapping[str, pa.DataType]) -> dict[str, Statistics]:
        """Complete the files; return the statistics of each feature, ``(episodes, *shape)``, by the feature's name.

        ``fields`` has the Arrow types of episode fields, by the name of the column.
        """
        for _, writer in self._videos.values():
            writer.finish()
        self.close()
        names = list(self.lines[0])
        columns = {name: pa.array([line[name] for line in self.lines], fields.get(name)) for name in names}
        found = {key: _stacked([each[key] for each in self.statistics]) for key in self.statistics[0]}
        for key, each in found.items():
            for name, values in each.items():
                numbers = values.astype(np.int64) if name == "count" else values
                columns[f"{_STATS}{key}/{name}"] = nested_lists(numbers)
        path = self._root / EPISODES / _file_name(self._number, "parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
        return found

    def close(self) -> None:
        self._writer.close()
        self._sink.close()
        for _, writer in self._videos.values():
            writer.close()

    def _open(self, column: Column) -> images.VideoWriter:
        chunk, file = divmod(self._number, _FILES_A_CHUNK)
        path = self._root / VIDEO_PATH.format(video_key=column.key, chunk_index=chunk, file_index=file)
        return images.VideoWriter(path, self._fps, sides_of(column.field.shape))


def _file_name(number: int, suffix: str) -> str:
    chunk, file = divmod(number, _FILES_A_CHUNK)
    return f"{FILE.format(chunk_index=chunk, file_index=file)}.{suffix}"


def _arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    features = {column.key: library_type(column) for column in columns}
    noted = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema([(column.key, arrow_type(column)) for column in columns], metadata=noted)


def _tasks_table(tasks: Mapping[int, str]) -> pa.Table:
    """Return the table of tasks, with metadata by which pandas makes the texts the index of a data frame."""
    numbers = sorted(tasks)
    columns = {"task_index": pa.array(numbers, pa.int64()), "task": pa.array([tasks[n] for n in numbers], pa.string())}
    described = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    noted = {"index_columns": ["task"], "column_indexes": [], "columns": described, "pandas_version": "2.2.0"}
    return pa.table(columns).replace_schema_metadata({"pandas": json.dumps(noted)})


def _as_list(value: Any) -> Json:
    return None if value is None else np.asarray(value).tolist()


# --- statistics of features, for each episode and for the whole data set ----------------------------------------------


def _of_rows(rows: NDArray[Any]) -> Statistics:
    """Return minimum, maximum, mean and standard deviation over all axes but the last, and the number of rows.

    LeRobot computes the same statistics. Rows are ``(T, *shape)``; a scalar counts as a vector of one number.
    """
    numbers = rows.reshape(-1, rows.shape[-1] if rows.ndim > 1 else 1)
    mean = numbers.mean(0, dtype=np.float64)
    spread = numbers - mean
    spread *= spread
    return {
        "min": numbers.min(0).astype(np.float64),
        "max": numbers.max(0).astype(np.float64),
        "mean": mean,
        "std": np.sqrt(spread.mean(0)),
        "count": np.array([len(rows)], np.float64),
    }


def _of_images(rows: NDArray[np.uint8], channels_first: bool) -> Statistics:
    """Return the statistics of each channel, ``(channels, 1, 1)``, for pixels scaled to the range 0 to 1."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MOST_IMAGES)).astype(np.int64)]
    some = images.as_rows_first(some, channels_first)
    stride = -(-max(some.shape[1:3]) // _LONGEST_SIDE)
    pixels = some[:, ::stride, ::stride].reshape(-1, some.shape[3])
    found = {name: values[:, None, None] / 255 for name, values in _of_rows(pixels).items() if name != "count"}
    return {**found, "count": np.array([len(some)], np.float64)}


def _of_column(column: Column, rows: NDArray[Any]) -> Statistics:
    if column.kind in ("image", "video"):
        return _of_images(rows, column.channels_first)
    return _of_rows(rows.reshape(len(rows), *column.shape))


def _of_counter(first: float, last: float, count: int) -> Statistics:
    """Return the statistics of ``count`` numbers that rise evenly from ``first`` to ``last``."""
    spread = (last - first) * np.sqrt((count + 1) / (12 * (count - 1))) if count > 1 else 0.0
    found = {"min": first, "max": last, "mean": (first + last) / 2, "std": spread, "count": count}
    return {name: np.array([value], np.float64) for name, value in found.items()}


def _merged(parts: Mapping[str, Numbers]) -> Statistics:
    """Return the statistics of all rows; ``parts`` has the statistics of several sets of rows, ``(sets, *shape)``."""
    counts = parts["count"].reshape(-1, *[1] * (parts["mean"].ndim - 1))
    shares = counts / counts.sum()
    mean = (parts["mean"] * shares).sum(0)
    variance = ((parts["std"] ** 2 + (parts["mean"] - mean) ** 2) * shares).sum(0)
    return {
        "min": parts["min"].min(0),
        "max": parts["max"].max(0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": parts["count"].sum(0),
    }


def _stacked(parts: Sequence[Statistics]) -> Statistics:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def _as_json(found: Mapping[str, Statistics]) -> dict[str, Json]:
    return {
        key: {
            name: values.astype(np.int64 if name == "count" else np.float64).tolist() for name, values in each.items()
        }
        for key, each in found.items()
    }


def _agree(found: Mapping[str, Statistics], noted: Mapping[str, Json]) -> bool:
    """Tell whether the statistics of written rows agree with the imported statistics; images are not compared."""
    try:
        return found.keys() == noted.keys() and all(
            np.allclose(np.ravel(noted[key][name]), np.ravel(values), rtol=1e-4, atol=1e-6)
            for key, each in found.items()
            for name, values in each.items()
            if name in ("min", "max", "mean") and each["mean"].shape[1:] != (1, 1)
        )
    except (KeyError, TypeError, ValueError):
        return False
