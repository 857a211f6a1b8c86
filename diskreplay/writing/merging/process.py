"""The process that merges what is due of a store, and keeps out of the way; see `BackgroundCompaction`.

It has the priority of its parent, and rests. A process of low priority gets no processor time on a busy machine. While
it holds the store lock, or a lock of the file system, every writer would wait.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from diskreplay.errors import ReplayError
from diskreplay.retention.retention import Retention
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.writing.merging.background import MERGED
from diskreplay.writing.merging.compaction import Compaction

# After so many seconds of the processor it rests, some times as long, and so many seconds at most.
_WORK_S, _REST, _MOST_S = 0.01, 3.0, 1.0
# Seconds after which one that rests looks whether it has to stop.
_SLICE_S = 0.05
# It rests less, and at last not at all, as so many segments were begun since the last look: else it would fall behind.
_BEHIND = 1024


class Stopped(Exception):
    """Who wanted it is gone, or wants it no more."""


class Pace:
    """How fast a process works: call it often. It rests; it raises Stopped after `stop`, or when ``parent`` is gone.

    ``since`` is the number that the next segment had when segments were looked at last.
    """

    def __init__(self, counters: StoreCounters, parent: int, since: int) -> None:
        self._is_stopped = False
        self._counters, self._parent, self._since = counters, parent, since
        self._begin_work()

    def stop(self, *_: object) -> None:
        """Stop soon. A signal's handler: it takes no lock."""
        self._is_stopped = True

    def _begin_work(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()

    def __call__(self) -> None:
        """Rest, if it is time for it, at least as long as the work took with its waiting; less if it falls behind."""
        worked = time.process_time() - self._cpu_s
        if worked >= _WORK_S:
            begun = self._counters.peek(layout.NEXT_SEGMENT) - self._since
            rest = max(worked * _REST, time.monotonic() - self._wall_s)
            self._rest(min(rest, _MOST_S) * max(0.0, 1.0 - begun / _BEHIND))
            self._begin_work()
        if self._has_to_stop():
            raise Stopped

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._has_to_stop():
            time.sleep(min(left, _SLICE_S))

    def _has_to_stop(self) -> bool:
        return self._is_stopped or os.getppid() != self._parent


def main(uuid: str, parent: str, since: str) -> bool:
    """Merge segments of the store in the working directory, if that pays; return whether it merged any.

    It stops when the process with the number ``parent`` is gone. Another store than that with this ``uuid`` is left
    alone. For ``since`` see `Pace`.
    """
    root = read_root(Path.cwd())
    if root.uuid != uuid or not root.compacts:
        return False
    counters = root.counters(writable=True)
    pace = Pace(counters, int(parent), int(since))
    signal.signal(signal.SIGTERM, pace.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # as the parent's, it may be blocked
    retention = Retention(root, counters)
    retention.look(pace)
    return Compaction(root, counters, retention, root.compression).run_due(pace)


if __name__ == "__main__":
    has_merged = False
    # A full disk, another process, a store that is gone: the next one has more luck.
    with suppress(Stopped, ReplayError, OSError):
        has_merged = main(*sys.argv[1:])
    sys.exit(MERGED if has_merged else 0)
