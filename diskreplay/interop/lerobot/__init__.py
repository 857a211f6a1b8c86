"""Data sets of LeRobot: folders of parquet files and videos. Imports read versions 2.0 to 3.0; exports write 3.0.

A feature ``observation.images.top`` becomes the leaf ``obs/images/top``. If there is only one feature below
``observation``, this feature becomes ``obs`` itself. A single feature below ``action`` becomes ``action`` itself.
``next.reward`` is the reward. An episode is terminated if ``next.done`` is true in its last step, otherwise it is cut.
If ``next.terminated`` and ``next.truncated`` both exist, an import uses these two features instead of ``next.done``.
Other features become extra fields of steps. Columns of numbers in the table of episodes become episode fields. A text
of a step is stored as a number: an index in the feature's list of texts. The notes of the store keep these lists, the
texts of tasks, and the statistics.

An import follows these further rules:

- The features ``action.arm`` and ``action.hand`` become ``action/arm`` and ``action/hand``. A feature such as
  ``next.success`` becomes an extra field of the same name.
- ``task_index`` is an extra field: ``store.texts["task"][number]`` is the text of a task.
- ``frame_index`` becomes an extra field if it does not count the steps of each episode from 0. ``timestamp`` becomes an
  extra field if it does not follow from this count and the frame rate.
- Images keep the order of axes that ``info.json`` declares. A frame of a video is found by its time. If the nearest
  frame is further away than half the time between two frames, the import raises.
- In the folder ``meta``, only ``info.json``, the statistics, and the tables of episodes and tasks are read.
- ``on_error="skip"`` leaves out an episode whose video, file of steps or row in the table of episodes is missing. If a
  camera has no video at all, the import raises.

An export follows these rules:

- Each episode is one row group of a parquet file. LeRobot's own loader can read these files.
- A uint8 field with three axes is an image if it has 1, 3 or 4 channels, and sides of 8 or more pixels.
- The names of axes, the frame rate, the robot, the texts and the statistics of an imported data set are written back.
  Statistics are computed again if the steps differ from the imported steps.
- If any episode was truncated, the columns ``next.truncated`` and ``next.terminated`` tell how each episode ended.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Unpack

from diskreplay import Field, MissingExtra, Schema, SchemaError, Store
from diskreplay.interop.exchange.choosing import Options
from diskreplay.interop.exchange.episode_data import FIELDS, REWARD, Json, Lacking
from diskreplay.interop.exchange.exporting import ChosenEpisode, Exported, ExportOptions, Format, export_from
from diskreplay.interop.exchange.importing import Imported, import_into
from diskreplay.interop.lerobot.features import (
    COUNTERS,
    DONE,
    FLAGS,
    NAME,
    TIMESTAMP,
    Column,
    columns_in,
    columns_of,
    fields_of,
    schema_of,
)

with MissingExtra.raised_for("a data set of LeRobot", "lerobot"):
    from diskreplay.interop.lerobot.reading import Reader
    from diskreplay.interop.lerobot.writing import Contents, write

__all__ = ["export_dataset", "import_dataset"]

_FPS = 30
_REASONS = {
    Lacking.FINAL_OBS: "an episode of LeRobot has no observation after its last step",
    Lacking.SCHEMA: "tuples and bounds of spaces are not kept, and scalars become vectors of one number",
    Lacking.PRIORITY: "LeRobot has no initial priorities",
    Lacking.NOTES: "LeRobot has no place for notes of an episode",
    Lacking.METADATA: "the note of an import from another format is not kept",
}


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[Options],
) -> Imported:
    """Import a data set of LeRobot into a new store, or resume an interrupted import.

    Frames of videos are found by their times, and decoded. If the data set has no rewards, all rewards are zero.

    Parameters
    ----------
    source : path
        The folder, which has ``meta/info.json``.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this folder.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        ``source`` is not a data set of LeRobot.
    FormatError
        The data set is damaged, of an unknown version, or has a feature that a store cannot hold.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    """
    return import_into(path, source, Reader, options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    fps: float | None = None,
    task: str = "",
    video: bool = False,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a data set of LeRobot.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    fps : float, optional
        Frames per second, for the timestamps. None: the rate of the data set that the store was imported from, or 30.
    task : str
        The description of the task. This description is written only if the store was not imported from a data set with
        tasks.
    video : bool
        Encode images of three channels as H.264 video, which loses detail. False: images become PNG files in a parquet
        column, without loss.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        A file or folder exists at ``path``.
    SchemaError
        ``fps`` is not more than 0. Or ``video`` is true and the store has its own timestamps.
    """
    if fps is not None and not fps > 0:
        raise SchemaError(f"fps must be more than 0, not {fps}")

    return export_from(store_or_path, path, partial(_format, fps, task, video), options)


def _format(
    fps: float | None,
    task: str,
    video: bool,
    schema: Schema,
    episodes: Sequence[ChosenEpisode],
    noted: Mapping[str, Json],
) -> Format:
    own = _own(noted)
    columns, lacking = columns_of(schema, own, video=video)
    columns = [column for column in columns if column.path != REWARD or _has_rewards(episodes, own)]
    fields, others = fields_of(schema)
    not_held = {**lacking, **others, **_REASONS}
    if own:
        del not_held[Lacking.METADATA]
    if _derived(columns, schema, episodes) == schema:
        del not_held[Lacking.SCHEMA]
    keys = {column.key for column in columns}
    if TIMESTAMP in keys and any(column.kind == "video" for column in columns):
        raise SchemaError("the store has a timestamp of each step, and a video has a fixed rate; use video=False")
    fps = fps or own.get("info", {}).get("fps") or _FPS
    contents = Contents(columns, fields, _flags(episodes, own, keys), fps, task, own)
    lossy = {column.path: "frames of H.264 video lose detail" for column in contents.videos}
    return Format(not_held, partial(write, contents), lossy)


def _own(noted: Mapping[str, Json]) -> Mapping[str, Json]:
    found: Mapping[str, Json] = noted["metadata"] if noted.get("format") == NAME else {}
    return found


def _has_rewards(episodes: Sequence[ChosenEpisode], own: Mapping[str, Json]) -> bool:
    """Tell whether to write rewards: yes, unless all are zero and the store came from a data set without rewards."""
    return not own or REWARD in own["keys"] or any(episode.has_rewards for episode in episodes)


def _flags(episodes: Sequence[ChosenEpisode], own: Mapping[str, Json], keys: set[str]) -> tuple[str, ...]:
    """Return the names of the columns that tell how episodes ended."""
    if DONE in keys:
        return ()
    if any(episode.truncated for episode in episodes):
        return FLAGS
    if own and DONE not in own["info"]["features"] and all(episode.cut for episode in episodes):
        return ()
    return (DONE,)


def _derived(columns: Sequence[Column], schema: Schema, episodes: Sequence[ChosenEpisode]) -> Schema | None:
    """Return the schema that an import of the data set would find; None if the schema depends on values of steps."""
    if any(column.kind == "text" or column.key in {*COUNTERS, *FLAGS} for column in columns):
        return None
    fields = {name: Field(leaf.shape, leaf.dtype) for name, leaf in schema.episode.items() if isinstance(leaf, Field)}
    given = [name for name in fields if any(episode.has_field(f"{FIELDS}/{name}") for episode in episodes)]
    try:
        found = columns_in({column.key: column.feature() for column in columns}, {})
        return schema_of(found, {name: fields[name] for name in given})
    except SchemaError:
        return None
