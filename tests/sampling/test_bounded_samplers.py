"""Samplers with `max_size`: on stores that grow and evict, saved and loaded, among ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.sampling.test_sampler_states import VIEWS, check, collected


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize(
    ("remover", "distribution"),
    [
        ("oldest", "uniform"),
        ("oldest", "by task"),
        ("lowest_priority", "prioritized"),
        ("lowest_priority", "by the store"),
        ("random", "recency"),
        ("random", "prioritized"),
    ],
)
def test_a_saved_sampler_goes_on_as_if_nothing_had_happened(
    tmp_store: Path, remover: str, distribution: str, capacity: int | None
) -> None:
    limits: Any = {"max_size": 100, "remover": remover}
    check(tmp_store, "transitions", distribution, 0, every=1, capacity=capacity, **limits)


@pytest.mark.slow
@pytest.mark.parametrize("remover", ["oldest", "lowest_priority", "random"])
def test_batches_hold_only_what_the_index_holds(tmp_store: Path, remover: str) -> None:
    with collected(tmp_store, 60) as (store, collector):
        view, limits = dr.Transitions(), {"max_size": 50, "remover": remover}
        told = {"fields": ("probability", "population"), **limits}
        samplers = [
            dr.Sampler(store, view, dr.Prioritized(), batch_size=300, seed=0, rank=rank, world_size=2, **told)
            for rank in range(2)
        ]
        alone = dr.Sampler(store, view, dr.Prioritized(), batch_size=300, seed=0, **told)
        for number in range(10):
            collector.grow(3)
            assert alone.sampleable == 50
            batch = alone.sample()
            held = alone.ids().tolist()
            assert set(batch.index.tolist()) <= set(held)
            assert len(held) == 50
            assert set(batch.population.tolist()) == {50}
            chance = dict(zip(batch.index.tolist(), batch.probability.tolist(), strict=True))
            assert sum(chance.values()) <= 1 + 1e-9
            alone.update_priorities(batch.index, np.random.default_rng(number).exponential(1.0, 300))
            for sampler in samplers:
                assert set(sampler.sample().index.tolist()) <= set(sampler.ids().tolist())
        newest = dr.Sampler(store, view).ids()[-50:].tolist()
        assert (held == newest) == (remover == "oldest")
        if remover == "oldest":
            assert sorted(i for sampler in samplers for i in sampler.ids()) == sorted(newest)


def test_views_have_indices_of_their_own_which_stay(tmp_store: Path) -> None:
    with collected(tmp_store, 60) as (store, _):
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=64, seed=0, max_size=40, remover="random")
        sampler.sample()
        held = sampler.ids().tolist()
        sampler.view = VIEWS["sequences"]()
        sampler.sample()
        assert sampler.sampleable <= 40
        sampler.view, sampler.distribution = dr.Transitions(3), dr.Recency(50)
        sampler.sample()
        assert set(sampler.ids().tolist()) <= set(held)
        assert sampler.sampleable > 30


def test_steps_of_low_initial_priority_are_removed_for_new_ones(tmp_store: Path) -> None:
    schema = dr.Schema(obs=dr.Field((), "int64"), action=dr.Field((), "int64"))
    priorities = np.random.default_rng(0).permutation(60).astype(float).tolist()
    held: list[float] = []
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        limits: Any = {"max_size": 15, "remover": "lowest_priority"}
        sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=64, seed=0, **limits)
        for number, priority in enumerate(priorities):
            writer.append(number, number, 0.0, terminated=True, priority=priority)
            held.append(priority)
            if len(held) > 15:
                held.remove(min(held))  # which may be the new one
            if number % 7 == 0:  # some steps at a time
                assert {priorities[i] for i in sampler.sample().action.tolist()} <= set(held)
                assert sorted(priorities[int(i)] for i in sampler.gather(sampler.ids()).action) == sorted(held)
