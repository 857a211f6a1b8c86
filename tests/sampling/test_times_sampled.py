"""Each id is drawn at most so many times, and otherwise as ever."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.kernels import runs
from diskreplay.sampling import restricted, times_sampled as module
from diskreplay.sampling.base import Distribution, Draw
from diskreplay.sampling.population import Share
from diskreplay.sampling.times_sampled import AtMost, Counts, TimesSampled
from tests.sampling.growing import add_episodes, everything, grown, population_of

DISTRIBUTIONS = {
    "uniform": dr.Uniform,
    "prioritized": dr.Prioritized,
    "independent": lambda: dr.Prioritized(stratified=False, normalize="store"),
    "recency": lambda: dr.Recency(40),
    "mixture": lambda: dr.Mixture([(dr.Uniform(), 0.5), (dr.Prioritized(), 0.3), (dr.Recency(9), 0.2)]),
}


def at_most(distribution: Distribution, most: int) -> AtMost:
    return AtMost(distribution, TimesSampled(most), ("transitions",))


def drain(limited: AtMost, population: Any, size: int, rng: Any, rank: int = 0, world_size: int = 1) -> Counter[int]:
    found: Counter[int] = Counter()
    population.share = Share(rank, world_size)
    while True:
        try:
            draw = limited.draw(population, size, rng)
        except dr.NotEnoughData:
            return found
        assert len(draw.ids) == size
        weights = limited.weigh(draw, None)
        assert weights is None or (len(weights) == size and weights.max() <= 1)
        limited.delivered(draw)
        found.update(draw.ids.tolist())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_id_is_drawn_so_many_times_and_no_more(name: str, most: int, world_size: int) -> None:
    store = grown(2, [[30, 11], [9]], [4, 8])
    population, rng = population_of(store), np.random.default_rng(0)
    for rank in range(world_size):
        limited = at_most(DISTRIBUTIONS[name](), most)
        for size in (7, 1):
            found = drain(limited, population, size, rng, rank, world_size)
            assert set(found.values()) <= set(range(most + 1))
        state = limited.state_dict()['["transitions"]']
        ids = everything(population)
        assert state["ids"].tolist() == ids[Share(rank, world_size).contains(ids)].tolist()
        assert set(state["counts"].tolist()) == {most}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_new_ids_can_be_drawn_and_what_is_left_of_old_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", 3)
    monkeypatch.setattr(runs, "_AT_ONCE", 7)
    store = grown(2, [[30], [9]], [4, 8])
    population, rng = population_of(store), np.random.default_rng(0)
    limited, found = at_most(DISTRIBUTIONS[name](), 2), Counter[int]()
    for size in (5, 1, 4, 1, 3, 1):
        found += drain(limited, population, size, rng)
        if size == 1:
            alive = everything(population).tolist()
            assert all(found[step] == 2 for step in alive)
            store.frontier = alive[len(alive) // 3]
            add_episodes(store, 0, [[6], []], [2, 2])
            population.refresh(store.snapshot())
            # What is listed at a cost of what is new is what a search of everything finds.
            limited.left(population)
            fresh = AtMost(limited._distribution, limited._times, ("transitions",))
            assert limited._left.tolist() == fresh.left(population).tolist()
            assert len(limited._left)
    assert set(found.values()) <= {1, 2}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_the_same_as_without_a_limit_as_long_as_it_is_not_reached(name: str) -> None:
    population = population_of(grown(2, [[30, 11], [9]]))
    plain, limited = DISTRIBUTIONS[name](), at_most(DISTRIBUTIONS[name](), 1000)
    one, other = (np.random.default_rng(1) for _ in range(2))
    for _ in range(20):
        wanted, found = plain.draw(population, 16, one), limited.draw(population, 16, other)
        assert found.ids.tolist() == wanted.ids.tolist()
        assert (found.chances is None) == (wanted.chances is None)
        np.testing.assert_array_equal(limited.weigh(found, 0.5), plain.weigh(wanted, 0.5))


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("overdraws", [(1, 8, 64), (1,)], ids=["by rejection", "from a list"])
def test_what_is_left_keeps_its_probabilities(overdraws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted, "_OVERDRAWS", overdraws)
    population, rng = population_of(grown(1, [[12]])), np.random.default_rng(0)
    ids, errors = everything(population), np.arange(1.0, 13.0)
    counts = np.zeros(12)
    for _ in range(4000):
        prioritized = dr.Prioritized(alpha=1.0, eps=1e-9, stratified=False)
        prioritized.update(population, ids, errors)
        limited = at_most(prioritized, 1)
        assert limited.accept(population, Draw(ids[6:]))  # these were drawn
        draw = limited.draw(population, 1, rng)
        counts += np.bincount(np.searchsorted(ids, draw.ids), minlength=12)
        np.testing.assert_allclose(draw.chances, prioritized.chances(population, draw.ids), rtol=1e-12)
    assert not counts[6:].any()
    assert stats.chisquare(counts[:6], errors[:6] / errors[:6].sum() * counts.sum()).pvalue > 1e-4


def test_a_draw_that_is_not_delivered_does_not_count() -> None:
    population, rng = population_of(grown(1, [[20]])), np.random.default_rng(0)
    limited = at_most(dr.Uniform(), 1)
    first, second = limited.draw(population, 8, rng), limited.draw(population, 8, rng)
    assert limited.state_dict()['["transitions"]']["ids"].tolist() == []
    limited.delivered(first)
    assert limited.state_dict()['["transitions"]']["ids"].tolist() == sorted(first.ids.tolist())
    with pytest.raises(dr.NotEnoughData):
        limited.draw(population, 5, rng)
    limited.forget(population, second)
    limited.forget(population, second)
    limited.forget(population, first)
    rest = limited.draw(population, 12, rng)
    assert sorted([*first.ids, *rest.ids]) == everything(population).tolist()
    again = limited.redraw(rest, population, 12, rng)
    assert sorted(again.ids) == sorted(rest.ids)


def test_what_is_left_is_told_when_it_is_too_little() -> None:
    population, rng = population_of(grown(1, [[10]])), np.random.default_rng(0)
    limited = at_most(dr.Uniform(), 2)
    limited.draw(population, 17, rng)
    for size, found in ((4, "can be drawn only 3 times more"), (3, None), (1, "cannot be drawn any more")):
        if found is None:
            limited.draw(population, size, rng)
            continue
        message = (
            f"the 10 sampleable steps {found}, {size} draws are needed: each is drawn at most 2 times "
            "(max_times_sampled), append more"
        )
        with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
            limited.draw(population, size, rng)


@pytest.mark.parametrize(
    "state",
    [
        3,
        {"x": {}},
        {"5": {"ids": [], "counts": []}},
        {'["transitions"]': {"ids": [1]}},
        {'["transitions"]': {"ids": [2, 1], "counts": [1, 1]}},
        {'["transitions"]': {"ids": [1, 2], "counts": [1, 0]}},
        {'["transitions"]': {"ids": [[1]], "counts": [[1]]}},
    ],
)
def test_a_damaged_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="^this is no state of how often ids were sampled: "):
        TimesSampled.loaded(2, state)


def test_counts_are_those_of_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", 4)
    population, rng = population_of(grown(1, [[40]])), np.random.default_rng(0)
    counts, wanted = Counts(), Counter[int]()
    ids = everything(population)
    for _ in range(60):
        some = rng.choice(ids, 5)
        counts.add(some, 1, population.visible)
        wanted.update(some.tolist())
        assert counts.of(ids).tolist() == [wanted[step] for step in ids.tolist()]
    loaded = Counts.loaded(counts.state_dict())
    assert loaded.of(ids).tolist() == counts.of(ids).tolist()
