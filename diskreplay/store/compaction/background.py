"""Compaction by itself: a thread of a process that writes merges small segments, and keeps out of the way."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

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
# After so many seconds of the processor the thread rests, some times as long: longer where other threads of the process
# take more than this share of a core, with whom it shares Python's lock.
_WORK_S, _BUSY = 0.002, 0.1
_REST_BESIDE_OTHERS, _REST_ALONE = 6.0, 2.0
_LOWEST = 19


class _Stopped(Exception):
    """The store is being closed."""


class _Clocks(NamedTuple):
    """Seconds: those that pass, and those that this process, and this thread, have had a processor."""

    wall: float
    process: float
    thread: float

    @classmethod
    def read(cls) -> "_Clocks":
        return cls(time.monotonic(), time.process_time(), time.thread_time())

    def since(self, before: "_Clocks") -> "_Clocks":
        return _Clocks(*(now - then for now, then in zip(self, before, strict=True)))


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
        self._rested, self._worked_at = _Clocks(0.0, 0.0, 0.0), 0.0

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
                self._wait_s, self._rested = _BETWEEN_S, _Clocks.read()
                self._worked_at = self._rested.wall
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
        """Rest, if it is time for it, at least as long as the work took with its waiting. Raises _Stopped."""
        now = _Clocks.read()
        passed = now.since(self._rested)
        if passed.thread >= _WORK_S:
            is_alone = passed.process - passed.thread <= _BUSY * passed.wall
            rest = passed.thread * (_REST_ALONE if is_alone else _REST_BESIDE_OTHERS)
            self._rested = now
            self._pause(max(rest, now.wall - self._worked_at))
            self._worked_at = time.monotonic()
