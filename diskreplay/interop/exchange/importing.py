"""Import: append the episodes of a data set to a new store, or resume an interrupted import.

Exports by earlier releases kept some values in a side folder: next to the data set, or inside of it. An import does not
read these values, but a warning names them.
"""

import math
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from diskreplay import (
    Episode,
    Field,
    FormatError,
    ReplayError,
    Schema,
    SchemaError,
    StorageFull,
    Store,
    StoreExists,
    StoreLocked,
    create,
    open as open_store,
)
from diskreplay.interop.exchange.choosing import Choice, Layout, Options, SourceEpisode, lay_out
from diskreplay.interop.exchange.episode_data import (
    FIELDS,
    HIDDEN,
    PRIORITY,
    REWARD,
    EpisodeData,
    Json,
    Lacking,
    is_obs,
    is_part,
)
from diskreplay.interop.exchange.foreign import NUMBERS, foreign, read_document, reading
from diskreplay.interop.exchange.progress import Announced, Tally, step_bytes
from diskreplay.interop.exchange.threads import episodes_ahead

NOTE, COMPLETE, TEXTS, _SKIPPED, _REFUSED = "import", "complete", "texts", "skipped", "refused"
# One note of the store has the notes of a group of episodes: at most this number. A resumed import reads the last group
# of episodes again, because the group's note may be missing.
EPISODES_A_NOTE = 128
# A compressed import makes at most about `_MOST_SEGMENTS` segments. Each segment, except the last one, has at least
# `_LEAST_SEGMENT_BYTES` bytes before the compression. With more segments, the background compaction would merge packs,
# and would need disk space for a second copy of the merged packs.
_LEAST_SEGMENT_BYTES, _MOST_SEGMENTS = 128 << 20, 32
# An import warns if a data set has more cuts than its number of steps divided by this number.
_STEPS_A_CUT = 10


class Planned(NamedTuple):
    """The plan of an import.

    Attributes
    ----------
    steps : int
        The number of steps to append, if ``where`` accepts all episodes.
    nbytes : int
        The size of ``steps`` steps in bytes, without compression.
    free : int
        The free disk space in bytes.
    """

    episodes: int
    steps: int
    nbytes: int
    free: int


class Skipped(NamedTuple):
    what: str
    why: str


def skipped_between(numbers: Iterable[int], count: int, why: str) -> list[Skipped]:
    """Return entries for the episodes below ``count`` that ascending ``numbers`` lack.

    A small file may claim any number of episodes, so an entry names a range of episodes.
    """
    gaps = ((before + 1, after - 1) for before, after in pairwise((-1, *numbers, count)) if before + 1 < after)
    names = (f"episode {first}" if first == last else f"episodes {first} to {last}" for first, last in gaps)
    return [Skipped(name, why) for name in names]


class Given(NamedTuple):
    """The data set of an import, before its reader opens it.

    Attributes
    ----------
    stored : int
        The total size of the data set's files in bytes.
    opened : ExitStack
        The files that stay open until the import ends.
    """

    place: Path
    choice: Choice
    stored: int
    opened: ExitStack


