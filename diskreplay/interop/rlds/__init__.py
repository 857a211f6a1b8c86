"""Data sets of RLDS in TFDS: TFRecord files with one example per episode, read and written without TensorFlow.

``features.json`` describes the features of a step. Row t of an episode's steps has an observation, the action after
this observation, and the reward of this action. The last row has only the final observation; its action and reward have
no meaning.

An import follows these rules:

- A text is stored as a number: ``store.texts["language_instruction"][number]`` is the text. The episode field ``split``
  is the number of a name in ``store.texts["split"]``.
- PNG and JPEG images, tensors packed as bytes or by zlib, and class labels are read. For videos, sounds, and
  sequences inside a step, the import raises, and the message names the feature.
- The import raises for a missing file, and for a file with fewer episodes than ``dataset_info.json`` says. With
  ``on_error="skip"``, missing episodes, and records with a wrong checksum, are left out and listed in
  `Imported.skipped`. If the length of a record is damaged, the next record cannot be found. Then this record and all
  later records of the file are left out.
- Images have the same pixels as in TensorFlow: simplejpeg decodes JPEG in the same way.

An export writes files of at most 256 MiB. TFDS stores numbers as float32 and int64. Values that these dtypes cannot
hold, or that would take much space, are written as bytes. Values of uint32 and uint64 are written as int64, since TFDS
cannot read bytes of these dtypes. In an episode without a final observation, the last observation is repeated.
"""

from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Literal, Unpack

from diskreplay import MissingExtra, Schema, SchemaError, Store
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.episode_data import Lacking
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, export_from
from diskreplay.interop.exchange.importing import Imported, import_into

with MissingExtra.raised_for("a data set of RLDS", "rlds"):
    from diskreplay.interop.rlds.features import NAME as NAME, feature_names
    from diskreplay.interop.rlds.folders import DataSet, write

__all__ = ["export_dataset", "import_dataset"]


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    splits: str | Sequence[str] | None = None,
    last: Literal["final", "step"] | None = None,
    **options: Unpack[Options],
) -> Imported:
    """Import a data set of RLDS into a new store, or resume an interrupted import.

    An episode is terminated if ``is_terminal`` is true in its last row, otherwise truncated. Features of a step other
    than observation, action and reward are extra fields; the discount is the extra field ``step_discount``. Features of
    an episode are episode fields. A text of a step or of an episode is stored as its number in `Store.texts`. The name
    of an episode's split is stored in the same way.

    Parameters
    ----------
    source : path
        The folder of a version of the data set, which has ``features.json``.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this data set.
    splits : str or list of str, optional
        The splits to import, such as "train". None: all splits, in the order of `dataset_info.json`.
    last : str, optional
        What the last row of an episode is: "final" for only the final observation, as RLDS defines it, or "step" for a
        step. None: the import decides for each split. The decision is "step" if each last row has an action or reward
        other than zero, and "final" if none has.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        ``source`` is not a data set of RLDS, or lacks a split in ``splits``.
    FormatError
        The data set is damaged, or its files are not TFRecord; the message says what to do.
    SchemaError
        A feature cannot be stored. Or only some episodes of a split end with an action, and ``last`` is None.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    MissingExtra
        protobuf or Pillow is not installed.
    """
    if last is not None:
        check_option("last", last, ("final", "step"))
    chosen = [splits] if isinstance(splits, str) else splits
    return import_into(path, source, partial(DataSet, chosen, last), options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    name: str = "replay",
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a data set that ``tfds.builder_from_directory`` reads.

    There is one split, "train". Images are written as PNG files. Values that an example cannot hold exactly are written
    as bytes.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    name : str
        The name of the data set in TFDS: lower-case letters, digits and underscores.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    SchemaError
        A field has a name that RLDS uses itself, such as ``is_last``. Or ``name`` has other characters.
    StoreExists
        A file or folder exists at ``path``.
    MissingExtra
        protobuf or Pillow is not installed.
    """
    if not name.isidentifier() or name != name.lower():
        raise SchemaError(f"name must have only lower-case letters, digits and underscores, not {name!r}")

    def make_format(schema: Schema, *_: object) -> Format:
        return Format(_not_held(schema), partial(write, name))

    return export_from(store_or_path, path, make_format, options)


def _not_held(schema: Schema) -> dict[str, str]:
    feature_names(schema)
    return {path: "fields of episodes are not written" for path in schema.leaves if path.startswith("episode/")} | {
        Lacking.PRIORITY: "a step of RLDS has no priority",
        Lacking.ENDS: "an episode of RLDS is either terminated or truncated",
        Lacking.NO_FINAL_OBS: "the last observation is repeated if there is no final observation",
        Lacking.NOTES: "notes of episodes are not written",
        Lacking.SCHEMA: "only shapes and dtypes are kept",
        Lacking.METADATA: "the note of the import is not written",
    }
