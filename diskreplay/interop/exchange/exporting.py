"""Export: the ended episodes of a store to a data set, or the rest of one that was begun."""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from diskreplay import Episode, Schema, SchemaError, SegmentGone, Store, StoreExists, open as open_store
from diskreplay.interop.exchange.episode_data import EXTRA, HIDDEN, EpisodeData, Json, with_hidden
from diskreplay.interop.exchange.foreign import check_files, reading
from diskreplay.interop.exchange.importing import Progress, import_notes
from diskreplay.interop.exchange.side_folder import (
    METADATA,
    SCHEMA,
    SideWriter,
    beyond,
    checkpoint_path,
    names_of,
    read_document,
    read_ids,
    remove_progress,
    side_path,
    write_document,
    write_ids,
)

Where = Callable[[Episode], bool]


class Plan(NamedTuple):
    """What a data set is to be made of.

    Attributes
    ----------
    path : Path
        Where.
    schema : Schema
        The schema of the store, and the extra field ``hidden``.
    hidden : str, optional
        The path of the extra field that marks hidden steps, if there is one.
    episodes, steps : int
        How many it will have.
    metadata : dict
        What the store's own import had noted: "format", "source" and the "metadata" of that; empty without one.
    checkpoint : Path
        Where a `Checkpoint` may be, until the data set is complete.
    """

    path: Path
    schema: Schema
    hidden: str | None
    episodes: int
    steps: int
    metadata: Mapping[str, Json]
    checkpoint: Path


class Target(Protocol):
    """A data set that is being written.

    Attributes
    ----------
    episodes : int
        How many it has whole; those of an interrupted export, when it is opened.
    """

    episodes: int

    def add(self, episode: EpisodeData) -> None:
        """Append an episode."""

    def finish(self) -> None:
        """Complete the data set: all its episodes are there."""


@dataclass(frozen=True)
class Format:
    """How data sets of a format are written.

    Attributes
    ----------
    name : str
        As in "npz".
    is_folder : bool
        Whether a data set is a folder; what the format cannot hold is kept inside then, else beside the file.
    not_held : mapping
        What it cannot hold of such episodes, and why: paths of leaves, and the names of
        `diskreplay.interop.exchange.side_folder`.
    open : callable
        Opens a new data set for a `Plan`, or one that was begun, as a context manager. What it leaves when the block
        fails can be opened again.
    lossy : mapping
        Paths of leaves that it was told to keep inexactly, and how: the exact values are nowhere.
    marks_hidden : bool
        Whether it marks hidden steps in a column of its own. Others do by an extra field, if steps are hidden.
    """

    name: str
    is_folder: bool
    not_held: Mapping[str, str]
    open: Callable[[Plan], AbstractContextManager[Target]]
    lossy: Mapping[str, str] = field(default_factory=dict)
    marks_hidden: bool = False


MakeFormat = Callable[[Schema, Sequence[Episode], Mapping[str, Json]], Format]
"""Makes a format for what it depends on: the schema, the episodes, and the `metadata` of a `Plan`."""


