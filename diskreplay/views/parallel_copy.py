"""Two threads for what takes one of them long: each copies half of a large batch. Kernels release Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock

SHARED = 1 << 20
"""Bytes from which on it is worth it: the other thread takes a tenth of a millisecond to wake up."""


def helping_thread() -> ThreadPoolExecutor | None:
    """Return a thread for halves, None where the process may use one processor only."""
    return ThreadPoolExecutor(1, "diskreplay-copy") if len(os.sched_getaffinity(0)) > 1 else None


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
        """Return when the call is not being made, and never will be by another thread, whatever interrupts."""
        interrupt: BaseException | None = None
        while not self._withdrawn:
            try:
                with self._lock:
                    self._withdrawn = True
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def result(self) -> int:
        """Return what the call returned; make it now if nobody has."""
        if self._error is not None:
            raise self._error
        return self._result if self._done else self._call()


def in_halves(helper: Executor | None, size: int, work: Callable[[int, int], int]) -> int:
    """Do the items 0 to below `size`, half of them in another thread where there is one and it has time.

    ``work(first, stop)`` returns the first item that it could not do, or -1; so does this. When it returns or raises,
    nobody works any more: not after an interrupt, and not where the thread could not be started.
    """
    if helper is None:
        return work(0, size)
    half = size // 2
    job = _Job(partial(work, half, size))
    try:
        with suppress(RuntimeError):  # there can be no more threads, or the interpreter is shutting down
            helper.submit(job.run)
        bad = work(0, half)
    finally:
        job.withdraw()
    bad_of_other = job.result()
    return bad if bad >= 0 else bad_of_other