class Source(ABC):
    """A data set that is open for an import: the base class of each format's reader, which sets the attributes.

    Attributes
    ----------
    place, choice, stored, opened
        The same as in `Given`.
    schema : Schema or None
        The default schema of the store. None: the reader cannot tell which feature is the observation or the action.
    metadata : dict
        The format's metadata of the whole data set, as JSON.
    cut : int
        The number of cuts, as in `Imported`.
    part : str
        The name of the imported part, such as a split. An empty text: the whole data set.
    export_path : Path
        The path of the whole data set, if ``place`` is a folder inside of it. An import looks for a side folder inside
        of this path, and next to this path.
    warning : str
        The text of a warning for the caller of the import. An empty text: no warning.
    not_kept : list of str
        The names of data that are not features. An import leaves this data out.
    left_out : list of str
        The features that the reader has already left out, because the option ``skip`` names them.
    texts : dict of str to list of str
        A list of texts for each leaf of texts, by the leaf's default path. The number i in the leaf stands for item i
        of the list. A key may also be another key of `Store.texts`, such as "task".
    leaves : dict of str to Field
        The field of each feature, by the feature's default path.
    names : dict of str to str
        The name of each feature, by the feature's default path.
    numbers : list of int
        Each episode's number in the data set. Empty: the numbers are 0, 1, 2 and so on.
    files : list of str
        The name of each episode's file, if each episode has its own file.
    """

    format: str
    episodes: int
    steps: int
    leaves: Mapping[str, Field]
    names: Mapping[str, str]

    def __init__(self, given: Given) -> None:
        self.place, self.choice, self.stored, self.opened = given
        self.schema: Schema | None = None
        self.metadata: Mapping[str, Json] = {}
        self.cut = 0
        self.part = self.warning = ""
        self.export_path = self.place
        self.skipped: list[Skipped] = []
        self.not_kept: list[str] = []
        self.left_out: list[str] = []
        self.texts: dict[str, Sequence[str]] = {}
        self.numbers: Sequence[int] = ()
        self.files: Sequence[str] = ()

    @abstractmethod
    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        """Yield the episodes from position ``first`` on, each with at least the leaves at the paths ``wanted``."""

    def number_of(self, position: int) -> int:
        return self.numbers[position] if self.numbers else position

    def describe(self, position: int) -> str:
        file = f" ({self.files[position]})" if self.files else ""
        return f"episode {self.number_of(position)}{file}"

    def lay_out(self) -> Layout:
        return lay_out(self.name, self.leaves, self.names, self.schema, self.choice, self.left_out)

    @property
    def name(self) -> str:
        return f"{self.place} {self.part}".rstrip()


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes
    ----------
    path : str
        The path of the store.
    episodes, steps : int
        The numbers of episodes and of steps that this call appended.
    resumed : int
        The number of episodes that earlier calls appended.
    cut : int
        The number of cuts in the data set. An episode is cut after a step whose next observation is not the observation
        of the next row. The import warns if the number of cuts is more than a tenth of the number of steps.
    skipped : list of Skipped
        The episodes that ``on_error="skip"`` left out, and episodes of diffusion_policy without rows.
    not_kept : list of str
        Features that the options left out, and data that are not features.
    """

    path: str
    episodes: int
    steps: int
    resumed: int
    cut: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)


def import_into(
    path: str | PathLike[str],
    source: str | PathLike[str],
    make: Callable[[Given], Source],
    options: Options,
) -> Imported:
    """Append the chosen episodes of a data set to a new store, or resume an interrupted import.

    The notes of the store keep the metadata of the data set, and values that no array holds: see `import_notes`. If an
    episode cannot be read, or does not fit the schema, the store keeps all earlier episodes.

    Parameters
    ----------
    path : path
        The path of the store. Nothing may exist at this path, except an empty store with the schema that results from
        the options, or an import of the same data set.
    source : path
        The data set.
    make : callable
        ``make(given)`` opens the data set.
    options : Options
        The options of the caller. A resumed import needs the options of the first call.

    Raises
    ------
    StoreExists
        Something else is at the path, such as an import of other data or with other options. Or the data set is inside
        of the store. Or the store or the data set has changed since an interrupted import.
    StoreLocked
        A writer has the store open, perhaps in another call of this import.
    StorageFull
        The disk has less space than the steps need, and neither ``compression`` nor ``where`` is given. The import has
        written nothing.
    """
    with open_source(source, make, options) as found:
        return _import(Path(path), found)


@contextmanager
def open_source(source: str | PathLike[str], make: Callable[[Given], Source], options: Options) -> Iterator[Source]:
    choice, place = Choice(**options), Path(source).absolute()
    with ExitStack() as opened:
        with foreign(place) as stored:
            found = make(Given(place, choice, stored, opened))
        yield found


def _import(path: Path, source: Source) -> Imported:
    choice = source.choice
    _warn(source.warning)
    check_place(source.place, path.absolute())
    with reading(source.place):
        if source.episodes > source.steps:
            raise FormatError(f"{source.name} claims {source.episodes} episodes of {source.steps} steps; it is damaged")
        layout = source.lay_out()
    not_kept = [*source.not_kept, *layout.not_kept]
    schema = source.schema or layout.schema
    side, names = ignored_values(source.export_path, source.format, schema, source.metadata)
    if source.cut * _STEPS_A_CUT > source.steps:
        _warn(
            f"{source.name}: {source.cut} of {source.steps} steps lead to another observation than the next row has, "
            "and an episode was cut after each. Observations or next observations may have been rounded or normalised, "
            "rows may be shuffled, or several environments may take turns"
        )
    planned = _plan(path.absolute(), source, layout.schema)
    if planned.nbytes > planned.free and choice.compression is None and choice.where is None:
        raise StorageFull(
            f"{path}: {planned.steps} steps of {source.name} take {planned.nbytes} bytes, and the disk has "
            f"{planned.free}; compress them (compression='zstd'), choose smaller dtypes by dtype=, or leave features "
            "out by skip="
        )
    if isinstance(choice.progress, Announced):
        choice.progress.announce(planned)
    selection = _Selection(source, layout)
    selection.try_where()
    with create(path, layout.schema, compression=choice.compression, exist_ok=True) as store:
        origin = {"format": source.format, "source": source.name, "episodes": source.episodes, "steps": source.steps}
        is_complete, begun = _begin(store, origin, source, choice.to_json())
        if source.texts:
            own = {old: new.split("/", 1)[-1] for old, new in layout.paths.items()}
            store.write_note(TEXTS, {own.get(key, key): list(texts) for key, texts in source.texts.items()})
        if is_complete:
            skipped = [Skipped(*each) for each in store.read_note(NOTE).get(_SKIPPED, ())]
            return Imported(str(store.path), 0, 0, begun, source.cut, [*source.skipped, *skipped], not_kept)
        if names:
            _warn(
                f"{side} is from an export by an earlier release and is not read: the store lacks {names} of the "
                "exported store. The format npz holds everything"
            )
        episodes, steps = _append(store, selection, begun)
        left_out = {_SKIPPED: [list(each) for each in selection.skipped]} if selection.skipped else {}
        store.write_note(NOTE, {**store.read_note(NOTE), COMPLETE: True, **left_out})
        return Imported(
            str(store.path),
            episodes,
            steps,
            begun,
            source.cut,
            [*source.skipped, *selection.skipped],
            not_kept,
        )


def _warn(text: str) -> None:
    if text:
        warnings.warn(text, stacklevel=5)  # warns the caller of an adapter's `import_dataset`


def check_place(place: Path, store: Path) -> None:
    """Check that the path ``place`` of a data set is outside of the folder of a store."""
    for path in (place, store):
        if "\0" in str(path):
            raise FormatError(f"{str(path)!r} has a NUL byte, which no path may have; give another path")
    resolved, folder = (Path(os.path.realpath(path)) for path in (place, store))  # `resolve` raises for a loop of links
    if folder in (resolved, *resolved.parents):
        raise StoreExists(f"{place} is inside the store {store}; give a path outside of it")


def _plan(path: Path, source: Source, schema: Schema) -> Planned:
    """Return the plan of an import; its ``steps`` does not count the steps that the store already has."""
    steps = source.steps
    with suppress(ReplayError), open_store(path) as store:
        is_complete = (store.read_note(NOTE) or {}).get(COMPLETE)
        steps = 0 if is_complete else max(0, steps - sum(map(len, store.episodes)))
    above = next(folder for folder in (path, *path.parents) if folder.is_dir())
    return Planned(source.episodes, steps, steps * step_bytes(schema), shutil.disk_usage(above).free)


def _begin(store: Store, origin: dict[str, Json], source: Source, options: dict[str, Json]) -> tuple[bool, int]:
    """Check that an import can append to a store; for a new import, write its source and options to the store's notes.

    Return whether the import is complete, and the number of episodes in the store.
    """
    note = store.read_note(NOTE)
    # If steps are lost or hidden, the number of episodes does not tell where the import continues.
    info = store.info()
    changed = info["steps_inserted"] != len(store)
    if note is None:
        if len(store) or changed:
            raise StoreExists(f"{store.path} has steps that no import has written; give the path of a new store")
        noted = {**origin, COMPLETE: False, "metadata": _as_note(source.metadata)}
        store.write_note(NOTE, {**noted, "options": options} if options else noted)
        return False, 0
    if {name: note.get(name) for name in origin} != origin:
        made_of = ", ".join(f"{name} {note.get(name)}" for name in origin)
        raise StoreExists(f"{store.path} was imported from other data ({made_of}); give the path of a new store")
    if note.get("options", {}) != options:
        given = ", ".join(f"{name}={value!r}" for name, value in note.get("options", {}).items())
        raise StoreExists(
            f"{store.path} was imported with other options ({given or 'none'}); repeat these, or give a new path"
        )
    if note[COMPLETE]:
        return True, store.num_episodes
    if any(writer["state"] == "alive" for writer in info["writers"]):
        raise StoreLocked(f"{store.path} is being written, perhaps by another call of this import; wait for its end")
    if changed:
        raise StoreExists(
            f"{store.path} has lost or hidden steps of its interrupted import, which cannot be resumed; give a new path"
        )
    return False, store.num_episodes


def _append(store: Store, selection: "_Selection", begun: int) -> tuple[int, int]:
    """Append the episodes that the store lacks; return the number of these episodes and the number of their steps.

    The store has ``begun`` episodes. A resumed import reads the last of these episodes again, or all of them.
    StoreExists is raised if an episode that is read again differs from the episode in the store.
    """
    existing, steps = store.episodes[:begun], 0
    # If the options may leave out episodes, the data set is read from the beginning, to find the episodes that the
    # store has. Otherwise, episode n of the store is episode n of the data set.
    first = 0 if selection.is_partial else begun - begun % EPISODES_A_NOTE
    source, choice = selection.source, selection.source.choice
    done = first, sum(map(len, existing[:first]))
    tally, notes = Tally(choice.progress, store.schema, source.episodes, source.steps, done), _Notes(store)
    note = store.read_note(NOTE)
    count, refused = first, dict[int, str](note.get(_REFUSED, ()))  # why the store refused episodes, by position
    nbytes = max(_LEAST_SEGMENT_BYTES, source.steps * step_bytes(store.schema) // _MOST_SEGMENTS)
    with (
        _Segments(store, nbytes if choice.compression is not None else None) as segments,
        closing(selection.episodes(first)) as read,
    ):
        for position, episode, is_wanted in read:
            what, first_id = source.describe(position), None
            if is_wanted and position in refused:
                selection.skipped.append(Skipped(what, refused[position]))
            elif is_wanted and count < begun:
                _check_same(store, existing[count], episode, count)
                first_id = int(existing[count].ids[0])
            elif is_wanted:
                try:
                    first_id, steps = segments.append(episode), steps + len(episode)
                except SchemaError as error:
                    selection.leave_out(position, SchemaError(f"{what} of {source.name}: {error}"))
                    # The note names the refused episodes. Without this note, a resumed import would compare a refused
                    # episode with the next episode in the store, and raise StoreExists.
                    refused[position] = selection.skipped[-1].why
                    store.write_note(NOTE, {**note, _REFUSED: list(refused.items())})
            if first_id is not None:
                notes.add(count, first_id, episode.notes)
                count += 1
            tally.add(len(episode))
        notes.flush()
    if count < begun:
        raise StoreExists(
            f"{store.path} has {begun} episodes and the data set {count} now; give the path of a new store"
        )
    return count - begun, steps


class _Selection:
    """The episodes of a data set that the options choose, converted to the leaves of the store."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source, self._layout, self._choice = source, layout, source.choice
        self.skipped: list[Skipped] = []

    @property
    def is_partial(self) -> bool:
        return self._choice.where is not None or self._choice.on_error == "skip"

    def try_where(self) -> None:
        """Call ``where`` for one episode, so that a faulty function raises before anything is written."""
        if self._choice.where is not None:
            with closing(self.episodes(0)) as episodes:
                next(episodes, None)
            self.skipped.clear()

    def leave_out(self, position: int, error: ReplayError) -> None:
        """Raise the error if ``on_error`` is "raise", otherwise add the episode to ``skipped``."""
        if self._choice.on_error == "raise":
            raise error
        self.skipped.append(Skipped(self.source.describe(position), str(error)))

    def episodes(self, first: int) -> Generator[tuple[int, EpisodeData, bool], None, None]:
        """Yield readable episodes from position ``first`` on: position, episode, and whether ``where`` accepts it."""
        where, schema = self._choice.where, self._layout.schema
        for position, made in self._readable(first):
            number = self.source.number_of(position)
            yield position, made, where is None or bool(where(SourceEpisode(number, schema, made)))

    def _readable(self, first: int) -> Iterator[tuple[int, EpisodeData]]:
        number = first
        while number < self.source.episodes:
            try:
                read = self.source.read(number, self._layout.paths)
                with reading(self.source.place), closing(episodes_ahead(read)) as episodes:
                    for episode in episodes:
                        if (converted := self._converted(number, episode)) is not None:
                            yield number, converted
                        number += 1
                    if number < self.source.episodes:
                        raise FormatError(
                            f"{self.source.name} has {number} of the {self.source.episodes} episodes that it declares"
                        )
            except (FormatError, SchemaError) as error:
                self.leave_out(number, error)
                number += 1

    def _converted(self, number: int, episode: EpisodeData) -> EpisodeData | None:
        """Return an episode with the leaves of the store; None if the episode is left out."""
        try:
            with reading(self.source.place):
                whole = _whole(self.source, number, episode, self._layout.paths)
                return self._layout.apply(self.source.describe(number), whole)
        except (FormatError, SchemaError) as error:
            self.leave_out(number, error)
        return None


