"""A storage of TorchRL over a store: beside `LazyTensorStorage`, with equal seeds."""

import pickle
import warnings

import numpy as np
import pytest

import diskreplay as dr

# Loading TorchRL takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]
pytest.importorskip("torchrl")
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensordict import TensorDict
    from torchrl.data import (
        LazyTensorStorage,
        PrioritizedSampler,
        ReplayBuffer,
        SamplerWithoutReplacement,
        SliceSampler,
        TensorDictReplayBuffer,
    )

    from diskreplay.interop.torchrl import StoreStorage

CAPACITY = 40


class PlainTree:
    """A segment tree of TorchRL, which a torch that its wheel was not built for cannot load, as a plain array."""

    def __init__(self, size, reduce, neutral):
        self._values, self._reduce = torch.full((size,), neutral, dtype=torch.float64), reduce

    def __getitem__(self, index):
        return self._values[index].float()

    def __setitem__(self, index, values):
        self._values[index] = torch.as_tensor(values).double()

    def query(self, first, last):
        return float(self._reduce(self._values[first:last]))

    def scan_lower_bound(self, sums):
        return torch.searchsorted(self._values.cumsum(0), torch.as_tensor(sums).double())


@pytest.fixture(autouse=True)
def trees(monkeypatch):
    module = PrioritizedSampler._init.__globals__
    for kind, reduce, neutral in (("Sum", torch.sum, 0.0), ("Min", torch.min, float("inf"))):
        for bits in (32, 64):
            name = f"{kind}SegmentTreeFp{bits}"
            if module[name] is None:
                monkeypatch.setitem(module, name, lambda size, r=reduce, n=neutral: PlainTree(size, r, n))


def steps_of(lengths, envs=1, seed=0, first=0):
    """Random steps of environments that take turns, their episodes of these lengths, as collectors give them."""
    rng = np.random.default_rng(seed)
    lanes: list[list[TensorDict]] = [[] for _ in range(envs)]
    for i, lane in enumerate(lanes):
        for number, length in enumerate(lengths, first + i * len(lengths)):
            obs = rng.normal(size=(length + 1, 3)).astype(np.float32)
            ends = np.arange(length) == length - 1
            for t in range(length):
                how = (ends[t] and number % 2 == 0, ends[t] and number % 2 == 1)
                lane.append(step(obs[t], obs[t + 1], rng.integers(4), float(rng.normal()), *how, number, t))
    return [lane[t] for t in range(sum(lengths)) for lane in lanes]


def step(obs, after, action, reward, terminated, truncated, trajectory, at):
    flag = {True: torch.ones(1, dtype=torch.bool), False: torch.zeros(1, dtype=torch.bool)}
    return TensorDict(
        {
            "observation": torch.as_tensor(obs),
            "step_count": torch.tensor([at]),
            "action": torch.nn.functional.one_hot(torch.tensor(action), 4),
            "action_value": torch.arange(4.0) + reward,
            "done": flag[False],
            "terminated": flag[False],
            "truncated": flag[False],
            "collector": {"traj_ids": torch.tensor(trajectory)},
            "next": {
                "observation": torch.as_tensor(after),
                "step_count": torch.tensor([at + 1]),
                "reward": torch.tensor([reward]),
                "episode_reward": torch.tensor([reward * 2]),
                "done": flag[bool(terminated or truncated)],
                "terminated": flag[bool(terminated)],
                "truncated": flag[bool(truncated)],
            },
        },
        batch_size=[],
    )


@pytest.fixture
def storage(tmp_path):
    storage = StoreStorage(tmp_path / "store", capacity=CAPACITY)
    yield storage
    storage.close()
    with dr.open(tmp_path / "store") as store:
        assert store.verify(deep=True) == []


def assert_equal(found, wanted):
    # What TorchRL's storage has of an item is where it went; a batch has where it was found.
    keys = set(wanted.keys(True, True)) - ({"index"} - found.keys())
    assert set(found.keys(True, True)) == keys
    assert found.shape == wanted.shape
    for key in keys:
        assert found[key].dtype == wanted[key].dtype, key
        assert torch.equal(found[key], wanted[key]), key
    return len(keys)


