"""What kernels read of a snapshot: one record of int64, since each argument of a kernel costs about 50 ns.

It has numbers and addresses of arrays, which the snapshot keeps alive, and behind them what was followed of the lanes
that may still grow: the rows of `following`, a column a lane. Sealed lanes never change, so all snapshots share theirs.
Here are the columns, and plain twins of what makes and reads the record, which a store uses without numba.
"""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import following

Ints = NDArray[np.int64]

# Of each segment by slot: its lanes, 0 where it is gone; the place of the first of them among all lanes; its first
# column among lanes that may grow, -1 where it is sealed. The number of the first slot's segment, and how many there
# are.
ORIGIN, SLOTS, LANES, LANE_BASE, LIVE_BASE = range(5)
# Nothing is hidden of an episode that began at this time or later.
REACHED = 5
# Segments that may grow: lines of slot, lanes and first column.
GROWING, GROWING_COUNT = 6, 7
# How many lanes may grow, and how many there are; then by place: the first row that is not hidden, rows of `following`.
LIVE_LANES, ALL_LANES, OLDEST, ROWS = range(8, 12)
# The address of what is behind the head.
LIVE = 12
HEAD = 13

GROWING_COLUMNS = 3


def freeze_plain(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Do what `freeze` does."""
    record[:HEAD] = head
    record[[REACHED, ALL_LANES, OLDEST, ROWS]] = reached, rows.shape[1], oldest.ctypes.data, rows.ctypes.data
    record[LIVE] = record.ctypes.data + 8 * HEAD
    live = record[HEAD:].reshape(following.LANE_ROWS, -1)
    live[:] = rows[:, places_of(growing[:, following.PLACE], growing[:, following.LANES])]


def places_of(first: Ints, count: Ints) -> Ints:
    """Return `first[i]`, `first[i]` + 1, ..., `count[i]` numbers each, one behind the other."""
    return np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())


class Frozen(NamedTuple):
    """What a record says, for the plain twins."""

    origin: int
    reached: int
    lanes: Ints
    lane_base: Ints
    live_base: Ints
    growing: Ints
    live: Ints
    oldest: Ints
    rows: Ints

    @classmethod
    def of(cls, record: Ints) -> "Frozen":
        """Read a record."""
        head = record[:HEAD].tolist()
        lanes, lane_base, live_base = (array_at(head[at], head[SLOTS]) for at in (LANES, LANE_BASE, LIVE_BASE))
        rows = array_at(head[ROWS], following.LANE_ROWS * head[ALL_LANES]).reshape(following.LANE_ROWS, -1)
        growing = array_at(head[GROWING], GROWING_COLUMNS * head[GROWING_COUNT]).reshape(-1, GROWING_COLUMNS)
        live, oldest = record[HEAD:].reshape(following.LANE_ROWS, -1), array_at(head[OLDEST], head[ALL_LANES])
        return cls(head[ORIGIN], head[REACHED], lanes, lane_base, live_base, growing, live, oldest, rows)

    def rows_of(self, which: int, slot: int, lane: int) -> int:
        """Do what the kernel of this name does."""
        column = int(self.live_base[slot])
        if column >= 0:
            return int(self.live[which, column + lane])
        return int(self.rows[which, self.lane_base[slot] + lane])


def array_at(address: int, count: int, dtype: Any = np.int64) -> NDArray[Any]:
    """Return the array of so many numbers at an address."""
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)
