"""Episodes are found in flags: all lanes of many segments in one go, as one row after another would be read."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from diskreplay.errors import FormatError
from diskreplay.ids import CONTINUES
from diskreplay.segments.documents.layout import DONE
from diskreplay.segments.segment_reader import Gaps, LaneSlice, parse_episodes
from tests.testing.support import serial_schema

TERMINATED, TRUNCATED, FIRST, OBSERVATION, CUT, MARKER, VALUES, DISCARDED = 1, 2, 4, 8, 16, 32, 64, 128


@st.composite
def episode(draw, plain):
    """Flags of an episode, and (steps, observations, end) where it is not the last, unsealed one."""
    steps = draw(st.integers(1, plain))
    flags = [0] * steps
    flags[0] = FIRST | (CUT if draw(st.booleans()) else 0)
    continues = CONTINUES if flags[0] & CUT else 0
    kinds = ["step", "step and observation", "cut with observation", "marker", "discarded", "part", "nothing"]
    kind = draw(st.sampled_from(kinds))
    values = VALUES if draw(st.booleans()) else 0
    if kind == "nothing":
        return flags, (steps, steps, TRUNCATED | CUT | continues), False
    if kind == "cut with observation":
        flags.append(OBSERVATION | TRUNCATED | CUT | values)
        return flags, (steps, steps + 1, OBSERVATION | TRUNCATED | CUT | values | continues), True
    if kind == "marker":
        flags.append(MARKER | TRUNCATED | CUT | VALUES)
        return flags, (steps, steps, TRUNCATED | CUT | VALUES | continues), True
    if kind == "discarded":
        flags.append(MARKER | DISCARDED)
        return flags, (steps, steps, TRUNCATED | CUT | DISCARDED | continues), True
    if kind == "part":
        return [FIRST | CUT | MARKER | DISCARDED], (0, 0, TRUNCATED | CUT | DISCARDED | CONTINUES), True
    how = draw(st.sampled_from([TERMINATED, TRUNCATED, TERMINATED | TRUNCATED]))
    flags[-1] |= how
    if kind == "step":
        flags[-1] |= values
        return flags, (steps, steps, how | values | continues), True
    flags.append(OBSERVATION | values)
    return flags, (steps, steps + 1, how | OBSERVATION | values | continues), True


@st.composite
def stretches(draw):
    """Rows of some lanes, and what is to be found in them."""
    plain = draw(st.sampled_from([3, 60]))  # most flags are 0, or few
    columns, flags, ended, opened = [], [], [], []
    for number in range(draw(st.integers(1, 5))):
        lanes = draw(st.integers(1, 4))
        lane, first_row, sealed = draw(st.integers(0, lanes - 1)), draw(st.integers(0, 99)), draw(st.booleans())
        segment, row, open_start = 7 * number, first_row, (-1, False)
        episodes = draw(st.lists(episode(plain), max_size=6))
        for i, (rows, (steps, observations, end), said) in enumerate(episodes):
            first = segment << 35 | (row * lanes + lane)
            if said or sealed or i < len(episodes) - 1:
                ended.append((first, lanes, steps, observations, end))
            else:
                open_start = row, bool(end & CONTINUES)
            flags += rows
            row += len(rows)
        columns.append((segment, lanes, lane, first_row, row - first_row, sealed))
        opened.append(open_start)
    *numbers, sealed = (np.array(column) for column in zip(*columns, strict=True))
    return np.array(flags, np.uint8), LaneSlice(*numbers, sealed), ended, opened


@pytest.mark.slow
@settings(max_examples=300)
@given(stretches())
def test_a_scan_finds_what_was_written(case):
    flags, where, ended, opened = case
    found = parse_episodes(flags, where)

    assert list(map(tuple, found.ended.lines[:, :5].tolist())) == ended
    assert list(zip(found.open_start.tolist(), found.open_continues.tolist(), strict=True)) == opened


def without_zeros(flags, where):
    """Leave out all but one of the zeros in a row, of each stretch by itself."""
    kept, at, gaps, rows = [], [], [], []
    for stop, count in zip(np.cumsum(where.rows).tolist(), where.rows.tolist(), strict=True):
        before = len(kept)
        for i, flag in enumerate(flags[stop - count : stop].tolist()):
            if i and flag == 0 and flags[stop - count + i - 1] == 0:
                if not at or at[-1] != len(kept) - 1:
                    at.append(len(kept) - 1)
                    gaps.append(0)
                gaps[-1] += 1
            else:
                kept.append(flag)
        rows.append(len(kept) - before)
    return np.array(kept, np.uint8), np.array(rows, np.int64), Gaps(np.array(at, np.int64), np.array(gaps, np.int64))


@pytest.mark.slow
@settings(max_examples=300)
@given(stretches())
def test_rows_without_a_flag_may_be_left_out(case):
    flags, where, ended, opened = case
    kept, rows, gaps = without_zeros(flags, where)
    assert rows.sum() + gaps.rows.sum() == len(flags)
    found = parse_episodes(kept, where._replace(rows=rows), gaps)

    assert list(map(tuple, found.ended.lines[:, :5].tolist())) == ended
    assert list(zip(found.open_start.tolist(), found.open_continues.tolist(), strict=True)) == opened


@pytest.mark.slow
@given(stretches(), st.data())
def test_damage_is_found_and_the_lane_named(case, data):
    flags, where, _, _ = case
    bad = data.draw(st.sampled_from(np.flatnonzero(where.rows).tolist() or [None]))
    if bad is None:
        return
    begin = int(where.rows[:bad].sum())
    named = f"segment {where.segment[bad]}, lane {where.lane[bad]}"
    kinds = {"no start": (begin, 0), "unknown": (begin + int(where.rows[bad]) - 1, 128)}
    at, value = kinds[data.draw(st.sampled_from(sorted(kinds)))]
    flags[at] = value
    with pytest.raises(FormatError, match=f"^{named}: the flags in done are damaged at row {where.first_row[bad]};"):
        parse_episodes(flags, where)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([FIRST | TERMINATED, TERMINATED, FIRST], "an episode in done ends twice"),
        ([FIRST, OBSERVATION, OBSERVATION], "an episode in done ends twice"),
        ([FIRST, FIRST | OBSERVATION], "an episode without a step in done"),
        ([FIRST, MARKER | DISCARDED, MARKER | DISCARDED], "an episode in done ends twice"),
        ([FIRST | DISCARDED, 0, TERMINATED], "the flags in done are damaged"),
        ([FIRST, TRUNCATED | MARKER | DISCARDED], "the flags in done are damaged"),
    ],
)
def test_what_is_no_episode_is_refused_among_good_lanes(flags, message):
    good = [FIRST, 0, TERMINATED]
    where = LaneSlice(*np.array([(3, 3, 3), (3, 3, 3), (0, 1, 2), (5, 6, 7), (3, len(flags), 3)]), np.ones(3, bool))
    with pytest.raises(FormatError, match=f"^segment 3, lane 1: {message} (after|at) row 6; restore the segment$"):
        parse_episodes(np.array([*good, *flags, *good], np.uint8), where)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A store of three lanes with 1, 70 and 200 rows, eight a chunk."""
    path = tmp_path_factory.mktemp("uneven") / "store"
    with dr.create(path, serial_schema(), chunk_bytes=64) as store, store.writer(3) as writer:
        for lane, steps in enumerate([1, 70, 200]):
            zeros = np.zeros(steps, np.int64)
            writer.append_episode(lane, np.zeros((steps, 3)), zeros, zeros, terminated=True, serial=zeros)
        yield path


@pytest.mark.slow(turns=4)
@settings(max_examples=50)
@given(data=st.data())
def test_rows_of_many_lanes_are_those_of_each(uneven, data):
    with dr.open(uneven) as store:
        table = store.snapshot.leaf(DONE)
        lane = data.draw(st.lists(st.integers(0, 2), unique=True, min_size=1))
        bounds = [sorted(data.draw(st.tuples(*[st.integers(0, [1, 70, 200][n])] * 2))) for n in lane]
        first, stop = np.array(bounds).T
        rows = table.rows_of_lanes(0, np.array(lane), first, stop)
        each = [table.rows(0, n, *bound) for n, bound in zip(lane, bounds, strict=True)]
        np.testing.assert_array_equal(rows, np.concatenate(each))
