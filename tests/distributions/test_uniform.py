"""Uniform draws are uniform, by themselves and shared among ranks."""

import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from tests.distributions.conftest import ids_of


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_the_ids_without_overlap_and_each_draws_its_own_equally_often(grown: Any, world_size: int) -> None:
    store, seen = grown([[10, 30], [25], [8, 8]]), []
    for rank in range(world_size):
        sampler = store.sampler(rank=rank, world_size=world_size, seed=rank, batch_size=20_000)
        ids, counts = np.unique(sampler.sample().index, return_counts=True)
        assert counts.sum() == 20_000
        assert ids.tolist() == ids_of(sampler).tolist()
        assert stats.chisquare(counts).pvalue > 0.001
        seen += ids.tolist()
    assert sorted(seen) == ids_of(store.sampler()).tolist()
    assert len(seen) == 81


@pytest.mark.parametrize("distribution", [dr.Uniform(), dr.Sweep(passes=None)], ids=str)
def test_a_rank_without_any_id_is_not_enough_data(grown: Any, distribution: Any) -> None:
    sampler = grown([[3]]).sampler(distribution, rank=5, world_size=6)
    message = "none of the 3 sampleable steps belongs to rank 5 of 6; 1 is needed, append more"
    with pytest.raises(dr.NotEnoughData, match=f"^{re.escape(message)}$"):
        sampler.sample(4)


def test_a_rank_with_one_id_of_many_gets_it(grown: Any) -> None:
    store = grown([[200]])
    for rank in range(2000):
        with store.sampler(rank=rank, world_size=2000) as sampler:
            if len(mine := sampler.ids().tolist()):
                assert set(sampler.sample(3).index.tolist()) <= set(mine)
                return
    raise AssertionError("no rank has an id")


def test_every_pair_of_a_batch_without_repetition_is_drawn_equally_often() -> None:
    with dr.ReplayBuffer(5, obs_shape=(1,), seed=1) as buffer:
        for number in range(5):
            buffer.add([number], number, 0.0, [number + 1], True)
        pairs = [tuple(sorted(buffer.sample(2).actions.flatten().tolist())) for _ in range(5_000)]
    found, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(found) == 10
    assert stats.chisquare(counts).pvalue > 0.001
