"""Quarantine: files and folders of a store that are neither used nor deleted, each with a record of its origin.

Such a file or folder is called an entry. A record is durable before its entry is moved. If a record is missing or
damaged, its values are derived from the entry.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, StorageFull
from diskreplay.folders import copy_tree, is_folder
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import removed_path
from diskreplay.segments.documents.metadata import Document, is_whole, parse_document
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import drafted, move, sync_file_system, sync_folder, write_atomic
from diskreplay.segments.files.mapping import read_regular
from diskreplay.segments.sealing import count_flags

QUARANTINE = f"{layout.COUNTERS}/quarantine"
RECORD = ".record.json"  # the suffix of a record's file name, after the name of its entry

_SEGMENT = re.compile(rf"{layout.SEGMENTS}(?:\.[0-9]+)?/([0-9]{{8,9}})(?:\.[0-9]+)?")
_PARTS, _ENOUGH_PARTS = {layout.DONE, *layout.LANE_COUNTERS}, 3  # a folder with 3 of these arrays counts as a segment
_TOP = (layout.SEGMENTS, layout.SAMPLERS, layout.LIMITERS, layout.COUNTERS, layout.EVICTIONS)
_DEEPEST = 8  # the maximum depth of entries in a store's tree
_MOST_BYTES = 1 << 16  # the maximum size of a record


@dataclass(frozen=True, slots=True)
class Quarantined:
    """An entry of the quarantine, as `Store.quarantine` lists it.

    Attributes
    ----------
    segment : int or None
        The number of the segment; None: the entry is not a segment.
    steps : int or None
        The number of steps in the entry that are nowhere else in the store; None: unknown.
    reason : str
        Why the entry was moved into quarantine.
    since : float
        The time when the entry was moved, in seconds since 1970.
    where : str
        The entry's present path, relative to the store.
    path : str
        The entry's original path, relative to the store.
    rebuilt : bool
        Whether a new segment with the intact rows has replaced this segment. If True, the steps of this entry do not
        count as inserted, because the new segment counts the same steps.
    """

    segment: int | None
    steps: int | None
    reason: str
    since: float
    where: str
    path: str
    rebuilt: bool = False

    @property
    def inserted(self) -> int:
        """The number of steps in the entry that no other part of the store counts as inserted."""
        return 0 if self.rebuilt else self.steps or 0


# --- setting aside ---------------------------------------------------------------------------------------------------


def move_aside(
    root: Path, where: str, reason: str = "was in the way", *, steps: int | None = None, rebuilt: bool = False
) -> str:
    """Move a file or folder of a store into quarantine; return its new path. The caller holds the store lock.

    ``where`` is the path to move, relative to the store. ``steps`` is the number of steps at this path that are nowhere
    else in the store. None: the steps of a segment are counted from its files; any other file or folder counts as 0
    steps. ``rebuilt`` tells whether a rebuilt segment takes the place of the moved segment.
    """
    if where == QUARANTINE:  # a link or a file has the name of the quarantine's folder
        there = _free((root / where).with_name(".quarantine"))
        os.rename(root / where, there)
        return str(there.relative_to(root))
    if steps is None:
        steps = 0 if _segment_of(where) is None else claimed_steps(root / where)
    return _take_in(root, root / where, where, reason, steps, rebuilt)


def copy_aside(root: Path, where: str, reason: str, steps: int | None) -> str:
    """Copy a segment into quarantine, unless a copy of it for the same reason is there already; return the copy's path.

    ``steps`` is the number of steps that the original segment is about to lose; None: unknown. The caller holds the
    store lock.
    """
    for entry in read_quarantine(root):
        if entry.path == where and entry.reason == reason and entry.segment is not None:
            return entry.where
    draft = root / layout.COUNTERS / f"new-{where.replace('/', '-')}"
    with drafted(draft):
        copy_tree(root / where, draft)
        sync_file_system(root)
        return _take_in(root, draft, where, reason, steps, False)


def _take_in(root: Path, source: Path, where: str, reason: str, steps: int | None, rebuilt: bool) -> str:
    segment, target = _segment_of(where), _free_place(root, where)
    now = str(target.relative_to(root))
    record = {"segment": segment, "path": where, "steps": steps, "reason": reason, "since": time.time()}
    record |= {"rebuilt": True} if rebuilt else {}
    with suppress(StorageFull):  # without a record, most values of `Quarantined` are derived from the entry
        write_atomic(_record_path(target), json.dumps(record).encode(), synced=True)
        sync_folder(target.parent)
    move(source, target)
    if segment is not None:
        note_change(root)
    return now


def note_change(root: Path) -> None:
    """Notify readers that segments were quarantined, brought back or replaced. The caller holds the store lock."""
    with suppress(FormatError, OSError):  # a store with damaged counters has no readers
        _counters(root).count(layout.CHANGES)


def _counters(root: Path) -> StoreCounters:
    return StoreCounters(str(root / layout.COUNTERS / "c.0"), writable=True)


def _free_place(root: Path, where: str) -> Path:
    top = root / QUARANTINE
    if os.path.lexists(top) and not is_folder(top):
        move_aside(root, QUARANTINE)
    folder = top
    if not is_folder(folder):
        _make_folder(folder)
    *above, name = where.split("/")
    for part in above:
        folder = folder / part
        if not is_folder(folder) or os.path.lexists(_record_path(folder)):  # no entry is put inside another entry
            folder = _free(folder)
            _make_folder(folder)
    return _free(folder / name)


def _make_folder(path: Path) -> None:
    path.mkdir()
    sync_folder(path.parent)


def _free(path: Path) -> Path:
    free, count = path, 0
    while os.path.lexists(free) or os.path.lexists(_record_path(free)):
        count += 1
        free = path.with_name(f"{path.name}.{count}")
    return free


def _record_path(entry: Path) -> Path:
    return entry.with_name(entry.name + RECORD)


def _segment_of(where: str) -> int | None:
    found = _SEGMENT.fullmatch(where)
    return int(found[1]) if found and int(found[1]) < layout.MAX_SEGMENTS else None


# --- listing ---------------------------------------------------------------------------------------------------------


def read_quarantine(root: Path) -> list[Quarantined]:
    return _entries(root, "", _DEEPEST)[0]


def _entries(root: Path, folder: str, levels: int) -> tuple[list[Quarantined], bool]:
    """Return the entries at most ``levels`` deep in a quarantine folder, and whether any of them has a record."""
    base = root / QUARANTINE / folder
    if not levels or not is_folder(base):
        return [], False
    with suppress(OSError):
        names = sorted(os.listdir(base))
        known = {name for name in names if name + RECORD in names}
        found: list[Quarantined] = []
        for name in names:
            if name.endswith(RECORD) or name.startswith("."):
                continue
            where = f"{folder}/{name}" if folder else name
            inside: list[Quarantined] = []
            is_above = where in _TOP and is_folder(base / name)
            if name not in known and is_folder(base / name) and not _is_segment(base / name):
                inside, has_records = _entries(root, where, levels - 1)
                is_above = is_above or has_records
            if name in known or not is_above:
                found.append(_entry(root, where))
            else:
                found += inside
        return found, bool(known) or any(entry.reason != _NO_RECORD for entry in found)
    return [], False


_NO_RECORD = "its record is missing"


def _entry(root: Path, where: str) -> Quarantined:
    path = root / QUARANTINE / where
    segment = _segment_of(where) if _is_segment(path) else None
    record: Document = {}
    with suppress(OSError, FormatError):
        file = _record_path(path)
        record = parse_document(read_regular(str(file), None, _MOST_BYTES), file)
    steps, since, reason, was = (record.get(key) for key in ("steps", "since", "reason", "path"))
    if not is_whole(steps, most=layout.MOST_COUNTED):
        steps = None if record and steps is None else (0 if segment is None else claimed_steps(path))
    if isinstance(since, bool) or not isinstance(since, int | float) or not 0 <= since <= layout.MOST_COUNTED:
        since = 0.0
        with suppress(OSError):
            since = os.lstat(path).st_mtime
    return Quarantined(
        segment=segment,
        steps=steps,
        reason=reason if isinstance(reason, str) else _NO_RECORD,
        since=float(since),
        where=f"{QUARANTINE}/{where}",
        path=was if isinstance(was, str) else re.sub(r"\.[0-9]+$", "", where),
        rebuilt=record.get("rebuilt") is True,
    )


def _is_segment(path: Path) -> bool:
    if not is_folder(path):
        return False
    names = set(os.listdir(path))
    return os.path.lexists(_record_path(path)) or layout.METADATA in names or len(names & _PARTS) >= _ENOUGH_PARTS


def remove_stale_records(root: Path) -> dict[int, int]:
    """Remove the records of segments that have left the quarantine; return {segment: `Quarantined.inserted`}.

    A user moved these segments back or deleted them by hand, or a process died after it moved one of them back. The
    caller holds the store lock.
    """
    folder, gone = root / QUARANTINE / layout.SEGMENTS, dict[int, int]()
    for name in _segment_names(root):
        entry = folder / name.removesuffix(RECORD)
        if not name.endswith(RECORD) or os.path.lexists(entry):
            continue
        number = _segment_of(f"{layout.SEGMENTS}/{entry.name}")
        if number is not None:
            gone[number] = _entry(root, f"{layout.SEGMENTS}/{entry.name}").inserted
        os.unlink(folder / name)
    return gone


def quarantined_numbers(root: Path) -> list[int]:
    """Return the numbers of quarantined segments, sorted: new segments must not reuse them."""
    found = (_segment_of(f"{layout.SEGMENTS}/{name.removesuffix(RECORD)}") for name in _segment_names(root))
    return sorted({number for number in found if number is not None})


def _segment_names(root: Path) -> list[str]:
    folder = root / QUARANTINE / layout.SEGMENTS
    return os.listdir(folder) if is_folder(root / QUARANTINE) and is_folder(folder) else []


# --- taking out ------------------------------------------------------------------------------------------------------


def bring_back(root: Path, entry: Quarantined, members: Sequence[int]) -> None:
    """Move a segment from quarantine back to its original path; nothing may exist at this path.

    The caller holds the store lock, and has verified the segment. ``members`` has the numbers of the segments in a
    pack.

    A process that dies after the move leaves a record without an entry. `remove_stale_records` removes such a record.
    """
    if entry.segment is None:
        raise ValueError(f"{entry.where} is not a segment")
    source, target = root / entry.where, root / layout.SEGMENTS / layout.segment_name(entry.segment)
    move(source, target)
    counters = _counters(root)
    for number in (entry.segment, *members[:1]):
        include_number(counters, number)
    note_change(root)
    forget(root, entry)


def forget(root: Path, entry: Quarantined) -> None:
    """Remove the record of an entry that has left the quarantine. The caller holds the store lock."""
    record = _record_path(root / entry.where)
    record.unlink(missing_ok=True)
    sync_folder(record.parent)


def include_number(counters: StoreCounters, number: int) -> None:
    """Extend the store's range of segment numbers to include ``number``. The caller holds the store lock."""
    words = counters.read()
    if number < words[layout.FIRST_LIVE]:
        counters.lower(layout.FIRST_LIVE, number)
    if number >= words[layout.NEXT_SEGMENT]:
        counters.set(layout.NEXT_SEGMENT, number + 1)


