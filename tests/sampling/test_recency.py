"""Draws by recency halve with every half-life, in the order in which steps came."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

import diskreplay as dr
from diskreplay.sampling.population import Population
from diskreplay.sampling.recency import Arrivals
from tests.sampling.growing import FakeStore, add_episodes, everything, grown, population_of


def pvalue(counts: np.ndarray, want: np.ndarray) -> float:
    """Compare counts with what was to be expected, rare ones taken together."""
    want = want * counts.sum() / want.sum()
    often = want >= 10
    together = [counts[~often].sum()], [want[~often].sum()]
    if together[1][0] < 10:
        counts, want = counts[often], want[often]
        want *= counts.sum() / want.sum()
    else:
        counts, want = np.append(counts[often], together[0]), np.append(want[often], together[1])
    return float(stats.chisquare(counts, want).pvalue)


def counted(distribution: dr.Recency, population: Population, draws: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids in their order, and how often each was drawn."""
    ids = everything(population)
    drawn = distribution.draw(population, draws, np.random.default_rng(0)).ids
    at = np.searchsorted(ids, drawn)
    assert (ids[at] == drawn).all()
    return ids, np.bincount(at, minlength=len(ids))


def by_age(ages: np.ndarray, half_life: float) -> np.ndarray:
    return 2.0 ** (-ages / half_life)


def interleaved() -> FakeStore:
    """Lanes of uneven episodes, some of them open, in two segments; ids are in the order of times."""
    store = grown(3, [[30, 9], [4, 4, 40], [70]], [20, 0, 3])
    store.add_segment(2)
    add_episodes(store, 1, [[11], [25, 3]], [9, 30])
    return store


@pytest.mark.parametrize("half_life", [0.7, 5, 15.0])
def test_what_is_found_together_is_drawn_by_its_time(half_life: float) -> None:
    ids, counts = counted(dr.Recency(half_life), population_of(interleaved()))
    assert pvalue(counts, by_age(np.arange(len(ids))[::-1], half_life)) > 1e-4


@pytest.mark.parametrize("half_life", [40.0, 1e3, 1e12])
def test_with_a_long_half_life_it_is_nearly_so(half_life: float) -> None:
    population = population_of(interleaved())
    ids = everything(population)
    chances = dr.Recency(half_life).chances(population, ids)
    assert chances.sum() == pytest.approx(1.0)
    want = by_age(np.arange(len(ids))[::-1], half_life)
    np.testing.assert_allclose(chances, want / want.sum(), rtol=1.5 / 32)
    _, counts = counted(dr.Recency(half_life), population)
    assert pvalue(counts, chances) > 1e-4


