"""A growing table of ended episodes whose older parts never move under a reader."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_COLUMNS, EpisodeTable, Ints


class EpisodeLog:
    """Ended episodes in the order they were found.

    Concurrency: one thread appends; tables made earlier stay as they were, as appends go behind them and a removal
    makes new arrays.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.steps = 0
        self._lines: Ints = np.zeros((0, EPISODE_COLUMNS), np.int64)
        self.table = EpisodeTable(self._lines)

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.table)

    def lines(self, room: int) -> Ints:
        """Return the array of all lines, with as many as ``room`` behind the last: `take` makes them episodes."""
        size = len(self.table)
        if size + room > len(self._lines):
            # A quarter more: the table is memory a reader keeps beside the page cache.
            lines = np.empty((size + size // 4 + room, EPISODE_COLUMNS), np.int64)
            lines[:size] = self.table.lines
            self._lines = lines
            self.table = EpisodeTable(lines[:size])
        return self._lines

    def take(self, size: int, steps: int) -> None:
        """Make lines episodes, up to ``size`` of them, which have so many steps."""
        self.table = EpisodeTable(self._lines[:size])
        self.steps = steps

    def append(self, episodes: EpisodeTable) -> None:
        """Add episodes at the end."""
        size = len(self.table)
        end = size + len(episodes)
        self.lines(len(episodes))[size:end] = episodes.lines
        self.take(end, self.steps + int(episodes.steps.sum()))

    def remove(self, which: Callable[[EpisodeTable], NDArray[np.bool_]]) -> None:
        """Drop the episodes for which ``which`` is True; positions change, so the generation does."""
        gone = which(self.table)
        if not gone.any():
            return
        self.table = self.table.select(~gone)
        self._lines = self.table.lines
        self.steps = int(self.table.steps.sum())
        self.generation += 1
