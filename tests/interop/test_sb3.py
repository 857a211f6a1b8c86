"""Buffers of Stable-Baselines3 in a store: its own buffer's batches and networks, and what outlives a process."""

import copy
import pickle
import re
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import diskreplay as dr
from tests.testing.support import REPOSITORY

pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")

from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from diskreplay.interop.sb3 import DiskDictReplayBuffer, DiskHerReplayBuffer, DiskReplayBuffer

pytestmark = pytest.mark.usefixtures("one_thread")

SPACES = {
    "box": spaces.Box(-9, 9, (3,), np.float32),
    "float64": spaces.Box(-9, 9, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (2, 4, 4), np.uint8),
    "discrete": spaces.Discrete(7),
    "multidiscrete": spaces.MultiDiscrete([3, 4]),
    "multibinary": spaces.MultiBinary(5),
    "dict": spaces.Dict({"place": spaces.Box(-9, 9, (3,), np.float32), "room": spaces.Discrete(5)}),
}
SPACES_OF_BOX = SPACES["box"], SPACES["discrete"]
FIELDS = ("observations", "actions", "next_observations", "dones", "rewards", "discounts")


@pytest.fixture
def made(tmp_path):
    """Make buffers, which are closed behind the test."""
    buffers = []

    def make(kind, *args, **kwargs):
        kwargs = {"path": tmp_path / "store", **kwargs}
        buffers.append(kind(*args, device="cpu", **kwargs))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


class Stream:
    """Steps of several environments, as a vector of Stable-Baselines3 gives them, with time limits and terminations."""

    def __init__(self, obs_space, action_space, n_envs, seed=0, end=0.12):
        self.obs_space, self.action_space, self.n_envs, self.end = obs_space, action_space, n_envs, end
        self.rng = np.random.default_rng(seed)
        for number, space in enumerate((obs_space, action_space)):
            space.seed(seed + number)
        self.obs = self.some(obs_space)

    def some(self, space):
        if isinstance(space, spaces.Dict):
            return {key: self.some(part) for key, part in space.items()}
        return np.stack([np.asarray(space.sample()) for _ in range(self.n_envs)])

    def step(self):
        """Return the arguments of `add`."""
        ended, timeout = self.rng.random((2, self.n_envs)) < [[self.end], [0.5]]
        obs, next_obs, after = self.obs, self.some(self.obs_space), self.some(self.obs_space)
        self.obs = map_obs(lambda x, y: np.where(ended.reshape(-1, *[1] * (x.ndim - 1)), y, x), next_obs, after)
        infos = [{"TimeLimit.truncated": bool(t)} if e else {} for e, t in zip(ended, timeout, strict=True)]
        return obs, next_obs, self.some(self.action_space), self.rng.normal(size=self.n_envs), ended, infos


def map_obs(f, *obs):
    if isinstance(obs[0], dict):
        return {key: f(*(each[key] for each in obs)) for key in obs[0]}
    return f(*obs)


def copied(step):
    return [map_obs(np.copy, value) if not isinstance(value, list) else value for value in step]


def drawn(buffer, seed, size=24, **kwargs):
    np.random.seed(seed)
    return buffer.sample(size, **kwargs), np.random.random()


def assert_same(ours, theirs):
    """Two draws are the same, bit for bit, and leave the generator in the same state; return how much was compared."""
    compared = 0
    assert type(ours[0]) is type(theirs[0])
    assert ours[1] == theirs[1]
    for name in FIELDS:
        a, b = getattr(ours[0], name), getattr(theirs[0], name)
        pairs = [(a[key], b[key]) for key in b] if isinstance(b, dict) else [(a, b)]
        for x, y in pairs:
            if y is None:
                assert x is None
                continue
            assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device), name
            assert torch.equal(x, y), name
            compared += x.numel()
    return compared