def _whole(source: Source, position: int, episode: EpisodeData, paths: Collection[str]) -> EpisodeData:
    """Check that an episode has all leaves in ``paths``: numbers of the declared shapes, with a row for each step.

    Return the episode with rewards ``(T,)``: files may have rewards ``(T, 1)``.
    """
    what = f"{source.describe(position)} of {source.name}"
    if (rewards := episode.steps.get(REWARD)) is not None:
        if np.size(rewards) != len(rewards):
            raise FormatError(f"{what} has rewards of shape {rewards.shape}: a reward is one number a step")
        episode = replace(episode, steps={**episode.steps, REWARD: rewards.reshape(len(rewards))})
    if missing := [path for path in paths if path not in episode.steps and not is_part(path, FIELDS)]:
        raise FormatError(f"{what} has no {missing[0]}; it has {', '.join(episode.steps)}")
    count, shortest = min((len(rows), path) for path, rows in episode.steps.items())
    if not count:
        raise FormatError(f"{what} has no steps")
    for path, rows in episode.steps.items():
        if len(rows) != count + (is_obs(path) and episode.has_final_obs):
            raise FormatError(f"{what} has {len(rows)} rows of {path} and {count} of {shortest}")
    shapes = {path: np.shape(rows)[1:] for path, rows in episode.steps.items()}
    shapes |= {path: np.shape(value) for path, value in episode.fields.items()}
    for path, shape in shapes.items():
        if path in paths and shape != source.leaves[path].shape:
            raise SchemaError(f"{what} has {path} of shape {shape}, and not {source.leaves[path].shape}")
    for path, values in {**episode.steps, **episode.fields}.items():
        if path in paths and (dtype := np.asarray(values).dtype).kind not in NUMBERS:
            raise SchemaError(f"{what} has {path} of the dtype {dtype}, which is not numeric")
    return episode


