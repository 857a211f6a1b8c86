"""Moments as an algorithm: snapshots in any order, and parts that are merged. Of samplers: tests/sampling."""

import numpy as np
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.sampling.normalize import Moments, StoreMoments
from diskreplay.views.arguments import reward_leaves
from tests.sampling.test_moments import GAMMA, LEAVES, SCHEMA, WEIGHTS, Collector, collector, store

__all__ = ["collector", "store"]  # fixtures


def test_an_older_snapshot_has_nothing_new(store: dr.Store, collector: Collector) -> None:
    fields = {leaf: SCHEMA.leaves[leaf] for leaf in LEAVES}
    found = StoreMoments(fields, reward_leaves(SCHEMA, WEIGHTS), GAMMA)

    def follow(snapshot: object) -> None:
        found.follow(snapshot)
        collector.check(found.moments)

    collector.grow(30)
    store.refresh()
    older = store.snapshot
    collector.grow(90)
    store.refresh()
    assert len(store.snapshot.oldest) > len(older.oldest)
    found.follow(older)
    for snapshot in (store.snapshot, older, store.snapshot):
        follow(snapshot)
    collector.grow(9)
    store.refresh()
    follow(store.snapshot)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.integers(0, 2**32 - 1))
def test_merged_moments_are_those_of_all_values(sizes: list[int], shift: float, seed: int) -> None:
    parts = [np.random.default_rng(seed).normal(shift, 1.0, (size, 2)) for size in sizes]
    found = Moments.none((2,))
    for part in parts:
        found = found.merged(Moments.of(part))
    every = np.concatenate(parts)
    assert found.count == len(every)
    np.testing.assert_allclose(found.mean, every.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(found.var, every.var(0), rtol=1e-6, atol=1e-9)
