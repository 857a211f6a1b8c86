"""The lifetime of a writer: one call at a time, no call after `close`, and seals for writers that were not closed.

The segments of a writer that was not closed are sealed when the writer is garbage collected, or when the interpreter
ends.
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
    """The lock of a writer: it is free while the attribute `free` exists.

    `taken` is True from `acquire` until `release`. Methods of the writer delete `free` themselves, and leave `taken`
    False.

    A call of a writer deletes `free`, and sets it again at the end of the call. No other thread and no signal handler
    can interrupt the deletion of an attribute. A lock of `threading` would be several times slower. It could also stay
    taken, if a signal handler raised right after the lock was acquired.
    """

    __slots__ = ("free", "taken")

    def __init__(self) -> None:
        self.free, self.taken = True, False

    def acquire(self) -> bool:
        """If the lock is free, acquire it until `release`, and return True; else return False.

        No signal handler can run between `del` and the next statement, here and in the methods of a writer.
        """
        try:
            del self.free; self.taken = True  # noqa: E702  # fmt: skip  # one line, as tests raise an exception at it
        except AttributeError:
            return False
        return True

    def release(self) -> None:
        self.taken, self.free = False, True


class OnError:
    """A context manager that calls a method with the error that the `with` block raised.

    A context manager made from a generator function would take a microsecond longer. The reference to the method is
    weak, to avoid a cycle: the method's object refers to this context manager.
    """

    __slots__ = ("_method",)

    def __init__(self, method: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
        self._method = method

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (method := self._method()) is not None:
            method(error)


# The code objects of methods that acquire a writer's lock while they run; their variable `self` is the writer.
_codes: set[CodeType] = set()


def note_exclusive(method: Callable[..., Any]) -> None:
    """Register a method of a writer that acquires the writer's lock itself, so that `is_inside` finds its calls."""
    _codes.add(method.__code__)


def one_call_at_a_time(method: Method) -> Method:
    """Return a method that calls ``method`` while it holds the writer's lock, or raises if the lock is taken."""

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
    """Acquire a writer's lock for good and return True; return False if a call holds it for ``timeout_s`` seconds.

    The function may be called again after an interrupt.
    """
    until = time.monotonic() + timeout_s
    while not (lock.acquire() or lock.taken):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def is_inside(writer: Any) -> bool:
    """Return whether this thread is inside a call of this writer, for example in a signal handler during the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes and frame.f_locals.get("self") is writer:
            return True
        frame = frame.f_back
    return False


# --- writers that were not closed -------------------------------------------------------------------------------------

# Seconds to wait until a running call of a writer returns, for example in a daemon thread while the interpreter ends.
_TIMEOUT_S = 5.0


class Dropped(NamedTuple):
    """The objects that are needed to seal the segments of a writer that was not closed.

    ``writer`` is a weak reference: ``writer()`` is the writer, or None if the writer was garbage collected.
    """

    episode_writer: EpisodeWriter
    lock: CallLock
    writer: weakref.ref[Any]


def seal_when_dropped(writer: Any, episode_writer: EpisodeWriter, lock: CallLock) -> Any:
    """Return a finalizer that seals the writer's segments; call the finalizer's ``detach()`` when the writer is closed.

    The finalizer runs when the writer is garbage collected or the interpreter ends. The attribute ``alive`` of the
    finalizer is True until the finalizer is detached or has run.
    """
    return weakref.finalize(writer, _drop, Dropped(episode_writer, lock, weakref.ref(writer)), os.getpid())


# The garbage collector may run at any point, in a thread that holds any lock. So a finalizer must not wait for a lock:
# it only puts the writer in this queue. Another thread seals the writer's segments. The module `_thread` starts the
# sealing thread, because `threading` would wait until the thread has started.
_waiting: queue.SimpleQueue[Dropped] = queue.SimpleQueue()
_working = _thread.allocate_lock()
_ending = False


def _drop(dropped: Dropped, owner: int) -> None:
    if os.getpid() != owner:
        return  # this is a forked child, and the segments belong to the parent
    if _ending:
        _seal(dropped)
    else:
        _waiting.put(dropped)
        try:
            _thread.start_new_thread(seal_dropped, ())
        except RuntimeError:  # the interpreter is ending: `_end` seals the writer
            pass
    warnings.warn(
        f"a writer of {dropped.episode_writer.path} was not closed, and its segments are sealed only now: close it, or "
        "use it in a with statement",
        ResourceWarning,
        stacklevel=2,
    )


def seal_dropped() -> None:
    """Seal the segments of all writers in the queue, and wait until these segments are sealed."""
    with _working:
        while True:
            try:
                dropped = _waiting.get_nowait()
            except queue.Empty:
                return
            _seal(dropped)


def _seal(dropped: Dropped) -> None:
    """Seal a writer's segments, and wait until they are sealed.

    If the sealing fails, the next process that opens the store with mode "a" seals the segments.
    """
    writer, path = dropped.writer(), dropped.episode_writer.path
    if writer is not None:
        writer.refuse_calls()  # daemon threads may still call the writer
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
    _waiting, _working = queue.SimpleQueue(), _thread.allocate_lock()  # queued writers belong to the parent


os.register_at_fork(after_in_child=_renew)
# `_end` has to run before the finalizers of writers. Exit functions run in the reverse order of their registration. The
# first finalizer makes `weakref` register its own exit function, so a finalizer is made before `_end` is registered.
weakref.finalize(Dropped, int)
atexit.register(_end)
