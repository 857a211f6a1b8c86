"""A replay buffer of Tianshou over a store: beside Tianshou's own, with equal seeds."""

import pickle
import warnings

import numpy as np
import pytest

import diskreplay as dr

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")]
pytest.importorskip("tianshou")
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gymnasium as gym
    from tianshou.algorithm.algorithm_base import OffPolicyAlgorithm
    from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Batch, Collector, PrioritizedVectorReplayBuffer, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Net

    from diskreplay.interop.tianshou import StorePrioritizedReplayBuffer, StoreReplayBuffer

SIZE, ENVS = 60, 3


class Lanes:
    """Random steps of environments, in which episodes end now and then."""

    def __init__(self, seed=0, shape=(3,), nested=False):
        self.rng, self.shape, self.nested = np.random.default_rng(seed), shape, nested
        self.obs = [self.draw() for _ in range(ENVS)]

    def draw(self):
        frames = self.rng.normal(size=self.shape).astype(np.float32)
        return {"image": frames, "state": frames.sum()} if self.nested else frames

    def step(self, envs):
        after = [self.draw() for _ in envs]
        terminated, truncated = self.rng.random((2, len(envs))) < 0.1
        batch = Batch(
            obs=np.stack([self.obs[i] for i in envs]) if not self.nested else Batch.stack([self.obs[i] for i in envs]),
            act=self.rng.integers(4, size=len(envs)),
            rew=self.rng.normal(size=len(envs)),
            terminated=terminated,
            truncated=truncated & ~terminated,
            obs_next=Batch.stack(after) if self.nested else np.stack(after),
            info=Batch(number=self.rng.integers(100, size=len(envs))),
        )
        for i, obs, ended in zip(envs, after, terminated | truncated, strict=True):
            self.obs[i] = self.draw() if ended else obs
        return batch


def flat(batch, path=()):
    found = {}
    for key in batch.get_keys():
        value = batch[key]
        found |= flat(value, (*path, key)) if isinstance(value, Batch) else {(*path, key): np.asarray(value)}
    return found


def assert_equal(found, wanted):
    found, wanted = flat(found), flat(wanted)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        np.testing.assert_array_equal(found[key], value, err_msg=str(key))


def pair(path, prioritized=False, **kwargs):
    ours, theirs = (
        (StorePrioritizedReplayBuffer, PrioritizedVectorReplayBuffer)
        if prioritized
        else (StoreReplayBuffer, VectorReplayBuffer)
    )
    kwargs |= {"alpha": 0.6, "beta": 0.4} if prioritized else {}
    return ours(path, SIZE, ENVS, **kwargs), theirs(SIZE, ENVS, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"nested": True},
        {"stack_num": 4},
        {"stack_num": 4, "sample_avail": True},
        {"stack_num": 3, "ignore_obs_next": True, "save_only_last_obs": True, "shape": (3, 2)},
        {"prioritized": True},
    ],
    ids=str,
)
def test_batches_are_those_of_tianshous_buffer_through_wraparounds(tmp_path, kwargs):
    kwargs = dict(kwargs)
    lanes = Lanes(shape=kwargs.pop("shape", (3,)), nested=kwargs.pop("nested", False))
    ours, theirs = pair(tmp_path / "store", **kwargs)
    rng, compared = np.random.default_rng(1), 0
    for t in range(100):
        envs = np.flatnonzero(rng.random(ENVS) < 0.8)
        if not len(envs):
            continue
        batch = lanes.step(envs)
        for found, wanted in zip(ours.add(batch, envs), theirs.add(batch, envs), strict=True):
            np.testing.assert_array_equal(found, wanted)
        if t < 10:
            continue
        batches, indices = [], []
        for buffer in (ours, theirs):
            np.random.seed(t)
            batch, index = buffer.sample(32)
            batches.append(batch)
            indices.append(index)
            if "prioritized" in kwargs:
                buffer.update_weight(index, np.random.random(len(index)))
        np.testing.assert_array_equal(*indices)
        assert_equal(*batches)
        compared += len(indices[0])
        for name in ("unfinished_index", "__len__", "hasnull"):
            np.testing.assert_array_equal(getattr(ours, name)(), getattr(theirs, name)())
        for name in ("prev", "next"):
            np.testing.assert_array_equal(getattr(ours, name)(indices[0]), getattr(theirs, name)(indices[0]))
    assert len(ours) == SIZE
    assert compared > 2500
    assert_equal(ours[5], theirs[5])
    assert_equal(ours[:], theirs[:])
    assert_equal(ours[3:9], theirs[3:9])
    ours.close()
    with dr.open(tmp_path / "store") as store:
        assert store.verify(deep=True) == []


