"""Import: a new store of the episodes of a data set, or the rest of one that was begun.

Earlier releases kept values in side folders. An import names these values, and reads none.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from diskreplay import Episode, FormatError, Schema, SchemaError, Store, StoreExists, Writer, create
from diskreplay.interop.exchange.episode_data import (
    CUT,
    ENDS,
    FINAL_OBS,
    HIDDEN,
    METADATA,
    NO_FINAL_OBS,
    NOTES,
    PRIORITY,
    SCHEMA,
    EpisodeData,
    Json,
    is_obs,
)
from diskreplay.interop.exchange.foreign import foreign, read_document, reading

Progress = Callable[[int, int], None]

NOTE, COMPLETE = "import", "complete"
# Notes of so many episodes are one document: all that a resumed import reads again.
EPISODES_A_NOTE = 128
# An import that cuts more often than once in so many steps warns.
_STEPS_A_CUT = 10


def check_option(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise SchemaError where the value of a format's option is none of its choices."""
    known = list(choices)
    if value not in known:
        raise SchemaError(f"{name} must be {', '.join(map(str, known[:-1]))} or {known[-1]}, not {value!r}")


@dataclass(frozen=True)
class Source:
    """A data set that is open to be read.

    Attributes
    ----------
    format : str
        Its format, "npz".
    place : Path
        The file or folder.
    schema : Schema
        What its steps hold.
    episodes, steps : int
        How many it has.
    read : callable
        ``read(n)`` yields its episodes in order, the first of them number n.
    metadata : dict
        What the format says of the whole data set, as JSON.
    cut : int
        After how many steps the reader cut an episode, since the next row has another observation than the step led to.
    part : str
        Which part of the data set it is, such as a split; empty: all.
    export_path : Path, optional
        The path that an export of the data set has: side folders are looked for there. None: ``place``.
    """

    format: str
    place: Path
    schema: Schema
    episodes: int
    steps: int
    read: Callable[[int], Iterator[EpisodeData]]
    metadata: Mapping[str, Json] = field(default_factory=dict)
    cut: int = 0
    part: str = ""
    export_path: Path | None = None

    @property
    def name(self) -> str:
        """The data set in messages and notes."""
        return f"{self.place} {self.part}".rstrip()


@dataclass(frozen=True)
class Imported:
    """What an import did.

    Attributes
    ----------
    path : str
        The store.
    episodes, steps : int
        How many were appended by this call.
    resumed : int
        How many episodes an earlier call had appended.
    cut : int
        How many episodes of the data set were cut because the row behind a step has another observation than the one
        that the step led to. An import that cuts after more than one step in ten warns.
    """

    path: str
    episodes: int
    steps: int
    resumed: int
    cut: int = 0


def import_into(path: str | PathLike[str], source: Source, progress: Progress | None = None) -> Imported:
    """Append all episodes of a data set to a new store, or those that an interrupted import left out.

    The store keeps the metadata of the data set, and what no array holds, in its notes: see `import_notes`.

    Parameters
    ----------
    path : path
        The store: nothing, an empty store with this schema, or one that an import of the same data set has begun.
    source : Source
        The data set.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.

    Raises
    ------
    StoreExists
        There is something else.
    SchemaError
        An episode does not fit the schema that the data set declares; those before it are in the store.
    FormatError
        An episode cannot be read; those before it are in the store. Or an earlier release was interrupted when it
        exported the data set.

    Warns
    -----
    UserWarning
        Many episodes are cut. Or an earlier release kept values of the data set in a side folder, which is not read; a
        call that appends nothing does not warn of it.
    """
    side, names = ignored_values(source.export_path or source.place, source.format, source.schema, source.metadata)
    if source.cut * _STEPS_A_CUT > source.steps:
        warnings.warn(
            f"{source.name}: {source.cut} of {source.steps} steps lead to another observation than the next row has, "
            "and an episode was cut after each. Observations or next observations may have been rounded or normalised, "
            "rows may be shuffled, or several environments may take turns",
            stacklevel=3,  # the caller of an adapter's `import_dataset`
        )
    with create(path, source.schema, exist_ok=True) as store:
        origin = {"format": source.format, "source": source.name, "episodes": source.episodes, "steps": source.steps}
        begun = _begin(store, origin, source)
        if begun < source.episodes:
            if names:
                warnings.warn(
                    f"{side} is from an export by an earlier release and is not read: the store lacks {names} of the "
                    "exported store. The format npz holds everything",
                    stacklevel=3,  # the caller of an adapter's `import_dataset`
                )
            steps = _append(store, source, begun, progress)
        else:
            steps = 0
        store.write_note(NOTE, {**store.read_note(NOTE), COMPLETE: True})
        return Imported(str(store.path), source.episodes - begun, steps, begun, source.cut)


def _begin(store: Store, origin: dict[str, Json], source: Source) -> int:
    """Return how many episodes of the source are in the store already; make its note where it has none."""
    note = store.read_note(NOTE)
    changed = store.info()["steps_evicted"] > 0 or bool(store.quarantine)
    if note is None:
        if len(store) or changed:
            raise StoreExists(f"{store.path} has steps that no import has written; give the path of a new store")
        store.write_note(NOTE, {**origin, COMPLETE: False, "metadata": dict(source.metadata)})
        return 0
    if {name: note.get(name) for name in origin} != origin:
        made_of = ", ".join(f"{name} {note.get(name)}" for name in origin)
        raise StoreExists(f"{store.path} was imported from other data ({made_of}); give the path of a new store")
    if note[COMPLETE]:
        return source.episodes
    if changed:
        raise StoreExists(
            f"{store.path} has lost episodes since its import was interrupted, so it cannot be resumed; give a new path"
        )
    return store.num_episodes


