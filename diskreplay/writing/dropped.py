"""What becomes of writers that nobody closed: they are sealed when they are collected, or when the interpreter ends."""

import _thread
import atexit
import os
import queue
import warnings
import weakref
from typing import Any, NamedTuple

from diskreplay.writing.call_lock import CallLock, wait_for_calls
from diskreplay.writing.episode_writer import EpisodeWriter

# A daemon thread may be in the middle of an append when the interpreter ends.
_TIMEOUT_S = 5.0


class Dropped(NamedTuple):
    """What is left of a writer, and the writer where the interpreter ends before that is gone."""

    episode_writer: EpisodeWriter
    lock: CallLock
    writer: weakref.ref[Any]


def seal_when_dropped(writer: Any, episode_writer: EpisodeWriter, lock: CallLock) -> Any:
    """Return what to ``detach()`` when the writer is closed; it is not ``alive`` where the interpreter has ended it."""
    return weakref.finalize(writer, _drop, Dropped(episode_writer, lock, weakref.ref(writer)), os.getpid())


# The collector may come in the middle of anything, in a thread that holds any lock: what it finds is put on a queue
# that takes it even then, and another thread does the work, started by the only call that waits for no other thread.
_waiting: queue.SimpleQueue[Dropped] = queue.SimpleQueue()
_working = _thread.allocate_lock()
_ending = False


def _drop(dropped: Dropped, owner: int) -> None:
    if os.getpid() != owner:
        return  # the copy in a forked child
    if _ending:
        _seal(dropped)
    else:
        _waiting.put(dropped)
        try:
            _thread.start_new_thread(seal_dropped, ())
        except RuntimeError:  # the interpreter is ending: `_end` does it
            pass
    warnings.warn(
        f"a writer of {dropped.episode_writer.path} was not closed, and its segments are sealed only now: close it, or "
        "use it in a with statement",
        ResourceWarning,
        stacklevel=2,
    )


def seal_dropped() -> None:
    """Seal what dropped writers have left, and wait for that."""
    with _working:
        while True:
            try:
                dropped = _waiting.get_nowait()
            except queue.Empty:
                return
            _seal(dropped)


def _seal(dropped: Dropped) -> None:
    """Seal what a writer has, and wait for it; where that fails, the next process that opens the store does it."""
    writer, path = dropped.writer(), dropped.episode_writer.path
    if writer is not None:
        writer.refuse_calls()  # of daemon threads
    if not wait_for_calls(dropped.lock, _TIMEOUT_S):
        return
    for finish in (dropped.episode_writer.close, dropped.episode_writer.drain):
        try:
            finish()
        except Exception as error:
            warnings.warn(f"a segment of {path} is not sealed: {error}", ResourceWarning, stacklevel=2)


def _end() -> None:
    global _ending
    _ending = True
    seal_dropped()


def _renew() -> None:
    global _waiting, _working
    _waiting, _working = queue.SimpleQueue(), _thread.allocate_lock()  # what waits is the parent's


os.register_at_fork(after_in_child=_renew)
# Called before the finalizers of writers that are still there, which register at the first one.
weakref.finalize(Dropped, int)
atexit.register(_end)
