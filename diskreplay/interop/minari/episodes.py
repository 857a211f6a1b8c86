"""Convert episodes of Minari to episodes of a store, and back."""

import base64
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, MissingExtra, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD, EpisodeData, Json
from diskreplay.interop.exchange.field_trees import nest
from diskreplay.interop.minari.arrow_files import ENDS, INFOS, METADATA, AnySpace, Raw
from diskreplay.interop.step_values import as_flags

with MissingExtra.raised_for("a data set of Minari", "minari"):
    from gymnasium import spaces

NOTE = "minari"
RESET_INFOS, SEED = "reset_infos", "seed"

_ABSENT, _NO_SEED, _TEXTS = "absent", "no_seed", "observations"
_ARRAY, _TEXT_LIST, _COUNT = "@array", "@texts", "@count"


@dataclass(frozen=True)
class Layout:
    """The mapping between the values in Minari's episodes and the leaves of a store.

    Attributes
    ----------
    infos : dict of str to str
        The path of each info's extra field, by the name of the info, such as "a/b" for the info "b" in the dict "a".
    texts : list of str
        The path of each text in the observations: the keys, joined by slashes.
    """

    schema: Schema
    infos: Mapping[str, str]
    texts: list[str]

    @classmethod
    def of(cls, schema: Schema, texts: list[str]) -> "Layout":
        infos = {}
        for path in schema.step_leaves:
            if path.startswith(f"{EXTRA}/"):
                infos[path.removeprefix(f"{EXTRA}/").removeprefix(f"{INFOS}/")] = path
        return cls(schema, infos, texts)

    def episode(self, raw: Raw) -> EpisodeData:
        """Convert an episode of Minari to an episode of a store; values that have no field there become notes."""
        schema, count = self.schema, len(raw["rewards"])
        observations, texts = self._texts(raw["observations"])
        steps = dict(schema.flatten(OBS, observations)) | dict(schema.flatten(ACTION, raw["actions"]))
        steps[REWARD] = raw["rewards"]
        fields, notes = self._infos(raw[INFOS], count, steps)
        if texts:
            notes[_TEXTS] = texts
        metadata = {key: value for key, value in raw[METADATA].items() if key not in ("id", "total_steps")}
        self._seed(metadata, fields, notes)
        if metadata:
            notes[METADATA] = _to_json(metadata, METADATA)
        ends = {name: as_flags(raw[name], name, FormatError) for name in ENDS}
        for name, flags in ends.items():
            if (inner := np.flatnonzero(flags[:-1])).size:
                notes[name] = inner.tolist()
        terminated, truncated = (bool(count and ends[name][-1]) for name in ENDS)
        return EpisodeData(steps, terminated, truncated, fields, notes={NOTE: notes} if notes else None)

    def _texts(self, observations: Any) -> tuple[Any, dict[str, Json]]:
        if not self.texts:
            return observations, {}
        values = flat(observations)
        texts = {path: _to_json(list(values.pop(path)), path) for path in self.texts}
        return nest(values), texts

    def _infos(self, infos: Raw, count: int, steps: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Json]]:
        """Add infos that have a field to ``steps``; return the reset's infos as fields, and other infos as notes."""
        left, fields, absent = flat(infos) if infos else {}, {}, []
        for name, path in self.infos.items():
            leaf, reset = self.schema.leaves[path], f"{FIELDS}/{RESET_INFOS}/{name}"
            has_reset = reset in self.schema.leaves
            rows = left.get(name)
            if isinstance(rows, np.ndarray) and _fits(rows, leaf, count, has_reset):
                steps[path] = rows[-count:]
                if has_reset:
                    fields[reset] = rows[0]
                del left[name]
            else:
                steps[path] = np.zeros((count, *leaf.shape), leaf.dtype)
                if has_reset:  # a nested episode field is stored only if all its leaves have values
                    fields[reset] = np.zeros(leaf.shape, leaf.dtype)
                absent += [name]
        notes: dict[str, Json] = {_ABSENT: absent} if absent else {}
        if left:
            notes[INFOS] = {name: _to_json(value, name) for name, value in left.items()}
        return fields, notes

    def _seed(self, metadata: Raw, fields: dict[str, Any], notes: dict[str, Json]) -> None:
        """Move the seed from ``metadata`` to ``fields``; if an int64 cannot hold the seed, add a note that says so."""
        if f"{FIELDS}/{SEED}" not in self.schema.leaves:
            return
        seed = metadata.get(SEED)
        if isinstance(seed, int | np.integer) and -(2**63) <= seed < 2**63:
            fields[f"{FIELDS}/{SEED}"] = int(metadata.pop(SEED))
        else:
            notes[_NO_SEED] = True

    # --- and back ----------------------------------------------------------------------------------------------------

    def raw(self, episode: EpisodeData, *, in_arrow: bool) -> Raw:
        """Return an episode in Minari's form: the arguments of `EpisodeBuffer`, and the metadata of the episode.

        ``in_arrow`` is true for Arrow and Parquet, where all columns have the same length. There, an info without a
        value for the reset begins with a row of zeros. In HDF5, only infos from extra fields other than "infos" begin
        with a row of zeros.
        """
        schema, count = self.schema, len(episode)
        notes = _own(episode.notes)
        absent = notes.get(_ABSENT, [])
        infos = {name: _from_json(value) for name, value in notes.get(INFOS, {}).items()}
        for name, path in self.infos.items():
            if name not in absent:
                reset, rows = episode.fields.get(f"{FIELDS}/{RESET_INFOS}/{name}"), episode.steps[path]
                if reset is None and (in_arrow or not path.startswith(f"{EXTRA}/{INFOS}/")):
                    reset = np.zeros(rows.shape[1:], rows.dtype)
                infos[name] = rows if reset is None else np.concatenate([np.asarray(reset)[None], rows])
        observations = episode.tree(schema, OBS)
        if texts := notes.get(_TEXTS):
            observations = nest(flat(observations) | {path: _from_json(value) for path, value in texts.items()})
        metadata = _from_json(notes.get(METADATA, {}))
        if not notes.get(_NO_SEED) and (seed := episode.fields.get(f"{FIELDS}/{SEED}")) is not None:
            metadata[SEED] = int(seed)
        return {
            "observations": observations,
            "actions": episode.tree(schema, ACTION),
            "rewards": episode.steps[REWARD],
            **_flags(episode, count, notes),
            INFOS: nest(infos) or None,
            SEED: metadata.pop(SEED, None),
            "options": metadata.pop("options", None),
            METADATA: metadata,
        }