class Growing:
    """A fake store to which steps are added one by one."""

    def __init__(self, lanes: int, seed: int) -> None:
        self.rng, self.store = np.random.default_rng(seed), FakeStore()
        self.store.add_segment(lanes)

    def add(self, count: int) -> None:
        store = self.store
        for _ in range(count):
            lane = int(self.rng.integers(0, store.lanes[0]))
            store.open[0][lane] += 1
            if self.rng.random() < 0.02:
                store.end(0, lane)


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("many", [1, 7])
def test_what_is_found_one_after_the_other_is_drawn_in_that_order(lanes: int, many: int) -> None:
    growing = Growing(lanes, lanes)
    growing.add(50)
    population, distribution = population_of(growing.store), dr.Recency(20)
    came = everything(population)
    for _ in range(80):
        growing.add(int(growing.rng.integers(0, many + 1)))
        population.refresh(growing.store.snapshot())
        came = np.append(came, np.setdiff1d(everything(population), came))
        distribution.draw(population, 4, growing.rng)
    ages = {step_id: len(came) - 1 - at for at, step_id in enumerate(came.tolist())}
    ids, counts = counted(distribution, population)
    chances = distribution.chances(population, ids)
    assert chances.sum() == pytest.approx(1.0)
    assert pvalue(counts, chances) > 1e-4
    want = by_age(np.array([ages[i] for i in ids.tolist()]), 20)
    if many == 1 or lanes == 1:  # what is found together has the order of times, which here is that of rows
        newest = want > 2.0**-2
        np.testing.assert_allclose(chances[newest] / chances.max(), want[newest] / want.max(), rtol=0.08)


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40)
def test_it_draws_what_can_be_drawn_whatever_came_and_went(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, distribution = interleaved(), dr.Recency(float(rng.choice([3.0, 50.0, 1000.0])))
    population = population_of(store)
    for _ in range(12):
        for segment in range(len(store.lanes)):
            for lane in range(store.lanes[segment]):
                store.open[segment][lane] += int(rng.integers(0, 4))
                if store.open[segment][lane] and rng.random() < 0.4:
                    store.end(segment, lane)
        ids = everything(population)
        if rng.random() < 0.4 and len(ids) > 40:
            store.frontier = int(ids[rng.integers(0, 30)])
        if rng.random() < 0.1:
            store.drop_hidden_segments()
        if rng.random() < 0.05:
            store.new_log()
        if rng.random() < 0.1:  # as when episodes are evicted by hand
            store.generation += 1
            store.log = [e for e in store.log if rng.random() < 0.8]
        if rng.random() < 0.2:
            store.add_segment(int(rng.integers(1, 4)))
        population.refresh(store.snapshot())
        ids = everything(population)
        if rng.random() < 0.6 and len(ids):
            assert np.isin(distribution.draw(population, 50, rng).ids, ids).all()
            chances = distribution.chances(population, ids)
            assert chances.sum() == pytest.approx(1.0)
            assert (chances >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_what_was_saved_goes_on_alike(seed: int) -> None:
    growing = Growing(3, seed)
    growing.add(400)
    population, distribution = population_of(growing.store), dr.Recency(30)
    later = other = None
    for number in range(120):
        growing.add(int(growing.rng.integers(0, 3)))
        if growing.rng.random() < 0.1:
            growing.store.frontier = int(everything(population)[10])
        population.refresh(growing.store.snapshot())
        drawn = distribution.draw(population, 20, np.random.default_rng(number)).ids
        if other is not None and later is not None:
            later.refresh(growing.store.snapshot())
            assert other.draw(later, 20, np.random.default_rng(number)).ids.tolist() == drawn.tolist()
        if number % 20 == 10:
            order, state = population.order(), distribution.state_dict()
            later, other = Population(dr.Transitions()), dr.Recency(30)
            later.restore(order)
            other.load_state_dict(state)


def test_its_state_is_of_what_torch_loads_without_unpickling(tmp_path: Any) -> None:
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with (
        dr.create(tmp_path / "store", schema) as store,
        store.writer() as writer,
        dr.Sampler(store, dr.Transitions(), dr.Recency(200), batch_size=4, seed=0) as sampler,
    ):
        for _ in range(5):
            writer.append_episode(np.zeros(4, "f4"), np.zeros(3, int), np.zeros(3), terminated=True)
            sampler.sample()
            torch.save(sampler.state_dict(), tmp_path / "state.pt")
            sampler.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))


def test_windows_are_as_old_as_the_steps_behind_them() -> None:
    population = population_of(grown(1, [[400]]), dr.Sequences(8, 4, pad=False))
    ids = everything(population)
    chances = dr.Recency(40.0).chances(population, ids)
    want = by_age(4.0 * np.arange(len(ids))[::-1], 40.0)
    np.testing.assert_allclose(chances, want / want.sum(), rtol=0.05)


def test_episodes_are_as_old_as_the_steps_of_those_behind_them() -> None:
    population = population_of(grown(1, [[5, 80, 20, 40]]), dr.Episodes())
    chances = dr.Recency(50.0).chances(population, everything(population))
    want = by_age(np.array([140, 60, 40, 0.0]), 50.0)
    assert chances.argsort().tolist() == [0, 1, 2, 3]
    # An episode is taken at its middle, as if its id had come while its steps did.
    np.testing.assert_allclose(chances, want / want.sum(), rtol=0.8)


