"""A few threads for what takes one of them long: each copies a part of a large batch. Kernels release Python's lock."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from threading import Lock

PART = 512 << 10
"""Bytes from which on a part is worth it: another thread takes a tenth of a millisecond to wake up."""

MOST_THREADS = 4
"""Threads that copy one batch, at the most: as many as most memory has bandwidth for."""


class CopyThreads:
    """So many threads, beside the one that asks, for parts of what it copies. They start when they are needed.

    ``least`` is the number of bytes from which on they are worth it.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._threads = ThreadPoolExecutor(count, "diskreplay-copy")

    def parts(self, nbytes: int) -> int:
        """Return in how many parts it is worth it to copy so many bytes: 1 below ``least``."""
        return max(1, min(self.count + 1, nbytes // PART))

    def begin(self, call: Callable[[], object]) -> None:
        """Have one of them make a call, unless there can be no more threads, or the interpreter is ending."""
        with suppress(RuntimeError):
            self._threads.submit(call)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def copy_threads(beside: int) -> CopyThreads | None:
    """Return threads that copy; None where the process may use no other processor than the one that asks.

    So many processors are left to what goes on beside the copying.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - beside) - 1
    return CopyThreads(count) if count > 0 else None


class _Job:
    """A call that another thread makes, if it gets to it before this one takes it back."""

    def __init__(self, call: Callable[[], int]) -> None:
        self._call = call
        self._lock = Lock()
        self._done = self._withdrawn = False
        self._error: BaseException | None = None
        self._result = -1

    def run(self) -> None:
        """Make the call, in the other thread."""
        with self._lock:
            if self._withdrawn:
                return
            try:
                self._result = self._call()
            except BaseException as error:
                self._error = error
            self._done = True

    def withdraw(self) -> None:
        """Return when the call is not being made, and never will be by another thread; it may be repeated."""
        with self._lock:
            self._withdrawn = True

    def result(self) -> int:
        """Return what the call returned; make it now if nobody has."""
        if self._error is not None:
            raise self._error
        return self._result if self._done else self._call()


def in_parts(threads: CopyThreads, count: int, size: int, work: Callable[[int, int], int]) -> int:
    """Do the items 0 to below `size` in so many parts, all but the first in other threads where these have time.

    ``work(first, stop)`` returns the first item that it could not do, or -1; so does this. When it returns or raises,
    nobody works any more: not after an interrupt, and not where a thread could not be started.
    """
    bounds = [part * size // count for part in range(count + 1)]
    jobs = [_Job(partial(work, first, stop)) for first, stop in pairwise(bounds[1:])]
    try:
        for job in jobs:
            threads.begin(job.run)
        bad = work(0, bounds[1])
    finally:
        _withdraw(jobs)
    every = [bad, *(job.result() for job in jobs)]
    return next((bad for bad in every if bad >= 0), -1)


def _withdraw(jobs: Sequence[_Job]) -> None:
    """Withdraw all of them, whatever interrupts; raise the last interrupt when that is done."""
    left, interrupt = list(jobs), list[BaseException]()
    while left:
        try:
            left[-1].withdraw()
            left.pop()
        except BaseException as error:
            interrupt = [error]
    if interrupt:
        raise interrupt[0]
