"""Writing in a thread, while the next episodes are collected."""

from collections.abc import Callable
from typing import Self

from diskreplay.workers import Job, Workers


class WriteBehind:
    """Does one piece of work after the other in a thread, as a context manager. Used by one thread."""

    def __init__(self) -> None:
        self._workers = Workers(1, "diskreplay-export")
        self._work: Job[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()

    def begin(self, work: Callable[[], None]) -> None:
        """Wait for the work before, raising what it raised, and begin another one."""
        self.wait()
        self._work = self._workers.begin(Job(work))

    def wait(self) -> None:
        """Wait for the work that was begun; raises what it raised."""
        if self._work is not None:
            work = self._work
            try:
                work.result()
            except Exception:
                self._work = None
                raise
            self._work = None
