"""Reading and writing in a thread: every episode once, in order, and when."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.threads import episodes_ahead, read_ahead, write_behind


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


def episode(steps: int) -> EpisodeData:
    return EpisodeData({"obs": np.zeros(steps), "reward": np.zeros(steps, np.float32)}, True, False)


@pytest.mark.parametrize("lengths", [[], [3], [1, 2, 3], [1, 200_000, 2, 3], [200_000, 150_000, 1]])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_episodes_ahead_come_in_order_and_an_error_comes_behind_them(lengths: list[int], is_damaged: bool) -> None:
    threads = set[int]()

    def read() -> Iterator[EpisodeData]:
        for length in lengths:
            threads.add(threading.get_ident())
            yield episode(length)
        if is_damaged:
            raise ValueError("damaged")

    found, episodes = list[int](), episodes_ahead(read())
    with pytest.raises(ValueError, match="damaged") if is_damaged else nullcontext():
        for each in episodes:
            found.append(len(each))
    assert found == lengths
    assert threading.get_ident() not in threads


def test_the_thread_of_episodes_ahead_has_ended_when_they_are_closed() -> None:
    before = threading.active_count()
    episodes = episodes_ahead(map(episode, [200_000] * 9))
    next(episodes)
    assert threading.active_count() > before
    episodes.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("fails_at", [0, 2, 3])
def test_an_error_of_the_writing_thread_is_raised_and_ends_it(fails_at: int) -> None:
    written = []

    def write(first: int, some: list[EpisodeData]) -> None:
        written.append(first)
        if first == fails_at:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_behind(map(episode, [1] * 4), write, 1)
    assert written == list(range(fails_at + 1))