def follow(ours, theirs, stream, steps, every=7, **kwargs):
    """Add the same steps to both and compare batches now and then; return how many numbers were compared."""
    compared = 0
    for t in range(steps):
        step = stream.step()
        ours.add(*copied(step))
        theirs.add(*copied(step))
        assert (ours.pos, ours.full, ours.size()) == (theirs.pos, theirs.full, theirs.size())
        if t % every == 0 or t == steps - 1:
            compared += assert_same(drawn(ours, t, **kwargs), drawn(theirs, t, **kwargs))
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", SPACES)
def test_batches_are_those_of_its_own_buffer(made, space, n_envs, timeouts):
    kinds = (DiskDictReplayBuffer, DictReplayBuffer) if space == "dict" else (DiskReplayBuffer, ReplayBuffer)
    arguments = 100, SPACES[space], spaces.Box(-1, 1, (2,), np.float64)
    kwargs = {"n_envs": n_envs, "handle_timeout_termination": timeouts}
    ours, theirs = made(kinds[0], *arguments, **kwargs), kinds[1](*arguments, device="cpu", **kwargs)
    assert isinstance(ours, kinds[1])
    stream = Stream(SPACES[space], arguments[2], n_envs)
    assert follow(ours, theirs, stream, 250 // n_envs) > 1500
    assert ours.full


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary", "float64"])
def test_actions_of_every_space_are_those_of_its_own_buffer(made, action):
    arguments = 60, SPACES["box"], SPACES[action]
    ours, theirs = made(DiskReplayBuffer, *arguments, n_envs=2), ReplayBuffer(*arguments, device="cpu", n_envs=2)
    assert follow(ours, theirs, Stream(*arguments[1:], 2), 80) > 1500


@pytest.mark.parametrize("n_envs", [1, 3])
def test_observations_of_float64_are_kept_as_the_space_says(made, n_envs):
    """As CleanRL's scripts of continuous control have it, which set the dtype of the space of MuJoCo's environments."""
    space, action = spaces.Box(-9, 9, (2, 2), np.float64), spaces.Box(-1, 1, (2,), np.float32)
    stream = Stream(copy.deepcopy(space), action, n_envs)
    space.dtype = np.float32
    kwargs = {"n_envs": n_envs, "handle_timeout_termination": False}
    ours = made(DiskReplayBuffer, 60, space, action, **kwargs)
    assert follow(ours, ReplayBuffer(60, space, action, device="cpu", **kwargs), stream, 80) > 1500
    assert ours.store.schema.obs.dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [2, 5])
def test_returns_over_several_steps_are_those_of_its_own_buffer(made, n_steps, n_envs, timeouts):
    arguments = 90, SPACES["box"], SPACES["discrete"]
    kwargs = {"n_envs": n_envs, "handle_timeout_termination": timeouts, "n_steps": n_steps, "gamma": 0.9}
    ours, theirs = made(DiskReplayBuffer, *arguments, **kwargs), NStepReplayBuffer(*arguments, device="cpu", **kwargs)
    assert follow(ours, theirs, Stream(*arguments[1:], n_envs, end=0.3), 240 // n_envs) > 1500


class Walk(gym.Env):
    """Observations that vary in scale, so that their statistics matter."""

    action_space = spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), float(self.np_random.normal(3)), bool(self.np_random.random() < 0.1), False, {}

    def _obs(self):
        def one(space):
            return self.np_random.normal(2, 5, space.shape).astype(space.dtype)

        space = self.observation_space
        return {key: one(part) for key, part in space.items()} if isinstance(space, spaces.Dict) else one(space)


BOX = SPACES["box"]


@pytest.mark.parametrize(
    ("ours", "theirs", "space", "kwargs"),
    [
        (DiskReplayBuffer, ReplayBuffer, BOX, {}),
        (DiskReplayBuffer, NStepReplayBuffer, BOX, {"n_steps": 3}),
        (DiskDictReplayBuffer, DictReplayBuffer, spaces.Dict({"a": BOX, "b": BOX}), {}),
    ],
)
def test_batches_are_normalized_as_they_are_sampled(made, ours, theirs, space, kwargs):
    env = VecNormalize(DummyVecEnv([lambda: Walk(space)] * 2))
    arguments = 100, space, Walk.action_space
    ours = made(ours, *arguments, n_envs=2, **kwargs)
    theirs = theirs(*arguments, device="cpu", n_envs=2, **kwargs)
    env.seed(0)
    env.reset()
    compared = 0
    for t in range(80):
        obs, action = env.get_original_obs(), np.array([0, 1])
        _, _, done, infos = env.step(action)
        step = obs, env.get_original_obs(), action, env.get_original_reward(), done, infos
        ours.add(*copied(step))
        theirs.add(*copied(step))
        if t % 9 == 8:
            compared += assert_same(drawn(ours, t, env=env), drawn(theirs, t, env=env))
    assert compared > 1500


# --- training --------------------------------------------------------------------------------------------------------


