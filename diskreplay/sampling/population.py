"""The ids that can be drawn, as one line of positions 0 to size - 1.

Its runs lie in one growing block of arrays, in three regions:

    [0, main)      ended episodes, sorted by id; the first `hidden` of them are below the frontier, at least in part
    [main, ended)  ended episodes found since, in the order in which they were found
    [ended, end)   open episodes, and what is left of the partly hidden ones; written anew by each refresh

so a refresh costs what is new, and a search among cumulative counts finds the id at a position. When the second region
outgrows the first, both are sorted into one.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.runs import SEGMENT_SHIFT, WITHIN_SEGMENT, IdRuns, after_frontier, joined, keep
from diskreplay.sampling.admission import Admission
from diskreplay.sampling.columns import Columns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Runs in the second region below which sorting is not worth it.
SMALL = 1024


class Population:
    """The ids that a view offers from a snapshot. Not thread-safe: one sampler, under its lock.

    Parameters
    ----------
    runs : callable
        The view's `runs(episodes, frontier)`.
    admission : Admission or None
        Which episodes count; None is all.

    Attributes
    ----------
    size : int
        Ids that can be drawn.
    epoch : int
        Changes when positions of older ids change other than by the frontier: after a sort or a fresh start.
    """

    def __init__(self, runs: Callable[[Any, int], IdRuns], admission: Admission | None = None) -> None:
        # Here and not above: it loads numba, which nobody needs to make a distribution.
        from diskreplay.kernels.table import chosen

        self._pick = chosen("pick")
        self._runs = runs
        self._admission = admission or Admission()
        self._snapshot: Any = None
        self.epoch = 0
        self._clear()

    def _clear(self) -> None:
        self._block = _Block()
        self.size = 0
        self._main = self._ended = self._end = self._hidden = 0
        self._seen = 0  # episodes of the log that are in
        self._partly = _no_runs()
        self._oldest_new = _NEVER  # lowest id of the second region
        self._frontier = 0
        self._main_index: tuple[Ints, Ints] | None = None
        self._rest_index: tuple[Ints, Ints] | None = None
        self.epoch += 1

    def refresh(self, snapshot: Any) -> None:
        """Follow a newer snapshot."""
        old = self._snapshot
        if snapshot is old:
            return
        if old is None or snapshot.generation != old.generation:
            if old is not None:
                self._admission.keep_only(snapshot.log.first)
            self._snapshot = None  # until the rest is done: an error below starts afresh
            self._clear()
        # The predicate of `where` may raise: ask it before anything changes.
        found = self._offered(snapshot, Columns.of(snapshot.log, self._seen))
        still_open = self._offered(snapshot, Columns.of(snapshot.open))
        self._frontier = snapshot.frontier
        self._seen = len(snapshot.log.first)
        self._append(found)
        self._hide()
        if self._ended - self._main > max(SMALL, self._main // 4):
            self._sort()
        self._end = self._block.write(self._ended, joined([self._partly, still_open]))
        self.size = int(self._block.before[self._end] - self._block.before[self._hidden])
        self._rest_index = None
        self._snapshot = snapshot

    def _offered(self, snapshot: Any, episodes: Columns) -> IdRuns:
        runs = self._runs(self._admission.admit(snapshot, episodes), snapshot.frontier)
        return keep(runs, runs.count > 0)

    def _append(self, found: IdRuns) -> None:
        if len(found.first):
            self._ended = self._block.write(self._ended, found)
            self._oldest_new = min(self._oldest_new, int(found.first.min()))

    def _hide(self) -> None:
        """Take away what has fallen below the frontier."""
        first = self._block.runs.first
        hidden = self._hidden + int(np.searchsorted(first[self._hidden : self._main], self._frontier))
        partly = after_frontier(joined([self._partly, self._block.slice(self._hidden, hidden)]), self._frontier)
        self._partly = keep(partly, partly.count > 0)
        self._hidden = hidden
        if self._oldest_new >= self._frontier:
            return
        if self._main - self._hidden <= self._ended - self._main:
            self._sort()
            return
        left = after_frontier(self._block.slice(self._main, self._ended), self._frontier)
        left = keep(left, left.count > 0)
        self._ended = self._block.write(self._main, left)
        self._oldest_new = int(left.first.min(initial=_NEVER))

    def _sort(self) -> None:
        """Make the first two regions one."""
        runs = joined([self._partly, self._block.slice(self._hidden, self._ended)])
        runs = after_frontier(runs, self._frontier)
        runs = keep(runs, runs.count > 0)
        order = np.argsort(runs.first, kind="stable")
        self._block = _Block()
        self._main = self._ended = self._block.write(0, IdRuns(*(column[order] for column in runs)))
        self._hidden, self._partly, self._oldest_new = 0, _no_runs(), _NEVER
        self._main_index = None
        self.epoch += 1

    def take(self, positions: NDArray[Any]) -> Ints:
        """Return the ids at the whole parts of these positions, each from 0 to below `size`."""
        return self._ids(positions.astype(np.float64), 1.0)

    def take_fractions(self, fractions: Floats) -> Ints:
        """Return the ids that so much of all others is before, each from 0 to below 1."""
        return self._ids(fractions, self.size)

    def _ids(self, positions: Floats, scale: float) -> Ints:
        out = np.empty(len(positions), np.int64)
        block = self._block
        self._pick(positions, scale, self._hidden, self._end, block.before, block.runs.first, block.runs.stride, out)
        return out

    def runs(self) -> IdRuns:
        """Return the runs of all ids that can be drawn, in the order of their positions."""
        return self._block.slice(self._hidden, self._end)

    def find(self, ids: Ints) -> Ints:
        """Return the position of each id, -1 where it cannot be drawn."""
        positions = np.full(len(ids), -1)
        if self.size:
            keys = self._lane_keys(ids)
            if self._main_index is None:
                self._main_index = self._index(0, self._main)
            if self._rest_index is None:
                self._rest_index = self._index(self._main, self._end)
            for index in (self._main_index, self._rest_index):
                self._look_up(ids, keys, index, positions)
        return positions

    def contains(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids can be drawn."""
        return self.find(ids) >= 0

    def _index(self, start: int, end: int) -> tuple[Ints, Ints]:
        """Return the runs of a region in the order of their lanes: keys, and where in the block they stand."""
        keys = self._lane_keys(self._block.slice(start, end).first)
        order = np.argsort(keys, kind="stable")
        return keys[order], order + start

    def _lane_keys(self, ids: Ints) -> Ints:
        """Return numbers that order ids by segment, lane, row: in this order the runs do not overlap. -1: no id."""
        slot, position = (ids >> SEGMENT_SHIFT) - self._snapshot.origin, ids & WITHIN_SEGMENT
        known = (slot >= 0) & (slot < len(self._snapshot.lanes))
        lanes = self._snapshot.lanes[np.where(known, slot, 0)]
        known &= lanes > 0
        row, lane = np.divmod(position, np.maximum(lanes, 1))
        return np.where(known, (slot << SEGMENT_SHIFT) + lane * (WITHIN_SEGMENT // np.maximum(lanes, 1)) + row, -1)

    def _look_up(self, ids: Ints, keys: Ints, index: tuple[Ints, Ints], positions: Ints) -> None:
        """Write the positions of the ids that lie in the indexed runs."""
        if not len(index[0]):
            return
        run = index[1][np.maximum(np.searchsorted(index[0], keys, "right") - 1, 0)]
        first, stride, count = (column[run] for column in self._block.runs)
        number, between = np.divmod(ids - first, stride)
        found = (keys >= 0) & (run >= self._hidden) & (between == 0) & (number >= 0) & (number < count)
        before = self._block.before
        positions[found] = (before[run] + number - before[self._hidden])[found]


class _Block:
    """Growing arrays of runs; `before[i]` is the number of ids in the runs before run i."""

    def __init__(self, capacity: int = 256) -> None:
        self.runs = IdRuns(*(np.zeros(capacity, np.int64) for _ in IdRuns._fields))
        self.before = np.zeros(capacity + 1, np.int64)

    def slice(self, start: int, end: int) -> IdRuns:
        """Return runs as views."""
        return IdRuns(*(column[start:end] for column in self.runs))

    def write(self, start: int, runs: IdRuns) -> int:
        """Put runs from `start` on, over what is there, and return where they end."""
        end = start + len(runs.first)
        if end > len(self.runs.first):
            self._grow(2 * end)
        for column, values in zip(self.runs, runs, strict=True):
            column[start:end] = values
        np.cumsum(runs.count, out=self.before[start + 1 : end + 1])
        self.before[start + 1 : end + 1] += self.before[start]
        return end

    def _grow(self, capacity: int) -> None:
        old, before = self.runs, self.before
        self.runs = IdRuns(*(np.zeros(capacity, np.int64) for _ in IdRuns._fields))
        self.before = np.zeros(capacity + 1, np.int64)
        for column, values in zip(self.runs, old, strict=True):
            column[: len(values)] = values
        self.before[: len(before)] = before


_NEVER = int(np.iinfo(np.int64).max)


def _no_runs() -> IdRuns:
    return IdRuns(*(np.zeros(0, np.int64) for _ in IdRuns._fields))
