"""The features of a LeRobot data set, and their leaves in a store."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diskreplay import Field, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD, Json, is_part
from diskreplay.interop.exchange.field_trees import schema_of_leaves

Kind = Literal["array", "image", "video", "text"]
Feature = Mapping[str, Json]

NAME = "lerobot"
TIMESTAMP, FRAME, EPISODE, INDEX, TASK = "timestamp", "frame_index", "episode_index", "index", "task_index"
COUNTERS: Mapping[str, Field] = {
    TIMESTAMP: Field((), "float32"),
    FRAME: Field((), "int64"),
    EPISODE: Field((), "int64"),
    INDEX: Field((), "int64"),
    TASK: Field((), "int64"),
}
"""The columns that every data set has.

The timestamp, frame and task are imported as extra fields only if their values differ from the values that an export
would write.
"""

NEXT_REWARD, DONE, TERMINATED, TRUNCATED = "next.reward", "next.done", "next.terminated", "next.truncated"
FLAGS = DONE, TERMINATED, TRUNCATED
OBSERVATION = "observation"
OF_EPISODES = "episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"
"""Columns of the table of episodes that are not episode fields."""

_TAKEN = EPISODE, INDEX, "task"  # LeRobot's own names, which an extra field cannot have
_PARTS = {OBS: OBSERVATION, ACTION: "action"}
_CHANNELS, _COLOURS = (1, 3, 4), 3
_LEAST_SIDE = 8  # the smallest height and width of an image, in pixels
_MOST_AXES = 5  # the largest number of axes that an array can have in LeRobot's library


@dataclass(frozen=True)
class Column:
    """A feature of a LeRobot data set, and its leaf in a store.

    ``key`` is the name of the feature. The leaf of a text feature has indices in the feature's list of texts.
    """

    key: str
    path: str
    field: Field
    kind: Kind = "array"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the feature, with one to five axes: a field with more axes is flattened."""
        shape = self.field.shape
        return (self.field.row_bytes // self.field.dtype.itemsize,) if len(shape) > _MOST_AXES else shape or (1,)

    @property
    def channels_first(self) -> bool:
        return is_channels_first(self.field.shape)

    def feature(self, noted: Feature | None = None) -> dict[str, Json]:
        """Return the feature's entry in `info.json`.

        ``noted`` is the feature's entry in an imported `info.json`. If ``noted`` has the dtype and shape of this
        feature, the result keeps all data in ``noted``, such as names of axes.
        """
        dtype = {"array": self.field.dtype.name, "text": "string"}.get(self.kind, self.kind)
        made: dict[str, Json] = {"dtype": dtype, "shape": list(self.shape), "names": None}
        if self.kind in ("image", "video"):
            axes = ["channels", "height", "width"] if self.channels_first else ["height", "width", "channels"]
            made["names"] = axes
        same = noted is not None and (noted.get("dtype"), list(noted.get("shape", ()))) == (dtype, made["shape"])
        return {**made, **noted} if same and noted is not None else made


def is_image(field: Field) -> bool:
    shape = field.shape
    if field.dtype != np.uint8 or len(shape) != 3:
        return False
    return _channels(shape) in _CHANNELS and min(sides_of(shape)) >= _LEAST_SIDE


def is_channels_first(shape: tuple[int, ...]) -> bool:
    return shape[-1] not in _CHANNELS and shape[0] in _CHANNELS


def sides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if is_channels_first(shape) else shape[:2]


def _channels(shape: tuple[int, ...]) -> int:
    return shape[0] if is_channels_first(shape) else shape[2]


def columns_of(
    schema: Schema, noted: Mapping[str, Json], *, video: bool = False
) -> tuple[list[Column], dict[str, str]]:
    """Return the columns for the leaves of steps, and why other leaves of steps have no column, by the leaf's path.

    ``noted`` is the metadata of the LeRobot data set that the store was imported from; empty for other stores.
    """
    keys, texts = noted.get("keys", {}), noted.get("texts", {})
    found: dict[str, Column] = {}
    lacking: dict[str, str] = {}
    for path, field in schema.step_leaves.items():
        key = keys.get(path) or _key_of(path, field)
        kind: Kind = "array"
        if is_image(field):
            kind = "video" if video and _channels(field.shape) == _COLOURS else "image"
        elif key in texts:
            kind = "text"
        taken = key in _TAKEN or (key in COUNTERS and COUNTERS[key] != field) or (key in FLAGS and not noted)
        if taken or key in found:
            lacking[path] = f"the name {key} is taken"
        else:
            found[key] = Column(key, path, field, kind)
    return list(found.values()), lacking


def fields_of(schema: Schema) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts by path: the column names of episode fields, and why other episode fields have no column."""
    found: dict[str, str] = {}
    lacking: dict[str, str] = {}
    for path in schema.leaves:
        if is_part(path, FIELDS):
            name = path.removeprefix(f"{FIELDS}/").replace("/", ".")
            if name in OF_EPISODES or name in found.values():
                lacking[path] = f"the name {name} is taken"
            else:
                found[path] = name
    return found, lacking


def _key_of(path: str, field: Field) -> str:
    part, *below = path.split("/")
    if part == REWARD:
        return NEXT_REWARD
    if part == EXTRA:
        return ".".join(below)
    if part == OBS and is_image(field):
        below = ["image"] if not below else below if below[0] in ("image", "images") else ["images", *below]
    elif part == OBS:
        below = below or ["state"]
    return ".".join([_PARTS[part], *below])


def columns_in(features: Mapping[str, Feature], kept: Mapping[str, Feature]) -> Iterator[Column]:
    """Yield a column for each feature of `info.json`; ``kept`` has the counters and flags that become extra fields."""
    sights = [key for key in features if is_key_of(key, OBSERVATION)]
    moves = [key for key in features if is_key_of(key, _PARTS[ACTION])]
    for key, feature in {**features, **kept}.items():
        kind, field = _kind_and_field(key, feature)
        if key in sights:
            path = _path(OBS, OBSERVATION, key, sights)
        elif key in moves:
            path = _path(ACTION, _PARTS[ACTION], key, moves)
        elif key == NEXT_REWARD and field.shape == (1,) and field.dtype.kind != "b":
            path = REWARD
        else:
            path = f"{EXTRA}/{key}"
        if path == REWARD or (path == f"{EXTRA}/{key}" and field.shape == (1,)):
            field = Field((), field.dtype)
        yield Column(key, path, field, kind)


def is_key_of(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _path(part: str, prefix: str, key: str, keys: list[str]) -> str:
    """Return the path of the feature ``key``; ``keys`` are all features of the same part, "obs" or "action".

    If the part has only one feature, the path is the part itself. Otherwise, dots in names become slashes. All dots of
    the part remain if the slashes would put any feature inside of another feature.
    """
    if len(keys) == 1:
        return part
    below = [other.removeprefix(prefix).removeprefix(".") or prefix for other in keys]
    own = key.removeprefix(prefix).removeprefix(".") or prefix
    clash = any(a != b and b.startswith(f"{a}.") for a in below for b in below)
    return f"{part}/{own if clash else own.replace('.', '/')}"


def _kind_and_field(key: str, feature: Feature) -> tuple[Kind, Field]:
    dtype, shape = feature["dtype"], tuple(feature["shape"])
    if dtype in ("image", "video"):
        return dtype, Field(shape, "uint8")
    if dtype == "string":
        return "text", Field((), "int64")
    try:
        return "array", Field(shape, dtype)
    except SchemaError as error:
        raise SchemaError(f"the feature {key!r}: {error}") from None


def schema_of(columns: Iterable[Column], fields: Mapping[str, Field]) -> Schema:
    leaves = {column.path: column.field for column in columns}
    for part, key in _PARTS.items():
        if not any(is_part(path, part) for path in leaves):
            raise SchemaError(f"there is no feature {key!r}")
    return schema_of_leaves({**leaves, **{f"{FIELDS}/{name}": field for name, field in fields.items()}})
