"""The zarr metadata of stores and segments; a document is the JSON object in a zarr.json file.

The documents of a new segment are copies of templates in the root's attributes, with the segment's shapes filled in.
This is 15 times as fast as making documents with zarr-python, and a collecting process need not import zarr-python.
"""

import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from crc32c import crc32c

from diskreplay.bounded_json import parse_json
from diskreplay.errors import FormatError
from diskreplay.folders import BY_PATH, Lookup
from diskreplay.schema.schema import Field, Schema
from diskreplay.segments.documents import layout
from diskreplay.segments.files.mapping import read_with_status
from diskreplay.workers import computed_once

Document = dict[str, Any]
Identity = tuple[int, int, int]  # inode, modification time and size of a file

MAX_BYTES = 64 << 20
_CHECKSUM = re.compile(rb'"diskreplay_crc32c":"([0-9a-f]{8})"')
_BLANK = "00000000"
_OUTSIDE = re.compile(r"^/|(?:^|/)\.\.?(?:/|\Z)")  # paths that could lead out of a segment's folder
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

# Arrays of one number per row that are not in the schema. Every segment has ``done`` and ``time``; some segments have
# ``priority``.
_OWN_ARRAYS = {layout.DONE: Field((), "uint8"), layout.TIME: Field((), "int64")}
_PRIORITY = {layout.PRIORITY: Field((), "float64")}


def array_leaves(schema: Schema) -> dict[str, Field]:
    return schema.leaves | _OWN_ARRAYS


def make_templates(schema: Schema) -> dict[str, Document]:
    import zarr  # slow to import, and only needed to create a store
    from zarr.storage import MemoryStore

    stored: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(stored), zarr_format=3)
    for path, leaf in array_leaves(schema).items():
        names = ["lane", "row", *(f"{path.replace('/', '_')}_{i}" for i in range(len(leaf.shape)))]
        _create_array(group, path, (1, 1, *leaf.shape), leaf.dtype.name, names)
    for name in (layout.COMMITTED, layout.OBSERVED, layout.DURABLE):
        _create_array(group, name, (1,), "int64", ["lane"])
    return _documents(stored)


def make_root_documents() -> dict[str, Document]:
    import zarr  # slow to import, and only needed to create a store
    from zarr.storage import MemoryStore

    stored: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(stored), zarr_format=3)
    _create_array(group, "counters", (2 * layout.COUNTER_WORDS,), "int64", ["word"])
    _create_array(group, "evictions", (layout.EVICTION_ROWS, 2), "int64", ["entry", "id_and_steps"])
    for name in ("limiters", "samplers", "segments"):
        group.create_group(name)
    return _documents(stored)


def _create_array(group: Any, path: str, shape: tuple[int, ...], dtype: str, names: list[str]) -> None:
    group.create_array(
        path,
        shape=shape,
        chunks=shape,
        dtype=dtype,
        # Only the codec of plain bytes: an uncompressed chunk is a raw block that can be mapped.
        compressors=None,
        filters=None,
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=names,
    )


def _documents(stored: dict[str, Any]) -> dict[str, Document]:
    documents = {key: parse_json(value.to_bytes()) for key, value in stored.items()}
    return {
        key.removesuffix(layout.METADATA).rstrip("/"): document
        for key, document in documents.items()
        if key.rsplit("/", 1)[-1] == layout.METADATA
    }


@dataclass(frozen=True)
class RowArray:
    """An array with one entry per row of a segment: a field of the schema, ``done``, ``time`` or ``priority``.

    If ``is_of_episodes`` is True, the array belongs to an episode field, and has an entry only for the segment's rows
    with the flag `EPISODE_VALUES`.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    row_bytes: int
    is_of_episodes: bool
    template: Document = field(repr=False, compare=False)

    def chunk_key(self, chunk: int) -> str:
        return layout.chunk_key(chunk, len(self.shape))

    def chunk_number(self, name: str) -> int | None:
        found = re.fullmatch(r"c\.0\.(0|[1-9][0-9]{0,17})" + r"\.0" * len(self.shape), name)
        return None if found is None else int(found[1])

    @computed_once
    def _text(self) -> str:
        """The array's zarr.json with placeholders for its shape and chunk shape, made when it is first needed."""
        return dump(shaped(self.template, _SHAPE, _CHUNK_SHAPE)).decode()

    def document(self, lanes: int, rows: int, chunk_rows: int) -> bytes:
        # The number of rows always has the same width, so that it can be overwritten in place.
        return _filled(
            self._text, (lanes, f"{rows:{layout.ROWS_WIDTH}}", *self.shape), (lanes, chunk_rows, *self.shape)
        )


