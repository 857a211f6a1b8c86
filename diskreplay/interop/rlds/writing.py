"""Writing of RLDS: a folder that TFDS reads."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from diskreplay.interop.exchange.episode_data import EXTRA, EpisodeData, Json, is_obs
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.rlds.features import Feature, dataset_of, feature_of, features_dict
from diskreplay.interop.rlds.names import (
    DISCOUNT,
    FEATURES,
    FIRST,
    FLAGS,
    INFO,
    LAST,
    STEP_DISCOUNT,
    STEPS,
    TERMINAL,
    feature_names,
)
from diskreplay.interop.rlds.records import make_example, write_record

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
        return _nested({name.removeprefix(STEPS): feature for name, feature in every.items()})

    def _write_json(self, name: str, value: Json) -> None:
        (self._plan.path / name).write_text(json.dumps(value, indent=1))


def _nested(features: Mapping[str, Feature]) -> Json:
    inner: dict[str, Any] = {}
    for name, feature in features.items():
        key, _, below = name.partition("/")
        if below:
            inner.setdefault(key, {})[below] = feature
        else:
            inner[key] = feature
    return features_dict(
        {key: _nested(each) if isinstance(each, dict) else each.to_json() for key, each in inner.items()}
    )