def take_out(root: Path, entry: Quarantined) -> str:
    """Move a segment out of quarantine to be deleted; return its new path.

    The caller holds the store lock, and deletes the folder after releasing the lock. The steps of the segment count as
    evicted from this call on, so that the number of inserted steps does not decrease.
    """
    path = root / entry.where
    counters = _counters(root)
    evicted = counters.evicted_after(entry.inserted)
    gone = removed_path(root / layout.COUNTERS, entry.segment or 0, evicted)
    shutil.rmtree(gone, ignore_errors=True)
    # The record is removed first: if a crash left a record without an entry, the steps would be counted as evicted
    # again.
    _record_path(path).unlink(missing_ok=True)
    os.rename(path, gone)
    sync_folder(path.parent)
    counters.set(layout.STEPS_EVICTED, evicted)
    note_change(root)
    return gone


# --- the steps of a segment that cannot be read ----------------------------------------------------------------------


def claimed_steps(segment: Path) -> int | None:
    """Return the number of steps in the rows that a segment's counters claim; None: they cannot be counted.

    The segment's zarr.json is not read. Rows without a chunk file of flags are not counted, so that a damaged counter
    cannot add steps that never existed.
    """
    try:
        rows, chunks = _claimed_rows(segment), 1
        per_chunk = os.lstat(segment / layout.DONE / layout.chunk_key(0, 0)).st_size // len(rows)
        while chunks * per_chunk < int(rows.max()) and os.path.lexists(
            segment / layout.DONE / layout.chunk_key(chunks, 0)
        ):
            chunks += 1
        return count_flags(str(segment), np.minimum(rows, chunks * per_chunk), per_chunk) if per_chunk else 0
    except (OSError, FormatError, ValueError):
        return None


def _claimed_rows(segment: Path) -> NDArray[np.int64]:
    error: Exception = ValueError("no counter")
    for name in (layout.COMMITTED, layout.DURABLE, layout.OBSERVED):
        try:
            # One byte more than the maximum is read, so that the data of a longer file are no multiple of 8 bytes, and
            # are refused.
            data = read_regular(f"{segment}/{name}/c.0", None, 8 * layout.MAX_LANES + 1)
        except (OSError, FormatError) as reason:
            error = reason
            continue
        if data and len(data) % 8 == 0:
            rows: NDArray[np.int64] = np.maximum(np.frombuffer(data, "<i8"), 0)
            return rows
    raise error
