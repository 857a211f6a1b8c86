"""Read and write the folders of RLDS data sets in TFDS."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, SchemaError, StoreNotFound
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.choosing import is_in
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, OBS, REWARD, EpisodeData, Json, is_obs, is_part
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.field_trees import leaves_of, nest
from diskreplay.interop.exchange.importing import Given, Skipped, Source
from diskreplay.interop.rlds.features import (
    DISCOUNT,
    FEATURES,
    FIRST,
    FLAGS,
    INFO,
    LAST,
    NAME,
    OBSERVATION,
    STEP_DISCOUNT,
    STEPS,
    TERMINAL,
    Feature,
    dataset_of,
    feature_names,
    feature_of,
    features_dict,
    read_features,
)
from diskreplay.interop.rlds.records import (
    Values,
    make_example,
    parse_example,
    records,
    records_or_errors,
    write_record,
)

_FIRSTS, _SPLIT = f"{STEPS}{FIRST}", "split"


def _decode_text(value: Any) -> str:
    return bytes(value).decode("utf-8", "replace")


class _Record(NamedTuple):
    features: Mapping[str, Values]
    rows: int


class _Raw(NamedTuple):
    """A record of a file, or the error that made one or more records unreadable.

    Attributes
    ----------
    number : int
        The index of the record, or of the first unreadable record, among the records of all files.
    data : bytes or FormatError
        The record or the error.
    episodes : int or None
        1 for a record. For an error, the number of unreadable records; None if this number is not known.
    """

    split: str
    file: Path
    number: int
    data: bytes | FormatError
    episodes: int | None = 1

    @property
    def what(self) -> str:
        if self.episodes is None:
            return f"the episodes of {self.file.name} from number {self.number} on"
        last = self.number + self.episodes - 1
        return f"episode {last}" if self.episodes == 1 else f"episodes {self.number} to {last}"


class _Split(NamedTuple):
    """A split; ``counts`` has the number of episodes in each file, or is None if these numbers are not known."""

    name: str
    files: list[Path]
    counts: list[int] | None


class _Episode(NamedTuple):
    """An episode; ``record`` is the index of the episode's record among the records of all files.

    ``finals`` is 1 if the last row is only a final observation, and 0 if the last row is a step.
    """

    record: int
    split: str
    rows: int
    finals: int


def _features_of(folder: Path) -> dict[str, Feature]:
    if not (folder / FEATURES).exists():
        inner = next((path for above in ("*", "*/*") for path in folder.glob(f"{above}/{FEATURES}")), None)
        hint = f"; there is one in {inner.parent.relative_to(folder)}" if inner else ""
        raise StoreNotFound(f"{folder} is not a data set of RLDS: there is no {FEATURES}{hint}")
    try:
        features = read_features(parse_json((folder / FEATURES).read_bytes()))
    except SchemaError as error:
        raise SchemaError(f"{folder}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder / FEATURES} cannot be used: {error}") from None
    if _FIRSTS not in features:
        raise FormatError(f"{folder} has no episodes of RLDS: {FEATURES} names no {_FIRSTS}")
    return features


class DataSet(Source):
    """The episodes of an RLDS data set, read from its folder.

    Parameters
    ----------
    splits : list of str or None
        The splits to read, in this order. None: all splits.
    last : str or None
        The option ``last`` of `import_dataset`.
    """

    format = NAME
    names: dict[str, str]

    def __init__(self, splits: Sequence[str] | None, last: str | None, given: Given) -> None:
        super().__init__(given)
        folder, choice = self.place, self.choice
        self.part = " ".join(splits or ())
        self._features = _features_of(folder)
        self._is_lenient = choice.on_error == "skip"
        self._splits = _read_splits(folder, splits, is_lenient=self._is_lenient)
        inside = [name.removeprefix(STEPS) for name in self._features]
        self.left_out = [name for name in inside if choice.skips(name)]
        self._paths = self._find_paths()
        self._tables: dict[str, dict[str, int]] = {name: {} for name in self._text_names()}
        self._episodes = self._find_episodes(last)
        self.episodes = len(self._episodes)
        self.steps = sum(episode.rows - episode.finals for episode in self._episodes)
        self.numbers = [episode.record for episode in self._episodes]
        if not self.episodes:
            raise StoreNotFound(f"{folder} has no episodes with a step")
        self.names = {path: name.removeprefix(STEPS) for path, name in self._paths.items()}
        self.texts = {path: [*self._tables[name]] for path, name in self._paths.items() if name in self._tables}
        self._has_split = not choice.skips(_SPLIT)
        if self._has_split:
            self.names[f"episode/{_SPLIT}"] = _SPLIT
            self.texts[f"episode/{_SPLIT}"] = [split.name for split in self._splits]
        self.leaves = self._find_leaves()

    def _raw(self) -> Iterator[_Raw]:
        """Yield a `_Raw` for each record of all files, and check the number of records in each file.

        A damaged record raises FormatError. With ``on_error="skip"``, the FormatError is yielded in place of the
        record. If the length of a record is damaged, one FormatError stands for all records from this one on in the
        same file, which are lost.
        """
        number = 0
        for split in self._splits:
            for file, expected in zip(split.files, split.counts or repeat(None), strict=False):
                first, error = number, None
                try:
                    for data in (records_or_errors if self._is_lenient else records)(file):
                        yield _Raw(split.name, file, number, data)
                        number += 1
                except (FormatError, FileNotFoundError) as damage:
                    error = FormatError(str(damage))
                count = number - first
                if expected is not None and count != expected and error is None:
                    error = FormatError(
                        f"{file} has {count} episodes, and {INFO} says {expected}: the download is incomplete; fetch "
                        "the file again"
                    )
                if error is not None:
                    if not self._is_lenient or (expected is not None and count >= expected):
                        raise error
                    yield _Raw(split.name, file, number, error, None if expected is None else expected - count)
                    number = number if expected is None else first + expected

    def _parsed(self, raw: _Raw, wanted: Collection[str] | None) -> dict[str, Values]:
        if isinstance(raw.data, FormatError):
            raise raw.data
        try:
            return parse_example(raw.data, wanted)
        except FormatError as error:
            raise FormatError(f"{raw.file}: {error}") from None

    def _find_episodes(self, last: str | None) -> list[_Episode]:
        """Return the episodes that have steps. If ``on_error`` is "skip", add all other episodes to ``skipped``."""
        actions = [name for path, name in self._paths.items() if is_part(path, ACTION) or path == REWARD]
        acted = actions if last is None else []
        found, ends = list[_Episode](), dict[str, dict[bool, int]]()
        wanted = [_FIRSTS, *self._tables, *acted]
        for raw in self._raw():
            try:
                features = self._parsed(raw, wanted)
                record = _Record(features, len(features.get(_FIRSTS, [])))
                is_step = last == "step" or any(self._is_in_last_row(record, name) for name in acted)
            except FormatError as error:
                if not self._is_lenient:
                    raise
                self.skipped.append(Skipped(raw.what, str(error)))
                continue
            for name, table in self._tables.items():
                for text in map(_decode_text, features.get(name, ())):
                    table.setdefault(text, len(table))
            if record.rows:
                ends.setdefault(raw.split, {}).setdefault(is_step, raw.number)
            found.append(_Episode(raw.number, raw.split, record.rows, 0))
        for split, kinds in ends.items():
            if len(kinds) > 1:
                raise SchemaError(
                    f"{self.place}: in {split}, the last row of episode {kinds[True]} has an action or a reward, and "
                    f"the last row of episode {kinds[False]} has none; give last='step' if last rows are steps, or "
                    "last='final' if they are only final observations (on the command line --option last=step)"
                )
        found = [each._replace(finals=int(False in ends.get(each.split, {}))) for each in found]
        for each in found:
            if each.rows <= each.finals:
                self._leave_out(each)
        return [each for each in found if each.rows > each.finals]

    def _leave_out(self, episode: _Episode) -> None:
        """Add an episode without steps to ``skipped``; raise FormatError unless ``on_error`` is "skip"."""
        what = f"episode {episode.record}"
        why = "its only row is a final observation" if episode.rows else "it has no row"
        if not self._is_lenient:
            raise FormatError(
                f"{self.place}: {what} has no steps: {why}; on_error='skip' (--on-error skip) leaves it out"
            )
        self.skipped.append(Skipped(what, why))

    def _is_in_last_row(self, record: _Record, name: str) -> bool:
        values = self._decoded(record, name, record.rows) if record.rows and name in record.features else []
        return len(values) > 0 and bool(np.nan_to_num(np.asarray(values[-1], np.float64)).any())

    def _find_paths(self) -> dict[str, str]:
        """Return the name of each leaf's feature, by path, such as ``{"obs/image": "steps/observation/image"}``."""
        found: dict[str, str] = {}
        obs, actions = self.choice.named(OBS), self.choice.named(ACTION)
        for name, feature in self._features.items():
            inside = name.removeprefix(STEPS)
            if inside in FLAGS or self.choice.skips(inside):
                continue
            if feature.kind == "text" and inside != name:  # texts of steps are extra fields
                found[f"{EXTRA}/{inside.removeprefix(f'{OBSERVATION}/')}"] = name
            elif inside == name:
                found[f"episode/{name.removeprefix('episode_metadata/')}"] = name
            elif is_part(inside, OBSERVATION):
                found[f"{OBS}{inside.removeprefix(OBSERVATION)}"] = name
            elif is_part(inside, ACTION) or inside == REWARD:
                found[inside] = name
            # Only observations keep the values of a final row, and actions tell whether a last row is final. So
            # features that the options choose as observations or actions get the path of an observation or action here.
            elif any(is_in(inside, each) for each in obs):
                found[f"{OBS}/{inside}"] = name
            elif any(is_in(inside, each) for each in actions):
                found[f"{ACTION}/{inside}"] = name
            else:
                found[f"{EXTRA}/{STEP_DISCOUNT if inside == DISCOUNT else inside}"] = name
        return found

    def _find_leaves(self) -> dict[str, Field]:
        first = next(self._readable())
        fields = {path: np.asarray(value)[None] for path, value in first.fields.items()}
        return leaves_of({**{path: rows[:0] for path, rows in first.steps.items()}, **fields}, self.place)

    def _readable(self) -> Iterator[EpisodeData]:
        for number in range(self.episodes):
            try:
                yield next(self.read(number, self._paths))
            except FormatError:
                if not self._is_lenient or number == self.episodes - 1:
                    raise

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        paths = {path: name for path, name in self._paths.items() if path in wanted}
        names = None if len(paths) == len(self._paths) else {*paths.values(), f"{STEPS}{TERMINAL}"}
        episodes = iter(self._episodes[first:])
        episode = next(episodes, None)
        for raw in self._raw():
            if episode is not None and raw.number == episode.record:
                record = _Record(self._parsed(raw, names), episode.rows)
                made = self._episode(record, episode.finals, paths)
                if self._has_split:
                    number = self.texts[f"episode/{_SPLIT}"].index(episode.split)
                    made = replace(made, fields={**made.fields, f"episode/{_SPLIT}": np.int64(number)})
                yield made
                episode = next(episodes, None)

    def _episode(self, record: _Record, finals: int, paths: Mapping[str, str]) -> EpisodeData:
        rows, count = record.rows, record.rows - finals
        steps: dict[str, NDArray[Any]] = {}
        fields: dict[str, Any] = {}
        for path, name in paths.items():
            if path.startswith("episode/"):
                fields[path] = self._decoded(record, name, 1)[0]
            else:
                values = self._decoded(record, name, rows)
                steps[path] = values if is_obs(path) else values[:count]
        terminal = f"{STEPS}{TERMINAL}"
        is_terminal = terminal in self._features and bool(self._decoded(record, terminal, rows)[-1])
        return EpisodeData(steps, is_terminal, not is_terminal, fields)

    def _decoded(self, record: _Record, name: str, count: int) -> Any:
        if name not in record.features:
            raise FormatError(f"{self.place}: an episode has no {name}")
        try:
            values = self._features[name].decode(record.features[name], count, name)
        except FormatError as error:
            raise FormatError(f"{self.place}: {error}") from None
        table = self._tables.get(name)
        return values if table is None else np.array([table[text] for text in values], np.int64)

    def _text_names(self) -> list[str]:
        paths = self._paths.values()
        return [name for name in paths if self._features[name].kind == "text"]