def pair(storage, size=CAPACITY, sampler=lambda: None, kind=ReplayBuffer, **kwargs):
    return [kind(storage=one, sampler=sampler(), batch_size=16, **kwargs) for one in (storage, LazyTensorStorage(size))]


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_uniform_batches_are_those_of_torchrls_storage_through_wraparounds(storage, kind, envs):
    buffers = pair(storage, kind=kind)
    items = steps_of([7, 5, 9, 1, 6], envs)
    compared = 0
    for at in range(0, len(items), 8):
        for buffer in buffers:
            data = torch.stack(items[at : at + 8])
            buffer.extend(data)
        batches = []
        for buffer in buffers:
            torch.manual_seed(at)
            batches.append(buffer.sample())
        assert_equal(*batches)
        compared += len(batches[0])
        assert_equal(buffers[0][:], buffers[1][:])
    assert len(storage) == min(len(items), CAPACITY)
    assert compared == 16 * len(range(0, len(items), 8))


def test_one_item_at_a_time(storage):
    buffers = pair(storage)
    for item in steps_of([3, 40, 20]):
        assert len({int(buffer.add(item.clone())) for buffer in buffers}) == 1
    assert_equal(buffers[0][:], buffers[1][:])
    for index in (3, -1, [1, 5, 5], slice(2, 30, 3), torch.tensor([[0, 1], [2, 3]]), torch.arange(CAPACITY) > 20):
        assert_equal(storage[index], buffers[1].storage[index])
    assert torch.equal(storage["next", "reward"], buffers[1].storage[:]["next", "reward"])
    with pytest.raises(IndexError):
        storage[CAPACITY]


def test_prioritized_batches_are_those_of_torchrls_storage(storage):
    buffers = pair(storage, sampler=lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5), kind=TensorDictReplayBuffer)
    items = steps_of([7, 5, 9, 13, 6, 11, 20])
    rng, compared = np.random.default_rng(0), 0
    for at in range(0, len(items), 6):
        errors, batches = torch.as_tensor(rng.random(16)), []
        for buffer in buffers:
            buffer.extend(torch.stack(items[at : at + 6]))
            torch.manual_seed(at)
            np.random.seed(at)
            batch = buffer.sample()
            batches.append(batch.clone())
            batch["td_error"] = errors
            buffer.update_tensordict_priority(batch)
        assert batches[0].get("priority_weight") is not None
        assert_equal(*batches)
        compared += len(batches[0])
    assert compared == 16 * 12


