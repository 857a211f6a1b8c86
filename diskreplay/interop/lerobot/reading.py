"""Episodes of a LeRobot data set."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diskreplay import FormatError, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import FIELDS, REWARD, EpisodeData, Json
from diskreplay.interop.exchange.foreign import reading
from diskreplay.interop.exchange.threads import read_ahead
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.columns import from_arrow
from diskreplay.interop.lerobot.features import (
    COUNTERS,
    DONE,
    EPISODE,
    FLAGS,
    FRAME,
    TASK,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    Column,
    columns_in,
    schema_of,
    sides_of,
)
from diskreplay.interop.lerobot.images import VideoReader
from diskreplay.interop.lerobot.metadata import Metadata, open_table, read_schema, read_table
from diskreplay.interop.step_values import as_flags

Array = NDArray[Any]
Bools = NDArray[np.bool_]

# Row groups that are read at once take about so much: memory that is used again is quicker than more of it.
_BLOCK_BYTES = 4 << 20


class _Piece(NamedTuple):
    """A file of steps: its episodes, from a number on, and their lengths."""

    path: Path
    first: int
    lengths: NDArray[np.int64]


class Reader:
    """The steps of a data set.

    Parameters
    ----------
    root : Path
        The folder of the data set.

    Attributes
    ----------
    schema, metadata, episodes, steps
        As `Source` has them.

    Raises
    ------
    StoreNotFound
        There is no data set.
    FormatError
        It is damaged, of a version that is not read, or has what a store cannot hold.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._meta = root, Metadata(root)
        self.episodes, self.steps = len(self._meta.lengths), int(self._meta.lengths.sum())
        numbered = groupby(range(self.episodes), lambda number: self._meta.files[number])
        spans = [(path, list(numbers)) for path, numbers in numbered]
        self._pieces = [_Piece(path, span[0], self._meta.lengths[span[0] : span[-1] + 1]) for path, span in spans]
        self._texts: dict[str, list[str]] = {}
        scan = _Scan(self._meta, self._texts)
        for piece in self._pieces:
            scan.add(piece)
        self._terminated, self._truncated = scan.ends()
        try:
            self._columns, self._fields, self.schema = self._layout(scan)
        except SchemaError as error:
            raise FormatError(f"{root}: {error}") from None
        self._check_files()
        self.metadata: dict[str, Json] = {
            "info": self._meta.info,
            "keys": {column.path: column.key for column in self._columns},
            "tasks": {str(number): text for number, text in self._meta.tasks.items()},
            "texts": self._texts,
            "stats": self._meta.stats,
        }

    def read(self, first: int) -> Iterator[EpisodeData]:
        """Yield the episodes in order, from number ``first`` on."""
        videos = _Videos(self._meta)
        try:
            for piece in self._pieces:
                if first < piece.first + len(piece.lengths):
                    yield from self._read_piece(piece, max(first - piece.first, 0), videos)
        finally:
            videos.close()

    def _layout(self, scan: "_Scan") -> tuple[list[Column], dict[str, str], Schema]:
        """Return columns, episode fields by their columns, and the schema."""
        features = {key: feature for key, feature in self._meta.features.items() if key not in scan.left_out}
        columns = list(columns_in(features, {key: self._meta.features[key] for key in scan.kept}))
        fields = self._meta.fields
        return columns, {f"{FIELDS}/{name}": name for name in fields}, schema_of(columns, fields)

    def _check_files(self) -> None:
        wanted = [column.key for column in self._columns if column.kind != "video"]
        for piece in self._pieces:
            names = set(read_schema(piece.path).names)
            if lacking := [key for key in wanted if key not in names]:
                raise FormatError(f"{piece.path} has no column {lacking[0]!r}, which info.json names")

    def _read_piece(self, piece: _Piece, skipped: int, videos: "_Videos") -> Iterator[EpisodeData]:
        stored = [column for column in self._columns if column.kind != "video"]
        moving = [column for column in self._columns if column.kind == "video"]
        keys = dict.fromkeys([column.key for column in stored] + ([TIMESTAMP] if moving else []))
        waiting: pa.Table | None = None
        number, lengths = piece.first + skipped, piece.lengths[skipped:]
        for table in _tables(piece.path, list(keys), int(piece.lengths[:skipped].sum())):
            waiting = table if waiting is None or not waiting.num_rows else pa.concat_tables([waiting, table])
            bounds = np.concatenate([[0], np.cumsum(lengths)])
            ready = int(np.searchsorted(bounds, waiting.num_rows, "right")) - 1
            if not ready:
                continue
            now = waiting.slice(0, int(bounds[ready]))
            plain = {column.path: self._array(column, now, piece) for column in stored if column.kind != "image"}
            for k in range(ready):
                part = slice(int(bounds[k]), int(bounds[k + 1]))
                steps = {path: rows[part] for path, rows in plain.items()}
                rows = now.slice(part.start, part.stop - part.start)
                for column in stored:
                    if column.kind == "image":
                        steps[column.path] = self._array(column, rows, piece)
                for column in moving:
                    steps[column.path] = videos.frames(number + k, column, rows[TIMESTAMP].to_numpy())
                yield self._episode(number + k, part.stop - part.start, steps)
            waiting, lengths, number = waiting.slice(int(bounds[ready])), lengths[ready:], number + ready

    def _array(self, column: Column, table: pa.Table, piece: _Piece) -> Array:
        return from_arrow(column, table[column.key], self._texts, f"{piece.path}: {column.key!r}")

    def _episode(self, number: int, length: int, steps: dict[str, Array]) -> EpisodeData:
        if REWARD not in steps:
            steps[REWARD] = np.zeros(length, self.schema.reward.dtype)
        fields = {}
        for path, name in self._fields.items():
            value = self._meta.values[name][number] if name in self._meta.values else None
            if value is not None:
                fields[path] = np.asarray(value, self.schema.leaves[path].dtype)
        return EpisodeData(steps, bool(self._terminated[number]), bool(self._truncated[number]), fields)


