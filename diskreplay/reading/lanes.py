"""Writers' lanes across segments: which lane of a segment carries on which, and which writers may still append."""

from typing import Any

import numpy as np

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Ints
from diskreplay.segments.documents.layout import MAX_LANES
from diskreplay.segments.files.locks import is_locked
from diskreplay.segments.sealing import may_seal

LANE_BITS = MAX_LANES.bit_length() - 1


def writer_and_lane(key: Any) -> tuple[Any, Any]:
    """Return the writer and the lane of a key, or of an array of them."""
    return key >> LANE_BITS, key & (MAX_LANES - 1)


class LaneMap:
    """Where the lanes of all segments belong: arrays by segment lane, ``lane_base[slot] + lane`` of a snapshot.

    ``key`` is ``writer << 20 | lane``, -1 where the segment was gone before it was seen; keys are in the order of
    (writer, lane), and ``keys`` has each once, in order. ``slot`` is the segment's. ``following`` is the place of the
    same lane in the writer's next segment, ``previous`` that in the segment before; -1: there is none. Not thread-safe.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._clear(0)

    def _clear(self, origin: int) -> None:
        self.key: Ints = np.zeros(0, np.int64)
        self.keys: Ints = np.zeros(0, np.int64)
        self.slot: Ints = np.zeros(0, np.int64)
        self.following: Ints = np.zeros(0, np.int64)
        self.previous: Ints = np.zeros(0, np.int64)
        self._origin = origin
        self._base: Ints = np.zeros(0, np.int64)
        self._counts: Ints = np.zeros(0, np.int64)

    def update(self, snapshot: Any) -> None:
        """Take in the segments of a snapshot."""
        if snapshot.generation != self._generation:
            self._generation = snapshot.generation
            self._clear(snapshot.origin)
        seen, slots = len(self._base), len(snapshot.lanes)
        if slots <= seen:
            return  # an older one may be asked about again
        # Of segments that are gone too, which have no lanes in the snapshot.
        self._base = snapshot.lane_base
        self._counts = np.diff(np.append(snapshot.lane_base, len(snapshot.committed)))
        keys = [self.key]
        for slot, count in enumerate(self._counts[seen:].tolist(), seen):
            found = snapshot.tables.lanes_of(slot, self._origin)
            keys.append(np.full(count, -1) if found is None else (found[0] << LANE_BITS) + found[1])
        self.key = np.concatenate(keys)
        self.keys = np.unique(self.key[self.key >= 0])
        self.slot = np.repeat(np.arange(slots), self._counts)
        order = np.argsort(self.key, kind="stable")
        same = (self.key[order][1:] == self.key[order][:-1]) & (self.key[order][1:] >= 0)
        self.following, self.previous = np.full((2, len(self.key)), -1)
        self.following[order[:-1][same]] = order[1:][same]
        self.previous[order[1:][same]] = order[:-1][same]

    def places(self, ids: Ints) -> Ints:
        """Return the segment lane of each id of a snapshot that was taken in."""
        slot = (ids >> POSITION_BITS) - self._origin
        places: Ints = self._base[slot] + (ids & POSITION_MASK) % self._counts[slot]
        return places

    def next_rows(self, snapshot: Any, places: Ints) -> Ints:
        """Return for each segment lane the next one in which the same lane has rows, -1 where there is none."""
        found = self.following[places]
        while True:
            found[found >= len(snapshot.committed)] = -1  # in segments that came later
            empty = found >= 0
            empty[empty] = snapshot.committed[found[empty]] == 0
            if not empty.any():
                return found
            found[empty] = self.following[found[empty]]

    def growing(self, snapshot: Any) -> Ints:
        """Return the keys of all lanes of writers that have a segment which is not sealed, in order."""
        live = ~snapshot.sealed & (snapshot.lanes > 0)
        there = slice(len(snapshot.committed))  # without segments that came later
        writers = np.unique(self.key[there][live[self.slot[there]]] >> LANE_BITS)
        return self.keys[np.isin(self.keys >> LANE_BITS, writers)]


def is_abandoned(snapshot: Any, writer: int) -> bool:
    """Tell whether a writer with unsealed segments died: none of them is locked, and this process would see a lock."""
    growing = map(snapshot.tables.info, np.flatnonzero(~snapshot.sealed & (snapshot.lanes > 0)).tolist())
    live = [info for info in growing if info is not None and info.writer == writer]
    return all(may_seal(info) and not is_locked(info.lock_path) for info in live)
