"""Compaction by itself: a thread of a process that writes merges small segments, and keeps out of the way."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from diskreplay.errors import ReplayError
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters

if TYPE_CHECKING:
    from diskreplay.store.compaction.compaction import Compaction

# With fewer segments there is nothing that pays.
LEAST_SEGMENTS = 8
# Seconds after which segments are looked at first, and then at the least: who writes for a moment merges nothing.
_FIRST_S, _BETWEEN_S = 5.0, 1.0
# So many segments have to be sealed before they are looked at again.
_SEALED = 32
# Of its time the thread works a part, and rests so many times as long: it shares Python's lock with who appends.
_REST, _WORK_S = 6.0, 0.002
_LOWEST = 19


class _Stopped(Exception):
    """The store is being closed."""


class BackgroundCompaction:
    """Merges segments of one store, now and then, in a thread that lives while there may be something to merge.

    Concurrency: any thread of the process that made it.
    """

    def __init__(self, make: "Callable[[], Compaction]", counters: StoreCounters, *, compresses: bool) -> None:
        """Merge by what ``make`` returns, which is called when there may be something to merge."""
        self._make, self._counters, self._compresses = make, counters, compresses
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._sealed = _SEALED  # those that are there may be many
        self._is_stopped = False
        self._wait_s = _FIRST_S
        self._rested_at = 0.0

    def note_sealed(self) -> None:
        """Note that segments were sealed."""
        with self._condition:
            self._sealed += 1
            is_due = self._sealed > _SEALED and (self._compresses or self._has_many)
            if is_due and not self._is_stopped and self._thread is None:
                # A daemon: what an interpreter that ends leaves half made is removed by the next who opens the store.
                thread = threading.Thread(target=self._run, name="diskreplay-compaction", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending
                    thread.start()
                    self._thread = thread

    @property
    def _has_many(self) -> bool:
        """Whether there may be enough segments to merge."""
        return self._counters.peek(layout.NEXT_SEGMENT) - self._counters.peek(layout.FIRST_LIVE) >= LEAST_SEGMENTS

    def stop_soon(self) -> None:
        """Stop, and wait for nothing; what is half made is removed."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()

    def stop(self) -> None:
        """Stop, and wait until nothing is being merged."""
        self.stop_soon()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        with suppress(_Stopped):
            goes_on = True
            while goes_on:
                self._pause(self._wait_s)
                self._wait_s, self._rested_at = _BETWEEN_S, time.monotonic()
                with self._condition:
                    self._sealed = 0
                with suppress(ReplayError, OSError):  # a full disk, another process, a store that is gone: next time
                    compaction = self._make()
                    while compaction.run_due(self._rest):
                        pass
                with self._condition:
                    goes_on = self._sealed > _SEALED
                    self._thread = self._thread if goes_on else None

    def _pause(self, seconds: float) -> None:
        """Wait. Raises _Stopped."""
        with self._condition:
            if self._condition.wait_for(lambda: self._is_stopped, seconds):
                raise _Stopped

    def _rest(self) -> None:
        """Rest, if it is time for it. Raises _Stopped."""
        worked_s = time.monotonic() - self._rested_at
        if worked_s >= _WORK_S:
            self._pause(_REST * worked_s)
            self._rested_at = time.monotonic()
