"""Read the episodes of a LeRobot data set."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diskreplay import FormatError, SchemaError
from diskreplay.interop.exchange.episode_data import FIELDS, EpisodeData
from diskreplay.interop.exchange.foreign import reading
from diskreplay.interop.exchange.importing import Given, Source
from diskreplay.interop.exchange.threads import read_ahead
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.columns import from_arrow
from diskreplay.interop.lerobot.features import (
    COUNTERS,
    DONE,
    EPISODE,
    FLAGS,
    FRAME,
    NAME,
    TASK,
    TERMINATED,
    TIMESTAMP,
    TRUNCATED,
    Column,
    Feature,
    columns_in,
    sides_of,
)
from diskreplay.interop.lerobot.images import VideoReader
from diskreplay.interop.lerobot.metadata import Metadata, open_table, read_schema, read_table
from diskreplay.interop.step_values import as_flags

Array = NDArray[Any]
Bools = NDArray[np.bool_]

# Row groups are read together until they have this number of bytes. Larger reads are slower, since each read allocates
# new memory.
_BLOCK_BYTES = 4 << 20
_MOST_TASKS = 1 << 20


class _Piece(NamedTuple):
    """Consecutive episodes in one file: the position of the first episode, and each episode's number of steps."""

    path: Path
    first: int
    lengths: NDArray[np.int64]


class Reader(Source):
    """Reads the episodes of a LeRobot data set."""

    format = NAME

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        root, choice = self.place, self.choice
        self._meta = Metadata(root, is_lenient=choice.on_error == "skip")
        self._texts: dict[str, list[str]] = {}
        features = {key: feature for key, feature in self._meta.features.items() if not choice.skips(key)}
        self.left_out = [key for key in (*self._meta.features, *self._meta.fields) if choice.skips(key)]
        scan = _Scan(self._meta, features, self._texts)
        self.not_kept = self._check_pieces(scan)
        self.skipped, self._pieces = self._meta.skipped, _pieces(self._meta)
        self.episodes, self.steps = len(self._meta.lengths), int(self._meta.lengths.sum())
        self.numbers = self._meta.numbers.tolist()
        self._terminated, self._truncated = scan.ends()
        self._shared = scan.shared
        try:
            kept = {key: feature for key, feature in features.items() if key not in scan.left_out}
            self._columns = list(columns_in(kept, scan.kept))
        except SchemaError as error:
            raise SchemaError(f"{root}: {error}; skip= leaves a feature out") from None
        self._check_films()
        self._fields = {f"{FIELDS}/{name}": name for name in self._meta.fields if not choice.skips(name)}
        keys = {column.path: column.key for column in self._columns}
        self.names = keys | self._fields
        own = {column.path: column.field for column in self._columns}
        fields = {path: self._meta.fields[name] for path, name in self._fields.items()}
        self.leaves = own | fields
        tasks = self._meta.tasks
        self.texts = {column.path: self._texts[column.key] for column in self._columns if column.kind == "text"}
        if tasks and 0 <= min(tasks) <= max(tasks) < _MOST_TASKS:
            self.texts["task"] = [tasks.get(number, "") for number in range(max(tasks) + 1)]
        self.metadata = {
            "info": self._meta.info,
            "keys": keys,
            "tasks": {str(number): text for number, text in tasks.items()},
            "texts": self._texts,
            "stats": self._meta.stats,
        }

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        columns = [column for column in self._columns if column.path in wanted]
        videos = _Videos(self._meta)
        try:
            for piece in self._pieces:
                if first < piece.first + len(piece.lengths):
                    yield from self._read_piece(piece, max(first - piece.first, 0), columns, videos)
        finally:
            videos.close()

    def _check_pieces(self, scan: "_Scan") -> list[str]:
        """Let ``scan`` read all files of steps, and return the names of columns that are not features.

        An unreadable file raises FormatError. With ``on_error="skip"``, the episodes in an unreadable file are left
        out.
        """
        others, bad = dict[str, None](), list[tuple[_Piece, str]]()
        for piece in _pieces(self._meta):
            try:
                scan.add(piece)
                others |= dict.fromkeys(name for name in read_schema(piece.path).names if name not in scan.known)
            except FormatError as error:
                if self.choice.on_error == "raise":
                    raise
                bad.append((piece, str(error)))
        for piece, why in reversed(bad):
            self._meta.leave_out(range(piece.first, piece.first + len(piece.lengths)), why)
        return list(others)

    def _check_films(self) -> None:
        for column in self._columns:
            if column.kind != "video" or not self.episodes:
                continue
            clips = {self._meta.clip(position, column.key).path for position in range(self.episodes)}
            if not any(path.is_file() and path.stat().st_size for path in clips):
                raise FormatError(
                    f"{self.place} has no video of {column.key!r}: {min(clips)} is missing or empty. Fetch the videos, "
                    f"or leave the camera out by skip=({column.key!r},) (on the command line --skip {column.key})"
                )

    def _read_piece(
        self, piece: _Piece, skipped: int, columns: Sequence[Column], videos: "_Videos"
    ) -> Iterator[EpisodeData]:
        stored = [column for column in columns if column.kind != "video"]
        moving = [column for column in columns if column.kind == "video"]
        if not columns:
            raise FormatError(f"{self.place}: no feature of a step is kept")
        keys = dict.fromkeys([column.key for column in stored] + ([TIMESTAMP] if moving else []))
        number = piece.first + skipped
        for table, bounds in self._whole_episodes(piece, skipped, list(keys)):
            plain = {column.path: self._array(column, table, piece) for column in stored if column.kind != "image"}
            for start, stop in pairwise(bounds):
                steps = {path: rows[start:stop] for path, rows in plain.items()}
                rows = table.slice(start, stop - start)
                for column in stored:
                    if column.kind == "image":
                        steps[column.path] = self._array(column, rows, piece)
                for column in moving:
                    steps[column.path] = videos.frames(number, column, rows[TIMESTAMP].to_numpy())
                yield self._episode(number, steps)
                number += 1

    def _whole_episodes(self, piece: _Piece, skipped: int, keys: list[str]) -> Iterator[tuple[pa.Table, list[int]]]:
        """Yield the rows of one or more whole episodes, with the episodes' bounds, until the end of the file."""
        waiting: pa.Table | None = None
        lengths = piece.lengths[skipped:]
        # With on_error="skip", row groups are read one by one, so that damage loses only the episodes of one row group.
        block_bytes = _BLOCK_BYTES if self.choice.on_error == "raise" else 0
        own = self._meta.numbers[piece.first : piece.first + len(piece.lengths)][skipped:]
        is_shared = piece.path in self._shared
        before = 0 if is_shared else int(piece.lengths[:skipped].sum())
        for read in _tables(piece.path, [*keys, EPISODE] if is_shared else keys, before, block_bytes):
            table = _rows_of(read, own) if is_shared else read
            waiting = table if waiting is None or not waiting.num_rows else pa.concat_tables([waiting, table])
            bounds = np.concatenate([[0], np.cumsum(lengths)])
            ready = int(np.searchsorted(bounds, waiting.num_rows, "right")) - 1
            if ready:
                yield waiting.slice(0, int(bounds[ready])), bounds[: ready + 1].tolist()
                waiting, lengths = waiting.slice(int(bounds[ready])), lengths[ready:]

    def _array(self, column: Column, table: pa.Table, piece: _Piece) -> Array:
        return from_arrow(column, table[column.key], self._texts, f"{piece.path}: {column.key!r}")

    def _episode(self, number: int, steps: dict[str, Array]) -> EpisodeData:
        fields = {}
        for path, name in self._fields.items():
            value = self._meta.values[name][number] if name in self._meta.values else None
            if value is not None:
                fields[path] = np.asarray(value, self.leaves[path].dtype)
        return EpisodeData(steps, bool(self._terminated[number]), bool(self._truncated[number]), fields)


