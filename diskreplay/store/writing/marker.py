"""The background thread that brings what writers published to the disk, so that no append waits for it."""

import threading
import time
from collections.abc import Iterable
from typing import Protocol

from diskreplay.format.root import Root
from diskreplay.format.segment_writer import SegmentWriter

Durability = str | float

DEFAULT_DURABILITY_S = 5.0
_MOST_SECONDS = 1_000_000


def check_durability(durability: Durability) -> Durability:
    """Return ``"none"``, ``"episode"`` or a number of seconds; ValueError for anything else."""
    if durability in ("none", "episode"):
        return durability
    if isinstance(durability, (int, float)) and not isinstance(durability, bool) and 0 < durability <= _MOST_SECONDS:
        return float(durability)
    raise ValueError(
        f'durability is "none", "episode" or a number of seconds between marks, at most {_MOST_SECONDS:,}, not '
        f"{durability!r}"
    )


class Marked(Protocol):
    """The open segments of a writer, as the thread sees them."""

    def fail(self, error: Exception) -> None:
        """Take note of what went wrong: the writer's next call raises it."""

    @property
    def open(self) -> Iterable[SegmentWriter]:
        """The segments at this moment; asked for by any thread."""


class Marker:
    """Marks the segments of writers, of each every so many seconds.

    Concurrency: any thread of the process that made it. Its own thread lives while there are writers.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._condition = threading.Condition()
        self._every: dict[Marked, float] = {}
        self._due: dict[Marked, float] = {}
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, segments: Marked, every_s: float) -> None:
        """Begin to mark what is published in the segments of a writer."""
        with self._condition:
            self._every[segments], self._due[segments] = every_s, time.monotonic() + every_s
            if self._thread is None:
                # A daemon: an interpreter that ends without close() has what was marked until then.
                thread = threading.Thread(target=self._run, name="diskreplay-marker", daemon=True)
                try:
                    thread.start()
                except BaseException:  # the system has no thread left
                    del self._every[segments], self._due[segments]
                    raise
                self._thread = thread
            else:
                self._condition.notify_all()

    def remove(self, segments: Marked) -> None:
        """Mark them no more; the thread ends with the last of them. Removing twice is fine."""
        with self._condition:
            self._every.pop(segments, None)
            self._due.pop(segments, None)
            thread = None if self._due else self._thread
            self._condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self) -> None:
        """Wait until no segment that its writer has left is being marked: whoever seals it may begin then."""
        with self._busy:
            pass

    def _run(self) -> None:
        while (segments := self._next()) is not None:
            self._mark(segments)

    def _next(self) -> Marked | None:
        """Wait for the segments that are due next; None: there are none any more, and the thread has to end."""
        with self._condition:
            while self._due:
                segments = min(self._due, key=self._due.__getitem__)
                left = self._due[segments] - time.monotonic()
                if left <= 0:
                    self._due[segments] = time.monotonic() + self._every[segments]
                    return segments
                self._condition.wait(left)
            self._thread = None
            return None

    def _mark(self, segments: Marked) -> None:
        try:
            if not segments.open:
                return
            self._root.check_still_there()
            for segment in segments.open:
                with self._busy:
                    # Its writer may have left it meanwhile: then it belongs to whoever seals it.
                    if any(segment is other for other in segments.open):
                        segment.mark()
        except Exception as error:  # also what nobody foresaw: rows that are not marked must not stay untold
            segments.fail(self._root.reason(error))