def _check_same(store: Store, existing: Episode, episode: EpisodeData, number: int) -> None:
    if len(existing) != len(episode):
        raise StoreExists(
            f"episode {number} has {len(existing)} steps in {store.path} and {len(episode)} in the data set, so the "
            "import cannot be resumed; give the path of a new store"
        )
    for path, rows in EpisodeData.of(existing, store.schema).steps.items():
        own = episode.steps[path]
        if len(rows) != len(own) or rows.tobytes() != own.tobytes():
            raise StoreExists(
                f"episode {number} has other values of {path} in {store.path} than in the data set: other episodes are "
                "wanted or readable now, so the import cannot be resumed; give the path of a new store"
            )


class _Segments:
    """Appends the episodes of an import to a store, and compresses their steps from time to time.

    If the steps of a writer take ``most_bytes`` bytes, the writer is closed, and its segments are compressed before the
    next writer begins. So the disk needs room only for the compressed steps, the uncompressed steps of one writer, and
    the pack that replaces these steps. If ``most_bytes`` is None, segments are not compressed.
    """

    def __init__(self, store: Store, most_bytes: int | None) -> None:
        self._store, self._most_bytes, self._step_bytes = store, most_bytes, step_bytes(store.schema)
        self._nbytes, self._writer = 0, store.writer(durability="none")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close()
        if kind is None and self._most_bytes is not None:
            self._compress()

    def append(self, episode: EpisodeData) -> int:
        """Append an episode, and return the id of its first step."""
        if self._most_bytes is not None and self._nbytes >= self._most_bytes:
            self._writer.close()
            self._compress()
            self._nbytes, self._writer = 0, self._store.writer(durability="none")
        episode.append_to(self._writer, self._store.schema)
        self._nbytes += len(episode) * self._step_bytes
        return self._writer.last_id - len(episode) + 1

    def _compress(self) -> None:
        with suppress(StoreLocked):  # another process compacts the store; a later call compresses this segment, too
            self._store.compact(only_compress=True)


