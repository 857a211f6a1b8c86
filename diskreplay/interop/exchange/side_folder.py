"""The side folder: what a format cannot hold of the episodes of an export, in files beside its own.

``export.json`` says of what the export is made and, at its end, that it is complete. ``NNNNNNNN.npz`` has, from episode
N on, arrays named ``K/PATH``: what the K-th episode of the file has beyond the format. Its array ``json`` is the UTF-8
text of a list: how each episode ended, and its notes.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, Schema
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.episode_data import HIDDEN, PRIORITY, EpisodeData, Json, is_obs
from diskreplay.interop.exchange.foreign import foreign, new_file, reading
from diskreplay.interop.exchange.npz_files import UNREADABLE, opened_npz

FINAL_OBS, NO_FINAL_OBS = "final_obs", "no_final_obs"
ENDS, CUT, NOTES, SCHEMA, METADATA = "ends", "cut", "notes", "schema", "metadata"
"""Names of data other than leaves that a format may lack, with "priority" and "hidden".

The observation after the last step, or an episode without it (a row in its place is left out again); an episode that
is both terminated and truncated, or neither; one that is neither alone; notes of episodes; the schema; and what an
import noted of the whole data set. "hidden" are the marks of hidden steps, which no import reads.
"""

_NAME, _DOCUMENT, _IDS, _CHECKPOINT = "diskreplay", "export.json", "ids.npy", "checkpoint"
_VERSION = 1
_TEXTS = "json"
# A file is written when what waits takes so many bytes, or is of so many episodes.
_FILE_BYTES, _FILE_EPISODES = 32 << 20, 1024


def side_path(target: Path, is_folder: bool) -> Path:
    """Return where the side folder of an export is: inside a format's folder, or beside its file."""
    return target / _NAME if is_folder else target.with_name(f"{target.name}.{_NAME}")


def find_side(target: Path) -> "Side | None":
    """Return the side folder of a data set that was exported from a store, None where there is none.

    Raises
    ------
    FormatError
        It is of an export that was not completed, or cannot be read.
    """
    for path in (side_path(target, is_folder) for is_folder in (True, False)):
        with foreign(path):
            document = read_document(path)
            if document is not None:
                if not document["complete"]:
                    raise FormatError(
                        f"the export to {target} was interrupted; repeat it, which resumes it, or delete it"
                    )
                return Side(path, document)
    return None


