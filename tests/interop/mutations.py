"""Mutations of data sets of other libraries: of bytes, of whole files, and of values inside files.

Values are changed by the library of the format, or checksums are computed again: the container stays whole.
"""

import io
import json
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import google_crc32c
import numpy as np

from tests.segments.hostile import VALUES, places

Change = Callable[[Path, Random], str | None]
"""Changes a file; returns a description, or None if the file has nothing to change."""

_NUMBERS = 0, 1, 2, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1
_WIDTHS = "<u1", "<u2", "<u4", "<u8", ">u4", ">u8"
_BYTES = "flip", "flip", "number", "number", "fill", "noise", "cut", "delete", "insert", "repeat", "empty"
_FILES = "remove", "swap", "copy", "add", "rename", "link", "inner link", "pipe", "zeros", "folder", "huge"
_DTYPES = "f2", "f8", ">f4", "i1", "u8", "?", "c8", "S3", "U2", "M8[s]", "m8[ns]", "i4,f4", "V5", "g"
_MOST_BYTES = 4 << 20
_JSON = ".json", ".jsonl", ".zarray", ".zattrs", ".zgroup", ".zmetadata"
_TEXTS = "", "..", "../../etc/passwd", "a/b", "\x1b[2J", "x\ny", "ä" * 200, "obs", "action", "reward", "%s{0}", "0"


def mutate(root: Path, rng: Random, outside: Path) -> list[str]:
    """Change the data set in a folder one to three times, and return how; ``outside`` is where links may lead."""
    did, damaged = [], set[Path]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        files = [path for path in files if path.stat().st_size <= _MOST_BYTES]
        if not files:
            break
        path = rng.choice(files)
        inner = next((change for suffixes, change in INNER.items() if path.name.endswith(suffixes)), change_bytes)
        kind = rng.choice(("bytes", "bytes", "file", "inner", "inner", "inner"))
        said: str | None
        if kind == "file":
            said = change_files(path, rng, files, outside)
            damaged.update(files)
        elif kind == "bytes" or path in damaged:  # which its library may not survive
            said = change_bytes(path, rng)
            damaged.add(path)
        else:
            try:
                said = inner(path, rng)
            except Exception:  # no library writes that
                said = change_bytes(path, rng)
        if said is not None:
            did.append(f"{path.relative_to(root)}: {said}")
    return did


# --- bytes -----------------------------------------------------------------------------------------------------------


def change_bytes(path: Path, rng: Random) -> str:
    """Change bytes of a file without knowledge of the format."""
    said, data = changed(path.read_bytes(), rng)
    path.write_bytes(data)
    return said


def changed(data: bytes, rng: Random) -> tuple[str, bytes]:
    """Return a description and the changed bytes."""
    size = len(data)
    how = rng.choice(_BYTES)
    near = rng.choice((16, 64, 256, size))  # headers are at either end
    at = rng.randrange(max(1, min(near, size)))
    at = at if rng.random() < 0.7 else max(0, size - 1 - at)
    length = min(rng.choice((1, 2, 8, 64, 1024)), size - at)
    rest = data[at + length :]
    if how == "flip":
        made = bytearray(data)
        for _ in range(min(size, rng.choice((1, 1, 3, 8)))):
            made[at if size < 2 else min(size - 1, at + rng.randrange(8))] ^= 1 << rng.randrange(8)
        return f"flip near {at}", bytes(made)
    if how == "number":
        dtype, number = np.dtype(rng.choice(_WIDTHS)), rng.choice(_NUMBERS)
        written = np.array(number % (1 << 8 * dtype.itemsize), dtype).tobytes()
        return f"{dtype.str} {number} at {at}", data[:at] + written + data[at + len(written) :]
    made_of = {
        "fill": rng.choice((b"\0", b"\xff", b"{", b"9")) * length,
        "noise": rng.randbytes(length),
        "delete": b"",
        "insert": data[at : at + length] + rng.randbytes(length),
        "repeat": data[at : at + length] * rng.choice((2, 3, 100)),
    }
    if how in made_of:
        return f"{how} {length} at {at}", data[:at] + made_of[how] + rest
    return (f"cut at {at}", data[:at]) if how == "cut" else ("empty", b"")


