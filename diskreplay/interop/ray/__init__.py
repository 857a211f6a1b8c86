"""One replay over the stores of many machines, on Ray.

A shard is a Ray actor that opens the store of one machine. A `ShardedSampler` draws batches from all shards.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import diskreplay as dr

if TYPE_CHECKING:
    from diskreplay.interop.ray.sharded_sampler import ShardedSampler as ShardedSampler
    from diskreplay.interop.ray.sharded_store import ShardedStore as ShardedStore

__all__ = ["ShardedSampler", "ShardedStore"]

_MODULES = {
    "ShardedSampler": "diskreplay.interop.ray.sharded_sampler",
    "ShardedStore": "diskreplay.interop.ray.sharded_store",
}


def __getattr__(name: str) -> Any:
    # Import these modules only when they are used: the other modules of this package work without Ray.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with dr.MissingExtra.raised_for("a store over many machines", "ray"):
        import_module("ray")
        return getattr(import_module(_MODULES[name]), name)
