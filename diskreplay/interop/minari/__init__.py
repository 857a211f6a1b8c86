"""Data sets of Minari, in HDF5, Arrow or Parquet.

Observations, actions and rewards become fields of the store, with the spaces of the data set and the dtypes of the
data. The flags of an episode's last step tell how the episode ended. The seed of an episode is its episode field
``seed``. Infos of steps become the extra field ``infos``, with the same nesting. Infos of the reset become the episode
field ``reset_infos``. The notes of the store keep other data: texts, options, infos that the first episode lacks, and
the metadata of the data set.

An import follows these rules:

- Options use the names of features in the files: ``observations/image``, ``actions``, ``rewards``, ``infos/success``,
  ``seed``, and ``reset_infos/success`` for the infos of the reset.
- An episode with equal numbers of observations and steps has no final observation.
- Terminations and truncations before the last step of an episode become notes.
- Texts in a dict of observations become notes. If the observations are only texts, or a store cannot hold a space, the
  import raises.
- The infos of the first episode become fields. If a later episode lacks one of these infos, the field is zeros in this
  episode, and a note says so.
- Images that Minari keeps as JPEG are imported with the pixels that Minari decodes.

An export writes the notes of an import back. All extra fields become infos. Extra fields other than ``infos`` get a row
of zeros for the reset. An episode that was cut is marked as truncated. In an episode without a final observation, the
last observation is repeated.
"""

import json
import os
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, cast, get_args

import numpy as np

from diskreplay import FormatError, MissingExtra, Schema, Store, StoreNotFound
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD, EpisodeData, Json
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import space_of
from diskreplay.interop.exchange.foreign import read_document
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into
from diskreplay.interop.exchange.threads import write_behind
from diskreplay.interop.minari.arrow_files import INFOS, METADATA, AnySpace, Raw, read_file, write_file
from diskreplay.interop.minari.episodes import RESET_INFOS, SEED, Layout, derive, flat, with_one_bound, without_texts

with MissingExtra.raised_for("a data set of Minari", "minari"):
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space, serialize_space

__all__ = ["export_dataset", "import_dataset"]

NAME = "minari"
DataFormat = Literal["hdf5", "arrow", "parquet"]

_DATA_SET_ID = re.compile(r"[-\w][-\w/]*-v\d+")  # a name in Minari's folder; any other text is a path
_COMPUTED = {
    *("total_episodes", "total_steps", "dataset_size", "data_format", "jpeg_encoding"),
    *("observation_space", "action_space", "dataset_id", "minari_version"),
}
_SETS = "author", "author_email"
# A group of episodes is written when it has `_WAITING_BYTES` bytes or `_WAITING_EPISODES` episodes.
_WAITING_BYTES, _WAITING_EPISODES = 16 << 20, 512
_NAMES = {OBS: "observations", ACTION: "actions", REWARD: "rewards"}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a data set of Minari into a new store, or resume an interrupted import.

    Parameters
    ----------
    source : str or path
        A name in the local folder of Minari, such as ``"D4RL/door/human-v2"``, or the path of a data set. The import
        does not download; use ``minari download``.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this data set.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        No data set has this name or path.
    SchemaError
        A space of the data set cannot be stored.
    FormatError
        The data set cannot be read.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    """
    return import_into(path, _found(source), _DataSet, options)


class _DataSet(Source):
    format = NAME
    schema: Schema

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        folder = self.place
        with _libraries():
            self.metadata = read_document(folder / "metadata.json")
            _check_spaces(folder, self.metadata)
            _check_hdf5(folder)
            self._storage = MinariStorage.read(folder)
            # Minari's storage would read `metadata.json` again for each of these numbers, and the file may be large.
            self.episodes, self.steps = (self._count(name) for name in ("total_episodes", "total_steps"))
            if not self.episodes:
                raise FormatError(f"{folder} has no episodes")
            spaces = self._storage.observation_space, self._storage.action_space
            without_texts(spaces[0], OBS)  # raises SchemaError for a space with only texts
            example = next(self._read(0, 1), None)
            if example is None:
                raise FormatError(f"{folder} has no file of its first episode, and claims {self.episodes} episodes")
            self._layout, self._kept = derive(*spaces, example), [example]
        self.schema = self._layout.schema
        self.leaves, self.names = self.schema.leaves, {path: _name_of(path) for path in self.schema.leaves}
        self.export_path = folder.parent if folder.name == "data" else folder

    def read(self, first: int, _: Collection[str]) -> Iterator[EpisodeData]:
        with _libraries():
            if first:
                self._kept.clear()
            elif self._kept:
                yield self._layout.episode(self._kept.pop())
                first = 1
            for raw in self._read(first, self.episodes):
                yield self._layout.episode(raw)

    def _read(self, first: int, stop: int) -> Iterator[Raw]:
        """Yield the episodes from number ``first`` to before ``stop``, with the metadata of each episode."""
        storage, numbers, data_format = self._storage, range(first, stop), self.metadata["data_format"]
        form = storage.observation_space, storage.action_space, bool(self.metadata.get("jpeg_encoding", True))
        found = cast(Generator[dict[str, Any], None, None], storage.get_episode_metadata(numbers))
        with closing(found):  # Minari keeps a file open until this generator is closed
            if data_format == "hdf5":
                from diskreplay.interop.minari.hdf5_episodes import read_hdf5  # Arrow and Parquet do not need h5py

                for raw, own in zip(read_hdf5(storage.data_path, *form, numbers), found, strict=True):
                    yield {**raw, METADATA: own}
                return
            for number, own in zip(numbers, found, strict=True):
                folder = storage.data_path / str(number)
                if not isinstance(steps := own.get("total_steps"), int) or steps < 0:
                    raise FormatError(
                        f"{folder / 'metadata.json'} has no number of steps, but total_steps {steps!r:.40}"
                    )
                yield {**read_file(folder, data_format, *form, steps), METADATA: own}

    def _count(self, name: str) -> int:
        found = self.metadata.get(name)
        if type(found) is not int or found < 0:
            raise FormatError(f"{self.place / 'metadata.json'} has no number in {name}, but {found!r:.40}")
        return found


def _name_of(path: str) -> str:
    """Return the name of a leaf in a data set of Minari, such as "observations/image" or "infos/success"."""
    part, _, below = path.partition("/")
    return below if part in (EXTRA, FIELDS) else f"{_NAMES[part]}/{below}".rstrip("/")


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    data_format: DataFormat = "hdf5",
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a data set of Minari.

    Images are written as arrays, not as JPEG.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : str or path
        A name in the local folder of Minari, such as ``"mine/cartpole-v0"``, or a path. A text is a path if it begins
        with a dot or a slash, or does not end in a version such as "-v0". Nothing may exist at this path.
    data_format : {"hdf5", "arrow", "parquet"}
        The format of the files.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        A file or folder exists at ``path``.
    SchemaError
        ``data_format`` is unknown.
    """
    check_option("data_format", data_format, get_args(DataFormat))
    name = path if isinstance(path, str) and _DATA_SET_ID.fullmatch(path) else None
    target = _home() / name if name else Path(path)

    def make_format(schema: Schema, _: object, noted: Mapping[str, Json]) -> Format:
        return Format(_not_held(schema, data_format, noted), partial(_write, data_format, name))

    return export_from(store_or_path, target, make_format, options)


