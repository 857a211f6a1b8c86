"""What a follower knows of the segments of a store, by slot, and of their lanes, segment after segment."""

from collections.abc import Sequence

import numpy as np

from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable, Ints
from diskreplay.kernels import following, hiding
from diskreplay.reading.folder import Pack
from diskreplay.segments.segment import SegmentInfo


class Slots:
    """The slots of segments: number ``origin`` has slot 0. Not thread-safe.

    Snapshots have some of the arrays: `lanes`, `sealed` and `clocks` are replaced where a slot that they have changes.

    Attributes
    ----------
    lanes, lane_base : (slots,) int64
        The number of lanes of each segment, 0 if it is gone or cannot be read; the place of its first among all lanes.
    lane_slot : (lanes,) int64
        The slot of each lane.
    sealed : (slots,) bool
        Segments that were taken in as sealed.
    folder : (slots,) int64
        The number of the segment, or of the pack, that has the rows.
    clocks, last : (slots,) int64
        What makes a time of its rows one since the epoch; when its last row came, `hiding.NEVER` if it may grow.
    rows : (`following.LANE_ROWS`, lanes) int64
        How far each lane was followed: see `kernels.following`.
    """

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.lanes = np.zeros(0, np.int64)
        self.lane_base = np.zeros(0, np.int64)
        self.lane_slot = np.zeros(0, np.int64)
        self.sealed = np.zeros(0, np.bool_)
        self.folder = np.zeros(0, np.int64)
        self.clocks = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.rows = np.zeros((following.LANE_ROWS, 0), np.int64)

    @property
    def end(self) -> int:
        """The number of the segment behind the last slot."""
        return self.origin + len(self.lanes)

    def add(self, infos: Sequence[SegmentInfo | None], packs: Sequence[Pack]) -> int:
        """Add slots for the next segments, of packs too; None: it is gone or in a pack. Return how many lanes came."""
        start, count = self.end, len(infos)
        lanes = np.array([0 if info is None else len(info.lanes) for info in infos], np.int64)
        clocks, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        folder = start + np.arange(count)
        for slot, info in enumerate(infos):
            if info is not None:
                clocks[slot], last[slot] = info.clock.wall, info.bounds[1] if info.sealed else hiding.NEVER
        for pack in packs:
            new = pack.tables.numbers >= start
            at = pack.tables.numbers[new] - start
            lanes[at], clocks[at], last[at] = pack.tables.lanes[new], pack.info.clock.wall, pack.info.bounds[1]
            folder[at] = pack.info.number
        added = int(lanes.sum())
        self.lane_base = np.append(self.lane_base, self.rows.shape[1] + np.cumsum(lanes) - lanes)
        self.lane_slot = np.append(self.lane_slot, np.repeat(len(self.lanes) + np.arange(count), lanes))
        self.lanes = np.append(self.lanes, lanes)
        self.sealed = np.append(self.sealed, np.zeros(count, np.bool_))
        self.folder = np.append(self.folder, folder)
        self.clocks, self.last = np.append(self.clocks, clocks), np.append(self.last, last)
        new_rows = np.zeros((following.LANE_ROWS, added), np.int64)
        new_rows[following.OPEN_START] = -1
        self.rows = np.append(self.rows, new_rows, axis=1)
        return added

    def move(self, slots: Ints, pack: Pack) -> None:
        """Note that the rows of segments are in a pack now."""
        self.clocks, self.last = self.clocks.copy(), self.last.copy()
        self.clocks[slots], self.last[slots] = pack.info.clock.wall, pack.info.bounds[1]
        self.folder[slots] = pack.info.number

    def note_sealed(self, slot: int) -> None:
        """Note that a segment was taken in as sealed."""
        self.sealed = self.sealed.copy()
        self.sealed[slot] = True

    def empty(self, slots: list[int]) -> None:
        """Note that segments are gone."""
        self.lanes = self.lanes.copy()
        self.lanes[slots] = 0

    def span(self, slot: int) -> slice:
        """Return the places of the lanes of a segment among all lanes."""
        base = int(self.lane_base[slot])
        return slice(base, base + int(self.lanes[slot]))

    def places_of(self, episodes: EpisodeTable) -> Ints:
        """Return the place among all lanes of the lane of each episode."""
        slot = (episodes.first >> POSITION_BITS) - self.origin
        place: Ints = self.lane_base[slot] + (episodes.first & POSITION_MASK) % episodes.stride
        return place

    def count_open(self) -> int:
        """Count the steps of open episodes."""
        lanes = np.flatnonzero(self.rows[following.OPEN_START] >= 0)
        return int((self.rows[following.COMMITTED, lanes] - self.rows[following.OPEN_START, lanes]).sum())
