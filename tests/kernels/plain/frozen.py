"""Plain twins of the kernels of `kernels.frozen`."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Ints
from diskreplay.kernels import following
from diskreplay.kernels.frozen import (
    ALL_LANES,
    FIRST_ROWS,
    FOLDERS,
    GROWING,
    GROWING_COLUMNS,
    GROWING_COUNT,
    HEAD,
    LANE_BASE,
    LANES,
    LIVE_BASE,
    OLDEST,
    ORIGIN,
    OWN_FOLDER,
    REACHED,
    ROWS,
    SLOTS,
)


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
    folders: Ints
    first_rows: Ints

    @classmethod
    def of(cls, record: Ints) -> "Frozen":
        """Read a record."""
        head = record[:HEAD].tolist()
        lanes, lane_base, live_base = (array_at(head[at], head[SLOTS]) for at in (LANES, LANE_BASE, LIVE_BASE))
        rows = array_at(head[ROWS], following.LANE_ROWS * head[ALL_LANES]).reshape(following.LANE_ROWS, -1)
        growing = array_at(head[GROWING], GROWING_COLUMNS * head[GROWING_COUNT]).reshape(-1, GROWING_COLUMNS)
        live, oldest = record[HEAD:].reshape(following.LANE_ROWS, -1), array_at(head[OLDEST], head[ALL_LANES])
        where = array_at(head[FOLDERS], head[SLOTS]), array_at(head[FIRST_ROWS], head[ALL_LANES])
        return cls(head[ORIGIN], head[REACHED], lanes, lane_base, live_base, growing, live, oldest, rows, *where)

    def folder(self, slot: int, lane: int) -> tuple[int, int, int]:
        """Return the folder that holds a lane, which line of its chunks, and how many rows come before."""
        first = int(self.first_rows[self.lane_base[slot] + lane])
        return (int(self.folders[slot]), lane, 0) if first == OWN_FOLDER else (int(self.folders[slot]), 0, first)

    def rows_of(self, which: int, slot: int, lane: int) -> int:
        """Do what the kernel of this name does."""
        column = int(self.live_base[slot])
        if column >= 0:
            return int(self.live[which, column + lane])
        return int(self.rows[which, self.lane_base[slot] + lane])

    def visible_row(self, step_id: int) -> tuple[int, int, int] | None:
        """Return the slot, the lane and the row of an id, None unless it is the id of a visible row."""
        slot = (step_id >> POSITION_BITS) - self.origin
        if not 0 <= slot < len(self.lanes) or self.lanes[slot] <= 0:
            return None
        row, lane = divmod(step_id & POSITION_MASK, int(self.lanes[slot]))
        is_visible = self.oldest[self.lane_base[slot] + lane] <= row < self.rows_of(following.COMMITTED, slot, lane)
        return (slot, lane, row) if is_visible else None


def array_at(address: int, count: int, dtype: Any = np.int64) -> NDArray[Any]:
    """Return the array of so many numbers at an address."""
    memory = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)
