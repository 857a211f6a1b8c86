"""Demonstrations in HDF5 as robosuite, robomimic and Isaac Lab record them: ``data/demo_0``, ``data/demo_1``, ...

A demonstration has an array ``actions``. Every other array has one row for each action. ``obs`` are the observations.
The last row of ``next_obs`` is the observation after the last step. Files of robosuite have only ``states``, which
become the observations. In files of Isaac Lab, ``states`` has the state after each step, and ``initial_state`` has the
state before the first step.

The array ``obs/NAME``, where NAME may have slashes, becomes the leaf ``obs/NAME`` of the store. Other arrays are extra
fields. Attributes that are numbers, such as ``seed``, become episode fields. Attributes that are texts, such as
``model_file``, become notes. ``initial_state`` of Isaac Lab is a group of episode fields. Demonstrations are in the
order of their numbers: ``demo_2`` comes before ``demo_10``. In an episode without a final observation, an export
repeats the last observation.
"""

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, MissingExtra, Schema, Store
from diskreplay.interop.exchange.choosing import Options, is_in
from diskreplay.interop.exchange.episode_data import (
    ACTION,
    EXTRA,
    FIELDS,
    OBS,
    REWARD,
    EpisodeData,
    Json,
    Lacking,
    is_obs,
    is_part,
)
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import leaves_of
from diskreplay.interop.exchange.foreign import NUMBERS, check_memory
from diskreplay.interop.exchange.importing import Given, Imported, Skipped, Source, import_into
from diskreplay.interop.step_values import as_flags

with MissingExtra.raised_for("a file of demonstrations", "d4rl"):
    import h5py

    from diskreplay.interop.exchange.hdf5_files import (
        Shape,
        attribute_names,
        check_hdf5,
        check_is_file,
        member,
        read_array,
        read_attribute,
        read_into,
    )

__all__ = ["export_dataset", "import_dataset"]

NAME = "robomimic"
Rows = dict[str, NDArray[Any]]
_DATA, _MASK, _DEMO = "data", "mask", re.compile(r"demo_\d+", re.ASCII)
_ACTIONS, _REWARDS, _DONES, _NEXT, _STATES, _INITIAL = (
    "actions",
    "rewards",
    "dones",
    "next_obs",
    "states",
    "initial_state",
)
_PARTS = {_ACTIONS: ACTION, _REWARDS: REWARD, OBS: OBS}
_COUNTS = "num_samples", "total"
_ATTRIBUTE_BYTES = 60_000  # an export writes no larger attributes; HDF5 allows 64 KiB
_ALONE = f"{OBS}/{OBS}"  # in a file, the name of an observation that is not a dict
_REASONS = {
    Lacking.SCHEMA: "bounds of spaces, tuples and names of fields are not kept",
    Lacking.PRIORITY: "robomimic has no initial priorities",
    Lacking.METADATA: "the note of an import from another format is not kept",
    Lacking.NO_FINAL_OBS: "the last observation is repeated if there is no final observation",
    Lacking.ENDS: "a cut episode becomes truncated, and an episode with both flags becomes terminated",
    Lacking.NOTES: "only texts are kept, as attributes",
}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a file of demonstrations into a new store, or resume an interrupted import.

    Episodes are in the order of their numbers. An episode is terminated if its last value of ``dones`` is true,
    otherwise truncated. Attributes of a demonstration become episode fields if they are numbers, and notes if they are
    texts. Each list in ``mask`` becomes a boolean episode field, such as ``mask_train``. The field is true for the
    episodes in the list.

    Parameters
    ----------
    source : path
        The HDF5 file.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this file.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        The file does not exist.
    FormatError
        The file is damaged or has no demonstrations. Or a demonstration has an array whose length is not the
        number of the demonstration's actions.
    SchemaError
        A value cannot be stored, or an option does not fit.
    StoreExists
        ``path`` exists, and is not an import of this data set.

    Warns
    -----
    UserWarning
        The file has no observations, and its states become the observations.
    """
    return import_into(path, source, _Demos, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a file of robomimic, with ``obs``, ``next_obs`` and ``dones``.

    Extra fields become arrays of a demonstration. Episode fields become attributes of the demonstration, or lists in
    ``mask``. Episode fields in ``initial_state`` become the group ``initial_state``, as in files of Isaac Lab.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The HDF5 file. Nothing may exist at this path.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        A file or folder exists at ``path``.
    """

    def made(schema: Schema, _: object, noted: Mapping[str, Json]) -> Format:
        own = noted.get("format") == NAME
        lost = {name: why for name, why in _REASONS.items() if not (own and name == Lacking.METADATA)}
        taken = {path: "the name is taken" for path in schema.leaves if _taken(path)}
        for path, leaf in schema.leaves.items():
            is_attribute = is_part(path, FIELDS) and not is_part(path.removeprefix(f"{FIELDS}/"), _INITIAL)
            if is_attribute and leaf.row_bytes > _ATTRIBUTE_BYTES:
                taken[path] = f"an attribute has at most {_ATTRIBUTE_BYTES} bytes"
        return Format(lost | taken, partial(_write, taken))

    return export_from(store_or_path, path, made, options)


