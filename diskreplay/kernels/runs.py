"""Ids in arithmetic runs: the form in which views hand their ids to distributions. Plain numpy, no compiled code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SEGMENT_SHIFT = 35
WITHIN_SEGMENT = (1 << SEGMENT_SHIFT) - 1


class IdRuns(NamedTuple):
    """Runs of ids: run `i` is `first[i] + j * stride[i]` for `0 <= j < count[i]`; three int64 arrays of one length."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    count: NDArray[np.int64]  # type: ignore[assignment]  # nobody counts the elements of this tuple


def after_frontier(runs: IdRuns, frontier: int) -> IdRuns:
    """Drop from each run the ids below `frontier`; a run that lies below it whole keeps its place with count 0."""
    first, stride, count = runs
    if len(first) == 1:  # a fifth of the time: it is asked at each refresh of a store with a capacity
        start, step, ids = int(first[0]), int(stride[0]), int(count[0])
        if (below := min(max(-((start - frontier) // step), 0), ids)) == 0:
            return runs
        return IdRuns(np.array([start + below * step]), stride, np.array([ids - below]))
    if not len(first) or frontier <= int(first.min()):
        return runs
    hidden = np.clip(-((first - frontier) // stride), 0, count)
    return IdRuns(first + hidden * stride, stride, count - hidden)


def keep(runs: IdRuns, where: NDArray[np.bool_]) -> IdRuns:
    """Select the runs at which `where` is true."""
    if where.all():
        return runs
    return IdRuns(runs.first[where], runs.stride[where], runs.count[where])


def joined(parts: list[IdRuns]) -> IdRuns:
    """Concatenate several sets of runs."""
    return IdRuns(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def lane_keys(ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers that order ids by segment, lane and row; -1 where the segment is not there.

    `lanes` are those of the segments from number `origin` on, 0 where one is gone.
    """
    slot, position = (ids >> SEGMENT_SHIFT) - origin, ids & WITHIN_SEGMENT
    known = (slot >= 0) & (slot < len(lanes))
    if not len(lanes):
        return np.full(len(ids), -1)
    width = lanes[np.where(known, slot, 0)]
    known &= width > 0
    width = np.maximum(width, 1)
    row, lane = np.divmod(position, width)
    return np.where(known, ids - position + lane * (WITHIN_SEGMENT // width) + row, -1)
