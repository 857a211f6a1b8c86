"""Each episode, or each value of an episode field, is drawn equally often."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.sampling import population as populations, stratified as module
from diskreplay.sampling.population import Population, Share
from tests.sampling.growing import FakeStore, Growth, add_episodes, everything, grown, population_of

VIEWS = [
    dr.Transitions(),
    dr.Transitions(3),
    dr.Sequences(4, 1),
    dr.Sequences(4, 1, pad=False),
    dr.Sequences(4, 1, pad=False, align="end"),
    dr.Sequences(3, stride=5, pad=False),
    dr.Episodes(),
]


def episodes_of(store: FakeStore, ids: np.ndarray) -> dict[int, int]:
    """The first id of each id's episode, by plain loops."""
    lines = [*store.log, *store.snapshot().open.lines.tolist()]
    first = {f + s * j: f for f, s, steps, *_ in lines for j in range(steps)}
    return {i: first[i] for i in ids.tolist()}


def expected(store: FakeStore, population: Population, by: str) -> dict[int, float]:
    """The closed form: 1 / (groups · ids of the group)."""
    group: dict[int, Any] = episodes_of(store, everything(population))
    if by != "episode":
        ended = {f for f, *_ in store.log}
        group = {i: store.values[f] for i, f in group.items() if f in ended and f in store.values}
    sizes = Counter(group.values())
    return {i: 1 / (len(sizes) * sizes[g]) for i, g in group.items()}


def check_chances(distribution: Any, store: FakeStore, population: Population, by: str) -> None:
    ids = everything(population)
    want = expected(store, population, by)
    chances = distribution.chances(population, np.append(ids, [-1, 1 << 50]))
    np.testing.assert_allclose(chances, [*(want.get(i, 0.0) for i in ids.tolist()), 0, 0], rtol=1e-12)


def check_draws(distribution: Any, store: FakeStore, population: Population, by: str, draws: int = 30_000) -> None:
    want = expected(store, population, by)
    drawn = distribution.draw(population, draws, np.random.default_rng(7)).ids
    ids, counts = np.unique(drawn, return_counts=True)
    assert set(ids.tolist()) == set(want)
    assert stats.chisquare(counts, np.array([want[i] for i in ids.tolist()]) * draws).pvalue > 1e-4


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_episodes_are_drawn_equally_often_and_then_their_ids(view: Any) -> None:
    store = grown(3, [[30, 4, 9], [1, 5, 17], [12, 40]], [4, 0, 7])
    population, distribution = population_of(store, view), dr.Stratified()
    check_chances(distribution, store, population, "episode")
    check_draws(distribution, store, population, "episode")
    want = expected(store, population, "episode")
    assert sum(want.values()) == pytest.approx(1.0)
    if not isinstance(view, dr.Episodes):
        assert len(set(want.values())) > 3


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_values_of_a_field_are_drawn_equally_often_and_then_their_ids(view: Any) -> None:
    store = grown(3, [[30, 4, 9], [5, 17, 8], [12, 40]], [4, 0, 7])
    store.values = {f: (7, -3, 7, 250)[i % 4] for i, (f, *_) in enumerate(store.log) if i != 5}
    population, distribution = population_of(store, view), dr.Stratified(by="episode/task")
    check_chances(distribution, store, population, "episode/task")
    check_draws(distribution, store, population, "episode/task")
    want = expected(store, population, "episode/task")
    assert sorted(distribution.left(population).tolist()) == sorted(want)
    assert len(want) < population.size


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(4, 1, pad=False), dr.Episodes()], ids=str)
@pytest.mark.parametrize("by", ["episode", "episode/task"])
def test_while_the_store_grows_and_loses_steps(by: str, view: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populations, "SMALL", 5)
    monkeypatch.setattr(module, "_FEW", 2)
    growth, distribution, compared = Growth(seed, view), dr.Stratified(by), 0
    for _ in range(120):
        growth.step()
        population, store = growth.population, growth.store
        if not population.size or not expected(store, population, by):
            continue
        check_chances(distribution, store, population, by)
        # What follows afresh, as after a load, draws the same.
        other = Population(view)
        other.restore(population.order())
        other.refresh(store.snapshot())
        fresh = dr.Stratified(by).draw(other, 50, np.random.default_rng(1)).ids
        assert distribution.draw(population, 50, np.random.default_rng(1)).ids.tolist() == fresh.tolist()
        compared += population.size
    assert compared > 500
    check_draws(distribution, growth.store, growth.population, by)


def test_a_mixture_holds_it_and_weighs_by_its_chances() -> None:
    store = grown(2, [[40, 3], [25, 10]])
    store.values = {f: i % 2 for i, (f, *_) in enumerate(store.log)}
    population, rng = population_of(store), np.random.default_rng(0)
    parts = [
        (dr.Stratified(), 1.0),
        (dr.Stratified("episode/task"), 2.0),
        (dr.Prioritized(alpha=1.0, beta=0.5, eps=0.01), 1.0),
    ]
    mixture, ids = dr.Mixture(parts), everything(population)
    errors = rng.exponential(1.0, len(ids))
    mixture.update(population, ids, errors)
    forms = [expected(store, population, by) for by in ("episode", "episode/task")]
    want = np.array([0.25 * forms[0][i] + 0.5 * forms[1][i] for i in ids.tolist()])
    want += 0.25 * (errors + 0.01) / (errors + 0.01).sum()
    np.testing.assert_allclose(mixture.chances(population, ids), want, rtol=1e-9)
    draw = mixture.draw(population, 500, rng)
    weights = (len(ids) * want[np.searchsorted(ids, draw.ids)]) ** -0.5
    np.testing.assert_allclose(mixture.weigh(draw, None), weights / weights.max(), rtol=1e-6)


@pytest.mark.parametrize("by", ["episode", "episode/task"])
def test_ranks_draw_their_own_ids_in_the_same_proportions(by: str) -> None:
    store = grown(2, [[30, 4, 9], [12, 40]])
    store.values = {f: i % 2 for i, (f, *_) in enumerate(store.log)}
    population = population_of(store)
    want = expected(store, population, by)
    for rank in range(2):
        population.share = Share(rank, 2)
        mine = np.array([i for i in want if Share(rank, 2).contains(np.array([i]))[0]])
        drawn = dr.Stratified(by).draw_share(population, 20_000, np.random.default_rng(rank)).ids
        ids, counts = np.unique(drawn, return_counts=True)
        chances = np.array([want[i] for i in ids.tolist()])
        assert ids.tolist() == sorted(mine.tolist())
        assert stats.chisquare(counts, 20_000 * chances / chances.sum()).pvalue > 1e-4


def test_without_a_value_there_is_nothing_to_draw() -> None:
    store = grown(1, [[20]], [10])
    population, distribution = population_of(store), dr.Stratified("episode/task")
    message = (
        "none of the 29 sampleable steps is of an ended episode with a value of episode/task; 1 is needed, append more"
    )
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        distribution.draw(population, 4, np.random.default_rng(0))
    add_episodes(store, 0, [[]], [10])
    store.end(0, 0)
    store.values[store.log[1][0]] = 3
    population.refresh(store.snapshot())
    check_chances(distribution, store, population, "episode/task")


@pytest.mark.parametrize("by", ["task", "", "episode/", "episodes", 3, None])
def test_a_bad_group_is_refused(by: Any) -> None:
    message = f'by must be "episode" or an episode field such as "episode/task", not {by!r}'
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Stratified(by)
