"""Descriptors, mappings, bytes on disk, open segments: what a store may take, counted."""

import json
import os
from contextlib import suppress

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.on_disk import disk_bytes
from tests.testing.support import run_python, scratch, wait_until

CARTPOLE = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
ROW_BYTES = 4 * 4 + 8 + 4 + 1  # obs, action, reward, done


def block(steps, first=0):
    """An episode of CARTPOLE whose values count from `first`; with its final observation."""
    count = np.arange(first, first + steps + 1, dtype=np.float32)
    return {"obs": np.repeat(count[:, None], 4, 1), "action": np.arange(steps), "reward": count[:-1]}


def allocated(path):
    """Bytes that the files of a store have on disk, whole blocks."""
    return disk_bytes(path)  # of what is still there: segments leave meanwhile


def contents(path):
    """The same, page rounding aside: a file counts what is in it, holes do not, the rest of its last page does not."""
    sizes = (file.stat() for file in path.rglob("*") if file.is_file())
    return sum(min(status.st_size, status.st_blocks * 512) for status in sizes)


READ_MANY_EPISODES = """
import json, os, sys
import numpy as np
import diskreplay as dr

store = dr.open(sys.argv[1])
sampler = dr.Sampler(store, dr.Transitions(n_step=5), batch_size=1000, seed=0)
seen = set()
for _ in range(20):
    batch = sampler.sample().numpy()
    assert (batch["next_obs"][:, 0] - batch["obs"][:, 0] == batch["n_steps"]).all()
    seen |= set(batch["index"].tolist())
total = sum(episode.reward.sum(dtype=np.float64) for episode in store.episodes)
with open("/proc/self/maps") as maps:
    lines = maps.readlines()
answer = {
    "steps": len(store),
    "episodes": store.num_episodes,
    "total": total,
    "drawn": len(seen),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "mappings": len(lines),
    "mapped chunks": sum(sys.argv[1] in line for line in lines),
}
sampler.close()
store.close()
print(json.dumps(answer))
"""


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("count", [5_000, 100_000])
def test_a_reader_of_many_short_episodes_needs_few_descriptors_and_mappings(tmp_store, count):
    with dr.create(tmp_store, CARTPOLE) as store, store.writer() as writer:
        for i in range(count):
            writer.append_episode(**block(10, i % 1000), terminated=True)
        # While the segment is being written: a sealed one could be read by other means.
        answer = json.loads(run_python(READ_MANY_EPISODES, tmp_store))

    assert (answer["steps"], answer["episodes"]) == (10 * count, count)
    assert answer["total"] == sum(10 * (i % 1000) + 45 for i in range(count))
    assert answer["drawn"] > 10_000
    assert answer["mapped chunks"] > 0
    assert answer["descriptors"] < 64
    assert answer["mappings"] < 1000


WRITE_MANY_CHUNKS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import diskreplay as dr
from tests.stress.test_limits import block

with dr.open(sys.argv[1], mode="a") as store, store.writer() as writer:
    for first in range(0, 14_000, 20):
        writer.append_episode(**block(20, first), terminated=True)
"""
READ_MANY_CHUNKS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
import numpy as np
import diskreplay as dr

with dr.open(sys.argv[1]) as store:
    rewards = np.concatenate([episode.reward for episode in store.episodes])
    assert (rewards == np.arange(14_000)).all()
    for episode in store.episodes:
        assert (episode.obs[:-1, 0] == episode.reward).all()
        assert (episode.action == np.arange(20)).all()
    sampler = dr.Sampler(store, dr.Transitions(n_step=3), batch_size=2000, seed=0)
    batch = sampler.sample().numpy()
    assert (batch["next_obs"][:, 0] - batch["obs"][:, 0] == batch["n_steps"]).all()
    sampler.close()
with open("/proc/self/maps") as maps:
    print(sum(sys.argv[1] in line for line in maps))
"""


