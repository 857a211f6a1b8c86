"""The probability of each item, N and the sum of priorities, on request: as of the draw, for every rank and update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.sampling.inner import Untold

SCHEMA = dr.Schema(obs=dr.Field((1,), "float32"), action=dr.Field((), "int64"), episode={"task": dr.Field((), "int64")})
FIELDS = ("action", "probability", "population", "priority_sum")
VIEWS = (dr.Transitions(n_step=2), dr.Sequences(6, 3), dr.Episodes())
ALPHA, EPS = 0.7, 0.01


def prioritized(**kwargs: Any) -> dr.Prioritized:
    return dr.Prioritized(alpha=ALPHA, beta=0.5, eps=EPS, **kwargs)


DISTRIBUTIONS: tuple[Callable[[], Any], ...] = (
    dr.Uniform, prioritized, lambda: prioritized(stratified=False, normalize="store"), lambda: dr.Recency(30),
    lambda: dr.Sweep(passes=None), lambda: dr.Mixture([(dr.Uniform(), 1), (prioritized(), 3)]),
    dr.Stratified, lambda: dr.Stratified(by="episode/task"),
)  # fmt: skip
RANKS: tuple[dict[str, int], ...] = ({}, {"rank": 1, "world_size": 3})


def append(store: dr.Store, lengths: list[int]) -> None:
    with store.writer() as writer:
        for length in lengths:
            obs = np.zeros((length + 1, 1), "f4")
            task = {"task": length % 3} if length != 12 else None
            writer.append_episode(obs, np.zeros(length, int), np.zeros(length, "f4"), terminated=True, episode=task)
    store.refresh()


@pytest.fixture
def store(tmp_store: Path) -> Any:
    with dr.create(tmp_store, SCHEMA) as store:
        append(store, [20, 31, 7, 12])
        yield store


def sampler_of(store: dr.Store, view: Any, distribution: Any, **kwargs: Any) -> dr.Sampler:
    return dr.Sampler(store, view, distribution, **{"batch_size": 50, "seed": 0, "fields": FIELDS, **kwargs})


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("make", DISTRIBUTIONS, ids=lambda make: repr(make()))
@pytest.mark.parametrize("rank", RANKS, ids=["alone", "a rank"])
def test_they_are_those_of_all_ids_that_can_be_drawn(store: dr.Store, view: Any, make: Any, rank: Any) -> None:
    compared, rng = 0, np.random.default_rng(0)
    with sampler_of(store, view, make(), **rank) as sampler:
        for lengths in ([], [9, 14], [3]):
            append(store, lengths)
            ids = sampler.ids()
            every = sampler.gather(ids)
            known = dict(zip(ids.tolist(), every.probability.tolist(), strict=True))
            assert sum(known.values()) == pytest.approx(1, abs=1e-12)
            batch = sampler.sample()
            probability = batch.probability.numpy()
            assert probability.dtype == np.float64
            np.testing.assert_allclose(probability, [known[i] for i in batch.index.tolist()], rtol=1e-12)
            assert set(batch.population.tolist()) == set(every.population.tolist()) == {len(ids)}
            total = set(batch.priority_sum.tolist())
            assert total == {sampler.stats()["priority_sum"]} or not isinstance(sampler.distribution, dr.Prioritized)
            assert sampler.stats()["population"] == len(ids)
            compared += len(probability)
            if sampler.distribution.weighted:
                sampler.update_priorities(batch.index, rng.standard_normal(len(probability)))
    assert compared == 150


@pytest.mark.parametrize("rank", RANKS, ids=["alone", "a rank"])
def test_of_priorities_they_are_the_formula(store: dr.Store, rank: Any) -> None:
    rng = np.random.default_rng(0)
    with sampler_of(store, dr.Transitions(), prioritized(), **rank) as sampler:
        td = {int(i): 1.0 - EPS for i in sampler.ids()}
        for _ in range(20):
            batch = sampler.sample()
            p = {i: (abs(error) + EPS) ** ALPHA for i, error in td.items()}
            assert batch.priority_sum.tolist() == pytest.approx([sum(p.values())] * 50, rel=1e-12)
            expected = [p[i] / sum(p.values()) for i in batch.index.tolist()]
            np.testing.assert_allclose(batch.probability.numpy(), expected, rtol=1e-12)
            weights = (len(td) * np.array(expected)) ** -0.5
            np.testing.assert_allclose(batch.weight.numpy(), weights / weights.max(), rtol=1e-6)
            # Errors of at most 1: new ids, and those of the first draws, have the largest priority so far.
            errors = rng.random(50)
            td |= zip(batch.index.tolist(), errors.tolist(), strict=True)
            sampler.update_priorities(batch.index, errors)


def test_frequencies_are_the_probabilities_of_a_rank(store: dr.Store) -> None:
    mixture = dr.Mixture([(dr.Uniform(), 1), (prioritized(), 2)])
    with sampler_of(store, dr.Transitions(), mixture, rank=0, world_size=2, batch_size=10_000) as sampler:
        ids = sampler.ids()
        sampler.update_priorities(ids, np.arange(len(ids)) ** 2.0)
        probability = sampler.gather(ids).probability.numpy()
        drawn = np.concatenate([sampler.sample().index.numpy() for _ in range(20)])
        counts = (drawn[:, None] == ids).sum(axis=0)
        spread = np.sqrt(len(drawn) * probability * (1 - probability))
        assert (abs(counts - len(drawn) * probability) < 5 * spread).all()


def test_weights_over_two_ranks_are_those_of_one_sampler(store: dr.Store) -> None:
    ranks = [
        sampler_of(store, dr.Transitions(), prioritized(), rank=rank, world_size=2, batch_size=20) for rank in range(2)
    ]
    alone = sampler_of(store, dr.Transitions(), prioritized())
    ids = alone.ids()
    errors = np.random.default_rng(0).standard_normal(len(ids))
    for sampler in (*ranks, alone):
        sampler.update_priorities(ids, errors)
    known = dict(zip(ids.tolist(), alone.gather(ids).probability.tolist(), strict=True))
    batches = [rank.sample().numpy() for rank in ranks]
    total = sum(batch["priority_sum"][0] for batch in batches)
    assert sum(batch["population"][0] for batch in batches) == len(ids)
    for batch in batches:
        chances = batch["probability"] * batch["priority_sum"] / total
        np.testing.assert_allclose(chances, [known[i] for i in batch["index"].tolist()], rtol=1e-12)
    # Where they are mixed, each item knows the N of its own sampler.
    mixed = dr.MixedSampler([(rank, 1) for rank in ranks], batch_size=20).sample()
    assert mixed.population.tolist() == [batch["population"][0] for batch in batches for _ in range(10)]


@pytest.mark.parametrize("make", DISTRIBUTIONS, ids=lambda make: repr(make()))
@pytest.mark.parametrize("rank", RANKS, ids=["alone", "a rank"])
def test_of_what_cannot_be_drawn_the_probability_is_0(store: dr.Store, make: Any, rank: Any) -> None:
    first = store.episodes[0].ids

    def is_other(episode: dr.Episode) -> bool:
        return int(episode.ids[0]) != first[0]

    with sampler_of(store, dr.Transitions(), make(), where=is_other, **rank) as sampler:
        assert sampler.gather(first).probability.tolist() == [0] * len(first)
        others = sampler.gather(sampler.ids()).probability
        assert others.sum() == pytest.approx(1)
        assert (others > 0).all()


def test_of_another_ranks_ids_the_probability_is_0(store: dr.Store) -> None:
    with sampler_of(store, dr.Transitions(), dr.Uniform(), rank=1, world_size=2) as sampler:
        mine = sampler.ids().tolist()
        ids = np.concatenate([episode.ids for episode in store.episodes])
        assert sampler.gather(ids).probability.tolist() == [1 / len(mine) if i in mine else 0 for i in ids.tolist()]


def test_ids_that_were_sampled_often_enough_do_not_change_them(store: dr.Store) -> None:
    with sampler_of(store, dr.Transitions(), prioritized(), max_times_sampled=1) as sampler:
        for _ in range(1):
            batch = sampler.sample()
            assert set(batch.probability.tolist()) == {1 / 70}
            assert set(batch.population.tolist()) == {70}
        assert sampler.sampleable == 20


@pytest.mark.usefixtures("threads_make_all")
def test_batches_that_are_refused_or_drawn_ahead_tell_what_was(store: dr.Store) -> None:
    with sampler_of(store, dr.Transitions(), prioritized(), prefetch=2) as sampler:
        first = sampler.sample()
        sampler.update_priorities(first.index, np.full(50, 9.0))
        append(store, [5])
        batches = [sampler.sample() for _ in range(3)]
        assert [set(batch.probability.tolist()) == {1 / 70} for batch in batches] == [True, True, False]
        assert [set(batch.population.tolist()) for batch in batches] == [{70}, {70}, {75}]
        state = sampler.state_dict()
        # A sampler that tells more than the one whose state it takes over tells of batches drawn ahead what is.
        with dr.Sampler(store, dr.Transitions(), prioritized(), batch_size=50, prefetch=2) as silent:
            silent.load_state_dict(state)
            quiet = silent.state_dict()
        with sampler_of(store, dr.Transitions(), prioritized(), prefetch=2) as other:
            other.load_state_dict(quiet)
            assert other.sample().index.equal(sampler.sample().index)
            assert other.sample().population.tolist() == [75] * 50


def test_a_distribution_that_does_not_tell_chances_is_refused(store: dr.Store) -> None:
    with pytest.raises(ValueError, match="fields names 'probability', and Uniform.. does not give"):
        sampler_of(store, dr.Transitions(), Untold())
    with sampler_of(store, dr.Transitions(), dr.Uniform()) as sampler:
        with pytest.raises(ValueError, match="does not give the probabilities of its ids"):
            sampler.distribution = Untold()
        assert type(sampler.distribution) is dr.Uniform
        assert np.isnan(sampler.sample().priority_sum.numpy()).all()
    with dr.Sampler(store, dr.Transitions(), Untold(), batch_size=4) as sampler:
        sampler.sample()
        with pytest.raises(ValueError, match="fields names 'probability', and Uniform.. does not give"):
            sampler.gather(fields=["probability"])


def test_gather_gives_the_fields_that_it_is_asked_for(store: dr.Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(2), dr.Prioritized(), batch_size=8, seed=0, fields=("obs",))
    batch = sampler.sample()
    sampler.update_priorities(batch.index[:4], [2.0, 3.0, 4.0, 5.0])
    full = dr.Sampler(store, dr.Transitions(2), batch_size=8, fields=("reward", "step")).gather(batch.index)
    found = sampler.gather(fields=("reward", "step", "probability", "priority_sum"))
    assert found.index.equal(batch.index)
    assert found.reward.equal(full.reward)
    assert found.step.equal(full.step)
    chances = dict(zip(found.index.tolist(), found.probability.tolist(), strict=True))
    assert len(set(chances.values())) > 1
    assert sampler.gather(sampler.ids(), ["probability"]).probability.sum().item() == pytest.approx(1)
    assert found.priority_sum.tolist() == [sampler.stats()["priority_sum"]] * 8
    assert set(sampler.sample()) == {"obs", "index", "weight"}
    with pytest.raises(ValueError, match="nothing"):
        sampler.gather(fields=["nothing"])
