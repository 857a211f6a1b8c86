"""A D4RL file that is being written."""

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError
from diskreplay.interop.d4rl.names import TERMINALS, TIMEOUTS, array_of, next_of
from diskreplay.interop.exchange.episode_data import EpisodeData, Json, is_obs
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.foreign import new_file
from diskreplay.interop.exchange.hdf5_files import check_hdf5

_BUFFER_BYTES = 1 << 20  # of each array
# How many episodes and rows a draft has, written when HDF5 closes it: without this one it may be torn.
_DONE = "diskreplay_done"


class Target:
    """A file that gets its name when it is complete.

    Attributes
    ----------
    episodes : int
        How many it has.
    complete : bool
        Whether that is all of them.
    """

    def __init__(self, file: h5py.File, plan: Plan, layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        self._file, self._plan, self.complete = file, plan, False
        self._columns = {path: array for path in plan.schema.step_leaves if (array := array_of(path)) is not None}
        self._has_next = {path: next_of(path) for path in self._columns if is_obs(path) and next_of(path) in layout}
        self.episodes, self._rows = (int(number) for number in file.attrs.pop(_DONE, (0, 0)))
        file.flush()
        self._arrays = {name: _Array(file[name], self._rows) for name in layout}

    def add(self, episode: EpisodeData) -> None:
        """Append an episode; one that was cut has the flag of a timeout, but for the last one of the file."""
        steps, is_last = len(episode), self.episodes == self._plan.episodes - 1
        for path, array in self._columns.items():
            rows = episode.steps[path]
            self._arrays[array].add(rows[:steps])
            if path in self._has_next:
                following = self._arrays[self._has_next[path]]
                following.add(rows[1 : steps + 1])
                if len(rows) == steps:
                    following.add(rows[-1:])
        timeout = episode.truncated or (episode.cut and not is_last)
        for name, flag in ((TERMINALS, episode.terminated), (TIMEOUTS, timeout)):
            flags = np.zeros(steps, np.bool_)
            flags[-1] = flag
            self._arrays[name].add(flags)
        self.episodes += 1
        self._rows += steps

    def finish(self) -> None:
        """Write what waits."""
        self._flush()
        self.complete = True

    def leave(self) -> None:
        """Write what waits, and where an export that is repeated goes on."""
        self._flush()
        self._file.attrs[_DONE] = self.episodes, self._rows

    def _flush(self) -> None:
        for array in self._arrays.values():
            array.flush()


class _Array:
    """An array of the file, written by many rows at once."""

    def __init__(self, array: h5py.Dataset, rows: int) -> None:
        self._array, self._written, self._waiting = array, rows, 0
        row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
        self._buffer = np.empty((max(1, _BUFFER_BYTES // row_bytes), *array.shape[1:]), array.dtype)

    def add(self, rows: NDArray[Any]) -> None:
        if len(rows) > len(self._buffer):
            self.flush()
            self._write(rows)
            return
        if self._waiting + len(rows) > len(self._buffer):
            self.flush()
        self._buffer[self._waiting : self._waiting + len(rows)] = rows
        self._waiting += len(rows)

    def flush(self) -> None:
        if self._waiting:
            self._write(self._buffer[: self._waiting])
            self._waiting = 0

    def _write(self, rows: NDArray[Any]) -> None:
        self._array[self._written : self._written + len(rows)] = rows
        self._written += len(rows)


@contextmanager
def open_target(plan: Plan, has_next: bool, metadata: Mapping[str, Json], compression: str | None) -> Iterator[Target]:
    """Open a file for a plan, with `next_observations` or without; an interrupted one where its draft is whole."""
    draft = plan.path.with_name(f".{plan.path.name}.part")
    layout = _layout(plan, has_next)
    with _begun(draft, layout) or _new(draft, layout, metadata, compression) as file:
        target = Target(file, plan, layout)
        try:
            yield target
        except BaseException:
            target.leave()
            raise
    if target.complete:
        os.replace(draft, plan.path)


def _layout(plan: Plan, has_next: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array of steps."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {}
    for path, field in plan.schema.step_leaves.items():
        if (array := array_of(path)) is not None:
            layout[array] = (plan.steps, *field.shape), field.dtype
            if has_next and is_obs(path):
                layout[next_of(path)] = layout[array]
    return layout | {name: ((plan.steps,), np.dtype(np.bool_)) for name in (TERMINALS, TIMEOUTS)}


def _begun(draft: Path, layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> h5py.File | None:
    """Open the draft of an interrupted export of these rows; None where there is none, or HDF5 was killed in it."""
    if draft.is_symlink():
        return None
    try:
        check_hdf5(draft)  # else a draft that somebody put there could have other files written to
        file = h5py.File(draft, "r+")
    except (OSError, FormatError):
        return None
    there = {name: file.get(name) for name in layout}
    if _DONE in file.attrs and all(
        array is not None and (array.shape, array.dtype) == layout[name] for name, array in there.items()
    ):
        return file
    file.close()
    return None


def _new(
    draft: Path,
    layout: Mapping[str, tuple[tuple[int, ...], Any]],
    metadata: Mapping[str, Json],
    compression: str | None,
) -> h5py.File:
    file = h5py.File(new_file(draft), "w")
    for name, (shape, dtype) in layout.items():
        file.create_dataset(name, shape, dtype, compression=compression if shape[0] else None)
    for name, value in metadata.items():
        file[name] = _value(value)
    return file


def _value(noted: Json) -> Any:
    if isinstance(noted, dict):
        data = np.frombuffer(base64.b64decode(noted["base64"]), noted["dtype"])
        return data.reshape(noted["shape"])
    return np.array(_as_bytes(noted))


def _as_bytes(texts: Json) -> Any:
    return [_as_bytes(text) for text in texts] if isinstance(texts, list) else texts.encode()
