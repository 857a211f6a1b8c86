"""Checks a store outside its segments: its zarr.json, its groups and counters, notes, and saved states."""

import math
import os
import re
import time
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StoreNotFound
from diskreplay.folders import shown
from diskreplay.integrity.verify.documents import (
    MAX_DOCUMENT_BYTES,
    Document,
    Plan,
    check_content,
    check_itself,
    check_templates,
    eviction_document,
    fits_itself,
    is_positive,
    is_uuid,
    is_whole,
    limiter_document,
    make_plan,
    parse,
    read_group,
    read_schema,
    store_documents,
)
from diskreplay.integrity.verify.files import BLOCK_BYTES, Files, Problem, read_at
from diskreplay.segments.documents import layout

COUNTERS_FILE = f"{layout.COUNTERS}/c.0"
GROUPS = (layout.COUNTERS, layout.EVICTIONS, layout.LIMITERS, layout.SAMPLERS, layout.SEGMENTS)
# A writer writes a counter, then its complement. Counters that were read between these writes are read again.
_ATTEMPTS = 50
_PAUSE_S = 0.01


@dataclass(frozen=True)
class Words:
    """Counters of the store; ``evictions`` is the number of evictions by `Store.evict`."""

    next_segment: int
    evictions: int


def read_plan(files: Files) -> Plan | None:
    """Return the layout of a store's segments; None: a problem of the store's zarr.json was reported.

    Raises StoreNotFound if there is no trace of a store. Raises FormatError if this release does not know the store's
    version, or a feature that the store needs.
    """
    names = _root_names(files)
    if layout.METADATA not in names and not {layout.COUNTERS, layout.SEGMENTS} <= names.keys():
        raise StoreNotFound(f"{shown(files.root)} is not a store: it has no zarr.json; diskreplay.create makes a store")
    data = files.read(layout.METADATA, MAX_DOCUMENT_BYTES)
    if data is None:
        return None
    fits = fits_itself(data)
    _refuse_others(files, data, fits, {layout.COUNTERS, layout.SEGMENTS} <= names.keys())
    if not check_itself(files, layout.METADATA, data) or (document := parse(files, layout.METADATA, data)) is None:
        return None
    attributes = document.get("attributes")
    return _read_attributes(files, attributes if isinstance(attributes, dict) else {})


def _root_names(files: Files) -> dict[str, str]:
    names = files.quiet()
    found = names.listing("")
    if found is None:
        raise StoreNotFound(f"{shown(files.root)} {names.problems[0].detail}; diskreplay.create makes a store")
    return found


def _refuse_others(files: Files, data: bytes, fits: bool | None, has_folders: bool) -> None:
    """Raise an error if the folder is not a store, or is a store of another release."""
    attributes = (parse(files.quiet(), layout.METADATA, data) or {}).get("attributes")
    if not isinstance(attributes, dict) or attributes.get("format") != layout.FORMAT:
        if not has_folders:
            raise StoreNotFound(f"{shown(files.root)} is not a diskreplay store; diskreplay.create makes a store")
        return
    version = attributes.get("format_version")
    if fits is not False and version != layout.FORMAT_VERSION and is_whole(version):
        raise FormatError(
            f"{shown(files.root)} has format version {version!r:.40}, this release reads {layout.FORMAT_VERSION}; "
            "update diskreplay"
        )
    requires = attributes.get("requires")
    if fits and requires in (None, [], [layout.DISCARDS]):
        raise FormatError(f"{shown(files.root)} {layout.BEFORE_RELEASE}")
    if fits and requires != [layout.EPISODE_TABLES]:
        raise FormatError(f"{shown(files.root)} needs {requires!r:.80}, which this release does not know")


def _is_level(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"zstd"} and is_whole(value["zstd"], *layout.ZSTD_LEVELS)


def _read_attributes(files: Files, attributes: Document) -> Plan | None:
    before, get = len(files.problems), attributes.get
    good = {
        "format": get("format") == layout.FORMAT,
        "format_version": get("format_version") == layout.FORMAT_VERSION,
        "uuid": is_uuid(get("uuid")),
        "capacity": get("capacity") is None or is_whole(get("capacity"), 1),
        "capacity_bytes": get("capacity_bytes") is None or is_whole(get("capacity_bytes"), 1),
        "max_age_s": get("max_age_s") is None or is_positive(get("max_age_s")),
        "chunk_bytes": is_whole(get("chunk_bytes"), layout.MIN_CHUNK_BYTES, layout.MAX_CHUNK_BYTES),
        "segment_steps": get("segment_steps") in (None, "episode") or is_whole(get("segment_steps"), 1),
        "validate": get("validate") in (None, *layout.VALIDATIONS),
        "compression": get("compression") is None or _is_level(get("compression")),
        "compaction": get("compaction", layout.MANUAL) in layout.COMPACTIONS,
        "created": isinstance(get("created", ""), str),
        "segment_metadata": isinstance(get("segment_metadata"), dict),
    }
    for name in (name for name, is_good in good.items() if not is_good):
        files.report("metadata", layout.METADATA, f"{name} is {str(get(name))[:80]}, which is not possible")
    schema = read_schema(files, layout.METADATA, get("schema"))
    if schema is None or not good["segment_metadata"]:
        return None
    plan = make_plan(schema, attributes["segment_metadata"], str(get("uuid")))
    check_templates(files, plan, layout.METADATA)
    return plan if len(files.problems) == before else None


