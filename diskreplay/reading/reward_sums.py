"""The sums of rewards that sealed segments and packs keep of their episodes."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS, Floats, Ints
from diskreplay.reading.damaged import DAMAGE
from diskreplay.segments.episode_table import read_columns
from diskreplay.segments.segment import SegmentInfo


class RewardSums(NamedTuple):
    """Columns of the table of episodes of a folder: ``keys`` of lane and row of the first steps, steps, and sums."""

    keys: Ints
    steps: NDArray[np.int32]
    sums: Floats

    @classmethod
    def read(cls, info: SegmentInfo) -> Self:
        """Read the table of a sealed segment; nothing where that is damaged or gone: the rows say the same."""
        try:
            position, steps, sums = read_columns(info, "position", "steps", "total_reward")
        except DAMAGE:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
        row, lane = np.divmod(position, len(info.lanes))
        return cls(_key(lane, row), steps, sums)

    def find(self, lane: Ints, row: Ints, steps: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the sums of the rewards of episodes, and which are known; the others are arbitrary."""
        if not len(self.keys):
            return np.zeros(len(row)), np.zeros(len(row), np.bool_)
        keys = _key(lane, row)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        # `repair --salvage` may add steps to the last episode of a lane.
        return self.sums[at], (self.keys[at] == keys) & (self.steps[at] == steps)


def _key(lane: Ints, row: Ints) -> Ints:
    return (lane << POSITION_BITS) + row
