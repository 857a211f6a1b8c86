"""How many values of episodes a segment has: rows of the arrays of episode fields, counted by its flags."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.ids import EPISODE_VALUES
from diskreplay.verify.check_attributes import Segment

Ints = NDArray[np.int64]
_BLOCK_BYTES = 1 << 20


def count_values(segment: Segment, upto: Ints, before: Ints | None = None) -> Ints:
    """Return how many rows of each lane have values, from ``before`` up to ``upto``: by flags, or lost with their rows.

    Flags that cannot be read count as 0.
    """
    before = np.zeros_like(upto) if before is None else before
    found, per_chunk = np.zeros(segment.lanes, np.int64), segment.chunk_rows[layout.DONE]
    if not segment.plan.episode_arrays:
        return found
    for lane in np.flatnonzero(before < upto).tolist():
        at, stop = int(before[lane]), int(upto[lane])
        while at < stop:
            end = min(stop, (at // per_chunk + 1) * per_chunk, at + _BLOCK_BYTES)
            flags = np.frombuffer(segment.read_rows(layout.DONE, lane, at, end) or b"", np.uint8)
            found[lane] += np.count_nonzero(flags & EPISODE_VALUES)
            at = end
    return found + lost_values(segment, before, upto)


def lost_values(segment: Segment, before: Ints, upto: Ints) -> Ints:
    """Return how many values of each lane were lost with the rows from ``before`` up to ``upto``."""
    found, attributes = np.zeros(segment.lanes, np.int64), segment.attributes
    for (position, _), count in zip(attributes.lost, attributes.lost_values, strict=True):
        row, lane = divmod(position, segment.lanes)
        if before[lane] <= row < upto[lane]:
            found[lane] += count
    return found
