"""A growing table of ended episodes whose older parts never move under a reader."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.store.scan import Episodes

_DTYPES = (np.int64, np.int64, np.int64, np.int64, np.uint8)


class EpisodeLog:
    """Ended episodes in the order they were found.

    Concurrency: one thread appends; views made earlier stay as they were, as appends go behind them and a removal
    makes new arrays.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.steps = 0
        self._size = 0
        self._columns: list[NDArray[Any]] = [np.zeros(64, dtype) for dtype in _DTYPES]

    def append(self, episodes: Episodes) -> None:
        """Add episodes at the end."""
        count = len(episodes)
        if not count:
            return
        stop = self._size + count
        if stop > len(self._columns[0]):
            # A quarter more: the table is memory a reader keeps beside the page cache.
            room = stop + stop // 4
            self._columns = [
                np.concatenate([c[: self._size], np.zeros(room - self._size, c.dtype)]) for c in self._columns
            ]
        for column, new in zip(self._columns, episodes.columns, strict=True):
            column[self._size : stop] = new
        self._size = stop
        self.steps += int(episodes.steps.sum())

    def remove(self, which: Callable[[Episodes], NDArray[np.bool_]]) -> None:
        """Drop the episodes for which ``which`` is True; positions change, so the generation does."""
        view = self.view()
        gone = which(view)
        if not gone.any():
            return
        kept = view.select(~gone)
        self._columns = [np.array(column) for column in kept.columns]
        self._size = len(kept)
        self.steps = int(kept.steps.sum())
        self.generation += 1

    def view(self) -> Episodes:
        """Return all episodes so far, without a copy."""
        first, stride, steps, obs_rows, end = (column[: self._size] for column in self._columns)
        return Episodes(first, stride, steps, obs_rows, end)