def _append(store: Store, source: Source, begun: int, progress: Progress | None) -> int:
    there, steps = store.episodes[:begun], 0
    first = begun - begun % EPISODES_A_NOTE
    done = sum(map(len, there[:first]))
    notes = _Notes(store)
    with store.writer(durability="none") as writer:
        for number, episode in _episodes(source, first):
            if number < begun:
                _check_same(store, there[number], episode, number)
                first_id = int(there[number].ids[0])
            else:
                episode.append_to(writer, source.schema)
                first_id, steps = _first_id(writer, episode), steps + len(episode)
            notes.add(number, first_id, episode.notes)
            done += len(episode)
            if progress is not None:
                progress(done, source.steps)
        notes.flush()
    return steps


def _episodes(source: Source, first: int) -> Iterator[tuple[int, EpisodeData]]:
    """Yield the episodes from number ``first`` on; whatever damage makes of reading them is a FormatError."""
    with reading(source.name):
        for number, episode in enumerate(source.read(first), first):
            _check_whole(source, number, episode)
            yield number, episode


def _check_whole(source: Source, number: int, episode: EpisodeData) -> None:
    """Check that an episode has the leaves of the schema: a data set may promise more than it holds."""
    wanted = source.schema.step_leaves.keys()
    if different := wanted ^ episode.steps.keys():
        path = min(different)
        raise FormatError(
            f"episode {number} of {source.name} has {'no' if path in wanted else 'a superfluous'} {path}; its schema "
            f"has {', '.join(wanted)}"
        )
    if unknown := [path for path in episode.fields if path not in source.schema.leaves]:
        raise FormatError(f"episode {number} of {source.name} has {unknown[0]}, which is not in its schema")
    count = len(episode)
    for path, rows in episode.steps.items():
        if len(rows) != count + (is_obs(path) and episode.has_final_obs):
            raise FormatError(f"episode {number} of {source.name} has {len(rows)} rows of {path} and {count} of reward")


def _check_same(store: Store, there: Episode, episode: EpisodeData, number: int) -> None:
    if len(there) != len(episode):
        raise StoreExists(
            f"episode {number} of {store.path} has {len(there)} steps and that of the data set {len(episode)}: it "
            "cannot be resumed; give the path of a new store"
        )


def _first_id(writer: Writer, episode: EpisodeData) -> int:
    return writer.last_id - len(episode) + 1


class _Notes:
    """Notes of episodes on their way to the store, some in each document."""

    def __init__(self, store: Store) -> None:
        self._store, self._number, self._waiting = store, 0, dict[str, Json]()

    def add(self, number: int, first_id: int, note: Json) -> None:
        if number % EPISODES_A_NOTE == 0:
            self.flush()
            self._number = number
        if note is not None:
            self._waiting[str(first_id)] = note

    def flush(self) -> None:
        if self._waiting:
            self._store.write_note(f"{NOTE}-{self._number:08d}", self._waiting)
            self._waiting = {}


def import_notes(store: Store) -> tuple[dict[str, Json], dict[int, Json]]:
    """Return what an import noted in a store: about the data set, and of episodes by the id of their first step.

    Both are empty where the store was not made by an import.
    """
    of_episodes: dict[int, Json] = {}
    for name in store.note_names():
        if name.startswith(f"{NOTE}-"):
            of_episodes |= {int(first): note for first, note in store.read_note(name).items()}
    return store.read_note(NOTE) or {}, of_episodes


# --- side folders of earlier releases --------------------------------------------------------------------------------


_VALUES = FINAL_OBS, NO_FINAL_OBS, ENDS, CUT, NOTES, PRIORITY, HIDDEN
_NAME, _DOCUMENT, _VERSION = "diskreplay", "export.json", 1


def ignored_values(place: Path, format_name: str, schema: Schema, metadata: Mapping[str, Json]) -> tuple[Path, str]:
    """Return the side folder of a data set, and the names of its values, which the import of the data set lacks.

    Parameters
    ----------
    place : Path
        The file or folder that an export has made.
    format_name : str
        Its format, "npz".
    schema, metadata
        What the import finds without the side folder.

    Returns
    -------
    tuple of Path and str
        The names, with commas between them; empty if there is no side folder, or all its values are in the data set.

    Raises
    ------
    FormatError
        The export was interrupted, or the document of the side folder cannot be read.
    """
    for side in (place / _NAME, place.with_name(f"{place.name}.{_NAME}")):
        if not os.path.isfile(side / _DOCUMENT):  # False also for a name that is too long for the file system
            continue
        with foreign(side):
            document = read_document(side / _DOCUMENT)
            if document.get("version") != _VERSION:
                raise FormatError(f"{side / _DOCUMENT} is not of a version that this release reads; move {side} away")
            if not document["complete"]:
                raise FormatError(f"the export to {place} was interrupted; delete it and {side}, and export again")
            exported, noted = Schema.from_json(document["schema"]), document["metadata"]
            names = [name for name in document["not_held"] if name in (*_VALUES, *exported.leaves)]
            if noted and noted != metadata and noted["format"] != format_name:
                names.append(METADATA)
            if exported != schema:
                names.append(SCHEMA)
        return side, ", ".join(names)
    return place, ""