class NotHeld(NamedTuple):
    """Something that a format cannot hold: its name, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Exported:
    """What an export did, or would do.

    Attributes
    ----------
    path : str
        The data set.
    episodes, steps : int
        How many it has.
    resumed : int
        How many of the episodes an earlier call had written.
    open_episodes : int
        How many were left out as they have not ended.
    not_held : list of NotHeld
        What the format cannot hold of these episodes.
    side_folder : str, optional
        Where that is kept: an import of the data set reads it, too. If the data set marks hidden steps, it says that
        this column is no field. None: nothing had to be kept.
    lossy : list of NotHeld
        What is kept inexactly, as the caller has asked, and nowhere exactly.
    """

    path: str
    episodes: int
    steps: int
    resumed: int
    open_episodes: int
    not_held: list[NotHeld]
    side_folder: str | None
    lossy: list[NotHeld] = field(default_factory=list)


def export_from(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    make_format: MakeFormat,
    *,
    where: Where | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Exported:
    """Write the ended episodes of a store to a new data set, or those that an interrupted export left out.

    Parameters
    ----------
    store_or_path : Store or path
        What is exported: the episodes of its current snapshot, in the order in which they began.
    path : path
        The data set: nothing, or what an interrupted export of these episodes has left.
    make_format : callable
        Returns the format for a schema, the episodes that are exported, and what the store's own import had noted.
    where : callable, optional
        A predicate over `Episode`: those that are exported.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.
    dry_run : bool
        Write nothing, only return what would be.

    Raises
    ------
    StoreExists
        Something else is at the path.
    SchemaError
        The format cannot hold any of the store's episodes.
    """
    target = Path(path).absolute()
    opened = nullcontext(store_or_path) if isinstance(store_or_path, Store) else open_store(store_or_path)
    with opened as store:
        episodes, left = choose(store.episodes, where)
        noted, notes = import_notes(store)
        plain = make_format(store.schema, episodes, noted)
        side = side_path(target, plain.is_folder)
        begun = _check_free(target, side, store, episodes, plain)
        made, hidden = place_hidden(plain, make_format, store.schema, episodes, noted, begun)
        steps = sum(map(len, episodes))
        if dry_run:
            lost, resumed = _lost(store, episodes, notes, made), 0
        else:
            schema = store.schema if hidden is None else with_hidden(store.schema, hidden)
            plan = Plan(target, schema, hidden, len(episodes), steps, noted, checkpoint_path(side))
            lost, resumed = _write(store, plan, episodes, notes, made, side, progress)
    whole = {SCHEMA} | ({METADATA} if noted else set())
    kept = lost | (whole & made.not_held.keys())
    not_held = [NotHeld(name, reason) for name, reason in made.not_held.items() if name in kept]
    lossy = [NotHeld(path, how) for path, how in made.lossy.items()]
    folder = str(side) if not_held or hidden is not None else None
    return Exported(str(target), len(episodes), steps, resumed, left, not_held, folder, lossy)


def place_hidden(
    plain: Format,
    make_format: MakeFormat,
    schema: Schema,
    episodes: Sequence[Episode],
    noted: Mapping[str, Json],
    begun: Mapping[str, Json] | None,
) -> tuple[Format, str | None]:
    """Decide how a data set marks the steps that a capacity or an age hides.

    It has an extra field for that if steps are hidden, so that the data set of a store without hidden steps has none.
    If the format has no place for such a field, the side folder has the marks, and the result of the export says so.

    Parameters
    ----------
    plain : Format
        The format for the schema of the store.
    make_format, schema, episodes, noted
        The maker of formats, and its arguments.
    begun : mapping, optional
        The document of an interrupted export: either all of its episodes have the field, or none.

    Returns
    -------
    tuple of Format and str or None
        The format, and the path of the field.
    """
    count = sum(episode.hidden_steps for episode in episodes)
    has_field = count > 0 if begun is None else HIDDEN in begun
    if plain.marks_hidden or not (count or has_field):
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
        if path not in made.not_held and has_field:
            return replace(plain, open=made.open), path
        reason = made.not_held.get(path, "none was when the export began")
    steps = "1 step is hidden" if count == 1 else f"{count} steps are hidden"
    return replace(plain, not_held={**plain.not_held, HIDDEN: f"{steps} from samplers: {reason}"}), None


def choose(episodes: Iterable[Episode], where: Where | None) -> tuple[list[Episode], int]:
    """Return the ended episodes that are met, in the order in which they began, and how many open ones would be.

    Those whose segment has left the store meanwhile are left out.
    """
    ended, left = [], 0
    for episode in episodes:
        with suppress(SegmentGone):
            if where is not None and not where(episode):
                continue
            if episode.ended == "open":
                left += 1
            else:
                ended.append(episode)
    return in_order(ended), left


def began(episode: Episode) -> float:
    """Return when the first step of an episode was published: by it episodes of any writers are ordered."""
    return float(episode.times[0])


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Return episodes in the order in which they began, without those whose segment has left meanwhile."""
    dated = []
    for episode in episodes:
        with suppress(SegmentGone):
            dated.append((began(episode), episode))
    return [episode for _, episode in sorted(dated, key=itemgetter(0))]


