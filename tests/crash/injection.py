"""Crash injection: act at every file operation of a program, and at every line that stores what others see.

`intercepted` is the one mechanism: it calls back around each *point*. A point is a call of a function of the system
that changes or syncs files, or a line of the code that writes rows and publishes them through mapped memory. On it are
built `die_at` (a process that is killed at its nth point), `failing` (a call that fails as on a full disk), and the
recording of what a loss of power could leave, in `tests.crash.power`.

`interrupted_at` raises at any line of the package in one thread, as the handler of a signal does.

    for point in itertools.count():
        death = die_at(work, point)          # work(tell) runs in a child process; tell(x) sends x to this one
        check(death.told)                    # whatever it told before it died must be there
        if not death.died:
            break                            # it has fewer points
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import errno
import io
import json
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple

import diskreplay
from tests.crash.inner import LIBRARIES, PWRITES, STORING, STORING_FILES, shown

FILE_CALLS = (
    *("mkdir", "open", "close", "rename", "replace", "unlink", "remove", "rmdir"),
    *("write", "pwrite", "ftruncate", "truncate", "posix_fallocate", "fsync", "fdatasync"),
)
"""The functions of `os` whose calls are points."""

LIBRARY_CALLS = ("fallocate", "syncfs", "mmap")
"""The functions of the C library whose calls are points; "open" is also Python's own, for writing."""

STORE = "store"
"""The name of a point that is a line of code which may store to mapped memory."""

_FAILED = 70


