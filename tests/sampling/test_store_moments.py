"""Moments as an algorithm: snapshots in any order, and parts that are merged. Of samplers: tests/sampling."""

import diskreplay as dr
from diskreplay.sampling.normalize import StoreMoments
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
