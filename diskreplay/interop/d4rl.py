"""Data sets of D4RL: one HDF5 file of flat arrays, with flags at the ends of episodes.

A file has the N steps of all episodes, one row for each step. ``observations`` and ``actions`` are arrays of N rows, or
groups of such arrays. ``rewards``, ``terminals``, ``timeouts`` and ``next_observations`` have N rows, too. In
``next_observations``, the last row of an episode is the episode's final observation. Every other array of N rows, such
as an array in ``infos``, is an extra field of the step. Arrays of other lengths, and the arrays in ``metadata``, are
kept in the notes of the store.

An import finds the same episodes as D4RL's ``sequence_dataset``, and the same transitions as ``qlearning_dataset``. An
export writes the arrays in the notes back to the file. For an episode without a final observation, the last row of
``next_observations`` repeats the last observation. The last step of a cut episode has the flag ``timeouts``, unless the
episode is the last episode of the file.
"""

import base64
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, MissingExtra, Schema, SchemaError, Store
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.columns import ColumnReader, ColumnWriter
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
from diskreplay.interop.exchange.exporting import ChosenEpisode, Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import schema_of_leaves
from diskreplay.interop.exchange.foreign import NUMBERS, check_memory
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into
from diskreplay.interop.exchange.lanes import differ, with_final

with MissingExtra.raised_for("a data set of D4RL", "d4rl"):
    import h5py

    from diskreplay.interop.exchange.hdf5_files import check_hdf5, check_is_file

__all__ = ["export_dataset", "import_dataset"]

Array = NDArray[Any]
Bools = NDArray[np.bool_]

NAME = "d4rl"
OBSERVATIONS, ACTIONS, REWARDS = "observations", "actions", "rewards"
TERMINALS, TIMEOUTS, NEXT_OBSERVATIONS = "terminals", "timeouts", "next_observations"
METADATA_GROUP, CHUNKS_GROUP = "metadata", "virtual"

