"""RLlib's DQN on a buffer in a store, and datasets that Ray reads, on a local Ray."""

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.testing.support import REPOSITORY

ray = pytest.importorskip("ray", reason="needs ray[rllib,data]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of Ray and RLlib
    pytest.mark.leaks("Ray's own processes and files are there until the last test of the module"),
]


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    """Start Ray once, with little memory; its processes end behind the last test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # so that workers import this checkout
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
        ray.shutdown()


@pytest.fixture
def dqn():
    """Make DQN algorithms, which are stopped behind the test."""
    pytest.importorskip("tree", reason="needs ray[rllib]")
    from ray.rllib.algorithms.dqn import DQNConfig

    made = []

    def make(buffer, steps, n_step=1):
        """Return one that samples so many steps an iteration."""
        config = (
            DQNConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=4)
            .rl_module(model_config={"fcnet_hiddens": [64], "head_fcnet_hiddens": [64]})
            .reporting(min_sample_timesteps_per_iteration=steps, metrics_num_episodes_for_smoothing=10)
            .debugging(seed=0)
            .training(
                replay_buffer_config={"capacity": 5000, "alpha": 0.6, "beta": 0.4, **buffer},
                num_steps_sampled_before_learning_starts=200,
                train_batch_size=64,
                training_intensity=16,
                lr=3e-3,
                gamma=0.95,
                n_step=n_step,
                epsilon=[(0, 1.0), (800, 0.05)],
                target_network_update_freq=50,
            )
        )
        made.append(config.build_algo())
        made[-1].local_replay_buffer.rng = np.random.default_rng(0)  # which RLlib never seeds
        return made[-1]

    yield make
    for algorithm in made:
        if algorithm.local_replay_buffer is not None and hasattr(algorithm.local_replay_buffer, "close"):
            algorithm.local_replay_buffer.close()
        algorithm.stop()


@pytest.mark.parametrize("kind", ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"])
def test_networks_are_those_that_its_own_buffer_trains(dqn, tmp_path, kind):
    from diskreplay.interop import rllib

    algorithms = []
    for buffer in ({"type": getattr(rllib, f"Disk{kind}"), "path": tmp_path / "store"}, {"type": kind}):
        algorithms.append(dqn(buffer, 300, n_step=3))  # which seeds torch's generator
        assert algorithms[-1].train()["env_runners"]["num_env_steps_sampled_lifetime"] >= 300
    ours, theirs = (each.learner_group.get_weights()["default_policy"] for each in algorithms)
    assert len(ours) == len(theirs) > 5
    for name, value in theirs.items():
        assert np.array_equal(ours[name], value), name
    ours, theirs = (each.local_replay_buffer for each in algorithms)
    ours.store.refresh()
    assert len(ours.store) == len(ours) == len(theirs)


def test_dqn_learns_and_goes_on_where_it_was_saved(dqn, tmp_path):
    buffer = {"type": "diskreplay.interop.rllib.DiskPrioritizedEpisodeReplayBuffer", "path": tmp_path / "store"}
    algorithm, returns = dqn(buffer, 400), []
    while len(returns) < 10 and max(returns, default=0) < 50:
        returns.append(algorithm.train()["env_runners"]["episode_return_mean"])
    assert max(returns) >= 50, returns
    state = algorithm.local_replay_buffer.get_state()
    steps = len(algorithm.local_replay_buffer)
    algorithm.local_replay_buffer.close()
    again = dqn(buffer, 100)
    assert len(again.local_replay_buffer) == steps
    again.local_replay_buffer.set_state(state)
    again.train()
    assert len(again.local_replay_buffer) > steps


def test_ray_reads_a_dataset(tmp_path):
    pytest.importorskip("ray.data", reason="needs ray[data]")
    ray.data.DataContext.get_current().enable_progress_bars = False
    schema, least = dr.Schema(obs=dr.Field((2, 3), "uint8"), action=dr.Field((), "int64")), 300
    rng = np.random.default_rng(0)
    with dr.create(tmp_path / "store", schema, segment_steps=200) as store, store.writer() as writer:
        for i in range(40):
            obs = rng.integers(0, 255, (11, 2, 3), np.uint8)
            writer.append_episode(obs, np.arange(10), np.full(10, i), terminated=True)
        store.refresh()
        dataset = store.to_ray_dataset(where=lambda episode: episode.total_reward >= least, fields=["...", "next_obs"])
        batches = list(dataset.iter_batches(batch_size=32))
        found = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        order, wanted = found["id"].argsort(), store.to_numpy()
        assert len(order) == 100
        for name in ("id", "episode", "step", "obs", "action", "reward", "terminated", "truncated", "time"):
            np.testing.assert_array_equal(found[name][order], wanted[name][300:], strict=True)
        after = np.concatenate([episode.obs[1:] for episode in store.episodes[30:]])
        np.testing.assert_array_equal(found["next_obs"][order], after)