# --- files -----------------------------------------------------------------------------------------------------------


def change_files(path: Path, rng: Random, files: list[Path], outside: Path) -> str:
    """Remove, swap, copy or rename a file, or put something else into its place."""
    alike = [other for other in files if other.suffix == path.suffix and other != path] or files
    other = rng.choice(alike)
    how = rng.choice(_FILES)
    if how in ("swap", "copy"):
        mine, theirs = path.read_bytes(), other.read_bytes()
        other.write_bytes(mine)
        if how == "swap":
            path.write_bytes(theirs)
    elif how in ("add", "rename"):
        names = f"{path.stem}-1{path.suffix}", f"\x1b[2J\n{path.name}", f"{path.name}~", "episode-1.npz", "0"
        name = rng.choice(names)
        target = path.with_name(name)
        if not target.exists():
            shutil.copy(path, target)
            if how == "rename":
                path.unlink()
        how = f"{how} {name!r}"
    elif how == "huge":
        os.truncate(path, 1 << 36)
    else:
        if how == "link":
            shutil.copy(path, outside)
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "pipe":
            os.mkfifo(path)
        elif how != "remove":
            target = {"link": outside, "zeros": Path("/dev/zero"), "inner link": other}[how]
            path.symlink_to(target)
    return f"{how} {other.name}" if how in ("swap", "copy", "inner link") else how


# --- documents -------------------------------------------------------------------------------------------------------


def change_json(path: Path, rng: Random) -> str | None:
    """Change a document, or a line of a file of lines."""
    text = path.read_text()
    if path.suffix != ".jsonl":
        said, made = changed_json(text, rng)
        path.write_text(made)
        return said
    lines = text.splitlines() or ["{}"]
    at = rng.randrange(len(lines))
    how = rng.choice(("edit", "edit", "edit", "remove", "repeat", "move"))
    said = f"{how} line {at}"
    if how == "edit":
        done, lines[at] = changed_json(lines[at], rng)
        said = f"line {at}: {done}"
    elif how == "repeat":
        lines.insert(at, lines[at])
    else:
        line = lines.pop(at)
        if how == "move":
            lines.append(line)
    path.write_text("".join(line + "\n" for line in lines))
    return said


def changed_json(text: str, rng: Random) -> tuple[str, str]:
    """Return a description and a changed text of JSON: a value is replaced, removed, added or nested."""
    document = json.loads(text)
    found = places(document)
    if not found:
        return "document", json.dumps(rng.choice(VALUES))
    place = rng.choice(found)
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    old, how = parent[place[-1]], rng.choice(("replace", "replace", "near", "remove", "add", "nest", "text"))
    new = rng.choice(VALUES)
    if how == "remove":
        del parent[place[-1]]
        return f"remove {place}", json.dumps(document)
    if how == "near":  # a value that is nearly right
        new = _near(old, rng)
    elif how == "nest":
        new = old
        for _ in range(rng.choice((1, 3, 500))):
            new = [new]
    elif how == "text":
        new = "\0here\0"
    if how == "add" and isinstance(parent, dict):
        parent[rng.choice(_TEXTS)] = old
    else:
        parent[place[-1]] = new
    made = json.dumps(document, ensure_ascii=True)
    raw = rng.choice(("NaN", "-Infinity", "1e400", "9" * 5000, "[" * 100_000, '{"a":1,"a":2}', "tru", ""))
    return f"{how} {place} {new!r:.60}", made.replace('"\\u0000here\\u0000"', raw)


