"""Batches that several threads copy are those that one copies."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from diskreplay import workers
from diskreplay.views.base import PART, CopyThreads, copy_threads


@pytest.fixture
def helper() -> Iterator[CopyThreads]:
    """One thread beside this one."""
    helper = CopyThreads(1)
    yield helper
    helper.close()


@pytest.fixture
def three() -> Iterator[CopyThreads]:
    threads = CopyThreads(3)
    yield threads
    threads.close()


@pytest.mark.parametrize("count", [2, 4])
def test_all_parts_are_done_at_once(count: int) -> None:
    threads, every = CopyThreads(count - 1), threading.Barrier(count, timeout=600)
    assert threads.copy(threads.parts(count * PART), 4, lambda first, stop: -1 - 0 * every.wait()) == -1
    threads.close()


def test_what_other_threads_do_not_get_to_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = CopyThreads(3), list[tuple[int, int]]()
    monkeypatch.setattr(workers, "start_new_thread", lambda *_: None)  # they never begin
    assert threads.copy(4, 9, lambda first, stop: done.append((first, stop)) or -1) == -1
    assert done == [(0, 2), (2, 4), (4, 6), (6, 9)]
    threads.close()


def test_as_many_processors_are_left_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(processors: int) -> list[int]:
        monkeypatch.setattr("os.sched_getaffinity", lambda process: range(processors))
        return [threads.count if (threads := copy_threads(beside)) else 0 for beside in (0, 1)]

    assert [counts(processors) for processors in (1, 2, 3, 4, 64)] == [[0, 0], [1, 0], [2, 1], [3, 2], [3, 3]]


def test_a_helper_that_has_been_sent_home_is_not_waited_for() -> None:
    helper, done = CopyThreads(1), []
    helper.close()
    assert helper.copy(2, 5, lambda first, stop: done.append((first, stop)) or -1) == -1
    assert done == [(0, 2), (2, 5)]


@pytest.mark.parametrize("failing", [0, 2])
def test_errors_of_all_parts_are_raised(helper: CopyThreads, failing: int) -> None:
    def work(first: int, stop: int) -> int:
        if first == failing:
            raise LookupError(str(first))
        return -1

    with pytest.raises(LookupError, match=f"^{failing}$"):
        helper.copy(2, 4, work)


class Interrupt(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("count", [2, 4])
def test_after_an_interrupt_what_is_left_can_be_waited_for(three: CopyThreads, count: int, times: int) -> None:
    """In the middle of waiting for the other threads, however often."""
    ended, begun, raised = [], threading.Barrier(count, timeout=600), []

    def work(first: int, stop: int) -> int:
        begun.wait()
        if first == 0:
            return -1
        for _ in range(times if first == 2 else 0):
            time.sleep(0.05)  # until the caller waits: a signal that comes before meets it elsewhere
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.1 + 0.05 * times)  # time for an interrupt to be raised too early
        ended.append(stop)
        return -1

    def interrupt(*_: object) -> None:
        raised.append(True)
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            three.copy(count, 2 * count, work)
        while len(raised) < times:
            with suppress(Interrupt):
                three.settle()
        three.settle()
        assert sorted(ended) == list(range(4, 2 * count + 1, 2))
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("count", [2, 4])
def test_an_error_is_raised_when_nobody_works_any_more(three: CopyThreads, count: int) -> None:
    ended, begun = [], threading.Barrier(count, timeout=600)

    def work(first: int, stop: int) -> int:
        begun.wait()
        if first == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)  # time for the error to be raised too early
        ended.append(stop)
        return -1

    with pytest.raises(KeyboardInterrupt):
        three.copy(count, 2 * count, work)
    assert sorted(ended) == list(range(4, 2 * count + 1, 2))