def _own(notes: Json) -> dict[str, Json]:
    return dict(notes[NOTE]) if isinstance(notes, dict) and NOTE in notes else {}


def _flags(episode: EpisodeData, count: int, notes: Mapping[str, Json]) -> dict[str, NDArray[np.bool_]]:
    """Return the terminations and truncations, ``(T,)`` each; a cut episode counts as truncated in Minari."""
    found = {}
    lasts = episode.terminated, episode.truncated or (episode.cut and not any(name in notes for name in ENDS))
    for name, last in zip(ENDS, lasts, strict=True):
        flags = np.zeros(count, np.bool_)
        flags[notes.get(name, [])] = True
        flags[-1] = last
        found[name] = flags
    return found


def _fits(rows: NDArray[Any], leaf: Field, count: int, has_reset: bool) -> bool:
    """Tell whether an info's ``rows`` fit the extra field ``leaf``, with a row for the reset and a row for each step.

    If the store has no field for the reset (``has_reset`` is false), the row of the reset may be missing or zeros.
    """
    if rows.shape[1:] != leaf.shape or rows.dtype != leaf.dtype:
        return False
    if len(rows) == count + 1:
        return has_reset or not rows[0].any()
    return len(rows) == count and not has_reset


def derive(observation_space: AnySpace, action_space: AnySpace, raw: Raw) -> Layout:
    """Return the layout of a data set from its spaces, and from the dtypes and infos of its first episode."""
    kept, texts = without_texts(observation_space, OBS)
    plain = Schema.from_spaces(kept, action_space)
    layout = Layout(plain, {}, texts)
    arrays = layout.episode({**raw, INFOS: {}, METADATA: {}}).steps
    obs, action = (_with_dtypes(getattr(plain, part), part, arrays) for part in (OBS, ACTION))
    reward = Field((), arrays[REWARD].dtype)
    infos, resets = _info_fields(raw)
    extra = {INFOS: nest(infos)} if infos else {}
    episode: dict[str, Any] = {SEED: Field((), "int64")} if SEED in raw[METADATA] else {}
    episode |= {RESET_INFOS: nest(resets)} if resets else {}
    return Layout.of(Schema(obs, action, reward, extra, episode), texts)


