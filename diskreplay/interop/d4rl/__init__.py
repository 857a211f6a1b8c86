"""Data sets of D4RL: one HDF5 file of flat arrays, in which flags mark where episodes end.

``observations`` and ``actions`` have N rows, or are groups of arrays that have; so do ``rewards``, ``terminals`` and
``timeouts``. What ``next_observations`` has behind the last step of an episode is its final observation. Every other
array of N rows, such as those in ``infos``, is an extra field of the step; ``metadata`` goes to the store's notes.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path

from diskreplay import Episode, Field, MissingExtra, Schema, SchemaError, Store
from diskreplay.interop.d4rl.names import NAME, array_of, schema_of
from diskreplay.interop.exchange.episode_data import FIELDS, PRIORITY, Json, is_part
from diskreplay.interop.exchange.exporting import Exported, Format, Where, export_from
from diskreplay.interop.exchange.foreign import foreign
from diskreplay.interop.exchange.importing import Imported, Progress, Source, import_into
from diskreplay.interop.exchange.not_held import CUT, METADATA, NO_FINAL_OBS, NOTES, SCHEMA

with MissingExtra.raised_for("a data set of D4RL", "d4rl"):
    from diskreplay.interop.d4rl.reading import Reader
    from diskreplay.interop.d4rl.writing import write

__all__ = ["export_dataset", "import_dataset"]

_COMPRESSIONS = "gzip", "lzf", None
_REASONS = {
    SCHEMA: "bounds of spaces, tuples and episode fields",
    CUT: "an episode that was cut has the flag of a timeout",
    NO_FINAL_OBS: "every step has a next observation; the last one of such an episode is repeated",
    PRIORITY: "there is no array of initial priorities",
    NOTES: "there is no place for what the import of an episode noted",
    METADATA: "it is that of another format",
}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    max_episode_steps: int | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Import a file of D4RL into a new store, or the rest of it after an interruption.

    Episodes end where ``terminals`` or ``timeouts`` say so, and what follows the last flag is an episode that was cut,
    without a final observation. An episode is also cut after a row whose ``next_observations`` is not the
    observation of the next row. Values are compared, so the two arrays may differ in dtype, and one of them may be
    rounded to float32. The record counts these cuts as ``cut``, and an import with more than one in ten steps warns.

    Parameters
    ----------
    source : path
        The HDF5 file.
    path : path
        The store; nothing, or what an interrupted import of this file has left.
    max_episode_steps : int, optional
        After how many steps episodes were truncated, for old files that have no ``timeouts``: what D4RL takes from the
        environment. None: they end at ``terminals`` only.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.

    Raises
    ------
    StoreNotFound
        There is no such file.
    FormatError
        It is not a file of D4RL, arrays differ in their numbers of rows, or one is of a dtype that a store cannot hold.
    SchemaError
        ``max_episode_steps`` is less than 1, or given for a file that has ``timeouts``.
    StoreExists
        Something else is at ``path``.
    """
    return import_into(path, open_source(source, max_episode_steps), progress)


def open_source(source: str | PathLike[str], max_episode_steps: int | None = None) -> Source:
    """Return a file of D4RL as what `import_dataset` reads, which raises what this raises."""
    file = Path(source).absolute()
    with foreign(file):
        reader = Reader(file, max_episode_steps)
    return Source(NAME, file, reader.schema, reader.episodes, reader.steps, reader.read, reader.metadata, reader.cut)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    compression: str | None = "gzip",
    where: Where | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
) -> Exported:
    """Export the ended episodes of a store to a file of D4RL.

    It has ``next_observations`` if any of the episodes has a final observation.

    Parameters
    ----------
    store_or_path : Store or path
        The store.
    path : path
        The HDF5 file; nothing is there.
    compression : str or None
        Of its arrays: "gzip", as that of D4RL's own files, "lzf", or None, with which an export is many times faster.
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
    ValueError
        There is no such compression.
    """
    if compression not in _COMPRESSIONS:
        raise ValueError(f"compression is one of {', '.join(map(repr, _COMPRESSIONS))}, and not {compression!r}")
    made = partial(_format, compression)
    return export_from(store_or_path, path, made, where=where, progress=progress, dry_run=dry_run)


def _format(compression: str | None, schema: Schema, episodes: Sequence[Episode], noted: Mapping[str, Json]) -> Format:
    has_next = any(episode.has_final_obs for episode in episodes)
    is_own = noted.get("format") == NAME
    not_held = {path: reason for path in schema.leaves if (reason := _reason(path)) is not None}
    not_held |= {name: reason for name, reason in _REASONS.items() if not (is_own and name == METADATA)}
    if _own_schema(schema) == schema:
        del not_held[SCHEMA]
    if not has_next:
        del not_held[NO_FINAL_OBS]
    if not any(episode.cut for episode in episodes[:-1]):
        del not_held[CUT]
    metadata = noted["metadata"] if is_own else {}
    return Format(not_held, lambda plan, episodes: write(plan, episodes, has_next, metadata, compression))


def _reason(path: str) -> str | None:
    """Return why a leaf has no place in a file; None where it has one."""
    if array_of(path) is not None:
        return None
    return "there are no values of episodes" if is_part(path, FIELDS) else "the name is one of D4RL's own"


def _own_schema(schema: Schema) -> Schema | None:
    """Return the schema that a reader would find."""
    plain = {path: Field(leaf.shape, leaf.dtype) for path, leaf in schema.step_leaves.items()}
    try:
        return schema_of((array, leaf) for path, leaf in plain.items() if (array := array_of(path)) is not None)
    except SchemaError:
        return None
