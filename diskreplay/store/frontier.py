"""The capacity of a store, exact to the step: where the oldest visible step lies."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable
from diskreplay.store.scan import hidden_steps

Ints = NDArray[np.int64]


class Frontier:
    """Finds the id before which steps are hidden, so that exactly ``capacity`` of them are not.

    Concurrency: one thread. Keeps what it computed of the segment that the frontier lies in.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._key: tuple[int, int] = (-1, -1)
        self._seen = 0
        self._by_segment: dict[int, int] = {}
        self._cached: tuple[int, int, int] = (-1, -1, -1)
        self._segment: _Rows | None = None
        self._open_in: list[int] = []  # the segments of the open episodes

    def find(self, log: EpisodeTable, generation: int, opened: EpisodeTable, total: int, least: int) -> tuple[int, int]:
        """Return the frontier and how many of ``total`` steps it hides: all but ``capacity``, and all below ``least``.

        A frontier never goes back, and is at ``least`` where segments below are gone for other reasons.
        """
        if not least and (self._capacity is None or total <= self._capacity):
            return 0, 0
        if self._capacity is not None and total > self._capacity:
            hide = total - self._capacity
            frontier = self._hiding(hide, log, generation, opened)
            if frontier >= least:
                return frontier, hide
        return least, self._below(least, log, generation, opened)

    def _hiding(self, hide: int, log: EpisodeTable, generation: int, opened: EpisodeTable) -> int:
        """Return the id of the step that exactly ``hide`` steps come before."""
        steps = self._all_steps(log, generation, opened)
        for number in sorted(steps):
            if hide < steps[number]:
                return self._inside(number, hide, log, generation, opened)
            hide -= steps[number]
        raise AssertionError("more steps to hide than there are")

    def _below(self, frontier: int, log: EpisodeTable, generation: int, opened: EpisodeTable) -> int:
        """Count the steps that come before an id."""
        inside = frontier >> POSITION_BITS
        steps = self._all_steps(log, generation, opened)
        count = sum(some for number, some in steps.items() if number < inside)
        if frontier & POSITION_MASK and inside in steps:
            some = [part.select(part.first >> POSITION_BITS == inside) for part in (log, opened)]
            count += int(hidden_steps(EpisodeTable.concatenate(some), frontier).sum())
        return count

    def _all_steps(self, log: EpisodeTable, generation: int, opened: EpisodeTable) -> dict[int, int]:
        """Count the steps by segment."""
        steps = self._steps_by_segment(log, generation)
        self._open_in = (opened.first >> POSITION_BITS).tolist()
        for number, count in zip(self._open_in, opened.steps.tolist(), strict=True):
            steps[number] = steps.get(number, 0) + count
        return steps

    def _steps_by_segment(self, log: EpisodeTable, generation: int) -> dict[int, int]:
        """Count ended steps by segment, adding only what is new."""
        if self._key != (generation, 0):
            self._key, self._seen, self._by_segment = (generation, 0), 0, {}
        if len(log) > self._seen:
            new = log.select(slice(self._seen, None))
            numbers, at = np.unique(new.first >> POSITION_BITS, return_inverse=True)
            for number, count in zip(numbers.tolist(), np.bincount(at, new.steps).tolist(), strict=True):
                self._by_segment[number] = self._by_segment.get(number, 0) + int(count)
            self._seen = len(log)
        return dict(self._by_segment)

    def _inside(self, number: int, hide: int, log: EpisodeTable, generation: int, opened: EpisodeTable) -> int:
        """Return the id of the step in a segment that exactly ``hide`` of its steps come before."""
        key = (generation, number, self._by_segment.get(number, 0))
        if number in self._open_in or self._cached != key or self._segment is None:
            in_open = (opened.first >> POSITION_BITS) == number
            ended = log.select((log.first >> POSITION_BITS) == number)
            self._segment = _Rows(EpisodeTable.concatenate([ended, opened.select(in_open)]))
            self._cached = key
        return (number << POSITION_BITS) | self._segment.position(hide)


class _Rows:
    """Where the steps of one segment are. Immutable."""

    def __init__(self, episodes: EpisodeTable) -> None:
        position = episodes.first & POSITION_MASK
        self._lanes = int(episodes.stride[0])
        self._start, self._lane = position // self._lanes, position % self._lanes
        self._stop = self._start + episodes.steps
        # For each row, how many steps the lanes have in it and the rows before it.
        rows = int(self._stop.max()) + 1
        change = np.bincount(self._start, minlength=rows) - np.bincount(self._stop, minlength=rows)
        self._ends: NDArray[np.int64] = np.cumsum(np.cumsum(change))[:-1]

    def position(self, before: int) -> int:
        """Return the position of the step that so many come before."""
        row = int(self._ends.searchsorted(before, side="right"))
        if self._lanes == 1:
            return row
        left = before - (int(self._ends[row - 1]) if row else 0)
        there = np.sort(self._lane[(self._start <= row) & (row < self._stop)])
        return row * self._lanes + int(there[left])
