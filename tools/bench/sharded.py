"""Draw prioritized batches from 1 to 8 shards on Ray, and update their priorities."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench import reverb_peer
from tools.bench.data import SCHEMA, episodes, fill
from tools.bench.harness import (
    OURS,
    Contestant,
    Report,
    Table,
    Target,
    draw,
    in_turn,
    number,
    ratio_table,
    ratios,
    timed,
    timing_table,
)


class Size(NamedTuple):
    """Numbers of shards, steps of each, batches in a round, their size, and batches in one request."""

    shards: tuple[int, ...]
    steps: int
    batches: int
    batch_size: int = 256
    ahead: int = 8


FULL, TINY = Size((1, 2, 4, 8), 10_000, 100), Size((1, 2), 300, 3, 8, 2)

PLAIN = f"{OURS}, Sampler"
RLLIB = "RLlib PrioritizedReplayBuffer, {} actors"
TIMES_FASTER = 5.0
FIELDS = ("obs", "action", "reward", "next_obs", "discount", "weight")
IN_FLIGHT = 4  # requests to each actor of RLlib: 4 actors then have our largest number of batches ahead
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


@contextmanager
def started() -> Iterator[None]:
    """Start Ray on this machine, and end it."""
    import ray

    before = dict(os.environ)
    os.environ.update(SETTINGS)
    try:
        ray.init(
            "local", include_dashboard=False, num_cpus=1, object_store_memory=200 << 20,
            log_to_driver=False, logging_level="error",
        )  # fmt: skip
        yield
    finally:
        ray.shutdown()
        for name in SETTINGS:
            os.environ.pop(name, None)
        os.environ.update(before)


def _step(sampler: Any, errors: Any) -> None:
    """Draw a batch like a training step, and update its priorities."""
    sampler.update_priorities(draw(sampler.sample, FIELDS).index, errors)


def _sharded(paths: list[Path], size: Size, stack: ExitStack, direct: bool) -> Any:
    from diskreplay.interop.ray import ShardedSampler, ShardedStore

    store = stack.enter_context(ShardedStore(paths))
    own = {"batch_size": size.batch_size, "prefetch": size.ahead, "deadline_s": 60.0}
    name = f"bench-{len(paths)}-{'direct' if direct else 'far'}"
    sampler = ShardedSampler(store, dr.Transitions(), dr.Prioritized(), direct=direct, name=name, **own)
    return stack.enter_context(sampler)


class RLlibActors:
    """RLlib's prioritized buffer in actors with a shard each: batches come from one actor after the other."""

    def __init__(self, size: Size, count: int) -> None:
        import ray
        from ray.rllib.policy.sample_batch import SampleBatch
        from ray.rllib.utils.replay_buffers import PrioritizedReplayBuffer

        self._size = size
        make = ray.remote(PrioritizedReplayBuffer).options(num_cpus=0)
        kind = {"storage_unit": "timesteps", "alpha": 0.6}
        self._actors = [make.remote(capacity=size.steps, **kind) for _ in range(count)]
        rows = [
            SampleBatch(
                obs=one.obs[:-1], new_obs=one.obs[1:], actions=one.action, rewards=one.reward,
                terminateds=np.arange(len(one)) == len(one) - 1,
            )
            for one in episodes(size.steps, 10, 500)
        ]  # fmt: skip
        ray.get([actor.add.remote(batch) for actor in self._actors for batch in rows])
        asked = [(actor, self._ask(actor)) for _ in range(IN_FLIGHT) for actor in self._actors]
        self._asked = asked

    def _ask(self, actor: Any) -> Any:
        return actor.sample.remote(num_items=self._size.batch_size, beta=0.4)

    def step(self, errors: Any) -> None:
        """Take the oldest requested batch, update its priorities, and request the next."""
        import ray

        actor, ref = self._asked.pop(0)
        batch = ray.get(ref)
        for field in ("obs", "actions", "rewards", "new_obs", "weights"):
            batch[field]
        actor.update_priorities.remote(batch["batch_indexes"], errors)
        self._asked.append((actor, self._ask(actor)))


