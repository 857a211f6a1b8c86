"""Writing in a thread, while the next episodes are read."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial

from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.workers import Job, Workers


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
