"""Batches that two threads copy are those that one copies."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diskreplay.views.parallel_copy import in_halves


@pytest.fixture(scope="module")
def helper():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_every_item_is_done_once(helper: Any, size: int) -> None:
    done: list[int] = []
    assert in_halves(helper, size, lambda first, stop: done.extend(range(first, stop)) or -1) == -1
    assert sorted(done) == list(range(size))


def test_both_halves_are_done_at_once(helper: Any) -> None:
    both = threading.Barrier(2, timeout=60)
    assert in_halves(helper, 4, lambda first, stop: -1 - 0 * both.wait()) == -1


def test_what_the_other_thread_does_not_get_to_is_done_here() -> None:
    with ThreadPoolExecutor(1) as busy:
        done, free = [], threading.Event()
        busy.submit(free.wait)
        assert in_halves(busy, 5, lambda first, stop: done.append((first, stop)) or -1) == -1
        assert done == [(0, 2), (2, 5)]
        free.set()
    assert done == [(0, 2), (2, 5)]


@pytest.mark.parametrize(("bad", "found"), [({1, 2, 5}, 1), ({5, 6}, 5), (set(), -1)])
def test_the_first_item_that_could_not_be_done_is_returned(helper: Any, bad: set[int], found: int) -> None:
    assert in_halves(helper, 8, lambda first, stop: min(bad & {*range(first, stop)}, default=-1)) == found


def test_a_helper_that_has_been_sent_home_is_not_waited_for() -> None:
    helper, done = ThreadPoolExecutor(1), []
    helper.shutdown()
    assert in_halves(helper, 5, lambda first, stop: done.append((first, stop)) or -1) == -1
    assert done == [(0, 2), (2, 5)]


def test_a_thread_that_cannot_be_started_leaves_nothing_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(1) as helper:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert in_halves(helper, 5, lambda first, stop: done.append((first, stop)) or -1) == -1
        helper.submit(int).result()  # starts the thread, which finds what was left in the queue
    assert done == [(0, 2), (2, 5)]


def fail(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("failing", [0, 2])
def test_errors_of_both_halves_are_raised(helper: Any, failing: int) -> None:
    def work(first: int, stop: int) -> int:
        if first == failing:
            raise LookupError(str(first))
        return -1

    with pytest.raises(LookupError, match=f"^{failing}$"):
        in_halves(helper, 4, work)


class Interrupt(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("times", [1, 3])
def test_after_an_interrupt_nobody_works_any_more(helper: Any, times: int) -> None:
    """In the middle of waiting for the other thread, however often."""
    ended, begun = [], threading.Event()

    def work(first: int, stop: int) -> int:
        if first == 0:
            assert begun.wait(60)
            return -1
        begun.set()
        for _ in range(times):
            time.sleep(0.05)  # until the caller waits: a signal that comes before meets it elsewhere
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.1)  # time for an interrupt to be raised too early
        ended.append(stop)
        return -1

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            in_halves(helper, 4, work)
        assert ended == [4]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_is_raised_when_nobody_works_any_more(helper: Any) -> None:
    ended, begun = [], threading.Event()

    def work(first: int, stop: int) -> int:
        if first == 0:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.05)  # time for the error to be raised too early
        ended.append(stop)
        return -1

    with pytest.raises(KeyboardInterrupt):
        in_halves(helper, 4, work)
    assert ended == [4]
