"""Data sets of RLDS as TFDS keeps them: TFRecord files with an example an episode, read and written without TensorFlow.

``features.json`` says what a step holds. Row t of an episode's steps has an observation, the action that was taken in
it and the reward of that; the last row has the final observation alone, and its action and reward mean nothing.
"""

from collections.abc import Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, Unpack

from diskreplay import MissingExtra, Schema, SchemaError, Store
from diskreplay.interop.exchange.choosing import Choice, Options, check_option
from diskreplay.interop.exchange.episode_data import ENDS, METADATA, NO_FINAL_OBS, NOTES, PRIORITY, SCHEMA
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, export_from
from diskreplay.interop.exchange.foreign import foreign
from diskreplay.interop.exchange.importing import Imported, Source, import_into
from diskreplay.interop.exchange.progress import Progress

with MissingExtra.raised_for("a data set of RLDS", "rlds"):
    from diskreplay.interop.rlds.features import NAME, feature_names
    from diskreplay.interop.rlds.folders import DataSet, write

__all__ = ["export_dataset", "import_dataset"]


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    progress: Progress | None = None,
    splits: str | Sequence[str] | None = None,
    last: Literal["final", "step"] | None = None,
    **options: Unpack[Options],
) -> Imported:
    """Import a data set of RLDS into a new store, or the rest of it after an interruption.

    An episode is terminated where its last row is terminal, else truncated. What a step has beside observation, action
    and reward are extra fields, its discount as ``step_discount``. Numbers that are told of an episode are episode
    fields. Of a text, a step or an episode has its number in `Store.texts`; the split of an episode is one of them.

    Parameters
    ----------
    source : path
        The folder with ``features.json``, the one of a version of the data set.
    path : path
        The store; nothing, or what an interrupted import of this data set has left.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.
    splits : str or list of str, optional
        Splits, such as "train"; None: all, in the order of `dataset_info.json`.
    last : str, optional
        What the last row of an episode is: "final", the final observation alone, as RLDS has it, or "step", a step like
        the others. None: a step where the last rows of all episodes of a split have an action or a reward that is not
        zero, final where none has.
    **options
        What is taken, as which leaf and of which dtype: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such data set, or no such split.
    FormatError
        It is damaged, or its files are not TFRecord; the message says what to do.
    SchemaError
        A feature cannot be stored. Or only some episodes of a split end with an action, and ``last`` is None.
    StoreExists
        Something else is at ``path``.
    MissingExtra
        protobuf or Pillow is not installed.
    """
    if last is not None:
        check_option("last", last, ("final", "step"))
    choice, folder = Choice(**options), Path(source).absolute()
    chosen = [splits] if isinstance(splits, str) else splits
    with foreign(folder):
        data = DataSet(folder, chosen, last, choice)
    data_set = Source(
        NAME,
        folder,
        None,
        len(data.lengths),
        sum(data.lengths),
        data.read,
        part=" ".join(chosen or ()),
        leaves=data.leaves,
        names=data.names,
        left_out=data.left_out,
        texts=data.texts,
        skipped=data.skipped,
        numbers=data.numbers,
    )
    return import_into(path, data_set, choice, progress)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    progress: Progress | None = None,
    dry_run: bool = False,
    name: str = "replay",
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a data set that ``tfds.builder_from_directory`` reads.

    There is one split, "train". Images are packed as PNG, and what an example does not hold exactly as bytes.

    Parameters
    ----------
    store_or_path : Store or path
        The store.
    path : path
        The folder; nothing is there.
    progress : callable, optional
        Called as ``progress(done, total)``, in steps.
    dry_run : bool
        Write nothing, only return what would be.
    name : str
        What TFDS calls the data set: lower-case letters, digits and underscores.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    SchemaError
        Two fields would have the same name, or ``name`` cannot be one.
    StoreExists
        Something is at ``path``.
    MissingExtra
        protobuf or Pillow is not installed.
    """
    if not name.isidentifier() or name != name.lower():
        raise SchemaError(f"name has lower-case letters, digits and underscores, not {name!r}")

    def make_format(schema: Schema, *_: object) -> Format:
        return Format(_not_held(schema), partial(write, name))

    return export_from(store_or_path, path, make_format, options, progress=progress, dry_run=dry_run)


def _not_held(schema: Schema) -> dict[str, str]:
    feature_names(schema)
    return {
        path: "only texts and numbers of every episode have a place"
        for path in schema.leaves
        if path.startswith("episode/")
    } | {
        PRIORITY: "a step has no place for it",
        ENDS: "episodes are terminated or truncated there, and nothing else",
        NO_FINAL_OBS: "the last observation is repeated where there is no final one",
        NOTES: "texts are not written",
        SCHEMA: "only shapes and dtypes are kept",
        METADATA: "there is no place for it",
    }
