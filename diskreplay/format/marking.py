"""Bringing the rows of an open segment to the disk, and marking them: see `diskreplay.format.marks`."""

import os
import weakref

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import open_lane_counter
from diskreplay.format.copies import note_changed
from diskreplay.format.durable import sync_file, sync_folder
from diskreplay.format.marks import MarkLog, Place
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, chunk_path
from diskreplay.format.segment_column import MOST_DESCRIPTORS

Ints = NDArray[np.int64]
_Descriptors = dict[str, tuple[int, int]]


class DurableRows:
    """The rows of a segment that are on the disk.

    Files stay open from mark to mark, until this object is collected: after each system call the marking thread needs
    the GIL again, which an append may hold or have to wait for.

    Concurrency: one thread at a time, which need not be the one that appends.
    """

    def __init__(self, root: Root, info: SegmentInfo) -> None:
        self._root, self._info = root, info
        self._log = MarkLog(root, Place(str(info.path), len(info.lanes), info.chunk_rows))
        self._counter = open_lane_counter(f"{info.path}/{layout.DURABLE}", len(info.lanes), late=True)
        self._named: dict[str, int] = {}  # the highest chunk of each array whose name is durable
        self._descriptors: _Descriptors = {}  # the chunk of each array that was synced last, and a descriptor of it
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        self._is_new = True

    def mark(self, rows: Ints) -> None:
        """Bring the rows of each lane that are committed to the disk, then mark them there.

        Raises StorageFull where there is no room for the mark: everything that was committed is there, and the call may
        be repeated. After the system's OSError it is unknown what the disk holds.
        """
        if not self._is_new and (rows == self._log.rows).all():
            return
        for leaf, per_chunk in self._info.chunk_rows.items():
            self._sync_array(leaf, _chunks_between(self._log.rows, rows, per_chunk))
        if self._is_new:
            self._sync_new_segment()
        self._log.append(rows)
        self._counter[:] = rows

    def _sync_array(self, leaf: str, chunks: set[int]) -> None:
        for chunk in sorted(chunks):
            fd = self._descriptor(leaf, chunk)
            note_changed(fd)
            os.fdatasync(fd)
        newest = max(chunks, default=-1)
        if newest > self._named.get(leaf, -1):
            sync_file(self._info.path / leaf / layout.METADATA)
            sync_folder(self._info.path / leaf)
            self._named[leaf] = newest

    def _descriptor(self, leaf: str, chunk: int) -> int:
        """Return an open descriptor of a chunk, which is kept until another one of its array is asked for."""
        known, fd = self._descriptors.get(leaf, (-1, -1))
        if known != chunk:
            _close(self._descriptors, leaf)
            if len(self._descriptors) >= MOST_DESCRIPTORS:
                _close(self._descriptors, next(iter(self._descriptors)))
            fd = os.open(chunk_path(self._root, self._info, leaf, chunk), os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[leaf] = chunk, fd
        return fd

    def _sync_new_segment(self) -> None:
        path, root = self._info.path, self._root
        parts = {part for leaf in self._info.chunk_rows for part in [path / leaf, *(path / leaf).parents]}
        folders = {part for part in parts if path in part.parents} | {path / name for name in layout.LANE_COUNTERS}
        for name in layout.LANE_COUNTERS:
            sync_file(path / name / "c.0")
        for folder in [*folders, path]:
            sync_file(folder / layout.METADATA)
            sync_folder(folder)
        for folder in (path.parent, root.counters_folder, root.folder):
            sync_folder(folder)
        note_changed(f"{root.counters_folder}/c.0")
        sync_file(root.counters_folder / "c.0")
        # The log's own name: without it the first mark, which is synced, would be nowhere.
        self._log.create()
        sync_folder(os.path.dirname(self._log.path))
        self._is_new = False


def _close(descriptors: _Descriptors, leaf: str) -> None:
    if leaf in descriptors:
        os.close(descriptors.pop(leaf)[1])


def _close_all(descriptors: _Descriptors) -> None:
    for leaf in list(descriptors):
        _close(descriptors, leaf)


def _chunks_between(before: Ints, rows: Ints, per_chunk: int) -> set[int]:
    """Return the chunks that hold any of the rows from ``before`` up to ``rows``, of any lane."""
    grown = before < rows
    begin, end = (before[grown] // per_chunk).tolist(), ((rows[grown] - 1) // per_chunk).tolist()
    return {chunk for first, last in set(zip(begin, end, strict=True)) for chunk in range(first, last + 1)}
