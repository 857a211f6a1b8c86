"""How many values of episodes a segment has: rows of the arrays of episode fields, counted by its flags."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES
from diskreplay.integrity.verify.check_attributes import Segment

Ints = NDArray[np.int64]


def count_values(segment: Segment, upto: Ints, before: Ints | None = None) -> Ints:
    """Return how many rows of each lane have values, from ``before`` up to ``upto``: by flags, or lost with their rows.

    Flags that cannot be read count as 0.
    """
    before = np.zeros_like(upto) if before is None else before
    found = np.zeros(segment.lanes, np.int64)
    if not segment.plan.episode_arrays:
        return found
    for lane in np.flatnonzero(before < upto).tolist():
        for _, _, flags in segment.flag_parts(lane, int(before[lane]), int(upto[lane])):
            found[lane] += np.count_nonzero(flags & EPISODE_VALUES)
    return found + lost_values(segment, before, upto)


def lost_values(segment: Segment, before: Ints, upto: Ints) -> Ints:
    """Return how many values of each lane were lost with the rows from ``before`` up to ``upto``."""
    found, attributes = np.zeros(segment.lanes, np.int64), segment.attributes
    for (position, _), count in zip(attributes.lost, attributes.lost_values, strict=True):
        row, lane = divmod(position, segment.lanes)
        if before[lane] <= row < upto[lane]:
            found[lane] += count
    return found