def _near(old: Any, rng: Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice((old + 1, old - 1, -old, old * 1000, float(old), str(old)))
    if isinstance(old, float):
        return rng.choice((old + 1, -old, old * 1e30, str(old)))
    if isinstance(old, str):
        return rng.choice((old + "x", old[:-1], old.upper(), rng.choice(_TEXTS), f"../{old}", old * 2))
    if isinstance(old, list):
        return rng.choice((old[:-1], old + old, [*old, 1], old[::-1]))
    return {"x": old} if isinstance(old, dict) else 0


# --- arrays ----------------------------------------------------------------------------------------------------------


def odd_array(rows: np.ndarray, rng: Random) -> tuple[str, np.ndarray]:
    """Return a description and a changed array: of another dtype, with other rows or axes, or with odd values."""
    how = rng.choice(("dtype", "dtype", "rows", "rows", "axes", "values", "order"))
    if how == "dtype":
        dtype = rng.choice(_DTYPES)
        with suppress(TypeError, ValueError):
            return f"dtype {dtype}", rows.astype(dtype)
        return f"dtype {dtype}", np.zeros(rows.shape, dtype)
    if how == "rows" and rows.ndim:
        length = rng.choice((0, 1, len(rows) - 1, len(rows) + 1, 2 * len(rows)))
        return f"{length} rows", np.resize(rows, (max(0, length), *rows.shape[1:]))
    if how == "axes":
        shape = rng.choice(((), (*rows.shape, 1), (1, *rows.shape), (rows.size,), (*rows.shape, 0)))
        return f"shape {shape}", np.resize(rows, shape)
    if how == "values":
        made = rows.copy()
        value = rng.choice((0, 1, -1, np.nan, np.inf, -np.inf, 1e300, 1 << 62))
        if made.size and made.dtype.kind in "fiub":
            at = rng.randrange(made.size)
            with np.errstate(all="ignore"):
                made.flat[at] = np.array(value, "f8").astype(made.dtype)
        return f"value {value} ", made
    return "order", np.asfortranarray(rows[::-1] if rows.ndim else rows)


# --- archives --------------------------------------------------------------------------------------------------------


def change_archive(path: Path, rng: Random) -> str | None:
    """Change a member of a zip file, whose checksums fit again."""
    with zipfile.ZipFile(path) as file:
        members = [(info.filename, file.read(info)) for info in file.infolist()]
        packing = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    at = rng.randrange(len(members))
    name, data = members[at]
    is_array = name.endswith(".npy") and data[:1] == b"\x93"
    how = rng.choice(("array", "array", "array", "bytes", "rename", "remove", "repeat"))
    if how == "array" and is_array:
        said, rows = odd_array(np.load(io.BytesIO(data)), rng)
        file_of = io.BytesIO()
        np.save(file_of, rows)
        members[at] = name, file_of.getvalue()
        how = said
    elif how in ("array", "bytes"):
        is_json = name.endswith(_JSON)
        if is_json:
            how, text = changed_json(data.decode(), rng)
            members[at] = name, text.encode("utf-8", "replace")
        else:
            how, made = changed(data, rng)
            members[at] = name, made
    elif how == "rename":
        new = rng.choice((*_TEXTS[1:], members[rng.randrange(len(members))][0].removesuffix(".npy")))
        members[at] = f"{new}.npy", data
        how = f"rename {new!r}"
    elif how == "remove":
        members.pop(at)
    else:
        members.append((name, members[rng.randrange(len(members))][1]))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", packing) as file:
        warnings.simplefilter("ignore")  # of a repeated name
        for each, content in members:
            file.writestr(each, content)
    return f"{name}: {how}"


def change_hdf5(path: Path, rng: Random) -> str | None:
    """Change an item of an HDF5 file by h5py."""
    import h5py

    with h5py.File(path, "r+") as file:
        found = list[str]()
        file.visit(found.append)
        if not found:
            return None
        name = rng.choice(found)
        item, parent = file[name], file[name].parent
        key = name.rpartition("/")[2]
        how = rng.choice(("array", "array", "array", "attribute", "remove", "move", "replace"))
        if how == "attribute":
            key = rng.choice((*item.attrs, "num_samples", "total", "x"))
            value = rng.choice(
                (-1, 0, 1 << 62, "{", "[" * 9000, np.nan, b"\xff", np.zeros(0), ["a"], True, h5py.Empty("f4"))
            )
            item.attrs[key] = value
            return f"{name}: attribute {key} {value!r:.40}"
        if how == "move":
            target = rng.choice((*_TEXTS[4:], rng.choice(found)))
            if target and target not in parent:
                parent.move(key, target)
                return f"{name}: move {target!r}"
        if how == "array" and isinstance(item, h5py.Dataset):
            how, value = odd_array(item[()], rng)
            del parent[key]
            with suppress(TypeError):  # h5py has no such dtype
                parent.create_dataset(key, data=value)
            return f"{name}: {how}"
        del parent[key]
        if how == "replace":
            targets: list[Any] = [h5py.SoftLink(f"/{name}"), h5py.SoftLink("/"), h5py.ExternalLink("/etc/passwd", "/x")]
            targets += [
                file,
                h5py.Empty("f4"),
                1.5,
                "text",
                ["a", "b"],
                file[rng.choice(found)] if found[0] in file else 0,
            ]
            parent[key] = how = rng.choice(targets)
        return f"{name}: {how!r:.60}"


def change_table(path: Path, rng: Random) -> str | None:
    """Change a column of a table of Parquet or Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    is_arrow = path.suffix == ".arrow"
    if is_arrow:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as opened:
            table = opened.read_all()
    else:
        table = pq.read_table(path)
    at = rng.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    how = rng.choice(("type", "type", "rows", "nulls", "remove", "rename", "repeat", "value", "metadata"))
    if how == "type":
        kind = rng.choice(
            (pa.string(), pa.int8(), pa.float16(), pa.binary(), pa.list_(pa.int64()), pa.bool_(), pa.null())
        )
        made: Any = pa.nulls(table.num_rows, kind)
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            made = column.cast(kind, safe=False)
        table, how = table.set_column(at, name, made), f"type {kind}"
    elif how == "rows":
        count = rng.choice((0, 1, max(0, table.num_rows - 1)))
        table, how = rng.choice((table.slice(0, count), pa.concat_tables([table, table]))), f"rows {count}"
    elif how == "nulls":
        rows = column.to_pylist()
        if rows:
            rows[rng.randrange(len(rows))] = None
        table = table.set_column(at, name, pa.array(rows, column.type))
    elif how == "value":
        rows = column.to_pylist()
        if rows:
            rows[rng.randrange(len(rows))] = rng.choice((rows[0], *(_near(each, rng) for each in rows[:1])))
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            table = table.set_column(at, name, pa.array(rows))
    elif how == "remove":
        table = table.remove_column(at)
    elif how in ("rename", "repeat"):
        new = rng.choice((*_TEXTS, rng.choice(table.column_names)))
        table = table.append_column(new, column)
        table, how = (table.remove_column(at) if how == "rename" else table), f"{how} {new!r}"
    else:
        table = table.replace_schema_metadata({"x": "y" * 100, "huggingface": "{", "ARROW:schema": "!!"})
    if is_arrow:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path)
    return f"{name}: {how}"


def change_records(path: Path, rng: Random) -> str | None:
    """Change a record of a TFRecord file, whose checksums fit again."""
    data, records = path.read_bytes(), list[bytes]()
    while len(data) >= 16:
        length = int.from_bytes(data[:8], "little")
        records.append(data[12 : 12 + length])
        data = data[16 + length :]
    if not records:
        return None
    at = rng.randrange(len(records))
    how = rng.choice(("bytes", "bytes", "bytes", "remove", "repeat"))
    if how == "bytes":
        how, records[at] = changed(records[at], rng)
    elif how == "remove":
        records.pop(at)
    else:
        records.append(records[at])
    path.write_bytes(b"".join(map(record, records)))
    return f"record {at}: {how}"


def record(data: bytes) -> bytes:
    """Return a record of TFRecord."""
    head = struct.pack("<Q", len(data))
    return head + _masked(head) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


INNER: dict[tuple[str, ...], Change] = {
    _JSON: change_json,
    (".npz", ".zip"): change_archive,
    (".hdf5", ".h5"): change_hdf5,
    (".parquet", ".arrow"): change_table,
    ("-of-00001",): change_records,
}
"""How the content of a file is changed, by the end of its name; of others only the bytes."""
