"""An index of at most so many ids: which it holds, and how they are drawn."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of


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
@pytest.mark.parametrize("view", [dr.Transitions(), dr.Sequences(4, 2)], ids=str)
@pytest.mark.parametrize("remover", ["oldest", "lowest_priority"])
@pytest.mark.parametrize("most", [1, 9, 25])
def test_it_holds_what_plain_lists_hold_while_the_store_grows(
    grown: Any, most: int, remover: str, view: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskreplay.distributions.population.SMALL", 5)
    rng, store, model, full = np.random.default_rng(most), grown([[]] * 2), Model(most, remover != "oldest"), 0
    every = store.sampler(view=view)

    def made() -> dr.Sampler:
        return store.sampler(dr.Prioritized(eps=0.01), view, max_size=most, remover=remover)

    sampler = made()
    for number in range(120):
        store.add(int(rng.integers(2)), int(rng.integers(1, 6)), ends=rng.random() < 0.4)
        if number > 30 and rng.random() < 0.4:
            store.hide(int(rng.integers(1, 12)))
        if not len(visible := ids_of(every)):
            continue
        held = ids_of(sampler).tolist()
        model.follow(visible.tolist())
        assert held == sorted(model.ids)
        full += len(held) == most
        some = rng.choice(visible, min(len(visible), 9), replace=False)
        errors = rng.exponential(1.0, len(some)).round(1)
        sampler.update_priorities(some, errors)
        model.update(some.tolist(), errors.tolist(), 0.01)
        if number % 40 == 20:
            state, sampler = sampler.state_dict(), made()
            sampler.load_state_dict(state)
    assert full > 5


DISTRIBUTIONS = {
    "uniform": dr.Uniform,
    "prioritized": lambda: dr.Prioritized(alpha=1.0, eps=0.1, stratified=False),
    "recency": lambda: dr.Recency(20),
    "stratified": dr.Stratified,
    "mixture": lambda: dr.Mixture([(dr.Uniform(), 0.5), (dr.Prioritized(), 0.3), (dr.Recency(9), 0.2)]),
}


# From a list, a rank's ids are drawn as if all parts of a mixture fell on the ranks alike.
CASES = [
    (name, rank, overdraws)
    for name in DISTRIBUTIONS
    for rank in ({}, {"rank": 1, "world_size": 2})
    for overdraws in ((1, 8, 64), (1,))
    if (name, bool(rank), overdraws) != ("mixture", True, (1,))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank", "overdraws"), CASES)
def test_what_it_holds_keeps_its_probabilities(
    grown: Any, name: str, rank: Any, overdraws: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._OVERDRAWS", overdraws)
    store = grown([[40], [25, 10]])
    plain = store.sampler(DISTRIBUTIONS[name](), **rank)
    sampler = store.sampler(DISTRIBUTIONS[name](), batch_size=500, max_size=30, remover="random", **rank)
    ids = ids_of(store.sampler())
    if plain.distribution.weighted:
        for one in (plain, sampler):
            one.update_priorities(ids, np.random.default_rng(0).exponential(1.0, len(ids)))
    held = ids_of(sampler)
    assert (len(held) < 30) == bool(rank)
    want = plain.gather(held).probability.numpy()
    want /= want.sum()
    np.testing.assert_allclose(chances(sampler), want)
    others = np.setdiff1d(ids, held)
    assert not sampler.gather(others).probability.any()
    batches = [sampler.sample() for _ in range(60)]
    drawn = np.concatenate([batch.index.numpy() for batch in batches])
    counts = np.bincount(np.searchsorted(held, drawn), minlength=len(held))
    assert np.isin(drawn, held).all()
    assert stats.chisquare(counts, want * counts.sum()).pvalue > 1e-4
    np.testing.assert_allclose(batches[0].probability.numpy(), want[np.searchsorted(held, batches[0].index.numpy())])


def test_each_id_that_it_holds_is_drawn_at_most_so_many_times(grown: Any) -> None:
    store = grown([[60]])
    sampler, found = store.sampler(max_size=20, max_times_sampled=3), Counter[int]()
    for _ in range(12):
        found.update(sampler.sample(5).index.tolist())
    assert found == dict.fromkeys(ids_of(store.sampler())[-20:].tolist(), 3)
    assert len(sampler.ids()) == 0
    with pytest.raises(dr.NotEnoughData, match="cannot be drawn any more"):
        sampler.sample(1)


def test_a_rank_of_which_it_holds_nothing_is_told(grown: Any) -> None:
    store = grown([[60]])
    samplers = [store.sampler(max_size=1, rank=rank, world_size=2) for rank in range(2)]
    (empty,) = [sampler for sampler in samplers if not len(sampler.ids())]
    message = "none of the 1 ids that the index holds (max_size) can be drawn of rank"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}"):
        empty.sample(4)


@pytest.mark.parametrize("remover", ["oldest", "lowest_priority", "random"])
def test_a_damaged_state_is_refused(grown: Any, remover: str) -> None:
    store = grown([[40]])
    sampler = store.sampler(dr.Prioritized(), max_size=5, remover=remover)
    sampler.sample()
    state = sampler.state_dict()
    indices = state["planner"]["indices"]["indices"]
    (kind, index), *_ = indices.items()
    for wrong in ({"ids": index["ids"].flip(0)}, {"size": -1}, {"came": index["came"][:2]}, {"count": None}):
        indices[kind] = {**index, **wrong}
        with pytest.raises(ValueError, match="this is not a state of an index: "):
            sampler.load_state_dict(state)
    indices[kind] = index
    with pytest.raises(ValueError, match="it holds 5 ids, and max_size is 4$"):
        store.sampler(dr.Prioritized(), max_size=4, remover=remover).load_state_dict(state)