@pytest.mark.parametrize("buffer_ids", [None, [0, 2]])
def test_flags_may_be_floats_0_and_1_and_no_other_numbers(tmp_path, buffer_ids):
    envs = np.arange(ENVS) if buffer_ids is None else np.array(buffer_ids)
    lanes, ends = Lanes(), envs == envs[-1]
    buffer = StoreReplayBuffer(tmp_path / "store", SIZE, ENVS)
    for flag, wrong in (("terminated", 0.5), ("truncated", np.nan)):
        batch = lanes.step(envs)
        batch.terminated, batch.truncated = ends.astype(np.float32), np.zeros(len(envs))
        kept = batch[flag].copy()
        batch[flag][0] = wrong
        with pytest.raises(dr.SchemaError, match=f"^{flag} is one truth value a step"):
            buffer.add(batch, buffer_ids)
        batch[flag] = kept
        buffer.add(batch, buffer_ids)
    buffer.close()
    with dr.open(tmp_path / "store") as store:
        assert [(ep.lane, len(ep), ep.terminated) for ep in store.episodes if ep.terminated] == [
            (envs[-1], 1, True)
        ] * 2
        assert len(store) == 2 * len(envs)


def test_a_closed_buffer_names_itself(tmp_path):
    buffer, lanes = StoreReplayBuffer(tmp_path / "store", SIZE, ENVS), Lanes()
    buffer.add(lanes.step(np.arange(ENVS)))
    buffer.close()
    for call in (lambda: buffer.add(lanes.step(np.arange(ENVS))), lambda: buffer.sample(2), lambda: buffer.obs[0]):
        with pytest.raises(dr.Closed, match="^this StoreReplayBuffer is closed; make another$"):
            call()


def test_n_step_targets_are_those_of_tianshous_buffer(tmp_path):
    ours, theirs = pair(tmp_path / "store")
    lanes, weights = Lanes(), torch.tensor([0.5, 1.0, 2.0])
    for _ in range(70):
        batch = lanes.step(np.arange(ENVS))
        for buffer in (ours, theirs):
            buffer.add(batch)

    def values(buffer, indices):
        return (torch.from_numpy(buffer[indices].obs_next) @ weights)[:, None]

    for n_step in (1, 3, 5):
        returns = []
        for buffer in (ours, theirs):
            batch, indices = buffer.sample(64)
            compute = OffPolicyAlgorithm.compute_nstep_return
            returns.append(compute(batch, buffer, indices, values, gamma=0.9, n_step=n_step).returns)
        assert torch.equal(*returns)
    ours.close()


def test_a_buffer_over_a_store_that_has_steps_continues_it(tmp_path):
    ours, theirs = pair(tmp_path / "store")
    lanes = Lanes()
    for number in range(50):
        batch = lanes.step(np.arange(ENVS))
        for buffer in (ours, theirs):
            buffer.add(batch)
        if number == 10:
            ours.close()
            for prioritized in (True, False):
                ours = pair(tmp_path / "store", prioritized)[0]
                assert len(ours) == 11 * ENVS
                assert_equal(Batch(obs=ours[:].obs, rew=ours[:].rew), Batch(obs=theirs[:].obs, rew=theirs[:].rew))
                np.testing.assert_array_equal(ours[:].terminated, theirs[:].terminated)
                open_ones = theirs.unfinished_index()
                assert np.flatnonzero(ours.done != theirs.done).tolist() == open_ones.tolist()
                assert ours.truncated[open_ones].all()
                if prioritized:
                    assert len(ours.sample(8)[1]) == 8
                    ours.close()
    ours.close()
    ours = pair(tmp_path / "store")[0]
    assert len(ours) == SIZE
    found, wanted = ours[:], theirs[:]
    assert sorted(found.rew) == sorted(wanted.rew)
    assert sorted(found.obs_next[:, 0]) == sorted(wanted.obs_next[:, 0])
    ours.add(lanes.step(np.arange(ENVS)))
    ours.close()


