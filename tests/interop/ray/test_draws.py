"""Draws over four shards against the closed form, while they grow, lose steps, die and come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

import diskreplay as dr
from tests.interop.ray.in_process import InProcess, ShardedSampler, append, make_stores

pytestmark = pytest.mark.slow

STEPS = (60, 20, 150, 7)
ALPHA, BETA, EPS = 0.7, 0.5, 1e-6
NODES = {"read by its actor": "another node", "read directly": "this node"}


@pytest.fixture(params=NODES.values(), ids=NODES.keys())
def shards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InProcess]:
    with InProcess(make_stores(tmp_path, STEPS), node=request.param) as group:
        yield group


def made(shards: InProcess, distribution: Any = None, **arguments: Any) -> ShardedSampler:
    return ShardedSampler(shards, dr.Transitions(), distribution, batch_size=64, seed=3, **arguments)


def drawn(sampler: ShardedSampler, batches: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of so many batches, and all ids that could be drawn."""
    index = np.concatenate([sampler.sample().index.numpy() for _ in range(batches)])
    return index, sampler.ids()


def pvalue(index: np.ndarray, ids: np.ndarray, p: np.ndarray) -> float:
    """Return how likely draws are so far from those of probabilities; 0 where something else was drawn."""
    assert {*map(tuple, index)} <= {*map(tuple, ids)}
    place = {tuple(one): at for at, one in enumerate(ids)}
    counts = np.bincount([place[tuple(one)] for one in index], minlength=len(ids))
    return float(chisquare(counts, len(index) * p / p.sum()).pvalue)


def test_uniform_draws_give_every_id_of_all_shards_the_same_probability(shards: InProcess) -> None:
    with made(shards) as sampler:
        assert sampler.sampleable == sum(STEPS)
        index, ids = drawn(sampler)
        assert len(ids) == sum(STEPS)
        assert pvalue(index, ids, np.ones(len(ids))) > 1e-3


def set_priorities(sampler: ShardedSampler, seed: int = 0) -> np.ndarray:
    """Give every id an error; return the p of each, in the order of the ids."""
    ids = sampler.ids()
    errors = np.random.default_rng(seed).gamma(1.0, 2.0, len(ids))
    sampler.update_priorities(ids, errors)
    sampler.sampleable  # noqa: B018  # which sends them, and asks for the masses
    return (errors + EPS) ** ALPHA


def test_prioritized_draws_and_weights_are_those_of_one_store(shards: InProcess) -> None:
    with made(shards, dr.Prioritized(ALPHA, BETA, EPS), fields=("reward", "probability", "population")) as sampler:
        p = set_priorities(sampler)
        index, ids = drawn(sampler)
        assert pvalue(index, ids, p) > 1e-3
        assert sampler.stats()["priority_sum"] == pytest.approx(p.sum())
        batch = sampler.sample()
        place = {tuple(one): at for at, one in enumerate(ids)}
        own = p[[place[tuple(one)] for one in batch.index.numpy()]]
        np.testing.assert_allclose(batch.probability.numpy(), own / p.sum(), rtol=1e-9)
        weights = (len(p) * own / p.sum()) ** -BETA
        np.testing.assert_allclose(batch.weight.numpy(), weights / weights.max(), rtol=1e-6)
        assert set(batch.population.tolist()) == {len(p)}


def test_draws_follow_shards_that_grow_and_lose_steps(shards: InProcess) -> None:
    paths = [Path(path) for path, _ in shards.places]
    with made(shards) as sampler:
        drawn(sampler, 2)
        append(paths[1], 1, 90)
        append(paths[3], 3, 30)
        with dr.open(paths[2], "a") as store:
            assert store.evict(lambda episode: True) == 150
        append(paths[2], 2, 25)
        assert sampler.sampleable == 60 + 20 + 90 + 25 + 7 + 30
        index, ids = drawn(sampler)
        assert len(ids) == 232
        assert pvalue(index, ids, np.ones(len(ids))) > 1e-3


