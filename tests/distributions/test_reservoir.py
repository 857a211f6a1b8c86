"""A reservoir holds every set of ids with the same probability, whatever came and went."""

from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.distributions.population import Population
from diskreplay.distributions.restricted import Index
from tests.distributions.growing import FakeStore, add_episodes, grown


def snapshots(store: FakeStore, steps: list[int], frontiers: list[int]) -> list[Any]:
    """A lane with one open episode that grows to these steps; what is below a frontier is hidden."""
    found = []
    for more, frontier in zip(steps, frontiers, strict=True):
        add_episodes(store, 0, [[]], [more])
        store.frontier = frontier
        found.append(store.snapshot())
    return found


def reservoir(coming: list[Any], most: int, seed: int) -> Index:
    population, index = Population(dr.Transitions()), Index(most, "random", np.random.default_rng(seed))
    for snapshot in coming:
        population.refresh(snapshot)
        index.follow(population, dr.Uniform())
    return index


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[5], [1, 2, 3, 4, 5], [2, 5], [4, 5]])
def test_every_set_of_ids_is_as_probable_as_any_other(steps: list[int]) -> None:
    coming = snapshots(grown(1, [[]]), [n + 1 for n in steps], [0] * len(steps))
    counts = Counter(tuple(reservoir(coming, 2, seed).ids.tolist()) for seed in range(1_500))
    ids = range(5)
    assert set(counts) == set(combinations(ids, 2))
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize(
    ("steps", "frontiers"),
    [
        ([61], [0]),
        ([7, 20, 21, 22, 40, 61], [0] * 6),
        ([30, 31, 40, 61], [0, 7, 15, 20]),
        ([20, 40, 61], [0, 25, 50]),
        ([8, 9, 10, 11, 12, 61], [0, 3, 5, 7, 9, 30]),
        ([*range(20, 62, 5), 61], [*range(0, 42, 5), 41]),
    ],
)
def test_every_id_that_is_there_is_in_a_reservoir_with_the_same_probability(
    steps: list[int], frontiers: list[int]
) -> None:
    trials, most = 2_000, 12
    coming = snapshots(grown(1, [[]]), steps, frontiers)
    held = [reservoir(coming, most, seed).ids for seed in range(trials)]
    there = np.arange(frontiers[-1], steps[-1] - 1)
    assert all(len(ids) <= most and np.isin(ids, there).all() for ids in held)
    counts = np.array([np.concatenate(held).tolist().count(i) for i in there])
    share = counts.sum() / trials / len(there)
    # Inclusions of one trial depend on each other: of a fixed size, their variance is p (1 - p), their sum is fixed.
    statistic = ((counts - trials * share) ** 2 / (trials * share * (1 - share))).sum() * (len(there) - 1) / len(there)
    assert stats.chi2.sf(statistic, len(there) - 1) > 1e-4
    if not any(frontiers):
        assert {len(ids) for ids in held} == {min(most, len(there))}


@pytest.mark.slow
def test_a_reservoir_of_a_full_store_stays_full_on_average() -> None:
    coming = snapshots(grown(1, [[]]), [41, *range(42, 140)], [0, *range(1, 99)])
    sizes = np.array([len(reservoir(coming, 10, seed).ids) for seed in range(30)])
    assert sizes.max() == 10
    assert sizes.mean() > 9