def test_one_id_is_always_drawn() -> None:
    population = population_of(grown(1, [[1]]))
    for half_life in (1e-9, 1.0, 1e300):
        distribution = dr.Recency(half_life)
        drawn = distribution.draw(population, 5, np.random.default_rng(0))
        assert drawn.ids.tolist() == everything(population).tolist() * 5
        assert distribution.weigh(drawn, None) is None
        assert distribution.chances(population, np.array([-1, drawn.ids[0], 1 << 60])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("half_life", [0, -1, float("inf"), "many", True])
def test_bad_half_lives_are_refused(half_life: Any) -> None:
    message = f"half_life must be a finite number above 0, not {half_life!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Recency(half_life)


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": np.zeros((2, 1))},
        {"pieces": -np.ones((3, 1))},
        {"starts": np.array([0, 2])},
        {"starts": np.array([1, 1])},
        {"ranks": np.array([0.0, 0.0])},
        {"taken": np.array([-1])},
        {"full": None, "starts": None},
    ],
)
def test_what_is_no_state_is_refused(change: dict[str, Any]) -> None:
    state = {"pieces": [[0], [1], [1]], "starts": [0, 1], "ranks": [0.0, 1.0], "taken": [0], "full": False}
    Arrivals.loaded(10, state)
    with pytest.raises((ValueError, TypeError)):
        Arrivals.loaded(10, {**state, **change})


@pytest.mark.slow
@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("at_rest", [False, True])
def test_ages_fit_the_closed_form_with_several_collectors(tmp_path: Any, writers: int, at_rest: bool) -> None:
    half_life, batches = 300, 400
    schema = dr.Schema(obs=dr.Field((1,), "float32"), action=dr.Field((), "int64"))
    ages, lanes = [], []
    with dr.create(tmp_path / "store", schema, segment_steps=700) as store:
        collectors, came, rng = [store.writer() for _ in range(writers)], 0, np.random.default_rng(0)

        def collect(count: int) -> None:
            nonlocal came
            for _ in range(count):
                i = int(rng.integers(writers))
                obs = np.full(1, i, np.float32)
                collectors[i].append(obs, came, 0.0, bool(rng.random() < 0.01), next_obs=obs)
                came += 1

        collect(6000)
        sampler = dr.Sampler(store, dr.Transitions(), dr.Recency(half_life), batch_size=256, seed=0)
        for _ in range(batches):
            batch = sampler.sample()
            ages.append(came - 1 - batch.action.numpy())
            lanes.append(batch.obs.numpy()[:, 0])
            if not at_rest:
                collect(2)
        for collector in collectors:
            collector.close()
        sampler.close()
    drawn = np.concatenate(ages)
    counts = np.bincount(np.minimum(drawn // 50, 60), minlength=61)
    want = by_age(50.0 * np.arange(61), half_life)
    want[60] /= 1 - 2.0 ** (-50 / half_life)
    share = counts / counts.sum() / (want / want.sum())
    assert (abs(share[:20] - 1) < 0.1).all(), share
    assert np.bincount(np.concatenate(lanes).astype(int)) / len(drawn) == pytest.approx(1 / writers, abs=0.06)


def test_where_all_that_could_be_drawn_was_evicted_older_steps_are_drawn() -> None:
    store = grown(1, [[400, 300]])
    population, distribution = population_of(store), dr.Recency(0.5)
    assert (distribution.draw(population, 20, np.random.default_rng(0)).ids >= 400).all()
    store.generation += 1
    del store.log[1:]
    population.refresh(store.snapshot())
    assert (distribution.draw(population, 20, np.random.default_rng(0)).ids < 400).all()
