"""Threads that make calls for others: each call once, in order, whatever interrupts the caller."""

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from diskreplay import workers
from diskreplay.workers import Job, Workers
from tests.crash.injection import Interrupt, interrupted_at
from tests.testing.support import run_python

NAME = "diskreplay-tested"


@pytest.fixture
def one() -> Iterator[Workers]:
    """One thread."""
    one = Workers(1, NAME)
    yield one
    one.close()


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(NAME))


def busy(workers: Workers) -> threading.Event:
    """Keep a thread busy until the event that is returned is set."""
    begun, free = threading.Event(), threading.Event()
    workers.begin(Job(lambda: (begun.set(), free.wait(60))))
    assert begun.wait(60)
    return free


def test_calls_are_made_in_their_order_by_a_thread_that_starts_with_the_first(one: Workers) -> None:
    assert threads() == []
    made: list[int] = []
    jobs = [
        one.begin(Job(lambda number=number: made.append(number) or threading.current_thread().name))
        for number in range(20)
    ]
    assert [job.result() for job in jobs] == [f"{NAME}_0"] * 20
    assert made == list(range(20))
    assert jobs[3].result() == f"{NAME}_0"
    assert len(made) == 20
    one.close()
    assert threads() == []


def test_several_threads_share_one_queue() -> None:
    together, three = threading.Barrier(3, timeout=60), Workers(3, NAME)
    for job in [three.begin(Job(together.wait)) for _ in range(3)]:
        job.result()
    assert threads() == [f"{NAME}_{number}" for number in range(3)]
    three.close()


def test_what_a_call_raises_is_raised_to_whoever_asks(one: Workers) -> None:
    job = one.begin(Job(lambda: 1 // 0))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            job.result()
    assert one.begin(Job(lambda: 5)).result() == 5


def test_a_call_that_is_withdrawn_is_made_by_no_thread(one: Workers) -> None:
    free, made = busy(one), list[str]()
    job = one.begin(Job(lambda: made.append(threading.current_thread().name)))
    job.withdraw()
    free.set()
    one.begin(Job(lambda: None)).result()
    assert made == []
    job.result()
    assert made == [threading.current_thread().name]


def test_a_call_that_is_being_made_is_waited_for_when_it_is_withdrawn(one: Workers) -> None:
    begun, made = threading.Event(), list[int]()
    job = one.begin(Job(lambda: (begun.set(), time.sleep(0.05), made.append(1))))
    assert begun.wait(60)
    job.withdraw()
    assert made == [1]


def test_calls_that_nobody_has_begun_are_left_to_who_asks_when_threads_end(one: Workers) -> None:
    free, made = busy(one), list[str]()
    jobs = [one.begin(Job(lambda: made.append(threading.current_thread().name))) for _ in range(3)]
    threading.Timer(0.05, free.set).start()
    one.close()
    assert made == []
    one.close()
    for job in [*jobs, one.begin(Job(lambda: made.append(threading.current_thread().name)))]:
        job.result()
    assert made == [threading.current_thread().name] * 4
    assert threads() == []


def fail(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("which", ["the first thread", "those with a name"])
def test_where_no_thread_can_be_started_the_call_is_made_all_the_same(which: str, monkeypatch: Any) -> None:
    one = Workers(1, NAME)
    if which == "the first thread":
        monkeypatch.setattr(workers, "start_new_thread", fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", fail)
    assert [one.begin(Job(lambda n=n: n)).result() for n in range(3)] == [0, 1, 2]
    one.close()
    monkeypatch.undo()
    two = Workers(2, NAME)
    assert two.begin(Job(lambda: 7)).result() == 7
    two.close()


def test_threads_end_when_nobody_has_them_any_more() -> None:
    workers = Workers(2, NAME)
    free = busy(workers)
    del workers
    free.set()
    gc.collect()  # the check that follows every test looks for threads


def test_what_a_call_has_used_is_gone_when_it_is_made(one: Workers) -> None:
    class Used:
        there = 0

        def __init__(self) -> None:
            Used.there += 1

        def __del__(self) -> None:
            Used.there -= 1

    job = one.begin(Job(partial(id, Used())))
    job.result()
    one.begin(Job(lambda: None)).result()
    assert Used.there == 0
    del job


def test_a_child_has_threads_of_its_own(one: Workers) -> None:
    free = busy(one)
    pid = os.fork()
    if pid == 0:
        os._exit(one.begin(Job(lambda: 7)).result())
    free.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.slow
def test_the_interpreter_waits_for_what_is_being_done() -> None:
    code = (
        "import time\n"
        "from diskreplay.workers import Job, Workers\n"
        "one = Workers(1, 'diskreplay-tested')\n"
        "one.begin(Job(lambda: (print('begun', flush=True), time.sleep(0.3), print('done'))))\n"
        "time.sleep(0.1)\n"
    )
    assert run_python(code, timeout_s=60) == "begun\ndone\n"


def test_an_interrupt_at_any_line_leaves_each_call_made_once_and_no_thread_too_many() -> None:
    """One call at a time is made, also by the thread that asks."""
    lines = next(line for line in itertools.count() if not is_interrupted(line))
    assert lines > 50


def is_interrupted(line: int) -> bool:
    """Interrupt two calls and the end of their thread at a line, make others; tell whether there was such a line."""
    one, made, now = Workers(1, NAME), list[int](), list[int]()

    def make(number: int) -> int:
        now.append(number)
        time.sleep(0.0002)
        assert now == [number]
        now.clear()
        made.append(number)
        return number

    def begin(number: int) -> Job[int]:
        return one.begin(Job(lambda: make(number)))

    interrupted = True
    with suppress(Interrupt), interrupted_at(line):
        for number in range(2):
            begin(number).result()
        one.close()
        interrupted = False
    assert [job.result() for job in [begin(number) for number in range(2, 6)]] == [2, 3, 4, 5]
    one.close()
    assert threads() == []
    assert made[-4:] == [2, 3, 4, 5]
    assert made[:-4] in ([], [0], [0, 1])
    return interrupted
