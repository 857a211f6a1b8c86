"""What a frontier leaves of runs of ids."""

import numpy as np
from hypothesis import given, strategies as st

from diskreplay.kernels.runs import IdRuns, keep, without_hidden

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