def _pieces(meta: Metadata) -> list[_Piece]:
    """Return a `_Piece` for each run of consecutive episodes that are in the same file."""
    numbered = groupby(range(len(meta.lengths)), lambda position: meta.files[position])
    spans = [(path, list(positions)) for path, positions in numbered]
    return [_Piece(path, span[0], meta.lengths[span[0] : span[-1] + 1]) for path, span in spans]


class _Scan:
    """Reads the counters, flags and texts of all steps before an import.

    The counters `COUNTERS` and the flags `FLAGS` become extra fields only if an export would write other values.

    Attributes
    ----------
    kept : dict of str to Feature
        Counters and flags that become extra fields.
    left_out : set of str
        All counters and flags, including those in ``kept``.
    shared : set of Path
        Files of steps in which some rows belong to episodes that were left out.
    """

    def __init__(self, meta: Metadata, features: Mapping[str, Feature], texts: dict[str, list[str]]) -> None:
        self._meta, self._features, self._texts = meta, features, texts
        self.known = {*meta.features, *COUNTERS}
        self._flags = [name for name in FLAGS if name in meta.features]
        if TERMINATED not in self._flags or TRUNCATED not in self._flags:
            self._flags = [name for name in self._flags if name == DONE]
        stored = [key for key, feature in features.items() if feature["dtype"] != "video" and key not in COUNTERS]
        self._needed = [EPISODE, *self._flags, *stored]
        self.kept = dict[str, Feature]()
        self.left_out = {*COUNTERS, *self._flags}
        self.shared = set[Path]()
        self._text_keys = [key for key, feature in features.items() if feature["dtype"] == "string"]
        self._last: dict[str, list[Bools]] = {name: [] for name in self._flags}
        for key in self._text_keys:
            texts.setdefault(key, [])

    def add(self, piece: _Piece) -> None:
        columns = set(read_schema(piece.path).names)
        wanted = [TIMESTAMP, FRAME, EPISODE, TASK, *self._flags, *self._text_keys]
        table = read_table(piece.path, [name for name in wanted if name in columns])
        if lacking := [name for name in self._needed if name not in columns]:
            raise FormatError(f"{piece.path} has no column {lacking[0]!r}, which info.json names")
        own = self._meta.numbers[piece.first : piece.first + len(piece.lengths)]
        if self._meta.is_lenient:
            count, table = len(table), _rows_of(table, own)
            if len(table) < count:
                self.shared.add(piece.path)
        numbers = np.repeat(own, piece.lengths)
        if not np.array_equal(_numbers(table, EPISODE), numbers):
            raise FormatError(f"{piece.path} does not have the steps that the table of episodes says, in order")
        frames = np.arange(len(numbers)) - np.repeat(np.cumsum(piece.lengths) - piece.lengths, piece.lengths)
        derived: dict[str, Array] = {
            FRAME: frames,
            TIMESTAMP: (frames / self._meta.fps).astype(np.float32),
            TASK: np.zeros(len(numbers)),
        }
        for name, expected in derived.items():
            if name in columns and name in self._meta.features and not np.array_equal(_numbers(table, name), expected):
                self._keep(name)
        last = np.cumsum(piece.lengths) - 1
        found = {
            name: as_flags(_numbers(table, name), f"{piece.path}: {name}", FormatError).reshape(len(numbers))
            for name in self._flags
        }
        for name, flags in found.items():
            if np.count_nonzero(flags) != np.count_nonzero(flags[last]):
                self._keep(name)
            self._last[name].append(flags[last])
        for key in self._text_keys:
            known = self._texts[key]
            known += [text for text in pc.unique(table[key]).to_pylist() if text is not None and text not in known]

    def _keep(self, name: str) -> None:
        if name in self._features:
            self.kept[name] = self._features[name]

    def ends(self) -> tuple[Bools, Bools]:
        """Return two masks, ``(episodes,)``: whether each episode was terminated, and whether it was truncated."""
        found = {name: np.concatenate(parts or [np.zeros(0, np.bool_)]) for name, parts in self._last.items()}
        none = np.zeros(len(self._meta.lengths), np.bool_)  # zeros, for a flag that the data set lacks
        return found.get(TERMINATED, found.get(DONE, none)), found.get(TRUNCATED, none)


