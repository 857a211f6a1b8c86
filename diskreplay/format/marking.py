"""Makes the rows of an open segment durable, and marks them in its log: see `diskreplay.format.marks`."""

import os
import time
import weakref

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.folders import close_when_collected
from diskreplay.format import layout
from diskreplay.format.commit import open_lane_counter
from diskreplay.format.copies import note_changed
from diskreplay.format.durable import storage_errors, sync_file, sync_folder, write_at
from diskreplay.format.mapping import Mapping
from diskreplay.format.marks import new_rows_crc, read_marks, record_type
from diskreplay.format.segment import SegmentInfo
from diskreplay.format.segment_column import MOST_DESCRIPTORS

Ints = NDArray[np.int64]
_Descriptors = dict[str, tuple[int, int]]


class MarkLog:
    """The end of a segment's log, to which marks are appended. One thread at a time.

    The log stays open and chunks stay mapped until this object is collected.
    """

    def __init__(self, info: SegmentInfo) -> None:
        self._info, self._fd = info, -1
        self.path = f"{info.path}/{layout.MARKS}"
        self._full = (
            f"no space in {info.root.path} to make durable what was appended; it is there, but a loss of power would "
            "take it: free some and append again"
        )
        self._kind = record_type(len(info.lanes))
        marks = read_marks(str(info.path), len(info.lanes))
        self._count = len(marks)
        self.rows: Ints = marks[-1].rows if marks else np.zeros(len(info.lanes), np.int64)
        self._seed = marks[-1].own if marks else 0
        self._mapped: dict[str, tuple[int, Mapping]] = {}  # the last chunk of each array that was read

    def create(self) -> None:
        """Make the file, empty, where there is none.

        Raises StorageFull where there is no space, or the system's OSError.
        """
        with storage_errors(self.path, self._full):
            self._open()

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            close_when_collected(self, self._fd)
        return self._fd

    def _map_chunk(self, leaf: str, chunk: int) -> Mapping:
        known, mapping = self._mapped.get(leaf, (-1, None))
        if mapping is None or known != chunk:
            mapping = self._info.map_chunk(leaf, chunk)
            self._mapped[leaf] = chunk, mapping
        return mapping

    def append(self, rows: Ints) -> None:
        """Append a mark of committed rows that are durable, durably.

        Raises StorageFull where there is no space, or the system's OSError; the log is as good as before, and the call
        may be repeated.
        """
        crc, priority = new_rows_crc(self._info, self.rows, rows, self._map_chunk)
        record = np.zeros(1, self._kind)
        record["size"], record["crc"], record["time"] = self._kind.itemsize, crc, time.time()
        record["rows"][0], record["priority"] = rows, priority
        data = record.tobytes()[:-4]
        own = crc32c(data, self._seed)
        with storage_errors(self.path, self._full):
            # What an earlier attempt left behind the last whole mark is overwritten.
            write_at(self._open(), data + own.to_bytes(4, "little"), self._count * self._kind.itemsize)
            os.fdatasync(self._open())
        self._count, self._seed, self.rows = self._count + 1, own, rows.copy()


class DurableRows:
    """Makes the rows of a segment durable, and marks them.

    Files stay open from mark to mark, until this object is collected: after each system call the marking thread needs
    the GIL again, which an append may hold or have to wait for.

    Concurrency: one thread at a time, which need not be the one that appends.
    """

    def __init__(self, info: SegmentInfo) -> None:
        self._info = info
        self._log = MarkLog(info)
        self._counter = open_lane_counter(f"{info.path}/{layout.DURABLE}", len(info.lanes), late=True)
        self._named: dict[str, int] = {}  # the highest chunk of each array whose name is durable
        self._descriptors: _Descriptors = {}  # the chunk of each array that was synced last, and a descriptor of it
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        self._is_new = True

    def mark(self, rows: Ints) -> None:
        """Make the committed rows of each lane durable, then mark them.

        Raises StorageFull where there is no room for the mark: everything that was committed is durable, and the
        call may be repeated. After the system's OSError it is unknown what is durable.
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
            fd = os.open(self._info.chunk_path(leaf, chunk), os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors[leaf] = chunk, fd
        return fd

    def _sync_new_segment(self) -> None:
        path, root = self._info.path, self._info.root
        for name in layout.LANE_COUNTERS:
            sync_file(path / name / "c.0")
        for folder in [*(path / below for below in self._info.blueprint.paths), path]:
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
