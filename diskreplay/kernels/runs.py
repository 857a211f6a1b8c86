"""Ids in arithmetic runs: the form in which views hand their ids to distributions, and at which ids samples start."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay import ids
from diskreplay.ids import (
    EPISODE_VALUES,
    POSITION_BITS,
    EpisodeTable,
    Ints,
    locate,
    places_of,
    row_keys,
)

from . import frozen, jit, packed
from .following import COMMITTED, OBSERVED, OPEN_END, OPEN_START, OPEN_TIME


class IdRuns(NamedTuple):
    """Runs of ids: run `i` is `first[i] + j * stride[i]` for `0 <= j < count[i]`; three int64 arrays of one length."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    count: NDArray[np.int64]  # type: ignore[assignment]  # nobody counts the elements of this tuple


class TimedRuns(NamedTuple):
    """`IdRuns`, and when the episode that each is of began: nanoseconds since the epoch, or 0."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    count: NDArray[np.int64]  # type: ignore[assignment]
    time: NDArray[np.int64]


Runs = TypeVar("Runs", IdRuns, TimedRuns)

LaneIndex = tuple[Ints, Ints]
"""Keys of runs in the order of their lanes, and which run each is of."""

# Ids that are listed together.
_AT_ONCE = 1 << 18

FIRST, STRIDE, COUNT, TIME, BEFORE = range(5)
"""Rows of a block of runs: those of `TimedRuns`, and how many ids there are before each, one number more."""
BLOCK_ROWS = 5

COARSE_BITS = 4
"""Of every run with a number that is a multiple of two to the power of this, `kernels.ids_at` may be given BEFORE."""

RULE, BLOCK, COARSE, WANTED = range(4)
"""The record of a population, see `packed`: the numbers of its `Starts`, the block, every 16th number of its BEFORE as
`ids_at` says, and memory for a number an id."""


class Visible(NamedTuple):
    """What is hidden: the number of the first segment, each one's lanes and their place, each lane's oldest row left.

    Nothing is hidden of an episode that began at `reached` or later.
    """

    reached: int
    origin: int
    lanes: NDArray[np.int64]
    lane_base: NDArray[np.int64]
    oldest: NDArray[np.int64]

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each id's lane among all, -1 where its segment is gone."""
        known, slot, _, lane, _ = locate(ids, self.origin, self.lanes)
        if not known.any():
            return np.full(len(ids), -1)
        return np.where(known, self.lane_base[slot] + lane, -1)

    def least_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the least id that is not hidden in the lane of each of these; `NEVER` where its segment is gone."""
        if not self.reached:
            return np.zeros(len(ids), np.int64)
        known, slot, width, lane, row = locate(ids, self.origin, self.lanes)
        if not known.any():
            return np.full(len(ids), NEVER)
        oldest = self.oldest[np.where(known, self.lane_base[slot] + lane, 0)]
        return np.where(known, ids + (oldest - row) * width, NEVER)


NEVER = 1 << 62
"""An id that there is none above, a time after all others, and a row behind those of any lane."""

ALL_VISIBLE = Visible(0, 0, *(np.zeros(0, np.int64) for _ in range(3)))


def without_hidden(runs: Runs, least: Any) -> Runs:
    """Take from each run the ids below `least`; one that lies below it whole keeps its place with count 0."""
    return behind(runs, np.clip(-((runs.first - least) // runs.stride), 0, runs.count))


def keep(runs: Runs, where: NDArray[np.bool_]) -> Runs:
    """Select the runs at which `where` is true."""
    return runs if where.all() else type(runs)(*(column[where] for column in runs))


def joined(parts: list[Runs]) -> Runs:
    """Concatenate several sets of runs."""
    return type(parts[0])(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def behind(runs: Runs, skipped: NDArray[np.int64]) -> Runs:
    """Take so many of its first ids from each run; one without others keeps its place with count 0."""
    return runs._replace(first=runs.first + skipped * runs.stride, count=runs.count - skipped)


def last_ids(runs: IdRuns | TimedRuns) -> Ints:
    """Return the last id of each run."""
    return np.asarray(runs.first + (runs.count - 1) * runs.stride, np.int64)


def pieces_of(runs: IdRuns, most: Any) -> tuple[IdRuns, Ints]:
    """Cut each run into pieces of ``most`` ids at the most, one number or one a run; return also the run of each."""
    many = -(-runs.count // most)
    of = np.repeat(np.arange(len(many)), many)
    size = np.broadcast_to(most, many.shape)[of]
    at = places_of(np.zeros_like(many), many) * size
    return IdRuns(runs.first[of] + at * runs.stride[of], runs.stride[of], np.minimum(runs.count[of] - at, size)), of


def numbered(runs: IdRuns, before: Ints, numbers: Ints) -> Ints:
    """Return the ids with these numbers among those of all runs; ``before`` are the ids before each run."""
    run = np.searchsorted(before, numbers, side="right") - 1
    return np.asarray(runs.first[run] + (numbers - before[run]) * runs.stride[run], np.int64)


def id_blocks(runs: IdRuns) -> Iterator[Ints]:
    """Yield the ids of runs in their order, many at a time."""
    before, total = np.cumsum(runs.count) - runs.count, int(runs.count.sum())
    for start in range(0, total, _AT_ONCE):
        yield numbered(runs, before, np.arange(start, min(start + _AT_ONCE, total)))


def by_lane(first: Ints, segments: tuple[int, Ints]) -> LaneIndex:
    """Return the keys of runs with these first ids, in the order of their lanes, and the place of each run."""
    keys = lane_keys(first, *segments)
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def runs_with(ids: Ints, keys: Ints, index: LaneIndex, runs: IdRuns) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return the one run that each id may be in, its number there, and whether it is; there must be a run."""
    run = index[1][np.maximum(np.searchsorted(index[0], keys, "right") - 1, 0)]
    first, stride, count = (column[run] for column in runs)
    number, between = np.divmod(ids - first, stride)
    return run, number, (between == 0) & (number >= 0) & (number < count)


