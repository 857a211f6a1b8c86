"""Export: write the ended episodes of a store to a new data set.

Before the first episode is written, the export reports the data that the format cannot hold.
"""

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from diskreplay import Episode, NotEnoughData, Schema, SchemaError, SegmentGone, Store, StoreExists, open as open_store
from diskreplay.interop.exchange.choosing import Choice, Layout, SharedOptions, lay_out
from diskreplay.interop.exchange.episode_data import (
    EXTRA,
    HIDDEN,
    PRIORITY,
    REWARD,
    EpisodeData,
    Json,
    Lacking,
    is_obs,
    with_hidden,
)
from diskreplay.interop.exchange.importing import check_place, import_notes
from diskreplay.interop.exchange.progress import Announced, Tally

Where = Callable[[Episode], bool]

RENAMED = {"names": "rename"}
"""The present name of each renamed option, by the option's name in earlier releases."""

_PREFIX_CHARACTERS = 48


class ExportOptions(SharedOptions, total=False):
    """The options that every ``export_dataset`` takes.

    Imports have the same options, with names of features in the data set instead of paths in the store. The export
    writes the data set as if the store had the leaves that the options define. An import of the data set finds these
    leaves.

    Attributes
    ----------
    obs, action, reward, extra : str, list of str, or dict of str to str
        The paths, such as "extra/latent", of the leaves that become this part of a step. If the option is one path, the
        part is this leaf. If the option is a list, or a dict ``{name in the part: path in the store}``, the part is a
        dict of leaves. The path of a dict of the schema stands for all leaves in the dict. If the option of a part is
        given, the part has only the leaves in the option. The part's other leaves in the store become extra fields. If
        ``extra`` is given, only the leaves in ``extra`` become extra fields. Other leaves that would become extra
        fields are left out.
    rename : dict of str to str
        ``{path in the store: new name}``. A new name that begins with the name of a part, such as "obs/top", is the
        leaf's path in the exported schema. Any other new name renames the leaf within its part.
    skip : str or list of str
        The paths of leaves, or of dicts of the schema, that are left out.
    dtype : dict of str to str
        ``{path in the store: dtype}``. A value that the dtype cannot hold raises SchemaError. If the dtype ends with
        ":unsafe", the value is rounded instead.
    where : callable
        A function that receives an `Episode`, and returns whether to export the episode. NotEnoughData is raised if no
        ended episode is left to export.
    progress : callable
        Called as ``progress(done, total)``, with numbers of steps.
    dry_run : bool
        Only return the result; write nothing.
    """

    where: Where | None
    dry_run: bool


class NotHeld(NamedTuple):
    name: str
    reason: str


class Plan(NamedTuple):
    """The path and the contents of a data set to write.

    Attributes
    ----------
    path : Path
        The path to write, in a new temporary folder. Nothing is at this path yet.
    schema : Schema
        The schema of the exported leaves. If the export adds an extra field for hidden steps, the schema includes this
        field.
    metadata : dict
        The note of the import that made the store: "format", "source", "metadata" and more. Empty if no import made
        the store.
    """

    path: Path
    schema: Schema
    episodes: int
    steps: int
    metadata: Mapping[str, Json]


@dataclass(frozen=True)
class Format:
    """A writer of data sets of one format.

    Attributes
    ----------
    not_held : mapping
        The data that the format cannot hold, with the reasons. A key is the path of a leaf, or a name such as
        `Lacking.NO_FINAL_OBS` that `diskreplay.interop.exchange.episode_data` defines.
    write : callable
        ``write(plan, episodes)`` writes a data set of these episodes. If ``write`` raises, `export_from` removes the
        files. All ``episodes`` have a final observation if "no_final_obs" is in ``not_held``. No episode has a final
        observation if "final_obs" is in ``not_held``.
    lossy : mapping
        What is lost of a leaf that the caller asked to keep inexactly, by the leaf's path.
    marks_hidden : bool
        Whether the format has its own column that tells which steps are hidden from samplers. For other formats, the
        export adds an extra field if steps are hidden.
    """

    not_held: Mapping[str, str]
    write: Callable[[Plan, Iterable[EpisodeData]], None]
    lossy: Mapping[str, str] = field(default_factory=dict)
    marks_hidden: bool = False


@dataclass(frozen=True)
class ChosenEpisode:
    """An ended episode of a store, with the leaves that the options export."""

    _episode: Episode
    _layout: Layout
    _note: Json = None

    def __len__(self) -> int:
        return len(self._episode)

    terminated = property(lambda self: self._episode.terminated)
    cut = property(lambda self: self._episode.cut)
    truncated = property(lambda self: self._episode.truncated and not self._episode.cut)
    hidden_steps = property(lambda self: self._episode.hidden_steps)

    @property
    def has_final_obs(self) -> bool:
        sources = [old for old, new in self._layout.paths.items() if is_obs(new)]
        return self._episode.has_final_obs and all(map(is_obs, sources))

    @property
    def has_notes(self) -> bool:
        return self._note is not None

    @property
    def has_priorities(self) -> bool:
        return not np.isnan(self._episode[PRIORITY]).all()

    @property
    def has_rewards(self) -> bool:
        source = self._source_of(REWARD)
        return source is not None and bool(self._episode.rows(source).any())

    def has_field(self, path: str) -> bool:
        """Tell whether the episode has a value of the episode field whose exported path is ``path``."""
        source = self._source_of(path)
        return source is not None and self._episode[source.split("/")[1]] is not None

    def _source_of(self, path: str) -> str | None:
        return next((old for old, new in self._layout.paths.items() if new == path), None)

    def read(self, schema: Schema) -> EpisodeData:
        data = EpisodeData.of(self._episode, schema, self._note, self._layout.paths)
        return self._layout.apply(f"the episode {int(self._episode.ids[0])}", data)


