"""Folders of TorchRL with memory-mapped tensors: the files of ``ReplayBuffer.dumps`` and of ``LazyMemmapStorage``.

A tensordict is a folder: ``meta.json`` has the shape and dtype of each tensor, and ``NAME.memmap`` has the bytes of the
tensor NAME. A nested tensordict is a folder inside the folder of the outer tensordict. A row is a transition. The
tensordict "next" has the reward, the flags and the next observation. The folders are read and written without TorchRL.

An import follows these rules:

- Rows are in the order of time. In a full storage, ``writer/metadata.json`` says which row is the oldest. Without
  ``storage_metadata.json``, all rows are steps, even rows that were never written.
- The keys "index", "priority", "_weight" and "priority_weight" are left out. ``skip`` leaves out further keys, such as
  a key that a store cannot hold.
- If only one of the keys "terminated" and "truncated" exists, a step that is done without this flag has the other flag.

An export writes a storage of one axis with trajectory ids. A cut episode becomes truncated, unless it is the last
episode. In an episode without a final observation, the last observation is repeated.
"""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, Schema, SchemaError, Store, StoreNotFound
from diskreplay.interop.exchange.choosing import Choice, Options
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, OBS, REWARD, EpisodeData, Lacking, is_obs, is_part
from diskreplay.interop.exchange.exporting import ChosenEpisode, Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import leaves_of
from diskreplay.interop.exchange.foreign import DTYPES, check_memory, read_document, reading
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into
from diskreplay.interop.exchange.lanes import Ints, Piece, breaks, pieces, ring_order, rows_at, with_final
from diskreplay.interop.step_values import as_flags

__all__ = ["export_dataset", "import_dataset"]

NAME = "torchrl_memmap"
_NEXT, _DONE, _TERMINATED, _TRUNCATED = "next", "done", "terminated", "truncated"
_FLAGS = (_DONE, _TERMINATED, _TRUNCATED)
_TRAJECTORY = "collector/traj_ids"
_OBSERVATION = "observation"
# Keys that a storage or a sampler adds to the collected data.
_BOOKKEEPING = ("index", "priority", "_weight", "priority_weight")
_META, _STORAGE, _WRITER = "meta.json", "storage", "writer"
_DTYPES = {f"torch.{name}": np.dtype(name) for name in DTYPES}
_TYPE = "<class 'tensordict._td.TensorDict'>"

Leaves = dict[str, NDArray[Any]]  # a key joins the keys of nested tensordicts, such as "next/state/x"


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a folder of TorchRL into a new store, or resume an interrupted import.

    A key both at the root and below "next" is an observation; other keys at the root are extra fields. If the only
    observation has the key "observation", this observation becomes ``obs`` itself, not a dict. The key ``("collector",
    "traj_ids")`` has trajectory ids: rows are ordered by these ids. Without this key, each index along the axes after
    the first is one environment. An episode ends after a step that is done. It is cut if the next observation of a row
    is not the observation of the next row. So if several environments wrote to one axis in turn, each change of the
    environment cuts an episode.

    Parameters
    ----------
    source : path
        The folder that ``dumps`` wrote, or its ``storage``, or any saved tensordict. All rows of a saved tensordict are
        steps, in order.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this folder.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        ``source`` is not a folder of TorchRL.
    FormatError
        The folder is damaged, or its rows are not transitions of one agent.
    SchemaError
        A tensor cannot be stored.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    """
    return import_into(path, source, _Transitions, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    capacity: int | None = None,
    batch_size: int = 256,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export ended episodes to a folder that TorchRL's ``ReplayBuffer.loads`` reads.

    Load the folder into a buffer with TorchRL's random sampler and a storage of the same capacity, such as
    ``LazyMemmapStorage(capacity)``.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    capacity : int, optional
        The number of rows of the storage. None: the number of steps. Rows without a step take no disk space.
    batch_size : int
        The batch size of the loaded buffer.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    SchemaError
        Two leaves would have the same key, or ``capacity`` is less than the number of steps.
    StoreExists
        A file or folder exists at ``path``.
    """

    def make_format(schema: Schema, episodes: Sequence[ChosenEpisode], _: object) -> Format:
        steps = sum(map(len, episodes))
        rows = steps if capacity is None else capacity
        if rows < steps:
            raise SchemaError(f"a storage of {rows} rows does not hold {steps} steps; give a capacity of more rows")
        return Format(_not_held(schema), partial(_write, rows, batch_size))

    return export_from(store_or_path, path, make_format, options)


# --- reading ---------------------------------------------------------------------------------------------------------


