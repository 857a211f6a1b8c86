"""An index of at most so many ids: which it holds, and how they are drawn."""

import re
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.sampling import population as populations, restricted
from diskreplay.sampling.bounded import REMOVERS, Bounded, Index
from diskreplay.sampling.population import Population, Share
from diskreplay.sampling.times_sampled import AtMost, TimesSampled
from tests.sampling.growing import FakeStore, Growth, add_episodes, everything, grown, population_of


def index_of(most: int, remover: str, seed: int = 0) -> Index:
    return Index(most, remover, np.random.default_rng(seed))


class Model:
    """An index in plain lists, one id after the other."""

    def __init__(self, most: int, by_priority: bool) -> None:
        self.most, self.by_priority = most, by_priority
        self.ids: list[int] = []
        self.seen: set[int] = set()
        self.priority: dict[int, float] = {}
        self.given: set[int] = set()

    def follow(self, visible: list[int]) -> None:
        self.ids = [i for i in self.ids if i in set(visible)]
        largest = max((self.priority[i] for i in self.given.intersection(visible)), default=1.0)
        for new in sorted(set(visible) - self.seen):
            self.priority[new] = largest
            self.ids.append(new)
            if len(self.ids) > self.most:
                self.ids.remove(min(self.ids, key=self.priority.__getitem__) if self.by_priority else self.ids[0])
        self.seen |= set(visible)

    def update(self, ids: list[int], errors: list[float], eps: float) -> None:
        for i, error in zip(ids, errors, strict=True):
            self.priority[i] = abs(error) + eps
            self.given.add(i)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(4, 2)], ids=str)
@pytest.mark.parametrize("remover", ["oldest", "lowest_priority"])
@pytest.mark.parametrize("most", [1, 9, 25])
def test_it_holds_what_plain_lists_hold_while_the_store_grows(
    most: int, remover: str, view: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populations, "SMALL", 5)
    growth, distribution = Growth(seed, view), dr.Prioritized(eps=0.01)
    index, model, rng, full = index_of(most, remover), Model(most, remover != "oldest"), np.random.default_rng(seed), 0
    for number in range(120):
        growth.step()
        population = growth.population
        if not population.size:
            continue
        visible = everything(population)
        index.follow(population, distribution)
        model.follow(visible.tolist())
        assert index.ids.tolist() == sorted(model.ids)
        full += len(index.ids) == most
        some, errors = rng.choice(visible, min(len(visible), 9), replace=False), rng.exponential(1.0, 9)
        errors = errors[: len(some)].round(1)
        distribution.update(population, some, errors)
        model.update(some.tolist(), errors.tolist(), 0.01)
        if number % 40 == 20:
            state = index.state_dict()
            index = Index.loaded(most, remover, np.random.default_rng(0), state)
    assert full > 5


def test_the_lowest_priority_may_be_that_of_the_id_that_comes() -> None:
    class ByNumber(dr.Prioritized):
        """Ids have the priorities that their steps were appended with: each less than the one before."""

        def priorities(self, population: Population, ids: np.ndarray) -> np.ndarray:
            return 1.0 / (1.0 + ids)

    store = grown(1, [[5]])
    index, population = index_of(5, "lowest_priority"), population_of(store)
    index.follow(population, ByNumber())
    held = index.ids.tolist()
    for _ in range(3):
        add_episodes(store, 0, [[1]], [0])
        population.refresh(store.snapshot())
        index.follow(population, ByNumber())
        assert index.ids.tolist() == held


# --- the reservoir ---------------------------------------------------------------------------------------------------


def snapshots(store: FakeStore, steps: list[int], frontiers: list[int]) -> list[Any]:
    """A lane with one open episode that grows to these steps; what is below a frontier is hidden."""
    found = []
    for more, frontier in zip(steps, frontiers, strict=True):
        add_episodes(store, 0, [[]], [more])
        store.frontier = frontier
        found.append(store.snapshot())
    return found


def reservoir(coming: list[Any], most: int, seed: int) -> Index:
    population, index = Population(dr.Transitions()), index_of(most, "random", seed)
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


# --- draws -----------------------------------------------------------------------------------------------------------

