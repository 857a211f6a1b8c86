"""The program of the child process of `BackgroundCompaction`: it merges segments of one store.

To leave time to other processes, the process sleeps often instead of running at a low priority. On a busy machine, a
process of low priority might get no processor time while it holds the store lock. Every writer would wait for the lock.
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

# The process rests after _WORK_S seconds of processor time. A rest takes _REST times this processor time, or as long as
# the work before it if the work took longer. A rest takes at most _MOST_S seconds.
_WORK_S, _REST, _MOST_S = 0.01, 3.0, 1.0
# During a rest, the process checks every _SLICE_S seconds whether it has to stop.
_SLICE_S = 0.05
# Rests become shorter with each segment that any writer has begun since the last check of the parent process. From
# _BEHIND segments on, this process does not rest.
_BEHIND = 1024


class Stopped(Exception):
    """Raised in this process when the parent process is gone, or has stopped the merge."""


class Pace:
    """Call this object often: it sleeps if a rest is due, and raises Stopped if the process has to stop.

    The process has to stop after a call of `stop`, or when the process with the id ``parent`` is gone. ``since`` is the
    value of the counter `layout.NEXT_SEGMENT` at the parent's last check.
    """

    def __init__(self, counters: StoreCounters, parent: int, since: int) -> None:
        self._is_stopped = False
        self._counters, self._parent, self._since = counters, parent, since
        self._begin_work()

    def stop(self, *_: object) -> None:
        """Make the next call raise Stopped. This is a signal handler, so it takes no lock."""
        self._is_stopped = True

    def _begin_work(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()

    def __call__(self) -> None:
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
    """Merge segments of the store in the working directory if enough are due; return whether any were merged.

    The work ends when the process with the id ``parent`` is gone. A store with another UUID is not changed. For
    ``since`` see `Pace`.
    """
    root = read_root(Path.cwd())
    if root.uuid != uuid or not root.compacts:
        return False
    counters = root.counters(writable=True)
    pace = Pace(counters, int(parent), int(since))
    signal.signal(signal.SIGTERM, pace.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the parent may have blocked the signal
    retention = Retention(root, counters)
    retention.look(pace)
    return Compaction(root, counters, retention, root.compression).run_due(pace)


if __name__ == "__main__":
    has_merged = False
    # A later child process tries again after an error, for example if the disk is full or a lock is taken.
    with suppress(Stopped, ReplayError, OSError):
        has_merged = main(*sys.argv[1:])
    sys.exit(MERGED if has_merged else 0)
