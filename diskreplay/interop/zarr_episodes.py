"""Data sets in the layout of diffusion_policy's ReplayBuffer: zarr arrays of all steps, and the ends of episodes.

``data/NAME`` are arrays ``(steps, ...)``. ``meta/episode_ends`` has the number of steps up to the end of each episode.
The format has no place for rewards, for the kind of an episode's end, or for an observation after the last action. An
export writes such data to further arrays, which other readers of the format ignore.

An export writes rewards, extra fields and initial priorities to ``data``. It writes ``terminated``, ``truncated``,
final observations and episode fields to ``meta``, with one row for each episode. The attribute ``diskreplay`` of the
root group has the schema and the name of each leaf's array. The arrays are compressed by Blosc, as in diffusion_policy.
If arrays have rows after the last episode, an import lists these rows in `Imported.not_kept`. It lists episodes without
rows in `Imported.skipped`. Another library's codec, such as JPEG XL, may have compressed images. An import reads these
images if the library is installed and registered.
"""

import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, get_args

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import RangeByteRequest
from zarr.codecs import BloscCodec
from zarr.storage import LocalStore, WrapperStore, ZipStore

from diskreplay import Field, FormatError, Schema, SchemaError, Store, StoreNotFound
from diskreplay.interop.exchange.choosing import Options, check_option
from diskreplay.interop.exchange.columns import ColumnReader, ColumnWriter
from diskreplay.interop.exchange.episode_data import (
    ACTION,
    FIELDS,
    OBS,
    PRIORITY,
    REWARD,
    EpisodeData,
    Json,
    Lacking,
    is_obs,
    is_part,
)
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import leaves_of
from diskreplay.interop.exchange.foreign import check_claim, check_memory, reading
from diskreplay.interop.exchange.importing import Given, Imported, Source, import_into, skipped_between
from diskreplay.interop.exchange.zarr_documents import Documents, Layout

__all__ = ["export_dataset", "import_dataset"]

NAME = "zarr_episodes"
_ATTRIBUTE, _VERSION = "diskreplay", 1
_ENDS, _TERMINATED, _TRUNCATED = "episode_ends", "terminated", "truncated"
_HAS_FINAL, _HAS_FIELDS, _FINAL = "has_final_obs", "has_fields", "final_"
_CHUNK_BYTES = 2 << 20
_PRIORITIES = Field((), "float64")
_DOCUMENTS = (".zarray", ".zattrs", ".zgroup", "zarr.json")
# An array may claim this number of bytes even if its files are small, since chunks of zeros may be omitted.
_MOST_CONSTANT = 64 << 30