DISTRIBUTIONS = {
    "uniform": dr.Uniform,
    "prioritized": lambda: dr.Prioritized(alpha=1.0, eps=0.1, stratified=False),
    "recency": lambda: dr.Recency(20),
    "stratified": dr.Stratified,
    "mixture": lambda: dr.Mixture([(dr.Uniform(), 0.5), (dr.Prioritized(), 0.3), (dr.Recency(9), 0.2)]),
}


# From a list, a rank's ids are drawn as if all parts of a mixture fell on the ranks alike.
CASES = [
    (name, share, overdraws)
    for name in DISTRIBUTIONS
    for share in (Share(), Share(1, 2))
    for overdraws in ((1, 8, 64), (1,))
    if (name, share.world_size, overdraws) != ("mixture", 2, (1,))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share", "overdraws"), CASES)
def test_what_it_holds_keeps_its_probabilities(
    name: str, share: Share, overdraws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restricted, "_OVERDRAWS", overdraws)
    population, distribution = population_of(grown(2, [[40], [25, 10]])), DISTRIBUTIONS[name]()
    ids, rng = everything(population), np.random.default_rng(0)
    if distribution.weighted:
        distribution.update(population, ids, rng.exponential(1.0, len(ids)))
    population.share = share
    bounded = Bounded(distribution, index_of(30, "random"))
    draws = [bounded.draw(population, 500, rng) for _ in range(60)]
    held = bounded._index.ids
    mine = held[share.contains(held)]
    assert bounded.left(population).tolist() == mine.tolist()
    want = distribution.share_chances(population, mine)
    counts = np.bincount(np.searchsorted(mine, np.concatenate([d.ids for d in draws])), minlength=len(mine))
    assert stats.chisquare(counts, want / want.sum() * counts.sum()).pvalue > 1e-4
    np.testing.assert_allclose(bounded.share_chances(population, mine), want / want.sum())
    everyone = distribution.chances(population, held).sum()
    np.testing.assert_allclose(bounded.chances(population, ids), np.where(
        np.isin(ids, held), distribution.chances(population, ids) / everyone, 0.0))  # fmt: skip
    assert draws[0].size == 30
    if distribution.weighted:
        chance = distribution.chances(population, draws[0].ids)
        np.testing.assert_allclose(draws[0].chances, chance)
        assert len(bounded.weigh(draws[0], 0.5)) == 500


def test_each_id_that_it_holds_is_drawn_at_most_so_many_times() -> None:
    population, rng = population_of(grown(1, [[60]])), np.random.default_rng(0)
    bounded = Bounded(dr.Uniform(), index_of(20, "oldest"))
    limited, found = AtMost(bounded, TimesSampled(3), ("transitions",)), Counter[int]()
    for _ in range(12):
        found.update(limited.draw(population, 5, rng).ids.tolist())
    assert found == dict.fromkeys(everything(population)[-20:].tolist(), 3)
    assert len(limited.left(population)) == 0
    with pytest.raises(dr.NotEnoughData, match="cannot be drawn any more"):
        limited.draw(population, 1, rng)


def test_a_rank_of_which_it_holds_nothing_is_told() -> None:
    population = population_of(grown(1, [[60]]))
    bounded = Bounded(dr.Uniform(), index_of(1, "oldest"))
    bounded.draw(population, 1, np.random.default_rng(0))
    population.share = Share(1 - int(Share(1, 2).contains(bounded._index.ids)[0]), 2)
    message = "none of the 1 ids that the index holds (max_size) can be drawn of rank"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}"):
        bounded.draw(population, 4, np.random.default_rng(0))


@pytest.mark.parametrize("remover", REMOVERS)
def test_a_damaged_state_is_refused(remover: str) -> None:
    population, index = population_of(grown(1, [[40]])), index_of(5, remover)
    index.follow(population, dr.Prioritized())
    state, rng = index.state_dict(), np.random.default_rng(0)
    for wrong in ({"ids": state["ids"][::-1]}, {"size": -1}, {"came": state["came"][:2]}, {"count": None}):
        with pytest.raises(ValueError, match="^this is no state of an index: "):
            Index.loaded(5, remover, rng, {**state, **wrong})
    with pytest.raises(ValueError, match="it holds 5 ids, and max_size is 4$"):
        Index.loaded(4, remover, rng, state)
