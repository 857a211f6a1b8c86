"""What a frontier leaves of runs of ids."""

import numpy as np
from hypothesis import given, strategies as st

from diskreplay.kernels.runs import (
    BEFORE,
    BLOCK_ROWS,
    COUNT,
    FIRST,
    STRIDE,
    TIME,
    IdRuns,
    keep,
    sort_runs,
    without_hidden,
)

runs = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 7), st.integers(0, 12)), max_size=4)


def ids_of(made):
    return [
        [first + j * stride for j in range(count)]
        for first, stride, count in zip(*(column.tolist() for column in made), strict=True)
    ]


@given(runs, st.integers(0, 120))
def test_a_frontier_leaves_the_ids_from_it_on(rows, frontier):
    made = IdRuns(*np.array(rows, np.int64).reshape(-1, 3).T)
    left = without_hidden(made, frontier)

    assert ids_of(left) == [[i for i in ids if i >= frontier] for ids in ids_of(made)]
    assert all(column.dtype == np.int64 for column in left)
    assert (left.stride == made.stride).all()
    assert ids_of(keep(left, left.count > 0)) == [ids for ids in ids_of(left) if ids]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(1, 5)), max_size=40),
    st.integers(0, 3),
)
def test_runs_are_sorted_by_time_and_then_by_id(runs, start):
    runs = list({(time, first): (time, first, count) for time, first, count in runs}.values())
    end = start + len(runs)
    block = np.full((BLOCK_ROWS, end + 3), 7, np.int64)
    block[[TIME, FIRST, COUNT], start:end] = np.array(runs, np.int64).reshape(-1, 3).T
    block[STRIDE, start:end] = 100 + np.arange(len(runs))
    strides = {(time, first): 100 + at for at, (time, first, _) in enumerate(runs)}
    before = block.copy()
    sort_runs(block, start, end)
    assert [tuple(run) for run in block[[TIME, FIRST, COUNT], start:end].T.tolist()] == sorted(runs)
    assert block[STRIDE, start:end].tolist() == [strides[time, first] for time, first, _ in sorted(runs)]
    assert np.diff(block[BEFORE, start : end + 1]).tolist() == [count for *_, count in sorted(runs)]
    block[:, start:end], block[BEFORE, end] = before[:, start:end], before[BEFORE, end]
    np.testing.assert_array_equal(block, before)  # and nothing beside them is written
