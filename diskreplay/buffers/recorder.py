"""Steps of a rollout buffer on their way to its store, in a thread."""

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from diskreplay.errors import StorageFull
from diskreplay.store.writing.vector_writer import VectorWriter
from diskreplay.workers import Job, Workers

# The trainer waits for the disk when this many steps are waiting: each keeps the memory of its rollout.
MOST_WAITING = 32


class Recorder:
    """Appends steps to a store in their order, in a thread; a failure there is raised by the next call.

    Steps behind a failed one are dropped, since they would leave a gap in their lanes. Later steps go to another
    writer. Steps that are waiting are written before the interpreter ends.

    Concurrency: one thread.
    """

    def __init__(self) -> None:
        self._writer: VectorWriter | None = None
        self._waiting: deque[Job[None]] = deque()
        self._error: BaseException | None = None
        self._workers = Workers(1, "diskreplay-rollouts")
        self._pid = os.getpid()
        _alive.add(self)

    def append(self, step: Callable[[VectorWriter], None], new_writer: Callable[[], VectorWriter]) -> None:
        """Have a step appended by a call with the writer; `new_writer` returns one for the first step."""
        self._forget_parents()
        if self._writer is None:
            self._writer = new_writer()
            self._writer.tell_of_cuts(self._leave_cut)
        writer = self._writer

        def call() -> None:
            if self._error is None:
                try:
                    step(writer)
                except BaseException as error:
                    self._error = error

        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        job = Job(call)
        self._waiting.append(job)
        self._workers.begin(job)

    def wait(self) -> None:
        """Wait until all steps are in the store; raise the failure of one."""
        self._forget_parents()
        while self._waiting:
            self._waiting[0].result()
            self._waiting.popleft()
        self.check()

    def check(self) -> None:
        """Raise the failure of a step, once."""
        if self._error is None:
            return
        for job in self._waiting:
            job.result()
        self._waiting.clear()
        error, self._error = self._error, None
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(StorageFull):
                writer.close()
        raise error

    def close(self) -> None:
        """Wait as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._workers.close()

    def _forget_parents(self) -> None:
        """In a forked process, forget the steps that the parent's thread appends."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._waiting.clear()

    def _leave_cut(self, lane: int) -> None:
        """Leave it to the buffer to warn of an observation that does not continue its episode."""


_alive: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


# Handlers run in reverse order: this one runs before the handlers of writers and threads, which are imported above.
@atexit.register
def _wait_for_all() -> None:
    """Wait for the steps of buffers that are not closed."""
    for recorder in list(_alive):
        recorder.wait()