def read_document(path: Path) -> dict[str, Json] | None:
    """Return the document of a side folder, None where there is none."""
    try:
        document = parse_json((path / _DOCUMENT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise FormatError(f"{path / _DOCUMENT} is not JSON ({error}); move {path} away to import without it") from None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise FormatError(f"{path / _DOCUMENT} is not one that this release reads; update diskreplay, or move it away")
    return document


def write_document(path: Path, document: Mapping[str, Json]) -> None:
    """Write the document of a side folder, whole or not at all."""
    path.mkdir(parents=True, exist_ok=True)
    replace_file(path / _DOCUMENT, json.dumps({"version": _VERSION, **document}, indent=1).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and give it its own."""
    draft = path.with_name(f".{path.name}.new")
    new_file(draft).write_bytes(data)
    os.replace(draft, path)


def read_ids(path: Path) -> NDArray[np.int64]:
    """Return the ids by which an interrupted export knows its episodes."""
    with reading(path / _IDS):
        ids: NDArray[np.int64] = np.load(path / _IDS, allow_pickle=False)
    return ids


def write_ids(path: Path, ids: NDArray[np.int64]) -> None:
    """Write the ids by which an export knows its episodes."""
    path.mkdir(parents=True, exist_ok=True)
    draft = path / f".{_IDS}"
    np.save(new_file(draft), ids)
    os.replace(draft, path / _IDS)


def checkpoint_path(path: Path) -> Path:
    """Return the file in which a writer of a format says how far it is, if it does."""
    return path / _CHECKPOINT


def remove_progress(path: Path) -> None:
    """Remove what an interrupted export is resumed by: the export is complete, or a new one."""
    for name in (_IDS, _CHECKPOINT):
        (path / name).unlink(missing_ok=True)


class Side:
    """The side folder of a complete export.

    Attributes
    ----------
    path : Path
        The folder.
    schema : Schema
        The schema of the data set.
    hidden : str, optional
        The leaf of it that marks hidden steps: no field of the store.
    episodes : int
        How many episodes the export has.
    metadata : dict
        What the store's own import had noted.
    """

    def __init__(self, path: Path, document: Mapping[str, Json]) -> None:
        self.path, self.episodes = path, int(document["episodes"])
        self.schema, self.metadata = Schema.from_json(document["schema"]), dict(document["metadata"])
        self.hidden: str | None = document.get(HIDDEN)
        self._starts = _starts(path)
        self._read = lru_cache(1)(_read_file)  # episodes are read in order

    def complete(self, number: int, episode: EpisodeData) -> EpisodeData:
        """Return an episode of the data set with what its format could not hold."""
        if self.hidden is not None:
            kept = {path: rows for path, rows in episode.steps.items() if path != self.hidden}
            episode = replace(episode, steps=kept)
        at = int(np.searchsorted(self._starts, number, "right")) - 1
        if at < 0:
            return episode
        texts, values = self._read(self.path / _file(self._starts[at]))
        k = number - self._starts[at]
        if k >= len(texts):
            return episode
        found = values.get(k, {})
        steps = {path: rows for path, rows in episode.steps.items() if path in self.schema.step_leaves}
        steps |= {path: rows for path, rows in found.items() if path in self.schema.step_leaves}
        for path, row in found.items():
            if path.startswith(f"{FINAL_OBS}/") and (leaf := path.removeprefix(f"{FINAL_OBS}/")) in steps:
                steps[leaf] = np.concatenate([steps[leaf][: len(episode)], row])
        if NO_FINAL_OBS in texts[k]:  # what the format has in its place is none
            steps |= {path: rows[: len(episode)] for path, rows in steps.items() if is_obs(path)}
        fields = {path: value for path, value in {**episode.fields, **found}.items() if path in self.schema.leaves}
        fields = {path: value for path, value in fields.items() if path not in steps}
        known = {name: texts[k][name] for name in ("terminated", "truncated", "notes") if name in texts[k]}
        return replace(episode, steps=steps, fields=fields, priority=found.get(PRIORITY, episode.priority), **known)


def _starts(path: Path) -> list[int]:
    return sorted(int(file.stem) for file in path.glob("[0-9]*.npz"))


def _file(start: int) -> str:
    return f"{start:08d}.npz"


def _read_file(path: Path) -> tuple[list[dict[str, Json]], dict[int, dict[str, NDArray[Any]]]]:
    values: dict[int, dict[str, NDArray[Any]]] = {}
    try:
        with opened_npz(path) as file:
            texts = parse_json(file[_TEXTS].tobytes())
            for name in file.files:
                if name != _TEXTS:
                    k, _, leaf = name.partition("/")
                    values.setdefault(int(k), {})[leaf] = file[name]
    except UNREADABLE as error:
        raise FormatError(f"{path} cannot be read ({error}); move {path.parent} away to import without it") from None
    return texts, values


class SideWriter:
    """Writes what a format cannot hold, some episodes in each file.

    Parameters
    ----------
    path : Path
        The side folder.
    not_held : mapping
        Names of what the format lacks: paths of leaves, and the names above.

    Attributes
    ----------
    lost : set of str
        Those of the names that some episode had a value of.
    """

    def __init__(self, path: Path, not_held: Mapping[str, str]) -> None:
        self._path, self._not_held = path, not_held
        self.lost: set[str] = set()
        self._texts: list[dict[str, Json]] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        *whole, last = _starts(path) or [0]
        # The last file of an interrupted export may be short: its episodes are written again.
        self.episodes = self._start = last
        for start in whole:
            texts, values = _read_file(path / _file(start))
            for k, found in values.items():
                self.lost |= names_of(found, texts[k], not_held)

    def add(self, episode: EpisodeData) -> None:
        """Add what the next episode has beyond the format; an episode that has nothing takes no space."""
        arrays, texts = beyond(episode, self._not_held)
        self.lost |= names_of(arrays, texts, self._not_held)
        if not self._texts and not arrays and not texts:
            self._start += 1
        else:
            self._arrays |= {f"{len(self._texts)}/{name}": array for name, array in arrays.items()}
            self._texts.append(texts)
        self.episodes += 1
        if (
            sum(array.nbytes for array in self._arrays.values()) > _FILE_BYTES
            or self.episodes - self._start >= _FILE_EPISODES
        ):
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._texts:
            self._path.mkdir(parents=True, exist_ok=True)
            target = self._path / _file(self._start)
            draft = target.with_name(f".{target.name}")  # which savez keeps, as it ends in .npz
            texts = np.frombuffer(json.dumps(self._texts).encode(), np.uint8)
            np.savez(new_file(draft), **{**self._arrays, _TEXTS: texts})  # type: ignore[arg-type]
            os.replace(draft, target)
        self._texts, self._arrays, self._start = [], {}, self.episodes


def beyond(episode: EpisodeData, not_held: Mapping[str, str]) -> tuple[dict[str, NDArray[Any]], dict[str, Json]]:
    """Return the arrays and the JSON of an episode that a format lacks."""
    both = {**episode.steps, **{path: np.asarray(value) for path, value in episode.fields.items()}}
    arrays = {path: values for path, values in both.items() if path in not_held}
    if FINAL_OBS in not_held and episode.has_final_obs:
        final = {path: rows[len(episode) :] for path, rows in episode.steps.items() if is_obs(path)}
        arrays |= {f"{FINAL_OBS}/{path}": rows for path, rows in final.items() if path not in not_held}
    if PRIORITY in not_held and episode.priority is not None:
        arrays[PRIORITY] = episode.priority
    if HIDDEN in not_held and episode.hidden_steps:
        arrays[HIDDEN] = episode.hidden
    texts: dict[str, Json] = {}
    has_one_flag = episode.terminated != episode.truncated
    if not has_one_flag and (ENDS in not_held or (CUT in not_held and episode.cut)):
        texts = {"terminated": episode.terminated, "truncated": episode.truncated}
    if NO_FINAL_OBS in not_held and not episode.has_final_obs:
        texts[NO_FINAL_OBS] = True
    if NOTES in not_held and episode.notes is not None:
        texts["notes"] = episode.notes
    return arrays, texts


def names_of(arrays: Mapping[str, Any], texts: Mapping[str, Json], not_held: Mapping[str, str]) -> set[str]:
    """Return by which of the names in ``not_held`` these are there."""
    names = {name.split("/")[0] if name.startswith(f"{FINAL_OBS}/") else name for name in arrays}
    if "terminated" in texts:
        names |= {ENDS} if texts["terminated"] else {ENDS, CUT}
    return (names | ({NOTES, NO_FINAL_OBS} & texts.keys())) & not_held.keys()
