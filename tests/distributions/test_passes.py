"""A key permutes the numbers below a size."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from diskreplay.distributions.sweep import permuted


@given(st.integers(1, 3_000), st.integers(0, 2**63 - 1))
def test_a_key_permutes_the_numbers(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_every_order_of_few_numbers_comes_equally_often() -> None:
    orders, counts = np.unique([permuted(np.arange(3), 3, key) for key in range(3_000)], axis=0, return_counts=True)
    assert len(orders) == 6
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.slow
def test_neighbours_and_places_are_independent_of_the_order() -> None:
    places = np.array([permuted(np.arange(20), 20, key) for key in range(1_500)])
    for number in (0, 7, 19):
        assert stats.chisquare(np.bincount(places[:, number], minlength=20)).pvalue > 1e-5
    steps = np.bincount((places[:, 1] - places[:, 0]) % 20, minlength=20)
    assert steps[0] == 0
    assert stats.chisquare(steps[1:]).pvalue > 1e-5