# --- files of every store outside its segments -----------------------------------------------------------------------


def check_root(files: Files, plan: Plan) -> set[str]:
    """Check the top folders of a store and their zarr.json files; return the names of existing folders."""
    names = _root_names(files)
    good = {name for name in GROUPS if files.is_folder(name)}
    hidden = {name for name in names if name.startswith(".")}
    files.report_unknown("", names, {*GROUPS, layout.METADATA, *hidden})
    for name, expected in store_documents(plan).items():
        if name in good:
            check_content(files, f"{name}/{layout.METADATA}", expected, "metadata", "differs in this store")
    if layout.COUNTERS in good:
        files.check_lock(f"{layout.COUNTERS}/{layout.LOCK}")
    if layout.EVICTIONS in good:
        document = files.read(layout.METADATA, MAX_DOCUMENT_BYTES)
        check_content(files, layout.ROOT_COPY, document, "checksum", "is not a copy of the root's zarr.json")
    for group in sorted({layout.LIMITERS, layout.SAMPLERS} & good):
        names = {name: kind for name, kind in (files.listing(group) or {}).items() if not name.startswith(".")}
        folders = [name for name, kind in names.items() if kind == "folder" and name != layout.METADATA]
        files.report_unknown(group, names, {layout.METADATA, *folders})
        for name in sorted(folders) if group == layout.LIMITERS else ():
            _check_limiter(files, plan, f"{group}/{name}")
    return good


def check_notes(files: Files) -> None:
    """Check the notes on imported data sets: each is a JSON file that contains its own checksum."""
    if not os.path.lexists(files.path(layout.NOTES)):
        return
    names = files.listing(layout.NOTES) or {}
    notes = [name for name, kind in names.items() if kind == "file" and name.endswith(layout.NOTE_SUFFIX)]
    files.report_unknown(layout.NOTES, names, notes)
    for name in sorted(name for name in notes if not name.startswith(".")):
        where = f"{layout.NOTES}/{name}"
        data = files.read(where, MAX_DOCUMENT_BYTES)
        if data is not None and check_itself(files, where, data):
            parse(files, where, data)


def _check_limiter(files: Files, plan: Plan, where: str) -> None:
    document, detail = f"{where}/{layout.METADATA}", "does not describe the array of a limiter"
    check_content(files, document, limiter_document(plan), "metadata", detail)
    slots = files.read(f"{where}/c.0", 8 * layout.LIMITER_SLOTS, 8 * layout.LIMITER_SLOTS)
    if slots is not None and (np.frombuffer(slots, "<i8") < 0).any():
        files.report("counters", f"{where}/c.0", "holds impossible counts")


# --- counters --------------------------------------------------------------------------------------------------------


def read_words(files: Files) -> Words | None:
    words = _stable_words(files)
    if words is None:
        return None
    values, complements = words[: layout.COUNTER_WORDS], words[layout.COUNTER_WORDS :]
    if (values ^ complements != -1).any():
        word = int(np.flatnonzero(values ^ complements != -1)[0])
        files.report("counters", COUNTERS_FILE, f"word {word} and its complement disagree")
        return None
    first, following = int(values[layout.FIRST_LIVE]), int(values[layout.NEXT_SEGMENT])
    unused = values[layout.SEALED + 1 :]
    possible = (values >= 0) & (values <= layout.MOST_COUNTED)
    if not possible.all() or first > following or following > layout.MAX_SEGMENTS or unused.any():
        files.report("counters", COUNTERS_FILE, f"holds impossible counters {values.tolist()}")
        return None
    return Words(following, int(values[layout.EVICTION_ENTRIES]))


def _stable_words(files: Files) -> NDArray[np.int64] | None:
    nbytes = 2 * layout.COUNTER_WORDS * 8
    with files.opened(COUNTERS_FILE, nbytes) as fd:
        if fd is None:
            return None
        for _ in range(_ATTEMPTS):
            words = np.frombuffer(read_at(fd, nbytes, 0), "<i8")
            if (words[: layout.COUNTER_WORDS] ^ words[layout.COUNTER_WORDS :] == -1).all():
                break
            time.sleep(_PAUSE_S)
        return words
    return None