def _taken(path: str) -> bool:
    names = (_ACTIONS, _REWARDS, _DONES, _NEXT, _INITIAL, OBS) if is_part(path, EXTRA) else _COUNTS
    return not is_obs(path) and path.count("/") > 0 and not is_part(path, ACTION) and path.split("/")[1] in names


class _Array(NamedTuple):
    name: str
    item: h5py.h5d.DatasetID
    shape: Shape
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Demos(Source):
    """The demonstrations of a file."""

    format = NAME

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        check_is_file(self.place)
        opened = self.opened.enter_context(h5py.File(self.place, "r"))
        self._arrays = _arrays_of_demos(check_hdf5(self.place))
        data = self._data = opened.get(_DATA)
        keys = self._find_keys(data)
        self._others = dict.fromkeys(f"{_DATA}/{key}" for key in data if key not in keys)  # {name: None}, in order
        self._counts = dict[str, int]()
        listed = {key: names for key in keys if (names := self._names_or_none(data, key)) is not None}
        self._arrays.clear()
        if not listed:
            raise FormatError(f"{self.place} has no demonstration that can be read: {self.skipped[0].why}")
        self._keys = list(listed)
        self.numbers = [int(key.removeprefix("demo_")) for key in listed]
        self.episodes, self.steps = len(listed), sum(self._counts.values())
        self._masks = self._read_masks(opened)
        self.metadata = self._read_metadata(data)
        first, names = member(data.id, self._keys[0]), listed[self._keys[0]]
        self._obs_states = self._find_states(names)
        if self._has_states_alone:
            self.warning = f"{self.place} has no obs: its states are the observations of the store"
        self.names = self._find_names(names, first)
        rows, (fields, attributes) = self._steps(self._keys[0], first, self.names), self._read_fields(data)
        others = [name for arrays in listed.values() for name in arrays if name not in names]
        self._others |= dict.fromkeys(others)
        every = dict.fromkeys([*names, *attributes, *(f"{_MASK}_{name}" for name in self._masks)])
        self.not_kept = list(self._others)
        self.left_out = [name for name in every if self.choice.skips(name)]
        self.names |= {path: path.removeprefix(f"{FIELDS}/") for path in fields}
        self._kept = {self._keys[0]: rows}
        own = {path: values[:0] for path, values in rows.items()}
        self.leaves = leaves_of({**own, **{path: np.asarray(v)[None] for path, v in fields.items()}}, self.place)

    def _find_keys(self, data: Any) -> list[str]:
        keys = [key for key in data if _DEMO.fullmatch(key)] if isinstance(data, h5py.Group) else []
        if not keys:
            raise FormatError(f"{self.place} has no demonstrations: there is no group data/demo_0")
        return sorted(keys, key=lambda key: int(key.removeprefix("demo_")))

    def _read_fields(self, data: h5py.Group) -> tuple[dict[str, Any], dict[str, None]]:
        """Return the first value of each episode field, and the names of all attributes in order."""
        fields, attributes = dict[str, Any](), dict[str, None]()
        for key in self._keys:
            demo = member(data.id, key)
            found = attribute_names(demo)
            new = [name for name in found if name not in _COUNTS and f"{FIELDS}/{name}" not in fields]
            fields = self._fields(key, demo, {name: read_attribute(demo, name) for name in new}) | fields
            attributes |= dict.fromkeys(found)
        return fields, attributes

    def _find_states(self, names: Sequence[str]) -> list[str]:
        """Return the names of the states that become observations.

        If the file has no observations and the option ``obs`` is not given, the result is all states. In a file of
        Isaac Lab, the option ``obs`` selects states. In all other cases, no state becomes an observation.
        """
        states = [name for name in names if is_part(name, _STATES)]
        has_obs = any(is_part(name, OBS) for name in names) or self.choice.obs is not None
        self._is_isaac = any(is_part(name, _INITIAL) for name in names)
        self._has_states_alone = bool(states) and not has_obs
        wanted = [name for name in states if any(is_in(name, each) for each in self.choice.named(OBS))]
        return states if self._has_states_alone else wanted if self._is_isaac else []

    def _names_or_none(self, data: h5py.Group, key: str) -> list[str] | None:
        """Count a demonstration's steps and return the names of its arrays; return None if it is skipped."""
        try:
            shapes = self._arrays.get(key)
            if shapes is None:
                demo = data.get(key)
                if not isinstance(demo, h5py.Group):
                    raise FormatError(f"{self.place}: {_DATA}/{key} is not a group of arrays")
                shapes = _datasets(demo.id)
            self._counts[key] = self._length(data, key, shapes)
            return list(shapes)
        except FormatError as error:
            if self.choice.on_error == "raise":
                raise
            self.skipped.append(Skipped(f"episode {key.removeprefix('demo_')}", str(error)))
            return None

    def _read_metadata(self, data: h5py.Group) -> dict[str, Json]:
        """Return the attributes of ``data`` that a note can hold. Add all other attributes to ``_others``."""
        found = dict[str, Json]()
        for name, value in data.attrs.items():
            try:
                json.dumps(noted := _json(value), allow_nan=False)
            except (TypeError, ValueError):
                self._others[name] = None
            else:
                found |= {} if name in _COUNTS else {name: noted}
        return found

    def _length(self, data: h5py.Group, key: str, shapes: Mapping[str, Shape]) -> int:
        shape = next((shape for name, shape in shapes.items() if is_part(name, _ACTIONS)), ())
        if not shape or shape[0] < 1:
            demo = data[key]
            raise FormatError(
                f"{self.place}: {demo.name} has no actions, but {demo.get(_ACTIONS)!r:.80}; on_error='skip' leaves "
                "it out"
            )
        return shape[0]

    def _read_masks(self, opened: h5py.File) -> dict[str, set[str]]:
        group = opened.get(_MASK)
        found = dict[str, set[str]]()
        for key in group if isinstance(group, h5py.Group) else ():
            item = group.get(key)
            listed = np.asarray(item[()]).reshape(-1).tolist() if isinstance(item, h5py.Dataset) else [None]
            names = {_json(each) for each in listed}
            if all(isinstance(name, str) and _DEMO.fullmatch(name) for name in names):
                found[key] = names
            else:
                self._others[f"{_MASK}/{key}"] = None
        return found

    def _find_names(self, names: list[str], first: h5py.h5g.GroupID) -> dict[str, str]:
        """Return the name of each leaf's array, by the leaf's path, such as ``{"action": "actions"}``."""
        found = dict[str, str]()
        for name in names:
            part, _, below = name.partition("/")
            if part in (_DONES, _NEXT, _INITIAL) or self.choice.skips(name):
                continue
            if member(first, name).dtype.kind not in NUMBERS:
                self._others[name] = None
            elif name in self._obs_states:
                above = OBS if self._has_states_alone else f"{OBS}/{_STATES}"
                found[f"{above}/{below}" if below else above] = name
            elif part in _PARTS:
                found[f"{_PARTS[part]}/{below}" if below else _PARTS[part]] = name
            else:
                found[f"{EXTRA}/{name}"] = name
        if [path for path in found if is_obs(path)] == [_ALONE]:
            found[OBS] = found.pop(_ALONE)
        return found

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        names = {path: name for path, name in self.names.items() if path in wanted}
        for key in self._keys[first:]:
            yield self._episode(key, member(self._data.id, key), names)

    def _episode(self, key: str, demo: h5py.h5g.GroupID, names: Mapping[str, str]) -> EpisodeData:
        kept = self._kept.pop(key, None)
        wanted = {path: name for path, name in names.items() if not is_part(path, FIELDS)}
        steps = self._steps(key, demo, wanted) if kept is None else {path: kept[path] for path in wanted}
        is_done = False
        if not self.choice.skips(_DONES) and (dones := _find(demo, _DONES)) is not None:
            flags = self._rows(key, self._checked(key, _DONES, dones))
            is_done = bool(as_flags(flags, f"{self.place}: {key}/{_DONES}", FormatError)[-1])
        attrs = {name: read_attribute(demo, name) for name in attribute_names(demo)}
        texts = {name: _json(value) for name, value in attrs.items() if not self.choice.skips(name)}
        texts = {name: text for name, text in texts.items() if isinstance(text, str)}
        return EpisodeData(steps, is_done, not is_done, self._fields(key, demo, attrs), notes=texts or None)

    def _steps(self, key: str, demo: h5py.h5g.GroupID, names: Mapping[str, str]) -> Rows:
        """Return a demonstration's arrays by path, with the observation after the last step if it is in the file."""
        found = Rows()
        arrays = {path: self._checked(key, name, _find(demo, name)) for path, name in names.items()}
        check_memory(sum(array.nbytes for array in arrays.values()), f"{self.place}: {_DATA}/{key}")
        obs = [path for path in arrays if is_obs(path)]
        following = {path: names[path].replace(OBS, _NEXT, 1) for path in obs if is_part(names[path], OBS)}
        after = {path: _find(demo, name) for path, name in following.items() if not self.choice.skips(name)}
        has_final = len(after) == len(following) and all(array is not None for array in after.values())
        for path, array in arrays.items():
            found[path] = self._rows(key, array, has_final and path in following)
            if has_final and path in following:
                self._add_final(key, self._checked(key, following[path], after[path]), found[path])
        for path in obs if self._is_isaac else ():
            if path not in following:  # ``states`` has the state after each step, so the initial state goes first
                name = names[path].replace(_STATES, _INITIAL, 1)
                before = np.asarray(read_array(self._checked(key, name, _find(demo, name)).item))[:1]
                rows = np.concatenate([before.astype(found[path].dtype), found[path]])
                found[path] = rows if has_final else rows[:-1]
        return found

    def _add_final(self, key: str, following: "_Array", obs: NDArray[Any]) -> None:
        """Set the last row of ``obs`` to the last row of the next observations ``following``."""
        rows = self._rows(key, following)
        pair = rows[:-1], obs[1:-1]
        if not np.array_equal(*pair) and not np.array_equal(*pair, equal_nan=rows.dtype.kind == "f"):
            raise FormatError(
                f"{self.place}: {_DATA}/{key}/{following.name} differs from the observations one row later; "
                f"skip='{_NEXT}' leaves out {_NEXT}"
            )
        obs[-1:] = rows[-1:].astype(obs.dtype)

    def _checked(self, key: str, name: str, item: Any) -> "_Array":
        if not isinstance(item, h5py.h5d.DatasetID):
            raise FormatError(f"{self.place}: {_DATA}/{key} has no {name}, which {self._keys[0]} has")
        dtype = item.dtype
        if dtype.kind not in NUMBERS:
            raise FormatError(f"{self.place}: {_DATA}/{key}/{name} has values of {dtype}, which are not numbers")
        return _Array(name, item, item.shape or (), dtype)

    def _rows(self, key: str, array: "_Array", has_final: bool = False) -> NDArray[Any]:
        """Return the rows of an array, followed by one uninitialized row if ``has_final``."""
        count, shape = self._counts[key], array.shape
        if shape[:1] != (count,):
            raise FormatError(f"{self.place}: {_DATA}/{key}/{array.name} has the shape {shape} and {count} actions")
        rows = np.empty((count + has_final, *shape[1:]), array.dtype)
        read_into(array.item, rows[:count])
        return rows

    def _fields(self, key: str, demo: h5py.h5g.GroupID, attrs: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {f"{FIELDS}/{_MASK}_{name}": key in listed for name, listed in self._masks.items()}
        for name, value in attrs.items():
            if name not in _COUNTS and np.asarray(value).dtype.kind in NUMBERS:
                found[f"{FIELDS}/{name}"] = np.asarray(value)
        if self._is_isaac and not self._has_states_alone:
            group = _find(demo, _INITIAL)
            inside = [*_datasets(group)] if isinstance(group, h5py.h5g.GroupID) else [] if group is None else [""]
            for name in (f"{_INITIAL}/{each}".rstrip("/") for each in inside):
                found[f"{FIELDS}/{name}"] = np.asarray(read_array(_find(demo, name)))[0]
        return {path: value for path, value in found.items() if not self.choice.skips(path.removeprefix("episode/"))}


def _find(demo: h5py.h5g.GroupID, name: str) -> Any:
    """Return a demonstration's member called ``name``; None if the member is missing or a broken link."""
    try:
        return member(demo, name)
    except KeyError:
        return None


def _arrays_of_demos(shapes: Mapping[str, Shape | None]) -> dict[str, dict[str, Shape]]:
    """Return ``{demonstration: {array: shape}}``, sorted by the name of the array.

    A demonstration with links is left out: ``shapes`` may have its arrays under other names.
    """
    found, linked = dict[str, dict[str, Shape]](), set[str]()
    for name, shape in sorted(shapes.items()):
        above, key, below = (*name.split("/", 2), "", "")[:3]
        if above == _DATA and shape is None:
            linked.add(key)
        elif above == _DATA and below:
            found.setdefault(key, {})[below] = shape or ()
    return {key: arrays for key, arrays in found.items() if key not in linked}


def _datasets(group: h5py.h5g.GroupID) -> dict[str, Shape]:
    """Return the shape of each array in a group and its inner groups, by the array's name; follow links."""
    found, waiting, seen = dict[str, Shape](), [("", group)], set[Any]()
    while waiting:
        above, inner = waiting.pop()
        for key in inner:
            try:
                item = h5py.h5o.open(inner, key)
            except KeyError:
                continue  # a broken link
            name = f"{above}{os.fsdecode(key)}"
            if isinstance(item, h5py.h5d.DatasetID):
                found[name] = item.shape or ()
            elif isinstance(item, h5py.h5g.GroupID) and (address := h5py.h5o.get_info(item).addr) not in seen:
                seen.add(address)
                waiting.append((f"{name}/", item))
    return dict(sorted(found.items()))


def _json(value: Any) -> Json:
    """Return a value from HDF5 as JSON, if JSON has such values; bytes become text."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if isinstance(value, str) else np.asarray(value).tolist()


def _write(taken: Collection[str], plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    noted = plan.metadata.get("metadata", {}) if plan.metadata.get("format") == NAME else {}
    masks = dict[str, list[str]]()
    with h5py.File(plan.path, "w") as file:
        data = file.create_group(_DATA)
        data.attrs.update({"env_args": json.dumps({}), **noted, "total": plan.steps})
        for number, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{number}")
            _write_demo(demo, episode, taken)
            for path, value in episode.fields.items():
                if path in taken:
                    continue
                name = path.removeprefix(f"{FIELDS}/")
                if is_part(name, _INITIAL):  # Isaac Lab stores the initial state as an array of one row
                    demo[name] = np.asarray(value)[None]
                elif name.startswith(f"{_MASK}_") and np.asarray(value).dtype == np.bool_ and not np.ndim(value):
                    masks.setdefault(name.removeprefix(f"{_MASK}_"), [])
                    if value:
                        masks[name.removeprefix(f"{_MASK}_")].append(f"demo_{number}")
                else:
                    demo.attrs[name] = value
        for name, listed in masks.items():
            file[f"{_MASK}/{name}"] = np.array(listed, "S")


def _write_demo(demo: h5py.Group, episode: EpisodeData, taken: Collection[str]) -> None:
    count = len(episode)
    for path, rows in episode.steps.items():
        part, _, below = path.partition("/")
        if part == OBS:
            name = below or OBS
            demo[f"{OBS}/{name}"], demo[f"{_NEXT}/{name}"] = rows[:count], rows[1:]
        elif part == EXTRA:
            if path not in taken:
                demo[below] = rows
        else:
            name = _ACTIONS if part == ACTION else _REWARDS
            demo[f"{name}/{below}" if below else name] = rows
    dones = np.zeros(count, np.int64)
    dones[-1] = episode.terminated
    demo[_DONES] = dones
    demo.attrs["num_samples"] = count
    texts = episode.notes if isinstance(episode.notes, Mapping) else {}
    demo.attrs.update({name: text for name, text in texts.items() if isinstance(text, str)})
