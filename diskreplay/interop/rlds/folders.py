"""Folders of RLDS as TFDS reads them: the episodes of their files, and how they are written."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, Schema, SchemaError, StoreNotFound
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, OBS, REWARD, EpisodeData, Json, is_obs
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.field_trees import nest, schema_of
from diskreplay.interop.rlds.features import (
    DISCOUNT,
    FEATURES,
    FIRST,
    FLAGS,
    INFO,
    LAST,
    OBSERVATION,
    STEP_DISCOUNT,
    STEPS,
    TERMINAL,
    Feature,
    dataset_of,
    feature_names,
    feature_of,
    features_dict,
    is_at,
    read_features,
)
from diskreplay.interop.rlds.records import Values, make_example, parse_example, records, write_record


class _Record(NamedTuple):
    """An episode in a file: its features, and how many rows it has."""

    features: Mapping[str, Values]
    rows: int


class DataSet:
    """The episodes of a folder.

    Attributes
    ----------
    lengths : list of int
        How many steps each has; those without a step are left out.
    """

    def __init__(self, folder: Path, split: str | None, last: str) -> None:
        self._folder, self._lacks_last = folder, int(last == "final")
        if not (folder / FEATURES).exists():
            inner = next(folder.glob(f"*/{FEATURES}"), None)
            hint = f"; there is one in {inner.parent.name}" if inner else ""
            raise StoreNotFound(f"{folder} is not a data set of RLDS: there is no {FEATURES}{hint}")
        try:
            self._features = read_features(parse_json((folder / FEATURES).read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, SchemaError):
                raise SchemaError(f"{folder}: {error}") from None
            raise FormatError(f"{folder / FEATURES} cannot be used: {error}") from None
        for needed in (f"{STEPS}{ACTION}", f"{STEPS}{FIRST}"):
            if not any(is_at(name, needed) for name in self._features):
                raise FormatError(f"{folder} has no episodes of RLDS: {FEATURES} names no {needed}")
        self._files = _files(folder, split)
        firsts = f"{STEPS}{FIRST}"
        self._rows = [len(self._parsed(*raw, wanted=firsts).get(firsts, [])) for raw in self._raw()]
        self.lengths = [rows - self._lacks_last for rows in self._rows if rows > self._lacks_last]
        if not self.lengths:
            raise StoreNotFound(f"{folder} has no episodes with a step")

    def _raw(self) -> Iterator[tuple[Path, bytes]]:
        return ((file, data) for file in self._files for data in records(file))

    def _parsed(self, file: Path, data: bytes, wanted: str | None = None) -> dict[str, Values]:
        try:
            return parse_example(data, wanted)
        except FormatError as error:
            raise FormatError(f"{file}: {error}") from None

    def _paths(self) -> dict[str, str]:
        """Return the names of features by the paths of the leaves that they become."""
        found: dict[str, str] = {}
        for name, feature in self._features.items():
            inside = name.removeprefix(STEPS)
            if feature.kind == "text" or inside in FLAGS:
                continue
            if inside == name:
                found[f"episode/{name.removeprefix('episode_metadata/')}"] = name
            elif is_at(inside, OBSERVATION):
                found[f"{OBS}{inside.removeprefix(OBSERVATION)}"] = name
            elif is_at(inside, ACTION) or inside == REWARD:
                found[inside] = name
            else:
                found[f"{EXTRA}/{STEP_DISCOUNT if inside == DISCOUNT else inside}"] = name
        return found

    def schema(self) -> Schema:
        """Return what the steps of the first episode hold."""
        first = next(self.read(0))
        fields = {path: np.asarray(value)[None] for path, value in first.fields.items()}
        return schema_of({path: rows[:0] for path, rows in first.steps.items()}, self._folder, fields)

    def read(self, first: int) -> Iterator[EpisodeData]:
        """Yield the episodes from number ``first`` on."""
        paths = self._paths()
        kept = ((rows, raw) for rows, raw in zip(self._rows, self._raw(), strict=True) if rows > self._lacks_last)
        return (self._episode(_Record(self._parsed(*raw), rows), paths) for rows, raw in islice(kept, first, None))

    def _episode(self, record: _Record, paths: Mapping[str, str]) -> EpisodeData:
        rows, count = record.rows, record.rows - self._lacks_last
        steps: dict[str, NDArray[Any]] = {}
        fields: dict[str, Any] = {}
        for path, name in paths.items():
            if path.startswith("episode/"):
                fields[path] = self._decoded(record, name, 1)[0]
            else:
                values = self._decoded(record, name, rows)
                steps[path] = values if is_obs(path) else values[:count]
        steps[REWARD] = steps[REWARD].reshape(count) if REWARD in steps else np.zeros(count, np.float32)
        terminal = f"{STEPS}{TERMINAL}"
        is_terminal = terminal in self._features and bool(self._decoded(record, terminal, rows)[-1])
        return EpisodeData(steps, is_terminal, not is_terminal, fields, notes=self._texts(record) or None)

    def _decoded(self, record: _Record, name: str, count: int) -> Any:
        if name not in record.features:
            raise FormatError(f"{self._folder}: an episode has no {name}")
        try:
            return self._features[name].decode(record.features[name], count, name)
        except FormatError as error:
            raise FormatError(f"{self._folder}: {error}") from None

    def _texts(self, record: _Record) -> dict[str, Json]:
        """Return the texts of an episode by the names of features; one that all steps have is told once."""
        found: dict[str, Json] = {}
        for name, feature in self._features.items():
            if feature.kind == "text" and name in record.features:
                texts = self._decoded(record, name, len(record.features[name]))
                found[name] = texts[0] if texts and len(set(texts)) == 1 else texts
        return found


def _files(folder: Path, split: str | None) -> list[Path]:
    try:
        info = parse_json((folder / INFO).read_bytes())
        kind, splits = info.get("fileFormat", "tfrecord"), [each["name"] for each in info["splits"]]
        dataset = info["name"]
        if any("/" in str(name) for name in (dataset, *splits)):
            raise ValueError("a name has a slash")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder / INFO} cannot be used: {error}") from None
    if kind != "tfrecord":
        raise FormatError(
            f"{folder} has files of {kind}, and only tfrecord is read: convert them with TFDS's convert_format"
        )
    if split is not None and split not in splits:
        raise StoreNotFound(f"{folder} has no split {split!r}; it has {', '.join(splits)}")
    found = [
        file for name in ([split] if split else splits) for file in sorted(folder.glob(f"{dataset}-{name}.tfrecord-*"))
    ]
    if not found:
        raise StoreNotFound(f"{folder} has no files {dataset}-{split or splits[0]}.tfrecord-*")
    return found


_SHARD_BYTES = 256 << 20


def write(name: str, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    """Write a data set of a name."""
    plan.path.mkdir()
    with closing(_Folder(plan, name)) as folder:
        for episode in episodes:
            folder.add(episode)
        folder.finish()


class _Folder:
    """A data set that is being written."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan, self._name = plan, name
        self._names = feature_names(plan.schema)
        self._features = {path: feature_of(plan.schema.leaves[path]) for path in self._names}
        self._shards: list[int] = []
        self._bytes = 0
        self._file: BinaryIO | None = None

    def _shard(self, number: int) -> Path:
        return self._plan.path / f".shard-{number}"

    def add(self, episode: EpisodeData) -> None:
        """Append an episode."""
        rows = len(episode) + 1
        last = np.arange(rows) == rows - 1
        features: dict[str, Sequence[bytes] | NDArray[Any]] = {}
        for path, values in episode.steps.items():
            padded = values if is_obs(path) else np.concatenate([values, np.zeros_like(values[:1])])
            features[self._names[path]] = self._features[path].encode(padded)
        flags = {FIRST: np.arange(rows) == 0, LAST: last, TERMINAL: last & episode.terminated}
        features |= {f"{STEPS}{name}": flag for name, flag in flags.items()}
        if f"{EXTRA}/{STEP_DISCOUNT}" not in self._names:
            ended = (np.arange(rows) >= rows - 2) & episode.terminated
            features[f"{STEPS}{DISCOUNT}"] = np.where(ended, 0, 1).astype(np.float32)
        self._write(make_example(features))

    def _write(self, data: bytes) -> None:
        if self._file is None or self._file.tell() + len(data) > _SHARD_BYTES:
            self.close()
            self._file = self._shard(len(self._shards)).open("wb")
            self._shards.append(0)
        write_record(self._file, data)
        self._shards[-1] += 1
        self._bytes += len(data)

    def close(self) -> None:
        """Close the file of the shard."""
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """Give the files their names, and write what says what they are."""
        self.close()
        count = len(self._shards)
        for number in range(count):
            name = f"{self._name}-train.tfrecord-{number:05d}-of-{count:05d}"
            os.replace(self._shard(number), self._plan.path / name)
        split = {
            "name": "train",
            "numBytes": str(self._bytes),
            "shardLengths": [str(length) for length in self._shards],
            "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        }
        info = {"name": self._name, "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
        self._write_json(INFO, info)
        self._write_json(FEATURES, features_dict({"steps": dataset_of(self._steps())}))

    def _steps(self) -> Json:
        """Return what features.json says of a step."""
        flag, number = Feature("tensor", (), np.dtype(bool), "none"), Feature("tensor", (), np.dtype("float32"), "none")
        every = {f"{STEPS}{name}": flag for name in FLAGS} | {f"{STEPS}{DISCOUNT}": number}
        every |= {name: self._features[path] for path, name in self._names.items()}
        return _described(nest({name.removeprefix(STEPS): feature for name, feature in every.items()}))

    def _write_json(self, name: str, value: Json) -> None:
        (self._plan.path / name).write_text(json.dumps(value, indent=1))


def _described(tree: Mapping[str, Any]) -> Json:
    """Return what features.json says of nested features."""
    return features_dict(
        {key: _described(each) if isinstance(each, dict) else each.to_json() for key, each in tree.items()}
    )
