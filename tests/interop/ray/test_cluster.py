"""Shards on a cluster of Ray: four raylets on this machine, of which one is killed and comes back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import diskreplay as dr
from tests.interop.ray.in_process import SCHEMA, make_stores

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.leaks("the cluster of the module lives on between its tests"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of files of logs, which Ray leaves to the collector
]

ROOT = Path(__file__).parents[3]
OTHERS = [f"127.0.0.{node}" for node in (2, 3, 4)]  # beside the head, which has the machine's own address
SETTINGS = {"object_store_memory": 80 << 20, "num_cpus": 0, "include_dashboard": False}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else Ray writes a token to the home folder
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # asked for by a warning of Ray
    "PYTHONPATH": str(ROOT),
}


class Raylets:
    """A raylet for each address, the first with the head; `kill` ends one by SIGKILL, `start` starts it again."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=SETTINGS, shutdown_at_exit=False)
        self._nodes: dict[str, Any] = {}
        for address in OTHERS:
            self.start(address)
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="error")
        self.address = self._cluster.address
        self.addresses = [ray.util.get_node_ip_address(), *OTHERS]

    def start(self, address: str) -> None:
        self._nodes[address] = self._cluster.add_node(node_ip_address=address, wait=False, **SETTINGS)

    def kill(self, address: str) -> None:
        self._nodes.pop(address).kill_raylet()  # by SIGKILL

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        cluster = Raylets()
        yield cluster
        cluster.end()


STEPS = (40, 10, 90, 25)


@pytest.fixture(scope="module")
def store(raylets: Raylets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return four stores of unequal size, one on each node; their shards save priorities every half second."""
    from diskreplay.interop.ray import ShardedStore

    paths = make_stores(tmp_path_factory.mktemp("shards"), STEPS)
    with ShardedStore(paths, raylets.addresses, save_s=0.5) as sharded:
        yield sharded


def made(store: Any, distribution: Any = None, **arguments: Any) -> Any:
    from diskreplay.interop.ray import ShardedSampler

    # No shard is lost because the machine is slow, but where a test is about that.
    own = {"batch_size": 64, "seed": 1, "deadline_s": 60.0, **arguments}
    return ShardedSampler(store, dr.Transitions(n_step=2), distribution, **own)


def test_each_shard_is_on_its_node_and_batches_are_of_all_of_them(store: Any) -> None:
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    with made(store, name="places") as sampler:
        assert [link.joined.node for link in sampler._links] == [nodes[address] for _, address in store.places]
        assert [link.local is not None for link in sampler._links] == [True, False, False, False]
        index = []
        for _ in range(40):
            batch = sampler.sample()
            assert torch.equal(batch.obs[:, 0].long(), batch.index[:, 0])
            index.append(batch.index)
        assert torch.equal(sampler.gather(batch.index).reward, batch.reward)
        counts = np.unique(torch.cat(index).numpy(), axis=0, return_counts=True)[1]
        assert len(counts) == sum(STEPS)
        assert chisquare(counts).pvalue > 1e-6
        assert sampler.stats()["missing"] == []


def test_whoever_names_the_same_shards_gets_the_same_priorities(store: Any) -> None:
    again = pickle.loads(pickle.dumps(store))
    distribution = dr.Prioritized(1.0, 0.0, 1e-9)
    with made(store, distribution, name="shared") as one, made(again, distribution, name="shared") as two:
        one.update_priorities(one.ids(), np.full(sum(STEPS), 3.0))
        for sampler in (one, two):
            assert sampler.sampleable == sum(STEPS)
            assert sampler.stats()["priority_sum"] == pytest.approx(3.0 * sum(STEPS))


def test_large_windows_are_made_ahead_and_come_whole(store: Any) -> None:
    from diskreplay.interop.ray import ShardedSampler

    view = dr.Sequences(length=8, overlap=4)
    own = {"batch_size": 2048, "prefetch": 4, "name": "windows", "deadline_s": 60.0}
    with ShardedSampler(store, view, dr.Prioritized(), **own) as sampler:
        for _ in range(6):
            batch = sampler.sample()
            assert batch.obs.shape == (2048, 8, 3)
            assert torch.equal(batch.obs[:, 1:], batch.next_obs[:, :-1])
            sampler.update_priorities(batch.index, torch.rand(2048, 8))
        assert sampler.stats()["updates_lost"] == 0


def test_an_error_of_a_shard_is_raised_as_it_is(store: Any) -> None:
    with made(store, name="errors") as sampler:
        with pytest.raises(dr.InvalidIndex, match="^id 1099511627776 "):
            sampler.gather([[1, 1 << 40]])
        with pytest.raises(dr.StoreNotFound, match="has no sampler state named 'nothing'$"):
            sampler.load("nothing")


def test_a_wrong_path_or_address_is_refused(raylets: Raylets, tmp_path: Path) -> None:
    from diskreplay.interop.ray import ShardedStore

    with pytest.raises(ValueError, match=r"^there is no node '10\.9\.9\.9': the nodes have the addresses 127"):
        ShardedStore(tmp_path, ["10.9.9.9"])
    with ShardedStore(tmp_path / "nothing", [raylets.addresses[0]]) as empty, pytest.raises(dr.StoreNotFound):
        made(empty)


def test_the_schema_is_that_of_the_stores(store: Any) -> None:
    assert store.schema == SCHEMA
    assert len(store) == sum(STEPS)


def test_the_example_runs_on_a_cluster_as_it_is(raylets: Raylets, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/many_machines.py"), "--small", "--path", str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, "RAY_ADDRESS": raylets.address},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "from 1500 steps in 2 stores" in done.stdout.splitlines()[-1]
    lengths = []
    for number in range(2):
        with dr.open(tmp_path / f"node{number}") as own:
            lengths.append(len(own))
    assert lengths == [750, 750]


COLLECT = """
import os, sys, time
import numpy as np
import diskreplay as dr

shard, done = int(sys.argv[2]), os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT)
with dr.open(sys.argv[1], "a") as store, store.writer() as writer:
    obs = np.full(3, shard, np.float32)
    for count in range(1, 1 << 40):
        writer.append(obs, 0, 0.0, count % 50 == 0, next_obs=obs)
        os.pwrite(done, count.to_bytes(8, "little"), 0)
        time.sleep(0.002)
