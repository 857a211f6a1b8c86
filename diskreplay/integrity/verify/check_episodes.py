"""Checks the table of a sealed segment's episodes against its rows."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import CUT, DISCARDED, EPISODE_VALUES, FIRST, OBSERVATION_ONLY, TERMINATED, TRUNCATED
from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.check_rows import blocks
from diskreplay.integrity.verify.row_flags import NO_STEP
from diskreplay.segments.documents import layout

_ENDED = TERMINATED | TRUNCATED
_OF_ANY_ROW = _ENDED | OBSERVATION_ONLY | EPISODE_VALUES | DISCARDED


class _Episodes(NamedTuple):
    """The episodes of a segment by its rows, lane after lane: the first row of each, its steps, how it ended.

    ``keys`` order them by lane and row.
    """

    keys: NDArray[np.int64]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    steps: NDArray[np.int64]
    end: NDArray[np.int64]


def check_episodes(segment: Segment, *, deep: bool) -> None:
    """Check the table of a sealed segment that has one, whose flags are sequences of episodes, after everything else.

    What follows from rows with findings is not checked. ``deep``: check the sums of rewards, too.
    """
    if segment.attributes.episodes is None or not _are_sound(segment, layout.DONE):
        return
    said, found = segment.attributes.episodes, _find(segment)
    position = found.row * segment.lanes + found.lane
    kept = ~np.isin(position, [first for first, _ in segment.attributes.lost])
    if said != np.count_nonzero(kept):
        detail = f"says {said} episodes, and its rows hold {np.count_nonzero(kept)}"
        segment.files.report("episodes", segment.inside(layout.METADATA), detail)
        return
    derived: dict[str, NDArray[Any]] = {"position": position, "steps": found.steps, "end": found.end}
    if _are_sound(segment, layout.TIME):
        derived["time"] = _first_times(segment, found)
    if deep and _are_sound(segment, "reward"):
        derived["total_reward"] = _sums(segment, found)
    for name, values in derived.items():
        _check_column(segment, name, values[kept], position[kept])


def _are_sound(segment: Segment, path: str) -> bool:
    where = segment.inside(path)
    return not any(
        problem.where == where or problem.where.startswith(f"{where}/") for problem in segment.files.problems
    )


def _check_column(segment: Segment, name: str, expected: NDArray[Any], position: NDArray[np.int64]) -> None:
    where, dtype = segment.inside(layout.episode_chunk(name)), np.dtype(layout.EPISODE_COLUMNS[name])
    if not len(expected) or where in {problem.where for problem in segment.files.problems}:
        return
    data = segment.files.quiet().read(where, len(expected) * dtype.itemsize, len(expected) * dtype.itemsize)
    if data is None:
        return  # reported with the checksums
    values = np.frombuffer(data, dtype)
    wrong = np.flatnonzero((values != expected) & ~(np.isnan(values) & np.isnan(expected)))
    if wrong.size:
        at = int(wrong[0])
        detail = f"says {values[at]} of the episode at position {position[at]}, and its rows say {expected[at]}"
        segment.files.report("episodes", where, detail)


def _find(segment: Segment) -> _Episodes:
    """Return the episodes, by the rows that have a flag."""
    parts = [np.zeros((3, 0), np.int64)]
    for lane, first, _, flags, counted in blocks(segment, layout.DONE, 0):
        at, row = np.nonzero(flags)
        at, row = (places[row < counted[at]] for places in (at, row))
        parts.append(np.stack([lane + at, first + row, flags[at, row]]))
    lane, row, flags = np.concatenate(parts, axis=1)
    order = np.argsort(_key(lane, row))
    lane, row, flags = lane[order], row[order], flags[order]
    begins = np.flatnonzero(flags & FIRST)
    if not len(begins):
        return _Episodes(*(np.zeros(0, np.int64) for _ in _Episodes._fields))
    lanes, first = lane[begins], row[begins]
    stop = np.where(np.append(lanes[1:] != lanes[:-1], True), segment.rows[lanes], np.append(first[1:], 0))
    # On a row with a step, CUT says that the episode continues another one.
    bits = np.where(flags & NO_STEP, _OF_ANY_ROW | CUT, _OF_ANY_ROW)
    end: NDArray[np.int64] = np.bitwise_or.reduceat(flags & bits, begins).astype(np.int64) | np.where(
        flags[begins] & CUT, FIRST, 0
    )
    end[(end & DISCARDED != 0) | (end & _ENDED == 0)] |= TRUNCATED | CUT
    beside = np.add.reduceat((flags & NO_STEP != 0).astype(np.int64), begins)
    return _Episodes(_key(lanes, first), lanes, first, stop - first - beside, end)


def _first_times(segment: Segment, found: _Episodes) -> NDArray[np.int64]:
    """Return the time of the first row of each episode."""
    times = np.zeros(len(found.row), np.int64)
    for lane, first, _, values, counted in blocks(segment, layout.TIME, 0):
        for at, count in enumerate(counted.tolist()):
            bounds = _key(np.array(lane + at), np.array([first, first + count]))
            here = slice(*np.searchsorted(found.keys, bounds).tolist())
            times[here] = values[at, found.row[here] - first]
    return times


def _sums(segment: Segment, found: _Episodes) -> NDArray[np.float64]:
    """Return the sum of each episode's rewards in float64, strictly in the order of its steps."""
    sums = np.zeros(len(found.row))
    for lane, first, _, values, counted in blocks(segment, "reward", 0):
        for at, count in enumerate(counted.tolist()):
            rows = first + np.arange(count)
            which = np.searchsorted(found.keys, _key(np.array(lane + at), rows), "right") - 1
            is_step = rows < found.row[which] + found.steps[which]
            with np.errstate(invalid="ignore", over="ignore"):
                np.add.at(sums, which[is_step], values[at, :count][is_step].astype(np.float64))
    return sums


def _key(lane: NDArray[np.int64], row: NDArray[np.int64]) -> NDArray[np.int64]:
    key: NDArray[np.int64] = lane << layout.POSITION_BITS | row
    return key
