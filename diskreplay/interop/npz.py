"""Data sets of NumPy files: a folder with one ``.npz`` an episode, which holds all that a store does.

``dataset.json`` has the schema, as `docs/format.md` describes it, and how many episodes and steps there are. A file
``episode-NNNNNNNN.npz`` has the arrays of one episode by the paths of the schema: ``obs`` or ``obs/image``, one row
longer than the others where there is a final observation, ``action``, ``reward``, ``extra/log_prob``, ``episode/seed``;
scalars ``terminated`` and ``truncated``, both false where it was cut; ``priority``, where steps were appended with
priorities; and ``notes``, UTF-8 text in JSON, if it has any.
"""

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from diskreplay import Store
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.choosing import Choice, Options
from diskreplay.interop.exchange.description import Description
from diskreplay.interop.exchange.episode_data import FIELDS, HIDDEN, PRIORITY, EpisodeData, is_part
from diskreplay.interop.exchange.exporting import Exported, Format, Plan, Where, export_from
from diskreplay.interop.exchange.foreign import foreign, opened_npz
from diskreplay.interop.exchange.importing import Imported, Progress, Source, import_into

__all__ = ["export_dataset", "import_dataset"]

NAME = "npz"
_TERMINATED, _TRUNCATED, _NOTES = "terminated", "truncated", "notes"


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Imported:
    """Import a folder of NumPy files into a new store, or the rest of it after an interruption.

    Parameters
    ----------
    source : path
        The folder, as `export_dataset` writes it.
    path : path
        The store; nothing, or what an interrupted import of this folder has left.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.
    **options
        What is taken, as which leaf and of which dtype: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such data set.
    FormatError
        It cannot be read.
    StoreExists
        Something else is at ``path``.
    """
    choice, folder = Choice(**options), Path(source).absolute()
    with foreign(folder):
        found = Description.read(folder, NAME)
    made = Source(
        NAME,
        folder,
        found.schema,
        found.episodes,
        found.steps,
        lambda first, _: _read(folder, first, found.episodes),
        found.metadata,
    )
    return import_into(path, made, choice, progress)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    where: Where | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Exported:
    """Export the ended episodes of a store to a folder of NumPy files.

    Parameters
    ----------
    store_or_path : Store or path
        The store.
    path : path
        The folder; nothing is there.
    where : callable, optional
        A predicate over `Episode`: those that are exported.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.
    dry_run : bool
        Write nothing, only return what would be.

    Raises
    ------
    StoreExists
        Something is at ``path``.
    """
    made = Format({}, _write, marks_hidden=True)
    return export_from(store_or_path, path, lambda *_: made, where=where, progress=progress, dry_run=dry_run)


def _read(folder: Path, first: int, count: int) -> Iterator[EpisodeData]:
    for number in range(first, count):
        with opened_npz(folder / _file(number)) as file:
            episode = _episode({name: file[name] for name in file.files})
        yield episode


def _episode(values: dict[str, NDArray[Any]]) -> EpisodeData:
    terminated, truncated = bool(values.pop(_TERMINATED)), bool(values.pop(_TRUNCATED))
    priority, notes = values.pop(PRIORITY, None), values.pop(_NOTES, None)
    values.pop(HIDDEN, None)
    return EpisodeData(
        {path: rows for path, rows in values.items() if not is_part(path, FIELDS)},
        terminated,
        truncated,
        {path: value for path, value in values.items() if is_part(path, FIELDS)},
        priority,
        None if notes is None else parse_json(notes.tobytes()),
    )


def _write(plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    for number, episode in enumerate(episodes):
        values = {**episode.steps, **episode.fields}
        values |= {_TERMINATED: episode.terminated, _TRUNCATED: episode.truncated, HIDDEN: episode.hidden}
        if episode.priority is not None:
            values[PRIORITY] = episode.priority
        if episode.notes is not None:
            values[_NOTES] = np.frombuffer(json.dumps(episode.notes).encode(), np.uint8)
        np.savez(plan.path / _file(number), **values)
    Description.write(plan, NAME)


def _file(number: int) -> str:
    return f"episode-{number:08d}.npz"
