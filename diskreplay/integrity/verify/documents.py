"""Derives a store's zarr.json files (its documents) from its schema, as docs/format.md describes."""

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.integrity.verify.files import Files
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents import layout

Document = dict[str, Any]
MAX_DOCUMENT_BYTES = 64 << 20
MOST_DEPTH = 200
_NO_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[^][{}"]+', re.DOTALL)
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SELF = re.compile(rb'(?<="diskreplay_crc32c":")[0-9a-f]{8}(?=")')


@dataclass(frozen=True)
class Array:
    """The dtype of an array, and the shape of one row in one lane."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def chunk_number(self, name: str) -> int | None:
        found = re.fullmatch(r"c\.0\.(0|[1-9][0-9]{0,17})" + r"\.0" * len(self.shape), name)
        return None if found is None else int(found[1])

    def chunk_name(self, chunk: int) -> str:
        return layout.chunk_key(chunk, len(self.shape))


class Compressed(NamedTuple):
    """How a pack's array is compressed: the rows of an inner chunk, the level of zstd, and the bytes of the file."""

    rows: int
    level: int
    nbytes: int


def sharding(how: Compressed, shape: tuple[int, ...]) -> Document:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": how.level, "checksum": False}}
    configuration = {
        "chunk_shape": [1, how.rows, *shape],
        "codecs": [plain, zstd, {"name": "crc32c"}],
        "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {"name": "sharding_indexed", "configuration": configuration}


@dataclass(frozen=True)
class Plan:
    """The layout of the segments of a store: the paths of groups and arrays, and templates of their zarr.json files.

    ``arrays`` has the arrays with rows, by path. ``tables`` has the paths of the two tables of a pack. ``columns`` has
    the paths of the arrays that form the table of episodes of a segment.
    """

    arrays: dict[str, Array]
    groups: tuple[str, ...]
    templates: dict[str, Document]
    store: str  # the uuid of the store
    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def of(
        self,
        chunk_rows: Any,
        packed: tuple[int, int] | None = None,
        compressed: Mapping[str, "Compressed"] = MappingProxyType({}),
        episodes: int | None = None,
    ) -> "Plan":
        """Return the layout of a segment; its attributes tell whether it has priorities and tables."""
        arrays, groups, templates, tables = self.arrays, self.groups, self.templates, self.tables
        columns = self.columns
        if episodes is not None:
            groups, documents = (*groups, layout.EPISODES), _episode_documents(templates, episodes)
            templates, columns = {**templates, layout.EPISODES: templates[""], **documents}, tuple(documents)
        if isinstance(chunk_rows, dict) and layout.PRIORITY in chunk_rows:
            document = {**templates[layout.TIME], "data_type": "float64", "fill_value": 0.0}
            arrays = {**arrays, layout.PRIORITY: Array((), "float64")}
            templates = {**templates, layout.PRIORITY: document}
        if packed is not None:
            tables = layout.PACK_TABLES
            for path, lines, names in zip(tables, packed, layout.PACK_COLUMNS, strict=True):
                shape = [lines, len(names)]
                document = shaped(templates[layout.COMMITTED], shape, shape, [path, "column"])
                templates = {**templates, path: document}
        for path, how in compressed.items():
            codecs = [sharding(how, self.arrays[path].shape)]
            templates = {**templates, path: {**templates[path], "codecs": codecs}}
        return replace(self, arrays=arrays, groups=groups, templates=templates, tables=tables, columns=columns)

    @property
    def episode_arrays(self) -> list[str]:
        return [path for path in self.arrays if layout.is_of_episodes(path)]

    @property
    def folders(self) -> list[str]:
        return sorted([*self.arrays, *self.groups, *layout.LANE_COUNTERS, *self.tables, *self.columns])


def _episode_documents(templates: Mapping[str, Document], episodes: int) -> dict[str, Document]:
    documents = {}
    for name, dtype in layout.EPISODE_COLUMNS.items():
        template = templates[layout.DONE if dtype == "|u1" else layout.COMMITTED]
        document = shaped(template, [episodes], [max(1, episodes)], ["episode"])
        fill = 0.0 if dtype == "<f8" else 0
        documents[f"{layout.EPISODES}/{name}"] = {**document, "data_type": np.dtype(dtype).name, "fill_value": fill}
    return documents


def make_plan(schema: Schema, templates: dict[str, Document], store: str) -> Plan:
    arrays = {path: Array(field.shape, field.dtype.name) for path, field in schema.leaves.items()}
    groups = {"/".join(parts[:i]) for path in arrays if (parts := path.split("/")) for i in range(1, len(parts))}
    return Plan(
        {**arrays, layout.DONE: Array((), "uint8"), layout.TIME: Array((), "int64")},
        tuple(sorted(groups)),
        templates,
        store,
    )


def parse(files: Files, where: str, data: bytes) -> Document | None:
    try:
        text = data.decode()
        if text.count("[") + text.count("{") > MOST_DEPTH:
            steps = ((mark in "[{") - (mark in "]}") for mark in _NO_MARKS.sub("", text))
            if max(accumulate(steps)) > MOST_DEPTH:
                raise ValueError(f"more than {MOST_DEPTH} levels of nested objects and arrays")
        document = json.loads(text)
    except ValueError as error:
        files.report("metadata", where, f"is not JSON ({str(error)[:80]})")
        return None
    if not isinstance(document, dict):
        files.report("metadata", where, "is not a JSON object")
        return None
    return document


def read_object(files: Files, where: str, most: int = MAX_DOCUMENT_BYTES) -> Document | None:
    data = files.read(where, most)
    return None if data is None else parse(files, where, data)


def read_group(files: Files, folder: str) -> Document | None:
    where = f"{folder}/{layout.METADATA}"
    data = files.read(where, MAX_DOCUMENT_BYTES)
    if data is None or not check_itself(files, where, data) or (document := parse(files, where, data)) is None:
        return None
    attributes = document.get("attributes")
    if not is_group(document) or not isinstance(attributes, dict):
        files.report("metadata", where, "is not a group with attributes")
        return None
    return attributes


def check_content(files: Files, where: str, expected: bytes | None, kind: str, detail: str) -> None:
    data = files.read(where, max(MAX_DOCUMENT_BYTES, len(expected or b"")))
    if data is not None and data != expected:
        files.report(kind, where, detail)


def check_itself(files: Files, where: str, data: bytes) -> bool:
    if not (fits := fits_itself(data)):
        files.report("checksum", where, "has no checksum in it" if fits is None else "does not match its checksum")
    return bool(fits)


def fits_itself(data: bytes) -> bool | None:
    """Return whether a JSON file matches the checksum that it contains; None: it contains no checksum."""
    if len(_SELF.findall(data)) != 1:
        return None
    (crc,) = _SELF.findall(data)
    return int(crc32c(_SELF.sub(b"0" * 8, data))) == int(crc, 16)


def compact(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def shaped(template: Document, shape: list[int], chunks: list[int], names: list[str] | None = None) -> Document:
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    document = {**template, "shape": shape, "chunk_grid": grid}
    return document if names is None else {**document, "dimension_names": names}


def store_documents(plan: Plan) -> dict[str, bytes]:
    """Return {folder: zarr.json} for the folders whose zarr.json depends on ``plan`` alone."""
    group, counter = plan.templates[""], plan.templates[layout.COMMITTED]
    words = 2 * layout.COUNTER_WORDS
    return {
        **dict.fromkeys((layout.LIMITERS, layout.SAMPLERS, layout.SEGMENTS), compact(group)),
        layout.COUNTERS: compact(shaped(counter, [words], [words], ["word"])),
    }


def eviction_document(plan: Plan, rows: int) -> bytes:
    counter = plan.templates[layout.COMMITTED]
    return compact(shaped(counter, [rows, 2], [layout.EVICTION_ROWS, 2], ["entry", "id_and_steps"]))


def limiter_document(plan: Plan) -> bytes:
    slots = [layout.LIMITER_SLOTS]
    return compact(shaped(plan.templates[layout.COMMITTED], slots, slots, ["slot"]))


def array_mismatch(document: Any, array: Array, lead: int) -> str | None:
    """Return why a zarr.json does not describe ``array``; None: it does.

    The first ``lead`` axes may have any length.
    """
    if not isinstance(document, dict):
        return "is not an object"
    dimensions = lead + len(array.shape)
    shape, grid = document.get("shape"), document.get("chunk_grid")
    if not _is_shape(shape, dimensions) or tuple(shape[lead:]) != array.shape:  # type: ignore[index]
        return f"has the shape {str(shape)[:80]}"
    chunks = grid.get("configuration") if isinstance(grid, dict) and grid.get("name") == "regular" else None
    chunks = chunks.get("chunk_shape") if isinstance(chunks, dict) else None
    if not _is_shape(chunks, dimensions) or tuple(chunks[lead:]) != array.shape:  # type: ignore[index]
        return f"has the chunks {str(grid)[:80]}"
    wide = np.dtype(array.dtype).itemsize > 1
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, *([] if wide else [{"name": "bytes"}])]
    expected: list[tuple[str, list[Any]]] = [
        ("zarr_format", [3]),
        ("node_type", ["array"]),
        ("data_type", [array.dtype]),
        ("chunk_key_encoding", [{"name": "default", "configuration": {"separator": "."}}]),
        ("fill_value", [0]),
        ("codecs", [[codec] for codec in codecs]),
        ("storage_transformers", [[], None]),
    ]
    for key, allowed in expected:
        if document.get(key) not in allowed:
            return f"has the {key} {str(document.get(key))[:80]}"
    return None


def is_group(document: Any) -> bool:
    return isinstance(document, dict) and document.get("zarr_format") == 3 and document.get("node_type") == "group"


def _is_shape(value: Any, dimensions: int) -> bool:
    return isinstance(value, list) and len(value) == dimensions and all(is_whole(length) for length in value)


def is_whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_templates(files: Files, plan: Plan, where: str) -> None:
    counter = Array((), "int64")
    wanted = {path: (array, 2) for path, array in plan.arrays.items()} | dict.fromkeys(
        layout.LANE_COUNTERS, (counter, 1)
    )
    for path, (array, lead) in wanted.items():
        if (wrong := array_mismatch(plan.templates.get(path), array, lead)) is not None:
            files.report("metadata", where, f"segment_metadata: {path[:80]} {wrong}")
    for path in ("", *plan.groups):
        if not is_group(plan.templates.get(path)):
            files.report("metadata", where, f"segment_metadata: {path[:80]!r} is not a group")


def read_schema(files: Files, where: str, data: Any) -> Schema | None:
    try:
        return Schema.from_json(data)
    except FormatError as error:
        files.report("metadata", where, str(error))
        return None


def is_uuid(value: Any) -> bool:
    return isinstance(value, str) and _UUID.fullmatch(value) is not None


def is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
