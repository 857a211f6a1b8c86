"""Read the metadata of a data set: the files in the folder `meta`, in versions 2.0, 2.1 and 3.0."""

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diskreplay import Field, FormatError, SchemaError, StoreNotFound
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.episode_data import Json
from diskreplay.interop.exchange.foreign import read_document, reading
from diskreplay.interop.exchange.importing import Skipped, skipped_between
from diskreplay.interop.lerobot.features import EPISODE, OF_EPISODES, Feature

Ints = NDArray[np.int64]

INFO, STATS, TASKS, EPISODES = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/episodes"
OLD_TASKS, OLD_EPISODES = "meta/tasks.jsonl", "meta/episodes.jsonl"
_PART = re.compile(r"\{(?P<name>\w+)(?::0?(?P<width>\d{0,2})d)?\}")
_OLD_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_OLD_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH, VIDEO_PATH = f"data/{FILE}.parquet", f"videos/{{video_key}}/{FILE}.mp4"


@dataclass(frozen=True)
class Clip:
    """The frames of an episode: a video file, and the start time of the episode in this file, in seconds."""

    path: Path
    start: float


class Metadata:
    """The metadata of a data set, read before its steps.

    Parameters
    ----------
    is_lenient : bool
        Whether episodes that the metadata lack are added to ``skipped``. If false, FormatError is raised for such an
        episode.

    Attributes
    ----------
    numbers, lengths : array
        Each episode's number in the data set, and each episode's number of steps, ``(episodes,)``.
    fields, values : dict
        The columns of the table of episodes that become episode fields, by name. ``fields`` has the field of each
        column. ``values`` has a list for each column: a value for each episode, or None if the episode has no value.
    """

    def __init__(self, root: Path, *, is_lenient: bool = False) -> None:
        self.root, self.is_lenient = root, is_lenient
        self.skipped = list[Skipped]()
        self.info = self._read_info()
        self.is_old = str(self.info["codebase_version"]).startswith("v2.")
        self.features: dict[str, Feature] = self.info["features"]
        self.fps = float(self.info["fps"])
        self._table, types = (self._read_old_episodes(), {}) if self.is_old else self._read_episodes()
        try:
            self.lengths: Ints = np.asarray(self._table["length"], np.int64)
            self.numbers: Ints = np.asarray(self._table[EPISODE], np.int64)
        except (KeyError, ValueError, TypeError) as error:
            raise FormatError(f"{root}: the table of episodes has no column {error} of numbers") from None
        numbers = [-1, *self.numbers.tolist()]
        if any(after <= before for before, after in pairwise(numbers)) or (self.lengths < 1).any():
            raise FormatError(f"{root}: the table of episodes must have rising numbers and lengths of 1 or more")
        self._check_numbers()
        self.files = [self._data_file(position) for position in range(len(self.numbers))]
        self.fields: dict[str, Field] = {}
        for name, column in self._table.items():
            if name not in OF_EPISODES and "/" not in name and (leaf := _field_of(column, types.get(name))) is not None:
                self.fields[name] = leaf
        self.values = {name: self._table[name] for name in self.fields}
        self.tasks = self._read_tasks()
        stats = root / STATS
        self.stats = stats.read_text() if stats.is_file() else ""

    def _check_numbers(self) -> None:
        total = self.info.get("total_episodes", len(self.numbers))
        if type(total) is not int or total < 0:
            raise FormatError(f"{self.root / INFO}: total_episodes must be a number of episodes, not {total!r:.80}")
        last = int(self.numbers[-1]) + 1 if len(self.numbers) else 0
        if total < len(self.numbers):
            raise FormatError(
                f"{self.root}: {INFO} says {total} episodes, and the table of episodes has {len(self.numbers)}; "
                "correct total_episodes"
            )
        count = max(last, total)
        numbers = self.numbers.tolist()  # Python's numbers, which do not overflow
        missing = skipped_between(numbers, count, "not in the table of episodes")
        if missing and not self.is_lenient:
            raise FormatError(
                f"{self.root}: the table of episodes has no {missing[0].what}; {count - len(self.numbers)} of "
                f"{count} are missing, and on_error='skip' imports the others"
            )
        self.skipped += missing

    def leave_out(self, positions: Collection[int], why: str) -> None:
        self.skipped += [Skipped(f"episode {self.numbers[position]}", why) for position in positions]
        kept = [position for position in range(len(self.numbers)) if position not in positions]
        self.numbers, self.lengths = self.numbers[kept], self.lengths[kept]
        self.files = [self.files[position] for position in kept]
        self._table = {name: [column[position] for position in kept] for name, column in self._table.items()}
        self.values = {name: self._table[name] for name in self.fields}

    def clip(self, number: int, key: str) -> Clip:
        """Return where the video of the feature ``key`` has the frames of the episode at position ``number``."""
        if self.is_old:
            return Clip(self._old_file("video_path", _OLD_VIDEO, int(self.numbers[number]), video_key=key), 0.0)
        chunk, file, start = (
            self._of(f"videos/{key}/{name}", number) for name in ("chunk_index", "file_index", "from_timestamp")
        )
        path = self._file("video_path", VIDEO_PATH, video_key=key, chunk_index=int(chunk), file_index=int(file))
        return Clip(path, float(start))

    def _data_file(self, number: int) -> Path:
        if self.is_old:
            return self._old_file("data_path", _OLD_DATA, int(self.numbers[number]))
        chunk, file = (int(self._of(f"data/{name}", number)) for name in ("chunk_index", "file_index"))
        return self._file("data_path", DATA_PATH, chunk_index=chunk, file_index=file)

    def _old_file(self, name: str, usual: str, number: int, **names: str) -> Path:
        size = self.info.get("chunks_size", 1000)
        if type(size) is not int or size < 1:
            raise FormatError(f"{self.root / INFO}: chunks_size must be 1 or more, not {size!r:.80}")
        chunk = number // size
        return self._file(name, usual, episode_chunk=chunk, episode_index=number, **names)

    def _file(self, name: str, usual: str, **parts: int | str) -> Path:
        pattern = self.info.get(name) or usual
        try:
            path = Path(os.path.normpath(_filled(pattern, parts)))
        except (TypeError, LookupError, ValueError) as error:
            said = f"{self.root / INFO}: {name!r} is {pattern!r:.200}"
            raise FormatError(f"{said}, which makes no path: {error}") from None
        if path.is_absolute() or path.parts[:1] == ("..",):
            raise FormatError(f"{self.root / INFO}: {name!r} is {pattern!r:.200}, which leads out of the data set")
        return self.root / path

    def _of(self, name: str, number: int) -> Any:
        try:
            value = self._table[name][number]
        except LookupError:
            value = None
        if value is None:
            raise FormatError(f"{self.root}: the table of episodes has no {name!r} of episode {self.numbers[number]}")
        return value

    def _read_info(self) -> dict[str, Json]:
        path = self.root / INFO
        try:
            info = read_document(path)
        except FileNotFoundError:
            raise StoreNotFound(f"{self.root} is not a data set of LeRobot: there is no {INFO}") from None
        if not isinstance(info.get("codebase_version"), str):
            raise FormatError(f"{path} has no codebase_version")
        if info["codebase_version"] not in ("v2.0", "v2.1", "v3.0"):
            raise FormatError(
                f"{path} is of version {info['codebase_version']}, and v2.0, v2.1 and v3.0 are read: convert it with "
                "lerobot"
            )
        fps, features = info.get("fps"), info.get("features")
        if not isinstance(fps, int | float) or isinstance(fps, bool) or not fps > 0:
            raise FormatError(f"{path}: fps must be a number of frames a second, not {fps!r:.80}")
        if not isinstance(features, dict) or not all(map(_is_feature, features.values())):
            raise FormatError(f"{path}: features are not objects with a dtype and a shape of integers")
        return info

    def _read_episodes(self) -> tuple[dict[str, list[Any]], dict[str, pa.DataType]]:
        files = sorted((self.root / EPISODES).glob("*/*.parquet"))
        if not files:
            raise FormatError(f"{self.root} has no table of episodes: there are no {EPISODES}/*/*.parquet")
        tables = []
        for file in files:
            with self._noted(file):
                names = [name for name in read_schema(file).names if not name.startswith("stats/")]
                tables.append(read_table(file, names))
        if not tables:
            raise FormatError(f"{self.root} has no table of episodes that can be read: {self.skipped[0].why}")
        table = pa.concat_tables(tables, promote_options="permissive")
        if EPISODE in table.column_names:
            table = table.sort_by(EPISODE)
        return table.to_pydict(), {name: table.schema.field(name).type for name in table.column_names}

    @contextmanager
    def _noted(self, file: Path) -> Iterator[None]:
        """If the block raises FormatError and `is_lenient` is true, add ``file`` to ``skipped`` instead of raising."""
        try:
            yield
        except FormatError as error:
            if not self.is_lenient:
                raise
            self.skipped.append(Skipped(str(file.relative_to(self.root)), str(error)))

    def _read_old_episodes(self) -> dict[str, list[Any]]:
        rows = _read_lines(self.root / OLD_EPISODES)
        names = dict.fromkeys(name for row in rows for name in row)
        rows.sort(key=lambda row: row.get(EPISODE, -1))
        return {name: [row.get(name) for row in rows] for name in names}

    def _read_tasks(self) -> dict[int, str]:
        if self.is_old:
            rows = _read_lines(self.root / OLD_TASKS)
            return {int(row["task_index"]): str(row["task"]) for row in rows}
        path = self.root / TASKS
        table: pa.Table | None = None
        if path.is_file():
            with self._noted(path):
                table = read_table(path, None)
        if table is None:
            return {}
        others = [name for name in table.column_names if name != "task_index"]
        if "task_index" not in table.column_names or not others:
            raise FormatError(f"{path} has the columns {', '.join(table.column_names)}, and not task_index and task")
        texts = table["task" if "task" in others else others[0]].to_pylist()
        return dict(sorted(zip(table["task_index"].to_pylist(), map(str, texts), strict=True)))