RESERVED = (  # arrays, or groups of arrays, that are not extra fields
    *(OBSERVATIONS, ACTIONS, REWARDS, TERMINALS, TIMEOUTS, NEXT_OBSERVATIONS),
    *(METADATA_GROUP, CHUNKS_GROUP),
)
_ARRAYS = {OBS: OBSERVATIONS, ACTION: ACTIONS, REWARD: REWARDS}
_PARTS = {array: part for part, array in _ARRAYS.items()}
# `_BLOCK_BYTES` is the number of bytes to read at once. Observations and next observations of up to `_KEPT_BYTES` bytes
# stay in memory after the search for cuts, so that they are read only once.
_BLOCK_BYTES, _KEPT_BYTES = 64 << 20, 1 << 30
_METADATA_BYTES = 32 << 20
_NEEDED = ("observations", "actions", REWARDS, TERMINALS)
_BUFFER_BYTES = 1 << 20  # the rows of an array are written in blocks of this number of bytes
_COMPRESSIONS = "gzip", "lzf", None
_REASONS = {
    Lacking.SCHEMA: "bounds of spaces, tuples and episode fields",
    Lacking.CUT: "an episode that was cut has the flag of a timeout",
    Lacking.NO_FINAL_OBS: "every step has a next observation; the last one of such an episode is repeated",
    Lacking.PRIORITY: "there is no array of initial priorities",
    Lacking.NOTES: "there is no place for the notes of an episode",
    Lacking.METADATA: "it belongs to another format",
}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    max_episode_steps: int | None = None,
    **options: Unpack[Options],
) -> Imported:
    """Import a file of D4RL into a new store, or resume an interrupted import.

    Episodes end where ``terminals`` or ``timeouts`` is true. Rows after the last end are an episode that was cut. An
    episode is also cut after a row whose ``next_observations`` is not the observation of the next row. In this
    comparison, the two arrays may differ in dtype, and one array may be rounded to float32. `Imported.cut` is the
    number of these cuts. The import warns if the number is more than a tenth of the steps. Episodes have a final
    observation if the file has ``next_observations``.

    Parameters
    ----------
    source : path
        The HDF5 file.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this file.
    max_episode_steps : int, optional
        The number of steps after which episodes were truncated, for old files without ``timeouts``. D4RL
        itself takes this number from the environment. None: episodes end at ``terminals`` only.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such file.
    FormatError
        The file is not a file of D4RL, the file's arrays differ in length, or a store cannot hold an array's dtype.
    SchemaError
        ``max_episode_steps`` is less than 1, or is given for a file that has ``timeouts``.
    StoreExists
        Something else is at ``path``.
    """
    return import_into(path, source, partial(_Reader, max_episode_steps), options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    hdf5_compression: str | None = "gzip",
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a file of D4RL.

    The file has ``next_observations`` if any of the episodes has a final observation.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The HDF5 file. Nothing may exist at this path.
    hdf5_compression : str or None
        The compression of the arrays: "gzip" (as in D4RL's own files), "lzf" or None. None is many times faster.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        Something is at ``path``.
    SchemaError
        ``hdf5_compression`` is not one of the values above.
    """
    check_option("hdf5_compression", hdf5_compression, _COMPRESSIONS)
    made = partial(_format, hdf5_compression)
    return export_from(store_or_path, path, made, options)


def _format(
    compression: str | None, schema: Schema, episodes: Sequence[ChosenEpisode], noted: Mapping[str, Json]
) -> Format:
    has_next = any(episode.has_final_obs for episode in episodes)
    is_own = noted.get("format") == NAME
    not_held = {path: reason for path in schema.leaves if (reason := _reason(path)) is not None}
    not_held |= {name: reason for name, reason in _REASONS.items() if not (is_own and name == Lacking.METADATA)}
    if _own_schema(schema) == schema:
        del not_held[Lacking.SCHEMA]
    if not has_next:
        del not_held[Lacking.NO_FINAL_OBS]
    if not any(episode.cut for episode in episodes[:-1]):
        del not_held[Lacking.CUT]
    metadata = noted["metadata"] if is_own else {}
    return Format(not_held, lambda plan, episodes: write(plan, episodes, has_next, metadata, compression))


def _reason(path: str) -> str | None:
    if array_of(path) is not None:
        return None
    return "there are no values of episodes" if is_part(path, FIELDS) else "the name is one of D4RL's own"


def _own_schema(schema: Schema) -> Schema | None:
    """Return the schema that an import of the exported file finds; None if no store can have this schema."""
    plain = {path: Field(leaf.shape, leaf.dtype) for path, leaf in schema.step_leaves.items()}
    try:
        return schema_of((array, leaf) for path, leaf in plain.items() if (array := array_of(path)) is not None)
    except SchemaError:
        return None


# --- names -----------------------------------------------------------------------------------------------------------


def array_of(path: str) -> str | None:
    """Return the name of the array that holds the leaf at ``path``; None if a file cannot hold this leaf."""
    part, _, below = path.partition("/")
    if part == EXTRA:
        return None if below.split("/")[0] in RESERVED else below
    return None if part == FIELDS else f"{_ARRAYS[part]}/{below}".rstrip("/")


def leaf_of(array: str) -> str:
    """Return the path that the array called ``array`` has in the store."""
    first, _, below = array.partition("/")
    return f"{_PARTS[first]}/{below}".rstrip("/") if first in _PARTS else f"{EXTRA}/{array}"


def next_of(path: str) -> str:
    """Return the name of the array that has the next observations of the leaf at ``path``, such as ``obs/image``."""
    return f"{NEXT_OBSERVATIONS}{path.removeprefix(OBS)}"


def schema_of(fields: Iterable[tuple[str, Field]]) -> Schema:
    """Return the schema for pairs (name of an array, field); raise SchemaError if no store can have this schema."""
    return schema_of_leaves({leaf_of(array): field for array, field in fields})


# --- reading ---------------------------------------------------------------------------------------------------------


_D3RLPY_ENDS = "episode_terminals"


class _Reader(Source):
    """A file of D4RL. ``max_episode_steps`` is as in `import_dataset`."""

    format = NAME
    schema: Schema
    names: dict[str, str]

    def __init__(self, max_episode_steps: int | None, given: Given) -> None:
        super().__init__(given)
        with _opened(self.place) as file:
            check_hdf5(self.place)
            self._arrays = _arrays(file)
            self._check(max_episode_steps)
            self.steps = self._arrays[REWARDS].shape[0]
            self.metadata = self._read_metadata(file)
            self.schema = self._own_schema()
            self.leaves, self.names = self.schema.leaves, self._find_columns()
            self._kept: dict[str, Array] = {}
            self._terminated, self._truncated = self._ends(file, max_episode_steps)
            ends = self._terminated | self._truncated
            broken = self._broken(file) & ~ends
            self.cut = int(np.count_nonzero(broken))
            ends |= broken
        ends[-1:] = True
        self._bounds = np.concatenate([[0], np.flatnonzero(ends) + 1])
        self.episodes = len(self._bounds) - 1

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        names = {path: array for path, array in self.names.items() if path in wanted}
        following = {path: next_of(path) for path in names if is_obs(path) and next_of(path) in self._arrays}
        with _opened(self.place) as file:
            columns = {name: self._column(file, name) for name in (*names.values(), *following.values())}
            for start, stop in pairwise(self._bounds[first:].tolist()):
                nbytes = sum(column.most_bytes(stop - start) for column in columns.values())
                check_memory(nbytes, f"{self.place}: the episode of rows {start} to {stop}")
                steps = {path: columns[array].read(start, stop, self._bounds) for path, array in names.items()}
                for path, array in following.items():
                    final = columns[array].read(stop - 1, stop, self._bounds)
                    steps[path] = with_final(steps[path], final, f"{self.place}: {array!r}")
                yield EpisodeData(steps, bool(self._terminated[stop - 1]), bool(self._truncated[stop - 1]))

    def _column(self, file: h5py.File, name: str) -> ColumnReader:
        chunks = self._arrays[name].chunks
        # Only the last row of an episode is read of next observations, unless they are in chunks: reading a row of a
        # chunk takes as long as reading the whole chunk.
        is_read_by_rows = chunks is None and is_part(name, NEXT_OBSERVATIONS)
        block = {"block_bytes": 0} if is_read_by_rows else {}
        return ColumnReader(self._kept.get(name, file[name]), chunks[0] if chunks else 1, **block)

    def _check(self, max_episode_steps: int | None) -> None:
        if _D3RLPY_ENDS in self._arrays and TIMEOUTS not in self._arrays:
            raise FormatError(
                f"{self.place} is of d3rlpy 1 and not of D4RL: {_D3RLPY_ENDS!r} marks the ends of episodes. Add the "
                f"array {TIMEOUTS!r}, true where {_D3RLPY_ENDS!r} is true and {TERMINALS!r} is not"
            )
        for name in _NEEDED:
            if not any(is_part(array, name) for array in self._arrays):
                raise FormatError(f"{self.place} has no {name!r}: a file of D4RL has {', '.join(_NEEDED)}")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise SchemaError(f"max_episode_steps must be 1 or more, not {max_episode_steps}")
        if max_episode_steps is not None and TIMEOUTS in self._arrays:
            raise SchemaError(f"max_episode_steps is for files without {TIMEOUTS!r}, and {self.place} has this array")
        shape = self._arrays[REWARDS].shape
        if not shape or shape not in (shape[:1], (shape[0], 1)):
            raise FormatError(f"{self.place}: {REWARDS!r} must be one number a step, not of shape {shape}")
        for name, array in self._arrays.items():
            if self._is_step(name) and (not array.shape or array.shape[0] != shape[0]):
                raise FormatError(
                    f"{self.place}: {name!r} has the shape {array.shape}, and {REWARDS!r} has {shape[0]} rows"
                )

    def _is_step(self, name: str) -> bool:
        """Tell whether an array has a row for each step.

        An array that D4RL does not define has a row for each step if its length is the number of rewards.
        """
        first = name.split("/")[0]
        if first in RESERVED or first == "infos":
            return first not in (METADATA_GROUP, CHUNKS_GROUP)
        shape = self._arrays[name].shape
        return bool(shape) and shape[0] == self._arrays[REWARDS].shape[0]

    def _own_schema(self) -> Schema:
        flags = (TERMINALS, TIMEOUTS)
        steps = [name for name in self._arrays if self._is_step(name) and name not in flags]
        fields = [(name, self._field(name)) for name in steps if not is_part(name, NEXT_OBSERVATIONS)]
        try:
            return schema_of(fields)
        except SchemaError as error:
            raise FormatError(f"{self.place}: {error}") from None

    def _field(self, name: str) -> Field:
        array = self._arrays[name]
        try:
            return Field(() if name == REWARDS else array.shape[1:], array.dtype.newbyteorder("="))
        except SchemaError as error:
            raise FormatError(f"{self.place}: {name!r}: {error}") from None

    def _find_columns(self) -> dict[str, str]:
        """Return the name of each leaf's array, by the leaf's path, such as ``{"obs": "observations"}``."""
        columns = {path: array for path in self.schema.step_leaves if (array := array_of(path)) is not None}
        for path in filter(is_obs, columns):
            following = self._arrays.get(next_of(path))
            if following is not None and following.shape != self._arrays[columns[path]].shape:
                raise FormatError(
                    f"{self.place}: {next_of(path)!r} has the shape {following.shape}, and {columns[path]!r} has "
                    f"{self._arrays[columns[path]].shape}"
                )
            if following is not None and following.dtype.kind not in "biuf":
                raise FormatError(
                    f"{self.place}: {next_of(path)!r} has values of {following.dtype}, which are not numbers"
                )
        return columns

    def _ends(self, file: h5py.File, max_episode_steps: int | None) -> tuple[Bools, Bools]:
        terminated = self._flags(file, TERMINALS)
        if TIMEOUTS in self._arrays:
            return terminated, self._flags(file, TIMEOUTS)
        if max_episode_steps is None:
            return terminated, np.zeros_like(terminated)
        rows = np.arange(self.steps)
        after = np.concatenate([[False], terminated[:-1]])
        step = rows - np.maximum.accumulate(np.where(after, rows, 0))
        return terminated, step % max_episode_steps == max_episode_steps - 1

    def _flags(self, file: h5py.File, name: str) -> Bools:
        array = self._arrays.get(name)
        is_one_number = array is not None and math.prod(array.shape) == self.steps and array.dtype.kind in NUMBERS
        values = file[name][()] if is_one_number else np.empty(0)
        if not is_one_number or not ((values == 0) | (values == 1)).all():
            found = f"{array.dtype} of shape {array.shape}" if array else "a group"
            raise FormatError(f"{self.place}: {name!r} must be one flag a step, 0 or 1, not {found}")
        flags: Bools = values.reshape(self.steps) != 0
        return flags

    def _broken(self, file: h5py.File) -> Bools:
        """Return a mask, ``(N,)``, of the rows whose next observation is not the observation of the next row."""
        broken = np.zeros(self.steps, np.bool_)
        pairs = {self.names[path]: next_of(path) for path in filter(is_obs, self.names)}
        pairs = {array: following for array, following in pairs.items() if following in self._arrays}
        if 2 * sum(self._arrays[array].row_bytes for array in pairs) * self.steps <= _KEPT_BYTES:
            self._kept = {name: file[name][()] for pair in pairs.items() for name in pair}
        for array, following in pairs.items():
            rows = max(1, _BLOCK_BYTES // self._arrays[array].row_bytes, self._chunk_rows())
            before, after = (self._kept.get(name, file[name]) for name in (array, following))
            for begin in range(0, self.steps - 1, rows):
                end = min(begin + rows, self.steps - 1)
                broken[begin:end] |= differ(after[begin:end], before[begin + 1 : end + 1])
        return broken

    def _chunk_rows(self) -> int:
        return max((chunks[0] for array in self._arrays.values() if (chunks := array.chunks)), default=1)

    def _read_metadata(self, file: h5py.File) -> dict[str, Json]:
        others = {name: array for name, array in self._arrays.items() if not self._is_step(name)}
        others = {name: array for name, array in others.items() if not is_part(name, CHUNKS_GROUP)}
        if (nbytes := sum(array.nbytes for array in others.values())) > _METADATA_BYTES:
            raise FormatError(
                f"{self.place} has {nbytes} bytes of metadata, and a store's notes take at most {_METADATA_BYTES}; "
                f"delete some of these arrays in a copy of the file: {', '.join(others)}"
            )
        return {name: self._as_json(name, file[name]) for name in others}

    def _as_json(self, name: str, array: h5py.Dataset) -> Json:
        if h5py.check_string_dtype(array.dtype) is not None:
            return _as_texts(np.asarray(array[()]).tolist())
        if array.dtype.kind not in NUMBERS:
            raise FormatError(f"{self.place}: {name!r} is of {array.dtype}, which a store's notes cannot hold")
        value = np.asarray(array[()])
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": base64.b64encode(value.tobytes()).decode(),
        }


def _opened(path: Path) -> h5py.File:
    check_is_file(path)
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} is not an HDF5 file: {error}") from None


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def _arrays(file: h5py.File) -> dict[str, _Layout]:
    found: dict[str, _Layout] = {}

    def see(name: str, item: h5py.Dataset | h5py.Group) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None:
            found[name] = _Layout(item.shape, item.dtype, item.chunks)

    file.visititems(see)
    return found


def _as_texts(value: Any) -> Json:
    if isinstance(value, list):
        return [_as_texts(item) for item in value]
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


# --- writing ---------------------------------------------------------------------------------------------------------


def write(
    plan: Plan, episodes: Iterable[EpisodeData], has_next: bool, metadata: Mapping[str, Json], compression: str | None
) -> None:
    """Write episodes to the file ``plan.path``; if ``has_next`` is true, also write `next_observations`.

    The last step of a cut episode has the flag `timeouts`, unless the episode is the last episode of the file.
    """
    layout = _layout(plan, has_next)
    columns = {path: array for path in plan.schema.step_leaves if (array := array_of(path)) is not None}
    nexts = {path: next_of(path) for path in columns if is_obs(path) and next_of(path) in layout}
    with h5py.File(plan.path, "w") as file:
        arrays = {name: _column(file, name, shape, dtype, compression) for name, (shape, dtype) in layout.items()}
        for name, value in metadata.items():
            file[name] = _value(value)
        for number, episode in enumerate(episodes, 1):
            steps = len(episode)
            for path, array in columns.items():
                rows = episode.steps[path]
                arrays[array].append(rows[:steps])
                if path in nexts:
                    arrays[nexts[path]].append(rows[1:])
            timeout = episode.truncated or (episode.cut and number < plan.episodes)
            for name, flag in ((TERMINALS, episode.terminated), (TIMEOUTS, timeout)):
                flags = np.zeros(steps, np.bool_)
                flags[-1] = flag
                arrays[name].append(flags)
        for written in arrays.values():
            written.finish()


def _column(file: h5py.File, name: str, shape: tuple[int, ...], dtype: Any, compression: str | None) -> ColumnWriter:
    array = file.create_dataset(name, shape, dtype, compression=compression if shape[0] else None)
    row_bytes = array.dtype.itemsize * math.prod(shape[1:])
    return ColumnWriter(array, max(1, _BUFFER_BYTES // max(1, row_bytes)))


def _layout(plan: Plan, has_next: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    layout: dict[str, tuple[tuple[int, ...], Any]] = {}
    for path, field in plan.schema.step_leaves.items():
        if (array := array_of(path)) is not None:
            layout[array] = (plan.steps, *field.shape), field.dtype
            if has_next and is_obs(path):
                layout[next_of(path)] = layout[array]
    return layout | {name: ((plan.steps,), np.dtype(np.bool_)) for name in (TERMINALS, TIMEOUTS)}


def _value(noted: Json) -> Any:
    if isinstance(noted, dict):
        data = np.frombuffer(base64.b64decode(noted["base64"]), noted["dtype"])
        return data.reshape(noted["shape"])
    return np.array(_as_bytes(noted))


def _as_bytes(texts: Json) -> Any:
    return [_as_bytes(text) for text in texts] if isinstance(texts, list) else texts.encode()
