"""Stores on many nodes as one: the paths and nodes of shards, and their actors on Ray."""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from diskreplay.interop.ray.shard import JoinNeeded, Shard
from diskreplay.interop.ray.shard_group import Lost, ShardGroup


class RayCalls:
    def wait(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        return list(ready)

    def answer(self, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, Exception) and not isinstance(cause, RayError | JoinNeeded):
                raise cause from None
            raise Lost(str(cause)) from None
        except GetTimeoutError:
            raise Lost(f"no answer in {timeout_s:g} s") from None
        except RayError as error:
            raise Lost(str(error).strip().split("\n")[0]) from None

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


NAMESPACE = "diskreplay"
# An actor takes this part of a node's Ray resource. The part is small, so that a node has room for many actors.
_SLICE = 0.001


class ShardActor(Shard):
    def __init__(self, path: str, save_s: float) -> None:
        super().__init__(path, save_s, ray.get_runtime_context().get_node_id())


def shard_actor(path: str, address: str, save_s: float) -> Any:
    """Return the actor of a store on a node; make it if it does not exist.

    The actor is pinned to the address of the node, not to its id, since a machine gets a new id after a restart. When
    the actor dies, Ray restarts it as soon as a node has this address. The actor ends when the process that made the
    actor ends.
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
    if not ray.is_initialized():
        ray.init()


def addresses(alive: bool = True) -> list[str]:
    """Return the sorted addresses of the living nodes, or of all nodes if ``alive`` is False."""
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] or not alive})


def own_address() -> str:
    return str(ray.util.get_node_ip_address())


_MOST_SHARDS = 1 << 16

PathLike = str | os.PathLike[str]


class ShardedStore(ShardGroup):
    """The stores of many nodes: collectors write to the store of their node, and trainers draw from all stores.

    A shard is an actor of Ray. It runs on the node of a store and opens this store. Processes of the cluster share an
    actor if they give the same path and node. Collectors use `dr.open(path, "a")` on their node as always, and need
    neither Ray nor this class. The stores must exist, and their schemas must be equal.

    `ray.init` is called if this process is not connected to Ray. A ShardedStore can be pickled; the copy has the same
    shards.

    Parameters
    ----------
    path : path or sequence of paths
        One path: each node has a store at this path. Several paths: the store at ``path[i]`` is on the node
        ``nodes[i]``.
    nodes : sequence of str or None
        Addresses of nodes, as "NodeManagerAddress" in `ray.nodes()` shows them. None: all living nodes for one path,
        and this process' node for several paths.
    save_s : float
        Seconds between saves of updated priorities in the store of each shard. A shard that dies resumes with the last
        saved priorities.

    Raises
    ------
    ValueError
        A node does not exist, a node is given twice with the same path, or there are not as many nodes as paths.
    """

    def __init__(
        self, path: PathLike | Sequence[PathLike], nodes: Sequence[str] | None = None, *, save_s: float = 10.0
    ) -> None:
        if not save_s > 0:
            raise ValueError(f"save_s must be a number of seconds above 0, not {save_s!r}")
        if isinstance(nodes, str) or (nodes is not None and not all(isinstance(node, str) for node in nodes)):
            raise ValueError(f"nodes must be a sequence of addresses of nodes, not {nodes!r}")
        start_ray()
        self._save_s = float(save_s)
        places, known = _places(path, nodes), addresses(alive=False)
        if unknown := {address for _, address in places}.difference(known):
            raise ValueError(f"there is no node {min(unknown)!r}: the nodes have the addresses {', '.join(known)}")
        super().__init__(places, RayCalls())

    def make_actor(self, shard: int) -> Any:
        """Return the actor of a shard; make it if it does not exist."""
        path, address = self._places[shard]
        return shard_actor(path, address, self._save_s)

    def __reduce__(self) -> tuple[Any, ...]:
        paths, nodes = zip(*self._places, strict=True)
        return _rebuilt, (list(paths), list(nodes), self._save_s)


def _rebuilt(paths: list[str], nodes: list[str], save_s: float) -> ShardedStore:
    return ShardedStore(paths, nodes, save_s=save_s)


def _places(path: Any, nodes: Sequence[str] | None) -> list[tuple[str, str]]:
    if isinstance(path, str | os.PathLike):
        nodes = addresses() if nodes is None else list(nodes)
        paths = [path] * len(nodes)
    elif isinstance(path, Sequence) and all(isinstance(one, str | os.PathLike) for one in path):
        paths = list(path)
        nodes = [own_address()] * len(paths) if nodes is None else list(nodes)
    else:
        raise ValueError(f"path must be a path or a sequence of paths, not {path!r}")
    if len(paths) != len(nodes):
        raise ValueError(f"{len(paths)} paths need the same number of nodes, not {len(nodes)}")
    if not 0 < len(paths) <= _MOST_SHARDS:
        raise ValueError(f"there must be 1 to {_MOST_SHARDS} shards, not {len(paths)}")
    found = [(os.path.abspath(one), node) for one, node in zip(paths, nodes, strict=True)]
    if len(set(found)) < len(found):
        twice = next(place for place in found if found.count(place) > 1)
        raise ValueError(f"{twice[0]} on node {twice[1]} is named twice")
    return found
