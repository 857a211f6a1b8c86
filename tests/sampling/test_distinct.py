"""Batches without repetition: every set of ids with the same probability, and none where there are too few."""

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.sampling.distinct import Distinct, PrioritizedOfEnough
from diskreplay.sampling.population import Population
from tests.views.fakes import FLAT_SCHEMA, Segment, Snapshot, episode


def population_of(lengths: list[list[int]]) -> Population:
    rng = np.random.default_rng(0)
    lanes = [[episode(FLAT_SCHEMA, steps, "terminated", True, rng) for steps in lane] for lane in lengths]
    population = Population(dr.Transitions())
    population.refresh(Snapshot(FLAT_SCHEMA, [Segment(lanes)]))
    return population


def test_a_batch_of_everything_holds_each_id_once() -> None:
    population = population_of([[1, 9, 3], [40], [7, 7]])
    drawn = Distinct().draw(population, population.size, np.random.default_rng(0)).ids
    assert sorted(drawn) == sorted(population.take(np.arange(population.size)))


def test_every_pair_is_drawn_equally_often() -> None:
    population, rng = population_of([[2], [1, 2]]), np.random.default_rng(1)
    pairs = [tuple(sorted(Distinct().draw(population, 2, rng).ids)) for _ in range(5_000)]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(found) == 10
    assert stats.chisquare(counts).pvalue > 0.001


def test_a_seed_makes_the_draws_which_all_weigh_one() -> None:
    population = population_of([[20]])
    one, same, other = (Distinct().draw(population, 10, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert one.ids.tolist() == same.ids.tolist() != other.ids.tolist()
    assert Distinct().weigh(one, None) is None


@pytest.mark.parametrize("distribution", [Distinct(), PrioritizedOfEnough(alpha=0.6, beta=0.4)], ids=repr)
def test_too_few_ids_are_refused_with_both_numbers(distribution: Distinct | PrioritizedOfEnough) -> None:
    population = population_of([[4], [3]])
    assert len(distribution.draw(population, 7, np.random.default_rng(0)).ids) == 7
    with pytest.raises(dr.NotEnoughData, match="^7 steps are sampleable, and a batch of 8 needs 8: add more$"):
        distribution.draw(population, 8, np.random.default_rng(0))
