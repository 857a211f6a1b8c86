"""Frames of stacks that reach behind a cut for an episode's length: they lie in earlier segments of the writer."""

from collections.abc import Sequence

import numpy as np

from diskreplay.errors import SegmentGone
from diskreplay.ids import CUT, FIRST, NO_STEP, POSITION_BITS, TERMINATED, TRUNCATED, Ints
from diskreplay.reading.lanes import LaneMap
from diskreplay.reading.snapshot import Snapshot
from diskreplay.views.base import Block
from diskreplay.views.windows import Copy, Windows


class EarlierParts:
    """Puts frames of the parts before an episode into stacks at its start. Not thread-safe.

    The kernel that copies rows knows one segment: it repeats the first frame of the part. `copies` read rows of
    observations before a window.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._depth = -min(copy.offset for copy in copies)
        self._lanes = LaneMap()

    def fill(self, snapshot: Snapshot, windows: Windows, block: Block) -> None:
        """Replace the repeated frames of windows that were copied to a block, where the real ones are there."""
        # A part that continues another one begins in the first row of its lane.
        for item in np.flatnonzero((windows.floor == 0) & (windows.row < self._depth)).tolist():
            slot, lane, row = windows.table[:3, item].tolist()
            try:
                places = self._rows_before(snapshot, slot, lane, self._depth - row)
                if places.shape[1]:
                    self._copy(snapshot, places, windows.table[:, item], item, block)
            except SegmentGone:  # it was deleted since the snapshot
                continue

    def _copy(self, snapshot: Snapshot, places: Ints, window: Ints, item: int, block: Block) -> None:
        for copy in self._copies:
            missing = -int(window[copy.begin] + copy.offset)
            table, stacks = snapshot.leaf(copy.leaf), block.arrays[copy.target][item]
            if missing > 0 and window[copy.stop] and stacks.size:
                frames = stacks.reshape(-1, *table.shape)
                back = np.arange(missing, max(missing - len(frames), 0), -1)
                frames[: len(back)] = table.values(*places[:, np.minimum(back, places.shape[1]) - 1])

    def _rows_before(self, snapshot: Snapshot, slot: int, lane: int, count: int) -> Ints:
        """Return slot, lane and row of up to `count` steps before the first row of a lane, the newest first."""
        found = [np.zeros((3, 0), np.int64)]
        done = snapshot.leaf("done")
        while count > 0 and done.rows(slot, lane, 0, 1)[0] & (FIRST | CUT) == FIRST | CUT:
            place = self._place_before(snapshot, slot, lane)
            if place < 0:
                break
            slot = int(self._lanes.slot[place])
            lane, stop = place - int(snapshot.lane_base[slot]), int(snapshot.committed[place])
            first = max(stop - 1 - count, 0)
            flags = done.rows(slot, lane, first, stop)
            # The last step is followed by its next observation if the writer knew that.
            is_cut = flags[-1] & (CUT if flags[-1] & NO_STEP else TERMINATED | TRUNCATED) in (CUT, 0)
            last = stop - 1 - int(flags[-1] & NO_STEP != 0)
            last_id = (slot + snapshot.origin) << POSITION_BITS | last * int(snapshot.lanes[slot]) + lane
            if not is_cut or snapshot.evicted(np.array([last_id]))[0]:
                break
            first += int(np.flatnonzero(flags[: last + 1 - first] & FIRST).max(initial=0))
            rows = np.arange(last, first - 1, -1)
            found.append(np.stack([np.full_like(rows, slot), np.full_like(rows, lane), rows]))
            count -= len(rows)
            if first > 0:
                break
        return np.concatenate(found, axis=1)

    def _place_before(self, snapshot: Snapshot, slot: int, lane: int) -> int:
        """Return the place of the lane that this one continues, -1 if a segment that may have it is not there."""
        self._lanes.update(snapshot)
        place = int(self._lanes.previous[snapshot.lane_base[slot] + lane])
        while place >= 0 and not snapshot.committed[place]:
            place = int(self._lanes.previous[place])
        if place < 0:
            return -1
        first = int(self._lanes.slot[place])
        missing = first + np.flatnonzero(snapshot.lanes[first:slot] == 0)
        # A pack has a number of its own, between those of segments.
        packs = [pack.info.number - snapshot.origin for pack in list(snapshot.tables.packs.values())]
        return place if np.isin(missing, packs).all() else -1
