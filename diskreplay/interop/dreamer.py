"""Replay folders of Dreamer: compressed NumPy files of rows.

There are two kinds of folders. DreamerV1 and V2, and ports of them, write one file for each episode,
``TIME-ID-LENGTH.npz``. A row of these files holds an observation, and the action and the reward that led to this
observation. The first row of an episode has zeros for action and reward. DreamerV3 writes the rows of each environment
to a chain of files ``TIME-ID-NEXT-LENGTH.npz``. NEXT is the ID of the file that continues the rows. A row of these
files holds an observation, the reward that came with the observation, and the action after the observation.

An import follows these rules:

- If any discount in the folder is neither 0 nor 1, the discounts become the extra field ``step_discount``.
- One-hot actions stay vectors. If a file has keys such as ``action/move`` in place of the key ``action``, the action is
  a dict.

In an export, an episode that was cut becomes truncated. If an episode has no final observation, the observation of its
last step is written a second time as the final observation.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, Schema, SchemaError, Store, StoreNotFound
from diskreplay.interop.exchange.choosing import Options, is_in
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, OBS, REWARD, EpisodeData, Lacking, is_obs, is_part
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import leaves_of
from diskreplay.interop.exchange.foreign import read_npz
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into
from diskreplay.interop.step_values import as_flags

__all__ = ["export_dataset", "import_dataset"]

NAME = "dreamer"
_DISCOUNT, _FIRST, _LAST, _TERMINAL, _LOG = "discount", "is_first", "is_last", "is_terminal", "log_"
_FLAGS = (_DISCOUNT, _FIRST, _LAST, _TERMINAL)
_BOOKKEEPING = ("reset", "stepid", "id")  # only DreamerV3's own driver and buffer use these keys
_STEP_DISCOUNT = f"{EXTRA}/step_discount"
_CHUNK = re.compile(r"[^-]+-(?P<id>[0-9A-Za-z]+)-(?P<next>[0-9A-Za-z]+)-\d+")

Rows = dict[str, NDArray[Any]]


class _Part(NamedTuple):
    file: Path
    start: int
    stop: int


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a replay folder of Dreamer into a new store, or resume an interrupted import.

    A step is the observation of a row, the action that followed the observation, and the reward of the next row. An
    episode is terminated if ``is_terminal`` is true in its last row. In a folder without ``is_terminal``, an episode is
    terminated if its last row has the discount 0. Any other episode is truncated. But an episode of DreamerV3 is cut if
    its files end before a row with ``is_last``.

    Every key is an observation, except ``action``, ``reward`` and the flags. But keys that begin with ``log_``, and the
    keys in the option ``extra``, are extra fields. A step takes the values of extra fields from the row that has the
    step's reward.

    Parameters
    ----------
    source : path
        The folder to import.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this folder.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such folder, or the folder has no episode.
    FormatError
        A file is damaged, or lacks a key that another file has; the message names the file.
    SchemaError
        Values of a key cannot be stored, or differ in shape or dtype.
    StoreExists
        Something else is at ``path``.
    """
    return import_into(path, source, _Replay, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    one_hot: bool = True,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a replay folder of DreamerV1 and V2.

    Observations keep their keys. An observation without a key becomes "image" if it is an image, otherwise "obs". Extra
    fields get the prefix ``log_``, so that Dreamer does not train on them.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    one_hot : bool
        Write discrete actions as one-hot vectors of float32, as Dreamer expects.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    SchemaError
        Two fields would have the same key, or a field would have the key of a flag, such as ``is_last``.
    StoreExists
        Something is at ``path``.
    """

    def make_format(schema: Schema, *_: object) -> Format:
        return Format(_not_held(schema), partial(_write, one_hot))

    return export_from(store_or_path, path, make_format, options)


# --- reading ---------------------------------------------------------------------------------------------------------


class _Replay(Source):
    format = NAME

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        if not self.place.is_dir():
            raise StoreNotFound(f"{self.place} is not a folder with replays of Dreamer: there is no such folder")
        files = sorted(file for file in self.place.glob("*.npz") if not file.name.startswith("."))
        chains = _chains(files)
        self._takes_actions = any(_CHUNK.fullmatch(file.stem) for file in files)
        self._has_other_discounts = False
        self._open = lru_cache(2)(_arrays)
        found = [parts for chain in chains for parts in self._split(chain)]
        self._parts = sorted(found, key=lambda parts: (parts[0].file.name, parts[0].start))
        if not self._parts:
            raise StoreNotFound(f"{self.place} has no episodes of Dreamer: no .npz file with two rows or more")
        self.episodes, self.steps = len(self._parts), sum(map(_steps, self._parts))
        first = self._parts[0][0].file
        self.names = self._paths(self._open(first))
        values = {path: self._open(first)[key] for path, key in self.names.items()}
        self.leaves = leaves_of(values, first)

    def _split(self, chain: Sequence[Path]) -> Iterator[list[_Part]]:
        """Yield each episode of a chain of files as a list of parts, one part for each file.

        Each file continues the rows of the file before it, so an episode may begin in one file and end in a later file.
        """
        parts: list[_Part] = []
        for file in chain:
            flags = _arrays(file, (REWARD, *_FLAGS))
            if REWARD not in flags:
                raise FormatError(f"{file} has no {REWARD}")
            rows = len(flags[REWARD])
            discount = flags.get(_DISCOUNT, np.ones(rows))
            self._has_other_discounts |= not np.isin(discount, (0, 1)).all()
            firsts = np.flatnonzero(flags.get(_FIRST, np.zeros(rows)))
            lasts = np.flatnonzero(flags.get(_LAST, np.zeros(rows))) + 1
            bounds = sorted({0, *map(int, firsts), *map(int, lasts), rows})
            for start, stop in pairwise(bounds):
                if start in firsts:
                    yield from _if_steps(parts)
                    parts = []
                parts = [*parts, _Part(file, start, stop)]
                if stop in lasts:
                    yield from _if_steps(parts)
                    parts = []
        yield from _if_steps(parts)

    def _paths(self, keys: Collection[str]) -> dict[str, str]:
        """Return the key of each leaf, by the leaf's path, such as ``{"obs/image": "image"}``."""
        actions, extra = self.choice.named(ACTION) or [ACTION], self.choice.named(EXTRA)
        found = {REWARD: REWARD}
        for key in keys:
            if key not in extra and any(key == each or (each not in keys and is_in(key, each)) for each in actions):
                found[ACTION if key == ACTION else f"{ACTION}/{key.removeprefix(f'{ACTION}/')}"] = key
        if self._has_other_discounts:
            found[_STEP_DISCOUNT] = _DISCOUNT
        taken = {*found.values(), *_FLAGS}
        for key in keys:
            if key in taken or (self._takes_actions and key in _BOOKKEEPING):
                continue
            if any(is_in(key, name) for name in extra) or key.startswith((_LOG, "log/")):
                found[f"{EXTRA}/{_extra_name(key)}"] = key
            else:
                found[f"{OBS}/{key}"] = key
        return found

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        names = {path: key for path, key in self.names.items() if path in wanted}
        return (self._episode(parts, names) for parts in self._parts[first:])

    def _episode(self, parts: Sequence[_Part], paths: Mapping[str, str]) -> EpisodeData:
        rows, where = self._rows(parts, paths.values()), parts[0].file
        steps: Rows = {}
        for path, key in paths.items():
            if is_obs(path):
                steps[path] = rows[key]
            else:
                steps[path] = rows[key][:-1] if is_part(path, ACTION) and self._takes_actions else rows[key][1:]
        terminal = rows.get(_DISCOUNT, np.ones(1))[-1] == 0
        if _TERMINAL in rows:
            terminal = as_flags(rows[_TERMINAL], f"{where}: {_TERMINAL}", FormatError)[-1]
        # A file of DreamerV1 and V2 is a complete episode, even if a time limit ended the episode without setting a
        # flag.
        is_last = rows[_LAST][-1] if self._takes_actions and _LAST in rows else True
        return EpisodeData(steps, bool(terminal), bool(is_last and not terminal))

    def _rows(self, parts: Sequence[_Part], keys: Collection[str]) -> Rows:
        pieces = [{key: rows[p.start : p.stop] for key, rows in self._open(p.file).items()} for p in parts]
        where = parts[0].file
        if any(piece.keys() != pieces[0].keys() for piece in pieces):
            raise FormatError(f"{parts[-1].file} has other keys than {where}")
        rows = pieces[0]
        if len(pieces) > 1:
            rows = {key: np.concatenate([piece[key] for piece in pieces]) for key in rows}
        if missing := [key for key in keys if key not in rows]:
            raise FormatError(f"{where} has no {missing[0]!r}; it has {', '.join(rows)}")
        count = len(rows[REWARD])
        if wrong := [key for key in keys if len(rows[key]) != count]:
            raise FormatError(f"{where} has {len(rows[wrong[0]])} rows of {wrong[0]!r} and {count} of {REWARD}")
        return rows


def _chains(files: Sequence[Path]) -> list[list[Path]]:
    """Return chains of files: each file of a chain continues the rows of the file before it."""
    chunks = {match["id"]: (file, match["next"]) for file in files if (match := _CHUNK.fullmatch(file.stem))}
    followed = {after for _, after in chunks.values()}
    chains = [[file] for file in files if not _CHUNK.fullmatch(file.stem)]
    for first in [name for name in chunks if name not in followed]:
        chain, name = [], first
        while name in chunks:
            file, name = chunks.pop(name)
            chain.append(file)
        chains.append(chain)
    return chains + [[file] for file, _ in chunks.values()]  # files whose NEXT ids form a circle


def _if_steps(parts: list[_Part]) -> Iterator[list[_Part]]:
    if _steps(parts) > 0:
        yield parts


def _steps(parts: Sequence[_Part]) -> int:
    return sum(part.stop - part.start for part in parts) - 1


def _arrays(file: Path, names: Sequence[str] | None = None) -> Rows:
    found = read_npz(file, None if names is None else names.__contains__)
    if scalars := [key for key, rows in found.items() if not rows.ndim]:
        raise FormatError(f"{file}: {scalars[0]!r} is a single value, not an array of rows")
    return found


def _extra_name(key: str) -> str:
    name = key.removeprefix("log/").removeprefix(_LOG).replace("/", "_")
    try:
        Schema(Field((), "float32"), Field((), "float32"), extra={name: Field((), "float32")})
    except SchemaError:
        return f"{_LOG}{name}"  # a store refuses an extra field called ``name``
    return name


# --- writing ---------------------------------------------------------------------------------------------------------


def _keys(schema: Schema) -> dict[str, str]:
    found: dict[str, str] = {}
    for path, field in schema.step_leaves.items():
        part, _, name = path.partition("/")
        if path == OBS:
            found[path] = "image" if len(field.shape) == 3 else OBS
        elif part == OBS:
            found[path] = name
        elif part == EXTRA:
            found[path] = name if name.startswith(_LOG) else f"{_LOG}{name}"
        else:
            found[path] = path
    for path, key in found.items():
        if list(found.values()).count(key) > 1 or key in _FLAGS:
            raise SchemaError(f"the key {key!r} of {path} is taken in a replay of Dreamer; give the field another name")
    return found


def _not_held(schema: Schema) -> dict[str, str]:
    _keys(schema)
    no_place = "a replay of Dreamer has no place for it"
    return {path: no_place for path in schema.leaves if path.startswith("episode/")} | {
        Lacking.PRIORITY: no_place,
        Lacking.ENDS: (
            "cut episodes become truncated, and an episode that is terminated and truncated becomes terminated"
        ),
        Lacking.NO_FINAL_OBS: "without a final observation, the last one is repeated",
        Lacking.NOTES: no_place,
        Lacking.SCHEMA: no_place,
        Lacking.METADATA: no_place,
    }


def _write(one_hot: bool, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    keys = _keys(plan.schema)
    for number, episode in enumerate(episodes):
        count = len(episode) + 1
        rows: Rows = {}
        for path, values in episode.steps.items():
            if is_obs(path):
                rows[keys[path]] = values
            else:
                written = _one_hot(values, plan.schema.leaves[path]) if one_hot and is_part(path, ACTION) else values
                rows[keys[path]] = np.concatenate([np.zeros_like(written[:1]), written])
        last = np.arange(count) == count - 1
        rows |= {_FIRST: np.arange(count) == 0, _LAST: last, _TERMINAL: last & episode.terminated}
        rows[_DISCOUNT] = np.where(rows[_TERMINAL], 0, 1).astype(np.float32)
        np.savez_compressed(plan.path / f"{_stem(number)}-{count}.npz", **rows)  # type: ignore[arg-type]


def _one_hot(values: NDArray[Any], field: Field) -> NDArray[Any]:
    space = field.space or {}
    if space.get("type") != "Discrete" or values.ndim != 1:
        return values
    found: NDArray[Any] = np.eye(space["n"], dtype=np.float32)[values.astype(np.int64) - space["start"]]
    return found


def _stem(number: int) -> str:
    # File names begin with a time. Exported files sort before the files of a later training run.
    return f"00000000T000000-{number:032x}"
