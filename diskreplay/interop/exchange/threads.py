"""Read episodes ahead in a thread, and write episodes in a thread while the next episodes are read."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import repeat
from typing import TypeVar

from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.workers import Job, Workers

T = TypeVar("T")

# The thread passes several short episodes at once, since passing an episode takes longer than reading a short one.
_AHEAD_BYTES = 1 << 20


def read_ahead(reads: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Call the functions ``reads`` one after the other in a thread, and yield their results in the same order.

    While the caller uses a result, the thread calls the next function of ``reads``. If a function raises, the error is
    raised in place of the function's result.
    """
    with closing(Workers(1, "diskreplay-import")) as thread:
        before: Job[T] | None = None
        for read in reads:
            ahead = thread.begin(Job(read))
            if before is not None:
                yield before.result()
            before = ahead
        if before is not None:
            yield before.result()


def episodes_ahead(episodes: Iterator[EpisodeData]) -> Generator[EpisodeData, None, None]:
    """Yield the episodes of an iterator in order, while a thread reads the next episodes.

    The thread reads at least one episode ahead, and more until the arrays of these episodes take ``_AHEAD_BYTES``. If
    an episode cannot be read, the error is raised after all earlier episodes.
    """
    with closing(read_ahead(repeat(partial(_next_ones, episodes)))) as packs:
        for some, error in packs:
            yield from some
            if error is not None:
                raise error
            if not some:
                return


def _next_ones(episodes: Iterator[EpisodeData]) -> tuple[list[EpisodeData], Exception | None]:
    """Read episodes until they take ``_AHEAD_BYTES``; return them, and the error if an episode cannot be read.

    The list is empty at the end of the iterator.
    """
    found, nbytes = list[EpisodeData](), 0
    try:
        while nbytes < _AHEAD_BYTES and (episode := next(episodes, None)) is not None:
            found.append(episode)
            nbytes += _nbytes(episode)
    except Exception as error:  # `episodes_ahead` raises the error after the episodes in `found`
        return found, error
    return found, None


def write_behind(
    episodes: Iterable[EpisodeData],
    write: Callable[[int, list[EpisodeData]], None],
    most_bytes: int,
    most_episodes: float = math.inf,
) -> None:
    """Write episodes in groups: a thread writes a group while the next group is read.

    Parameters
    ----------
    write : callable
        ``write(first, episodes)`` writes a group; ``first`` is the index of the group's first episode.
    most_bytes, most_episodes
        A group is complete when its arrays take ``most_bytes``, or when it has ``most_episodes`` episodes.
    """
    with closing(Workers(1, "diskreplay-export")) as thread:
        job: Job[None] | None = None
        for first, some in _packs(episodes, most_bytes, most_episodes):
            if job is not None:
                job.result()
            job = thread.begin(Job(partial(write, first, some)))
        if job is not None:
            job.result()


def _packs(
    episodes: Iterable[EpisodeData], most_bytes: int, most_episodes: float
) -> Iterator[tuple[int, list[EpisodeData]]]:
    first, nbytes, waiting = 0, 0, list[EpisodeData]()
    for episode in episodes:
        waiting.append(episode)
        nbytes += _nbytes(episode)
        if nbytes >= most_bytes or len(waiting) >= most_episodes:
            yield first, waiting
            first, nbytes, waiting = first + len(waiting), 0, []
    if waiting:
        yield first, waiting


def _nbytes(episode: EpisodeData) -> int:
    return sum(rows.nbytes for rows in episode.steps.values())