MakeFormat = Callable[[Schema, Sequence[ChosenEpisode], Mapping[str, Json]], Format]
"""A function that returns a `Format` for a schema, the episodes, and the metadata of a `Plan`."""


@dataclass(frozen=True)
class Exported:
    """The result of an export, or of a dry run.

    Attributes
    ----------
    path : str
        The path of the data set.
    episodes, steps : int
        The numbers of episodes and of steps in the data set.
    open_episodes : int
        The number of episodes that were left out because they have not ended.
    not_held : list of NotHeld
        Data of the exported episodes that the data set lacks, because the format cannot hold it.
    lossy : list of NotHeld
        Data that the data set keeps inexactly, as the caller asked.
    not_kept : list of str
        Leaves of the store that the options left out.
    """

    path: str
    episodes: int
    steps: int
    open_episodes: int
    not_held: list[NotHeld]
    lossy: list[NotHeld] = field(default_factory=list)
    not_kept: list[str] = field(default_factory=list)


def export_from(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    make_format: MakeFormat,
    options: ExportOptions,
) -> Exported:
    """Write the ended episodes of a store to a new data set, in the order in which the episodes began.

    The export writes the episodes of the store's current snapshot. The data set appears at ``path`` when it is
    complete. An export that fails leaves no files. A killed export leaves a hidden folder ``.NAME.new-...`` next to the
    path.

    Raises
    ------
    NotEnoughData
        No ended episode is chosen.
    StoreExists
        Something is at the path, or the path is inside of the store.
    """
    target, choice = Path(path).absolute(), _choice(options)
    opened = nullcontext(store_or_path) if isinstance(store_or_path, Store) else open_store(store_or_path)
    with opened as store:
        layout = _lay_out(store, choice)
        found, num_open = choose(store.episodes, choice.where)
        if not found:
            which = "" if choice.where is None else " that where accepts"
            raise NotEnoughData(
                f"{store.path} has no ended episode{which}, and {num_open} open; an export needs one that ended"
            )
        noted, notes = import_notes(store)
        episodes = [ChosenEpisode(each, layout, notes.get(int(each.ids[0]))) for each in found]
        plain = make_format(layout.schema, episodes, noted)
        _check_free(target)
        check_place(target, store.path)
        made, hidden = place_hidden(plain, make_format, layout.schema, episodes, noted)
        not_held = find_not_held(layout.schema, episodes, noted, made.not_held)
        steps, lossy = sum(map(len, episodes)), [NotHeld(path, how) for path, how in made.lossy.items()]
        lossy += [
            NotHeld(path, f"values that {layout.schema.leaves[path].dtype} cannot hold are rounded")
            for path in layout.unsafe
        ]
        exported = Exported(str(target), len(episodes), steps, num_open, not_held, lossy, list(layout.not_kept))
        if isinstance(choice.progress, Announced):
            choice.progress.announce(exported)
        if not options.get("dry_run"):
            schema = layout.schema if hidden is None else with_hidden(layout.schema, hidden)
            read = _read(episodes, store.schema, hidden, made.not_held)
            with _draft(target) as draft:
                plan = Plan(draft, schema, len(episodes), steps, noted)
                made.write(plan, _counted(read, Tally(choice.progress, layout.schema, len(episodes), steps)))
    return exported


