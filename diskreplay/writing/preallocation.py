"""The background threads that make a writer's next segment and chunks, so that no append waits for files."""

import os
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import ReplayError, StoreNotFound
from diskreplay.retention.retention import Retention
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.mapping import Mapping
from diskreplay.segments.segment import DRAFT, Size, draft_segment, remove_draft
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.workers import Job, Workers


class Preallocator:
    """Makes the segment after the present one, with the blocks of its first chunks, before it is needed.

    Until `acquire` it has no number and no place among the segments: readers do not see it, and a process that dies
    leaves a folder whose lock is free, which the next one that opens the store with mode "a" removes.

    It also reserves the next rows of lanes, in a second thread: see `SegmentWriter.reserve_ahead`. That one unmaps the
    segments that the writer has left, too.

    Concurrency: the thread that uses the writer. The first thread lives while there is work, the second from its first
    work on until `close`.
    """

    def __init__(self, root: Root, retention: Retention) -> None:
        self._root, self._retention = root, retention
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._made: SegmentWriter | None = None
        self._reserver = Workers(1, "diskreplay-reserver")

    def request(self, writer: int, lanes: Sequence[int], size: Size, has_priority: bool = False) -> None:
        """Begin to make a segment; returns at once. See `draft_segment`."""
        if self._thread is None and self._made is None:
            # A daemon: an interpreter that ends without close() leaves the draft to the next process.
            self._thread = threading.Thread(
                target=self._make, args=(writer, lanes, size, has_priority), name="diskreplay-preallocator", daemon=True
            )
            self._thread.start()

    def _make(self, writer: int, lanes: Sequence[int], size: Size, has_priority: bool) -> None:
        building = f"{self._root.counters_folder}/{DRAFT}{writer}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            clock = self._retention.clock()
            info, lock = draft_segment(self._root, building, writer, lanes, size, clock, has_priority)
            try:
                segment = SegmentWriter(info, lock)
                for lane in range(len(lanes)):
                    segment.reserve(lane, 0)
            except BaseException:
                remove_draft(info, lock)
                raise
            self._made = segment
        except (OSError, ReplayError):
            # No room, or a folder that is gone: whoever needs the segment makes it itself, and says what is wrong.
            pass

    def _wait(self) -> SegmentWriter | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        made, self._made = self._made, None
        return made

    def acquire(self) -> SegmentWriter | None:
        """Return the segment, placed among the others, or None where none was made. Waits for one that is begun.

        Raises StoreLocked where the store lock was not free for a minute, StoreNotFound where the store was deleted or
        replaced since it was opened.
        """
        segment = self._wait()
        if segment is None:
            return None
        try:
            segment.place(self._retention.place(segment.info))
        except BaseException as error:
            self._remove(segment)
            if isinstance(error, OSError) and not isinstance(error, StoreNotFound):
                return None
            raise
        return segment

    def discard(self) -> bool:
        """Remove the segment that was made, or is being made; return whether there was one.

        One that found no room itself counts: it had taken what is free now.
        """
        if os.getpid() != self._pid:
            return False  # a forked child's copy: the parent's segment stays the parent's
        begun = self._thread is not None
        segment = self._wait()
        if segment is not None:
            self._remove(segment)
        return begun or segment is not None

    def unmap(self) -> None:
        """Unmap what was made, in a forked child."""
        if self._made is not None:
            self._made.release()

    def reserve_ahead(self, segment: SegmentWriter, lanes: NDArray[np.int64]) -> None:
        """Have rows that lanes of a segment need soon reserved; returns at once."""
        segment.begin_reserving()
        self._reserver.begin(Job(lambda: segment.reserve_ahead(lanes)))

    def unmap_later(self, held: list[Mapping]) -> None:
        """Have the chunks of a segment that its writer has left unmapped in the background: each takes milliseconds.

        The caller must hold no reference to them. Where no thread can do it, they are unmapped at once.
        """
        self._reserver.begin(Job(held.clear))

    def close(self) -> None:
        """Remove the segment that was made ahead, and end the threads."""
        self.discard()
        self._reserver.close()

    def _remove(self, segment: SegmentWriter) -> None:
        segment.close()
        remove_draft(segment.info, segment.lock)
