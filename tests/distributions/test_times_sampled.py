"""Each id is drawn at most so many times, and otherwise as ever."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of, lose_batch

DISTRIBUTIONS = {
    "uniform": dr.Uniform,
    "prioritized": dr.Prioritized,
    "independent": lambda: dr.Prioritized(stratified=False, normalize="store"),
    "recency": lambda: dr.Recency(40),
    "mixture": lambda: dr.Mixture([(dr.Uniform(), 0.5), (dr.Prioritized(), 0.3), (dr.Recency(9), 0.2)]),
}


def drain(sampler: dr.Sampler, size: int) -> Counter[int]:
    found: Counter[int] = Counter()
    while True:
        try:
            batch = sampler.sample(size)
        except dr.NotEnoughData:
            return found
        assert batch.batch_size == size
        assert batch.weight.max() <= 1
        found.update(batch.index.tolist())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_id_is_drawn_so_many_times_and_no_more_while_the_store_grows_and_loses_steps(
    grown: Any, name: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._FEW", 3)
    monkeypatch.setattr("diskreplay.kernels.runs._AT_ONCE", 7)
    store = grown([[30, 11], [9]], [4, 8])
    samplers = [
        store.sampler(DISTRIBUTIONS[name](), rank=rank, world_size=world_size, max_times_sampled=most)
        for most in (1, 3)
        for rank in range(world_size)
    ]
    every = [ids_of(sampler).tolist() for sampler in samplers]
    assert sorted(i for ids in every[:world_size] for i in ids) == ids_of(store.sampler()).tolist()
    found = [Counter[int]() for _ in samplers]
    for number, size in enumerate((5, 1, 4, 1, 3, 1)):
        for i, sampler in enumerate(samplers):
            found[i] += drain(sampler, size)
            rank = f" of rank {i % world_size} of {world_size}" if world_size > 1 else ""
            with pytest.raises(dr.NotEnoughData, match=f"^the [0-9]+ sampleable steps{rank} can"):
                sampler.sample(size)
            assert set(found[i].values()) <= set(range(2 if i < world_size else 4))
            if size == 1:
                most = 1 if i < world_size else 3
                with store.sampler(rank=i % world_size, world_size=world_size) as other:
                    assert {found[i][step] for step in other.ids().tolist()} == {most}
                assert len(sampler.ids()) == sampler.sampleable == 0
        if size == 1:
            if number > 1:
                store.hide(20)
            store.add(0, 8)
            store.add(1, 6, ends=False)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_the_same_as_without_a_limit_as_long_as_it_is_not_reached(grown: Any, name: str) -> None:
    store = grown([[30, 11], [9]])
    plain, limited = (store.sampler(DISTRIBUTIONS[name](), max_times_sampled=most) for most in (None, 1000))
    for _ in range(20):
        wanted, found = plain.sample(), limited.sample()
        for name in wanted:
            np.testing.assert_array_equal(found[name].numpy(), wanted[name].numpy())


@pytest.mark.parametrize("overdraws", [(1, 8, 64), (1,)], ids=["by rejection", "from a list"])
def test_what_is_left_keeps_its_probabilities(grown: Any, overdraws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._OVERDRAWS", overdraws)
    sampler = grown([[12]]).sampler(
        dr.Prioritized(alpha=1.0, eps=1e-9, stratified=False), batch_size=3000, max_times_sampled=3000
    )
    ids = ids_of(sampler)
    sampler.update_priorities(ids, np.arange(1.0, 13.0))
    want, state = chances(sampler), sampler.state_dict()
    state["planner"]["times"] = {'["transitions"]': {"ids": ids[6:], "counts": np.full(6, 3000)}}  # these were drawn
    sampler.load_state_dict(state)
    assert ids_of(sampler).tolist() == ids[:6].tolist()
    batch = sampler.sample()
    at = np.searchsorted(ids, batch.index.numpy())
    np.testing.assert_allclose(batch.probability.numpy(), want[at], rtol=1e-12)
    counts = np.bincount(at, minlength=6)
    assert stats.chisquare(counts, want[:6] / want[:6].sum() * 3000).pvalue > 1e-4


def times(sampler: dr.Sampler) -> dict[int, int]:
    """Return how often each id was delivered, by a saved state."""
    counts = sampler.state_dict()["planner"]["times"]['["transitions"]']
    return dict(zip(counts["ids"].tolist(), counts["counts"].tolist(), strict=True))


def test_counts_are_those_of_a_dictionary(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._FEW", 4)
    store, wanted = grown([[40]]), Counter[int]()
    sampler = store.sampler(batch_size=5, max_times_sampled=1000)
    for number in range(60):
        wanted.update(sampler.sample().index.tolist())
        assert times(sampler) == dict(wanted)
        if number % 20 == 10:
            state, sampler = sampler.state_dict(), store.sampler(batch_size=5, max_times_sampled=1000)
            sampler.load_state_dict(state)


@pytest.mark.usefixtures("threads_make_all")
def test_a_draw_that_is_not_delivered_does_not_count(grown: Any) -> None:
    store = grown([[20]])
    sampler = store.sampler(batch_size=8, prefetch=1, max_times_sampled=1)
    ids, first = ids_of(sampler).tolist(), sampler.sample().index.tolist()
    assert times(sampler) == dict.fromkeys(first, 1)
    with pytest.raises(dr.NotEnoughData, match="can be drawn only 4 times more"):
        sampler.sample(5)
    sampler.distribution = dr.Uniform()  # which drops the batch that was drawn ahead
    assert sampler.sampleable == 12
    lose_batch(sampler)
    assert sorted([*first, *sampler.sample(12).index.tolist()]) == ids
    assert sampler.sampleable == 0


def test_a_draw_that_was_interrupted_and_is_lost_does_not_count(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.distributions.restricted._OVERDRAWS", (1,))  # and then from a list of what is left
    sampler = grown([[20]]).sampler(batch_size=20, max_times_sampled=1)
    ids = ids_of(sampler)

    def interrupt() -> None:
        raise KeyboardInterrupt

    lose_batch(sampler, interrupt)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample()
    assert sampler.sampleable == 0  # the batch is the next one
    lose_batch(sampler)
    assert sorted(sampler.sample().index.tolist()) == ids.tolist()


def test_a_draw_that_is_lost_and_cannot_be_drawn_again_does_not_count(grown: Any) -> None:
    store = grown([[20]])
    sampler = store.sampler(batch_size=8, max_times_sampled=1)
    lose_batch(sampler, lambda: store.hide(15))
    with pytest.raises(dr.NotEnoughData, match="can be drawn only 5 times more"):
        sampler.sample()
    assert times(sampler) == {}
    assert sorted(sampler.sample(5).index.tolist()) == ids_of(store.sampler()).tolist()
    with pytest.raises(dr.NotEnoughData, match="cannot be drawn any more"):
        sampler.sample(1)


def test_what_is_left_is_told_when_it_is_too_little(grown: Any) -> None:
    sampler = grown([[10]]).sampler(max_times_sampled=2)
    sampler.sample(17)
    for size, found in ((4, "can be drawn only 3 times more in all"), (3, None), (1, "cannot be drawn any more")):
        if found is None:
            sampler.sample(size)
            continue
        message = (
            f"the 10 sampleable steps {found}, and {size} draws are needed: each step is drawn at most 2 times "
            "(max_times_sampled). Append more"
        )
        with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
            sampler.sample(size)


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
def test_a_damaged_state_is_refused(grown: Any, state: Any) -> None:
    sampler = grown([[10]]).sampler(max_times_sampled=2)
    damaged = sampler.state_dict()
    damaged["planner"]["times"] = state
    with pytest.raises(ValueError, match="^this is not a state of how often ids were sampled"):
        sampler.load_state_dict(damaged)
