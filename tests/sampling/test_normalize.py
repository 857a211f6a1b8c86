"""Observations and rewards are normalised as VecNormalize does, by statistics of the store."""

import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import diskreplay as dr

SCHEMA = dr.Schema(
    obs={"state": (dr.Field((3,), "float32"), dr.Field((), "float64")), "count": dr.Field((), "int64")},
    action=dr.Field((), "int64"),
    extra={"bonus": dr.Field((), "float32"), "value": dr.Field((), "float32")},
)
EPSILON, GAMMA = 1e-8, 0.99


def append(writer: Any, rng: np.random.Generator, steps: int) -> None:
    """Append an episode of observations far from 0, whose last, which is no step's, is further out than the clip."""
    first = rng.normal(50, 3, (steps + 1, 3)).astype(np.float32)
    first[-1] += 500
    obs = {"state": (first, rng.normal(-7, 0.1, steps + 1)), "count": rng.integers(0, 99, steps + 1)}
    reward, bonus = rng.normal(1, 2, (2, steps)).astype(np.float32)
    ends = {"terminated": bool(rng.random() < 0.5), "truncated": True}
    zeros = np.zeros(steps, np.float32)
    writer.append_episode(obs, np.arange(steps), reward, **ends, bonus=bonus, value=zeros)


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for steps in (40, 3, 70, 25):
            append(writer, rng, steps)
        writer.flush()
        store.refresh()
        yield store


