"""A mixture draws from each of its distributions by its share."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.sampling.population import Share
from tests.sampling.growing import everything, grown, population_of


@pytest.mark.slow
def test_an_id_is_drawn_with_the_mixed_probability_and_weighed_by_it() -> None:
    population = population_of(grown(2, [[40], [25, 10]]))
    ids, rng = everything(population), np.random.default_rng(0)
    n = len(ids)
    prioritized = dr.Prioritized(alpha=1.0, beta=dr.Linear(0.5, 1.0, 10), eps=0.01, stratified=False)
    mixture = dr.Mixture([(prioritized, 3), (dr.Recency(20), 1.5), (dr.Uniform(), 0.5), (dr.Sweep(passes=None), 1.0)])
    errors = rng.exponential(1.0, n)
    assert mixture.update(population, np.append(ids, -1), np.append(errors, 1.0)) == 1
    recent = 2.0 ** (-np.arange(n)[::-1] / 20)
    want = (3 * (errors + 0.01) / (errors + 0.01).sum() + 1.5 * recent / recent.sum() + 1.5 / n) / 6
    np.testing.assert_allclose(mixture.chances(population, ids), want, rtol=1e-9)
    draws = [mixture.draw(population, 500, rng) for _ in range(400)]
    counts = np.bincount(np.searchsorted(ids, np.concatenate([d.ids for d in draws])), minlength=n)
    # The sweep's part varies less than independent draws do; the test then passes the more easily.
    assert stats.chisquare(counts, want * counts.sum()).pvalue > 1e-4
    chance = want[np.searchsorted(ids, draws[0].ids)]
    weights = (n * chance) ** -0.75
    np.testing.assert_allclose(mixture.weigh(draws[0], None, 5), weights / weights.max(), rtol=1e-6)
    assert mixture.weighted
    assert mixture.eta == prioritized.eta == 0.9


def test_the_parts_take_turns_at_random_places() -> None:
    population = population_of(grown(1, [[400]]))
    mixture = dr.Mixture([(dr.Recency(0.01), 1), (dr.Uniform(), 1)])
    ids = np.array([mixture.draw(population, 8, np.random.default_rng(seed)).ids for seed in range(2_000)])
    newest = (ids == everything(population)[-1]).mean(axis=0)
    assert (np.abs(newest - 0.5) < 0.06).all()


def test_without_priorities_all_weigh_one() -> None:
    population = population_of(grown(1, [[10]]))
    mixture = dr.Mixture([(dr.Uniform(), 1), (dr.Recency(3), 1)])
    draw = mixture.draw(population, 4, np.random.default_rng(0))
    assert draw.chances is None
    assert mixture.weigh(draw, None) is None
    assert not mixture.weighted
    assert mixture.update(population, draw.ids, np.ones(4)) == 0


def test_a_sweep_inside_a_mixture_misses_no_id_of_a_rank() -> None:
    population = population_of(grown(1, [[50]]))
    ids = everything(population)
    mine = ids[Share(1, 2).contains(ids)]
    population.share = Share(1, 2)
    mixture, rng = dr.Mixture([(dr.Sweep(passes=None), 0.5), (dr.Recency(0.001), 0.5)]), np.random.default_rng(0)
    drawn = np.concatenate([mixture.draw(population, 10, rng).ids for _ in range(12)])
    assert set(drawn.tolist()) == set(mine.tolist())


def test_its_state_is_that_of_its_parts() -> None:
    population = population_of(grown(1, [[30]]))

    def make() -> dr.Mixture:
        return dr.Mixture([(dr.Uniform(), 1), (dr.Prioritized(), 1), (dr.Sweep(passes=None), 1)])

    mixture, loaded = make(), make()
    mixture.update(population, everything(population), np.arange(30.0))
    mixture.draw(population, 10, np.random.default_rng(0))
    loaded.load_state_dict(mixture.state_dict())
    one, other = (m.draw(population, 40, np.random.default_rng(1)) for m in (mixture, loaded))
    assert one.ids.tolist() == other.ids.tolist()
    np.testing.assert_array_equal(mixture.weigh(one, None), loaded.weigh(other, None))
    with pytest.raises(ValueError, match="no state of"):
        loaded.load_state_dict({"0": {}})
    owner, other_owner = dr.Recency(1), dr.Recency(1)
    mixture.claim(owner)
    with pytest.raises(ValueError, match="another sampler"):
        mixture.claim(other_owner)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts must name at least one distribution"),
        (5, "parts must be (distribution, share) pairs, not 5"),
        ([(dr.Uniform(), 0)], "the share of parts[0] must be a finite number above 0, not 0"),
        ([(dr.Uniform(), 1), ("x", 1)], "parts[1] must begin with a distribution such as Uniform(), not 'x'"),
        ([(dr.Sweep(2), 1)], "parts[0] is Sweep(passes=2), which ends: only Sweep(passes=None) fits"),
        (
            [(dr.Prioritized(normalize="store"), 1)],
            'parts[0] must have normalize="batch": the largest weight of a store is not known',
        ),
    ],
)
def test_bad_parts_are_refused(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Mixture(parts)


def test_a_batch_that_lost_ids_keeps_what_is_left_of_it_where_a_sweep_is_a_part() -> None:
    store = grown(1, [[20]], [30])
    population, rng = population_of(store), np.random.default_rng(0)
    mixture = dr.Mixture([(dr.Sweep(passes=None), 0.8), (dr.Prioritized(), 0.2)])
    ids = everything(population)
    lost = mixture.draw(population, 40, rng)
    store.frontier = int(ids[10])
    population.refresh(store.snapshot())
    left = [i for i in lost.ids if i >= store.frontier]
    again = mixture.redraw(lost, population, 40, rng)
    assert again.ids[: len(left)].tolist() == left
    assert len(again.ids) == 40
    assert population.contains(again.ids).all()
    assert again.chances is not None
    np.testing.assert_array_equal(again.chances, mixture.chances(population, again.ids))
    rest = np.concatenate([again.ids, mixture.draw(population, 60, rng).ids])
    assert set(rest.tolist()) >= set(ids[10:].tolist())  # no id that a sweep gives once was lost


def test_a_batch_that_lost_ids_is_drawn_afresh_where_ids_come_again() -> None:
    population = population_of(grown(1, [[50]]))
    for mixture in (dr.Mixture([(dr.Uniform(), 1), (dr.Recency(5), 1)]), dr.Uniform()):
        lost = mixture.draw(population, 10, np.random.default_rng(0))
        again = mixture.redraw(lost, population, 10, np.random.default_rng(1))
        assert again.ids.tolist() == mixture.draw(population, 10, np.random.default_rng(1)).ids.tolist()
