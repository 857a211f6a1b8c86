"""Batches that two threads copy are those that one copies."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diskreplay.views.halves import in_halves


@pytest.fixture(scope="module")
def helper():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_every_item_is_done_once_and_half_of_them_elsewhere(helper: Any, size: int) -> None:
    done: dict[int, int] = {}

    def work(first: int, stop: int) -> int:
        done.update({item: threading.get_ident() for item in range(first, stop)})
        return -1

    assert in_halves(helper, size, work) == -1
    assert sorted(done) == list(range(size))
    assert len(set(done.values())) == min(size, 2)


@pytest.mark.parametrize(("bad", "found"), [({1, 2, 5}, 1), ({5, 6}, 5), (set(), -1)])
def test_the_first_item_that_could_not_be_done_is_returned(helper: Any, bad: set[int], found: int) -> None:
    assert in_halves(helper, 8, lambda first, stop: min(bad & {*range(first, stop)}, default=-1)) == found


def test_a_helper_that_has_been_sent_home_is_not_waited_for() -> None:
    helper, done = ThreadPoolExecutor(1), []
    helper.shutdown()
    assert in_halves(helper, 5, lambda first, stop: done.append((first, stop)) or -1) == -1
    assert done == [(0, 2), (2, 5)]


def test_an_error_is_raised_when_nobody_works_any_more(helper: Any) -> None:
    ended = []

    def work(first: int, stop: int) -> int:
        if first == 0:
            raise KeyboardInterrupt
        time.sleep(0.05)
        ended.append(stop)
        return -1

    with pytest.raises(KeyboardInterrupt):
        in_halves(helper, 4, work)
    assert ended == [4]