Rows = Mapping[str, NDArray[Any]]
Ended = Literal["terminated", "truncated", "cut"]


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    ended: Ended = "truncated",
    **options: Unpack[Options],
) -> Imported:
    """Import a data set of diffusion_policy into a new store, or resume an interrupted import.

    A data set that `export_dataset` wrote is restored completely. In other data sets, each array in ``data`` becomes an
    observation of the same name, except ``action``, ``reward`` and the arrays in the option ``extra``. Missing rewards
    are zeros. Episodes have no observation after their last action.

    Parameters
    ----------
    source : path
        The data set, of zarr version 2 or 3: a folder, or a ``.zip`` file of such a folder.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this data set.
    ended : str
        How episodes ended, since the format does not tell: "truncated", "terminated" or "cut".
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        The folder or file does not exist.
    FormatError
        The data set is damaged, or an array has a dtype or a codec that is not supported or not installed.
    SchemaError
        An array cannot be stored.
    StoreExists
        ``path`` exists, and is not an import of this data set.
    """
    check_option("ended", ended, get_args(Ended))
    return import_into(path, source, partial(_DataSet, ended), options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    *,
    zarr_format: Literal[2, 3] = 2,
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a data set of diffusion_policy.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The data set: a zip file if the path ends in ``.zip``, otherwise a folder. Nothing may exist at this path.
    zarr_format : int
        The version of zarr: 2 or 3. diffusion_policy reads version 2.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`. The name of an array is the path of the
        leaf without the first part: ``rename={"obs/image": "img"}`` makes ``data/img``.

    Raises
    ------
    SchemaError
        Two leaves would have the same name, or a leaf would have the name ``priority``.
    StoreExists
        A file or folder exists at ``path``.
    """
    check_option("zarr_format", zarr_format, (2, 3))

    def make_format(schema: Schema, *_: object) -> Format:
        found = _names(schema)
        return Format({Lacking.NOTES: "zarr arrays have no place for them"}, partial(_write, zarr_format, found))

    return export_from(store_or_path, path, make_format, options)


# --- reading ---------------------------------------------------------------------------------------------------------


class _BoundedStore(WrapperStore[Any]):
    """A store of zarr that refuses too large files, and chunks that would unpack to more bytes than they claim.

    `layouts` has the layouts of checked arrays by name.
    """

    def __init__(self, file: Path, store: Any) -> None:
        super().__init__(store)
        self._file, self._checked, self.layouts = file, set[str](), dict[str, Layout]()

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        layout = self.layouts.get("/".join(key.split("/")[:2]))
        # zarr reads a shard in parts: the index, then chunks. The first read checks the whole shard; later reads need
        # no check.
        if layout is None or key.endswith(_DOCUMENTS) or (byte_range is not None and key in self._checked):
            return await super().get(key, prototype, byte_range)
        found = await super().get(key, prototype, RangeByteRequest(0, layout.file_nbytes + 1))
        if found is None:
            return None
        if not layout.may_unpack(_bytes_of(found)):
            raise FormatError(
                f"{self._file}: the chunk {key} is incomplete, or unpacks to more than {layout.chunk_nbytes} bytes"
            )
        self._checked.add(key)
        return found if byte_range is None else await super().get(key, prototype, byte_range)


def _bytes_of(buffer: Any) -> memoryview:
    data: memoryview = buffer.as_numpy_array().view(np.uint8).data
    return data


class _DataSet(Source):
    """An open data set. ``schema`` is None if the data set does not have the attribute ``diskreplay``."""

    format = NAME

    def __init__(self, ended: Ended, given: Given) -> None:
        super().__init__(given)
        self._ended, self._root = ended, self._open()
        stops = self._read_stops()
        self._rows = int(stops[-1]) if len(stops) else 0
        starts = np.concatenate([np.zeros(min(1, len(stops)), stops.dtype), stops[:-1]])
        self.numbers = np.flatnonzero(starts < stops).tolist()
        self.skipped = skipped_between(self.numbers, len(stops), "it has no rows")
        self._bounds = list(zip(*(ends[self.numbers].tolist() for ends in (starts, stops)), strict=True))
        self.episodes, self.steps = len(self._bounds), sum(stop - start for start, stop in self._bounds)
        self._arrays = self._described(self._root.attrs.asdict().get(_ATTRIBUTE))
        arrays = self._found()
        found = {path: name for path, name in arrays.items() if not self.choice.skips(name)}
        self.left_out = [name for name in arrays.values() if self.choice.skips(name)]
        self._columns = {path: self._column(f"data/{name}", path, self._rows) for path, name in found.items()}
        longest = max(map(len, self._columns.values()), default=0)
        self.not_kept = [f"rows {self._rows} to {longest}, after the last episode"] if longest > self._rows else []
        self.leaves = self._leaves()
        self.names = found | {path: _meta_name(path) for path in self.leaves if is_part(path, FIELDS)}
        names = self._meta_names()
        self._meta = {name: self._column(f"meta/{name}", f"meta/{name}", len(stops)) for name in names}

    def _open(self) -> zarr.Group:
        file = self.place
        if not file.exists():
            raise StoreNotFound(f"{file} is not a data set of zarr: there is no such folder or file")
        try:
            if file.is_file():
                self._documents = Documents(file, self.opened.enter_context(zipfile.ZipFile(file)), self.stored)
                store: Any = self.opened.enter_context(closing(ZipStore(file, mode="r")))
            else:
                self._documents, store = Documents(file, None, self.stored), LocalStore(file, read_only=True)
            self._chunks = _BoundedStore(file, store)
            # Consolidated metadata are not used: they may differ from the metadata files that are checked.
            return zarr.open_group(self._chunks, mode="r", use_consolidated=False)
        except (zipfile.BadZipFile, FileNotFoundError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{file} is not a group of zarr: {error}") from None

    def _array(self, name: str) -> "zarr.Array[Any]":
        """Check an array, and open it."""
        layout = self._documents.check(name)
        try:
            found = self._root[name]
        except (KeyError, ValueError, TypeError) as error:
            raise FormatError(f"{self.place} has no array {name}: {error}") from None
        if not isinstance(found, zarr.Array) or not found.ndim or layout is None:
            raise FormatError(f"{self.place}: {name} is not an array of rows")
        self._chunks.layouts[name] = layout
        check_claim(layout.nbytes, self.stored, f"{self.place}: {name}", _MOST_CONSTANT)
        return found

    def _described(self, document: Json) -> dict[str, str]:
        """Read the attribute ``diskreplay``, and return the name of each leaf's array; empty without the attribute."""
        if document is None:
            return {}
        try:
            if document["version"] != _VERSION:
                raise FormatError(f"it has the version {document['version']!r:.50}, and this release reads {_VERSION}")
            self.schema, names = Schema.from_json(document["schema"]), dict(document["names"])
            if names.keys() != self.schema.step_leaves.keys() or not all(isinstance(n, str) for n in names.values()):
                raise FormatError("it does not name an array of each leaf")
            self.metadata = dict(document["metadata"])
            return names
        except (FormatError, LookupError, TypeError, ValueError) as error:
            raise FormatError(f"{self.place}: its attribute {_ATTRIBUTE!r} cannot be used: {error}") from None

    def _read_stops(self) -> NDArray[np.integer[Any]]:
        """Return, for each episode, the number of the row after the episode's last row."""
        counts = self._array("meta/episode_ends")
        check_claim(counts.size * counts.dtype.itemsize, self.stored, f"{self.place}: meta/episode_ends")
        ends = np.asarray(counts[...])
        if ends.ndim != 1 or ends.dtype.kind not in "iu" or (ends[1:] < ends[:-1]).any() or (ends[:1] < 0).any():
            raise FormatError(
                f"{self.place}: meta/episode_ends must have one axis of integers that never decrease, the number of "
                "steps up to the end of each episode"
            )
        return ends

    def _column(self, name: str, what: str, rows: int) -> ColumnReader:
        array = self._array(name)
        column = ColumnReader(array, array.chunks[0])
        if len(column) < rows:
            raise FormatError(f"{self.place}: {what} has {len(column)} rows, and {rows} are needed")
        return column

    def _found(self) -> dict[str, str]:
        """Return the name of each leaf's array, by the leaf's path, such as ``{"obs/img": "img"}``."""
        there = self._documents.members("data")
        if self.schema is not None:
            return self._arrays | ({PRIORITY: PRIORITY} if PRIORITY in there else {})
        found = {f"{OBS}/{name}": name for name in there if name not in (ACTION, REWARD)}
        return found | {name: name for name in there if name in (ACTION, REWARD)}

    def _leaves(self) -> dict[str, Field]:
        none = {path: np.empty((0, *column.shape[1:]), column.dtype) for path, column in self._columns.items()}
        if self.schema is not None:
            kept = self.schema.leaves.items()
            return {path: leaf for path, leaf in kept if path in none or path not in self._arrays}
        return leaves_of(none, self.place, "; skip leaves arrays out")

    def _meta_names(self) -> list[str]:
        if self.schema is None:
            return []
        fields = [path for path in self.schema.leaves if path.startswith("episode/")]
        finals = [f"{_FINAL}{name}" for path, name in self._arrays.items() if is_obs(path)]
        return [_TERMINATED, _TRUNCATED, _HAS_FINAL, _HAS_FIELDS, *map(_meta_name, fields), *finals]

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        row_bytes = sum(column.row_bytes for column in self._columns.values())
        columns = {path: each for path, each in self._columns.items() if path in {*wanted, PRIORITY}}
        lacking = {_meta_name(path) for path in self.leaves if is_part(path, FIELDS) and path not in wanted}
        names = [name for name in self._meta if name not in lacking]
        stops, numbers = np.array([stop for _, stop in self._bounds]), np.array(self.numbers) + 1
        for number, (start, stop) in zip(self.numbers[first:], self._bounds[first:], strict=True):
            what = f"{self.place}: the episode of rows {start} to {stop}"
            check_claim((stop - start) * row_bytes, self.stored, what)
            check_memory(sum(column.most_bytes(stop - start) for column in self._columns.values()), what)
            with reading(f"{self.place}: rows {start} to {stop}"):
                steps = {path: column.read(start, stop, stops) for path, column in columns.items()}
                meta = {name: self._meta[name].read(number, number + 1, numbers)[0] for name in names}
            yield self._episode(meta, steps)

    def _episode(self, meta: Rows, steps: dict[str, NDArray[Any]]) -> EpisodeData:
        if self.schema is None:
            return EpisodeData(steps, self._ended == _TERMINATED, self._ended == _TRUNCATED)
        priority = steps.pop(PRIORITY, None)
        if meta[_HAS_FINAL]:
            final = {path: meta[f"{_FINAL}{self._arrays[path]}"] for path in steps if is_obs(path)}
            steps |= {path: np.concatenate([steps[path], row[None]]) for path, row in final.items()}
        fields = [path for path in self.schema.leaves if is_part(path, FIELDS) and meta[_HAS_FIELDS]]
        return EpisodeData(
            steps,
            bool(meta[_TERMINATED]),
            bool(meta[_TRUNCATED]),
            {path: meta[name] for path in fields if (name := _meta_name(path)) in meta},
            None if priority is None or np.isnan(priority).all() else priority,
        )


# --- writing ---------------------------------------------------------------------------------------------------------


def _names(schema: Schema) -> dict[str, str]:
    found = {path: path.partition("/")[2].replace("/", ".") or path for path in schema.step_leaves}
    for path, name in found.items():
        if list(found.values()).count(name) > 1 or name == PRIORITY:
            raise SchemaError(f"{path} cannot be the array data/{name}: the name is taken; rename= gives another name")
    return found


def _meta_name(path: str) -> str:
    return path.replace("/", "_", 1).replace("/", ".")  # the field "episode/seed" becomes episode_seed


def _write(zarr_format: Literal[2, 3], names: Mapping[str, str], plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    document = {"version": _VERSION, "schema": plan.schema.to_json(), "names": dict(names)}
    attributes: dict[str, Json] = {_ATTRIBUTE: {**document, "metadata": dict(plan.metadata)}}
    is_zip = plan.path.suffix == ".zip"
    with closing(ZipStore(plan.path, mode="w") if is_zip else LocalStore(plan.path)) as store:
        root = zarr.create_group(store, zarr_format=zarr_format, attributes=attributes)
        arrays = _Arrays(root, plan, names)
        for episode in episodes:
            arrays.add(episode)
        arrays.finish()


class _Arrays:
    def __init__(self, root: zarr.Group, plan: Plan, names: Mapping[str, str]) -> None:
        self._root, self._plan, self._names, self._rows = root, plan, names, 0
        leaves, flag = plan.schema.leaves, Field((), "bool")
        self._data = {path: self._of_steps(name, leaves[path]) for path, name in names.items()}
        rows = {_ENDS: Field((), "int64")} | dict.fromkeys((_TERMINATED, _TRUNCATED, _HAS_FINAL, _HAS_FIELDS), flag)
        rows |= {f"{_FINAL}{name}": leaves[path] for path, name in names.items() if is_obs(path)}
        self._fields = {path: leaf for path, leaf in leaves.items() if is_part(path, "episode")}
        rows |= {_meta_name(path): leaf for path, leaf in self._fields.items()}
        self._meta = {name: _column(root, f"meta/{name}", plan.episodes, leaf) for name, leaf in rows.items()}
        self._priority: ColumnWriter | None = None

    def _of_steps(self, name: str, field: Field, fill: float = 0, begin: int = 0) -> ColumnWriter:
        return _column(self._root, f"data/{name}", self._plan.steps, field, fill, begin)

    def add(self, episode: EpisodeData) -> None:
        for path, column in self._data.items():
            column.append(episode.steps[path][: len(episode)])
        if episode.priority is not None or self._priority is not None:
            self._add_priority(episode)
        self._rows += len(episode)
        meta: dict[str, Any] = {_ENDS: self._rows, _TERMINATED: episode.terminated, _TRUNCATED: episode.truncated}
        meta |= {_HAS_FINAL: episode.has_final_obs, _HAS_FIELDS: bool(episode.fields)}
        for path, name in self._names.items():
            if is_obs(path):
                last = episode.steps[path][-1]
                meta[f"{_FINAL}{name}"] = last if episode.has_final_obs else np.zeros_like(last)
        for path, leaf in self._fields.items():
            meta[_meta_name(path)] = episode.fields.get(path, np.zeros(leaf.shape, leaf.dtype))
        for name, value in meta.items():
            self._meta[name].append(np.asarray(value)[None])

    def _add_priority(self, episode: EpisodeData) -> None:
        if self._priority is None:
            self._priority = self._of_steps(PRIORITY, _PRIORITIES, np.nan, self._rows)
        none = np.full(len(episode), np.nan)
        self._priority.append(none if episode.priority is None else episode.priority)

    def finish(self) -> None:
        for column in (*self._data.values(), *self._meta.values(), *([self._priority] if self._priority else [])):
            column.finish()


def _column(root: zarr.Group, name: str, rows: int, field: Field, fill: float = 0, begin: int = 0) -> ColumnWriter:
    """Create an array of ``rows`` rows with the value ``fill``, and return a writer of the rows from ``begin`` on."""
    if root.metadata.zarr_format == 2:
        compressor: Any = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 0}  # the settings of diffusion_policy
    else:
        compressor = BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle")
    chunk = max(1, min(rows, _CHUNK_BYTES // max(1, field.row_bytes)))
    array = root.create_array(
        name,
        shape=(rows, *field.shape),
        dtype=field.dtype,
        chunks=(chunk, *field.shape),
        compressors=compressor,
        fill_value=field.dtype.type(fill),
        overwrite=True,
    )
    return ColumnWriter(array, chunk, begin, fill)
