"""Derives the content of small files of a store from other files, and repairs its counters."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.integrity.verify.documents import Plan, eviction_document, limiter_document, store_documents
from diskreplay.segments.blocks import derive_blocks
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import read_document, verify_document
from diskreplay.segments.episode_table import table_of
from diskreplay.segments.files.durable import sync_file, sync_folder, write_atomic
from diskreplay.segments.files.mapping import open_regular, read_regular
from diskreplay.segments.packs import indexes_of, read_tables, table_from_copy
from diskreplay.segments.segment import SegmentInfo

_LIMITER = re.compile(rf"{layout.LIMITERS}/[^/]+/{layout.METADATA}")
# For each counter, the largest number that one update adds. The file of the counters has each counter and its
# complement (all bits inverted). A writer updates the counter first, and may die before it updates the complement.
_MOST_ADDED = {
    layout.STEPS_EVICTED: 1 << layout.POSITION_BITS,
    layout.RESERVED: layout.RESERVED_AT_ONCE,
    layout.CHANGES: 1,
    layout.SEALED: 1,
}


# --- files whose bytes are known -------------------------------------------------------------------------------------


def known_document(plan: Plan, where: str, evictions: int, root: Path | None = None) -> bytes | None:
    """Return the right content of a file outside the segments; None: the content is unknown.

    The content of a zarr.json of a group or array is known. If the store's folder ``root`` is given, the content of the
    copy of the store's zarr.json is known, too. ``evictions`` is the number of evictions by hand.
    """
    known = {f"{name}/{layout.METADATA}": data for name, data in store_documents(plan).items()}
    known[f"{layout.EVICTIONS}/{layout.METADATA}"] = eviction_document(plan, evictions)
    if root is not None and (document := whole_document(root / layout.METADATA)) is not None:
        known[layout.ROOT_COPY] = document
    return limiter_document(plan) if _LIMITER.fullmatch(where) else known.get(where)


def known_in_segment(info: SegmentInfo, name: str) -> bytes | None:
    """Derive the content of a small file of a sealed segment from other files; None: the content is unknown."""
    folder, _, file = name.rpartition("/")
    is_of_table = folder in layout.EPISODE_FOLDERS
    if not info.sealed or not (is_of_table or folder in info.blueprint.paths):
        return None
    if name == layout.DOCUMENT_COPY:
        return whole_document(info.path / layout.METADATA)
    candidates = [_of_episodes(info, name)] if is_of_table else _candidates(info, folder, file)
    expected = info.checksums.get(name)
    return next((data for data in candidates if data and crc32c(data) == expected), None)


def _candidates(info: SegmentInfo, folder: str, file: str) -> Iterator[bytes]:
    name = f"{folder}/{file}"
    if name == layout.BLOCKS:
        yield derive_blocks(info)
    elif file == layout.METADATA:
        yield _document(info, folder)
    elif name == layout.TABLES_COPY and info.packed is not None:
        with suppress(OSError, FormatError):
            yield b"".join(read_tables(info).contents)
    elif name == layout.INDEXES_COPY and info.compressed:
        yield indexes_of(info)
    elif file == "c.0.0" and folder in layout.PACK_TABLES:
        yield table_from_copy(info, folder)
    elif file == "c.0" and folder in layout.LANE_COUNTERS:
        # In a sealed segment, the counters `committed`, `observed` and `durable` are equal.
        yield from (_counter(info, other) for other in layout.LANE_COUNTERS if other != folder)


def whole_document(path: Path) -> bytes | None:
    """Return the bytes of a zarr.json, or of a copy of it; None: the file is damaged or missing."""
    if not is_folder(path.parent):
        return None
    try:
        data = read_document(path)
        verify_document(data, path)
    except (OSError, FormatError):
        return None
    return data


def from_copy(document: Path, copy: Path) -> bytes | None:
    """Return the bytes of ``copy`` if they can replace the damaged or missing zarr.json ``document``, else None."""
    if document.is_dir() or whole_document(document) is not None:
        return None
    return whole_document(copy)


def restore_file(path: Path, data: bytes) -> bool:
    if not is_folder(path.parent):
        return False
    write_atomic(path, data, synced=True)
    sync_folder(path.parent)
    return True


def _document(info: SegmentInfo, folder: str) -> bytes:
    if folder in info.arrays:
        rows = max(info.values) if layout.is_of_episodes(folder) else int(_rows(info).max(initial=0))
        return info.blueprint.arrays[folder].document(len(info.lanes), rows, info.chunk_rows[folder])
    return dict(info.documents())[folder]


def _rows(info: SegmentInfo) -> NDArray[np.int64]:
    return np.frombuffer(_counter(info, layout.COMMITTED) or _counter(info, layout.DURABLE), "<i8")


def _of_episodes(info: SegmentInfo, name: str) -> bytes:
    if info.episodes is None:
        return b""
    known = {f"{path}/{layout.METADATA}": data for path, data in info.root.blueprint.episode_documents(info.episodes)}
    if name not in known and 0 < (rows := _rows(info)).sum() <= layout.MOST_TABLE_ROWS:
        with suppress(OSError, FormatError):
            known |= table_of(info, rows).files()
    return known.get(name, b"")


def _counter(info: SegmentInfo, counter: str) -> bytes:
    name = f"{counter}/c.0"
    if not is_folder(info.path / counter):
        return b""
    with suppress(OSError, FormatError):
        data = read_regular(str(info.path / name), 8 * len(info.lanes), 8 * len(info.lanes))
        if crc32c(data) == info.checksums.get(name):
            return data
    return b""


# --- the store's counters --------------------------------------------------------------------------------------------


def repair_words(root: Path, numbers: list[int], aside: Sequence[int]) -> str | None:
    """Make the store's counters valid again; return their old and new values in words, or None if nothing was wrong.

    If a counter and its complement disagree, one of the two is right: either a writer died between the two updates, or
    a bit flipped. The files of the store may show which of the two is right. If not, the value that keeps more steps is
    used. The caller holds the store lock. ``aside`` lists the numbers of segments in quarantine: a new segment must not
    get such a number.
    """
    path, nbytes = root / layout.COUNTERS / "c.0", 2 * layout.COUNTER_WORDS * 8
    words = np.array([0] * layout.COUNTER_WORDS + [-1] * layout.COUNTER_WORDS, "<i8")
    with suppress(OSError, FormatError):
        words = np.frombuffer(read_regular(str(path), nbytes, nbytes), "<i8")
    values = words[: layout.COUNTER_WORDS]
    chosen = _choose(
        values.tolist(), (~words[layout.COUNTER_WORDS :]).tolist(), numbers, aside, _eviction_entries(root)
    )
    repaired = np.array([*chosen, *(~value for value in chosen)], "<i8")
    if (repaired == words).all() and path.exists():
        return None
    try:
        fd = open_regular(str(path), nbytes, os.O_RDWR)
    except (OSError, FormatError):
        # A new file may replace the damaged file, because no process can have mapped the damaged file.
        write_atomic(path, repaired.tobytes())
        fd = open_regular(str(path), nbytes, os.O_RDWR)
    with open(fd, "r+b", buffering=0) as file:
        file.write(repaired.tobytes())
    sync_file(path)
    sync_folder(path.parent)
    return f"{values.tolist()} is now {chosen}"


def _choose(
    values: list[int], others: list[int], numbers: list[int], aside: Sequence[int], evictions: int
) -> list[int]:
    pairs = zip(values, others, strict=True)
    able = [[value for value in pair if 0 <= value <= layout.MOST_COUNTED] or [0] for pair in pairs]
    # Steps before the values of HORIZON and FRONTIER are evicted or hidden, so a lower value keeps more steps.
    chosen = [_newer(both, _MOST_ADDED.get(word, 0)) for word, both in enumerate(able)]
    following = 1 + max([*numbers, *aside], default=-1)
    # If both values are above every segment number, the lower value is used: the higher value may be huge because of a
    # flipped bit, and would waste segment numbers.
    above = [value for value in able[layout.NEXT_SEGMENT] if following <= value <= layout.MAX_SEGMENTS]
    chosen[layout.NEXT_SEGMENT] = min(above, default=following)
    least = min(numbers, default=chosen[layout.NEXT_SEGMENT])
    chosen[layout.FIRST_LIVE] = max((value for value in able[layout.FIRST_LIVE] if value <= least), default=0)
    there = (value for value in able[layout.EVICTION_ENTRIES] if value <= evictions)
    chosen[layout.EVICTION_ENTRIES] = max(there, default=0)
    if len({*able[layout.BOOT]}) > 1:
        chosen[layout.BOOT] = 0
    return [*chosen[: layout.SEALED + 1], *[0] * (layout.COUNTER_WORDS - layout.SEALED - 1)]


def _newer(both: list[int], most: int) -> int:
    """Return the higher value if one update of the counter can add the difference, else the lower one."""
    low, high = min(both), max(both)
    return high if high - low <= most else low


def _eviction_entries(root: Path) -> int:
    """Return the number of used entries in the list of evictions by hand; unused entries have 0 steps."""
    count = 0
    with suppress(OSError, FormatError):
        while is_folder(root / layout.EVICTIONS):
            path, nbytes = root / layout.EVICTIONS / f"c.{count // layout.EVICTION_ROWS}.0", layout.EVICTION_ROWS * 16
            steps = np.frombuffer(read_regular(str(path), nbytes, nbytes), "<i8")[1::2]
            if not (steps > 0).all():
                return count + int(np.argmin(steps > 0))
            count += len(steps)
    return count