"""


def test_training_goes_on_without_a_machine_that_was_killed_and_with_it_again(
    raylets: Raylets, store: Any, tmp_path: Path
) -> None:
    killed = 2
    collectors = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECT, path, str(shard), str(tmp_path / f"done{shard}")],
            env={**os.environ, **ENVIRONMENT},
        )
        for shard, (path, _) in enumerate(store.places)
    ]
    fields = ("obs", "probability")
    try:
        with made(store, dr.Prioritized(1.0, 0.0, 1e-9), deadline_s=60.0, fields=fields) as sampler:
            ids = sampler.ids()
            ids = ids[ids[:, 0] == killed]
            sampler.update_priorities(ids, np.append(10.0, np.full(len(ids) - 1, 2.5)))  # new steps enter with 10
            assert sampler.sampleable > 0
            train(sampler, 20)
            assert sampler.stats()["updates_lost"] == 0
            wait_until_saved(store, killed, len(ids) - 1)
            sampler._rounds._deadline_s = 0.5  # not before: where all are busy, an answer takes longer
            raylets.kill(store.places[killed][1])
            collectors[killed].kill()  # which were on the machine, too
            train(sampler, 1, until=lambda: killed in sampler.stats()["missing"])
            train(sampler, 50)
            raylets.start(store.places[killed][1])
            train(sampler, 1, until=lambda: killed not in sampler.stats()["missing"])
            np.testing.assert_allclose(new_per_old(sampler, ids[1:]), 4.0, rtol=1e-6)
    finally:
        for collector in collectors:
            collector.kill()
            collector.wait()
    for shard, (path, _) in enumerate(store.places):
        committed = int.from_bytes((tmp_path / f"done{shard}").read_bytes(), "little")
        with dr.open(path) as own:
            assert len(own) >= STEPS[shard] + committed > STEPS[shard]
            assert own.verify(deep=True) == []


def train(sampler: Any, batches: int, until: Any = lambda: True) -> None:
    """Draw so many batches, and more until something is true."""
    while batches > 0 or not until():
        batch = sampler.sample()
        assert len(batch.obs) == 64
        sampler.update_priorities(batch.index[:0], [])
        batches -= 1


def new_per_old(sampler: Any, ids: np.ndarray) -> np.ndarray:
    """Return how much likelier than these ids of one shard others of it are drawn, once it gave both."""
    while True:
        batch = sampler.sample()
        mine = batch.index[:, 0].numpy() == ids[0, 0]
        chances, old = batch.probability.numpy()[mine], np.isin(batch.index.numpy()[mine, 1], ids[:, 1])
        if old.any() and not old.all():
            return chances[~old] / chances[old][0]


def wait_until_saved(store: Any, shard: int, count: int) -> None:
    """Wait until a shard has saved priorities of 2.5 for so many ids."""

    def saved(store: dr.Store) -> int:
        try:
            state = store.load_sampler_state("ray-default")
        except dr.StoreNotFound:
            return 0
        (table,) = state["planner"]["state"].values()
        return int((abs(table["values"] - 2.5) < 1e-6).sum())

    while store._asked(saved, [shard]) != [count]:
        time.sleep(0.05)
