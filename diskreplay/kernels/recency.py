"""Ids by age: the id that so many are newer than, and how many are newer than an id.

The ids come as runs, in groups of a lane each that are sorted by row: group g has the runs starts[g] to stops[g] - 1,
segment s the groups groups[s] to groups[s + 1] - 1. `after[i]` counts the ids in later runs of run i's group, and
`newer[s]` those in later segments. Groups interleave, so an age inside a segment is found by halving the range of its
ids.
"""

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit

Ints = NDArray[np.int64]


@jit.kernel("int", "int", "int", "int", "ints", "ints", "ints", "ints", "ints", "ints", inner=True)
def _count_from(
    x: int, low: int, high: int, starts: Ints, stops: Ints, first: Ints, stride: Ints, count: Ints, after: Ints
) -> int:
    """Count the ids of groups `low` to `high` - 1 that are at least x."""
    total = 0
    for group in range(low, high):
        run, size = starts[group], stops[group] - starts[group]
        while size > 1:
            half = size >> 1
            run += half * (first[np.uint64(run + half)] <= x)
            size -= half
        below = max((x - first[run] + stride[run] - 1) // stride[run], 0)
        total += after[run] + max(count[run] - below, 0)
    return total


@jit.kernel("none", *["ints"] * 9, "out_ints")
def newest(
    ages: Ints, newer: Ints, groups: Ints, starts: Ints, stops: Ints, first: Ints, stride: Ints, count: Ints,
    after: Ints, out: Ints,
) -> None:  # fmt: skip
    """Write the id that so many others are newer than; each age is less than the number of ids."""
    for i in range(ages.size):
        segment, size = np.int64(0), np.int64(newer.size)  # the first one with newer <= age: `newer` falls
        while size > 1:
            half = size >> 1
            segment += half * (newer[segment + half - 1] > ages[i])
            size -= half
        low, high = groups[segment], groups[segment + 1]
        age = ages[i] - newer[segment]
        # The id sought is the largest x that more than `age` ids reach.
        x, beyond = first[starts[low]], np.int64(0)
        for group in range(low, high):
            x = min(x, first[starts[group]])
            last = stops[group] - 1
            beyond = max(beyond, first[last] + stride[last] * count[last])
        while beyond - x > 1:
            middle = (x + beyond) >> 1
            if _count_from(middle, low, high, starts, stops, first, stride, count, after) > age:
                x = middle
            else:
                beyond = middle
        out[i] = x


def newest_plain(
    ages: Ints, newer: Ints, groups: Ints, starts: Ints, stops: Ints, first: Ints, stride: Ints, count: Ints,
    after: Ints, out: Ints,
) -> None:  # fmt: skip
    """Do what `newest` does."""
    ids = _expanded(first, stride, count)
    out[:] = ids[len(ids) - 1 - ages]


@jit.kernel("none", *["ints"] * 10, "out_ints")
def count_newer(
    ids: Ints, segment: Ints, newer: Ints, groups: Ints, starts: Ints, stops: Ints, first: Ints, stride: Ints,
    count: Ints, after: Ints, out: Ints,
) -> None:  # fmt: skip
    """Write how many are newer than each of some ids, which lie in these segments."""
    for i in range(ids.size):
        s = segment[i]
        inside = _count_from(ids[i] + 1, groups[s], groups[s + 1], starts, stops, first, stride, count, after)
        out[i] = newer[s] + inside


def count_newer_plain(
    ids: Ints, segment: Ints, newer: Ints, groups: Ints, starts: Ints, stops: Ints, first: Ints, stride: Ints,
    count: Ints, after: Ints, out: Ints,
) -> None:  # fmt: skip
    """Do what `count_newer` does."""
    every = _expanded(first, stride, count)
    out[:] = len(every) - np.searchsorted(every, ids, side="right")


def _expanded(first: Ints, stride: Ints, count: Ints) -> Ints:
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.sort(np.repeat(first, count) + number * np.repeat(stride, count))