# --- evictions by hand -----------------------------------------------------------------------------------------------


def read_evictions(files: Files, plan: Plan, words: Words) -> dict[int, list[tuple[int, int]]]:
    """Return the episodes evicted by hand: {segment number: [(position of the first step, number of steps)]}."""
    where = f"{layout.EVICTIONS}/{layout.METADATA}"
    data = files.read(where, MAX_DOCUMENT_BYTES)
    document: Any = None if data is None else parse(files, where, data)
    if document is not None:
        shape = document.get("shape")
        rows = shape[0] if isinstance(shape, list) and shape and is_whole(shape[0]) else 0
        # A process may have extended the array for evictions that the counter does not include yet.
        fits = rows >= words.evictions and (rows == words.evictions or rows % layout.EVICTION_ROWS == 0)
        if data != eviction_document(plan, rows) or not fits:
            files.report("metadata", where, f"does not describe an array of {words.evictions} entries")
    entries: dict[int, list[tuple[int, int]]] = {}
    seen: set[int] = set()
    remaining = words.evictions
    for chunk in range(-(-words.evictions // layout.EVICTION_ROWS)):
        name = f"{layout.EVICTIONS}/c.{chunk}.0"
        block = files.read(name, layout.EVICTION_ROWS * 16, layout.EVICTION_ROWS * 16)
        if block is None:
            break
        for first, steps in np.frombuffer(block, "<i8").reshape(-1, 2)[:remaining].tolist():
            number = first >> layout.POSITION_BITS
            if first < 0 or steps < 1 or number >= words.next_segment:
                files.report("eviction", name, f"{steps} steps from id {first} never existed")
            elif first in seen:
                files.report("eviction", name, f"the episode of id {first} is listed twice")
            else:
                seen.add(first)
                entries.setdefault(number, []).append((first & layout.POSITION_MASK, steps))
        remaining -= layout.EVICTION_ROWS
    return entries


# --- saved states of samplers ----------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_ARRAY_NAME = re.compile(r"[a-z0-9_][a-z0-9_.]{0,199}")
_ITEM_BYTES = {"bool": 1, "int64": 8, "float32": 4, "float64": 8}
_CRC_BYTES = 4
_MOST_AXES, _MOST_BYTES = 32, 1 << 62
_LEVELS = 100  # the maximum depth of a saved state; real states have a handful of levels
# If a state is replaced during its check, the new state is checked. If states are still replaced after this many
# seconds, no problem is reported.
_PATIENCE_S = 5.0


def verify_states(root: str, store: str) -> list[Problem]:
    """Return the problems of the current saved states; older states that dead processes left are not checked."""
    names = Files(root)
    problems = []
    for name, kind in sorted((names.listing(layout.SAMPLERS) or {}).items()):
        if kind == "folder" and not name.startswith("."):
            problems += _verify(root, f"{layout.SAMPLERS}/{name}", store)
    return problems


def _verify(root: str, where: str, store: str) -> list[Problem]:
    """Return the problems of the current saved state in the folder ``where``, except problems of a save in progress.

    A problem counts only if two checks find it in the same state, and no other state was saved during either check. If
    new states are saved faster than a check ends, no problem is returned.
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
        if before and time.monotonic() > until:
            return []
        before = repr((current, current))
        time.sleep(_PAUSE_S)


def _current(root: str, where: str) -> object:
    """Return the number of the current state; the result is arbitrary if zarr.json is damaged."""
    return (_attributes(Files(root), where) or {}).get("current")


def _check_current(files: Files, where: str, store: str) -> object:
    attributes = _attributes(files, where)
    names = files.listing(where)
    if attributes is None or names is None:
        return None
    current = attributes.get("current")
    if not is_whole(current, 1, 10**18 - 1):
        files.report("metadata", f"{where}/{layout.METADATA}", f"the current state is {str(current)[:40]}")
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
        files.report("checksum", where, "does not match the checksum in its state")
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
    """Whether NumPy can have an array of this shape.

    NumPy limits the size of an array in bytes. For this limit, an axis of length 0 counts as 1.
    """
    if not isinstance(shape, list) or len(shape) > _MOST_AXES or not all(is_whole(n, 0, _MOST_BYTES) for n in shape):
        return False
    return bool(item_bytes * math.prod(max(n, 1) for n in shape) <= _MOST_BYTES)


def _check_chunk(files: Files, where: str, nbytes: int) -> None:
    with files.opened(where, nbytes + _CRC_BYTES) as fd:
        if fd is None:
            return
        crc = 0
        for start in range(0, nbytes, BLOCK_BYTES):
            crc = crc32c(read_at(fd, min(BLOCK_BYTES, nbytes - start), start), crc)
        if crc != int.from_bytes(read_at(fd, _CRC_BYTES, nbytes), "little"):
            files.report("checksum", where, "does not match its checksum")
