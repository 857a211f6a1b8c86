"""Runs of ids, as distributions receive them, and the rule that says at which ids samples start."""

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
    """Runs of ids: run `i` has the ids `first[i] + j * stride[i]` for `0 <= j < count[i]`."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    count: NDArray[np.int64]  # type: ignore[assignment]  # shadows tuple.count


class TimedRuns(NamedTuple):
    """`IdRuns` with the start time of each run's episode: nanoseconds since the epoch, 0 in a store without limits."""

    first: NDArray[np.int64]
    stride: NDArray[np.int64]
    count: NDArray[np.int64]  # type: ignore[assignment]
    time: NDArray[np.int64]


Runs = TypeVar("Runs", IdRuns, TimedRuns)

LaneIndex = tuple[Ints, Ints]
"""The `lane_keys` of the first ids of runs, in ascending order, and the index of each key's run."""

_AT_ONCE = 1 << 18

FIRST, STRIDE, COUNT, TIME, BEFORE = range(5)
"""Rows of a block, a table with a column per run. The first rows are the fields of `TimedRuns`. BEFORE has the number
of ids before each run, then the number of all ids."""
BLOCK_ROWS = 5

COARSE_BITS = 4
"""The array COARSE has the value of BEFORE for each run whose index is a multiple of `1 << COARSE_BITS`."""

RULE, BLOCK, COARSE = range(3)
"""Lines of the record (see `packed`) of a `Population`. RULE has the fields of the population's `Starts`. BLOCK has the
population's runs. COARSE has a part of BEFORE, see `COARSE_BITS`."""


class Visible(NamedTuple):
    """The visible rows of all lanes; episodes that began at time `reached` or later have no hidden steps."""

    reached: int
    origin: int  # The number of the first segment.
    lanes: NDArray[np.int64]  # The number of lanes of each segment, 0 if the segment is gone.
    lane_base: NDArray[np.int64]  # The index of each segment's first lane among the lanes of all segments.
    oldest: NDArray[np.int64]  # The first visible row of each lane, for all segments.

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each id's lane; -1 if the segment is gone."""
        known, slot, _, lane, _ = locate(ids, self.origin, self.lanes)
        if not known.any():
            return np.full(len(ids), -1)
        return np.where(known, self.lane_base[slot] + lane, -1)

    def least_ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each id, the lowest visible id of the id's lane; `NEVER` if the segment is gone.

        If no step is hidden, the result is 0 for each id.
        """
        if not self.reached:
            return np.zeros(len(ids), np.int64)
        known, slot, width, lane, row = locate(ids, self.origin, self.lanes)
        if not known.any():
            return np.full(len(ids), NEVER)
        oldest = self.oldest[np.where(known, self.lane_base[slot] + lane, 0)]
        return np.where(known, ids + (oldest - row) * width, NEVER)


NEVER = 1 << 62
"""A number larger than all ids, times and rows."""

ALL_VISIBLE = Visible(0, 0, *(np.zeros(0, np.int64) for _ in range(3)))


def without_hidden(runs: Runs, least: Any) -> Runs:
    """Remove all ids below `least`, one number or an array with a number per run; empty runs stay, with count 0."""
    return behind(runs, np.clip(-((runs.first - least) // runs.stride), 0, runs.count))


def keep(runs: Runs, where: NDArray[np.bool_]) -> Runs:
    return runs if where.all() else type(runs)(*(column[where] for column in runs))


def joined(parts: list[Runs]) -> Runs:
    return type(parts[0])(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def behind(runs: Runs, skipped: NDArray[np.int64]) -> Runs:
    """Remove the first `skipped[i]` ids of each run i; a run that becomes empty stays, with count 0."""
    return runs._replace(first=runs.first + skipped * runs.stride, count=runs.count - skipped)


def last_ids(runs: IdRuns | TimedRuns) -> Ints:
    return np.asarray(runs.first + (runs.count - 1) * runs.stride, np.int64)


def pieces_of(runs: IdRuns, most: Any) -> tuple[IdRuns, Ints]:
    """Cut runs into pieces of at most `most` ids; return the pieces and the index of each piece's run.

    `most` is one number, or one number per run.
    """
    many = -(-runs.count // most)
    of = np.repeat(np.arange(len(many)), many)
    size = np.broadcast_to(most, many.shape)[of]
    at = places_of(np.zeros_like(many), many) * size
    return IdRuns(runs.first[of] + at * runs.stride[of], runs.stride[of], np.minimum(runs.count[of] - at, size)), of


def numbered(runs: IdRuns, before: Ints, numbers: Ints) -> Ints:
    """Return the ids at positions `numbers` among the ids of all runs; `before[i]` ids come before run i."""
    run = np.searchsorted(before, numbers, side="right") - 1
    return np.asarray(runs.first[run] + (numbers - before[run]) * runs.stride[run], np.int64)


def id_blocks(runs: IdRuns) -> Iterator[Ints]:
    before, total = np.cumsum(runs.count) - runs.count, int(runs.count.sum())
    for start in range(0, total, _AT_ONCE):
        yield numbered(runs, before, np.arange(start, min(start + _AT_ONCE, total)))


def by_lane(first: Ints, segments: tuple[int, Ints]) -> LaneIndex:
    """Return the `LaneIndex` of runs with these first ids; `segments` are `origin` and `lanes` of `lane_keys`."""
    keys = lane_keys(first, *segments)
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def runs_with(ids: Ints, keys: Ints, index: LaneIndex, runs: IdRuns) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Return, for each id, the run that may have the id, the id's position in this run, and whether the run has the id.

    `keys` are the `lane_keys` of the ids. `index` is the result of `by_lane` for the runs. There must be at least one
    run.
    """
    run = index[1][np.maximum(np.searchsorted(index[0], keys, "right") - 1, 0)]
    first, stride, count = (column[run] for column in runs)
    number, between = np.divmod(ids - first, stride)
    return run, number, (between == 0) & (number >= 0) & (number < count)


