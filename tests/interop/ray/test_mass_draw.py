"""How a draw is split over shards, and updates are joined."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.stats import chisquare

from diskreplay.interop.ray.draw_rounds import chances, importance_weights, split_batch
from diskreplay.interop.ray.messages import Update, joined_updates


def test_a_batch_is_split_in_proportion_to_the_masses() -> None:
    masses, rng = np.array([5.0, 0.0, 1.5, 20.0]), np.random.default_rng(1)
    counts = np.stack([split_batch(rng, 32, masses) for _ in range(2000)])
    assert (counts.sum(axis=1) == 32).all()
    assert (counts[:, 1] == 0).all()
    drawn, some = counts.sum(axis=0), [0, 2, 3]
    assert chisquare(drawn[some], 64_000 * masses[some] / masses.sum()).pvalue > 1e-3
    # One draw for the whole batch: the numbers of one shard are binomial.
    p = 5.0 / 26.5
    assert counts[:, 0].var() == pytest.approx(32 * p * (1 - p), rel=0.1)


@given(st.lists(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_weights_are_those_of_one_store_with_all_items(shards: list[list[float]], beta: float) -> None:
    masses = [sum(shard) for shard in shards]
    found = np.concatenate(
        [chances(np.array(shard) / mass, mass, sum(masses)) for shard, mass in zip(shards, masses, strict=True)]
    )
    together = np.concatenate(shards)
    expected = together / together.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    weights = (len(together) * expected) ** -beta
    np.testing.assert_allclose(importance_weights(found, beta), weights / weights.max(), rtol=1e-6)


def test_chances_are_those_of_the_masses_that_the_batch_was_split_by_however_old() -> None:
    # The shard has since grown from a mass of 3 to one of 12, of which the item has 6.
    assert chances(np.array([6.0 / 12.0]), mass=3.0, total=4.0).tolist() == [0.375]


def test_a_batch_without_items_has_no_weights() -> None:
    assert importance_weights(np.zeros(0), 0.5).shape == (0,)


def test_updates_are_sent_together_where_they_are_alike() -> None:
    kind, other = ("transitions",), ("sequences", 2, 1, True)
    one = np.array([1, 2]), np.array([0.1, 0.2])
    two = np.array([2, 3]), np.array([0.3, 0.4])
    windows = np.array([7]), np.array([[0.5, 0.6]])
    sent = joined_updates([Update(*one, kind), Update(*two, kind), Update(*windows, other), Update(*one, kind)])
    assert [update.kind for update in sent] == [kind, other, kind]
    assert [update.ids.tolist() for update in sent] == [[1, 2, 2, 3], [7], [1, 2]]
    assert [update.errors.tolist() for update in sent] == [[0.1, 0.2, 0.3, 0.4], [[0.5, 0.6]], [0.1, 0.2]]