class _Scan:
    """What must be known of all steps before the first is read: how episodes end, and which columns can be derived.

    Attributes
    ----------
    kept : list of str
        Counters and flags that are extra fields, since they are not what they would be derived to.
    left_out : set of str
        Features that are no leaves.
    """

    def __init__(self, meta: Metadata, texts: dict[str, list[str]]) -> None:
        self._meta, self._texts = meta, texts
        self._flags = [name for name in FLAGS if name in meta.features]
        if TERMINATED not in self._flags or TRUNCATED not in self._flags:
            self._flags = [name for name in self._flags if name == DONE]
        self.kept: list[str] = []
        self.left_out = {*COUNTERS, *self._flags}
        self._text_keys = [key for key, feature in meta.features.items() if feature["dtype"] == "string"]
        self._last: dict[str, list[Bools]] = {name: [] for name in self._flags}
        for key in self._text_keys:
            texts.setdefault(key, [])

    def add(self, piece: _Piece) -> None:
        """Look at the steps of a file."""
        there = set(read_schema(piece.path).names)
        wanted = [TIMESTAMP, FRAME, EPISODE, TASK, *self._flags, *self._text_keys]
        table = read_table(piece.path, [name for name in wanted if name in there])
        if lacking := [name for name in (EPISODE, *self._flags, *self._text_keys) if name not in there]:
            raise FormatError(f"{piece.path} has no column {lacking[0]!r}, which info.json names")
        numbers = np.repeat(np.arange(piece.first, piece.first + len(piece.lengths)), piece.lengths)
        if not np.array_equal(_numbers(table, EPISODE), numbers):
            raise FormatError(f"{piece.path} does not have the steps that the table of episodes says, in order")
        frames = np.arange(len(numbers)) - np.repeat(np.cumsum(piece.lengths) - piece.lengths, piece.lengths)
        derived: dict[str, Array] = {
            FRAME: frames,
            TIMESTAMP: (frames / self._meta.fps).astype(np.float32),
            TASK: np.zeros(len(numbers)),
        }
        for name, expected in derived.items():
            if name in there and name in self._meta.features and not np.array_equal(_numbers(table, name), expected):
                self._keep(name)
        last = np.cumsum(piece.lengths) - 1
        for name in self._flags:
            flags = as_flags(_numbers(table, name), f"{piece.path}: {name}", FormatError).reshape(len(numbers))
            if np.count_nonzero(flags) != np.count_nonzero(flags[last]):
                self._keep(name)
            self._last[name].append(flags[last])
        for key in self._text_keys:
            known = self._texts[key]
            known += [text for text in pc.unique(table[key]).to_pylist() if text is not None and text not in known]

    def _keep(self, name: str) -> None:
        if name not in self.kept:
            self.kept.append(name)

    def ends(self) -> tuple[Bools, Bools]:
        """Return which episodes were terminated, and which truncated."""
        found = {name: np.concatenate(parts or [np.zeros(0, np.bool_)]) for name, parts in self._last.items()}
        none = np.zeros(len(self._meta.lengths), np.bool_)
        return found.get(TERMINATED, found.get(DONE, none)), found.get(TRUNCATED, none)