@pytest.mark.slow(turns=4)
def test_five_thousand_chunks_under_a_limit_of_256_descriptors():
    with scratch() as folder:
        path = f"{folder}/store"
        dr.create(path, CARTPOLE, chunk_bytes=64).close()
        run_python(WRITE_MANY_CHUNKS, path)
        chunks = sum(name.startswith("c.") for _, _, names in os.walk(path) for name in names)
        assert chunks >= 5000
        assert run_python(READ_MANY_CHUNKS, path).strip().isdecimal()


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("groups", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_groups_of_one_episode_take_less_than_three_times_the_bytes_of_their_rows(tmp_store, groups):
    steps = 200
    with dr.create(tmp_store, CARTPOLE, segment_steps="episode") as store:
        with store.writer() as writer:
            for i in range(groups):
                writer.append_episode(**block(steps, i), terminated=True)
        store.refresh()
        assert (store.num_episodes, len(store)) == (groups, groups * steps)
        assert len({episode.segment for episode in store.episodes[-100:]}) == 100
        assert (store.episodes[-1].obs[:, 0] == groups - 1 + np.arange(steps + 1)).all()

    rows = groups * (steps + 1) * ROW_BYTES
    # Every file counts, the metadata of each group among them.
    assert contents(tmp_store) < 3 * rows


LANES = 64


def uneven_lanes(writer, steps, lengths, at):
    """Append to all lanes; lane i ends an episode whenever it has lengths[i] steps (0: never)."""
    for _ in range(steps):
        at += 1
        obs = np.repeat(at[:, None], 4, 1).astype(np.float32)
        ends = (lengths > 0) & (at % np.maximum(lengths, 1) == 0)
        writer.append(obs, at, at.astype(np.float32), ends, np.zeros(LANES, bool), next_obs=obs + 1)


def unsealed(path):
    """The segments that are not sealed yet, by number."""
    documents = {}
    for folder in (path / "segments").glob("0*"):
        with suppress(FileNotFoundError):  # it leaves at this moment, so it is sealed
            documents[folder.name] = json.loads((folder / "zarr.json").read_text())
    return sorted(name for name, document in documents.items() if not document["attributes"]["sealed"])


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("capacity", [None, 40_000])
def test_uneven_lanes_one_of_them_endless_keep_two_segments_open_and_the_disk_small(tmp_store, capacity):
    # 1, 2, 4, ..., and some that end once in hundreds of steps; the first lane never does.
    lengths = np.array([0] + [1 + int(1.11**i) for i in range(1, LANES)])
    at = np.zeros(LANES, np.int64)
    with dr.create(tmp_store, CARTPOLE, capacity=capacity, segment_steps=16_384) as store:
        with store.writer(num_envs=LANES) as writer:
            for done in range(300, 2401, 300):
                uneven_lanes(writer, 300, lengths, at)
                store.refresh()
                assert len(store) == min(capacity or done * LANES, done * LANES)
                open_segments = {number for number in unsealed(tmp_store) if still_grows(writer, number)}
                assert len(open_segments) <= 2
                if done >= 600:
                    # Segments that left are deleted in the background, so their bytes go a moment later.
                    wait_until(lambda: allocated(tmp_store) < 3 * bytes_of_rows(tmp_store), at_most_s=60)
        # Each lane's newest steps are there, in order and without a gap.
        store.refresh()
        newest = {}
        for episode in store.episodes:
            assert (np.diff(episode.action) == 1).all()
            before = newest.get(episode.lane)
            assert before is None or episode.action[0] == before + 1
            newest[episode.lane] = int(episode.action[-1])
        assert newest == dict.fromkeys(range(LANES), 2400)
    assert unsealed(tmp_store) == []
    segments = len(list((tmp_store / "segments").glob("0*")))
    if capacity:
        assert segments <= capacity / 16_384 + 3
    assert allocated(tmp_store) < 3 * bytes_of_rows(tmp_store)


def still_grows(writer, number):
    return int(number) in {segment.number for segment in writer._episode_writer.rotation.open}


def bytes_of_rows(path):
    """Bytes of all committed rows that are on disk."""
    rows = 0
    for folder in (path / "segments").glob("0*"):
        with suppress(FileNotFoundError):  # it leaves at this moment
            rows += int(np.fromfile(folder / "committed" / "c.0", "<i8").sum())
    return rows * ROW_BYTES
