"""Threads that make calls for others, and stay in order whatever interrupts those.

A signal's handler may raise between any two lines of the main thread. Inside an executor of the standard library that
can leave a second thread on one job, or a lock taken for ever. Here each step of the caller is one operation, or may be
repeated:

- A job enters the queue by one operation. `Job.result` waits for a thread only if the job is in the queue.
- Which threads there are is fixed when their owner is made. Each can be started once, and another thread starts them:
  `threading.Thread.start` waits under a lock, where an interrupt would leave it taken.
- A job has no lock but the one that says that it is over, and a thread releases that.

A job references its call until the call is over, and so the memory that the call writes to. That memory is not reused
before.

It also tells objects that their process was forked, and has values that are computed once without a lock.
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
    """Return what is in a set of objects, to which other threads may be adding some."""
    while True:
        try:
            return list(alive)
        except RuntimeError:  # it changed meanwhile
            continue


def told_of_forks(tell: Callable[[Any], object]) -> weakref.WeakSet[Any]:
    """Return a set of objects for each of which ``tell(object)`` is called in every child that is forked."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def tell_all() -> None:
        for each in each_of(alive):
            tell(each)

    os.register_at_fork(after_in_child=tell_all)
    return alive


class computed_once(Generic[T]):
    """`functools.cached_property` of Python 3.12: that of 3.11 has a lock for all objects of a class.

    A child that is forked while another thread of its parent holds that lock would wait for ever. Without it, two
    threads may compute the value of an object at once; both get a right one.
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
        """Compute the value, and keep it where Python looks before it asks here again."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class Job(Generic[T]):
    """A call that a thread makes once `Workers.begin` has put it into the queue. Any thread may ask for its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._found: T
        self._error: BaseException | None = None
        self._is_queued = self._is_withdrawn = self._is_begun = False
        self._over = threading.Lock()  # until a thread has made the call, or left it
        self._over.acquire()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; make it here if no thread has or will."""
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
        """Return when no thread makes the call, and none will; it may be repeated after an interrupt."""
        self._is_withdrawn = True
        if self._is_begun:  # set by the thread before it looks whether the job is withdrawn
            with self._over:
                pass

    def _make(self, is_wanted: bool) -> None:
        """Make the call, in a thread, unless it is withdrawn or not wanted any more."""
        self._is_begun = True
        try:
            if not is_wanted:
                self._is_withdrawn = True
            if not self._is_withdrawn and self._call is not None:
                self._found = self._call()
                self._call = None  # and with it the memory of the call
        except BaseException as error:
            self._error, self._call = error, None
        finally:
            self._over.release()


class _Line:
    """The queue that threads share with their owner, and keep when the owner is gone; None ends a thread."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self.starting = threading.Lock()
        self.is_closed = False


class Workers:
    """A number of threads for one queue of jobs, begun in their order. They start with the first job.

    They end by `close`, or soon after the last reference is gone, or when the interpreter ends; a forked child gets its
    own. A job that no thread can make, since the system has no room for one or they have ended, is left to who asks for
    its result. Concurrency: any thread may begin jobs, one closes.
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
        """Have a thread make the call of a job, after those before it; return the job."""
        if self._start():
            self._line.jobs.put(job)
            job._is_queued = True
        return job

    def _start(self) -> bool:
        """Start the threads if they were not; tell whether they take jobs."""
        if not self._is_started and not self._line.is_closed:
            with suppress(RuntimeError):  # the system has no room for a thread, or the interpreter is ending
                start_new_thread(_start_all, (self._threads, self._line))
                self._is_started = True
        return self._is_started and not self._line.is_closed

    def close(self) -> None:
        """End the threads, when they have made the calls that they have begun; it may be repeated."""
        _dismiss(self._line, self._count)
        with self._line.starting:
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()


def _start_all(threads: list[threading.Thread], line: _Line) -> None:
    """Start threads, in one that a caller may have begun more than once: each of them starts once."""
    with line.starting:
        for thread in threads:
            with suppress(RuntimeError):  # it has started, or the system has no room for it
                if not line.is_closed:
                    thread.start()
        if all(thread.ident is None for thread in threads):
            _work(line)  # there is room for this one alone


def _work(line: _Line) -> None:
    """Make the calls of jobs until the queue says that it is the end."""
    while (job := line.jobs.get()) is not None:
        job._make(is_wanted=not line.is_closed)
        del job  # its result belongs to the caller


def _dismiss(line: _Line, count: int) -> None:
    line.is_closed = True
    for _ in range(count):
        line.jobs.put(None)


_alive = told_of_forks(lambda workers: workers._renew())


@atexit.register
def _close_all() -> None:
    """End all threads before the interpreter does: it would stop them anywhere, also inside of other libraries."""
    for workers in list(_alive):
        workers.close()
