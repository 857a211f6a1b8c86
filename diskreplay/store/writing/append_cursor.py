"""Where the next rows of a lone lane go: worked out once for many rows, so that a step is only writing."""

from collections.abc import Sequence
from time import clock_gettime_ns
from typing import Any

import numpy as np

from diskreplay.format import layout
from diskreplay.format.machine import CLOCK
from diskreplay.format.segment_writer import SegmentWriter


class AppendCursor:
    """Rows of a segment's only lane that are reserved and lie in one chunk of every field: the inner loop of `Writer`.

    It ends where its lane moves to another segment.
    """

    __slots__ = ("_committed", "_count", "_done", "_obs", "_observed", "_segment", "_targets", "_time", "last", "start")

    def __init__(self, segment: SegmentWriter, row: int, limit: int) -> None:
        self._segment, self.start = segment, row
        parts = {leaf: column.target(0, row) for leaf, column in segment.columns.items()}
        # An observation may have to follow the last row.
        self.last = min(limit, segment.reserved[0], row + min(count for _, count in parts.values())) - 2
        targets = {leaf: target for leaf, (target, _) in parts.items() if not leaf.startswith("episode/")}
        self._done = targets.pop(layout.DONE)
        time = targets.pop(layout.TIME)
        # Python's own numbers go into memory in half of numpy's time.
        self._time = time.data if isinstance(time, np.ndarray) else time
        self._targets = list(targets.values())
        self._count = len(self._targets)
        self._obs = [target for leaf, target in targets.items() if leaf == "obs" or leaf.startswith("obs/")]
        self._committed, self._observed = segment.committed.data, segment.observed.data

    def append(self, row: int, items: Sequence[Any], known: int, following: Sequence[Any] | None) -> None:
        """Write and publish a step in the middle of an episode, and the observation after it where it is given.

        ``row`` is the lane's next one, from ``start`` to ``last``. The first ``known`` items are there already.
        """
        at, targets, segment = row - self.start, self._targets, self._segment
        for i in range(known, self._count):
            targets[i][at] = items[i]
        self._done[at] = 0
        self._time[at] = clock_gettime_ns(CLOCK)  # `clock_ns`, without a call of Python in every step
        if following is not None:
            for i, target in enumerate(self._obs):
                target[at + 1] = following[i]
        # As `SegmentWriter.publish`, without the time that a call takes; what may be refused comes first.
        self._committed[0] = segment.rows[0] = row + 1
        segment.total_rows += 1
        if following is not None:
            self._observed[0] = row + 2
