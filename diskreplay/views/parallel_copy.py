"""A few threads for what takes one of them long: each copies a part of a large batch. Kernels release Python's lock."""

import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from diskreplay.kernels.table import Kernel
from diskreplay.workers import Job, Workers

PART = 512 << 10
"""Bytes from which on a part is worth it: another thread takes a tenth of a millisecond to wake up."""

MOST_THREADS = 4
"""Threads that copy one batch, at the most: as many as most memory has bandwidth for.

On a server with 16 processors, one copies 8 GB/s, two 13, four 18 and eight 21.
"""


class CopyThreads:
    """So many threads, beside the one that asks, for parts of what it copies. They start when they are needed.

    ``least`` is the number of bytes from which on they are worth it; ``jobs`` is empty unless an interrupt came while
    they copied. One thread asks.
    """

    def __init__(self, count: int) -> None:
        self.count, self.least = count, 2 * PART
        self._workers = Workers(count, "diskreplay-copy")
        self.jobs: list[Job[int]] = []

    def parts(self, nbytes: int) -> int:
        """Return in how many parts it is worth it to copy so many bytes: 1 below ``least``."""
        return max(1, min(self.count + 1, nbytes // PART))

    def copy(self, count: int, size: int, work: Callable[[int, int], int]) -> int:
        """Do the items 0 to below `size` in so many parts, all but the first in other threads where these have time.

        ``work(first, stop)`` returns the first item that it could not do, or -1; so does this. When it returns, nobody
        works any more. After an interrupt somebody may: `settle` before anything that `work` uses is changed. Of what
        it uses, `work` holds references.
        """
        self.settle()
        bounds = [part * size // count for part in range(count + 1)]
        self.jobs = [Job(partial(work, first, stop)) for first, stop in pairwise(bounds[1:])]
        try:
            for job in self.jobs:
                self._workers.begin(job)
            bad = work(0, bounds[1])
        finally:
            for job in self.jobs:
                job.withdraw()
        every = [bad, *(job.result() for job in self.jobs)]
        self.jobs = []
        return next((bad for bad in every if bad >= 0), -1)

    def settle(self) -> None:
        """Return when nobody works any more: an interrupt may have kept `copy` from waiting for that."""
        for job in self.jobs:
            job.withdraw()
        self.jobs = []

    def close(self) -> None:
        """End the threads."""
        self._workers.close()


def copying(held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> Callable[[int, int], int]:
    """Return the work of threads: a kernel that is called with these arguments, the first item and the last but one.

    A thread that an interrupt leaves copying keeps `held` alive: all that the kernel has addresses of.
    """
    return partial(_call, held, kernel, *arguments)


def _call(_held: tuple[Any, ...], kernel: Kernel, *arguments: Any) -> int:
    return int(kernel(*arguments))


def copy_threads(beside: int) -> CopyThreads | None:
    """Return threads that copy; None where the process may use no other processor than the one that asks.

    So many processors are left to what goes on beside the copying.
    """
    count = min(MOST_THREADS, len(os.sched_getaffinity(0)) - beside) - 1
    return CopyThreads(count) if count > 0 else None
