"""Where the next rows of lanes go: worked out once for many rows, so that a step is only writing."""

from collections.abc import Sequence
from time import clock_gettime_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.machine import CLOCK

Ints = NDArray[np.int64]

# By field: the chunk as items, and what added to a lane's row gives the number of the row's item.
Window = dict[str, tuple[NDArray[Any], Ints]]


class AppendCursor:
    """Rows of a segment's only lane that are reserved and lie in one chunk of every field: the inner loop of `Writer`.

    It ends with the next `reserve` that has anything to do, and with `close`.
    """

    __slots__ = ("_committed", "_count", "_done", "_obs", "_observed", "_segment", "_targets", "_time", "last", "start")

    def __init__(self, segment: Any, row: int, limit: int) -> None:
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


class Places(NamedTuple):
    """Where rows of several lanes lie in one chunk, and which of them these are; None: all."""

    chunk: int
    at: Ints
    chosen: Ints | None


def find_places(lanes: Ints, rows: Ints, shift: int) -> list[Places]:
    """Sort rows, one of each lane, by the chunk that they are in."""
    chunks, at = rows >> shift, lanes << shift
    at += rows
    first = int(chunks[0])
    if (chunks == first).all():
        at -= first << shift
        return [Places(first, at, None)]
    at -= chunks << shift
    found = []
    for chunk in np.unique(chunks).tolist():
        chosen = np.flatnonzero(chunks == chunk)
        found.append(Places(chunk, at[chosen], chosen))
    return found