def _with_dtypes(tree: Any, path: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Return a tree of fields with the dtypes of the data, which may differ from the dtypes of the spaces."""
    if isinstance(tree, Mapping):
        return {key: _with_dtypes(inner, f"{path}/{key}", arrays) for key, inner in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_with_dtypes(inner, f"{path}/{i}", arrays) for i, inner in enumerate(tree))
    rows = np.asarray(arrays[path])
    return Field(rows.shape[1:], rows.dtype, tree.space)


def _info_fields(raw: Raw) -> tuple[dict[str, Field], dict[str, Field]]:
    """Return two dicts of fields: infos with a row for each step, and infos that also have a row for the reset."""
    count = len(raw["rewards"])
    infos, resets = {}, {}
    for name, rows in flat(raw[INFOS]).items() if raw[INFOS] else ():
        if isinstance(rows, np.ndarray) and rows.ndim and len(rows) in (count, count + 1):
            try:
                leaf = Field(rows.shape[1:], rows.dtype)
                Schema(leaf, leaf, extra={INFOS: nest({name: leaf})})  # raises SchemaError for a key that stores refuse
            except SchemaError:
                continue
            infos[name] = leaf
            if len(rows) > count:
                resets[name] = leaf
    return infos, resets


# --- values that are not arrays, as JSON and back, and simpler spaces -------------------------------------------------


def _to_json(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Mapping):
        return {str(key): _to_json(item, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple) and not all(isinstance(item, str | bytes) for item in value):
        return [_to_json(item, name) for item in value]
    return _array_to_json(np.asarray(value), name)


def _array_to_json(array: NDArray[Any], name: str) -> Any:
    if array.dtype.kind in "biuf":
        return {_ARRAY: [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
    if array.ndim <= 1 and array.dtype.kind in "OSU":
        texts = [item.decode() if isinstance(item, bytes) else item for item in array.reshape(-1).tolist()]
        if all(isinstance(text, str) for text in texts):
            if len(set(texts)) == 1 < len(texts):
                return {_TEXT_LIST: texts[:1], _COUNT: len(texts)}
            return {_TEXT_LIST: texts} if array.ndim else texts[0]
        return [_to_json(item, name) for item in array.tolist()]
    raise SchemaError(f"{name}: values of the type {array.dtype} cannot be imported")


def _from_json(value: Any) -> Any:
    """Return the value that `_to_json` converted to ``value``; an array of texts becomes a list."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        dtype, shape, data = value[_ARRAY]
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)[()]
    if _TEXT_LIST in value:
        return value[_TEXT_LIST] * int(value.get(_COUNT, 1))
    return {key: _from_json(item) for key, item in value.items()}


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested dicts and tuples by path, such as "a/0" for item 0 of the tuple "a"."""
    if isinstance(tree, tuple):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {
        name: value
        for key, item in tree.items()
        for name, value in flat(item, f"{path}/{key}" if path else key).items()
    }


def without_texts(space: AnySpace, name: str) -> tuple[AnySpace, list[str]]:
    """Return a space without the texts in its dicts, and the paths of these texts, with slashes between the keys.

    SchemaError is raised if the space has only texts. The message calls the space ``name``.
    """
    kept, texts = _without_texts(space, "")
    if kept is None:
        raise SchemaError(f"{name}: a {type(space).__name__} space with only texts cannot be stored")
    return kept, texts


def _without_texts(space: AnySpace, path: str) -> tuple[AnySpace | None, list[str]]:
    if isinstance(space, spaces.Text):
        return None, [path]
    if not isinstance(space, spaces.Dict):
        return space, []
    kept, texts = OrderedDict(), []
    for key, inner in space.spaces.items():
        rest, found = _without_texts(inner, f"{path}/{key}" if path else key)
        texts += found
        if rest is not None:
            kept[key] = rest
    return (spaces.Dict(kept) if kept else None), texts


def with_one_bound(space: AnySpace) -> AnySpace:
    """Return a copy of a space; a Box becomes a Box of one number, with the bounds of the old Box's first number.

    If Minari's JSON keeps the copy exactly, it keeps the space exactly, too. The copy is converted faster: a Box may
    have many thousand bounds.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict(OrderedDict((key, with_one_bound(inner)) for key, inner in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([with_one_bound(inner) for inner in space.spaces])
    if isinstance(space, spaces.Box):
        low, high = (bounds.reshape(-1)[:1] for bounds in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type)
    return space