class _Transitions(Source):
    """The transitions in a folder of TorchRL, divided into episodes."""

    format = NAME

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        folder = self.place
        root = folder / _STORAGE if (folder / _STORAGE / _META).exists() else folder
        shape, leaves = _tensordict(root, folder, self.choice, self.left_out)
        if not shape:
            raise FormatError(f"{folder} has a tensordict without rows")
        rows, lanes = shape[0], math.prod(shape[1:])
        check_memory(32 * rows * lanes, f"{folder}: the order and flags of {rows} rows of {lanes} lanes")
        self._order = _order(folder, root, rows, lanes)
        self._leaves = {key: _by_lane(key, leaf, shape, lanes) for key, leaf in leaves.items()}
        self._flags = self._read_flags(rows, lanes)
        self.names = self._find_names(None if self.choice.obs is None else self.choice.named(OBS))
        self._pieces = self._split(lanes)
        self.episodes, self.steps = len(self._pieces), sum(map(len, self._pieces))
        values = {path: self._leaves[key][:0, 0] for path, key in self.names.items()}
        self.leaves = leaves_of(values, folder, "; skip leaves keys out")

    def _next(self, key: str) -> NDArray[Any] | None:
        return self._leaves.get(f"{_NEXT}/{key}")

    def _read_flags(self, rows: int, lanes: int) -> dict[str, NDArray[np.bool_]]:
        found = {name: flag for name in _FLAGS if (flag := self._next(name)) is not None}
        if self._next(REWARD) is None or not found:
            raise FormatError(f"{self.place} has no transitions: no reward and done below {_NEXT!r}")
        for name in (REWARD, *found):
            leaf = self._leaves[f"{_NEXT}/{name}"]
            if leaf.size != rows * lanes:
                raise FormatError(
                    f"{self.place}: {_NEXT!r} has {name} of shape {leaf.shape[2:]} in each row, so rows are not the "
                    "steps of one agent; store one step in each row"
                )
        what = f"{self.place}: {_NEXT}/"
        flags = {n: as_flags(leaf, what + n, FormatError).reshape(rows, lanes) for n, leaf in found.items()}
        done = flags.get(_DONE, np.zeros((rows, lanes), np.bool_))
        truncated = flags.get(_TRUNCATED, done & ~flags[_TERMINATED] if _TERMINATED in flags else done & False)
        return {_TERMINATED: flags.get(_TERMINATED, done & ~truncated), _TRUNCATED: truncated}

    def _find_names(self, obs: Sequence[str] | None) -> dict[str, str]:
        """Return the key of each leaf by the leaf's path in the store, such as ``{"reward": "next/reward"}``."""
        left_out = {*_FLAGS, *_BOOKKEEPING}
        keys = [key for key in self._leaves if key.split("/")[0] not in (_NEXT, "collector") and key not in left_out]
        chosen = self._choose_obs(keys, obs)
        actions = [key for key in keys if is_part(key, ACTION)]
        found = {OBS: _OBSERVATION} if chosen == [_OBSERVATION] else {f"{OBS}/{key}": key for key in chosen}
        found |= {key: key for key in actions} | {REWARD: f"{_NEXT}/{REWARD}"}
        found |= {f"{EXTRA}/{key}": key for key in keys if key not in (*chosen, *actions)}
        after = [key.removeprefix(f"{_NEXT}/") for key in self._leaves if key.startswith(f"{_NEXT}/")]
        return found | {f"{EXTRA}/{key}": f"{_NEXT}/{key}" for key in after if key not in {REWARD, *keys, *left_out}}

    def _choose_obs(self, keys: Sequence[str], obs: Sequence[str] | None) -> list[str]:
        seen = [key for key in keys if self._next(key) is not None and not is_part(key, ACTION)]
        chosen = seen if obs is None else [key for key in keys if any(is_part(key, name) for name in obs)]
        if not chosen or any(key not in seen for key in chosen):
            raise FormatError(
                f"{self.place} has no observations {', '.join(obs) if obs else ''} both at its root and below "
                f"{_NEXT!r}; it has {', '.join(self._leaves)}"
            )
        return chosen

    def _split(self, lanes: int) -> list[Piece]:
        """Return the episodes in the order of their start.

        If there are trajectory ids, the rows are ordered by these ids in one lane.
        """
        trajectories = self._leaves.get(_TRAJECTORY)
        if trajectories is not None and trajectories.ndim == 2:
            flat = (self._order[:, None] * lanes + np.arange(lanes)).reshape(-1)
            by_trajectory = np.argsort(trajectories.reshape(-1)[flat], kind="stable")
            self._order = flat[by_trajectory]
            self._leaves = {key: leaf.reshape(-1, 1, *leaf.shape[2:]) for key, leaf in self._leaves.items()}
            self._flags = {name: flag.reshape(-1, 1) for name, flag in self._flags.items()}
        self._flags = {name: flag[self._order] for name, flag in self._flags.items()}
        ended = self._flags[_TERMINATED] | self._flags[_TRUNCATED]
        before = [self._leaves[key] for path, key in self.names.items() if is_obs(path)]
        after = [self._leaves[f"{_NEXT}/{key}"] for path, key in self.names.items() if is_obs(path)]
        ids = None
        if trajectories is not None and trajectories.ndim == 2:
            ids = trajectories.reshape(-1)[self._order]
            ended[:-1, 0] |= ids[1:] != ids[:-1]
        broken = breaks(before, after, self._order) & ~ended
        self.cut = int(np.count_nonzero(broken))
        ended |= broken
        if ids is None:
            return pieces(ended)
        return sorted(pieces(ended), key=lambda piece: int(by_trajectory[piece.start]))

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        return (self._episode(piece, wanted) for piece in self._pieces[first:])

    def _episode(self, piece: Piece, wanted: Collection[str]) -> EpisodeData:
        rows, lane, last = rows_at(self._order[piece.start : piece.stop]), piece.lane, piece.stop - 1
        steps: Leaves = {}
        for path, key in self.names.items():
            if path not in wanted:
                continue
            steps[path] = self._leaves[key][rows, lane]
            if is_obs(path):
                final = self._leaves[f"{_NEXT}/{key}"][self._order[last : piece.stop], lane]
                steps[path] = with_final(steps[path], final, f"{self.place}: {_NEXT}/{key}")
        terminated, truncated = (bool(self._flags[name][last, lane]) for name in (_TERMINATED, _TRUNCATED))
        return EpisodeData(steps, terminated, truncated)


