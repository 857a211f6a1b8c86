"""Writing in a thread: every episode once, in order, some at a time."""

import threading

import numpy as np
import pytest

from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.write_behind import write_behind


def episode(steps: int) -> EpisodeData:
    return EpisodeData({"obs": np.zeros(steps), "reward": np.zeros(steps, np.float32)}, True, False)


@pytest.mark.parametrize(
    ("lengths", "most_bytes", "most_episodes", "packs"),
    [
        ([], 100, 9, []),
        ([1, 1, 1], 100, 9, [(0, [1, 1, 1])]),
        ([2, 5, 9, 1, 7], 80, 9, [(0, [2, 5]), (2, [9]), (3, [1, 7])]),
        ([1, 1, 1, 1], 100, 2, [(0, [1, 1]), (2, [1, 1])]),
    ],
)
def test_a_pack_is_written_when_it_is_full(
    lengths: list[int], most_bytes: int, most_episodes: int, packs: list[tuple[int, list[int]]]
) -> None:
    written = []

    def write(first: int, some: list[EpisodeData]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        written.append((first, [len(each) for each in some]))

    write_behind(map(episode, lengths), write, most_bytes, most_episodes)
    assert written == packs


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
