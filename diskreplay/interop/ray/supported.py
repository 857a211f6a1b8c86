"""The views and distributions that a `ShardedSampler` supports, and the reasons why it refuses others."""

from typing import Any

import diskreplay as dr
from diskreplay.interop.ray.messages import TOLD

_VIEWS = {
    dr.Rollouts: "each lane gives its steps once, in order, to one trainer: read each node's store by a Sampler",
    dr.Episodes: "a batch is as long as its longest episode, and a shard has only its own part: draw dr.Sequences",
}
_DISTRIBUTIONS = {
    dr.Recency: "an age counts the newer steps of all shards, and a shard has only its own steps",
    dr.Sweep: "a sweep counts the ids of one trainer, and after a shard's restart ids would come twice: "
    "sweep each shard's store by a Sampler on its node",
    dr.Stratified: "groups have equal shares over all shards, and a shard has only its own groups",
    dr.Mixture: "a shard has one mass, and a mixture draws by several: use one ShardedSampler for each, and dr.Mixture "
    "in one store",
}


def _check_view(view: Any) -> None:
    for kind, reason in _VIEWS.items():
        if isinstance(view, kind):
            raise ValueError(f"{view} cannot be drawn from shards: {reason}")
    if not isinstance(view, dr.Transitions | dr.Sequences):
        raise ValueError(f"view must be Transitions(...) or Sequences(...), not {view!r}")


def check_together(view: Any, distribution: Any) -> None:
    _check_view(view)
    _check_distribution(distribution)
    if view.random and distribution.weighted:
        raise ValueError(
            f"{view} cannot be drawn by priorities from shards: goals are drawn where items are gathered, which may be "
            "the trainer's node: draw with dr.Uniform()"
        )


def _check_distribution(distribution: Any) -> None:
    for kind, reason in _DISTRIBUTIONS.items():
        if isinstance(distribution, kind):
            raise ValueError(f"{distribution} cannot draw from shards: {reason}")
    if type(distribution) not in (dr.Uniform, dr.Prioritized):
        raise ValueError(
            f"distribution must be Uniform() or Prioritized(), not {distribution!r}: "
            "no shard can compute its mass for other distributions"
        )
    if isinstance(distribution, dr.Prioritized) and distribution.normalize != "batch":
        raise ValueError(
            f'normalize={distribution.normalize!r} needs the largest weight of all shards: use normalize="batch"'
        )


def check_schema(schema: dr.Schema) -> None:
    if taken := sorted(set(TOLD).intersection(schema.extra)):
        raise ValueError(f"the store has a field {taken[0]!r}, which shards use for their draws: rename it")