def _order(folder: Path, root: Path, rows: int, lanes: int) -> Ints:
    """Return the indices of the rows that have steps, oldest first."""
    stored = _read_json(root / "storage_metadata.json", missing={})
    if stored.get("is_pytree"):
        raise FormatError(f"{folder} has a pytree and no tensordict; dump a buffer of tensordicts")
    written = _read_json(folder / _WRITER / "metadata.json", missing={})
    length, cursor = stored.get("len", rows * lanes), written.get("cursor", 0)
    if type(length) is not int or type(cursor) is not int:
        raise FormatError(f"{folder} claims {length!r:.40} rows and a cursor at row {cursor!r:.40}, of {rows} rows")
    filled = length // max(1, lanes)
    if not 0 <= filled <= rows or not 0 <= cursor <= rows:
        raise FormatError(f"{folder} claims {filled} rows and a cursor at row {cursor}, of {rows} rows")
    return ring_order(rows, cursor % rows, True) if filled == rows else ring_order(rows, filled, False)


def _by_lane(key: str, leaf: NDArray[Any], shape: tuple[int, ...], lanes: int) -> NDArray[Any]:
    if leaf.shape[: len(shape)] != shape:
        raise FormatError(f"{key} has the shape {leaf.shape}, and the tensordict {shape}")
    return leaf.reshape(shape[0], lanes, *leaf.shape[len(shape) :])


def _tensordict(
    folder: Path, shown: Path, choice: Choice, left_out: list[str], above: str = ""
) -> tuple[tuple[int, ...], Leaves]:
    """Map the tensors of a folder into memory. Return the shape of the tensordict, and the tensors by key.

    Keys that the option ``skip`` names are added to ``left_out``.
    """
    meta = _read_json(folder / _META)
    leaves: Leaves = {}
    for key, entry in meta.items():
        if not isinstance(entry, Mapping):
            continue  # this is an attribute of the tensordict, not a tensor
        if "/" in key or key in ("", ".", ".."):
            raise FormatError(f"{shown}: {key!r} cannot be a key")
        if choice.skips(name := f"{above}{key}".removeprefix(f"{_NEXT}/")):
            left_out.append(name)
            continue
        if entry.get("type") == "TensorDict":
            leaves |= _tensordict(folder / key, shown, choice, left_out, f"{above}{key}/")[1]
        elif "dtype" in entry and not entry.get("is_nested"):
            leaves[f"{above}{key}"] = _tensor(folder / f"{key}.memmap", entry)
    try:
        shape = tuple(int(size) for size in meta["shape"])
        if any(size < 0 for size in shape):
            raise ValueError(shape)
        return shape, leaves
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{folder / _META} does not tell the shape of a tensordict") from None