def plainly(store: dr.Store, weights: dict[str, float]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return mean and variance of each leaf over all steps, and of returns, by a loop over episodes."""
    values: dict[str, list[Any]] = {"obs/state/0": [], "obs/state/1": [], "obs/count": [], "return": []}
    for episode in store.episodes:
        running = 0.0
        for t in range(len(episode)):
            values["obs/state/0"].append(episode.obs["state"][0][t].astype(np.float64))
            values["obs/state/1"].append(float(episode.obs["state"][1][t]))
            values["obs/count"].append(float(episode.obs["count"][t]))
            running = running * GAMMA + sum(weight * float(episode[name][t]) for name, weight in weights.items())
            values["return"].append(running)
    return {name: (np.mean(found, 0), np.var(found, 0)) for name, found in values.items()}


def scaled(value: Any, mean: Any, var: Any, clip: float = 10.0) -> np.ndarray:
    return np.clip((np.asarray(value) - mean) / np.sqrt(var + EPSILON), -clip, clip)


@pytest.mark.usefixtures("threads_make_all")
@pytest.mark.slow
@pytest.mark.parametrize("view", [dr.Transitions(n_step=3), dr.Sequences(length=8, overlap=2)], ids=str)
@pytest.mark.parametrize("ahead", [0, 3])
def test_batches_are_normalised_by_all_steps(store: dr.Store, view: Any, ahead: int) -> None:
    expected, compared, clipped = plainly(store, {"reward": 1.0}), 0, 0
    transform = dr.Normalize(reward=True)
    with dr.Sampler(store, view, batch_size=32, seed=1, prefetch=ahead, transform=transform) as sampler:
        for _ in range(5):
            batch = sampler.sample()
            stored = sampler.gather(batch.index)
            for name in ("obs", "next_obs"):
                for number, dtype in ((0, torch.float32), (1, torch.float64)):
                    found, raw = batch[name]["state"][number], stored[name]["state"][number]
                    assert found.dtype is dtype
                    exact = scaled(raw, *expected[f"obs/state/{number}"])
                    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-5)
                    compared += found.numel()
                    clipped += int((found.abs() == 10).sum())
                assert torch.equal(batch[name]["count"], stored[name]["count"])
            np.testing.assert_allclose(batch.reward, scaled(stored.reward, 0.0, expected["return"][1]), rtol=1e-6)
    assert compared >= 5 * 32 * 8
    assert clipped > 10
    for leaf in ("obs/state/0", "obs/state/1", "return"):
        moments = transform.moments[leaf]
        assert moments.count == 138
        for found, exact in zip(moments[1:], expected[leaf], strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-10)


def test_leaves_weights_and_clips_are_as_they_are_named(store: dr.Store) -> None:
    weights = {"reward": 1.0, "bonus": 2.0}
    expected = plainly(store, weights)
    transform = dr.Normalize(["count"], weights, clip_obs=1.5, clip_reward=None)
    view = dr.Transitions(reward=weights)
    with dr.Sampler(store, view, batch_size=64, seed=1, transform=transform) as sampler:
        batch = sampler.sample()
        stored = sampler.gather(batch.index)
        assert batch.obs["count"].dtype is torch.float32
        np.testing.assert_allclose(
            batch.obs["count"], scaled(stored.obs["count"], *expected["obs/count"], 1.5), rtol=1e-6
        )
        assert batch.obs["count"].abs().max() == 1.5
        np.testing.assert_allclose(batch.reward, scaled(stored.reward, 0.0, expected["return"][1], np.inf), rtol=1e-6)
        assert torch.equal(batch.obs["state"][0], stored.obs["state"][0])


def test_statistics_follow_the_store_until_they_are_frozen(store: dr.Store) -> None:
    transform, rng = dr.Normalize(reward=True), np.random.default_rng(1)
    with dr.Sampler(store, dr.Transitions(), seed=1, transform=transform) as sampler, store.writer() as writer:
        assert [moments.count for moments in transform.moments.values()] == [0, 0, 0]
        total = 138
        for steps in (5, 40, 1):
            sampler.sample()
            assert transform.moments["return"].count == total
            append(writer, rng, steps)
            total += steps
        before = transform.moments
        transform.frozen = True
        sampler.sample()
        assert transform.moments == before
        transform.frozen = False
        sampler.sample()
        assert transform.moments["return"].count == total == len(store)
        for leaf, exact in plainly(store, {"reward": 1.0}).items():
            if leaf != "obs/count":
                np.testing.assert_allclose(transform.moments[leaf].var, exact[1], rtol=1e-9)


def test_a_policy_normalises_as_batches_are(store: dr.Store) -> None:
    transform = dr.Normalize(reward=True, clip_obs=None, clip_reward=None)
    with dr.Sampler(store, dr.Transitions(), seed=1, transform=transform) as sampler:
        batch = sampler.sample()
        stored = sampler.gather(batch.index)
        tensors, arrays = transform.normalize_obs(stored.obs), transform.normalize_obs(stored.numpy()["obs"])
        for number in (0, 1):
            assert torch.equal(tensors["state"][number], batch.obs["state"][number])
            assert type(arrays["state"][number]) is np.ndarray
            np.testing.assert_array_equal(arrays["state"][number], batch.obs["state"][number])
            back = transform.unnormalize_obs(tensors)["state"][number]
            torch.testing.assert_close(back, stored.obs["state"][number], rtol=1e-5, atol=1e-4)
        assert torch.equal(transform.normalize_reward(stored.reward), batch.reward)
        np.testing.assert_array_equal(transform.normalize_reward(stored.reward.numpy()), batch.reward)
        torch.testing.assert_close(transform.unnormalize_reward(batch.reward), stored.reward)
        obs = store.episodes[0].obs
        one, plain = (transform.normalize_obs({"state": state}) for state in (obs["state"], tuple(obs["state"])))
        assert one["state"][0].shape == (41, 3)
        np.testing.assert_array_equal(plain["state"][0], one["state"][0])
        only_obs = dr.Normalize()
        assert only_obs.normalize_reward(5.0) == only_obs.unnormalize_reward(5.0) == 5.0


# --- VecNormalize ----------------------------------------------------------------------------------------------------


class Drift(gym.Env):
    """Observations and rewards of a random walk; episodes end at random, half of them by truncation."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.x = self.rng.normal(20, 1, 3)
        return self.x.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.x = self.x + self.rng.standard_normal(3) * (1, 5, 0.1)
        terminated, truncated = self.rng.random(2) < 0.03
        return self.x.astype(np.float32), float(self.x[0] + action[0]), bool(terminated), bool(truncated), {}


class Dicts(Drift):
    """The same in a dict."""

    observation_space = gym.spaces.Dict({"a": Drift.observation_space, "b": gym.spaces.Discrete(3)})

    def reset(self, **_: Any) -> Any:
        obs, info = super().reset()
        return {"a": obs, "b": 1}, info

    def step(self, action: np.ndarray) -> Any:
        obs, *rest = super().step(action)
        return {"a": obs, "b": 2}, *rest


def each(function: Callable[..., Any], *obs: Any) -> Any:
    return {key: function(*(one[key] for one in obs)) for key in obs[0]} if isinstance(obs[0], dict) else function(*obs)


def recorded(path: Path, env_type: type[Drift], steps: int = 300) -> tuple[Any, dr.Store, Any]:
    """Step a VecNormalize and store what its environments gave; return it, and its statistics before the last step."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    statistics = pytest.importorskip("stable_baselines3.common.running_mean_std")
    lanes = 4
    keys = ["a"] if env_type is Dicts else None
    peer = vec_env.VecNormalize(
        vec_env.DummyVecEnv([lambda seed=seed: env_type(seed) for seed in range(lanes)]), norm_obs_keys=keys
    )
    # By default it begins with a ten-thousandth of an observation of zeros.
    peer.obs_rms = each(lambda rms: statistics.RunningMeanStd(0.0, rms.mean.shape), peer.obs_rms)
    peer.ret_rms = statistics.RunningMeanStd(0.0, ())
    store = dr.create(path, dr.Schema.from_env(env_type(0)))
    rng = np.random.default_rng(0)
    with store.writer(num_envs=lanes) as writer:
        peer.reset()
        obs = each(np.copy, peer.get_original_obs())
        before = None
        for _ in range(steps):
            before = copy.deepcopy(peer.obs_rms)
            actions = rng.uniform(-1, 1, (lanes, 1)).astype(np.float32)
            _, _, dones, infos = peer.step(actions)
            truncated = np.array([info["TimeLimit.truncated"] for info in infos])
            fresh = each(np.copy, peer.get_original_obs())
            after = each(np.copy, fresh)
            for lane in np.flatnonzero(dones):
                # The wrapper gives final observations normalised; zeros do for a test of statistics.
                each(lambda rows, at=lane: rows.__setitem__(at, 0), after)
            writer.append(obs, actions, peer.get_original_reward(), dones & ~truncated, truncated, next_obs=after)
            obs = fresh
    store.refresh()
    return peer, store, before


def test_a_policy_without_a_store_normalises_by_a_loaded_state(store: dr.Store) -> None:
    made, alone, resumed = (dr.Normalize(reward=True) for _ in range(3))
    with dr.Sampler(store, dr.Transitions(), seed=1, transform=made) as sampler:
        stored = sampler.gather(sampler.sample().index).numpy()
        for use in alone.normalize_obs, alone.unnormalize_obs, alone.normalize_reward, alone.unnormalize_reward:
            with pytest.raises(dr.NotEnoughData, match="no statistics yet: give it to a sampler, or load a state"):
                use(stored["reward"])
        with pytest.raises(ValueError, match="not a state"):
            alone.load_state_dict({"frozen": True})
        with pytest.raises(ValueError, match="these are moments of .*'return'], and reward is False"):
            dr.Normalize().load_state_dict(made.state_dict())
        with pytest.raises(ValueError, match=r"these are moments of .*'return'], and reward is True, obs False"):
            dr.Normalize(False, reward=True).load_state_dict(made.state_dict())
        state = copy.deepcopy({**made.state_dict(), "not_finite": 7})
        alone.load_state_dict(state)
        for found in state["moments"].values():
            found["mean"][...] = np.nan  # the state is copied
        assert alone.stats() == {"steps_not_finite": 7}
        for name in "normalize_obs", "unnormalize_obs":
            found, expected = (getattr(one, name)(stored["obs"]) for one in (alone, made))
            for number in (0, 1):
                np.testing.assert_array_equal(found["state"][number], expected["state"][number])
                assert not np.array_equal(found["state"][number], stored["obs"]["state"][number])
        for name in "normalize_reward", "unnormalize_reward":
            found, expected = (getattr(one, name)(stored["reward"]) for one in (alone, made))
            np.testing.assert_array_equal(found, expected)
            assert not np.array_equal(found, stored["reward"])
        state = stored["obs"]["state"]
        for obs in {"position": state}, {"state": state[:1]}, {"state": (state[0][:, :2], state[1])}, state[0], state:
            for one, name in product((made, alone), ("normalize_obs", "unnormalize_obs")):
                with pytest.raises(
                    ValueError, match=r"^the observations have .*, and .* {'obs/state/0': \(3,\), 'obs/"
                ):
                    getattr(one, name)(obs)
    # A sampler of the same store continues from the state, and counts no step twice.
    resumed.load_state_dict(alone.state_dict())
    with dr.Sampler(store, dr.Transitions(), seed=1, transform=resumed) as sampler:
        sampler.sample()
    assert resumed.moments.keys() == made.moments.keys() == alone.moments.keys()
    assert all(found.count == made.moments[name].count for name, found in resumed.moments.items())


@pytest.mark.slow
@pytest.mark.parametrize("env_type", [Drift, Dicts])
def test_statistics_are_those_of_vecnormalize(tmp_store: Path, env_type: type[Drift]) -> None:
    peer, store, before = recorded(tmp_store, env_type)
    transform = dr.Normalize(reward=True)
    with store, dr.Sampler(store, dr.Transitions(), seed=0, transform=transform) as sampler:
        sampler.sample()
        assert len(store) == 1200
        assert store.num_episodes > 30
        rms, leaf = (before["a"], "obs/a") if env_type is Dicts else (before, "obs")
        for moments, other in ((transform.moments[leaf], rms), (transform.moments["return"], peer.ret_rms)):
            assert moments.count == other.count == 1200
            # It rounds the mean of each step's observations to float32.
            np.testing.assert_allclose(moments.mean, other.mean, rtol=1e-7)
            np.testing.assert_allclose(moments.var, other.var, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("env_type", [Drift, Dicts])
def test_statistics_of_a_vecnormalize_give_its_very_numbers(tmp_store: Path, env_type: type[Drift]) -> None:
    peer, store, _ = recorded(tmp_store, env_type)
    transform, compared = dr.Normalize.from_vecnormalize(peer), 0
    with store, dr.Sampler(store, dr.Transitions(), batch_size=128, seed=0, transform=transform) as sampler:
        for _ in range(5):
            batch = sampler.sample()
            stored = sampler.gather(batch.index).numpy()
            for name in ("obs", "next_obs"):
                found, expected = batch.numpy()[name], peer.normalize_obs(stored[name])
                for one, other in ((found["a"], expected["a"]),) if env_type is Dicts else ((found, expected),):
                    assert one.dtype == other.dtype
                    assert one.tobytes() == other.tobytes()
                    compared += one.size
            assert batch.reward.numpy().tobytes() == peer.normalize_reward(stored["reward"]).tobytes()
            back = peer.unnormalize_obs(batch.numpy()["obs"])
            each(
                lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5),
                transform.unnormalize_obs(batch.numpy()["obs"]),
                back,
            )
        assert transform.frozen
        assert transform.moments["return"].count == 1200  # the peer's, still
    assert compared == 5 * 2 * 128 * 3


def test_what_has_the_attributes_of_a_vecnormalize_is_taken_too(store: dr.Store) -> None:
    rms = SimpleNamespace(count=10.0, mean=1.5, var=4.0)
    source = SimpleNamespace(
        norm_obs=True, norm_reward=False, obs_rms={"count": rms}, ret_rms=rms, clip_obs=np.inf, clip_reward=10.0,
        gamma=0.9, epsilon=0.0,
    )  # fmt: skip
    transform = dr.Normalize.from_vecnormalize(source)
    assert transform.normalize_obs({"count": 5.5, "state": 1.0}) == {"count": 2.0, "state": 1.0}
    assert transform.state_dict()["moments"] == {"obs/count": {"count": 10.0, "mean": 1.5, "var": 4.0}}
    with dr.Sampler(store, dr.Transitions(), seed=0, transform=transform) as sampler:
        batch = sampler.sample()
        assert torch.equal(batch.obs["count"], (sampler.gather(batch.index).obs["count"] - 1.5).float() / 2)
        transform.frozen = False
        sampler.sample()
        assert transform.moments["obs/count"].count == 148
    source.obs_rms = {"count": SimpleNamespace(count=1.0, mean=np.zeros(2), var=np.ones(2))}
    with pytest.raises(ValueError, match=r"^these are moments of .*, not of "):
        dr.Sampler(store, dr.Transitions(), transform=dr.Normalize.from_vecnormalize(source))
    source.obs_rms = {"count": SimpleNamespace(count=1.0, mean=0.0, var=-1.0)}
    with pytest.raises(ValueError, match="^this is not a state of RunningMeanStd: "):
        dr.Normalize.from_vecnormalize(source)


# --- arguments and owners --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dr.Normalize(False), "obs and reward are both false: nothing would be normalised"),
        (lambda: dr.Normalize("state"), "obs must be a sequence of field names"),
        (lambda: dr.Normalize(reward={}), "reward must be None or weights by field"),
        (lambda: dr.Normalize(clip_obs=0), "clip_obs must be a finite number above 0, not 0"),
        (lambda: dr.Normalize(gamma=1.1), "gamma must be a number from 0 to 1, not 1.1"),
        (lambda: dr.Normalize(epsilon=-1), "epsilon must be a finite number of at least 0, not -1"),
    ],
)
def test_arguments_that_are_invalid_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


def test_what_the_store_has_not_is_refused(store: dr.Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^obs names 'depth'; the observation leaves of this store are 'state/0', "):
        dr.Sampler(store, dr.Transitions(), transform=dr.Normalize(["depth"]))
    with pytest.raises(ValueError, match="^reward names 'curiosity', which is not an extra field"):
        dr.Sampler(store, dr.Transitions(), transform=dr.Normalize(reward={"curiosity": 1.0}))
    with pytest.raises(ValueError, match=r"^Normalize\(reward=...\) does not apply to Rollouts"):
        dr.Sampler(store, dr.Rollouts(5), transform=dr.Normalize(reward=True))
    ints = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))
    with (
        dr.create(tmp_path / "ints", ints) as other,
        pytest.raises(ValueError, match="^obs: no observation leaf is of floats; name the leaves to use, of 'obs'$"),
    ):
        dr.Sampler(other, dr.Transitions(), transform=dr.Normalize())


def test_it_belongs_to_one_sampler_and_a_copy_to_another(store: dr.Store) -> None:
    transform = dr.Normalize()
    with dr.Sampler(store, dr.Transitions(), seed=0, transform=transform) as sampler:
        first = sampler.sample()
        with pytest.raises(ValueError, match="^this Normalize holds the state of another sampler: make a new"):
            dr.Sampler(store, dr.Transitions(), transform=transform)
        with dr.Sampler(store, dr.Transitions(), seed=0, transform=copy.deepcopy(transform)) as other:
            assert torch.equal(other.sample().obs["state"][0], first.obs["state"][0])
        sampler.view = dr.Sequences(length=4, overlap=0)
        assert sampler.sample().obs["state"][0].mean().abs() < 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200, -1.7e308])
@pytest.mark.parametrize("where", ["obs", "reward"])
def test_steps_that_are_not_finite_are_left_out_and_counted(tmp_store: Path, where: str, bad: float) -> None:
    rng = np.random.default_rng(0)
    obs, reward = rng.normal(50, 10, (101, 2)), rng.normal(0, 3, 100)
    schema = dr.Schema(dr.Field((2,), "float64"), dr.Field((), "int64"), dr.Field((), "float64"))
    (obs[7] if where == "obs" else reward[7:8])[:1] = bad
    with dr.create(tmp_store, schema) as store:
        with store.writer() as writer:
            writer.append_episode(obs, np.zeros(100, int), reward, terminated=True)
        normal = dr.Normalize(reward=True)
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0, transform=normal)
        with pytest.warns(UserWarning, match="^step 7 has NaN or an infinity, or .*: Normalize leaves such steps out"):
            sampler.sample()
        good = (np.abs(obs[:100]) < 1e100).all(axis=1)
        assert normal.moments["obs"].count == good.sum()
        np.testing.assert_allclose(normal.moments["obs"].mean, obs[:100][good].mean(axis=0))
        assert np.isfinite(normal.moments["return"].var)
        assert sampler.stats()["steps_not_finite"] == 1
        state = sampler.state_dict()
        sampler.load_state_dict(state)
        assert sampler.stats()["steps_not_finite"] == 1


@pytest.mark.parametrize("places", [[7], [7, 50], [3, 4, 90, 99]], ids=str)
@pytest.mark.parametrize("beside", [0.0, 1e12])
def test_values_that_alone_make_the_deviation_are_a_warning(tmp_store: Path, places: list[int], beside: float) -> None:
    schema = dr.Schema(obs=dr.Field((2,), "float64"), action=dr.Field((), "int64"))
    obs = np.random.default_rng(0).normal(50, 10, (101, 2))
    obs[:, 0] += beside
    obs[places, 1] = 1e9
    with dr.create(tmp_store, schema) as store:
        with store.writer() as writer:
            writer.append_episode(obs, np.zeros(100, int), np.zeros(100), terminated=True)
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0, transform=dr.Normalize())
        with pytest.warns(
            UserWarning, match="^obs has a value of 1e\\+09, and the standard deviation of the others is [0-9.]+:"
        ):
            sampler.sample()


@pytest.mark.parametrize("large", [1e3, 1e12])
def test_large_values_that_are_no_exception_are_no_warning(tmp_store: Path, large: float) -> None:
    schema = dr.Schema(obs=dr.Field((2,), "float64"), action=dr.Field((), "int64"))
    obs = large * np.random.default_rng(0).normal([1, 50], [1, 10], (101, 2))
    with (
        dr.create(tmp_store, schema) as store,
        store.writer() as writer,
        dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0, transform=dr.Normalize()) as sampler,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for start in range(0, 100, 20):
            rows = obs[start : start + 21]
            writer.append_episode(rows, np.zeros(20, int), np.zeros(20), terminated=True)
            sampler.sample()