def lane_keys(ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers that order ids by segment, lane and row; -1 where the segment is not there.

    `lanes` are those of the segments from number `origin` on, 0 where one is gone.
    """
    known, _, width, lane, row = locate(ids, origin, lanes)
    return np.where(known, row_keys(ids, width, lane, row), -1)


# How the samples of an ended episode end; see `Starts`.
PADDED, MOVED_BACK, FIRST_ONLY, ALL_STEPS, DROPPED = range(5)


class Starts(NamedTuple):
    """At which steps of an episode the samples of a view start.

    Of an ended episode those at steps 0, `step`, 2 `step`, ..., up to the first whose `length` steps reach its end.
    `last` says what becomes of that one where they reach beyond the end: PADDED, it stays; MOVED_BACK, it starts
    `length` steps before the end instead (an episode shorter than that has one sample); DROPPED, there is none.
    FIRST_ONLY: there is one sample, at the first step. Steps that have nothing behind them to bootstrap from do not
    count, but with ALL_STEPS, where every step starts a sample.

    With `from_end` samples end at the episode's end, `step` steps before it, and so on, down to the first that does not
    start behind step 0: if it would start before that, it starts at step 0 (MOVED_BACK), or is not there (DROPPED).

    Nor do the last `followed` steps of an episode that did not terminate and has a final observation: no step follows
    them so many steps later.

    Of an open episode those that have `open_rows` rows from their start on: rows with an observation or, not
    `observed`, with a whole step; 0: none. Ids below `since` are left out.
    """

    length: int = 1
    step: int = 1
    last: int = PADDED
    open_rows: int = 0
    observed: bool = True
    since: int = 0
    followed: int = 0
    from_end: bool = False


LINES, RUNS, RUNS_AND_OPEN = range(3)
"""What `starts` makes runs of: lines of episodes; runs that are partly hidden; these and all open episodes."""


def sort_runs(block: NDArray[np.int64], start: int, end: int) -> None:
    """Sort runs of a block by when their episodes began, and then by id; and count how many ids are before each."""
    runs = block[:BEFORE, start:end]
    order = np.lexsort((runs[FIRST], runs[TIME]))
    for column in runs:
        if column.any():  # zeros that nobody writes, as times that nobody asks for, take no memory
            column[:] = column[order]
    block[BEFORE, start + 1 : end + 1] = block[BEFORE, start] + np.cumsum(runs[COUNT])


def open_episodes(origin: int, growing: NDArray[np.int64], live: NDArray[np.int64]) -> EpisodeTable:
    """Return the open episodes of lanes that may grow: see `frozen` for both arrays."""
    slot, width, column = np.repeat(growing, growing[:, 1], axis=0).T
    lane = np.arange(len(slot)) - column
    start = live[OPEN_START]
    some = (start >= 0) & (live[COMMITTED] > start)
    first = ((slot + origin) << POSITION_BITS) + lane + start * width
    steps, obs_rows = live[COMMITTED] - start, live[OBSERVED] - start
    columns = first, width, steps, obs_rows, live[OPEN_END] & ~EPISODE_VALUES, live[OPEN_TIME]
    return EpisodeTable.of(*(column[some] for column in columns))


# Makes an index that is not tested for being negative.
_at = np.uint64


@jit.inlined
def _samples(rule: tuple[int, ...], steps: int, obs_rows: int, end: int) -> tuple[int, int, int]:
    """Return how many samples start in an episode, at which step the first does, and one that was moved, or -1."""
    length, step, last, open_rows, observed, _, followed, from_end = rule
    skipped, count, moved, total = 0, 0, -1, steps
    if last != ALL_STEPS and not end & ids.TERMINATED:
        total -= followed if end & ids.OBSERVATION_ONLY else 1
    missing = total - length
    if end & ids.OPEN:
        beyond = (obs_rows if observed else steps) - open_rows
        if open_rows > 0 and beyond >= 0:
            count = (beyond if step == 1 else beyond // step) + 1
    elif last == ALL_STEPS:
        count = steps
    elif total > 0 and (missing <= 0 or last == FIRST_ONLY):
        count = 1 if missing >= 0 or last != DROPPED else 0
    elif total > 0:
        count = missing // step + 1
        rest = missing - (count - 1) * step
        if from_end:
            skipped = rest
        if rest and step < length + rest:
            if last == PADDED:
                count += 1
            elif last == MOVED_BACK:
                moved = 0 if from_end else missing
    return count, skipped, moved


@jit.kernel("int", "out_ints2", "int", "ints", "ints2", "int")
def starts(given: Ints, kind: int, snapshot: Ints, record: Ints, at: int) -> int:
    """Write the ids at which samples of episodes start.

    `record` is that of a population, see `RULE`: the numbers of a `Starts` say which ids these are, and runs
    of them are written into the block from place `at` on, two an episode at most. The place behind the last one is
    returned. None is below `since`, and none is hidden in the snapshot of this record.

    `given` are lines of episodes (LINES), or runs, (4, n), that are partly hidden (RUNS). Such runs lose their hidden
    ids, and are written; one that is hidden whole gets the count 0 and is not. Then the complement of that place is
    returned, which is negative. With RUNS_AND_OPEN the episodes that are open in the snapshot follow.
    """
    rule, block = packed.ints(record, RULE), packed.ints2(record, BLOCK)
    step, since = rule[1], rule[5]
    numbers = rule[0], step, rule[2], rule[3], rule[4], since, rule[6], rule[7]  # read once
    left = 0 if kind == LINES else given.shape[1]
    listed = given.shape[0] if kind == LINES else left
    growing, live, row_bytes = snapshot[frozen.GROWING], snapshot[frozen.LIVE], 8 * snapshot[frozen.LIVE_LANES]
    origin, reached = snapshot[frozen.ORIGIN], snapshot[frozen.REACHED]
    gone = 0
    for i in range(listed + (snapshot[frozen.LIVE_LANES] if kind == RUNS_AND_OPEN else 0)):
        # The first step, and the distance of two; the step at which the first sample and one that was moved start.
        skipped, count, moved, least = 0, 0, -1, since
        item = _at(i)
        if i < left:
            begin, apart, count = given[FIRST, item], given[STRIDE, item], given[COUNT, item]
            time, least = given[TIME, item], 0
            spacing = apart
        else:
            if i < listed:
                begin, apart, steps = given[item, ids.FIRST_ID], given[item, ids.STRIDE], given[item, ids.STEPS]
                obs_rows, end, time = given[item, ids.OBS_ROWS], given[item, ids.END], given[item, ids.TIME]
            else:
                column = i - listed
                # The lanes of a segment, and its first one.
                while column >= jit.load_int(growing + 8) + jit.load_int(growing + 16):
                    growing += 8 * frozen.GROWING_COLUMNS
                apart, lane = jit.load_int(growing + 8), column - jit.load_int(growing + 16)
                start = jit.load_int(live + OPEN_START * row_bytes + 8 * column)
                steps = jit.load_int(live + COMMITTED * row_bytes + 8 * column) - start
                obs_rows = jit.load_int(live + OBSERVED * row_bytes + 8 * column) - start
                end, time = ids.OPEN, jit.load_int(live + OPEN_TIME * row_bytes + 8 * column)
                begin = ((jit.load_int(growing) + origin) << ids.POSITION_BITS) + lane + start * apart
                if start < 0 or steps <= 0:
                    continue
            spacing = apart * step
            count, skipped, moved = _samples(numbers, steps, obs_rows, end)
        if i < left or time < reached:
            slot, position = (begin >> ids.POSITION_BITS) - origin, begin & ids.POSITION_MASK
            width = jit.load_int(snapshot[frozen.LANES] + 8 * slot) if 0 <= slot < snapshot[frozen.SLOTS] else 0
            if width > 0:
                row = position // width
                place = jit.load_int(snapshot[frozen.LANE_BASE] + 8 * slot) + position - row * width
                least = max(least, begin + (jit.load_int(snapshot[frozen.OLDEST] + 8 * place) - row) * width)
            else:
                least = NEVER
        for part in range(3):  # a moved sample at step 0, those that were not moved, a moved one behind them
            first, stride, some = begin + moved * apart, apart, 0
            if part == 1:
                first, stride, some = begin + skipped * apart, spacing, count
            elif moved == 0 if part == 0 else moved > 0:
                some = 1
            if some > 0 and first < least:
                hidden = min((least - first + stride - 1) // stride, some)
                first, some = first + hidden * stride, some - hidden
            if i < left and part == 1:
                given[FIRST, item], given[COUNT, item] = first, some
                gone = gone if some > 0 else -1
            if some > 0:
                to = _at(at)
                block[FIRST, to], block[STRIDE, to], block[COUNT, to] = first, stride, some
                if block[TIME, to] != time:  # a page of zeros that nobody writes takes no memory
                    block[TIME, to] = time
                at += 1
                block[BEFORE, _at(at)] = block[BEFORE, to] + some
    return at ^ gone