def _contestants(size: Size, folder: Path, stack: ExitStack, peers: bool) -> dict[str, tuple[Callable[..., None], Any]]:
    """Return the step function of each contestant, and its sampler if it is ours."""
    paths = [folder / f"shard{shard}" for shard in range(max(size.shards))]
    whole = folder / "whole"
    for path in paths:
        fill(path, size.steps, 10, 500)
    fill(whole, size.steps * len(paths), 10, 500)
    plain = stack.enter_context(dr.Sampler(whole, dr.Transitions(), dr.Prioritized(), batch_size=size.batch_size))
    found: dict[str, tuple[Callable[..., None], Any]] = {PLAIN: (partial(_step, plain), None)}
    for count in size.shards:
        sampler = _sharded(paths[:count], size, stack, direct=False)
        found[f"{OURS}, shards: {count}"] = partial(_step, sampler), sampler
    sampler = _sharded(paths[: size.shards[-2]], size, stack, direct=True)
    found[f"{OURS}, shards read directly: {size.shards[-2]}"] = partial(_step, sampler), sampler
    if peers:
        count = size.shards[-2]
        try:
            found[RLLIB.format(count)] = RLlibActors(size, count).step, None
        except ImportError:
            pass  # left out
    return found


def _costs(samplers: dict[str, Any]) -> Table:
    rows = []
    for name, sampler in samplers.items():
        stats = sampler.stats()
        batches = stats["batches"]
        cells = [stats["bytes"] / batches, stats["messages"] / batches, stats["seconds_waiting"] / batches * 1e6]
        rows.append([name, *map(number, cells), number(stats["oldest_update_s"] * 1e3), str(stats["updates_lost"])])
    header = ["per batch", "bytes from shards", "messages", "µs waiting", "oldest update, ms (of all)", "updates lost"]
    return Table(header, rows)


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from shards on this machine, from one store, and from RLlib's actors."""
    load = os.getloadavg()[0]
    errors = np.random.default_rng(0).random(size.batch_size)
    with started(), ExitStack() as stack:
        jobs = _contestants(size, folder, stack, peers)
        calls = [(errors,)] * size.batches
        contestants = [Contestant(name, partial(timed, step, calls)) for name, (step, _) in jobs.items()]
        if peers and reverb_peer.VARIABLE in os.environ:
            steps = size.steps * size.shards[-2]
            one_round = stack.enter_context(reverb_peer.rounds(steps, size.batches, size.batch_size, size.ahead))
            contestants.append(Contestant(reverb_peer.NAME, lambda: np.array(one_round())))
        seconds = in_turn(contestants, rounds)
        costs = _costs({name: sampler for name, (_, sampler) in jobs.items() if sampler is not None})
    ours = [name for name in jobs if name.startswith(OURS) and name != PLAIN]
    tables = [timing_table(seconds, f"one batch of {size.batch_size}, and its update"), costs]
    targets = []
    same = f"{OURS}, shards: {size.shards[-2]}"
    if reverb_peer.NAME in seconds:
        tables.append(ratio_table(seconds, [(name, reverb_peer.NAME) for name in (PLAIN, *ours)]))
    if (peer := RLLIB.format(size.shards[-2])) in seconds:
        tables.append(ratio_table(seconds, [(name, peer) for name in ours]))
        faster = float(np.median(ratios(seconds, same, peer)))
        targets.append(Target(f"{same}: faster than {peer}", faster, TIMES_FASTER, "times", at_least=True))
    lost = float(sum(int(row[-1]) for row in costs.rows))
    targets.append(Target("updates lost", lost, 0.0, "ids"))
    tables.append(ratio_table(seconds, [(PLAIN, name) for name in ours]))
    return Report(
        "Prioritized batches from shards on Ray",
        tables,
        targets,
        [
            f"Each shard is an actor with a store of {size.steps:,} steps of {SCHEMA.obs.shape[0]} floats, the plain "
            f"sampler has as many steps as the most shards together; {size.batches} batches in a round.",
            f"All of them, Ray and the trainer share the cores of this machine: {size.ahead} batches are asked for "
            "together, and what actors do meanwhile is taken from the trainer. On machines of their own it is not.",
            "Bytes are those of arrays in answers, of what was drawn and asked for ahead.",
            f"A batch of RLlib's is of one actor, of ours of all shards. {IN_FLIGHT} requests to each of its actors "
            "are on their way. Its rows were made before they were stored; ours are made as they are drawn.",
            f"Reverb has {size.shards[-2]} shards' steps in one table of a server, and draws in the server's process, "
            f"which is not this one; {size.ahead} batches are on their way. {reverb_peer.VARIABLE} names "
            "its interpreter, which has another NumPy.",
            "Peers that are not installed are left out.",
            f"The load when it began was {load:.0f} on {os.cpu_count()} cores, that of other programs included.",
        ],
    )