class Blueprint:
    """The zarr metadata of the groups and arrays that every segment of a store has, except for the shapes.

    A blueprint is immutable. It is made once per store, because making a blueprint for each segment would take too
    long. ``arrays`` maps paths to the arrays with rows, episode fields included. ``values`` has the paths of episode
    fields, and ``paths`` the paths of all folders below a segment, parents first. Segments with initial priorities use
    the blueprint `with_priority`.
    """

    def __init__(
        self,
        templates: dict[str, Document],
        leaves: dict[str, Field],
        tables: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        self._root, self._templates, self._leaves, self._tables = templates[""], templates, leaves, tables
        self.arrays = {
            path: RowArray(path, leaf.shape, leaf.dtype, leaf.row_bytes, layout.is_of_episodes(path), templates[path])
            for path, leaf in leaves.items()
        }
        self.paths = sorted(filter(None, templates))
        self.values = [path for path, array in self.arrays.items() if array.is_of_episodes]

    @computed_once
    def counters(self) -> list[str]:
        """The paths of the arrays with one number per lane."""
        others = {*self.paths} - self.arrays.keys() - self._tables.keys()
        return [path for path in self.paths if path in others and _is_array(self._templates[path])]

    @computed_once
    def _texts(self) -> dict[str, str]:
        documents = {path: self._templates[path] for path in self.paths if path not in self.arrays}
        blank = {
            path: shaped(document, _SHAPE, _CHUNK_SHAPE) for path, document in documents.items() if _is_array(document)
        }
        return {path: dump(document).decode() for path, document in (documents | blank).items()}

    @computed_once
    def with_priority(self) -> "Blueprint":
        """A copy of this blueprint with an array of initial priorities.

        The metadata of this array is made from the metadata of the array ``time``, because ``segment_metadata`` in a
        root's zarr.json does not have it.
        """
        document = {**self._templates[layout.TIME], "data_type": "float64", "fill_value": 0.0}
        return Blueprint({**self._templates, layout.PRIORITY: document}, self._leaves | _PRIORITY)

    def of(self, chunk_rows: Container[str]) -> "Blueprint":
        return self.with_priority if layout.PRIORITY in chunk_rows else self

    def of_pack(self, members: int, runs: int, codecs: Mapping[str, Any]) -> "Blueprint":
        """Return the blueprint of a pack; ``codecs`` has the codecs of compressed arrays, by path.

        ``members`` is the number of merged segments, and ``runs`` the number of lanes of all these segments.
        """
        documents = {path: {**self._templates[path], "codecs": codec} for path, codec in codecs.items()}
        tables = {}
        for path, lines, names in zip(layout.PACK_TABLES, (members, runs), layout.PACK_COLUMNS, strict=True):
            tables[path] = lines, len(names)
            documents[path] = {**self._templates[layout.COMMITTED], "dimension_names": [path, "column"]}
        return Blueprint({**self._templates, **documents}, self._leaves, tables)

    def documents(
        self, lanes: int, chunk_rows: dict[str, int], rows: int | None, values: int = 1
    ) -> Iterator[tuple[str, bytes]]:
        """Yield (path, zarr.json) of every folder below a segment, parents first.

        An array's shape has ``rows`` rows, or ``values`` rows if the array belongs to an episode field, but at most the
        rows of one chunk. If ``rows`` is None, the shape of each array is the shape of one chunk.
        """
        for path in self.paths:
            array = self.arrays.get(path)
            if array is None:
                shape = self._tables.get(path, (lanes,))
                yield path, _filled(self._texts[path], shape, shape)
            else:
                most = chunk_rows[path]
                known = most if rows is None else min(values if array.is_of_episodes else rows, most)
                yield path, array.document(lanes, known, most)

    def episode_documents(self, count: int) -> Iterator[tuple[str, bytes]]:
        yield layout.EPISODES, dump(self._root)
        counter = {**self._templates[layout.COMMITTED], "dimension_names": ["episode"]}
        documents = {
            "position": counter,
            "steps": {**counter, "data_type": "int32"},
            "end": {**self._templates[layout.DONE], "dimension_names": ["episode"]},
            "time": counter,
            "total_reward": {**counter, "data_type": "float64", "fill_value": 0.0},
        }
        for name, document in documents.items():
            yield f"{layout.EPISODES}/{name}", dump(shaped(document, [count], [max(1, count)]))

    def segment_document(self, attributes: Document) -> bytes:
        return seal_document(self._root, attributes)


# Placeholders for the shape and the chunk shape in a zarr.json; zarr-python writes no such strings.
_SHAPE, _CHUNK_SHAPE = "@shape", "@chunk_shape"


def _is_array(template: Document) -> bool:
    return template.get("node_type") == "array"


def _filled(text: str, shape: tuple[int | str, ...], chunk_shape: tuple[int, ...]) -> bytes:
    text = text.replace(f'"{_SHAPE}"', f"[{','.join(map(str, shape))}]")
    return text.replace(f'"{_CHUNK_SHAPE}"', f"[{','.join(map(str, chunk_shape))}]").encode()


def read_blueprint(templates: object, schema: Schema) -> Blueprint:
    """Return the blueprint of a store's segments; ``templates`` is the root's attribute ``segment_metadata``.

    Raises FormatError if the metadata of an array of the schema is missing, or cannot be written as JSON again.
    """
    if not isinstance(templates, dict) or not isinstance(templates.get(""), dict):
        raise FormatError("the root's segment_metadata is not a JSON object of groups and arrays")
    leaves = array_leaves(schema)
    for path in (*leaves, *layout.LANE_COUNTERS):
        document = templates.get(path)
        if not isinstance(document, dict) or document.get("node_type") != "array":
            raise FormatError(f"the root's segment_metadata has no array {path!r}; restore the root's zarr.json")
    usable = {
        path: document
        for path, document in templates.items()
        if isinstance(document, dict) and _OUTSIDE.search(path) is None
    }
    try:
        dump(usable)  # without this check, the error would appear only when a segment is made
        return Blueprint(usable, leaves)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the root's segment_metadata is unusable ({error}); restore the root's zarr.json") from None


# --- documents with their own checksum ------------------------------------------------------------------------------


def dump(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def seal_document(document: Document, attributes: Document) -> bytes:
    """Return a group's zarr.json with these attributes; a checksum of the file is added as the last attribute.

    The checksum is the CRC-32C of the file with zeros in place of the checksum's eight hexadecimal digits.
    """
    data = dump({**document, "attributes": {**attributes, "diskreplay_crc32c": _BLANK}})
    crc = crc32c(data)
    return data.replace(f'"diskreplay_crc32c":"{_BLANK}"'.encode(), f'"diskreplay_crc32c":"{crc:08x}"'.encode())


def read_document(path: Path | str) -> bytes:
    """Return the bytes of a zarr.json or another metadata file.

    Raises FormatError if the file is a link, not regular, or larger than `MAX_BYTES`, FileNotFoundError if it is
    missing, and OSError if it cannot be read.
    """
    return read_identified(str(path), BY_PATH)[0]


def identify(path: Path | str, lookup: Lookup | None = None) -> Identity:
    """Return inode, modification time (ns) and size of a file or folder; zeros if the file is missing.

    After the file is replaced, at least one of these numbers is different.
    """
    try:
        return _identity(os.lstat(path) if lookup is None else lookup.status(str(path)))
    except OSError:
        return 0, 0, 0


def _identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_identified(path: str, lookup: Lookup) -> tuple[bytes, Identity]:
    data, status = read_with_status(path, None, MAX_BYTES, lookup)
    if status.st_size > MAX_BYTES:
        raise FormatError(f"{path} is larger than {MAX_BYTES} bytes; restore this file")
    return data, _identity(status)


def parse_document(data: bytes, path: Path | str) -> Document:
    """Return the JSON object in ``data``; ``path`` is used for messages only.

    Raises FormatError if the bytes are not JSON, not an object, or more than `MAX_BYTES`.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        document = parse_json(data)
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise FormatError(f"{path} is not readable metadata ({error}); restore this file") from None
    return document


def read_object(path: Path | str) -> Document:
    return parse_document(read_document(path), path)


def read_verified(path: Path | str) -> Document:
    """Return the attributes in a group's zarr.json, after checking the document's checksum."""
    data = read_document(path)
    verify_document(data, path)
    attributes = parse_document(data, path).get("attributes")
    return attributes if isinstance(attributes, dict) else {}


def shaped(document: Document, shape: object, chunks: object) -> Document:
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    return {**document, "shape": shape, "chunk_grid": grid}


def verify_document(data: bytes, path: Path | str) -> None:
    """Raise FormatError if the checksum in the attributes of a zarr.json is missing or does not match."""
    found = _CHECKSUM.search(data)
    if found is None or _CHECKSUM.search(data, found.end()):
        raise FormatError(f"{path} has no checksum of its own; another program changed it, restore this file")
    blank = data[: found.start(1)] + _BLANK.encode() + data[found.end(1) :]
    if crc32c(blank) != int(found[1], 16):
        raise FormatError(f"{path} does not fit its checksum; it was damaged, restore this file")


# --- attributes of documents, by tables ------------------------------------------------------------------------------

Check = Callable[[Any], bool]
"""A function that returns whether a value from JSON is valid for an attribute."""

REQUIRED: Any = object()
"""Used as the default of an attribute that must not be missing."""


class Attribute(NamedTuple):
    """How an attribute in a zarr.json is written and read.

    A *table* is a tuple of `Attribute` objects, and defines attributes of a file. ``check`` is the type of valid
    values, or a function that returns whether a value from JSON is valid. ``field`` is the attribute's name in memory;
    empty: it is ``name``, as in the file. ``make`` converts a value from JSON to the value in memory, and ``write``
    converts it back; None: nothing is converted. With ``may_lack``, an attribute whose value is the default is not
    written. With ``may_be_null``, the value may also be null in the file, which is None in memory.
    """

    name: str
    check: Check | type
    default: Any = REQUIRED
    field: str = ""
    make: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    may_lack: bool = False
    may_be_null: bool = False


def read_by(table: Iterable[Attribute], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: value} for the attributes that a table defines.

    Raises KeyError if a required attribute is missing, ValueError if a value is invalid.
    """
    found = {}
    for name, check, default, stored, make, _, _, may_be_null in table:
        value = attributes.get(name, default)
        if value is REQUIRED:
            raise KeyError(name)
        if name in attributes and not (value is None and may_be_null):
            if not (type(value) is check if isinstance(check, type) else check(value)):
                raise ValueError(f"{name} is {value!r:.80}")
            value = value if make is None else make(value)
        found[stored or name] = value
    return found


def write_by(table: Iterable[Attribute], read: Callable[[str], Any]) -> Document:
    found = {}
    for name, _, default, stored, _, write, may_lack, _ in table:
        value = read(stored or name)
        if not may_lack or value != default:
            found[name] = value if write is None or value is None else write(value)
    return found


def is_whole(value: object, least: int = 0, most: int | None = None) -> TypeGuard[int]:
    return type(value) is int and value >= least and (most is None or value <= most)


def whole(least: int = 0, most: int | None = None) -> Check:
    return lambda value: type(value) is int and value >= least and (most is None or value <= most)


def wholes(count: int | None = None, most: int | None = None) -> Check:
    """Return a check that a value is a list of ``count`` whole numbers from 0 to ``most``.

    If ``count`` is None, the list may have any length. If ``most`` is None, the numbers have no maximum.
    """

    def check(value: Any) -> bool:
        if type(value) is not list or (count is not None and len(value) != count):
            return False
        # The list may have an item for each of thousands of lanes, so no function is called per item.
        if not value:
            return True
        return {*map(type, value)} == {int} and min(value) >= 0 and (most is None or max(value) <= most)

    return check


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_of(*values: object) -> Check:
    return values.__contains__


def is_uuid(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


# --- features --------------------------------------------------------------------------------------------------------

FEATURES = (layout.PACKS, layout.ZSTD, layout.EPISODE_TABLES)
"""The features that this release knows; the attribute ``requires`` lists those that a store or segment needs."""


class UnknownFeature(FormatError):
    """Another release wrote the zarr.json: the file is not damaged, but this release must not use the data."""


def check_requires(attributes: Document, path: Path | str) -> None:
    given = attributes.get("requires") or []
    unknown = [name for name in given if name not in FEATURES] if isinstance(given, list) else given
    if unknown:
        raise UnknownFeature(f"{path} needs {unknown!r}, which this release does not know; update diskreplay")


def check_release(attributes: Document, path: Path | str) -> None:
    if attributes.get("requires") in (None, [], [layout.DISCARDS]):
        raise UnknownFeature(f"{path} {layout.BEFORE_RELEASE}")
