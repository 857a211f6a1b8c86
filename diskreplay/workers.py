"""Threads that make calls for other threads, and stay consistent even if a caller is interrupted at any point.

A signal handler may raise between any two lines of the main thread. In an executor of `concurrent.futures`, such an
error can leave two threads with the same job, or a lock that nobody releases. In this module, each action of a caller
is one operation that cannot be interrupted, or may be repeated after an interrupt:

- A job enters the queue by one operation. `Job.result` waits for a thread only if the job is in the queue.
- The threads are created with their `Workers` object. A helper thread starts these threads, because
  `threading.Thread.start` waits while it holds a lock. An interrupted caller would never release this lock. A thread
  starts only once, so the start may be repeated.
- The only lock of a job is held from the job's creation until a thread of `Workers` has finished the job. The caller
  only waits for this lock.

A job references its call until the call is over, so the memory that the call writes to is not freed during the call.

The module also has `fork_listeners`, to call functions in forked children, and `computed_once`, for cached values
without a lock.
"""

import atexit
import os
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


def each_of(alive: weakref.WeakSet[Any]) -> list[Any]:
    """Return a list of the objects in a set, even if other threads change the set meanwhile."""
    while True:
        try:
            return list(alive)
        except RuntimeError:  # another thread changed the set during `list`
            continue


def fork_listeners(notify: Callable[[Any], object]) -> weakref.WeakSet[Any]:
    """Return a new, empty set. In every forked child, ``notify(item)`` is called for each item of the set."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def notify_all() -> None:
        for each in each_of(alive):
            notify(each)

    os.register_at_fork(after_in_child=notify_all)
    return alive


class computed_once(Generic[T]):
    """A cached property without a lock, like `functools.cached_property` of Python 3.12.

    In Python 3.11, `functools.cached_property` has one lock for all objects of a class. If a process is forked while a
    thread holds this lock, the lock is never released in the child. Without a lock, two threads may compute the value
    of an object at the same time; each gets a correct value.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> Self | T:
        """Compute the value, and put it into the instance's dict: Python looks there before it calls this method."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class Job(Generic[T]):
    """A call that a thread makes after `Workers.begin` has queued the job. Any thread may wait for the result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._found: T
        self._error: BaseException | None = None
        self._is_queued = self._is_withdrawn = self._is_begun = False
        self._over = threading.Lock()  # locked until a thread has made or skipped the call
        self._over.acquire()

    def result(self) -> T:
        """Return the result of the call, or raise its error. If no thread makes the call, this method makes it."""
        if self._is_queued and not self._is_withdrawn:
            with self._over:
                pass
        self.withdraw()
        if self._error is not None:
            raise self._error
        call = self._call
        if call is not None:
            self._found = call()
            self._call = None
        return self._found

    def withdraw(self) -> None:
        """Withdraw the job.

        If a thread is making the call, wait for its end. An interrupted caller may call this again.
        """
        self._is_withdrawn = True
        if self._is_begun:  # a thread sets this flag before it checks whether the job is withdrawn
            with self._over:
                pass

    def _make(self, is_wanted: bool) -> None:
        """Make the job's call in this thread, unless the job was withdrawn or ``is_wanted`` is False."""
        self._is_begun = True
        try:
            if not is_wanted:
                self._is_withdrawn = True
            if not self._is_withdrawn and self._call is not None:
                self._found = self._call()
                self._call = None  # this releases the memory that the call refers to
        except BaseException as error:
            self._error, self._call = error, None
        finally:
            self._over.release()


class _Line:
    """The queue of the jobs of a `Workers` object. A thread ends when it takes None from the queue.

    The threads refer to this queue, so that the `Workers` object itself can be garbage collected.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self.starting = threading.Lock()
        self.is_closed = False


class Workers:
    """Threads that take jobs from one queue, first in first out, and make the calls. The first job starts the threads.

    The threads end after `close`, soon after the last reference to this object is gone, or when the interpreter ends. A
    forked child gets threads of its own. If all threads have ended, or the system has no room for a thread, the caller
    of `Job.result` makes the call.

    Concurrency: any thread may begin jobs; only one thread may call `close`.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._renew()
        _alive.add(self)

    def _renew(self) -> None:
        names = [f"{self._name}_{number}" for number in range(self._count)]
        self._line = line = _Line()
        self._threads = [threading.Thread(target=_work, args=(line,), name=name, daemon=True) for name in names]
        self._is_started = False
        weakref.finalize(self, _dismiss, line, self._count).atexit = False

    def begin(self, job: Job[T]) -> Job[T]:
        if self._start():
            self._line.jobs.put(job)
            job._is_queued = True
        return job

    def _start(self) -> bool:
        """Start the threads if they were not started. Return whether the threads take jobs."""
        if not self._is_started and not self._line.is_closed:
            with suppress(RuntimeError):  # the system has no room for a thread, or the interpreter is ending
                start_new_thread(_start_all, (self._threads, self._line))
                self._is_started = True
        return self._is_started and not self._line.is_closed

    def close(self) -> None:
        """Wait for the calls that the threads have begun, and end the threads. Closing twice is fine."""
        _dismiss(self._line, self._count)
        with self._line.starting:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()


def _start_all(threads: list[threading.Thread], line: _Line) -> None:
    """Start the threads that have not started yet.

    After an interrupt of a caller, two helper threads may run this function.
    """
    with line.starting:
        for thread in threads:
            with suppress(RuntimeError):  # the thread was already started, or the system has no room for a thread
                if not line.is_closed:
                    thread.start()
        if all(thread.ident is None for thread in threads):
            _work(line)  # if no thread could start, this thread makes the calls


def _work(line: _Line) -> None:
    while (job := line.jobs.get()) is not None:
        job._make(is_wanted=not line.is_closed)
        del job  # without this line, the result would stay in memory until the next job


def _dismiss(line: _Line, count: int) -> None:
    line.is_closed = True
    for _ in range(count):
        line.jobs.put(None)


_alive = fork_listeners(lambda workers: workers._renew())


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter ends.

    The interpreter would stop a thread at any point, even inside a library.
    """
    for workers in list(_alive):
        workers.close()
