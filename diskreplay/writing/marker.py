"""The background thread that marks segments: it makes published rows durable, so that no append waits for the disk."""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import FileSystemSync
from diskreplay.segments.segment_writer import SegmentWriter, mark_together

Durability = str | float

DEFAULT_DURABILITY_S = 5.0
_MOST_SECONDS = 1_000_000
# If more segments than this are marked at once, two syncs of the complete file system replace the syncs of single
# files. The files of fewer segments are synced one by one, without waiting for the writes of other programs.
_MOST_ALONE = 4


def check_durability(durability: Durability) -> Durability:
    if durability in ("none", "episode"):
        return durability
    if isinstance(durability, (int, float)) and not isinstance(durability, bool) and 0 < durability <= _MOST_SECONDS:
        return float(durability)
    raise ValueError(
        f'durability is "none", "episode" or a number of seconds between marks, at most {_MOST_SECONDS:,}, not '
        f"{durability!r}"
    )


class MarkedWriter(Protocol):
    def fail(self, error: Exception) -> None:
        """Record an error: the writer's next call raises it."""

    @property
    def open(self) -> Iterable[SegmentWriter]:
        """The writer's open segments; any thread may read this property."""


@dataclass(eq=False)
class _LeftSegment:
    """An unsealed segment to which its writer appends no more.

    The segment is marked every ``every_s`` seconds. ``due`` is the time of the next mark by `time.monotonic`.
    """

    segment: SegmentWriter
    writer: MarkedWriter
    every_s: float
    due: float


class Marker:
    """Writes marks for the segments of writers, at an interval in seconds that each writer chooses.

    A segment is left when its writer appends no more to it. A segment that was left is still marked, until it is
    sealed.

    Concurrency: any thread of the process that made the `Marker`. The marking thread runs while there are writers, or
    unsealed segments that writers have left.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._condition = threading.Condition()
        self._every: dict[MarkedWriter, float] = {}
        self._due: dict[MarkedWriter, float] = {}
        self._left: dict[int, _LeftSegment] = {}  # {segment number: segment}
        self._busy = threading.RLock()  # held while segments are being marked
        self._thread: threading.Thread | None = None
        self._file_system: FileSystemSync | None = None  # None if the thread is not running

    def add(self, segments: MarkedWriter, every_s: float) -> None:
        with self._condition:
            self._file_system = self._file_system or FileSystemSync(str(self._root.folder))
            self._every[segments], self._due[segments] = every_s, time.monotonic() + every_s
            if self._thread is None:
                # A daemon thread: if the interpreter ends without close(), only the rows of the last mark are durable.
                thread = threading.Thread(target=self._run, name="diskreplay-marker", daemon=True)
                try:
                    thread.start()
                except BaseException:  # the system allows no more threads
                    del self._every[segments], self._due[segments]
                    self._file_system = None
                    raise
                self._thread = thread
            else:
                self._condition.notify_all()

    def remove(self, segments: MarkedWriter) -> None:
        """Stop marking a writer's open segments, and wait for marks in progress. The method may be called twice.

        Segments that the writer has left are still marked, until `forget`.
        """
        with self._condition:
            self._every.pop(segments, None)
            self._due.pop(segments, None)
        self.wait()
        self._end_if_idle()

    def leave(self, segments: MarkedWriter, segment: SegmentWriter) -> None:
        """Mark a segment until `forget`, although its writer appends no more to it.

        Call this for a writer that was added and not removed yet.
        """
        with self._condition:
            if segments in self._every:  # after a failed mark, it is unknown which rows are durable
                left = _LeftSegment(segment, segments, self._every[segments], self._due[segments])
                self._left[segment.number] = left

    def has_left(self, number: int) -> bool:
        return number in self._left

    def has_failed(self, number: int) -> bool:
        """Return whether a mark of a left segment failed: the segment must not be sealed by this process."""
        left = self._left.get(number)
        return left is not None and left.segment.has_failed

    def wait(self) -> None:
        """Wait for marks in progress.

        The `Sealer` calls this before it seals segments that writers have left. Marks that begin after the call do not
        disturb the sealing.
        """
        with self._busy:
            pass

    def forget(self, numbers: Collection[int]) -> list[int]:
        """Stop marking segments that are sealed, or whose locks are about to be released.

        Return those of the numbers for which `has_failed` was true.
        """
        with self._busy, self._condition:
            failed = [number for number in numbers if self.has_failed(number)]
            for number in numbers:
                self._left.pop(number, None)
        self._end_if_idle()
        return failed

    def _end_if_idle(self) -> None:
        """Wait until the marking thread has ended, or until there is a segment to mark."""
        with self._condition:
            thread = self._thread
            self._condition.notify_all()
            if thread is threading.current_thread():
                return
            self._condition.wait_for(lambda: self._has_work or self._thread is not thread or thread is None)
            has_ended = self._thread is not thread
        if has_ended and thread is not None:
            thread.join()

    @property
    def _has_work(self) -> bool:
        return bool(self._due or self._left)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            self._mark(due)

    def _next(self) -> list[MarkedWriter] | None:
        """Wait until a mark is due, and return the writers whose marks are due; None if nothing is left to mark.

        The list is empty if marks are due only for segments that writers have left.
        """
        with self._condition:
            while self._has_work:
                left = [one.due for one in self._left.values() if one.segment.has_unmarked]
                moments = [*self._due.values(), *left]
                now = time.monotonic()
                if moments and min(moments) <= now:
                    due = [writer for writer, moment in self._due.items() if moment <= now]
                    self._due |= {writer: now + self._every[writer] for writer in due}
                    return due
                self._condition.wait(min(moments) - now if moments else None)
            self._thread = self._file_system = None
            self._condition.notify_all()
            return None

    def _mark(self, due: Sequence[MarkedWriter]) -> None:
        writers: dict[SegmentWriter, MarkedWriter] = {}
        with self._busy:
            try:
                with self._condition:
                    left = [left for left in self._left.values() if left.segment.has_unmarked]
                    for one in left:
                        # `due` moves on even if this mark finds no room on the disk.
                        one.due = time.monotonic() + one.every_s
                    # A segment that a writer leaves from now on is not sealed before these marks end: see `wait`.
                writers |= {segment: writer for writer in due for segment in writer.open if segment.has_unmarked}
                writers |= {one.segment: one.writer for one in left}
                if writers:
                    self._root.check_still_there()
                    self._fail(writers, self._mark_each(list(writers)))
            except Exception as error:  # any error: the writer must learn that its rows are not marked
                self._fail(writers, dict.fromkeys(writers, error))

    def _mark_each(self, segments: Sequence[SegmentWriter]) -> dict[SegmentWriter, Exception]:
        if len(segments) > _MOST_ALONE and self._file_system is not None:
            return mark_together(segments, self._file_system.sync)
        failed: dict[SegmentWriter, Exception] = {}
        for segment in segments:
            try:
                segment.mark()
            except Exception as error:
                failed[segment] = error
        return failed

    def _fail(self, writers: Mapping[SegmentWriter, MarkedWriter], failed: Mapping[SegmentWriter, Exception]) -> None:
        for segment, error in failed.items():
            reason = self._root.reason(error)
            has_left = isinstance(reason, FileNotFoundError) and self._left.pop(segment.number, None) is not None
            if not has_left:  # a segment that its writer has left may be sealed and evicted
                writers[segment].fail(reason)