class _Videos:
    """Reads frames of videos, and keeps one file of each video feature open."""

    def __init__(self, meta: Metadata) -> None:
        self._meta = meta
        self._open: dict[str, tuple[Path, VideoReader]] = {}

    def frames(self, number: int, column: Column, times: Array) -> Array:
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
            raise FormatError(f"{clip.path} has frames of {stored.shape[1:]}, but info.json says {column.field.shape}")
        return stored

    def close(self) -> None:
        for _, reader in self._open.values():
            reader.close()


def _tables(path: Path, keys: list[str], skipped: int, block_bytes: int) -> Iterator[pa.Table]:
    file = open_table(path)
    return read_ahead(
        partial(_table, path, file, keys, *block) for block in _blocks(file.metadata, skipped, block_bytes)
    )


def _blocks(metadata: pq.FileMetaData, skipped: int, block_bytes: int) -> Iterator[tuple[list[int], int]]:
    """Yield pairs: the row groups to read together, and the number of rows to skip at the start of these groups."""
    at, groups, rows, nbytes = 0, list[int](), 0, 0
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        at += found.num_rows
        if at <= skipped:
            continue
        groups.append(group)
        rows += found.num_rows
        nbytes += found.total_byte_size
        if nbytes >= block_bytes or group == metadata.num_row_groups - 1:
            yield groups, max(skipped - (at - rows), 0)
            groups, rows, nbytes = [], 0, 0


def _table(path: Path, file: pq.ParquetFile, keys: list[str], groups: list[int], skipped: int) -> pa.Table:
    with reading(path):
        return file.read_row_groups(groups, keys).slice(skipped)


def _rows_of(table: pa.Table, numbers: NDArray[np.int64]) -> pa.Table:
    return table.filter(pa.array(np.isin(_numbers(table, EPISODE), numbers)))


def _numbers(table: pa.Table, name: str) -> Array:
    column = table[name]
    while pa.types.is_nested(column.type) and not pa.types.is_struct(column.type):
        column = pc.list_flatten(column)
    array: Array = column.to_numpy()
    return array