def test_sampling_without_replacement_and_by_slices(storage):
    items = torch.stack(steps_of([10, 10, 10, 10]))
    for sampler in (SamplerWithoutReplacement, lambda: SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"))):
        buffers = pair(storage, sampler=sampler)
        batches = []
        for buffer in buffers:
            buffer.extend(items.clone())
            torch.manual_seed(0)
            batches.append([buffer.sample() for _ in range(4)])
        for found, wanted in zip(*batches, strict=True):
            assert_equal(found, wanted)


def test_slices_end_at_the_newest_step_where_it_is_at_the_last_position(storage):
    whole = torch.stack(steps_of([2 * CAPACITY]))
    buffers = pair(storage, sampler=lambda: SliceSampler(slice_len=4, traj_key=("collector", "traj_ids")))
    batches = []
    for buffer in buffers:
        for half in whole.split(CAPACITY):
            buffer.extend(half.clone())
        torch.manual_seed(0)
        batches.append(torch.cat([buffer.sample() for _ in range(32)]))
    assert_equal(*batches)
    counts = batches[0]["step_count"].reshape(-1, 4)
    assert (counts.diff(dim=1) == 1).all()


@pytest.mark.parametrize("count", [30, 40, 60])
def test_shape_contents_and_items_are_those_of_torchrls_storage(storage, count):
    items = torch.stack(steps_of([10] * (count // 10)))
    buffers = pair(storage)
    for buffer in buffers:
        buffer.extend(items.clone())
    found, wanted = (buffer.storage for buffer in buffers)
    assert found.shape == wanted.shape
    for position in (0, -1, 29, 30, 39, 40, -30, -31, -40, -41, 100):
        assert found.contains(position) == wanted.contains(position), position
    positions = torch.tensor([0, 29, 35, 41, 60])
    assert torch.equal(found.contains(positions), wanted.contains(positions))
    assert_equal(torch.stack(list(found)), torch.stack(list(wanted)))


def test_a_step_never_changes(storage):
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    items = torch.stack(steps_of([10]))
    buffer.extend(items)
    before = buffer[:].clone()
    for write in (
        lambda: buffer.__setitem__(3, items[0]),
        lambda: buffer.writer.write_at(2, items[0]),
        lambda: storage.set(4, items[0]),
        lambda: storage.set(torch.tensor([10, 12]), items[:2]),
    ):
        with pytest.raises(dr.ReadOnlyError, match="never change"):
            write()
    assert_equal(buffer[:], before)


def test_a_store_of_the_users_is_read_by_its_schema_and_continued_behind_its_newest_step(tmp_path):
    schema = dr.Schema(dr.Field(3, "float32"), dr.Field((), "int64"), extra={"log_prob": dr.Field((), "float32")})
    with dr.create(tmp_path / "store", schema) as store:
        with store.writer() as writer:
            for t in range(10):
                obs = np.full((2, 3), [[t], [t + 1]])
                writer.append(obs[0], t, 1.5, t == 9, next_obs=obs[1], log_prob=t / 2)
        storage = StoreStorage(store)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
        assert len(buffer) == 10
        item = buffer[9]
        assert item["observation"].tolist() == [9, 9, 9]
        assert item["next", "done"].item()
        assert item["log_prob"].item() == 4.5
        item["log_prob"] = torch.tensor(7.0)
        item["unknown"] = torch.tensor(0)
        assert buffer.extend(torch.stack([item] * 3)).tolist() == [10, 11, 12]
        assert len(store.episodes) == 1
        assert store.refresh() == 3
        assert [len(episode) for episode in store.episodes] == [10, 1, 1, 1]
        assert buffer[:]["log_prob"].tolist() == [t / 2 for t in range(10)] + [7.0] * 3
        storage.close()
        assert store.verify() == []
    with dr.open(tmp_path / "store") as store:
        buffer = ReplayBuffer(storage=StoreStorage(store), sampler=PrioritizedSampler(64, 0.7, 0.5), batch_size=4)
        assert len(buffer.sample()) == 4
        with pytest.raises(dr.ReadOnlyError):
            buffer.add(item)
        assert len(buffer) == 13
        buffer.storage.close()


@pytest.mark.parametrize("more", [0, 5, 60])
@pytest.mark.parametrize("by", ["state_dict", "dumps"])
def test_a_buffer_that_was_saved_goes_on_with_its_positions_and_with_what_came_since(tmp_path, by, more):
    def make():
        storage = StoreStorage(tmp_path / "store", capacity=CAPACITY)
        return TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(CAPACITY, 1.0, 1.0), batch_size=16)

    buffer, items = make(), torch.stack(steps_of([9, 30, 80]))
    buffer.extend(items[:50])
    buffer.update_priority(torch.arange(CAPACITY), torch.arange(CAPACITY) + 1.0)
    state = buffer.state_dict() if by == "state_dict" else buffer.dumps(tmp_path / "saved")
    if more:
        buffer.extend(items[50 : 50 + more])
    wanted = buffer[:].clone()
    buffer.storage.close()
    buffer = make()
    if by == "state_dict":
        buffer.load_state_dict(state)
    else:
        buffer.loads(tmp_path / "saved")
    assert len(buffer) == CAPACITY
    if more < CAPACITY:
        assert torch.equal(buffer[:]["observation"], wanted["observation"])
    assert torch.equal(buffer[:]["observation"].sort(0).values, wanted["observation"].sort(0).values)
    buffer.sample()
    newest = steps_of([4], seed=9, first=100)
    index = buffer.extend(torch.stack(newest))
    assert torch.equal(buffer[index.tolist()]["observation"], torch.stack(newest)["observation"])
    assert len(set(buffer[:]["observation"][:, 0].tolist())) == CAPACITY
    assert sum(len(buffer.sample()) for _ in range(8)) == 128
    other = StoreStorage(tmp_path / "other", capacity=CAPACITY)
    with pytest.raises(dr.StoreNotFound):
        other.load_state_dict(buffer.storage.state_dict())
    buffer.storage.close()


def test_a_buffer_that_was_killed_goes_on_behind_its_newest_step(tmp_path):
    items = torch.stack(steps_of([9, 30]))
    for number in range(2):
        storage = StoreStorage(tmp_path / "store", capacity=CAPACITY)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=16)
        assert len(buffer) == 10 * number
        index = buffer.extend(items[10 * number : 10 * number + 10].clone())
        assert index.tolist() == list(range(10 * number, 10 * number + 10))
        storage.close()
    storage = StoreStorage(tmp_path / "store")
    assert torch.equal(storage[:]["observation"], items[:20]["observation"])
    with pytest.raises(dr.StoreExists, match="resize"):
        StoreStorage(tmp_path / "store", capacity=CAPACITY + 1)
    storage.close()


def test_a_closed_storage_names_itself(storage):
    (buffer, _), items = pair(storage), steps_of([3, 2])
    buffer.extend(items)
    storage.close()
    for call in (lambda: buffer.extend(items), buffer.sample):
        with pytest.raises(dr.Closed, match="^this StoreStorage is closed; make another$"):
            call()


def test_emptied(storage):
    buffers = pair(storage)
    for seed in range(3):
        for buffer in buffers:
            buffer.empty()
            assert len(buffer) == 0
            buffer.extend(torch.stack(steps_of([9, 3], seed=seed)))
        assert_equal(buffers[0][:], buffers[1][:])


def test_another_process_opens_the_store_itself(storage):
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    buffer.extend(torch.stack(steps_of([9, 3])))
    copy = pickle.loads(pickle.dumps(buffer))
    assert_equal(copy[:], buffer[:])
    copy.storage.close()


def test_what_is_no_step_is_refused_and_nothing_appended(storage):
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    good = torch.stack(steps_of([9]))
    for bad, said in {
        "observation": "no observation",
        "action": "'action'",
        "next": "no observation",
    }.items():
        with pytest.raises(dr.SchemaError, match=said):
            buffer.extend(good.exclude(bad, "step_count"))
    buffer.extend(good)
    for bad, said in {"step_count": "step_count", "action_value": "action_value"}.items():
        with pytest.raises(dr.SchemaError, match=said):
            buffer.extend(good.exclude(bad))
    with pytest.raises(dr.SchemaError, match=r"extend\(data.reshape\(-1\)\)"):
        buffer.extend(good.reshape(3, 3))
    assert len(buffer) == 9
    assert buffer.extend(good).tolist() == list(range(9, 18))


def test_an_interrupted_episode_is_cut_and_reads_as_truncated(storage):
    buffer = ReplayBuffer(storage=storage, batch_size=8)
    items = steps_of([9])
    with pytest.warns(UserWarning, match="cut there"):
        buffer.extend(torch.stack([*items[:3], *items[5:]]))
    assert buffer[:]["next", "truncated"].flatten().tolist() == [False, False, True] + [False] * 4
    assert buffer[:]["next", "terminated"].flatten().tolist() == [False] * 6 + [True]


def test_done_alone_terminates_and_what_comes_behind_an_item_that_is_refused_has_the_next_positions(tmp_path):
    items = torch.stack(steps_of([5, 5])).exclude(("next", "terminated"), ("next", "truncated"))
    schema = dr.Schema(dr.Field(3, "float32"), dr.Field(4, "int64"))
    with dr.create(tmp_path / "store", schema, capacity=CAPACITY, validate="finite") as store:
        storage = StoreStorage(store)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), batch_size=16)
        bad = items.clone()
        bad["next", "reward"][3] = float("nan")
        with pytest.raises(dr.SchemaError, match="finite|NaN|nan"):
            buffer.extend(bad)
        assert len(buffer) == 3
        assert buffer.extend(items[3:]).tolist() == list(range(3, 10))
        assert torch.equal(buffer[:]["observation"], items["observation"])
        assert buffer[:]["next", "terminated"].flatten().tolist() == ([False] * 4 + [True]) * 2
        assert not buffer[:]["next", "truncated"].any()
        assert set(buffer.sample()["index"].tolist()) <= set(range(10))
        storage.close()
        assert [len(episode) for episode in store.episodes] == [5, 5]


