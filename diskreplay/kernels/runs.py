"""Ids in arithmetic runs: the form in which views hand their ids to distributions. Plain numpy, no compiled code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import OBSERVATION_ONLY, OPEN, POSITION_BITS, POSITION_MASK, TERMINATED, EpisodeTable


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
    slot, position = (ids >> POSITION_BITS) - origin, ids & POSITION_MASK
    known = (slot >= 0) & (slot < len(lanes))
    if not len(lanes):
        return np.full(len(ids), -1)
    width = lanes[np.where(known, slot, 0)]
    known &= width > 0
    width = np.maximum(width, 1)
    row, lane = np.divmod(position, width)
    return np.where(known, ids - position + lane * (POSITION_MASK // width) + row, -1)


# How the samples of an ended episode end; see `Starts`.
PADDED, MOVED_BACK, FIRST_ONLY, ALL_STEPS = range(4)


class Starts(NamedTuple):
    """At which steps of an episode the samples of a view start.

    Of an ended episode those at steps 0, `step`, 2 `step`, ..., up to the first whose `length` steps reach its end.
    `last` says what becomes of that one: PADDED, it stays; MOVED_BACK, it starts `length` steps before the end instead
    (an episode shorter than that has one sample); FIRST_ONLY: there is one sample, at the first step. Steps that have
    nothing behind them to bootstrap from do not count, but with ALL_STEPS, where every step starts a sample.

    Of an open episode those that have `open_rows` rows from their start on: rows with an observation or, not
    `observed`, with a whole step; 0: none. Ids below `since` are left out.
    """

    length: int = 1
    step: int = 1
    last: int = PADDED
    open_rows: int = 0
    observed: bool = True
    since: int = 0


def starts_plain(
    lines: NDArray[np.int64],
    length: int,
    step: int,
    last: int,
    open_rows: int,
    observed: int,
    frontier: int,
    at: int,
    first: NDArray[np.int64],
    stride: NDArray[np.int64],
    count: NDArray[np.int64],
    before: NDArray[np.int64],
) -> int:
    """Do what the kernel `starts` does."""
    runs = starting_runs(Starts(length, step, last, open_rows, bool(observed), frontier), EpisodeTable(lines))
    end = at + len(runs.first)
    first[at:end], stride[at:end], count[at:end] = runs
    before[at + 1 : end + 1] = before[at] + np.cumsum(runs.count)
    return end


def starting_runs(starts: Starts, episodes: EpisodeTable) -> IdRuns:
    """Return the ids at which samples of these episodes start: one run an episode, or two with MOVED_BACK."""
    first, stride, steps, obs_rows, end = episodes.lines.T
    is_open = (end & OPEN) != 0
    beyond = np.where(starts.observed, obs_rows, steps) - starts.open_rows
    of_open = np.where((beyond >= 0) & (starts.open_rows > 0), beyond // starts.step + 1, 0)
    # Without a final observation the last step has nothing to bootstrap from, unless it terminated.
    total = steps - ((end & (TERMINATED | OBSERVATION_ONLY)) == 0)
    missing = total - starts.length
    whole = np.maximum(missing, 0) // starts.step + 1
    of_ended = {
        PADDED: -(-np.maximum(missing, 0) // starts.step) + 1,
        MOVED_BACK: whole,
        FIRST_ONLY: np.ones_like(steps),
        ALL_STEPS: steps,
    }[starts.last]
    if starts.last != ALL_STEPS:
        of_ended = np.where(total > 0, of_ended, 0)
    back = ~is_open & (missing > 0) & (missing % starts.step != 0) & (starts.last == MOVED_BACK)
    regular = IdRuns(first, stride * starts.step, np.where(is_open, of_open, of_ended))
    moved = IdRuns(first + missing * stride, stride, back.astype(np.int64))
    # The one behind the other, episode by episode.
    both = IdRuns(*(np.stack(columns, axis=1).reshape(-1) for columns in zip(regular, moved, strict=True)))
    runs = after_frontier(both, starts.since)
    return keep(runs, runs.count > 0)
