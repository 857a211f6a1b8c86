"""Checks the rows of a segment: flags, steps, times, losses, evictions by hand, and the table of episodes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import CUT, DISCARDED, EPISODE_VALUES, FIRST, OBSERVATION_ONLY, TERMINATED, TRUNCATED
from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.files import BLOCK_BYTES, read_at
from diskreplay.integrity.verify.row_flags import NO_STEP, START, count_steps, first_wrong
from diskreplay.segments.documents import layout


def check_flags(segment: Segment) -> bool:
    """Return whether each lane's flags describe successive episodes.

    Also check the numbers of steps and values that a sealed segment states.
    """
    files, steps, values = segment.files, 0, np.zeros(segment.lanes, np.int64)
    for lane, first, before, flags, counted in blocks(segment, layout.DONE, START):
        if wrong := first_wrong(flags, before, counted):
            at = f"lane {lane + wrong[0]}, row {first + wrong[1]}"
            value = int(flags[wrong])
            files.report("flags", segment.inside(layout.DONE), f"{at}: no sequence of episodes has flags {value} here")
            return False
        steps += count_steps(flags, counted)
        counts = np.arange(flags.shape[1]) < counted[:, None]
        values[lane : lane + len(flags)] += np.count_nonzero(counts & (flags & EPISODE_VALUES != 0), axis=1)
    if not check_lost(segment):
        return False
    attributes = segment.attributes
    steps += attributes.steps_lost - sum(count for _, count in attributes.lost)  # lost rows have the flags of steps
    if attributes.sealed and steps != attributes.steps:
        files.report(
            "counters", segment.inside(layout.METADATA), f"says {attributes.steps} steps, but its rows hold {steps}"
        )
    values += segment.lost_values(np.zeros_like(segment.rows), segment.rows)
    if attributes.values and attributes.values != tuple(values.tolist()):
        detail = f"says that lanes have {list(attributes.values)!s:.60} values of episodes, but they have {values}"
        files.report("counters", segment.inside(layout.METADATA), detail)
    return True


def check_times(segment: Segment) -> None:
    """Check that times never decrease in a lane, and that a sealed segment states the right first and last time."""
    attributes, files = segment.attributes, segment.files
    found: list[int] = []
    for lane, first, before, times, counted in blocks(segment, layout.TIME, 0):
        counts = np.arange(times.shape[1]) < counted[:, None]
        falls = (times < np.concatenate([before[:, None], times[:, :-1]], axis=1)) & counts
        if attributes.packed:
            falls &= _is_within_run(segment, first, times.shape[1])
        if falls.any():
            one, row = (int(i[0]) for i in np.nonzero(falls))
            at = f"lane {lane + one}, row {first + row}"
            files.report("times", segment.inside(layout.TIME), f"{at}: its time is before that of the previous row")
            return
        for position, count in attributes.lost:
            row, one = divmod(position, attributes.lanes)
            if lane <= one < lane + len(times):
                counts[one - lane, max(0, row - first) : max(0, row + count - first)] = False
        if counts.any():
            found += [int(times[counts].min()), int(times[counts].max())]
    bounds = (min(found), max(found)) if found else None
    if attributes.sealed and attributes.times != bounds:
        detail = f"says that the times of its rows are {attributes.times}, but they are {bounds}"
        files.report("counters", segment.inside(layout.METADATA), detail)


def check_priorities(segment: Segment) -> None:
    for lane, first, _, priorities, counted in blocks(segment, layout.PRIORITY, 0):
        counts = np.arange(priorities.shape[1]) < counted[:, None]
        bad = counts & ~((priorities >= 0) & np.isfinite(priorities))
        if bad.any():
            one, row = (int(i[0]) for i in np.nonzero(bad))
            detail = f"lane {lane + one}, row {first + row}: {priorities[one, row]} is not a priority"
            segment.files.report("priority", segment.inside(layout.PRIORITY), detail)
            return


def _is_within_run(segment: Segment, first: int, count: int) -> NDArray[np.bool_]:
    """Return, for each row of ``[first, first + count)`` of a pack, whether the previous row is of the same lane."""
    if segment.tables is None:
        return np.zeros(count, np.bool_)  # the lanes are unknown without the tables
    starts = segment.tables.first_rows - first
    within = np.ones(count, np.bool_)
    within[starts[(starts >= 0) & (starts < count)]] = False
    return within


Block = tuple[int, int, NDArray[Any], NDArray[Any], NDArray[np.int64]]


def blocks(segment: Segment, path: str, before: int) -> Iterator[Block]:
    """Yield an array in parts of bounded size; parts of the same lanes come in the order of rows.

    A part is (lane, row, last, values, counted). ``values`` has the shape (lanes, width) and begins at lane ``lane``
    and row ``row``. ``last[i]`` is the value before this part in lane ``lane + i``, or ``before`` if the lane has no
    such value. Only the first ``counted[i]`` values of lane ``lane + i`` are data; the other values lie behind the
    lane's last row.
    """
    per_chunk, longest = segment.chunk_rows[path], segment.longest
    dtype = np.dtype(segment.plan.arrays[path].dtype)
    last = np.full(segment.lanes, before, dtype)
    at_once = BLOCK_BYTES // dtype.itemsize
    width = min(per_chunk, at_once)
    together = max(1, at_once // per_chunk)
    for chunk in range(-(-longest // per_chunk)):
        with segment.files.opened(segment.chunk(path, chunk), segment.chunk_bytes(path)) as fd:
            if fd is None:
                return
            for lane in range(0, segment.lanes, together):
                lanes = min(together, segment.lanes - lane)
                most = int(segment.rows[lane : lane + lanes].max())
                for start in range(0, min(per_chunk, most - chunk * per_chunk), width):
                    count = min(width, most - chunk * per_chunk - start) if lanes == 1 else width
                    nbytes = lanes * count * dtype.itemsize
                    data = read_at(fd, nbytes, (lane * per_chunk + start) * dtype.itemsize)
                    if len(data) < nbytes:
                        return  # the file was truncated after it was opened
                    values, here = np.frombuffer(data, dtype).reshape(lanes, count), slice(lane, lane + lanes)
                    counted = np.clip(segment.rows[here] - chunk * per_chunk - start, 0, count)
                    yield lane, chunk * per_chunk + start, last[here], values, counted
                    some = np.flatnonzero(counted)
                    last[lane + some] = values[some, counted[some] - 1]


def check_lost(segment: Segment) -> bool:
    """Return whether each range of lost rows has the flags of one truncated episode; report the first wrong range."""
    for position, count in segment.attributes.lost:
        row, lane = divmod(position, segment.lanes)
        stop, rows = row + count, segment.rows[lane]
        good = stop <= rows and (stop == rows or bool((segment.read_flags(lane, stop, stop + 1) & layout.FIRST).all()))
        for at, end, flags in segment.flag_parts(lane, row, stop) if good else ():
            expected = np.zeros(end - at, np.uint8)
            if at == row:
                expected[0] = layout.FIRST
            if end == stop:
                expected[-1] |= layout.TRUNCATED
            good &= np.array_equal(flags, expected)
        if not good:
            detail = f"{count} lost rows from row {row} of lane {lane} on are not one episode"
            segment.files.report("flags", segment.inside(layout.DONE), detail)
            return False
    return True


def check_evicted(segment: Segment, evicted: list[tuple[int, int]]) -> None:
    for position, steps in evicted:
        row, lane = divmod(position, segment.lanes)
        if not is_episode(segment, lane, row, row + steps, int(segment.rows[lane])) or is_lost(segment, position):
            detail = f"{steps} steps from row {row} of lane {lane} of {segment.where} are not an episode"
            segment.files.report("eviction", layout.EVICTIONS, detail)


def is_lost(segment: Segment, position: int) -> bool:
    return any(first == position for first, _ in segment.attributes.lost)


def is_episode(segment: Segment, lane: int, row: int, stop: int, rows: int) -> bool:
    """Whether the steps of an episode are exactly the rows ``[row, stop)`` of a lane with ``rows`` rows."""
    if not row < stop <= rows:
        return False
    for at, end, flags in segment.flag_parts(lane, row, stop):
        starts = np.flatnonzero(flags & layout.FIRST).tolist()
        if len(flags) < end - at or starts != ([0] if at == row else []) or (flags & NO_STEP).any():
            return False
    return stop == rows or bool((segment.read_flags(lane, stop, stop + 1) & (layout.FIRST | NO_STEP)).all())


# --- the table of episodes of a sealed segment, compared with its rows -----------------------------------------------

_ENDED = TERMINATED | TRUNCATED
_OF_ANY_ROW = _ENDED | OBSERVATION_ONLY | EPISODE_VALUES | DISCARDED


class _Episodes(NamedTuple):
    """The episodes of a segment, derived from its rows and sorted by ``keys``: by lane, then row."""

    keys: NDArray[np.int64]
    lane: NDArray[np.int64]
    row: NDArray[np.int64]
    steps: NDArray[np.int64]
    end: NDArray[np.int64]


def check_episodes(segment: Segment, *, deep: bool) -> None:
    """Compare the table of episodes of a sealed segment, if there is one, with the rows.

    Arrays with a reported problem are not compared, so this must be the last check. ``deep``: also compare the sums of
    rewards.
    """
    if segment.attributes.episodes is None or not _are_sound(segment, layout.DONE):
        return
    stated, found = segment.attributes.episodes, _find(segment)
    position = found.row * segment.lanes + found.lane
    kept = ~np.isin(position, [first for first, _ in segment.attributes.lost])
    if stated != np.count_nonzero(kept):
        detail = f"says {stated} episodes, but its rows hold {np.count_nonzero(kept)}"
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
        return  # `check_sums` reports this file
    values = np.frombuffer(data, dtype)
    wrong = np.flatnonzero((values != expected) & ~(np.isnan(values) & np.isnan(expected)))
    if wrong.size:
        at = int(wrong[0])
        detail = f"says {values[at]} of the episode at position {position[at]}, but its rows say {expected[at]}"
        segment.files.report("episodes", where, detail)


def _find(segment: Segment) -> _Episodes:
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
    # On a row with a step, CUT means that the episode continues the previous episode.
    bits = np.where(flags & NO_STEP, _OF_ANY_ROW | CUT, _OF_ANY_ROW)
    end: NDArray[np.int64] = np.bitwise_or.reduceat(flags & bits, begins).astype(np.int64) | np.where(
        flags[begins] & CUT, FIRST, 0
    )
    end[(end & DISCARDED != 0) | (end & _ENDED == 0)] |= TRUNCATED | CUT
    extra = np.add.reduceat((flags & NO_STEP != 0).astype(np.int64), begins)
    return _Episodes(_key(lanes, first), lanes, first, stop - first - extra, end)


def _first_times(segment: Segment, found: _Episodes) -> NDArray[np.int64]:
    times = np.zeros(len(found.row), np.int64)
    for lane, first, _, values, counted in blocks(segment, layout.TIME, 0):
        for at, count in enumerate(counted.tolist()):
            bounds = _key(np.array(lane + at), np.array([first, first + count]))
            here = slice(*np.searchsorted(found.keys, bounds).tolist())
            times[here] = values[at, found.row[here] - first]
    return times


def _sums(segment: Segment, found: _Episodes) -> NDArray[np.float64]:
    """Return each episode's sum of rewards in float64, added in the order of steps."""
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
