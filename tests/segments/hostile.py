"""Mutations of a small sealed store that keep its checksums fitting: what somebody hostile, or a bug, could write."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from hypothesis import strategies as st

from tests.testing import packed
from tests.testing.on_disk import write_document

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 63, 64, 1 << 31, (1 << 31) + 1, 1 << 35, 1 << 62, 1 << 63, 10**30),
    *(0.0, 1.5, -0.0, 1e308, "", ".", "..", "../../..", "/", "/etc/passwd", "a/b", "obs", "c.0", "episode", "float32"),
    *("object", "<f8", "O", "U9", "\0", "\ud800", "x" * 300, [], {}, [[]], [0], [1], [-1], [1 << 40], [1 << 20] * 8),
    *(
        [1, 1],
        [3, 2],
        {"": 1},
        {"..": 1},
        {"dict": {}},
        {"tuple": []},
        {"dict": {"..": {"shape": [], "dtype": "bool"}}},
    ),
]
_MOST_CHANGED_BYTES = 1 << 20
TABLES = "members/c.0.0", "runs/c.0.0"
EPISODE_COLUMNS = {"position": "<i8", "steps": "<i4", "end": "|u1", "time": "<i8", "total_reward": "<f8"}
BYTES = [b"", b"\0", b"\xff" * 8, b"{", b"[" * 100_000, b"null", b'{"a":' * 1000, bytes(128), b"\xff" * 128]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """Every path inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


@st.composite
def document_changes(draw: st.DrawFn, root: Path, names: list[str]) -> tuple:
    """Draw one change of one document: a value replaced, removed or added somewhere inside."""
    name = draw(st.sampled_from(names))
    document = json.loads((root / name).read_bytes())
    place = draw(st.sampled_from(places(document)))
    how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    return ("document", name, place, how, draw(st.sampled_from(VALUES)))


@st.composite
def file_changes(draw: st.DrawFn, names: list[str]) -> tuple:
    """Draw one change of one file as a file."""
    how = draw(st.sampled_from(["truncate", "bytes", "fill", "pipe", "link", "folder", "unlink", "huge"]))
    return (
        "file",
        draw(st.sampled_from(names)),
        how,
        draw(st.sampled_from([0, 1, 7, 63, 1 << 20])),
        draw(st.sampled_from(BYTES)),
    )


@st.composite
def counter_changes(draw: st.DrawFn, names: list[str]) -> tuple:
    """Draw one change of a counter: numbers that fit the file."""
    number = draw(st.sampled_from([0, 1, 5, -1, 1 << 20, 1 << 28, 1 << 35, 1 << 62, -(1 << 63), (1 << 63) - 1]))
    return ("counter", draw(st.sampled_from(names)), draw(st.integers(0, 7)), number)


@st.composite
def table_changes(draw: st.DrawFn, names: list[str]) -> tuple:
    """Draw one change of a table of a pack, whose checksums fit again."""
    number = draw(st.sampled_from([0, 1, 2, 5, 64, -1, 1 << 20, 1 << 28, 1 << 31, 1 << 62, -(1 << 63), (1 << 63) - 1]))
    return ("table", draw(st.sampled_from(names)), draw(st.integers(0, 63)), number)


@st.composite
def column_changes(draw: st.DrawFn, names: list[str]) -> tuple:
    """Draw one change of a column of a table of episodes, whose checksum fits again."""
    number = draw(st.sampled_from([0, 1, 2, 255, -1, 1 << 31, 1 << 35, 1 << 62, -(1 << 63), (1 << 63) - 1]))
    return ("column", draw(st.sampled_from(names)), draw(st.integers(0, 63)), number)


def changes(root: Path) -> st.SearchStrategy[list[tuple]]:
    """Draw a few changes of the store at ``root``."""
    files = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    documents = [name for name in files if name.endswith("zarr.json")]
    important = [name for name in documents if name.count("/") in (0, 2)]
    counters = [name for name in files if name.endswith("/c.0")]
    tables = [name for name in files if name.endswith(TABLES)]
    columns = [name for name in counters if "/episodes/" in name]
    one = st.one_of(
        document_changes(root, important),
        document_changes(root, documents),
        file_changes(files),
        counter_changes(counters),
        *([table_changes(tables)] if tables else []),
        *([column_changes(columns)] if columns else []),
    )
    return st.lists(one, min_size=1, max_size=3)


def apply(root: Path, change: tuple, outside: Path) -> None:
    """Make one change; what an earlier one took away, or made huge, is left as it is."""
    kind, name, *rest = change
    path = root / name
    if not _can_change(path):
        return
    change = {
        "document": _change_document,
        "file": _change_file,
        "counter": _change_counter,
        "table": _change_table,
        "column": _change_column,
    }
    change[kind](path, outside, *rest)


def _can_change(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_CHANGED_BYTES


def _change_document(path: Path, outside: Path, place: tuple, how: str, value: Any) -> None:
    try:
        document = json.loads(path.read_bytes())
        parent = document
        for key in place[:-1]:
            parent = parent[key]
        if how == "remove":
            del parent[place[-1]]
        elif how == "add" and isinstance(parent, dict):
            parent[value if isinstance(value, str) else "new"] = copy.deepcopy(parent[place[-1]])
        else:
            parent[place[-1]] = value
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return  # an earlier change took it away
    write_document(path, document)


def _change_file(path: Path, outside: Path, how: str, size: int, data: bytes) -> None:
    if how == "truncate":
        os.truncate(path, size)
    elif how == "huge":
        os.truncate(path, 1 << 34)
    elif how == "bytes":
        path.write_bytes(data)
    elif how == "fill":
        path.write_bytes((data or b"\1")[:1] * path.stat().st_size)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif how == "link":
        shutil.copy(path, outside)
        path.unlink()
        path.symlink_to(outside)
    else:
        path.unlink()


def _change_counter(path: Path, outside: Path, at: int, number: int) -> None:
    data = np.fromfile(path, "<i8")
    if not len(data):
        return
    data[at % len(data)] = number
    if len(data) == 32:
        data[(at % 16) + 16] = ~np.int64(number)
    data.tofile(path)


def _change_column(path: Path, outside: Path, at: int, number: int) -> None:
    dtype, segment = np.dtype(EPISODE_COLUMNS[path.parent.name]), path.parents[2]
    data, size = bytearray(path.read_bytes()), dtype.itemsize
    if not _can_change(segment / "zarr.json") or len(data) < size:
        return
    at = at % (len(data) // size) * size
    data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
    path.write_bytes(data)
    crc = google_crc32c.value(bytes(data))
    name = str(path.relative_to(segment))
    _change_document(segment / "zarr.json", outside, ("attributes", "checksums", name), "set", crc)


def _change_table(path: Path, outside: Path, at: int, number: int) -> None:
    segment = path.parents[1]
    files = [segment / name for name in (*TABLES, "zarr.json", "durable/document", "durable/tables")]
    if not all(map(_can_change, files)):
        return
    try:
        tables = packed.tables(segment.parents[1], int(segment.name))
        table = tables[TABLES.index(f"{path.parent.name}/{path.name}")]
        if table.size:
            table.reshape(-1)[at % table.size] = number
        packed.change_tables(segment.parents[1], int(segment.name), *tables)
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # an earlier change took it away
