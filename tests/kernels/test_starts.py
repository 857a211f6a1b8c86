"""At which ids samples start: the kernel and its twin write the same, and nothing beside it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.buffers.replay import Since
from diskreplay.ids import OBSERVATION_ONLY, OPEN, TERMINATED, TRUNCATED
from diskreplay.kernels import following, frozen
from diskreplay.kernels.packed import pack
from diskreplay.kernels.runs import (
    BEFORE,
    BLOCK_ROWS,
    COUNT,
    LINES,
    RUNS,
    RUNS_AND_OPEN,
    TIME,
    TimedRuns,
    without_hidden,
)
from tests.kernels.pairs import KERNELS
from tests.kernels.plain.advance import freeze_plain
from tests.kernels.test_twins import segments_of
from tests.views.fakes import Columns, runs_of, without
from tests.views.strategies import snapshots

VIEWS = [
    dr.Transitions(),
    dr.Transitions(5),
    dr.Transitions(3, next_fields=("action",)),
    dr.Transitions(3, next_fields=("action",), next_missing="drop"),
    dr.Transitions(None),
    dr.Transitions(None, next_fields=("action",), next_missing="drop"),
    dr.Sequences(4, 1),
    dr.Sequences(5, 4, pad=False),
    dr.Sequences(9, 2, pad=False),
    dr.Sequences(4, stride=3, pad="drop"),
    dr.Sequences(3, stride=8),
    dr.Sequences(3, stride=8, pad=False),
    dr.Sequences(5, 3, align="end"),
    dr.Sequences(5, 3, pad="drop", align="end"),
    dr.Sequences(3, stride=8, align="end"),
    dr.Episodes(),
    dr.Rollouts(3),
    Since(2, mark=1 << 36),
]
ENDS = [OPEN, TERMINATED, TRUNCATED, TERMINATED | OBSERVATION_ONLY, TRUNCATED | OBSERVATION_ONLY]

episodes_ = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(1, 60), st.booleans(), st.sampled_from(ENDS)),
    max_size=6,
)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@given(episodes_, st.integers(0, (5 << 35) + 200), st.lists(st.tuples(*[st.integers(0, 60)] * 3), max_size=3))
def test_the_kernel_and_its_twin_write_the_runs_of_a_view(view: Any, episodes: Any, frontier: int, left: Any) -> None:
    table = Columns.of(
        [((number << 35) + 3 * start + 1, 3, steps, steps + more, end) for number, start, steps, more, end in episodes]
    )
    visible = without(frontier, 0, np.full(5, 3))
    # Runs of which some is hidden come first.
    partly = np.array([(a << 33 | b, 3, c + 1, 0) for a, b, c in left], np.int64).reshape(-1, 4).T.copy()
    clipped = without_hidden(TimedRuns(*partly), visible._replace(reached=1).least_ids(partly[0]))
    wanted = [run for run in zip(*(column.tolist() for column in clipped[:3]), strict=True) if run[2]]
    wanted += list(zip(*(column.tolist() for column in runs_of(view, table, visible)), strict=True))
    assert all(count > 0 for _, _, count in wanted)
    rule, segments = np.array(view.starts, np.int64), segments_of(np.full(5, 3))
    record, rows = np.empty(frozen.HEAD, np.int64), np.zeros((following.LANE_ROWS, 15), np.int64)
    freeze_plain(
        np.zeros((0, following.GROWING_COLUMNS), np.int64), rows, visible.oldest, visible.reached, segments.head, record
    )  # fmt: skip
    for kernel in KERNELS["starts"]:
        block = np.full((BLOCK_ROWS, 21), -1, np.int64)
        block[BEFORE] = 7
        still, population = partly.copy(), pack(rule, block)
        end = kernel(still, RUNS, record, population, 2)
        assert (end < 0) == (still[COUNT] == 0).any()
        end = kernel(table.lines, LINES, record, population, max(end, ~end))
        written = block[:, 2:end]
        assert list(zip(*written[: COUNT + 1].tolist(), strict=True)) == wanted
        np.testing.assert_array_equal(np.diff(block[BEFORE, 2 : end + 1]), written[COUNT])
        assert set(written[TIME].tolist()) <= {0, *table.time.tolist()}
        np.testing.assert_array_equal(still, np.stack(clipped))
        assert (block[:BEFORE, end:] == -1).all()
        assert (block[BEFORE, end + 1 :] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@given(snapshots())
def test_episodes_that_are_open_in_a_snapshot_are_like_lines_of_a_table(view: Any, snapshot: Any) -> None:
    rule, nothing = np.array(view.starts, np.int64), np.zeros((4, 0), np.int64)
    found = []
    for kernel in KERNELS["starts"]:
        for listed, kind in ((snapshot.open.lines, LINES), (nothing, RUNS_AND_OPEN)):
            block = np.full((BLOCK_ROWS, 64), 0, np.int64)
            end = kernel(listed, kind, snapshot.record, pack(rule, block), 0)
            found.append(block[:, : end + 1].tolist())
    assert found[1:] == found[:-1]