def test_a_store_of_the_users_fills_the_buffer_with_what_can_be_sampled(tmp_path):
    with dr.create(tmp_path / "store", dr.Schema(dr.Field(3, "float32"), dr.Field((), "int64"))) as store:
        with store.writer() as writer:
            for number in range(4):  # the last step of an episode that was cut here leads nowhere
                for t in range(5):
                    writer.append(np.full(3, 10 * number + t), t, number, number == 1 and t == 4)
                writer.end_episode()
        store.refresh()
        buffer = StoreReplayBuffer(store, 12)
        assert buffer[:].obs[:, 0].tolist() == [11, 12, 13, 14, 20, 21, 22, 23, 30, 31, 32, 33]
        assert buffer[:].rew.tolist() == [1] * 4 + [2] * 4 + [3] * 4
        assert np.flatnonzero(buffer[:].done).tolist() == [3, 7, 11]
        assert np.flatnonzero(buffer[:].terminated).tolist() == [3]
        assert buffer.next(np.array([0, 3, 6, 7, 11])).tolist() == [1, 3, 7, 7, 11]
        assert len(StoreReplayBuffer(store, 12, 2)) == 12 // 2
        buffer.close()


@pytest.mark.parametrize("by", ["pickle", "hdf5"])
def test_a_buffer_that_was_saved_has_its_indices(tmp_path, by):
    ours, _ = pair(tmp_path / "store")
    lanes = Lanes()
    for _ in range(30):
        ours.add(lanes.step(np.arange(ENVS)))
    if by == "pickle":
        copy = pickle.loads(pickle.dumps(ours))
    else:
        ours.save_hdf5(str(tmp_path / "saved.hdf5"))
        copy = StoreReplayBuffer.load_hdf5(str(tmp_path / "saved.hdf5"))
    assert_equal(copy[:], ours[:])
    np.testing.assert_array_equal(copy.unfinished_index(), ours.unfinished_index())
    ours.close()
    copy.add(lanes.step(np.arange(ENVS)))
    assert len(copy) == len(ours)
    copy.close()


def test_steps_never_change_nans_are_found_and_reset_leaves_the_store(tmp_path):
    ours, _ = pair(tmp_path / "store")
    lanes = Lanes()
    with pytest.raises(AttributeError, match="no steps"):
        ours.obs  # noqa: B018
    for _ in range(5):
        ours.add(lanes.step(np.arange(ENVS)))
    for change in (
        lambda: ours.set_array_at_key(np.zeros(3), "obs", [0, 1, 2]),
        lambda: ours.set_batch(Batch()),
        lambda: ours.dropnull(),
    ):
        with pytest.raises(dr.ReadOnlyError, match="store"):
            change()
    ours.set_array_at_key(np.arange(2.0), "extra", [0, 1], 0.0)
    assert ours[np.array([0, 1, 2])].extra.tolist() == [0, 1, 0]
    assert not ours.hasnull()
    batch = lanes.step(np.arange(ENVS))
    batch.obs_next[1, 2] = np.nan
    ours.add(batch)
    assert ours.hasnull()
    ours.reset()
    assert len(ours) == 0
    assert not ours.hasnull()
    lanes = Lanes(3)
    ours.add(lanes.step(np.arange(ENVS)))
    assert len(ours) == ENVS
    ours.close()
    with dr.open(tmp_path / "store") as store:
        assert len(store) == 7 * ENVS


def train(buffer):
    """Train Tianshou's DQN for a few epochs, by its trainer; return the weights."""
    torch.manual_seed(0)
    np.random.seed(0)
    envs, tests = (DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(n)]) for n in (ENVS, 1))
    for each in (envs, tests):
        each.seed(0)
        for space in each.action_space:
            space.seed(0)
    env = gym.make("CartPole-v1")
    net = Net(state_shape=env.observation_space.shape, action_shape=env.action_space.n, hidden_sizes=[32])
    policy = DiscreteQLearningPolicy(model=net, action_space=env.action_space, eps_training=0.1)
    algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), n_step_return_horizon=3, target_update_freq=50)
    collector, tester = Collector(algorithm, envs, buffer, exploration_noise=True), Collector(algorithm, tests)
    collector.reset()
    collector.collect(n_step=60)
    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            test_collector=tester,
            max_epochs=2,
            epoch_num_steps=300,
            collection_step_num_env_steps=30,
            batch_size=32,
            update_step_num_gradient_steps_per_sample=0.2,
            test_step_num_episodes=1,
            show_progress=False,
            verbose=False,
        )
    )
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_tianshous_dqn_gets_the_weights_that_it_gets_with_its_own_buffer(tmp_path, one_thread):
    ours = StoreReplayBuffer(tmp_path / "store", 300, ENVS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = train(ours), train(VectorReplayBuffer(300, ENVS))
    assert len(found) == 4
    assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    assert len(ours) == 300
    ours.close()
