"""Unproven rows: rows that a segment's counters claimed before a power loss or a copy, but that no mark proves.

Unproven rows may be intact, torn or missing. They do not count as rows of the segment. They are not deleted: the
segment's files keep these rows after all other rows of each lane, and the segment's attributes have their number.
"""

import os
from contextlib import suppress
from enum import Enum

import numpy as np

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.ids import Ints
from diskreplay.segments.documents import layout
from diskreplay.segments.files.commit import read_lane_counter, write_lane_counter
from diskreplay.segments.files.durable import sync_file, sync_folder, write_file
from diskreplay.segments.files.mapping import data_ranges, opened
from diskreplay.segments.marks import cut_marks, proven_rows, read_marks, shows_live_rows
from diskreplay.segments.segment import SegmentInfo, has_no_mark, read_as_sealed, write_unsealed
from diskreplay.segments.segment_reader import rows_with_values

_CLAIMED = ".claimed"
_BLOCK_BYTES = 1 << 20


class Fate(Enum):
    """How the segment of a dead writer is treated; the values are names of actions in the report of a repair."""

    SEALED = "sealed"
    SET_ASIDE = "quarantined"  # the segment has data, but files are missing, and no row is proven
    # files are missing, but some rows are proven: the segment is sealed, and an unchanged copy is quarantined
    COPIED = "copied"
    REMOVED = "removed"  # the segment has no data


REASONS = {
    Fate.REMOVED: "nothing was written to it when its machine went down",
    Fate.SET_ASIDE: "files are missing since its machine went down, or it was copied",
    Fate.COPIED: "files of marked rows are missing: not all of it was copied",
}


def fate_of(info: SegmentInfo) -> Fate:
    """Return how to treat an unsealed segment with a free lock: its writer has died."""
    if shows_live_rows(info):
        return Fate.SEALED
    if not has_no_mark(str(info.path)):
        if not _lacks_marked_files(info):
            return Fate.SEALED
        return Fate.COPIED if proven_rows(info).any() else Fate.SET_ASIDE
    if not holds_data(info):
        return Fate.REMOVED
    return Fate.SEALED if rows_with_files(info) and _has_folders(info) else Fate.SET_ASIDE


def _lacks_marked_files(info: SegmentInfo) -> bool:
    """Return whether files of marked rows are missing or short.

    Only an incomplete copy can lack these files: a power loss does not take files of marked rows.
    """
    marks = read_marks(str(info.path), len(info.lanes))
    return bool(marks) and int(marks[-1].rows.max()) > rows_with_files(info)


def _has_folders(info: SegmentInfo) -> bool:
    return all(is_folder(info.path / name) for name in info.blueprint.paths)


def keep_proven_rows(info: SegmentInfo, salvaged: Ints | None) -> tuple[Ints, Ints]:
    """Set a segment's counters to the numbers of rows to keep; return the kept and claimed number of rows per lane.

    ``salvaged`` has the number of rows of each lane to keep even if fewer rows are proven. The call may be repeated
    after a crash at any point.
    """
    proven = proven_rows(info)
    rows = proven if salvaged is None else np.maximum(proven, salvaged)
    claimed = np.maximum(rows, claimed_rows(info, rows))
    folder = f"{info.path}/{layout.DURABLE}"
    if (claimed > rows).any():
        # The counters are overwritten below, so the numbers of claimed rows are saved in a file first.
        write_file(f"{folder}/{_CLAIMED}", claimed.tobytes())
        sync_file(f"{folder}/{_CLAIMED}")
        sync_folder(folder)
    if read_as_sealed(info) is not None:
        # The copied zarr.json says that the segment is sealed. Readers would trust this file as soon as sealing makes
        # the chunks read-only.
        write_unsealed(info)
    cut_marks(str(info.path), len(info.lanes), proven)
    for name in layout.LANE_COUNTERS:
        _restore_counter(f"{info.path}/{name}", rows)
    return rows, claimed


def forget_claims(info: SegmentInfo, are_kept: bool) -> None:
    if not are_kept and not shows_live_rows(info):
        (info.path / layout.DURABLE / _CLAIMED).unlink(missing_ok=True)


def _restore_counter(folder: str, rows: Ints) -> None:
    try:
        write_lane_counter(folder, rows)
    except (FileNotFoundError, FormatError):  # a power loss left the file missing or short
        write_file(f"{folder}/c.0", rows.tobytes())
    sync_file(f"{folder}/c.0")


def claimed_rows(info: SegmentInfo, least: Ints) -> Ints:
    """Return, for each lane, the number of rows that have files and may hold steps; at least ``least[lane]``.

    Rows up to a counter, or up to the last nonzero flag, may hold steps. After a power loss, a counter may be older
    than the rows.
    """
    lanes, folder = len(info.lanes), str(info.path)
    present = rows_with_files(info)
    claimed = least.copy()
    for path in (f"{folder}/{layout.COMMITTED}/c.0", f"{folder}/{layout.DURABLE}/{_CLAIMED}"):
        claimed = np.maximum(claimed, _read(path, lanes))
    if info.claimed is not None:
        claimed = np.maximum(claimed, info.claimed)
    claimed = np.minimum(claimed, max(present, int(least.max(initial=0))))
    return np.maximum(claimed, _flagged_rows(info, present))


def _read(path: str, lanes: int) -> Ints:
    with suppress(OSError, FormatError):
        folder, _, name = path.rpartition("/")
        found = read_lane_counter(folder, lanes, name)
        if (found >= 0).all():
            return found
    return np.zeros(lanes, np.int64)


def rows_with_files(info: SegmentInfo) -> int:
    """Return the number of rows per lane for which every array has chunk files of the full size."""
    rows, values = list[int](), list[int]()
    for leaf, array in info.arrays.items():
        nbytes, chunk = info.chunk_nbytes(leaf), 0
        with suppress(OSError):
            while os.stat(info.chunk_path(leaf, chunk), follow_symlinks=False).st_size == nbytes:
                chunk += 1
        (values if array.is_of_episodes else rows).append(chunk * info.chunk_rows[leaf])
    least = min(rows)
    # Flags are read only if the files of episode fields have room for fewer values than rows.
    return rows_with_values(info, least, min(values)) if min(values, default=least) < least else least


def holds_data(info: SegmentInfo) -> bool:
    for leaf in info.arrays:
        folder = f"{info.path}/{leaf}"
        with suppress(FileNotFoundError, NotADirectoryError):
            if any(_is_written(f"{folder}/{name}") for name in os.listdir(folder) if name.startswith("c.")):
                return True
    return False


def _is_written(path: str) -> bool:
    with opened(path, None) as fd:
        for at, stop in data_ranges(fd, 0, os.fstat(fd).st_size):
            for start in range(at, stop, _BLOCK_BYTES):
                if os.pread(fd, min(_BLOCK_BYTES, stop - start), start).strip(b"\0"):
                    return True
    return False


def _flagged_rows(info: SegmentInfo, most: int) -> Ints:
    """Return, for each lane, the number of its rows up to the last row with a nonzero flag, but at most ``most``."""
    per_chunk, found = info.chunk_rows[layout.DONE], np.zeros(len(info.lanes), np.int64)
    for chunk in range(-(-most // per_chunk)):
        flags = info.map_numbers(layout.DONE, chunk) != 0
        some = flags.any(axis=1)
        last = per_chunk - flags[:, ::-1].argmax(axis=1)
        found[some] = np.minimum(chunk * per_chunk + last[some], most)
    return found