def _tensor(file: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise SchemaError(f"{file} is of {entry['dtype']}, which cannot be stored")
    with reading(file):
        shape = tuple(int(size) for size in entry["shape"])
        if any(size < 0 for size in shape):
            raise ValueError(f"it has the shape {shape}")
        if 0 in shape:
            return np.empty(shape, dtype)
        mapped: NDArray[Any] = np.memmap(file, dtype, "r", shape=shape)
        return mapped.view(np.ndarray)


def _read_json(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return read_document(file)
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise StoreNotFound(f"{file.parent} is not a folder of TorchRL: there is no {file.name}") from None


# --- writing ---------------------------------------------------------------------------------------------------------


def _keys(schema: Schema) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in schema.step_leaves:
        part, _, name = path.partition("/")
        if path == OBS:
            found[path] = _OBSERVATION
        elif path == REWARD:
            found[path] = f"{_NEXT}/{REWARD}"
        else:
            found[path] = name if part in (OBS, EXTRA) else path
    taken = {_NEXT, REWARD, "collector", ACTION, *_FLAGS, *_BOOKKEEPING}
    for path, key in found.items():
        is_taken = not path.startswith((ACTION, REWARD)) and key.split("/")[0] in taken
        if is_taken or list(found.values()).count(key) > 1:
            raise SchemaError(f"the key {key!r} of {path} is taken in a transition of TorchRL; give it another name")
    return found


def _not_held(schema: Schema) -> dict[str, str]:
    _keys(schema)
    no_place = "a transition has no place for it"
    return {path: no_place for path in schema.leaves if path.startswith("episode/")} | {
        Lacking.PRIORITY: "samplers of TorchRL keep their own priorities",
        Lacking.CUT: "cut episodes become truncated",
        Lacking.NO_FINAL_OBS: "the last observation is repeated if there is no final observation",
        Lacking.NOTES: no_place,
        Lacking.SCHEMA: "only shapes and dtypes are kept",
        Lacking.METADATA: no_place,
    }


def _write(capacity: int, batch_size: int, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    folder = _Folder(plan, capacity, batch_size)
    for episode in episodes:
        folder.add(episode)
    folder.finish()


class _Folder:
    def __init__(self, plan: Plan, capacity: int, batch_size: int) -> None:
        self._plan, self._capacity, self._batch_size = plan, capacity, batch_size
        self._folder, self._keys = plan.path / _STORAGE, _keys(plan.schema)
        self._maps: Leaves = {}
        self._episodes = self._rows = 0

    def add(self, episode: EpisodeData) -> None:
        count = len(episode)
        last = np.arange(count) == count - 1
        # If the last episode was cut, its last step is not done, like the newest step of a buffer in use.
        is_open = episode.cut and self._rows + count == self._plan.steps
        truncated = last & ((episode.truncated or episode.cut) and not is_open)
        terminated = last & episode.terminated
        for path, key in self._keys.items():
            rows = episode.steps[path]
            if is_obs(path):
                self._write(key, rows[:count])
                self._write(f"{_NEXT}/{key}", rows[1:])
            else:
                self._write(key, rows[:, None] if path == REWARD else rows)
        ends = {_DONE: terminated | truncated, _TERMINATED: terminated, _TRUNCATED: truncated}
        for name, flag in ends.items():
            self._write(name, np.zeros((count, 1), np.bool_))
            self._write(f"{_NEXT}/{name}", flag[:, None])
        self._write(_TRAJECTORY, np.full(count, self._episodes))
        self._rows += count
        self._episodes += 1

    def _write(self, key: str, rows: NDArray[Any]) -> None:
        if key not in self._maps:
            file = self._folder / f"{key}.memmap"
            file.parent.mkdir(parents=True, exist_ok=True)
            self._maps[key] = np.memmap(file, rows.dtype, "w+", shape=(self._capacity, *rows.shape[1:]))
        self._maps[key][self._rows : self._rows + len(rows)] = rows

    def finish(self) -> None:
        for mapped in self._maps.values():
            assert isinstance(mapped, np.memmap)
            mapped.flush()
        writer = {"cursor": self._rows % self._capacity, "write_count": self._rows}
        self._write_json("buffer_metadata.json", {"batch_size": self._batch_size, "consume_after_n_samples": None})
        self._write_json(f"{_WRITER}/metadata.json", writer)
        self._write_json(f"{_STORAGE}/storage_metadata.json", {"metadata": {}, "is_pytree": False, "len": self._rows})
        for folder in {"", *(above for key in self._maps for above in _folders(key))}:
            self._write_json(f"{_STORAGE}/{folder}{_META}", self._meta(folder))

    def _meta(self, folder: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, mapped in self._maps.items():
            if not key.startswith(folder):
                continue
            name, _, below = key.removeprefix(folder).partition("/")
            dtype = f"torch.{mapped.dtype.name}"
            tensor = {"device": "cpu", "shape": list(mapped.shape), "dtype": dtype, "is_nested": False}
            found[name] = {"type": "TensorDict"} if below else tensor
        return found | {"shape": [self._capacity], "device": "cpu", "_type": _TYPE}

    def _write_json(self, name: str, value: Any) -> None:
        file = self._plan.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))


def _folders(key: str) -> Iterator[str]:
    """Yield the folders above a key: ``"next/"`` and ``"next/state/"`` for ``"next/state/x"``."""
    names = key.split("/")
    return (f"{'/'.join(names[: i + 1])}/" for i in range(len(names) - 1))