def _as_note(value: Json) -> Json:
    """Return a value as strict JSON: infinities, NaN, and keys that are not texts become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        texts = (key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key) for key in value)
        return {key: _as_note(inner) for key, inner in zip(texts, value.values(), strict=True)}
    return [_as_note(inner) for inner in value] if isinstance(value, list | tuple) else value


class _Notes:
    def __init__(self, store: Store) -> None:
        self._store, self._number, self._waiting = store, 0, dict[str, Json]()

    def add(self, number: int, first_id: int, note: Json) -> None:
        if number % EPISODES_A_NOTE == 0:
            self.flush()
            self._number = number
        if note is not None:
            self._waiting[str(first_id)] = _as_note(note)

    def flush(self) -> None:
        if self._waiting:
            self._store.write_note(f"{NOTE}-{self._number:08d}", self._waiting)
            self._waiting = {}


def import_notes(store: Store) -> tuple[dict[str, Json], dict[int, Json]]:
    """Return the note about the imported data set, and each episode's note by the id of the episode's first step.

    Both results are empty if no import made the store.
    """
    of_episodes: dict[int, Json] = {}
    for name in store.note_names():
        if name.startswith(f"{NOTE}-"):
            of_episodes |= {int(first): note for first, note in store.read_note(name).items()}
    return store.read_note(NOTE) or {}, of_episodes


# --- side folders of earlier releases --------------------------------------------------------------------------------


_VALUES = Lacking.FINAL_OBS, Lacking.NO_FINAL_OBS, Lacking.ENDS, Lacking.CUT, Lacking.NOTES, PRIORITY, HIDDEN
_NAME, _DOCUMENT, _VERSION = "diskreplay", "export.json", 1


def ignored_values(place: Path, format_name: str, schema: Schema, metadata: Mapping[str, Json]) -> tuple[Path, str]:
    """Return the side folder of a data set, and the names of the values that only this folder has.

    ``schema`` and ``metadata`` come from the data set itself.

    Returns
    -------
    tuple of Path and str
        The side folder, and the names as one text with commas. The text is empty if the data set itself has all values.
        Without a side folder: ``place`` and an empty text.
    """
    for side in (place / _NAME, place.with_name(f"{place.name}.{_NAME}")):
        if not os.path.isfile(side / _DOCUMENT):  # `isfile` does not raise for a path that is too long
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
                names.append(Lacking.METADATA)
            if exported != schema:
                names.append(Lacking.SCHEMA)
        return side, ", ".join(names)
    return place, ""
