"""A rank draws from its share by the probabilities of the whole, however little of them is its own."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import chances, ids_of

WORLD_SIZE = 3
# Each of them asks for some thousand ids at the most.
MOST_DRAWS = 80


def counted(distribution: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a distribution draw no more than so often; return the sizes of its draws."""
    draw, sizes = distribution.draw, []

    def counting(population: Any, size: int, rng: Any) -> Any:
        sizes.append(size)
        assert len(sizes) <= MOST_DRAWS, "it draws on and on"
        return draw(population, size, rng)

    monkeypatch.setattr(distribution, "draw", counting)
    return sizes


def of_ranks(ids: np.ndarray, store: Any) -> np.ndarray:
    """Return the rank of each id."""
    ranks = np.zeros(len(ids), np.int64)
    for rank in range(WORLD_SIZE):
        with store.sampler(rank=rank, world_size=WORLD_SIZE) as sampler:
            ranks[np.isin(ids, sampler.ids())] = rank
    return ranks


@pytest.fixture
def unlucky(grown: Any) -> Any:
    """A store of one lane whose newest 8 steps are of other ranks than 1."""
    store = grown([[]])
    for _ in range(300):
        store.add(0, 1, ends=False)
        with store.sampler() as sampler:
            ids = ids_of(sampler)
        if len(ids) > 30 and (of_ranks(ids[-8:], store) != 1).all():
            return store
    raise AssertionError("a rank has one of 8 ids wherever they begin")


@pytest.mark.parametrize("half_life", [0.5, 1.0, 2.0])
def test_a_rank_without_the_newest_ids_draws_by_recency_of_its_own(
    unlucky: Any, half_life: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = dr.Recency(half_life)
    sizes = counted(distribution, monkeypatch)
    sampler = unlucky.sampler(distribution, rank=1, world_size=WORLD_SIZE)
    with unlucky.sampler() as every:
        ids = ids_of(every)
    mine = np.flatnonzero(of_ranks(ids, unlucky) == 1)
    weight = 2.0 ** ((mine - len(ids)) / half_life)
    want = weight / weight.sum()
    drawn = np.concatenate([sampler.sample(500).index.numpy() for _ in range(2)])
    assert sum(sizes) < 500_000
    counts = np.bincount(np.searchsorted(ids[mine], drawn), minlength=len(mine))
    assert counts.sum() == 1000
    often = want * 1000 >= 5
    rare = [counts[~often].sum()], [want[~often].sum() * 1000]
    found, expected = np.append(counts[often], rare[0]), np.append(want[often] * 1000, rare[1])
    assert ids[mine][np.argmax(counts)] == ids[mine][-1]
    assert stats.chisquare(found, expected).pvalue > 0.001
    np.testing.assert_allclose(chances(sampler)[often], want[often], rtol=1e-6)


def test_a_rank_with_low_priorities_draws_by_its_own(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, distribution = grown([[40]]), dr.Prioritized(alpha=1.0, beta=1.0)
    sampler = store.sampler(distribution, rank=1, world_size=WORLD_SIZE)
    with store.sampler() as every:
        ids = ids_of(every)
    mine = ids[of_ranks(ids, store) == 1]
    errors = np.full(len(ids), 1e12)
    errors[np.isin(ids, mine)] = 1.0 + np.arange(len(mine)) % 3
    sampler.sample()
    sampler.update_priorities(ids, errors)
    counted(distribution, monkeypatch)
    batch = sampler.sample(6000)
    want = errors[np.isin(ids, mine)] / errors[np.isin(ids, mine)].sum()
    counts = np.bincount(np.searchsorted(mine, batch.index.numpy()), minlength=len(mine))
    assert stats.chisquare(counts, want * 6000).pvalue > 0.001
    probability = want[np.searchsorted(mine, batch.index.numpy())]
    np.testing.assert_allclose(batch.probability, probability, rtol=1e-3)  # eps
    np.testing.assert_allclose(batch.weight, probability.min() / probability, rtol=1e-3)


def test_a_rank_without_an_id_that_can_be_drawn_is_not_enough_data(grown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, distribution = grown([[]]), dr.Stratified("episode/task")
    store.add(0, 1, task=5)
    store.add(0, 30)
    with store.sampler() as every:
        rank = (of_ranks(ids_of(every)[:1], store)[0] + 1) % WORLD_SIZE
    counted(distribution, monkeypatch)
    sampler = store.sampler(distribution, rank=rank, world_size=WORLD_SIZE, fields=())
    message = (
        f"none of the steps that Stratified(by='episode/task') draws belongs to rank {rank} of 3; "
        "1 is needed, append more"
    )
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        sampler.sample()
