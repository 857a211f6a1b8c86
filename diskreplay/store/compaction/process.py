"""The process that merges what is due of a store, and keeps out of the way; see `BackgroundCompaction`."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from diskreplay.errors import ReplayError
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.root import read_root
from diskreplay.store.compaction.compaction import Compaction
from diskreplay.store.retention.retention import Retention

# After so many seconds of the processor it rests, some times as long.
_WORK_S, _REST = 0.01, 2.0
# It rests less, and at last not at all, as so many segments are begun since it looked: else it would fall behind.
_BEHIND = 1024
_LOWEST = 19


class Stopped(Exception):
    """Who wanted it is gone, or wants it no more."""


class Pace:
    """How fast a process works: call it often. It rests, and raises Stopped as soon as ``parent`` is gone."""

    def __init__(self, counters: StoreCounters, parent: int) -> None:
        self.stopped = threading.Event()
        self._counters, self._parent = counters, parent
        self.look()

    def look(self) -> None:
        """Note that segments are looked at now."""
        self._looked_at = self._counters.peek(layout.NEXT_SEGMENT)
        self._begin_work()

    def _begin_work(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()

    def __call__(self) -> None:
        """Rest, if it is time for it, at least as long as the work took with its waiting; less if it falls behind."""
        worked = time.process_time() - self._cpu_s
        if worked >= _WORK_S:
            begun = self._counters.peek(layout.NEXT_SEGMENT) - self._looked_at
            rest = max(worked * _REST, time.monotonic() - self._wall_s)
            self.stopped.wait(rest * max(0.0, 1.0 - begun / _BEHIND))
            self._begin_work()
        if self.stopped.is_set() or os.getppid() != self._parent:
            raise Stopped


def main(path: str, parent: str) -> None:
    """Merge segments of a store until nothing is due, or the process with the number ``parent`` is gone."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
    root = read_root(Path(path))
    counters = root.counters(writable=True)
    pace = Pace(counters, int(parent))
    signal.signal(signal.SIGTERM, lambda *_: pace.stopped.set())
    # One at a time makes a compaction: what it knows of segments is of one look.
    while Compaction(root, counters, Retention(root, counters), root.compression).run_due(pace):
        pace.look()


if __name__ == "__main__":
    # A full disk, another process, a store that is gone: the next one has more luck.
    with suppress(Stopped, ReplayError, OSError):
        main(*sys.argv[1:])
