"""Who may use a writer: one call at a time, and none once it is closed; and what becomes of one that nobody closed.

A call deletes the attribute `free` of the lock and puts it back afterwards. That an attribute is deleted, or is not
there, is one operation: no other thread and no signal's handler comes in between. A lock of `threading` would take
several times as long, and stay locked where a handler raises between its acquisition and the block that releases it.

A writer that nobody closed is sealed when it is collected, or when the interpreter ends.
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
    """The right to use a writer, which can be had if there is an attribute `free`.

    `taken`: nobody releases it any more, since `acquire` had it.
    """

    __slots__ = ("free", "taken")

    def __init__(self) -> None:
        self.free, self.taken = True, False

    def acquire(self) -> bool:
        """Acquire the lock for good, if it is free; else return False.

        A call always releases it: between the deletion and the block that does so, no signal's handler can run. Nor can
        it here, before the lock is `taken`.
        """
        try:
            del self.free; self.taken = True  # noqa: E702  # fmt: skip  # one line, at which tests interrupt it
        except AttributeError:
            return False
        return True

    def release(self) -> None:
        """Release what `acquire` had."""
        self.taken, self.free = False, True


class OnError:
    """Calls a method with the error that a block met: as a generator would, which takes a microsecond.

    The method's object has this one, which refers to it weakly: a cycle would put off its end to the garbage collector.
    """

    __slots__ = ("_method",)

    def __init__(self, method: weakref.WeakMethod[Callable[[BaseException], None]]) -> None:
        self._method = method

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Call it."""
        if error is not None and (method := self._method()) is not None:
            method(error)


# What runs while the writer in its variable `self` is in use.
_codes: set[CodeType] = set()


def note_exclusive(method: Callable[..., Any]) -> None:
    """Note a method that acquires its writer's lock by itself."""
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
    """Acquire a writer's lock for good; False where a call did not end in time.

    It may be repeated after an interrupt.
    """
    until = time.monotonic() + timeout_s
    while not (lock.acquire() or lock.taken):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def is_inside(writer: Any) -> bool:
    """Tell whether this thread is in the middle of a call of a writer: a signal's handler runs there, or a caster."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _codes and frame.f_locals.get("self") is writer:
            return True
        frame = frame.f_back
    return False


# --- writers that nobody closed ---------------------------------------------------------------------------------------

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
