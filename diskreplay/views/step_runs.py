"""Steps of a grid of ids as runs of rows: each column of a rollout is a few of them, most often one."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, Ints
from diskreplay.kernels.copy_runs import COUNT, ITEM, LANE, ROW, RUN_ROWS, SLOT
from diskreplay.kernels.table import chosen
from diskreplay.reading.snapshot import Snapshot
from diskreplay.views.parallel_copy import CopyThreads, copying
from diskreplay.views.windows import ATTEMPTS, Windows, missing_chunk

Bools = NDArray[np.bool_]


class StepRuns:
    """Steps of a snapshot as runs of successive rows of lanes, given as a grid of ids, (n, columns).

    ``find`` returns the windows of some ids, or raises what is wrong with one of them. ``last``, (n, columns) bool,
    tells which steps are the last of their runs.
    """

    def __init__(self, snapshot: Snapshot, grid: Ints, find: Callable[[Ints], Windows]) -> None:
        self._snapshot, self._columns = snapshot, grid.shape[1]
        slot = np.clip((grid[0] >> POSITION_BITS) - snapshot.origin, 0, len(snapshot.lanes))
        width = np.append(snapshot.lanes, 0)[slot]
        first = np.ones(grid.shape, np.bool_)
        np.not_equal(grid[1:] - grid[:-1], width, out=first[1:])
        if not self._take(grid, first, find):  # ids of other segments, which have other numbers of lanes
            self._take(grid, np.ones(grid.shape, np.bool_), find)

    def _take(self, grid: Ints, first: Bools, find: Callable[[Ints], Windows]) -> bool:
        """Take the runs that begin with these steps; False: some are no successive rows of one lane."""
        self.last = np.ones(grid.shape, np.bool_)
        self.last[:-1] = first[1:]
        # Column after column: there the rows of a run lie one behind the other, and those of the next column near them.
        begin, end = np.flatnonzero(first.T), np.flatnonzero(self.last.T)
        column, number = np.divmod(begin, len(grid))
        count = end - begin + 1
        runs, found = len(begin), find(np.append(grid[number, column], grid[number + count - 1, column]))
        self._runs = np.empty((RUN_ROWS, runs), np.int64)
        self._runs[SLOT], self._runs[LANE], self._runs[ROW] = found.slot[:runs], found.lane[:runs], found.row[:runs]
        self._runs[COUNT], self._runs[ITEM] = count, number * self._columns + column
        is_lane = (found.slot[:runs] == found.slot[runs:]) & (found.lane[:runs] == found.lane[runs:])
        return bool((is_lane & (found.row[runs:] - found.row[:runs] + 1 == count)).all())

    def copy(self, leaf: str, out: NDArray[Any], threads: CopyThreads | None = None) -> None:
        """Copy a leaf of all steps to an array of its dtype, (n * columns, *shape).

        With other threads, these do parts of a large one. Raises SegmentGone where a segment was evicted, FormatError
        where a chunk is missing.
        """
        snapshot, table, kernel = self._snapshot, self._snapshot.leaf(leaf), chosen("copy_runs")
        slot, lane, first = self._runs[[SLOT, LANE, ROW]]
        bad = -1
        for _ in range(ATTEMPTS):
            with snapshot.tables.lock:  # while it is held, nothing leaves for what other threads map
                table.ensure(slot, lane, first, first + self._runs[COUNT] - 1)
                held, ((line, arrays),) = snapshot.tables.lines([leaf])
            arguments = snapshot.record, line, self._runs, self._columns, out.ctypes.data
            work = copying((held, arrays, snapshot, out), kernel, *arguments)
            if threads is None or out.nbytes < threads.least:
                bad = work(0, len(slot))
            else:
                bad = threads.copy(threads.parts(out.nbytes), len(slot), work)
            if bad < 0:
                return
        raise missing_chunk(snapshot, leaf, slot[bad], lane[bad], first[bad])

    def values(self, leaf: str) -> NDArray[Any]:
        """Return a leaf of all steps, (n * columns, *shape)."""
        table = self._snapshot.leaf(leaf)
        out = np.empty((self.last.size, *table.shape), table.dtype)
        self.copy(leaf, out)
        return out
