"""A shard as an actor of Ray: where it runs, and how everybody finds the same one."""

from typing import Any

import ray

from diskreplay.interop.ray.shard import Shard

NAMESPACE = "diskreplay"
_SLICE = 0.001  # of the resource that each node has once, for as many actors as may be wanted


class ShardActor(Shard):
    """A shard that knows its node."""

    def __init__(self, path: str, save_s: float) -> None:
        super().__init__(path, save_s, ray.get_runtime_context().get_node_id())


def shard_actor(path: str, address: str, save_s: float) -> Any:
    """Return the actor of a store on a node, which is made unless there is one.

    It is pinned to the address of the node, not to its id: a machine that comes back has another id. Ray restarts it
    as often as it dies, as soon as there is a node of this address. It ends with the process that made it.
    """
    made = ray.remote(ShardActor).options(
        name=f"shard {address} {path}",
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        resources={f"node:{address}": _SLICE},
        max_restarts=-1,
        max_task_retries=0,
    )
    return made.remote(path, save_s)


def start_ray() -> None:
    """Connect to Ray, or start it here, unless that was done."""
    if not ray.is_initialized():
        ray.init()


def addresses(alive: bool = True) -> list[str]:
    """Return the addresses of the nodes, in order: of the living ones, or of all that there ever were."""
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] or not alive})


def own_address() -> str:
    """Return the address of the node that this process runs on."""
    return str(ray.util.get_node_ip_address())