def read_schema(path: Path) -> pa.Schema:
    return open_table(path).schema_arrow


def read_table(path: Path, names: Sequence[str] | None) -> pa.Table:
    with reading(path):
        return open_table(path).read(None if names is None else list(names))


def open_table(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise FormatError(f"there is no file {path}, which the table of episodes names")
    with reading(path):
        return pq.ParquetFile(path)


def _read_lines(path: Path) -> list[dict[str, Json]]:
    try:
        rows = [parse_json(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise FormatError(f"there is no {path}") from None
    except ValueError as error:
        raise FormatError(f"{path} is not JSON, line by line: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"{path} has lines that are not objects")
    return rows


def _filled(pattern: str, parts: Mapping[str, int | str]) -> str:
    """Return a pattern with each name in braces replaced by its value in ``parts``, where `{name:06d}` pads a number.

    With `str.format`, a pattern could read attributes of objects, or pad a number to any width.
    """

    def part(found: re.Match[str]) -> str:
        value, width = parts[found["name"]], int(found["width"] or 0)
        if found["width"] and not isinstance(value, int):
            raise ValueError(f"{found['name']} is not a number")
        return str(value).zfill(width)

    text = _PART.sub(part, pattern)
    if "{" in _PART.sub("", pattern) or "}" in _PART.sub("", pattern):
        raise ValueError("a part in braces is not a name, or a number's name with a width such as :03d")
    return text


def _is_feature(feature: Json) -> bool:
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        return False
    shape = feature.get("shape")
    return isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)


def _field_of(column: Sequence[Any], kind: pa.DataType | None) -> Field | None:
    given = [value for value in column if value is not None]
    try:
        rows = np.asarray(given)
        while kind is not None and pa.types.is_nested(kind):
            kind = kind.value_type
        dtype = rows.dtype if kind is None else pa.array([], kind).to_numpy(zero_copy_only=False).dtype
        return Field(rows.shape[1:], dtype) if given else None
    except (SchemaError, ValueError, AttributeError, NotImplementedError):
        return None
