"""Reading ahead in a thread while earlier values are used, and writing in one while the next episodes are read."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import TypeVar

from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.workers import Job, Workers

T = TypeVar("T")


def read_ahead(reads: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """Yield what each call returns, or raise what it raises, in order; a thread makes the next one meanwhile."""
    with closing(Workers(1, "diskreplay-import")) as thread:
        before: Job[T] | None = None
        for read in reads:
            ahead = thread.begin(Job(read))
            if before is not None:
                yield before.result()
            before = ahead
        if before is not None:
            yield before.result()


def write_behind(
    episodes: Iterable[EpisodeData],
    write: Callable[[int, list[EpisodeData]], None],
    most_bytes: int,
    most_episodes: float = math.inf,
) -> None:
    """Write episodes some at a time: a thread writes while the next ones are read.

    Parameters
    ----------
    episodes : iterable
        The episodes.
    write : callable
        ``write(first, episodes)`` writes some of them; the first has the number ``first``. Its errors are raised.
    most_bytes, most_episodes
        It is called when episodes take so many bytes, or are so many.
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
        nbytes += sum(rows.nbytes for rows in episode.steps.values())
        if nbytes >= most_bytes or len(waiting) >= most_episodes:
            yield first, waiting
            first, nbytes, waiting = first + len(waiting), 0, []
    if waiting:
        yield first, waiting