def learn(algorithm, env, buffer, steps, seed, path=None, policy="MlpPolicy", **kwargs):
    """Train, and return the model."""
    kwargs = copy.deepcopy(kwargs)  # algorithms add to them
    if buffer is not None:
        kwargs["replay_buffer_class"] = buffer
        kwargs["replay_buffer_kwargs"] = {**kwargs.get("replay_buffer_kwargs", {}), "path": path}
    return algorithm(policy, env, seed=seed, device="cpu", **kwargs).learn(steps)


def weights(model):
    return {name: value.clone() for name, value in model.policy.state_dict().items()}


def assert_equal_weights(one, other):
    one, other = weights(one), weights(other)
    assert one.keys() == other.keys()
    assert len(one) > 5
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


DQN = {"learning_starts": 100, "train_freq": 4, "target_update_interval": 200, "policy_kwargs": {"net_arch": [32]}}
SAC = {"learning_starts": 100, "batch_size": 64, "policy_kwargs": {"net_arch": [32, 32]}}


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize(
    ("algorithm", "env", "seed", "kwargs"),
    [
        ("DQN", "CartPole-v1", 0, {**DQN, "buffer_size": 600}),
        ("DQN", "CartPole-v1", 1, {**DQN, "buffer_size": 10_000}),
        ("SAC", "Pendulum-v1", 0, {**SAC, "buffer_size": 300}),
        ("TD3", "Pendulum-v1", 0, {**SAC, "buffer_size": 300}),
    ],
)
def test_networks_are_those_that_its_own_buffer_trains(tmp_path, algorithm, env, seed, kwargs):
    import stable_baselines3

    algorithm, steps = getattr(stable_baselines3, algorithm), 1200 if algorithm == "DQN" else 400
    ours = learn(algorithm, env, DiskReplayBuffer, steps, seed, tmp_path / "store", **kwargs)
    assert_equal_weights(ours, learn(algorithm, env, None, steps, seed, **kwargs))
    ours.replay_buffer.close()