def lane_keys(ids: NDArray[np.int64], origin: int, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each id, -1 if its segment is gone; the numbers order ids by segment, lane and row."""
    known, _, width, lane, row = locate(ids, origin, lanes)
    return np.where(known, row_keys(ids, width, lane, row), -1)


# Rules for the last sample of an ended episode; see `Starts`.
PADDED, MOVED_BACK, FIRST_ONLY, ALL_STEPS, DROPPED = range(5)


class Starts(NamedTuple):
    """The rule that says at which steps of an episode the samples of a view start.

    In an ended episode, samples start at steps 0, `step`, 2 `step`, ..., up to the first sample whose `length` steps
    reach the end. If that sample reaches beyond the end of the episode, `last` decides what happens:

    - PADDED: the sample is kept, and the view pads it.
    - MOVED_BACK: the sample starts `length` steps before the end, or at step 0 in a shorter episode.
    - DROPPED: the sample is left out.

    Two other values of `last` replace this rule. With FIRST_ONLY, only the first step of an ended episode starts a
    sample. With ALL_STEPS, every step of an ended episode starts a sample.

    If an ended episode did not terminate, the rule ignores its last steps, except with ALL_STEPS. With a final
    observation, the rule ignores the last `followed` steps: no step comes `followed` steps after them. Without a final
    observation, the rule ignores only the last step: this step has no next observation to bootstrap from.

    With `from_end`, one sample ends at the episode's end, the next sample ends `step` steps earlier, and so on. If the
    earliest sample would start before step 0, it starts at step 0 (MOVED_BACK) or is left out (DROPPED).

    In an open episode, a sample needs `open_rows` rows from its start on: rows with an observation if `observed`, else
    complete steps. For example, if `open_rows` is `length + 1` and `observed` is True, a sample can start once the
    observation after the sample exists. With `open_rows` 0, open episodes have no samples. Ids below `since` are left
    out.
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
"""Kinds of input for `starts`. LINES: lines of an `EpisodeTable`. RUNS: runs of ids, some of them hidden.
RUNS_AND_OPEN: runs as with RUNS, and also all open episodes."""


def sort_runs(block: NDArray[np.int64], start: int, end: int) -> None:
    runs = block[:BEFORE, start:end]
    order = np.lexsort((runs[FIRST], runs[TIME]))
    for column in runs:
        if column.any():  # zeros are not written, because unwritten pages take no memory
            column[:] = column[order]
    block[BEFORE, start + 1 : end + 1] = block[BEFORE, start] + np.cumsum(runs[COUNT])


def open_episodes(origin: int, growing: NDArray[np.int64], live: NDArray[np.int64]) -> EpisodeTable:
    """Return the open episodes of lanes that may grow.

    `growing` and `live` are the tables at GROWING and LIVE of a snapshot's record, see `frozen`.
    """
    slot, width, column = np.repeat(growing, growing[:, 1], axis=0).T
    lane = np.arange(len(slot)) - column
    start = live[OPEN_START]
    some = (start >= 0) & (live[COMMITTED] > start)
    first = ((slot + origin) << POSITION_BITS) + lane + start * width
    steps, obs_rows = live[COMMITTED] - start, live[OBSERVED] - start
    columns = first, width, steps, obs_rows, live[OPEN_END] & ~EPISODE_VALUES, live[OPEN_TIME]
    return EpisodeTable.of(*(column[some] for column in columns))


_at = np.uint64


@jit.inlined
def _samples(rule: tuple[int, ...], steps: int, obs_rows: int, end: int) -> tuple[int, int, int]:
    """Return an episode's number of samples, the step where its first sample starts, and the start of a moved sample.

    A sample is moved if its start changes because `last` is MOVED_BACK, see `Starts`. The number of samples does not
    include a moved sample. If no sample is moved, the third result is -1. `rule` has the fields of `Starts`. `end` has
    the bits of the episode's end, see `ids.OPEN`.
    """
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
    """Write runs of the ids at which samples start; return the column after the last written run.

    `record` is the record of a population, see `RULE`. The array RULE of the record selects the ids: at most two runs
    per episode. The runs are written to the array BLOCK of the record, from column `at` on. Hidden ids are
    left out, and so are ids below the rule's `since`, see `Starts`. `snapshot` is a record as in `frozen`.

    `kind` says what `given` has. With LINES, `given` has lines of an `EpisodeTable`. With RUNS, `given` has runs of
    ids, (4, n). Hidden ids are also removed from `given`. A run without visible ids is not written, and gets count 0 in
    `given`. If any run gets count 0, the result is `~column` instead of the column. With RUNS_AND_OPEN, `given` has
    runs as with RUNS, and the runs of the snapshot's open episodes are written last.
    """
    rule, block = packed.ints(record, RULE), packed.ints2(record, BLOCK)
    step, since = rule[1], rule[5]
    numbers = rule[0], step, rule[2], rule[3], rule[4], since, rule[6], rule[7]  # read from memory only once
    left = 0 if kind == LINES else given.shape[1]
    listed = given.shape[0] if kind == LINES else left
    growing, live, row_bytes = snapshot[frozen.GROWING], snapshot[frozen.LIVE], 8 * snapshot[frozen.LIVE_LANES]
    origin, reached = snapshot[frozen.ORIGIN], snapshot[frozen.REACHED]
    gone = 0
    for i in range(listed + (snapshot[frozen.LIVE_LANES] if kind == RUNS_AND_OPEN else 0)):
        # skipped: the step where the first sample starts. count: the number of samples. moved: the step where the
        # sample starts that MOVED_BACK moved, or -1. least: the lowest id that may be written.
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
                # Find the line of the lane's segment. A line has the segment's number of lanes at byte 8, and its first
                # lane's column at byte 16.
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
        for part in range(3):  # a moved sample at step 0, the other samples, then a moved sample at a later step
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
                if block[TIME, to] != time:  # a 0 is not written, because unwritten pages take no memory
                    block[TIME, to] = time
                at += 1
                block[BEFORE, _at(at)] = block[BEFORE, to] + some
    return at ^ gone


@jit.kernel("none", "ints2", "out_ints2")
def fill_grid(runs: Ints, grid: Ints) -> None:
    """Write the ids of runs to a grid: column by column, each column from its first row to its last row.

    `runs`, (3, n), has the rows FIRST, STRIDE and COUNT of a block. The runs have an id for each place of the grid.
    """
    row = column = 0
    for i in range(runs.shape[1]):
        for j in range(runs[COUNT, i]):
            grid[row, column] = runs[FIRST, i] + j * runs[STRIDE, i]
            row += 1
            if row == grid.shape[0]:
                row, column = 0, column + 1
