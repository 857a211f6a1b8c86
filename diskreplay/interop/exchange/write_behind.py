"""Writing in a thread, while the next episodes are collected."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self


class WriteBehind:
    """Does one piece of work after the other in a thread, as a context manager. Used by one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, work: Callable[[], None]) -> None:
        """Wait for the work before, raising what it raised, and begin another one."""
        self.wait()
        self._work = self._thread.submit(work)

    def wait(self) -> None:
        """Wait for the work that was begun; raises what it raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()