def test_trajectories_that_nobody_goes_on_with_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("diskreplay.interop.trajectory_writers.MAX_TRAJECTORIES", 2)
    storage = StoreStorage(tmp_path / "store")
    buffer = ReplayBuffer(storage=storage, batch_size=16)
    for number in range(5):
        buffer.extend(torch.stack(steps_of([9], first=number)[:4]))
    storage.close()
    with dr.open(tmp_path / "store") as store:
        assert [len(episode) for episode in store.episodes] == [4] * 5
        assert len({episode.segment for episode in store.episodes}) == 2


@pytest.fixture
def collected():
    """What a collector gives of three environments.

    TorchRL keeps the frame of this function, and with it those of its callers: a test would leave its stores behind.
    """
    envs = pytest.importorskip("torchrl.envs")
    collectors = pytest.importorskip("torchrl.collectors")
    env = envs.SerialEnv(3, lambda: envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.StepCounter()))
    collector = collectors.Collector(
        env, envs.utils.RandomPolicy(env.action_spec), frames_per_batch=60, total_frames=600
    )
    found = [data.reshape(-1).clone() for data in collector]
    collector.shutdown()
    return found


@pytest.mark.leaks("TorchRL keeps the shared memory of the environments")
def test_environments_of_a_collector_have_their_own_episodes(tmp_path, collected):
    storage = StoreStorage(tmp_path / "store", capacity=400)
    buffers = pair(storage, 400, kind=TensorDictReplayBuffer)
    for data in collected:
        for buffer in buffers:
            buffer.extend(data.clone())
        assert_equal(buffers[0][:], buffers[1][:])
    with dr.open(tmp_path / "store") as store:
        assert len(store) == 400
        ended = [episode for episode in store.episodes if episode.terminated]
        assert len(ended) > 5
        assert all(len(set(episode["collector"]["traj_ids"].tolist())) == 1 for episode in ended)
        assert store.verify() == []
    storage.close()