class _Videos:
    """The video file that is being read of each feature."""

    def __init__(self, meta: Metadata) -> None:
        self._meta = meta
        self._open: dict[str, tuple[Path, VideoReader]] = {}

    def frames(self, number: int, column: Column, times: Array) -> Array:
        """Return the frames of an episode as the store has them."""
        clip = self._meta.clip(number, column.key)
        path, reader = self._open.get(column.key, (None, None))
        if reader is None or path != clip.path:
            if reader is not None:
                reader.close()
            reader = VideoReader(clip.path, sides_of(column.field.shape))
            self._open[column.key] = clip.path, reader
        found = reader.frames((clip.start + times.astype(np.float64)).tolist(), 0.5 / self._meta.fps)
        stored = images.as_stored(found, column.channels_first)
        if stored.shape[1:] != column.field.shape:
            raise FormatError(f"{clip.path} has frames of {stored.shape[1:]}, and info.json says {column.field.shape}")
        return stored

    def close(self) -> None:
        """Close all files."""
        for _, reader in self._open.values():
            reader.close()


def _tables(path: Path, keys: list[str], skipped: int) -> Iterator[pa.Table]:
    """Yield columns of a file by some row groups at once, behind so many rows; a thread reads the next ones."""
    file = open_table(path)
    return read_ahead(partial(_table, path, file, keys, *block) for block in _blocks(file.metadata, skipped))


def _blocks(metadata: pq.FileMetaData, skipped: int) -> Iterator[tuple[list[int], int]]:
    """Yield the row groups that are read at once, and how many of their rows are left out."""
    at, groups, rows, nbytes = 0, list[int](), 0, 0
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        at += found.num_rows
        if at <= skipped:
            continue
        groups.append(group)
        rows += found.num_rows
        nbytes += found.total_byte_size
        if nbytes >= _BLOCK_BYTES or group == metadata.num_row_groups - 1:
            yield groups, max(skipped - (at - rows), 0)
            groups, rows, nbytes = [], 0, 0


def _table(path: Path, file: pq.ParquetFile, keys: list[str], groups: list[int], skipped: int) -> pa.Table:
    with reading(path):
        return file.read_row_groups(groups, keys).slice(skipped)


def _numbers(table: pa.Table, name: str) -> Array:
    column = table[name]
    while pa.types.is_nested(column.type) and not pa.types.is_struct(column.type):
        column = pc.list_flatten(column)
    array: Array = column.to_numpy()
    return array
