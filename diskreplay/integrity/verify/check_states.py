"""Saved states of samplers: their documents, and the checksums of the arrays that these name."""

import math
import os
import re
import time
from typing import Any, TypeGuard

from crc32c import crc32c

from diskreplay.integrity.verify.documents import MAX_DOCUMENT_BYTES, Document, is_whole, parse, read_group
from diskreplay.integrity.verify.files import Files, Problem, read_at
from diskreplay.segments.documents import layout

_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_ARRAY_NAME = re.compile(r"[a-z0-9_][a-z0-9_.]{0,199}")
_ITEM_BYTES = {"bool": 1, "int64": 8, "float32": 4, "float64": 8}
_CRC_BYTES = 4
_MOST_AXES, _MOST_BYTES = 32, 1 << 62
_BLOCK_BYTES = 1 << 20
_LEVELS = 100  # of a tree; those that are written have a handful
# A state that is replaced meanwhile is verified again before anything is reported.
_PATIENCE_S = 5.0
_PAUSE_S = 0.02


def verify_states(root: str, store: str) -> list[Problem]:
    """Return what is wrong with the states that are saved in a store and count; others are what a dead process left."""
    names = Files(root)
    problems = []
    for name, kind in sorted((names.listing(layout.SAMPLERS) or {}).items()):
        if kind == "folder" and not name.startswith("."):
            problems += _verify(root, f"{layout.SAMPLERS}/{name}", store)
    return problems


def _verify(root: str, where: str, store: str) -> list[Problem]:
    """Verify the states of one name until a finding cannot be a state that is just being saved.

    Only what is found twice of one and the same state, which counted before and after each look, is wrong with it. A
    state that is replaced faster than it can be read, look after look, is as good as those who load it find it.
    """
    before = ""
    until = time.monotonic() + _PATIENCE_S
    while True:
        files = Files(root)
        current = _check_current(files, where, store)
        if not files.problems or not os.path.lexists(files.path(where)):
            return []
        if repr((current, _current(root, where))) == before:
            return files.problems
        before = repr((current, current))
        if time.monotonic() > until:
            return []
        time.sleep(_PAUSE_S)


def _current(root: str, where: str) -> object:
    """Return the number of the state that counts now, or whatever stands in its place."""
    return (_attributes(Files(root), where) or {}).get("current")


def _check_current(files: Files, where: str, store: str) -> object:
    """Check the state that counts, and return its number, or whatever stands in its place."""
    attributes = _attributes(files, where)
    names = files.listing(where)
    if attributes is None or names is None:
        return None
    current = attributes.get("current")
    if not is_whole(current, 1, 10**18 - 1):
        files.report("metadata", f"{where}/{layout.METADATA}", f"the state that counts is {str(current)[:40]}")
        return current
    numbers = {name for name, kind in names.items() if _NUMBER.fullmatch(name) and kind in ("file", "folder")}
    files.report_unknown(where, names, numbers)
    state = f"{where}/{current}"
    if (found := _attributes(files, state)) is not None:
        if found.get("store") != store:
            files.report("metadata", f"{state}/{layout.METADATA}", f"is of another store, {found.get('store')!r:.40}")
        try:
            named = dict(_arrays(found.get("state"), _LEVELS))
        except ValueError as error:
            files.report("metadata", f"{state}/{layout.METADATA}", str(error))
            return current
        for name, crc in sorted(named.items()):
            _check_array(files, f"{state}/{name}", crc)
        files.report_unknown(state, dict.fromkeys(files.listing(state) or {}, "file"), named)
    return current


def _attributes(files: Files, folder: str) -> Document | None:
    return read_group(files, folder) if files.is_folder(folder) else None


def _arrays(tree: Any, levels: int) -> list[tuple[str, int]]:
    """Return name and checksum of each array that a tree names."""
    if not levels:
        raise ValueError("is nested too deeply")
    if isinstance(tree, list):
        return [found for below in tree for found in _arrays(below, levels - 1)]
    if not isinstance(tree, dict):
        return []
    if "@array" not in tree:
        return [found for below in tree.values() for found in _arrays(below, levels - 1)]
    name, crc = tree["@array"], tree.get("crc32c")
    if not isinstance(name, str) or not _ARRAY_NAME.fullmatch(name) or not isinstance(crc, int):
        raise ValueError(f"names an array {str(name)[:80]!r} with the checksum {str(crc)[:40]}")
    return [(name, crc)]


def _check_array(files: Files, folder: str, crc: int) -> None:
    where = f"{folder}/{layout.METADATA}"
    if not files.is_folder(folder) or (data := files.read(where, MAX_DOCUMENT_BYTES)) is None:
        return
    if crc32c(data) != crc:
        files.report("checksum", where, "does not fit the checksum in its state")
        return
    document = parse(files, where, data) or {}
    shape, item_bytes = document.get("shape"), _ITEM_BYTES.get(str(document.get("data_type")))
    if item_bytes is None or not _is_shape(shape, item_bytes):
        files.report("metadata", where, "is not an array of a state")
        return
    chunk = ".".join(["c", *("0" for _ in shape)])
    nbytes = math.prod(shape) * item_bytes
    if nbytes:
        _check_chunk(files, f"{folder}/{chunk}", nbytes)
    files.report_unknown(folder, dict.fromkeys(files.listing(folder) or {}, "file"), [chunk] if nbytes else [])


def _is_shape(shape: object, item_bytes: int) -> TypeGuard[list[int]]:
    """Whether NumPy can have an array of this shape; it counts an empty axis as one row."""
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(is_whole(n, 0, _MOST_BYTES) for n in shape):
        return False
    return bool(item_bytes * math.prod(max(n, 1) for n in shape) <= _MOST_BYTES)


def _check_chunk(files: Files, where: str, nbytes: int) -> None:
    """Check that a chunk ends with the checksum of its data."""
    with files.opened(where, nbytes + _CRC_BYTES) as fd:
        if fd is None:
            return
        crc = 0
        for start in range(0, nbytes, _BLOCK_BYTES):
            crc = crc32c(read_at(fd, min(_BLOCK_BYTES, nbytes - start), start), crc)
        if crc != int.from_bytes(read_at(fd, _CRC_BYTES, nbytes), "little"):
            files.report("checksum", where, "does not fit its checksum")