def train(storage):
    """Train TorchRL's DQN for a few steps; return the weights."""
    envs, nn, objectives, modules = (
        pytest.importorskip(name) for name in ("torchrl.envs", "tensordict.nn", "torchrl.objectives", "torchrl.modules")
    )
    collectors = pytest.importorskip("torchrl.collectors")
    torch.manual_seed(0)
    np.random.seed(0)
    env = envs.TransformedEnv(envs.GymEnv("CartPole-v1"), envs.InitTracker())
    env.set_seed(0)
    net = modules.MLP(in_features=4, out_features=2, num_cells=[32])
    actor = modules.QValueActor(net, spec=env.action_spec, in_keys=["observation"])
    policy = nn.TensorDictSequential(actor, modules.EGreedyModule(env.action_spec, annealing_num_steps=500))
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=PrioritizedSampler(300, 0.6, 0.4), batch_size=32, priority_key="td_error"
    )
    collector = collectors.Collector(env, policy, frames_per_batch=20, total_frames=600, replay_buffer=buffer)
    loss = objectives.DQNLoss(actor, loss_function="l2", delay_value=True)
    target = objectives.SoftUpdate(loss, eps=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), 1e-3)
    for _ in collector:
        batch = buffer.sample()
        optimizer.zero_grad()
        loss(batch)["loss"].backward()
        optimizer.step()
        target.step()
        buffer.update_tensordict_priority(batch)
    collector.shutdown()
    assert len(buffer) == 300
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_torchrls_dqn_gets_the_weights_that_it_gets_with_its_own_storage(tmp_path, one_thread):
    storage = StoreStorage(tmp_path / "store", capacity=300)
    found, wanted = train(storage), train(LazyTensorStorage(300))
    assert len(found) == 4
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    storage.close()