def _read_splits(folder: Path, wanted: Sequence[str] | None, *, is_lenient: bool) -> list[_Split]:
    try:
        info = parse_json((folder / INFO).read_bytes())
        kind = info.get("fileFormat", "tfrecord")
        splits = {str(each["name"]): [int(n) for n in each.get("shardLengths", ())] for each in info["splits"]}
        dataset = info["name"]
        if any("/" in str(name) for name in (dataset, *splits)):
            raise ValueError("a name has a slash")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder / INFO} cannot be used: {error}") from None
    if kind != "tfrecord":
        raise FormatError(
            f"{folder} has files of {kind}, and only tfrecord is read: convert them with TFDS's convert_format"
        )
    for name in wanted or ():
        if name not in splits:
            raise StoreNotFound(f"{folder} has no split {name!r}; it has {', '.join(splits)}")
    names = list(wanted or splits)
    found = {name: sorted(folder.glob(f"{dataset}-{name}.tfrecord-*")) for name in names}
    if not any(found.values()):
        raise StoreNotFound(f"{folder} has no files {dataset}-{names[0]}.tfrecord-*")
    return [_checked_split(folder, dataset, name, found[name], splits[name], is_lenient) for name in names]


def _checked_split(
    folder: Path, dataset: str, name: str, files: list[Path], counts: list[int], is_lenient: bool
) -> _Split:
    if not counts:
        return _Split(name, files, None)
    expected = [folder / f"{dataset}-{name}.tfrecord-{k:05d}-of-{len(counts):05d}" for k in range(len(counts))]
    if not is_lenient and (missing := [file for file in expected if file not in files]):
        raise FormatError(
            f"{folder} has {len(files)} of the {len(counts)} files of {name}, {sum(counts)} episodes in all: "
            f"{missing[0].name} is missing; fetch it, or choose another split with splits="
        )
    return _Split(name, expected, counts)


_SHARD_BYTES = 256 << 20


def write(name: str, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    with closing(_Folder(plan, name)) as folder:
        for episode in episodes:
            folder.add(episode)
        folder.finish()


class _Folder:
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
        if self._file is not None:
            self._file.close()

    def finish(self) -> None:
        """Put the total number of files into the name of each file, and write the two JSON files."""
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
        flag, number = Feature("tensor", (), np.dtype(bool), "none"), Feature("tensor", (), np.dtype("float32"), "none")
        every = {f"{STEPS}{name}": flag for name in FLAGS} | {f"{STEPS}{DISCOUNT}": number}
        every |= {name: self._features[path] for path, name in self._names.items()}
        return _described(nest({name.removeprefix(STEPS): feature for name, feature in every.items()}))

    def _write_json(self, name: str, value: Json) -> None:
        (self._plan.path / name).write_text(json.dumps(value, indent=1))


def _described(tree: Mapping[str, Any]) -> Json:
    return features_dict(
        {key: _described(each) if isinstance(each, dict) else each.to_json() for key, each in tree.items()}
    )