def _check_free(
    target: Path, side: Path, store: Store, episodes: Sequence[Episode], chosen: Format
) -> dict[str, Json] | None:
    """Return the document of an interrupted export of these episodes, or None if nothing is at the path.

    Raises StoreExists where something else is there, and FormatError where the export has links or other things through
    which files elsewhere would be written.
    """
    if side.is_symlink():
        raise StoreExists(f"{side} is a link, and an export would write where it leads; give another path")
    with reading(side):
        check_files(side)
        document = read_document(side)
    if document is None:
        if target.exists() or target.is_symlink():
            raise StoreExists(f"{target} exists already; give the path of a new data set")
        return None
    if document["complete"]:
        raise StoreExists(f"{target} was exported already; give the path of a new data set")
    begun, ids = read_ids(side), _first_ids(episodes)
    same = (document["store"], document["format"]) == (store.uuid, chosen.name)
    if not same or not np.array_equal(begun, ids[: len(begun)]):
        raise StoreExists(
            f"an export of other episodes to {target} was interrupted; delete it and {side}, or give another path"
        )
    check_files(target)
    return document


def _first_ids(episodes: Sequence[Episode]) -> np.ndarray:
    return np.array([episode.ids[0] for episode in episodes], np.int64)


def _lost(store: Store, episodes: Sequence[Episode], notes: Mapping[int, Json], chosen: Format) -> set[str]:
    """Return which names of what a format lacks some episode has a value of."""
    lost: set[str] = set()
    for episode in episodes:
        data = EpisodeData.of(episode, store.schema, notes.get(int(episode.ids[0])))
        lost |= names_of(*beyond(data, chosen.not_held), chosen.not_held)
    return lost


def _write(
    store: Store,
    plan: Plan,
    episodes: Sequence[Episode],
    notes: Mapping[int, Json],
    chosen: Format,
    side: Path,
    progress: Progress | None,
) -> tuple[set[str], int]:
    """Write the data set; return what the format lacks of its episodes, and how many were there already."""
    document = {
        "format": chosen.name,
        "store": store.uuid,
        "episodes": plan.episodes,
        "schema": plan.schema.to_json(),
        "metadata": dict(plan.metadata),
        "complete": False,
    } | ({} if plan.hidden is None else {HIDDEN: plan.hidden})
    if read_document(side) is None:
        remove_progress(side)
    write_ids(side, _first_ids(episodes))
    write_document(side, document)
    beside = SideWriter(side, chosen.not_held)
    with chosen.open(plan) as target:
        resumed = target.episodes
        done = sum(map(len, episodes[: min(resumed, beside.episodes)]))
        for number in range(min(resumed, beside.episodes), plan.episodes):
            episode = episodes[number]
            data = EpisodeData.of(episode, store.schema, notes.get(int(episode.ids[0])))
            if number >= beside.episodes:
                beside.add(data)
            if number >= target.episodes:
                target.add(data if plan.hidden is None else data.with_hidden(plan.hidden))
            done += len(data)
            if progress is not None:
                progress(done, plan.steps)
        beside.flush()
        target.finish()
    if beside.lost or plan.hidden is not None or {SCHEMA, METADATA} & chosen.not_held.keys():
        write_document(side, {**document, "complete": True, "not_held": sorted(beside.lost)})
        remove_progress(side)
    else:
        shutil.rmtree(side)
    return beside.lost, resumed
