"""Writing of a D4RL file."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from diskreplay.interop.d4rl.names import TERMINALS, TIMEOUTS, array_of, next_of
from diskreplay.interop.exchange.episode_data import EpisodeData, Json, is_obs
from diskreplay.interop.exchange.exporting import Plan

_BUFFER_BYTES = 1 << 20  # of each array


def write(
    plan: Plan, episodes: Iterable[EpisodeData], has_next: bool, metadata: Mapping[str, Json], compression: str | None
) -> None:
    """Write a file with `next_observations` or without.

    An episode that was cut has the flag of a timeout, but for the last one of the file.
    """
    layout = _layout(plan, has_next)
    columns = {path: array for path in plan.schema.step_leaves if (array := array_of(path)) is not None}
    nexts = {path: next_of(path) for path in columns if is_obs(path) and next_of(path) in layout}
    with h5py.File(plan.path, "w") as file:
        arrays = {
            name: _Array(file.create_dataset(name, shape, dtype, compression=compression if shape[0] else None))
            for name, (shape, dtype) in layout.items()
        }
        for name, value in metadata.items():
            file[name] = _value(value)
        for number, episode in enumerate(episodes, 1):
            steps = len(episode)
            for path, array in columns.items():
                rows = episode.steps[path]
                arrays[array].add(rows[:steps])
                if path in nexts:
                    arrays[nexts[path]].add(rows[1:])
            timeout = episode.truncated or (episode.cut and number < plan.episodes)
            for name, flag in ((TERMINALS, episode.terminated), (TIMEOUTS, timeout)):
                flags = np.zeros(steps, np.bool_)
                flags[-1] = flag
                arrays[name].add(flags)
        for written in arrays.values():
            written.flush()


class _Array:
    """An array of the file, written by many rows at once."""

    def __init__(self, array: h5py.Dataset) -> None:
        self._array, self._written, self._waiting = array, 0, 0
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


def _layout(plan: Plan, has_next: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each array of steps."""
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
