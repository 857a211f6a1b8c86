"""Reading in a thread: what comes, in which order, and when."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from diskreplay.interop.exchange.read_ahead import read_ahead


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_everything_comes_in_order(count: int) -> None:
    assert list(read_ahead(partial(int, number) for number in range(count))) == list(range(count))


def test_the_next_is_read_while_one_is_used_and_no_more() -> None:
    begun = [threading.Event() for _ in range(4)]

    def read(number: int) -> int:
        begun[number].set()
        return number

    found = read_ahead(partial(read, number) for number in range(4))
    assert not begun[0].is_set()
    assert next(found) == 0
    assert begun[1].wait(10)
    assert next(found) == 1
    assert begun[2].wait(10)
    found.close()
    assert not begun[3].is_set()


def test_what_a_read_raises_comes_in_its_place() -> None:
    def fail() -> int:
        raise ValueError("damaged")

    reads: list[Callable[[], int]] = [lambda: 1, fail, lambda: 3]
    found = read_ahead(reads)
    assert next(found) == 1
    with pytest.raises(ValueError, match="damaged"):
        next(found)
