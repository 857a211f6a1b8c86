"""A thread that appends the steps of a rollout buffer to the buffer's store."""

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from diskreplay.buffers.columns import Columns
from diskreplay.buffers.estimates import NextRows
from diskreplay.errors import StorageFull
from diskreplay.sampling.gatherer import HostCopy
from diskreplay.schema.schema import Schema
from diskreplay.workers import Job, Workers
from diskreplay.writing.vector_writer import VectorWriter

# While this number of steps is unwritten, `append` waits, because each unwritten step keeps its rollout in memory.
MOST_WAITING = 32

FLAGS = ("terminated", "truncated")


class Recorder:
    """Appends steps to a store in their order, in a thread.

    If a step cannot be appended, the next call of `check`, `wait` or `close` raises the error. The waiting steps are
    dropped, because their episodes would lack the failed step. After the error was raised, later steps go to a new
    writer. At exit, the waiting steps are written.

    Concurrency: only one thread may call the methods.
    """

    def __init__(self) -> None:
        self._writer: VectorWriter | None = None
        self._host_copy: HostCopy | None = None
        self._waiting: deque[Job[None]] = deque()
        self._error: BaseException | None = None
        self._workers = Workers(1, "diskreplay-rollouts")
        self._pid = os.getpid()
        _alive.add(self)

    def append(
        self, schema: Schema, rows: Columns, next_rows: NextRows | None, new_writer: Callable[[], VectorWriter]
    ) -> None:
        """Let the thread append a step of each environment.

        `rows` has the steps' fields by path, (num_envs, ...) each. `next_rows` has the next observations of some
        environments. The tensors must not change before `wait` returns. `new_writer` makes a writer for the first step,
        and for the first step after a failure.
        """
        self._forget_parents()
        if self._host_copy is None:  # the device is known from the first step
            self._host_copy = HostCopy(rows["reward"].device)
        if self._writer is None:
            self._writer = new_writer()
            self._writer.report_cuts_to(self._leave_cut)
        writer, step = self._writer, self._host_copy.later(rows, None if next_rows is None else next_rows[1:])

        def call() -> None:
            if self._error is None:
                try:
                    _write(writer, schema, *step())
                except BaseException as error:
                    self._error = error

        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        job = Job(call)
        self._waiting.append(job)
        self._workers.begin(job)

    def wait(self) -> None:
        """Wait until all steps are in the store, or raise the error of a failed step."""
        self._forget_parents()
        while self._waiting:
            self._waiting[0].result()
            self._waiting.popleft()
        self.check()

    def check(self) -> None:
        """If a step failed, raise the error. Each error is raised once."""
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
        try:
            self.wait()
        finally:
            self._workers.close()

    def _forget_parents(self) -> None:
        """In a forked child, forget the waiting steps: the parent writes these steps."""
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._waiting.clear()

    def _leave_cut(self, lane: int) -> None:
        """Do nothing when the writer cuts an episode, because the buffer itself warns of the cut."""


def _write(writer: VectorWriter, schema: Schema, rows: Columns, next_rows: tuple[torch.Tensor, Columns] | None) -> None:
    arrays = {path: row.cpu().numpy() for path, row in rows.items()}
    values = {part: schema.unflatten(part, arrays) for part in ("obs", "action", "reward")}
    values |= schema.unflatten("extra", arrays)
    values |= {name: arrays[name] != 0 for name in FLAGS}
    if next_rows is None:
        writer.append(**values)
        return
    lanes, final = next_rows[0].cpu().numpy(), next_rows[1]
    following = {path: arrays[path].copy() for path in final}
    for path, obs in final.items():
        following[path][lanes] = obs.cpu().numpy()
    mask = np.zeros(writer.num_envs, np.bool_)
    mask[lanes] = True
    writer.append(**values, next_obs=schema.unflatten("obs", following), mask=mask)
    writer.append(**values, mask=~mask)


_alive: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


# Exit handlers run in reverse order of registration. The imports above have registered the handlers of writers and
# threads, so this handler runs before those handlers.
@atexit.register
def _wait_for_all() -> None:
    for recorder in list(_alive):
        recorder.wait()
