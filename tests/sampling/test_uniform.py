"""Uniform draws are uniform, by themselves and shared among ranks."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.ids import POSITION_MASK
from diskreplay.sampling.population import Population, Share
from tests.sampling.growing import everything, grown, population_of as growing_population
from tests.views.fakes import FLAT_SCHEMA, Segment, Snapshot, episode


def population_of(lengths: list[list[int]]) -> Population:
    rng = np.random.default_rng(0)
    lanes = [[episode(FLAT_SCHEMA, steps, "terminated", True, rng) for steps in lane] for lane in lengths]
    population = Population(dr.Transitions())
    population.refresh(Snapshot(FLAT_SCHEMA, [Segment(lanes)]))
    return population


def test_every_id_is_drawn_equally_often() -> None:
    population = population_of([[1, 9, 3], [40], [7, 7]])
    drawn = dr.Uniform().draw(population, 67_000, np.random.default_rng(0)).ids
    ids, counts = np.unique(drawn, return_counts=True)
    assert sorted(ids) == sorted(population.take(np.arange(population.size)))
    assert stats.chisquare(counts).pvalue > 0.001


def test_a_seed_makes_the_draws() -> None:
    population = population_of([[20]])
    one, same, other = (dr.Uniform().draw(population, 50, np.random.default_rng(seed)).ids for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_ids_without_overlap_and_each_draws_its_own_equally_often(world_size: int) -> None:
    population = population_of([[10, 30], [25], [8, 8]])
    seen = []
    for rank in range(world_size):
        rng = np.random.default_rng(rank)
        population.share = Share(rank, world_size)
        draw = dr.Uniform().draw_share(population, 20_000, rng)
        assert len(draw.ids) == 20_000
        assert Share(rank, world_size).contains(draw.ids).all()
        ids, counts = np.unique(draw.ids, return_counts=True)
        assert stats.chisquare(counts).pvalue > 0.001
        seen += ids.tolist()
    assert sorted(seen) == sorted(population.take(np.arange(population.size)).tolist())


def test_a_rank_without_any_id_is_not_enough_data() -> None:
    population = population_of([[3]])
    population.share = Share(5, 6)
    message = "none of the 3 sampleable steps belongs to rank 5 of 6; 1 is needed, append more"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        dr.Uniform().draw_share(population, 4, np.random.default_rng(0))


def test_a_rank_with_one_id_of_many_gets_it() -> None:
    population = population_of([[200]])
    every = everything(population)
    for rank in range(2000):
        mine = every[Share(rank, 2000).contains(every)].tolist()
        if mine:
            population.share = Share(rank, 2000)
            draw = dr.Uniform().draw_share(population, 3, np.random.default_rng(0))
            assert set(draw.ids.tolist()) <= set(mine)
            break


@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(80, 40), dr.Sequences(5, 4), dr.Episodes()], ids=str)
@pytest.mark.parametrize(("lanes", "world_size"), [(1, 8), (8, 8), (6, 4)])
def test_shares_are_as_even_as_a_hash_makes_them_and_each_rank_sees_each_lane(
    view: Any, lanes: int, world_size: int
) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, (lanes, 2400 // lanes)).tolist()
    population = growing_population(grown(lanes, lengths), view)
    every = np.sort(population.take(np.arange(population.size)))
    rank_of = np.argmax([Share(rank, world_size).contains(every) for rank in range(world_size)], axis=0)
    counts = np.bincount(rank_of, minlength=world_size)
    assert counts.sum() == len(every)
    assert stats.chisquare(counts).pvalue > 0.001
    by_lane = np.zeros((world_size, lanes))
    np.add.at(by_lane, (rank_of, (every & POSITION_MASK) % lanes), 1)
    assert (by_lane > 0).all()


def test_an_id_stays_in_its_share_while_the_store_grows() -> None:
    ids = np.arange(1000)
    assert (Share(1, 3).contains(ids) == Share(1, 3).contains(np.arange(2000))[:1000]).all()
