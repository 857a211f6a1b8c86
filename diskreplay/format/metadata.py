"""The zarr metadata of stores and segments.

zarr-python makes the documents of one segment once a schema, when a store is created; they are kept in the root's
attributes. A segment's own are copies with its shapes filled in: 15 times faster than asking zarr-python again, and a
collector process never imports it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c

from diskreplay.errors import FormatError
from diskreplay.format.durable import write_atomic
from diskreplay.format.layout import COMMITTED, DONE, DURABLE, METADATA, OBSERVED
from diskreplay.format.schema import Schema

Document = dict[str, Any]

_MAX_BYTES = 64 << 20
_CHECKSUM = re.compile(rb'"diskreplay_crc32c":"([0-9a-f]{8})"')
_BLANK = "00000000"


def array_leaves(schema: Schema) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of one row of every array with rows: the schema's fields and ``done``."""
    leaves = {path: (field.shape, field.dtype.name) for path, field in schema.leaves.items()}
    return {**leaves, DONE: ((), "uint8")}


def make_templates(schema: Schema) -> dict[str, Document]:
    """Return zarr-python's own metadata of every group and array of one segment, with shapes of one row."""
    import zarr  # heavy, and needed only where a store is created
    from zarr.storage import MemoryStore

    memory = MemoryStore()
    group = zarr.create_group(memory, zarr_format=3)
    for path, (shape, dtype) in array_leaves(schema).items():
        names = ["lane", "row", *(f"{path.replace('/', '_')}_{i}" for i in range(len(shape)))]
        _create_array(group, path, (1, 1, *shape), dtype, names)
    for name in (COMMITTED, OBSERVED, DURABLE):
        _create_array(group, name, (1,), "int64", ["lane"])
    return _documents(memory)


def make_root_documents() -> dict[str, Document]:
    """Return zarr-python's metadata of the root, its groups and its two arrays; the root's attributes are empty."""
    import zarr  # as above
    from zarr.storage import MemoryStore

    memory = MemoryStore()
    group = zarr.create_group(memory, zarr_format=3)
    _create_array(group, "counters", (16,), "int64", ["word"])
    _create_array(group, "hidden", (0, 2), "int64", ["entry", "id_and_steps"], chunks=(4096, 2))
    for name in ("limiters", "samplers", "segments"):
        group.create_group(name)
    return _documents(memory)


def _create_array(
    group: Any, path: str, shape: tuple[int, ...], dtype: str, names: list[str], chunks: tuple[int, ...] | None = None
) -> None:
    group.create_array(
        path,
        shape=shape,
        chunks=chunks or shape,
        dtype=dtype,
        # No codec but the plain bytes: an uncompressed chunk is a raw block that can be mapped.
        compressors=None,
        filters=None,
        fill_value=0,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=names,
    )


def _documents(memory: Any) -> dict[str, Document]:
    documents = {key: json.loads(value.to_bytes()) for key, value in memory._store_dict.items()}
    return {
        key.removesuffix(METADATA).rstrip("/"): document
        for key, document in documents.items()
        if key.rsplit("/", 1)[-1] == METADATA
    }


def segment_documents(
    templates: dict[str, Document], schema: Schema, lanes: int, chunk_rows: dict[str, int], rows: int | None
) -> Iterator[tuple[str, Document]]:
    """Yield ``(path, document)`` of everything below a segment, parents first, with ``rows`` or one chunk of rows."""
    shapes = array_leaves(schema)
    for path in sorted(templates):
        document = templates[path]
        if path in shapes:
            shown = chunk_rows[path] if rows is None else min(rows, chunk_rows[path])
            yield path, array_document(document, lanes, shown, chunk_rows[path], shapes[path][0])
        elif document.get("node_type") == "array":
            yield path, _reshaped(document, (lanes,), (lanes,))
        elif path:
            yield path, document


def array_document(
    template: Document, lanes: int, rows: int, rows_per_chunk: int, row_shape: tuple[int, ...]
) -> Document:
    """Return a template with the shape ``(lanes, rows, *row_shape)`` and chunks of ``rows_per_chunk``."""
    return _reshaped(template, (lanes, rows, *row_shape), (lanes, rows_per_chunk, *row_shape))


def _reshaped(template: Document, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Document:
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}}
    return {**template, "shape": list(shape), "chunk_grid": grid}


def check_templates(templates: object, schema: Schema) -> dict[str, Document]:
    """Return the templates read from a store after a check that every array of the schema has one.

    Raises
    ------
    FormatError
        One is missing or is no zarr v3 array.
    """
    if not isinstance(templates, dict):
        raise FormatError("the root's segment_metadata is not a JSON object")
    for path in (*array_leaves(schema), COMMITTED, OBSERVED, DURABLE):
        document = templates.get(path)
        if not isinstance(document, dict) or document.get("node_type") != "array":
            raise FormatError(f"the root's segment_metadata has no array {path!r}; restore the root's zarr.json")
    return {path: document for path, document in templates.items() if _is_safe(path) and isinstance(document, dict)}


def _is_safe(path: object) -> bool:
    return (
        isinstance(path, str) and all(part not in (".", "..") for part in path.split("/")) and not path.startswith("/")
    )


# --- documents with a checksum of themselves ------------------------------------------------------------------------


def dump(document: Document) -> bytes:
    """Return a document as compact JSON."""
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def seal_document(document: Document, attributes: Document) -> bytes:
    """Return a group's document with these attributes and, last of them, a checksum of the whole file.

    The checksum is the CRC-32C of the file with the eight hexadecimal digits of the checksum as zeros.
    """
    data = dump({**document, "attributes": {**attributes, "diskreplay_crc32c": _BLANK}})
    crc = google_crc32c.value(data)
    return data.replace(f'"diskreplay_crc32c":"{_BLANK}"'.encode(), f'"diskreplay_crc32c":"{crc:08x}"'.encode())


def read_document(path: Path) -> Document:
    """Read a JSON document.

    Raises
    ------
    FormatError
        The file is not JSON, not an object, or absurdly large.
    """
    with open(path, "rb") as file:
        return parse_document(file.read(_MAX_BYTES + 1), path)


def parse_document(data: bytes, path: Path) -> Document:
    """Parse the bytes of a JSON object; see `read_document`."""
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not readable metadata ({error}); restore this file") from None
    return document


def verify_document(data: bytes, path: Path) -> None:
    """Check a document's checksum of itself.

    Raises
    ------
    FormatError
        It has none, or it does not fit.
    """
    found = _CHECKSUM.findall(data)
    if len(found) != 1:
        raise FormatError(f"{path} has no checksum of itself; it was changed by something else, restore this file")
    blank = _CHECKSUM.sub(b'"diskreplay_crc32c":"' + _BLANK.encode() + b'"', data)
    if google_crc32c.value(blank) != int(found[0], 16):
        raise FormatError(f"{path} does not fit its checksum; it was damaged, restore this file")


def check_requires(attributes: Document, path: Path) -> None:
    """Refuse what needs a feature that this release has not; so far it has none that a reader could lack.

    Raises
    ------
    FormatError
        ``requires`` names one.
    """
    if needed := attributes.get("requires"):
        raise FormatError(f"{path} needs {needed!r}, which this release does not know; update diskreplay")


def write_document(path: Path, document: Document, *, sync: bool = False) -> None:
    """Write a document in one piece."""
    write_atomic(path, dump(document), sync=sync)
