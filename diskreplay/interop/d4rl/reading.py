"""Episodes of a D4RL file."""

import base64
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, Schema, SchemaError, StoreNotFound
from diskreplay.interop.d4rl.names import (
    CHUNKS_GROUP,
    METADATA_GROUP,
    NEXT_OBSERVATIONS,
    RESERVED,
    REWARDS,
    TERMINALS,
    TIMEOUTS,
    array_of,
    next_of,
    schema_of,
)
from diskreplay.interop.exchange.episode_data import REWARD, EpisodeData, Json, is_obs, is_part
from diskreplay.interop.exchange.foreign import NUMBERS, check_memory
from diskreplay.interop.exchange.hdf5_files import check_hdf5
from diskreplay.interop.exchange.lanes import differ, with_final

Array = NDArray[Any]
Bools = NDArray[np.bool_]

# What is read at once; observations that are compared with what came next are kept, up to so much, to be read once.
_BLOCK_BYTES, _KEPT_BYTES = 64 << 20, 1 << 30
_METADATA_BYTES = 32 << 20
_NEEDED = ("observations", "actions", REWARDS, TERMINALS)


class Reader:
    """A file of D4RL.

    Parameters
    ----------
    path : Path
        The file.
    max_episode_steps : int, optional
        Where a file without ``timeouts`` has episodes end.

    Attributes
    ----------
    schema, metadata, episodes, steps, cut
        As `Source` has them.

    Raises
    ------
    StoreNotFound
        There is no such file.
    FormatError
        It is not one of D4RL, or holds what a store cannot.
    """

    def __init__(self, path: Path, max_episode_steps: int | None = None) -> None:
        self._path = path
        with _opened(path) as file:
            check_hdf5(path)
            self._arrays = _arrays(file)
            self._check(max_episode_steps)
            self.steps = self._arrays[REWARDS].shape[0]
            self.metadata = self._read_metadata(file)
            self.schema = self._own_schema()
            self._columns = self._find_columns()
            self._kept: dict[str, Array] = {}
            self._terminated, self._truncated = self._ends(file, max_episode_steps)
            ends = self._terminated | self._truncated
            broken = self._broken(file) & ~ends
            self.cut = int(np.count_nonzero(broken))
            ends |= broken
        ends[-1:] = True
        self._bounds = np.concatenate([[0], np.flatnonzero(ends) + 1])
        self.episodes = len(self._bounds) - 1

    def read(self, first: int) -> Iterator[EpisodeData]:
        """Yield the episodes in order, from number ``first`` on."""
        row_bytes = sum(self._arrays[array].row_bytes for array in self._columns.values()) or 1
        rows = max(1, _BLOCK_BYTES // row_bytes, self._chunk_rows())
        with _opened(self._path) as file:
            while first < self.episodes:
                begin = self._bounds[first]
                stop = max(int(np.searchsorted(self._bounds, begin + rows, "right")) - 1, first + 1)
                nbytes = int(self._bounds[stop] - begin) * row_bytes
                check_memory(nbytes, f"{self._path}: a block of rows from {begin}")
                yield from self._read_block(file, self._bounds[first : stop + 1])
                first = stop

    def _read_block(self, file: h5py.File, bounds: Array) -> Iterator[EpisodeData]:
        begin, end = int(bounds[0]), int(bounds[-1])
        block = {path: self._rows(file, array, begin, end) for path, array in self._columns.items()}
        block[REWARD] = block[REWARD].reshape(end - begin)
        following = {path: next_of(path) for path in block if is_obs(path) and next_of(path) in self._arrays}
        # One row of a chunk takes as long as all of them.
        chunked = [array for array in following.values() if self._arrays[array].chunks]
        behind = {array: self._rows(file, array, begin, end) for array in chunked}
        for start, last in pairwise((bounds - begin).tolist()):
            steps = {path: values[start:last] for path, values in block.items()}
            at = begin + last - 1
            for path, array in following.items():
                final = behind[array][last - 1 : last] if array in behind else self._rows(file, array, at, at + 1)
                steps[path] = with_final(steps[path], final, f"{self._path}: {array!r}")
            yield EpisodeData(steps, bool(self._terminated[at]), bool(self._truncated[at]))

    def _check(self, max_episode_steps: int | None) -> None:
        for name in _NEEDED:
            if not any(is_part(array, name) for array in self._arrays):
                raise FormatError(f"{self._path} has no {name!r}: a file of D4RL has {', '.join(_NEEDED)}")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise SchemaError(f"max_episode_steps is 1 or more, and not {max_episode_steps}")
        if max_episode_steps is not None and TIMEOUTS in self._arrays:
            raise SchemaError(f"max_episode_steps is for files without {TIMEOUTS!r}, and {self._path} has them")
        shape = self._arrays[REWARDS].shape
        if not shape or shape not in (shape[:1], (shape[0], 1)):
            raise FormatError(f"{self._path}: {REWARDS!r} is one number a step, and not of shape {shape}")
        for name, array in self._arrays.items():
            if self._is_step(name) and (not array.shape or array.shape[0] != shape[0]):
                raise FormatError(
                    f"{self._path}: {name!r} has the shape {array.shape}, and {REWARDS!r} has {shape[0]} rows"
                )

    def _is_step(self, name: str) -> bool:
        """Tell whether an array must have one row a step; others beside those of D4RL may be anything."""
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
            raise FormatError(f"{self._path}: {error}") from None

    def _field(self, name: str) -> Field:
        array = self._arrays[name]
        try:
            return Field(() if name == REWARDS else array.shape[1:], array.dtype.newbyteorder("="))
        except SchemaError as error:
            raise FormatError(f"{self._path}: {name!r}: {error}") from None

    def _find_columns(self) -> dict[str, str]:
        """Return the arrays by leaf; those of what follows an observation are like it."""
        columns = {path: array for path in self.schema.step_leaves if (array := array_of(path)) is not None}
        for path in filter(is_obs, columns):
            there = self._arrays.get(next_of(path))
            if there is not None and there.shape != self._arrays[columns[path]].shape:
                raise FormatError(
                    f"{self._path}: {next_of(path)!r} has the shape {there.shape}, and {columns[path]!r} "
                    f"{self._arrays[columns[path]].shape}"
                )
            if there is not None and there.dtype.kind not in "biuf":
                raise FormatError(f"{self._path}: {next_of(path)!r} has no numbers, but is of {there.dtype}")
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
            raise FormatError(f"{self._path}: {name!r} is one flag a step, 0 or 1, and not {found}")
        flags: Bools = values.reshape(self.steps) != 0
        return flags

    def _broken(self, file: h5py.File) -> Bools:
        """Return after which rows something else follows than `next_observations` says: another episode."""
        broken = np.zeros(self.steps, np.bool_)
        pairs = {self._columns[path]: next_of(path) for path in filter(is_obs, self._columns)}
        pairs = {array: following for array, following in pairs.items() if following in self._arrays}
        if 2 * sum(self._arrays[array].row_bytes for array in pairs) * self.steps <= _KEPT_BYTES:
            self._kept = {name: file[name][()] for pair in pairs.items() for name in pair}
        for array, following in pairs.items():
            rows = max(1, _BLOCK_BYTES // self._arrays[array].row_bytes, self._chunk_rows())
            for begin in range(0, self.steps - 1, rows):
                end = min(begin + rows, self.steps - 1)
                said = self._rows(file, following, begin, end)
                came = self._rows(file, array, begin + 1, end + 1)
                broken[begin:end] |= differ(said, came)
        return broken

    def _rows(self, file: h5py.File, name: str, begin: int, end: int) -> Array:
        kept = self._kept.get(name)
        if kept is not None:
            return kept[begin:end]
        rows: Array = file[name][begin:end]
        return rows

    def _chunk_rows(self) -> int:
        """Return how many rows the largest chunk has: a part of one takes as long as all of it."""
        return max((chunks[0] for array in self._arrays.values() if (chunks := array.chunks)), default=1)

    def _read_metadata(self, file: h5py.File) -> dict[str, Json]:
        others = {name: array for name, array in self._arrays.items() if not self._is_step(name)}
        others = {name: array for name, array in others.items() if not is_part(name, CHUNKS_GROUP)}
        if (nbytes := sum(array.nbytes for array in others.values())) > _METADATA_BYTES:
            raise FormatError(
                f"{self._path} has {nbytes} bytes of metadata, and a store's notes take {_METADATA_BYTES}; delete some "
                f"in a copy of the file: {', '.join(others)}"
            )
        return {name: self._as_json(name, file[name]) for name in others}

    def _as_json(self, name: str, array: h5py.Dataset) -> Json:
        if h5py.check_string_dtype(array.dtype) is not None:
            return _as_texts(np.asarray(array[()]).tolist())
        if array.dtype.kind not in NUMBERS:
            raise FormatError(f"{self._path}: {name!r} is of {array.dtype}, which a store's notes cannot hold")
        value = np.asarray(array[()])
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": base64.b64encode(value.tobytes()).decode(),
        }


def _opened(path: Path) -> h5py.File:
    if not path.is_file():
        raise StoreNotFound(f"there is no file {path}")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise FormatError(f"{path} is not an HDF5 file: {error}") from None


class _Layout(NamedTuple):
    """How an array lies in a file."""

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