def _home() -> Path:
    return Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari/datasets")


def _found(source: str | PathLike[str]) -> Path:
    places = [Path(source).absolute()]
    if isinstance(source, str) and _DATA_SET_ID.fullmatch(source):
        places.insert(0, _home() / source)
    for place in places:
        for folder in (place / "data", place):
            if (folder / "metadata.json").is_file():
                return folder
    looked = " and ".join(map(str, places))
    advice = f"; `minari download {source}` gets one of this name" if len(places) > 1 else ""
    raise StoreNotFound(f"there is no data set of Minari at {looked}{advice}")


def _libraries() -> AbstractContextManager[None]:
    return MissingExtra.raised_for("this data set of Minari", "minari")


def _check_spaces(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Check that the metadata have the spaces; without spaces, Minari would make an environment from the metadata.

    To make an environment, Minari calls the function that the metadata name. The metadata may name any function of any
    module, and have any arguments for this function.
    """
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata.get(name), str):
            raise FormatError(
                f"{folder / 'metadata.json'} has no {name}, and making the environment that it names could run code; "
                f'add it: minari.serialization.serialize_space(space) returns the text of "{name}"'
            )


def _check_hdf5(folder: Path) -> None:
    if files := sorted(folder.glob("*.hdf5")):
        from diskreplay.interop.exchange.hdf5_files import check_hdf5  # Arrow and Parquet do not need h5py

        for path in files:
            check_hdf5(path)


# --- data that Minari holds ------------------------------------------------------------------------------------------


def _not_held(schema: Schema, data_format: str, noted: Mapping[str, Json]) -> dict[str, str]:
    lacking = {
        "priority": "Minari has no priorities",
        "cut": "Minari marks the episode as truncated",
        "no_final_obs": "each episode of Minari has a final observation; the last observation is repeated",
    }
    if noted.get("format") != NAME:
        lacking["notes"] = "Minari has no place for notes from another format"
    for path, leaf in schema.leaves.items():
        if not path.startswith(f"{FIELDS}/") or (path == f"{FIELDS}/{SEED}" and _is_seed(leaf)):
            continue
        below = path.removeprefix(f"{FIELDS}/{RESET_INFOS}/")
        if below == path or f"{EXTRA}/{INFOS}/{below}" not in schema.leaves:
            lacking[path] = "an episode of Minari has a seed and infos of its reset, but no other fields"
    for name in schema.extra.get(INFOS, {}):
        if name in schema.extra:
            lacking |= {
                path: f"the name of the info {name} is taken"
                for path in schema.step_leaves
                if path == f"{EXTRA}/{name}" or path.startswith(f"{EXTRA}/{name}/")
            }
    if not _is_derived(schema, data_format):
        lacking["schema"] = "a data set of Minari does not define all fields and dtypes of the store"
    return lacking


def _is_seed(leaf: Any) -> bool:
    return leaf.shape == () and leaf.dtype.kind in "iu"


def _is_derived(schema: Schema, data_format: str) -> bool:
    """Tell whether an import of the exported data set would make a store with the same schema."""
    own: list[Any] = [space_of(tree) for tree in (schema.obs, schema.action)]
    brief = [with_one_bound(space) for space in own]
    read: list[Any] = [deserialize_space(serialize_space(space)) for space in brief]
    from_spaces = Schema.from_spaces(own[0], own[1])
    return (
        (from_spaces.obs, from_spaces.action) == (schema.obs, schema.action)
        and Schema.from_spaces(read[0], read[1]) == Schema.from_spaces(brief[0], brief[1])
        and schema.extra.keys() <= {INFOS}
        and schema.episode.keys() <= {SEED, RESET_INFOS}
        and all(leaf.space is None for path, leaf in schema.leaves.items() if path.split("/")[0] in (EXTRA, FIELDS))
        and schema.episode.get(RESET_INFOS, schema.extra.get(INFOS)) == schema.extra.get(INFOS)
        and (data_format == "hdf5" or not schema.extra or RESET_INFOS in schema.episode)
    )


# --- writing, in groups of episodes -----------------------------------------------------------------------------------


def _write(data_format: DataFormat, name: str | None, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    writer = _Writer(plan, data_format, name)
    write_behind(episodes, writer.write, _WAITING_BYTES, _WAITING_EPISODES)
    writer.finish()


class _Writer:
    def __init__(self, plan: Plan, data_format: DataFormat, name: str | None) -> None:
        self._plan, self._name, self._data_format = plan, name, data_format
        self._in_arrow = data_format != "hdf5"
        self._noted: dict[str, Json] = dict(plan.metadata)
        is_own = self._noted.get("format") == NAME
        self._metadata: dict[str, Json] = self._noted.get("metadata", {}) if is_own else {}
        observation_space, action_space = self._spaces()
        self._layout = Layout.of(plan.schema, without_texts(observation_space, "obs")[1])
        self._folder = plan.path / "data"
        self._storage = MinariStorage.new(
            self._folder, observation_space, action_space, data_format=data_format, jpeg_encoding=False
        )

    def _spaces(self) -> tuple[AnySpace, AnySpace]:
        """Return the spaces of the imported data set if these fit the schema, otherwise spaces made from the schema."""
        schema = self._plan.schema
        noted = [self._metadata.get(f"{part}_space") for part in ("observation", "action")]
        if all(isinstance(text, str) for text in noted):
            observation_space, action_space = map(deserialize_space, noted)
            plain = Schema.from_spaces(without_texts(observation_space, "obs")[0], action_space)
            if self._columns(plain) == self._columns(schema):
                return observation_space, action_space
        return space_of(schema.obs), space_of(schema.action)

    def _columns(self, schema: Schema) -> dict[str, Any]:
        """Return the shapes of observations and actions by path; for Arrow and Parquet, also return the dtypes."""
        leaves = {path: leaf for path, leaf in schema.leaves.items() if path.split("/")[0] in (OBS, ACTION)}
        return {path: (leaf.shape, leaf.dtype if self._in_arrow else None) for path, leaf in leaves.items()}

    def write(self, first: int, some: list[EpisodeData]) -> None:
        episodes = [self._layout.raw(episode, in_arrow=self._in_arrow) for episode in some]
        beyond = [episode.pop(METADATA) for episode in episodes]
        if self._in_arrow:
            for number, (episode, values) in enumerate(zip(episodes, beyond, strict=True), first):
                self._write_arrow(number, episode, values)
        else:
            self._storage.update_episodes([EpisodeBuffer(**episode) for episode in episodes])
            for number, values in enumerate(beyond, first):
                if values:
                    self._storage.update_episode_metadata([flat(values)], [number])

    def _write_arrow(self, number: int, episode: Raw, beyond: dict[str, Any]) -> None:
        storage, folder = self._storage, self._folder / str(number)
        write_file(folder, self._data_format, storage.observation_space, storage.action_space, episode)
        known = {name: episode[name] for name in (SEED, "options") if episode[name] is not None}
        metadata = {"id": number, "total_steps": len(episode["rewards"]), **known, **beyond}
        (folder / "metadata.json").write_text(json.dumps(metadata, default=np.ndarray.tolist))

    def finish(self) -> None:
        kept = {key: value for key, value in self._metadata.items() if key not in _COMPUTED}
        kept |= {key: set(kept[key]) for key in _SETS if key in kept}
        if self._noted and not self._metadata:
            kept["diskreplay"] = self._noted
        kept |= {"dataset_id": self._name_of(), "minari_version": minari.__version__}
        kept |= {"total_episodes": self._plan.episodes, "total_steps": self._plan.steps}
        kept["dataset_size"] = self._storage.get_size()
        self._storage.update_metadata(kept)

    def _name_of(self) -> str:
        if self._name is not None:
            return self._name
        known, folder = self._metadata.get("dataset_id"), self._plan.path.name
        if _DATA_SET_ID.fullmatch(folder):
            return folder
        return known if isinstance(known, str) else re.sub(r"[^-\w]", "-", folder) + "-v0"