@pytest.mark.slow
def test_networks_are_those_of_n_steps_and_of_several_environments(tmp_path):
    from stable_baselines3 import DQN as Algorithm
    from stable_baselines3.common.env_util import make_vec_env

    kwargs = {**DQN, "buffer_size": 500}
    more = {"replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.99}}
    env = make_vec_env("CartPole-v1", 4, seed=0)
    ours = learn(Algorithm, env, DiskReplayBuffer, 1600, 0, tmp_path / "store", **kwargs, **more)
    theirs = learn(Algorithm, make_vec_env("CartPole-v1", 4, seed=0), None, 1600, 0, **kwargs, n_steps=3)
    assert_equal_weights(ours, theirs)
    ours.replay_buffer.close()


def cleanrl_dqn(make_buffer, steps, seed):
    """CleanRL's loop of DQN, on two environments; return the network."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=15)] * 2,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    network = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    rb = make_buffer(
        500,
        envs.single_observation_space,
        envs.single_action_space,
        torch.device("cpu"),
        n_envs=2,
        handle_timeout_termination=False,
    )
    obs, _ = envs.reset(seed=seed)
    for step in range(steps):
        actions = rng.integers(0, 2, 2)
        if step > 50:
            actions = np.where(rng.random(2) < 0.3, actions, network(torch.Tensor(obs)).argmax(1).numpy())
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for index, truncated in enumerate(truncations):
            if truncated:
                real_next_obs[index] = infos["final_obs"][index]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
        if step > 50 and step % 2 == 0:
            data = rb.sample(32)
            with torch.no_grad():
                target_max, _ = network(data.next_observations).max(dim=1)
                target = data.rewards.flatten() + 0.99 * target_max * (1 - data.dones.flatten())
            loss = torch.nn.functional.mse_loss(target, network(data.observations).gather(1, data.actions).squeeze())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    envs.close()
    return network, rb


@pytest.mark.slow
def test_cleanrls_loop_trains_the_same_network():
    ours, buffer = cleanrl_dqn(DiskReplayBuffer, 600, 0)
    theirs, _ = cleanrl_dqn(ReplayBuffer, 600, 0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    # Truncations were not told, and are where observations did not go on.
    buffer.store.refresh()
    assert any(episode.cut for episode in buffer.store.episodes)
    buffer.close()


def test_a_store_in_place_of_a_path_is_opened_by_its_path(made, tmp_path):
    stream = Stream(*SPACES_OF_BOX, 1)
    made(DiskReplayBuffer, 100, *SPACES_OF_BOX).add(*stream.step())
    with dr.open(tmp_path / "store") as store:
        buffer = made(DiskReplayBuffer, 100, *SPACES_OF_BOX, path=store)
        buffer.add(*stream.step())
        assert buffer.size() == 2
        assert buffer.store.path == store.path
        assert store.refresh() == 1


@pytest.mark.parametrize("n_envs", [1, 2])
def test_done_is_a_bool_or_0_or_1(made, n_envs):
    buffer, stream = made(DiskReplayBuffer, 100, *SPACES_OF_BOX, n_envs=n_envs), Stream(*SPACES_OF_BOX, n_envs)
    *before, _, infos = stream.step()
    for wrong in (0.5, 2, np.nan):
        with pytest.raises(dr.SchemaError, match=f"^done is one truth value a step, a bool or 0 or 1, not {wrong}$"):
            buffer.add(*before, np.full(n_envs, wrong), infos)
    buffer.add(*before, np.ones(n_envs, np.float32), infos)
    assert (buffer.size(), buffer.dones[0].tolist()) == (1, [1] * n_envs)


@pytest.mark.parametrize("kind", [DiskReplayBuffer, DiskDictReplayBuffer])
def test_a_closed_buffer_names_itself(made, kind):
    space = SPACES["dict" if kind is DiskDictReplayBuffer else "box"]
    relabel = {"relabel": None} if kind is DiskDictReplayBuffer else {}
    buffer, stream = made(kind, 100, space, SPACES["discrete"], **relabel), Stream(space, SPACES["discrete"], 1)
    buffer.add(*stream.step())
    buffer.close()
    key = {"room": 0} if kind is DiskDictReplayBuffer else {}
    column = buffer.actions if not key else buffer.observations["room"]
    calls = [lambda: buffer.sample(1), lambda: buffer.add(*stream.step()), buffer.reset, lambda: column[0, 0]]
    for call in calls:
        with pytest.raises(dr.Closed, match=f"^this {kind.__name__} is closed; make another$"):
            call()


class Reach(gym.Env):
    """A point on a line whose goal is another one; the reward is 0 there and -1 elsewhere."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    observation_space = spaces.Dict(
        {k: spaces.Box(-9, 9, (1,), np.float32) for k in ("observation", "achieved_goal", "desired_goal")}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.goal = np.zeros(1, np.float32), self.np_random.uniform(-3, 3, 1).astype(np.float32)
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.at, self.t = np.clip(self.at + action, -9, 9).astype(np.float32), self.t + 1
        reward = float(self.compute_reward(self.at, self.goal, {}))
        return self._obs(), reward, False, self.t == 10, {}

    def compute_reward(self, achieved, desired, info):
        return -(np.abs(achieved - desired)[..., 0] > 0.5).astype(np.float32)

    def _obs(self):
        return {"observation": self.at.copy(), "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}


@pytest.mark.slow(turns=4)
def test_hindsight_replaces_goals_and_rewards_and_trains(tmp_path):
    from stable_baselines3 import SAC as Algorithm

    path = tmp_path / "store"
    kwargs = {**SAC, "buffer_size": 5000, "replay_buffer_kwargs": {"n_sampled_goal": 3}}
    model = learn(Algorithm, Reach(), DiskHerReplayBuffer, 1500, 0, path, "MultiInputPolicy", **kwargs)
    buffer = model.replay_buffer
    batch, _ = drawn(buffer, 0, 4000)
    obs, next_obs = batch.observations, batch.next_observations
    assert torch.equal(obs["desired_goal"], next_obs["desired_goal"])
    reward = -((next_obs["achieved_goal"] - obs["desired_goal"]).abs() > 0.5).float()
    assert torch.equal(batch.rewards, reward)
    assert not batch.dones.any()
    goals = {float(episode.obs["desired_goal"][0, 0]) for episode in buffer.store.episodes}
    relabelled = np.mean([goal not in goals for goal in obs["desired_goal"].flatten().tolist()])
    assert abs(relabelled - 0.75) < 0.03
    assert torch.equal(drawn(buffer, 0, 4000)[0].rewards, batch.rewards) is False  # it goes on from its own seed

    # A buffer that was loaded gets the environment, and goes on.
    model.save_replay_buffer(tmp_path / "buffer")
    buffer.close()
    model.load_replay_buffer(tmp_path / "buffer")
    model.learn(300, reset_num_timesteps=False)
    assert model.replay_buffer.pos == 1800
    env, reached = Reach(), 0
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        for _ in range(10):
            obs, reward, *_ = env.step(model.predict(obs, deterministic=True)[0])
        reached += reward == 0
    assert reached >= 15
    model.replay_buffer.close()


def test_goals_are_replaced_with_rewards_of_a_function(made):
    reward = Reach().compute_reward
    space, action = Reach.observation_space, Reach.action_space
    hindsight = dr.Hindsight("final", 1.0, lambda achieved, desired: reward(achieved, desired, {}))
    buffer = made(DiskDictReplayBuffer, 50, space, action, relabel=hindsight)
    with pytest.raises(dr.NotEnoughData):
        buffer.sample(4)
    stream = Stream(space, action, 1)
    for _ in range(40):
        buffer.add(*stream.step())
    batch, _ = drawn(buffer, 0, 200)
    finals = {float(e.obs["achieved_goal"][-1, 0]) for e in buffer.store.episodes if e.ended != "open"}
    assert len(finals) > 2
    assert set(batch.observations["desired_goal"].flatten().tolist()) == finals


# --- what outlives a process -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("steps", [30, 50, 75])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_pickle_names_the_store_and_goes_on_as_its_own_buffer_does(made, n_envs, steps):
    arguments, kwargs = (50 * n_envs, SPACES["box"], SPACES["discrete"]), {"n_envs": n_envs}
    ours, theirs = made(DiskReplayBuffer, *arguments, **kwargs), ReplayBuffer(*arguments, device="cpu", **kwargs)
    stream = Stream(*arguments[1:], n_envs)
    follow(ours, theirs, stream, steps)
    saved = pickle.dumps(ours)
    assert len(saved) < 5000
    # What is added behind the pickle is there as well.
    compared = follow(ours, theirs, stream, 9)
    loaded = pickle.loads(saved)
    assert (loaded.pos, loaded.full) == (theirs.pos, theirs.full)
    compared += assert_same(drawn(loaded, 5), drawn(theirs, 5))
    compared += follow(loaded, theirs, stream, 70)
    assert compared > 1500
    loaded.close()


def test_returns_over_several_steps_end_where_a_buffer_was_loaded(made):
    arguments, kwargs = (100, SPACES["box"], SPACES["discrete"]), {"n_envs": 2, "n_steps": 4, "gamma": 0.9}
    ours, theirs = made(DiskReplayBuffer, *arguments, **kwargs), NStepReplayBuffer(*arguments, device="cpu", **kwargs)
    stream = Stream(*arguments[1:], 2, end=0.2)
    follow(ours, theirs, stream, 70)
    ours = made(DiskReplayBuffer, *arguments, **kwargs)
    assert (ours.pos, ours.full) == (0, True)
    # Its oldest step is at position 0, and the newest one ends its episode.
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        setattr(theirs, name, np.roll(getattr(theirs, name), -theirs.pos, axis=0))
    theirs.pos, going_on = 0, theirs.dones[-1] == 0
    theirs.dones[-1, going_on] = theirs.timeouts[-1, going_on] = 1
    stream.obs = stream.some(stream.obs_space)
    assert follow(ours, theirs, stream, 90) > 1500


@pytest.mark.parametrize("n_envs", [1, 2, 4])
def test_a_store_that_other_environments_wrote_fills_the_buffer(made, n_envs):
    arguments = 60, SPACES["box"], SPACES["discrete"]
    first = made(DiskReplayBuffer, *arguments, n_envs=3)
    stream, rewards = Stream(*arguments[1:], 3), []
    for _ in range(17):
        step = stream.step()
        rewards.extend(step[3].astype(np.float32))
        first.add(*step)
    first.close()
    buffer = made(DiskReplayBuffer, *arguments, n_envs=n_envs, n_steps=3)
    kept = 51 // n_envs * n_envs
    assert buffer.pos == 51 // n_envs
    np.testing.assert_array_equal(np.sort(buffer.rewards[: buffer.pos], axis=None), np.sort(rewards[51 - kept :]))
    stream = Stream(*arguments[1:], n_envs, seed=1)
    for _ in range(100):
        buffer.add(*stream.step())
        assert drawn(buffer, 0, 200)[0].rewards.isfinite().all()
    assert buffer.full


TRAIN = """
import sys
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from diskreplay.interop.sb3 import DiskReplayBuffer

class Report(BaseCallback):
    def _on_step(self):
        print(self.model.replay_buffer.pos, flush=True)
        return True

torch.set_num_threads(1)
kwargs = dict(path=sys.argv[1])
model = DQN("MlpPolicy", "CartPole-v1", seed=0, replay_buffer_class=DiskReplayBuffer, replay_buffer_kwargs=kwargs,
            buffer_size=100_000, learning_starts=50, device="cpu")
model.learn(1_000_000, callback=Report())
"""


@pytest.mark.slow(turns=4)
def test_a_run_that_was_killed_goes_on_with_all_that_was_added(tmp_path):
    from stable_baselines3 import DQN as Algorithm

    path = tmp_path / "store"
    command = [sys.executable, "-c", TRAIN, path]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        added = 0
        while added < 1000:
            added = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        added = [added, *map(int, process.stdout.read().split())][-1]
    kwargs = {**DQN, "buffer_size": 100_000}
    model = learn(Algorithm, "CartPole-v1", DiskReplayBuffer, 400, 1, path, **kwargs)
    buffer = model.replay_buffer
    # The last line may be of a step whose successor was added without a line.
    assert buffer.pos - 400 in (added, added + 1)
    with dr.open(path) as store:
        assert len(store) == buffer.pos
        assert store.verify(deep=True) == []
    model.save(tmp_path / "model")
    buffer.close()
    loaded = Algorithm.load(tmp_path / "model", env=model.env, device="cpu")
    assert loaded.replay_buffer.pos == buffer.pos
    loaded.learn(200, reset_num_timesteps=False)
    assert loaded.replay_buffer.pos == buffer.pos + 200
    loaded.replay_buffer.close()


@pytest.mark.slow
def test_a_run_that_is_saved_and_loaded_is_that_of_its_own_buffer(tmp_path):
    from stable_baselines3 import DQN as Algorithm

    models = {}
    for buffer in (DiskReplayBuffer, None):
        model = learn(Algorithm, "CartPole-v1", buffer, 700, 0, tmp_path / "store", **DQN, buffer_size=500)
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "buffer")
        if buffer is not None:
            assert (tmp_path / "buffer.pkl").stat().st_size < 5000
            model.replay_buffer.close()
        model = Algorithm.load(tmp_path / "model", env=gym.make("CartPole-v1"), device="cpu")
        old = model.replay_buffer
        model.load_replay_buffer(tmp_path / "buffer")
        if buffer is not None:
            old.close()
        model.set_random_seed(3)
        models[buffer] = model.learn(400, reset_num_timesteps=False)
    assert_equal_weights(*models.values())
    models[DiskReplayBuffer].replay_buffer.close()


def test_a_model_is_loaded_where_its_store_is_not_and_nothing_is_made_there(made, tmp_path):
    buffer = made(DiskReplayBuffer, 50, SPACES["box"], SPACES["discrete"])
    assert (buffer.pos, buffer.size()) == (0, 0)
    assert not (tmp_path / "store").exists()


def test_a_pickle_of_a_store_that_is_gone_says_so(made, tmp_path):
    buffer = made(DiskReplayBuffer, 50, SPACES["box"], SPACES["discrete"])
    buffer.add(*Stream(*SPACES_OF_BOX, 1).step())
    saved = pickle.dumps(buffer)
    buffer.close()
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(dr.StoreNotFound, match=re.escape(f"the store of this buffer is not at {tmp_path / 'store'}")):
        pickle.loads(saved)
    dr.create(tmp_path / "store", dr.open(tmp_path / "moved").schema, capacity=50).close()
    with pytest.raises(dr.StoreNotFound, match="move it back there"):
        pickle.loads(saved)


def test_a_temporary_folder_goes_with_the_buffer_and_cannot_be_pickled(made):
    buffer = made(DiskReplayBuffer, 50, *SPACES_OF_BOX, path=None)
    buffer.add(*Stream(*SPACES_OF_BOX, 1).step())
    folder = buffer.store.path
    assert folder.exists()
    batch = buffer.sample(4)
    with pytest.raises(ValueError, match="temporary folder"):
        pickle.dumps(buffer)
    buffer.close()
    assert not folder.exists()
    assert batch.observations.shape == (4, 3)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_an_observation_that_does_not_go_on_cuts_the_episode_without_a_word(made, n_envs):
    buffer = made(DiskReplayBuffer, 45 * n_envs, *SPACES_OF_BOX, n_envs=n_envs, n_steps=3)
    stream = Stream(*SPACES_OF_BOX, n_envs, end=0.0)
    for t in range(30):
        if t in (10, 20):
            stream.obs[0] = stream.some(stream.obs_space)[0]  # as by a reset
        buffer.add(*stream.step())
    buffer.store.refresh()
    cut, whole = [(10, False), (10, True), (10, True)], [(30, False)] * (n_envs - 1)
    assert sorted((len(episode), episode.cut) for episode in buffer.store.episodes) == cut + whole
    assert np.flatnonzero(buffer.dones[:, 0] * buffer.timeouts[:, 0]).tolist() == [9, 19]
    assert not buffer.dones[:, 1:].any()
    assert not buffer.sample(100).dones.any()


def test_what_is_at_a_position_is_an_array(made):
    ours, theirs = made(DiskReplayBuffer, 50, *SPACES_OF_BOX, n_envs=2), ReplayBuffer(50, *SPACES_OF_BOX, "cpu", 2)
    follow(ours, theirs, Stream(*SPACES_OF_BOX, 2), 40)
    for name in ("observations", "next_observations", "actions"):
        for index in (3, slice(2, 9), (slice(None), 1), (np.array([4, 1]), np.array([0, 1]))):
            np.testing.assert_array_equal(getattr(ours, name)[index], getattr(theirs, name)[index])
    np.testing.assert_array_equal(ours.rewards, theirs.rewards)


def test_a_buffer_shows_where_its_steps_are_and_how_many_there_are(made, tmp_path):
    buffer = made(DiskReplayBuffer, 90, *SPACES_OF_BOX, n_envs=2)
    stream = Stream(*SPACES_OF_BOX, 2)
    for _ in range(3):
        buffer.add(*stream.step())
    assert repr(buffer) == f"DiskReplayBuffer({str(tmp_path / 'store')!r}, size=3, n_envs=2)"


def test_reset_forgets_every_step(made):
    ours, theirs = made(DiskReplayBuffer, 50, *SPACES_OF_BOX), ReplayBuffer(50, *SPACES_OF_BOX, "cpu")
    stream = Stream(*SPACES_OF_BOX, 1)
    follow(ours, theirs, stream, 30)
    ours.reset()
    theirs.reset()
    assert follow(ours, theirs, stream, 60) > 1000
    ours.close()
    again = made(DiskReplayBuffer, 50, *SPACES_OF_BOX)
    assert again.full
    again.reset()
    assert len(again.store) == 0


def test_bad_arguments_are_refused(made, tmp_path):
    space, action = SPACES_OF_BOX
    with pytest.raises(ValueError, match="must not be a Dict: take DiskDictReplayBuffer for Dict"):
        DiskReplayBuffer(50, SPACES["dict"], action)
    with pytest.raises(ValueError, match="n_steps must be at least 1, not 0"):
        DiskReplayBuffer(50, space, action, n_steps=0)
    with pytest.raises(ValueError, match="must be a Dict, not"):
        DiskDictReplayBuffer(50, space, action)
    with pytest.raises(ValueError, match="n_steps must be 1 with Dict observations, not 2"):
        DiskDictReplayBuffer(50, SPACES["dict"], action, n_steps=2)
    goals = Reach.observation_space
    with pytest.raises(ValueError, match="copy_info_dict must be False"):
        DiskHerReplayBuffer(50, goals, action, None, copy_info_dict=True)
    with pytest.raises(ValueError, match='strategy must be "future", "final" or "episode", not \'random\''):
        DiskHerReplayBuffer(50, goals, action, None, goal_selection_strategy="random")
    buffer = made(DiskReplayBuffer, 50, space, action)
    with pytest.raises(dr.SchemaError):
        buffer.add(np.zeros((1, 4)), np.zeros((1, 3)), np.zeros(1, int), np.zeros(1), np.zeros(1), [{}])
    assert buffer.size() == 0
    with pytest.raises(dr.StoreExists, match="keeps 50 steps, fewer than buffer_size=60"):
        DiskReplayBuffer(60, space, action, path=tmp_path / "store")
    with pytest.raises(dr.StoreExists, match="another schema"):
        DiskReplayBuffer(50, action, action, path=tmp_path / "store")