def _choice(options: ExportOptions) -> Choice:
    for name in options:
        if name in RENAMED:
            raise SchemaError(f"the option {name} is called {RENAMED[name]} now, in all formats")
        if name not in ExportOptions.__annotations__:
            raise TypeError(f"export_dataset() got an unexpected keyword argument {name!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if name != "dry_run"}
    return Choice(**given)


def _lay_out(store: Store, choice: Choice) -> Layout:
    """Return the `Layout` of the exported leaves. The keys of ``choice.dtype`` are paths in the store."""
    leaves, place = store.schema.leaves, str(store.path)
    names = {path: path for path in leaves}
    found = lay_out(place, leaves, names, store.schema, replace(choice, dtype=None))
    if not choice.dtype:
        return found
    if unknown := [path for path in choice.dtype if path not in found.paths]:
        raise SchemaError(f"{place}: dtype names {unknown[0]!r}, and the exported leaves are {', '.join(found.paths)}")
    dtype = {found.paths[path]: wanted for path, wanted in choice.dtype.items()}
    return lay_out(place, leaves, names, store.schema, replace(choice, dtype=dtype))


def _read(
    episodes: Sequence[ChosenEpisode], schema: Schema, hidden: str | None, not_held: Container[str]
) -> Iterator[EpisodeData]:
    for episode in episodes:
        data = episode.read(schema)
        if hidden is not None:
            data = data.with_hidden(hidden)
        if Lacking.NO_FINAL_OBS in not_held:
            data = data.with_final_obs()
        yield data.without_final_obs() if Lacking.FINAL_OBS in not_held else data


def _counted(episodes: Iterable[EpisodeData], tally: Tally) -> Iterator[EpisodeData]:
    for episode in episodes:
        yield episode  # the next line runs when the writer has written this episode
        tally.add(len(episode))


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield a path in a new hidden folder; if the block succeeds, move the data set from this path to ``target``.

    If the block fails, the hidden folder is deleted with the unfinished data set.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # The folder's name has only the first characters of the data set's name: a file name may have at most 255 bytes,
    # and a character takes up to 4 bytes.
    with TemporaryDirectory(prefix=f".{target.name[:_PREFIX_CHARACTERS]}.new-", dir=target.parent) as folder:
        draft = Path(folder, target.name)
        yield draft
        _check_free(target)
        os.rename(draft, target)


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise StoreExists(f"{target} exists already; give the path of a new data set")


def place_hidden(
    plain: Format,
    make_format: MakeFormat,
    schema: Schema,
    episodes: Sequence[ChosenEpisode],
    noted: Mapping[str, Json],
) -> tuple[Format, str | None]:
    """Return the format to write, and the path of an extra field that tells which steps are hidden from samplers.

    The extra field is true for hidden steps. The path is None if no step is hidden, or if the format has its own column
    for hidden steps. If the format cannot hold the field, the path is None, and ``not_held`` of the returned format has
    the entry `HIDDEN`. ``plain`` is the format without the extra field.
    """
    count = sum(episode.hidden_steps for episode in episodes)
    if plain.marks_hidden or not count:
        return plain, None
    reason = ""
    for name in (HIDDEN, f"is_{HIDDEN}"):
        path = f"{EXTRA}/{name}"
        if name in schema.extra:
            reason = f"the store has an extra field {name}"
            continue
        try:
            made = make_format(with_hidden(schema, path), episodes, noted)
        except SchemaError as error:
            reason = str(error)
            continue
        if path not in made.not_held:
            return replace(plain, write=made.write), path
        reason = made.not_held[path]
    steps = "1 step is hidden" if count == 1 else f"{count} steps are hidden"
    return replace(plain, not_held={**plain.not_held, HIDDEN: f"{steps} from samplers: {reason}"}), None


def choose(episodes: Iterable[Episode], where: Where | None) -> tuple[list[Episode], int]:
    """Return the ended episodes that ``where`` accepts, oldest first, and the number of open episodes that it accepts.

    Episodes whose segment was deleted since the snapshot are left out.
    """
    ended, num_open = [], 0
    for episode in episodes:
        with suppress(SegmentGone):
            if where is not None and not where(episode):
                continue
            if episode.ended == "open":
                num_open += 1
            else:
                ended.append(episode)
    return in_order(ended), num_open


def began(episode: Episode) -> float:
    return float(episode.times[0])


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    dated = []
    for episode in episodes:
        with suppress(SegmentGone):
            dated.append((began(episode), episode))
    return [episode for _, episode in sorted(dated, key=itemgetter(0))]


def find_not_held(
    schema: Schema, episodes: Sequence[ChosenEpisode], noted: Mapping[str, Json], lacking: Mapping[str, str]
) -> list[NotHeld]:
    """Return a `NotHeld` for each entry of ``lacking`` that concerns at least one episode.

    ``lacking`` is a `Format.not_held`.
    """
    # `place_hidden` puts HIDDEN into ``lacking`` only if steps are hidden.
    found = {Lacking.SCHEMA, HIDDEN} | ({Lacking.METADATA} if noted else set()) | schema.step_leaves.keys()
    for episode in episodes:
        missing = lacking.keys() - found
        if not missing:
            break
        found |= _names_of(episode, schema, missing)
    return [NotHeld(name, reason) for name, reason in lacking.items() if name in found]


def _names_of(episode: ChosenEpisode, schema: Schema, among: Set[str]) -> set[str]:
    """Return the keys of `Format.not_held` for which this episode has data, except paths in `step_leaves`.

    Episode fields and priorities are looked up only if their names are in ``among``.
    """
    found = {path for path in (schema.leaves.keys() - schema.step_leaves.keys()) & among if episode.has_field(path)}
    found.add(Lacking.FINAL_OBS if episode.has_final_obs else Lacking.NO_FINAL_OBS)
    if episode.terminated == episode.truncated:
        found |= {Lacking.ENDS} if episode.terminated else {Lacking.ENDS, Lacking.CUT}
    if PRIORITY in among and episode.has_priorities:
        found.add(PRIORITY)
    if episode.has_notes:
        found.add(Lacking.NOTES)
    return found
