"""Draws by recency halve with every half-life."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from diskreplay.sampling import recency
from diskreplay.sampling.population import Population
from diskreplay.sampling.recency import Recency
from tests.sampling.growing import FakeStore, add_episodes, everything, grown, population_of


def pvalue(distribution: Recency, population: Population, half_life: float, draws: int = 200_000) -> float:
    """Compare draws with the closed form over ids in their order, rare ones taken together."""
    ids = everything(population)
    drawn = distribution.draw(population, draws, np.random.default_rng(0)).ids
    at = np.searchsorted(ids, drawn)
    assert (ids[at] == drawn).all()
    counts = np.bincount(at, minlength=len(ids))
    want = 2.0 ** (-np.arange(len(ids))[::-1] / half_life)
    want *= draws / want.sum()
    often = want >= 10
    together = [counts[~often].sum()], [want[~often].sum()]
    if together[1][0] < 10:
        counts, want = counts[often], want[often]
        want *= counts.sum() / want.sum()
    else:
        counts, want = np.append(counts[often], together[0]), np.append(want[often], together[1])
    return float(stats.chisquare(counts, want).pvalue)


def interleaved() -> FakeStore:
    """Lanes of uneven episodes, some of them open, in two segments that grow at once."""
    store = grown(3, [[30, 9], [4, 4, 40], [70]], [20, 0, 3])
    store.add_segment(2)
    add_episodes(store, 1, [[11], [25, 3]], [9, 30])
    return store


@pytest.mark.parametrize("half_life", [0.7, 5, 40.0, 1e6])
def test_each_id_is_drawn_by_its_age(half_life: float) -> None:
    assert pvalue(Recency(half_life), population_of(interleaved()), half_life) > 1e-4


def test_ages_follow_a_store_that_grows_and_forgets() -> None:
    store = interleaved()
    population, distribution = population_of(store), Recency(20)
    assert pvalue(distribution, population, 20) > 1e-4
    store.open[0][0] += 5
    store.end(1, 1)
    store.frontier = int(everything(population)[60])
    population.refresh(store.snapshot())
    assert pvalue(distribution, population, 20) > 1e-4


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_an_index_that_followed_the_store_is_one_made_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, distribution = interleaved(), Recency(1000)
    population = population_of(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recency, "SMALL", int(rng.integers(0, 6)))
        for _ in range(12):
            for segment in range(len(store.lanes)):
                for lane in range(store.lanes[segment]):
                    store.open[segment][lane] += int(rng.integers(0, 4))
                    if rng.random() < 0.4:
                        store.end(segment, lane)
            ids = everything(population)
            if rng.random() < 0.4 and len(ids) > 40:
                store.frontier = int(ids[rng.integers(0, 30)])
            if rng.random() < 0.1:
                store.drop_hidden_segments()
            if rng.random() < 0.05:
                store.new_log()
            if rng.random() < 0.2:
                store.add_segment(int(rng.integers(1, 4)))
            population.refresh(store.snapshot())
            if rng.random() < 0.6:
                np.testing.assert_array_equal(
                    distribution.chances(population, everything(population)),
                    Recency(1000).chances(population, everything(population)),
                )
                np.testing.assert_array_equal(
                    distribution.draw(population, 50, np.random.default_rng(1)).ids,
                    Recency(1000).draw(population, 50, np.random.default_rng(1)).ids,
                )


def test_chances_are_the_closed_form_and_add_up_to_one() -> None:
    population = population_of(interleaved())
    ids = everything(population)
    chances = Recency(7.5).chances(population, ids)
    want = 2.0 ** (-np.arange(len(ids))[::-1] / 7.5)
    np.testing.assert_allclose(chances, want / want.sum(), rtol=1e-9)
    np.testing.assert_allclose(Recency(1e12).chances(population, ids), 1 / len(ids), rtol=1e-9)
    assert Recency(7.5).chances(population, np.array([-1, ids[-1] + 1, 1 << 60])).tolist() == [0, 0, 0]


def test_one_id_is_always_drawn() -> None:
    population = population_of(grown(1, [[1]]))
    for half_life in (1e-9, 1.0, 1e300):
        drawn = Recency(half_life).draw(population, 5, np.random.default_rng(0))
        assert drawn.ids.tolist() == everything(population).tolist() * 5
        assert Recency(half_life).weigh(drawn, None) is None


@pytest.mark.parametrize("half_life", [0, -1, float("inf"), "many", True])
def test_bad_half_lives_are_refused(half_life: Any) -> None:
    message = f"half_life must be a finite number above 0, not {half_life!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Recency(half_life)