class Point(NamedTuple):
    """Something a program is about to do: the name of the call, or `STORE`, and its arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def changes(point: Point) -> bool:
    """Tell whether a point changes what others find: all do but maps, closes, and opens of what is there."""
    return point.name not in ("close", "mmap") and (point.name != "open" or _creates(point))


def _creates(point: Point) -> bool:
    how = point.args[1] if len(point.args) > 1 else point.kwargs.get("mode", "r")
    makes = bool(how & os.O_CREAT) if isinstance(how, int) else any(letter in how for letter in "wax")
    return makes and not os.path.exists(point.args[0])


Before = Callable[[Point], None]
After = Callable[[Point, Any], None]


@contextmanager
def intercepted(before: Before, after: After | None = None) -> Iterator[None]:
    """Call ``before(point)`` ahead of each point of this process, and ``after(point, result)`` behind each call.

    What ``before`` raises is raised in place of the call, or at the line. One point at a time: calls of other threads
    wait meanwhile. What the two do themselves is no point.
    """
    hooks = _Hooks(before, after)
    patches: list[tuple[Any, str, Any]] = [(os, name, hooks.wrap(name, getattr(os, name))) for name in FILE_CALLS]
    opened = hooks.wrap("open", builtins.open, _writes)
    patches += [(builtins, "open", opened), (io, "open", opened)]
    patches += [(module, name, hooks.wrap("pwrite", getattr(module, name))) for module, name in PWRITES]
    patches += [(module, name, _Library(hooks, getattr(module, name))) for module, name in LIBRARIES]
    real = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    traced = sys.gettrace()
    for owner, name, patch in patches:
        setattr(owner, name, patch)
    threading.settrace(hooks.trace)
    sys.settrace(hooks.trace)
    try:
        yield
    finally:
        sys.settrace(traced)
        threading.settrace(traced)
        for owner, name, call in real:
            setattr(owner, name, call)


class _Hooks:
    def __init__(self, before: Before, after: After | None) -> None:
        self._before, self._after = before, after
        self._lock = threading.RLock()
        self._inside = False

    def wrap(self, name: str, call: Callable[..., Any], is_point: Callable[..., bool] | None = None) -> Any:
        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                # Held by another thread, it was waited for: inside is this thread's own doing.
                if self._inside or (is_point is not None and not is_point(*args, **kwargs)):
                    return call(*args, **kwargs)
                point = Point(name, args, kwargs)
                self._call(self._before, point)
                result = call(*args, **kwargs)
                if self._after is not None:
                    self._call(self._after, point, result)
                return result

        return watched

    def _call(self, hook: Callable[..., None], *args: Any) -> None:
        self._inside = True
        try:
            hook(*args)
        finally:
            self._inside = False

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if _stores(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            with self._lock:
                if not self._inside:
                    self._call(self._before, Point(STORE, (frame.f_code.co_name, frame.f_lineno)))
        return self._line


@cache
def _stores(code: CodeType) -> bool:
    return code.co_name in STORING and code.co_filename in STORING_FILES


def _writes(file: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
    return any(letter in mode for letter in "wax+")


class _Library:
    """The C library with some of its functions wrapped."""

    def __init__(self, hooks: _Hooks, library: Any) -> None:
        self._library = library
        for name in LIBRARY_CALLS:
            setattr(self, name, hooks.wrap(name, getattr(library, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def points_of(work: Callable[[], object]) -> list[Point]:
    """Run ``work()`` in a forked child and return the changes it made, in their order: those that `die_at` counts.

    Arguments are as JSON has them, paths as strings. Threads of this process, such as those of writers, make no points.
    """

    def run(tell: Tell) -> None:
        with intercepted(lambda point: tell([point.name, point.args]) if changes(point) else None):
            work()

    return [Point(name, tuple(args)) for name, args in in_child(run).told]


# --- dying -----------------------------------------------------------------------------------------------------------


class Death(NamedTuple):
    """How a child process ended: whether it was killed, and what it had told before."""

    died: bool
    told: list[Any]


Tell = Callable[[Any], None]


def die_at(work: Callable[[Tell], object], point: int) -> Death:
    """Run ``work(tell)`` in a forked child that is killed by SIGKILL just before its nth change, counted from 0.

    Changes are the points that `changes` tells: between two of them it makes no difference when a process dies.

    Raises
    ------
    AssertionError
        The work failed by itself.
    """
    return in_child(partial(_die, work, point))


def _die(work: Callable[[Tell], object], left: int, tell: Tell) -> None:
    def count(point: Point) -> None:
        nonlocal left
        if changes(point):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    with intercepted(count):
        work(tell)


def in_child(work: Callable[[Tell], object], kill_after_s: float | None = None) -> Death:
    """Run ``work(tell)`` in a forked child; ``tell(x)`` sends what JSON can hold, and is known though the child dies.

    With ``kill_after_s``, the child is killed by SIGKILL that many seconds after the first x that it sent.

    Raises
    ------
    AssertionError
        The work failed, or its process was killed by anything but SIGKILL.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code, write = _FAILED, os.write  # which is no point, though others' is

        def tell(x: Any) -> None:
            write(writer, json.dumps({"told": x}, default=str).encode() + b"\n")

        try:
            work(tell)
            code = 0
        except BaseException:
            write(writer, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        sent = pipe.readline()
        if kill_after_s is not None:
            kill = threading.Timer(kill_after_s, os.kill, (pid, signal.SIGKILL))
            kill.start()
        sent += pipe.read()
        if kill_after_s is not None:
            kill.join()  # until the call below, the process that it kills exists
        # A line that is cut off was not told.
        lines = [json.loads(line) for line in sent.split(b"\n")[:-1]]
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise AssertionError(f"a child ended with {status}:\n" + "\n".join(x["failed"] for x in lines if "failed" in x))
    return Death(status != 0, [line["told"] for line in lines])


# --- failing ---------------------------------------------------------------------------------------------------------


@contextmanager
def failing(when: Callable[[Point], bool], code: int = errno.ENOSPC) -> Iterator[None]:
    """Make the calls for which ``when(point)`` holds fail with this number of an error, as on a full disk.

    ``when`` is asked about each point, once, in their order; for lines its answer does not matter.
    """

    def fail(point: Point) -> None:
        if when(point) and point.name != STORE:
            raise OSError(code, os.strerror(code), point.args[0] if point.args else None)

    with intercepted(fail):
        yield


def needs_room(point: Point, below: Path | str = "/") -> bool:
    """Tell whether a full disk may refuse a call on files below a folder: names, files and blocks that are made."""
    if point.name in ("ftruncate", "posix_fallocate", "write"):
        return file_of(point).startswith(str(below))
    if point.name in ("mkdir", "rename", "replace"):
        return os.path.abspath(shown(str(point.args[-1]))).startswith(str(below))
    return point.name == "open" and _creates(point) and shown(str(point.args[0])).startswith(str(below))


def file_of(point: Point) -> str:
    """Return the path of the file that a call's first argument, a descriptor, is open on."""
    return os.readlink(f"/proc/self/fd/{int(point.args[0])}")


# --- interrupting ----------------------------------------------------------------------------------------------------


class Interrupt(KeyboardInterrupt):
    """What is raised in place of a signal's handler."""


_PACKAGE = os.path.dirname(diskreplay.__file__)
_CALLED = {module.__file__ for module in (threading, contextlib, weakref)}


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Raise `Interrupt` before the nth line that this thread runs of the package, counted from 0.

    Lines of `threading`, `contextlib`, `weakref` and the executors of the standard library count, too. Where a ``with``
    statement leaves its lock, and at a line that does nothing, as `try:`, no signal's handler can run, though a tracer
    sees a line: it does not count.
    """
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return count if file.startswith(_PACKAGE) or file in _CALLED or "/concurrent/futures/" in file else None

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lasti not in _unreachable(frame.f_code):
            left -= 1
            if left < 0 and not _finalizes(frame):  # where what is raised would be lost
                sys.settrace(None)
                raise Interrupt
        return count

    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(traced)


def is_interrupted(work: Callable[[], object], line: int) -> bool:
    """Interrupt a call at its nth line; tell whether it has so many."""
    try:
        with interrupted_at(line):
            work()
    except Interrupt:
        return True
    except RuntimeError as error:
        # `Condition.wait` releases the lock before the block that takes it again.
        if not (str(error) == "cannot release un-acquired lock" and isinstance(error.__context__, Interrupt)):
            raise
        return True
    return False


def _finalizes(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None


@cache
def _unreachable(code: CodeType) -> frozenset[int]:
    """Return where nothing is done, and where ``with`` is left: `__exit__` is called with three times None.

    Nothing is done by an ``except`` clause with `pass` alone. No table of the code covers its end: an exception of a
    tracer there would leave the exception that was caught, and all variables of its frames, with the thread for ever.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PRECALL")]
    found = {step.offset for step in steps if step.opname in ("NOP", "POP_EXCEPT")}
    for at in range(len(steps) - 3):
        nones = [step.opname.startswith("LOAD_CONST") and step.argval is None for step in steps[at : at + 3]]
        if all(nones) and (steps[at + 3].opname, steps[at + 3].arg) in (("CALL", 2), ("CALL", 3)):
            found.add(steps[at].offset)
            while at and steps[at - 1].opname in ("SWAP", "NOP"):
                at -= 1
                found.add(steps[at].offset)
    return frozenset(found)
