"""Windows of steps, found for a batch of ids and gathered leaf by leaf: what all readers of windows share."""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, InvalidIndex
from diskreplay.ids import POSITION_BITS, POSITION_MASK
from diskreplay.kernels import scan as rows
from diskreplay.kernels.stream import STREAMED
from diskreplay.kernels.table import chosen
from diskreplay.views.base import Ints, LeafTable
from diskreplay.views.halves import SHARED, in_halves

# Mapped chunks may be forgotten by another thread that needs room for its own before they are used.
ATTEMPTS = 8


class Windows:
    """The windows of `size` ids: int64 arrays, one number an id; see kernels.scan for each."""

    def __init__(self, size: int) -> None:
        self.table = np.empty((rows.WINDOW_ROWS, size), np.int64)
        self.ends = np.empty(size, np.uint8)
        self.slot, self.lane, self.row = self.table[rows.SLOT], self.table[rows.LANE], self.table[rows.ROW]
        self.floor, self.after = self.table[rows.FLOOR], self.table[rows.AFTER]
        self.obs_stop, self.step_stop = self.table[rows.OBS_STOP], self.table[rows.STEP_STOP]
        self.k = self.table[rows.K]

    def find(self, snapshot: Any, ids: Ints, n: int, stack: int, whole: bool) -> int:
        """Find the window of each id; returns the place of the first id that has none, or -1."""
        done = snapshot.leaf("done")
        bad = self._scan(snapshot, done, ids, n, stack, whole)
        for _ in range(ATTEMPTS):
            if bad < 0 or not _map_flags(snapshot, done, ids, n, stack):
                break
            bad = self._scan(snapshot, done, ids, n, stack, whole)
        return bad

    def _scan(self, snapshot: Any, done: LeafTable, ids: Ints, n: int, stack: int, whole: bool) -> int:
        _held, chunks, first_chunk, bases = done.addresses()
        place: int = chosen("scan")(
            ids, n, stack, whole, snapshot.origin, snapshot.oldest, snapshot.lanes, snapshot.lane_base,
            snapshot.committed, snapshot.observed, snapshot.sealed,
            first_chunk, chunks, done.shift, bases, self.table, self.ends,
        )  # fmt: skip
        return place

    def gather(
        self,
        snapshot: Any,
        leaf: str,
        row: Ints,
        stop: Ints,
        offset: int,
        length: int,
        out: NDArray[np.uint8],
        helper: Executor | None = None,
    ) -> None:
        """Copy rows row + offset, ... of a leaf, `length` an id, into `out`; zeros from `stop` on.

        With a helper, it does half of what is large.
        """
        table: LeafTable = snapshot.leaf(leaf)
        work = partial(self._gather, table, snapshot.lanes, row, stop, offset, length, out)
        bad = in_halves(helper if out.nbytes >= SHARED else None, len(row), work)
        for _ in range(ATTEMPTS):
            if bad < 0:
                return
            first = np.maximum(row + offset, self.floor)
            last = np.minimum(np.maximum(first, row + offset + length - 1), stop - 1)
            real = last >= first
            table.ensure(self.slot[real], first[real], last[real])
            bad = work(0, len(row))
        if bad >= 0:
            segment = self.slot[bad] + snapshot.origin
            raise FormatError(
                f"segment {segment} has no chunk of {leaf} for row {row[bad]} of lane {self.lane[bad]}; "
                "run `diskreplay verify` on the store"
            )

    def _gather(
        self,
        table: LeafTable,
        lanes: Ints,
        row: Ints,
        stop: Ints,
        offset: int,
        length: int,
        out: NDArray[np.uint8],
        first: int,
        end: int,
    ) -> int:
        # Without looking first whether everything is mapped: the kernel says so, and nearly always it is.
        _held, chunks, first_chunk, bases = table.addresses()
        place: int = chosen("gather")(
            self.slot[first:end], self.lane[first:end], row[first:end], self.floor[first:end], stop[first:end],
            offset, length, first_chunk, chunks, table.shift, lanes, bases, table.row_bytes,
            out.nbytes >= STREAMED, out[first:end],
        )  # fmt: skip
        return place if place < 0 else first + place


def _map_flags(snapshot: Any, done: LeafTable, ids: Ints, n: int, stack: int) -> bool:
    """Map the flags that the windows of these ids may need; False where an id is none of the snapshot's."""
    slot, position = (ids >> POSITION_BITS) - snapshot.origin, ids & POSITION_MASK
    if ((slot < 0) | (slot >= len(snapshot.lanes))).any() or (snapshot.lanes[slot] <= 0).any():
        return False
    row, lane = np.divmod(position, snapshot.lanes[slot])
    last = snapshot.committed[snapshot.lane_base[slot] + lane] - 1
    if (row > last).any():
        return False
    done.ensure(slot, np.maximum(row - stack + 1, 0), last if n < 0 else np.minimum(row + n, last))
    return True


def map_rows(snapshot: Any, leaves: Sequence[str], ids: Ints, n: int, stack: int) -> bool:
    """Map the rows of `done` and of leaves that windows of `n` steps may need; False where an id is no step's."""
    if not _map_flags(snapshot, snapshot.leaf("done"), ids, n, stack):
        return False
    slot = (ids >> POSITION_BITS) - snapshot.origin
    row, lane = np.divmod(ids & POSITION_MASK, snapshot.lanes[slot])
    at = snapshot.lane_base[slot] + lane
    for leaf in leaves:
        # Behind the last step there may be one more observation, and nothing of other leaves.
        rows_there = snapshot.observed if leaf.split("/")[0] == "obs" else snapshot.committed
        snapshot.leaf(leaf).ensure(slot, np.maximum(row - stack + 1, 0), np.minimum(row + n, rows_there[at] - 1))
    return True


def refuse_evicted(snapshot: Any, ids: Ints) -> None:
    """Raise InvalidIndex, naming the first of these ids of rows that was evicted by hand, if one was."""
    evicted = snapshot.evicted(ids)
    if evicted.any():
        raise InvalidIndex(f"id {ids[np.argmax(evicted)]} is not in the store: its episode was evicted")


def refuse(snapshot: Any, step_id: int, view: Any) -> InvalidIndex:
    """Return the error that says why an id is none of the view's."""
    slot, position = (step_id >> POSITION_BITS) - snapshot.origin, step_id & POSITION_MASK
    if step_id < 0 or slot >= len(snapshot.lanes):
        return InvalidIndex(f"id {step_id} never existed")
    gone = slot < 0 or snapshot.lanes[slot] <= 0
    row, lane = (0, 0) if gone else divmod(position, int(snapshot.lanes[slot]))
    if gone or row < snapshot.oldest[snapshot.lane_base[slot] + lane]:
        return InvalidIndex(f"id {step_id} is not in the store: it was evicted, or never existed")
    if row >= snapshot.committed[snapshot.lane_base[slot] + lane]:
        return InvalidIndex(f"id {step_id} never existed, or is newer than this snapshot; call refresh() first")
    return InvalidIndex(
        f"id {step_id} cannot be sampled as {view}: its window is not complete yet, the episode ended without a final "
        "observation at this step, or the id is no step's"
    )
