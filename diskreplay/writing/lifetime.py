"""The lifetime of a writer: one call at a time, none after it is closed, and sealing if it is never closed.

A call deletes the attribute `free` of the lock and sets it again at its end. Deleting an attribute, or finding it
missing, is one operation: no other thread and no signal handler comes in between. A lock of `threading` would take
several times as long. It would also stay locked if a handler raised between its acquisition and the block that releases
it.

A writer that was not closed is sealed when it is garbage collected, or when the interpreter ends.
"""

import _thread
import atexit
import math
import os
import queue
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from functools import wraps
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar, cast

from diskreplay.writing.episode_writer import EpisodeWriter

Method = TypeVar("Method", bound=Callable[..., Any])

_POLL_S = 0.001


class CallLock:
    """The right to use a writer: it can be acquired while the attribute `free` exists.

    `taken`: it was acquired for good by `acquire`.
    """

    __slots__ = ("free", "taken")

    def __init__(self) -> None:
        self.free, self.taken = True, False

    def acquire(self) -> bool:
        """Acquire the lock for good if it is free; else return False.

        A call always releases it: no signal handler can run between the deletion and the block that releases it. Here
        none can run before the lock is `taken`.
        """
        try:
            del self.free; self.taken = True  # noqa: E702  # fmt: skip  # one line, at which tests interrupt it
        except AttributeError:
            return False
        return True

    def release(self) -> None:
        """Release a lock that `acquire` has acquired."""
        self.taken, self.free = False, True


class OnError:
    """Calls a method with the error that a block raised, faster than a generator, which takes a microsecond.

    The method's object refers to this one, which refers to it weakly: a cycle would delay its end until a garbage
    collection.
    """

    __slots__ = ("_method",)

    def __init__(self, method: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
        self._method = method

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call the method with an error."""
        if error is not None and (method := self._method()) is not None:
            method(error)


# The code objects that run while the writer in their variable `self` is in use.
_codes: set[CodeType] = set()


def note_exclusive(method: Callable[..., Any]) -> None:
    """Register a method that acquires its writer's lock itself."""
    _codes.add(method.__code__)


def one_call_at_a_time(method: Method) -> Method:
    """Let one thread at a time call a method of a writer; see `BaseWriter`."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        lock = self._lock
        try:
            del lock.free
        except AttributeError:
            raise self._refusal() from None
        try:
            return method(self, *args, **kwargs)
        finally:
            if self._lock is lock:
                lock.free = True
            else:
                self._release(lock)

    note_exclusive(call)
    return cast(Method, call)


def wait_for_calls(lock: CallLock, timeout_s: float = math.inf) -> bool:
    """Acquire a writer's lock for good; False if a call did not end in time.

    It may be repeated after an interrupt.
    """
    until = time.monotonic() + timeout_s
    while not (lock.acquire() or lock.taken):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def is_inside(writer: Any) -> bool:
    """Return whether this thread is inside a call of a writer: it then runs a signal handler, or a caster."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes and frame.f_locals.get("self") is writer:
            return True
        frame = frame.f_back
    return False


# --- writers that were not closed -------------------------------------------------------------------------------------

# Seconds to wait for a daemon thread that is appending when the interpreter ends.
_TIMEOUT_S = 5.0


class Dropped(NamedTuple):
    """The rest of a dropped writer, and the writer itself if the interpreter ends before it is collected."""

    episode_writer: EpisodeWriter
    lock: CallLock
    writer: weakref.ref[Any]


def seal_when_dropped(writer: Any, episode_writer: EpisodeWriter, lock: CallLock) -> Any:
    """Return a finalizer to ``detach()`` when the writer is closed; it is not ``alive`` after the interpreter's end."""
    return weakref.finalize(writer, _drop, Dropped(episode_writer, lock, weakref.ref(writer)), os.getpid())


# The garbage collector may run at any point, in a thread that holds any lock. So dropped writers go to a queue that
# accepts them even then. Another thread does the work, started by the only call that waits for no other thread.
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
        except RuntimeError:  # the interpreter is ending: `_end` seals it
            pass
    warnings.warn(
        f"a writer of {dropped.episode_writer.path} was not closed, and its segments are sealed only now: close it, or "
        "use it in a with statement",
        ResourceWarning,
        stacklevel=2,
    )


def seal_dropped() -> None:
    """Seal the segments of dropped writers, and wait for it."""
    with _working:
        while True:
            try:
                dropped = _waiting.get_nowait()
            except queue.Empty:
                return
            _seal(dropped)


def _seal(dropped: Dropped) -> None:
    """Seal a writer's segments, and wait for it; if that fails, the next process that opens the store seals them."""
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
    _waiting, _working = queue.SimpleQueue(), _thread.allocate_lock()  # the queued writers are the parent's


os.register_at_fork(after_in_child=_renew)
# Runs before the finalizers of existing writers, which are registered at the first one.
weakref.finalize(Dropped, int)
atexit.register(_end)