def test_prioritized_draws_follow_shards_that_grow_and_lose_steps(shards: InProcess) -> None:
    paths = [Path(path) for path, _ in shards.places]
    with made(shards, dr.Prioritized(ALPHA, BETA, EPS)) as sampler:
        set_priorities(sampler)
        append(paths[0], 0, 40)
        with dr.open(paths[2], "a") as store:
            store.evict(lambda episode: True)
        append(paths[2], 2, 33)
        sampler.sampleable  # noqa: B018
        p = set_priorities(sampler, 1)
        index, ids = drawn(sampler)
        assert len(ids) == 60 + 20 + 7 + 40 + 33
        assert pvalue(index, ids, p) > 1e-3


def test_weights_are_exact_though_the_masses_are_old(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (30, 30))) as shards:
        fields = ("probability",)
        with made(shards, dr.Prioritized(ALPHA, 1.0, EPS), fields=fields, deadline_s=10.0) as sampler:
            p = set_priorities(sampler)
            before = [link.mass for link in sampler._links]
            with ShardedSampler(shards, dr.Transitions(), dr.Prioritized(ALPHA, 1.0, EPS), fields=fields) as other:
                ids = other.ids()[:30]
                other.update_priorities(ids, np.full(30, 50.0))
                other.sampleable  # noqa: B018
            for link in sampler._links:
                link.heard = np.inf  # it does not ask again before it draws
            batch = sampler.sample()
            p[:30] = (50.0 + EPS) ** ALPHA
            place = {tuple(one): at for at, one in enumerate(sampler.ids())}
            at = np.array([place[tuple(one)] for one in batch.index.numpy()])
            shard = batch.index[:, 0].numpy()
            sums = np.array([p[:30].sum(), p[30:].sum()])
            expected = np.array(before)[shard] / sum(before) * p[at] / sums[shard]
            np.testing.assert_allclose(batch.probability.numpy(), expected, rtol=1e-9)
            np.testing.assert_allclose(batch.weight.numpy(), expected.min() / expected, rtol=1e-6)


def test_without_a_shard_that_died_the_others_are_drawn_from_and_it_comes_back_with_its_priorities(
    shards: InProcess,
) -> None:
    with made(shards, dr.Prioritized(ALPHA, BETA, EPS)) as sampler:
        p = set_priorities(sampler)
        shards.handles[0].shard._saver.save()  # type: ignore[union-attr]
        shards.kill(0)
        shards.down.add(0)
        index = np.concatenate([sampler.sample().index.numpy() for _ in range(60)])
        assert sampler.stats()["missing"] == [0]
        ids = sampler.ids()
        assert set(ids[:, 0]) == {1, 2, 3}
        assert pvalue(index, ids, p[60:]) > 1e-6
        shards.answer_again(0)
        wait_for_all(sampler)
        assert sampler.sampleable == sum(STEPS)
        index, ids = drawn(sampler)
        assert pvalue(index, ids, p) > 1e-6


def wait_for_all(sampler: ShardedSampler) -> None:
    for link in sampler._links:
        link._next_attempt = 0.0
    while sampler.stats()["missing"]:
        sampler.sample()


def test_a_shard_that_dies_before_its_priorities_are_saved_begins_with_the_largest(tmp_path: Path) -> None:
    with InProcess(make_stores(tmp_path, (10, 10))) as shards, made(shards, dr.Prioritized(1.0, 0.0)) as sampler:
        sampler.update_priorities(sampler.ids(), np.full(20, 3.0))
        assert sampler.sampleable == 20
        assert sampler.stats()["priority_sum"] == pytest.approx(60.0, rel=1e-5)
        shards.kill(0)
        sampler.sample()
        wait_for_all(sampler)
        assert sampler.sampleable == 20
        assert sampler.stats()["priority_sum"] == pytest.approx(30.0 + 10.0, rel=1e-5)  # 1 before any update


def test_another_run_begins_with_priorities_of_its_own(tmp_path: Path) -> None:
    paths = make_stores(tmp_path, (10,))
    for _ in range(2):
        with InProcess(paths) as shards, made(shards, dr.Prioritized(1.0, 0.0)) as sampler:
            assert sampler.stats()["priority_sum"] == pytest.approx(10.0)
            sampler.update_priorities(sampler.ids(), np.full(10, 3.0))
