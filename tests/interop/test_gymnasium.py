"""The wrappers store exactly the episodes that a plain loop over single environments sees."""

import gc
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

import diskreplay as dr
from tests.testing.device import Device

SEED, LANES, CALLS = 40, 3, 23
INFO_FIELDS = ("phase", "won")
EXTRA = {"phase": dr.Field((), "float32"), "won": dr.Field((), "bool"), "given": dr.Field((2,), "float32")}


class Toy(gym.Env):
    """Everything follows from the seed, the episode's number, the step and the actions; episodes last 1 to 5 steps."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-np.inf, np.inf, (3,), np.float32), "n": spaces.Discrete(9, start=5)}
    )
    action_space = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)))

    def __init__(self, reuse: bool = False, fail_at: int | None = None) -> None:
        self.reuse, self.fail_at = reuse, fail_at
        self.number, self.episode, self.calls = 0, 0, 0
        self.x = np.zeros(3, np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self.number, self.episode = seed, -1
        self.episode += 1
        self.t, self.total = 0, 0.0
        self.length = 1 + (3 * self.number + 4 * self.episode) % 5
        return self.look(), {"phase": -1.0, "won": np.bool_(False), "options": str(options)}

    def look(self) -> dict:
        self.x[:] = self.number, self.t + self.total, self.episode
        return {"x": self.x if self.reuse else self.x.copy(), "n": 5 + self.t % 9}

    def step(self, action: tuple) -> tuple[dict, float, bool, bool, dict]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("out of order")
        self.t += 1
        self.total += 8 * int(action[0]) + float(action[1][0])
        kind = (self.number + self.episode) % 3 if self.t == self.length else None
        info = {"phase": self.t / 4, "won": np.bool_(kind == 0), "length": self.length}
        return self.look(), self.total / 4, kind in (0, 2), kind in (1, 2), info


class Reused(Toy):
    """Returns the same arrays at every step, all of them."""

    def __init__(self) -> None:
        super().__init__(reuse=True)
        self.n = np.zeros((), np.int64)

    def look(self) -> dict:
        self.n[...] = super().look()["n"]
        return {"x": self.x, "n": self.n}


def policy(obs: dict) -> tuple[np.ndarray, np.ndarray]:
    """Act by the observation alone, with a leading axis or without; all of it is exact in float32."""
    x = np.asarray(obs["x"])
    return (np.asarray(obs["n"]) + x[..., 1].astype(np.int64)) % 4, x[..., :2] / 64


def given(obs: dict) -> np.ndarray:
    return np.asarray(obs["x"])[..., 1:] * 2


def plain_loop(seed: int, steps: int, cut_after: int | None = None) -> list[dict[str, Any]]:
    """Run one environment by hand, and say what a store should have of it."""
    env, episodes, row = Toy(), [], None
    obs, _ = env.reset(seed=seed)
    for step in range(steps):
        if row is None:
            row = {
                "x": [obs["x"]],
                "n": [obs["n"]],
                "a": [],
                "b": [],
                "reward": [],
                "phase": [],
                "won": [],
                "given": [],
            }
            episodes.append(row | {"terminated": False, "truncated": True, "cut": True})
        action, extra = policy(obs), given(obs)
        obs, reward, terminated, truncated, info = env.step(action)
        new = {"x": obs["x"], "n": obs["n"], "a": action[0], "b": action[1], "reward": reward, "given": extra}
        for name, value in (new | {name: info[name] for name in INFO_FIELDS}).items():
            row[name].append(value)
        if terminated or truncated:
            episodes[-1].update(terminated=terminated, truncated=truncated, cut=False)
        if terminated or truncated or step + 1 == cut_after:
            row = None
            obs, _ = env.reset()
    return episodes


def stored(store: dr.Store, number: int) -> list[dict[str, Any]]:
    """Say what the store has of the environment with this seed."""
    store.refresh()
    found = []
    for episode in store.episodes:
        if episode.obs["x"][0, 0] == number:
            actions = {"a": episode.action["0"], "b": episode.action["1"], "reward": episode.reward}
            ends = {name: getattr(episode, name) for name in ("terminated", "truncated", "cut")}
            found.append({**episode.obs, **actions, **{name: episode[name] for name in EXTRA}, **ends})
    return found


def assert_same(store: dr.Store, number: int, expected: list[dict[str, Any]]) -> None:
    actual = stored(store, number)
    assert [len(episode["reward"]) for episode in actual] == [len(episode["reward"]) for episode in expected]
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(value), name)


@pytest.fixture
def store(tmp_store) -> Iterator[dr.Store]:
    with dr.create(tmp_store, dr.Schema.from_env(Toy(), extra=EXTRA)) as store:
        yield store


@pytest.fixture
def plain(tmp_path) -> Iterator[Callable[..., dr.Store]]:
    """Make stores for toys without the extra fields."""
    made = []

    def make(env: Any = None, **kwargs: Any) -> dr.Store:
        made.append(dr.create(tmp_path / f"plain{len(made)}", dr.Schema.from_env(env or Toy(), **kwargs)))
        return made[-1]

    yield make
    for store in made:
        store.close()


def drive(env: dr.RecordEpisodes, steps: int, seed: int | None = SEED) -> None:
    """Step on, resetting where an episode ends."""
    obs, _ = env.reset(seed=seed)
    for _ in range(steps):
        env.set_extra(given=given(obs))
        obs, _, terminated, truncated, _ = env.step(policy(obs))
        if terminated or truncated:
            obs, _ = env.reset()


def drive_vector(envs: dr.RecordVectorEpisodes, calls: int, seed: int | None = SEED) -> np.ndarray:
    """Step all lanes on, resetting those that ended where the environments do not; count the steps of each."""
    mode = envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
    obs, _ = envs.reset(seed=seed)
    steps, ended = np.zeros(envs.num_envs, int), np.zeros(envs.num_envs, bool)
    for _ in range(calls):
        envs.set_extra(given=given(obs))
        steps += ~ended if mode is AutoresetMode.NEXT_STEP else 1
        obs, _, terminated, truncated, _ = envs.step(policy(obs))
        ended = terminated | truncated
        if mode is AutoresetMode.DISABLED and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})
    return steps


def sync(mode: AutoresetMode | str = AutoresetMode.NEXT_STEP, lanes: int = LANES, copy: bool = True) -> SyncVectorEnv:
    return SyncVectorEnv([Toy] * lanes, copy=copy, autoreset_mode=mode)


class Own(VectorEnv):
    """A vector that batches by itself, as accelerated simulators do: same-step autoreset, no masks in info."""

    def __init__(self, final_obs: Callable[[list], Any] | None) -> None:
        self.envs, self.num_envs, self.final_obs = [Toy() for _ in range(LANES)], LANES, final_obs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = Toy.observation_space, Toy.action_space

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        return self.batch([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]), {}

    @staticmethod
    def batch(rows: list) -> dict:
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def step(self, actions: tuple) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray, dict]:
        rows = [env.step((actions[0][i], actions[1][i])) for i, env in enumerate(self.envs)]
        obs, reward, terminated, truncated, info = zip(*rows, strict=True)
        ended = np.logical_or(terminated, truncated)
        following = [env.reset()[0] if end else row for env, end, row in zip(self.envs, ended, obs, strict=True)]
        infos = self.batch(list(info)) | {"final_info": self.batch(list(info))}
        if self.final_obs is not None:
            infos["final_obs"] = self.final_obs(list(obs))
        return self.batch(following), np.array(reward), np.array(terminated), np.array(truncated), infos


# --- one environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True])
def test_an_environment_is_stored_as_a_plain_loop_sees_it(store, reuse):
    env = dr.RecordEpisodes(Toy(reuse), store, info_fields=INFO_FIELDS)
    drive(env, CALLS)
    env.close()
    assert_same(store, SEED, plain_loop(SEED, CALLS))
    assert any(episode["terminated"] and episode["truncated"] for episode in stored(store, SEED))


def test_the_newest_step_and_its_observation_are_there_at_once(plain):
    store = plain()
    env = dr.RecordEpisodes(Toy(reuse=True), store)
    obs, _ = env.reset(seed=43)
    assert env.unwrapped.length > 3
    for t in range(1, 4):
        obs, *_ = env.step(policy(obs))
        store.refresh()
        (episode,) = store.episodes
        assert (len(episode), len(episode.obs["x"]), len(store)) == (t, t + 1, t)
        np.testing.assert_array_equal(episode.obs["x"][-1], obs["x"])
    env.close()


def test_reset_and_close_cut_an_episode_at_its_last_observation(store):
    env = dr.RecordEpisodes(Toy(), store, info_fields=INFO_FIELDS)
    env.reset(seed=SEED)
    drive(env, 9)
    drive(env, 7, seed=None)
    env.reset()
    env.reset()
    env.close()
    env.close()
    expected = plain_loop(SEED, 16, cut_after=9)
    assert [episode["cut"] for episode in expected].count(True) == 2
    assert_same(store, SEED, expected)


def test_an_environment_that_resets_itself_is_stored_without_the_steps_that_only_reset(plain):
    store = plain()
    env = dr.RecordEpisodes(gym.wrappers.Autoreset(Toy()), store)
    obs, _ = env.reset(seed=SEED)
    for _ in range(CALLS):
        obs, *_ = env.step(policy(obs))
    env.close()
    store.refresh()
    rewards = [episode.reward.tolist() for episode in store.episodes]
    expected = plain_loop(SEED, sum(map(len, rewards)))
    assert rewards == [episode["reward"] for episode in expected]
    for episode, other in zip(store.episodes, expected, strict=True):
        np.testing.assert_array_equal(episode.obs["x"], other["x"])
    assert sum(map(len, rewards)) + len([e for e in expected if not e["cut"]]) in (CALLS, CALLS + 1)


def test_steps_outside_an_episode_are_refused(plain):
    env = dr.RecordEpisodes(Toy(), plain())
    with pytest.raises(ResetNeeded, match=r"call reset\(\) before step"):
        env.step((0, [0, 0]))
    obs, _ = env.reset(seed=SEED)
    assert env.unwrapped.length == 1
    env.step(policy(obs))
    with pytest.raises(ResetNeeded, match="no episode is running"):
        env.step(policy(obs))
    env.close()


def test_extra_fields_are_for_one_step_only(store):
    env = dr.RecordEpisodes(Toy(), store, info_fields=INFO_FIELDS)
    obs, _ = env.reset(seed=43)
    for attempt in ("first", "later"):
        calls = env.unwrapped.calls
        with pytest.raises(dr.SchemaError, match=r"'given' is missing; call set_extra\(given=\.\.\.\) before step"):
            env.step(policy(obs))
        assert env.unwrapped.calls == calls, attempt
        env.set_extra(given=[9, 9])
        env.set_extra(given=given(obs))
        obs, *_ = env.step(policy(obs))
    env.set_extra(given=[1, 2])
    obs, _ = env.reset(seed=SEED)
    with pytest.raises(dr.SchemaError, match="'given' is missing"):
        env.step(policy(obs))
    env.close()
    assert_same(store, 43, plain_loop(43, 2))
    assert stored(store, SEED) == []


@pytest.mark.parametrize("vector", [False, True])
def test_names_that_cannot_be_set_or_copied_are_refused(store, vector):
    wrap = dr.RecordVectorEpisodes if vector else dr.RecordEpisodes
    with pytest.raises(dr.SchemaError, match="info_fields: the store's schema has no extra or episode field 'wan'"):
        wrap(sync() if vector else Toy(), store, info_fields=("phase", "wan"))
    env = wrap(sync() if vector else Toy(), store, info_fields=INFO_FIELDS)
    with pytest.raises(dr.SchemaError, match="'oops' is no extra field of the store's schema; known are given"):
        env.set_extra(oops=1)
    with pytest.raises(dr.SchemaError, match="'won' is copied from info"):
        env.set_extra(won=True)
    env.close()


def test_info_fields_that_a_step_lacks_are_an_error_and_end_the_episode(plain):
    store = plain(extra={"length": dr.Field((), "int32"), "options": dr.Field((), "int32")})
    env = dr.RecordEpisodes(Toy(), store, info_fields=["length", "options"])
    obs, _ = env.reset(seed=43)
    with pytest.raises(dr.SchemaError, match="^options: the step's info has no value of this name$"):
        env.step(policy(obs))
    env.close()
    store.refresh()
    assert len(store.episodes) == 0


@pytest.mark.parametrize("then", ["close", "reset", "discard"])
def test_after_an_error_the_episode_is_cut_or_discarded(plain, then):
    store = plain()
    env = dr.RecordEpisodes(Toy(fail_at=3), store)
    obs, _ = env.reset(seed=43)
    for _ in range(2):
        obs, *_ = env.step(policy(obs))
    with pytest.raises(RuntimeError, match="out of order"):
        env.step(policy(obs))
    with pytest.raises(ResetNeeded):
        env.step(policy(obs))
    if then == "discard":
        env.discard_episode()
    if then != "close":
        obs, _ = env.reset(seed=43)
        env.step(policy(obs))
    env.close()
    store.refresh()
    lengths = {"close": [2], "reset": [2, 1], "discard": [1]}[then]
    assert [len(episode) for episode in store.episodes] == lengths
    assert store.snapshot.segments.discarded_steps == 2 * (then == "discard")
    episode = store.episodes[0]
    assert episode.cut
    np.testing.assert_array_equal(episode.obs["x"], plain_loop(43, lengths[0])[0]["x"])


def test_a_value_that_does_not_fit_ends_the_episode_before_it(plain):
    class Grows(gym.Env):
        observation_space, action_space = spaces.Discrete(4), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return (1 if action else "far"), np.float64(0.5), np.False_, False, {}

    store = plain(Grows())
    env = dr.RecordEpisodes(Grows(), store)
    env.reset()
    env.step(np.int64(1))
    with pytest.raises(dr.SchemaError, match="^action: "):
        env.step(0.5)
    env.step(True)
    with pytest.raises(dr.SchemaError, match="^obs: "):
        env.step(0)
    env.close()
    store.refresh()
    (episode,) = store.episodes
    assert (episode.obs.tolist(), episode.action.tolist(), episode.cut) == ([0, 1, 1], [1, 1], True)


def test_episode_fields_are_taken_from_the_last_info(plain):
    fields = {"length": dr.Field((), "int32")}
    store = plain(episode=fields)
    env = dr.RecordEpisodes(Toy(), store, info_fields="length")
    obs, _ = env.reset(seed=SEED)
    for _ in range(10):
        obs, _, terminated, truncated, _ = env.step(policy(obs))
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    for mode in AutoresetMode:
        envs = dr.RecordVectorEpisodes(sync(mode), store, info_fields=["length"])
        drive_vector_without_extras(envs)
        envs.close()
    store.refresh()
    for episode in store.episodes:
        assert episode["length"] == (None if episode.cut else len(episode))
    assert sum(not episode.cut for episode in store.episodes) > 20


def drive_vector_without_extras(envs: dr.RecordVectorEpisodes) -> None:
    obs, _ = envs.reset(seed=SEED)
    for _ in range(CALLS):
        obs, _, terminated, truncated, _ = envs.step(policy(obs))
        ended = terminated | truncated
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})


@pytest.mark.parametrize("copy", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_wrapper_and_its_copy_record_side_by_side(tmp_store, copy):
    with dr.create(tmp_store, dr.Schema.from_env(Toy())) as store:
        env = dr.RecordEpisodes(Toy(), store)
        other = copy(env)
        for number, wrapper in ((SEED, env), (SEED + 1, other)):
            obs, _ = wrapper.reset(seed=number)
            wrapper.step(policy(obs))
            assert type(wrapper.unwrapped) is Toy
        env.close()
        other.close()
        other._store.close()
    with dr.open(tmp_store) as store:
        assert sorted(episode.obs["x"][0, 0] for episode in store.episodes) == [SEED, SEED + 1]


def test_made_environments_keep_their_spec(plain):
    env = gym.make("CartPole-v1", max_episode_steps=5)
    store = plain(env)
    recorded = dr.RecordEpisodes(env, store)
    assert recorded.spec.id == "CartPole-v1"
    assert recorded.unwrapped is env.unwrapped
    recorded.action_space.seed(1)
    recorded.reset(seed=3)
    ended = False
    while not ended:
        *_, terminated, truncated, _ = recorded.step(recorded.action_space.sample())
        ended = terminated or truncated
    recorded.close()
    store.refresh()
    assert [len(episode) for episode in store.episodes] == [5]


# --- vectors ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_every_autoreset_mode_is_stored_as_a_plain_loop_sees_it(store, mode, copy):
    envs = dr.RecordVectorEpisodes(sync(mode, copy=copy), store, info_fields=INFO_FIELDS)
    steps = drive_vector(envs, CALLS)
    envs.close()
    envs.close()
    for lane in range(LANES):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, steps[lane]))
    assert len(store) == steps.sum()
    assert (steps < CALLS).all() if mode is AutoresetMode.NEXT_STEP else (steps == CALLS).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # a fresh interpreter a lane would take seconds
@pytest.mark.parametrize(
    ("mode", "copy"),
    [(AutoresetMode.NEXT_STEP, False), (AutoresetMode.SAME_STEP, True), (AutoresetMode.DISABLED, False)],
)
def test_environments_in_processes_are_stored_as_a_plain_loop_sees_them(store, mode, copy):
    envs = AsyncVectorEnv([Toy] * 2, copy=copy, autoreset_mode=mode, context="fork")
    envs = dr.RecordVectorEpisodes(envs, store, info_fields=INFO_FIELDS)
    steps = drive_vector(envs, 12)
    envs.close()
    for lane in range(2):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, steps[lane]))


def test_a_missing_mode_means_next_step_and_names_are_understood(store):
    envs = sync()
    del envs.metadata["autoreset_mode"]
    recorded = dr.RecordVectorEpisodes(envs, store, info_fields=INFO_FIELDS)
    steps = drive_vector(recorded, CALLS)
    recorded.close()
    for lane in range(LANES):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, steps[lane]))
    envs.metadata["autoreset_mode"] = "SameStep"
    dr.RecordVectorEpisodes(envs, store, info_fields=INFO_FIELDS).close()
    envs.metadata["autoreset_mode"] = "Sometimes"
    with pytest.raises(ValueError, match="Sometimes"):
        dr.RecordVectorEpisodes(envs, store, info_fields=INFO_FIELDS)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_full_reset_cuts_every_lane_at_its_last_observation(store, mode):
    envs = dr.RecordVectorEpisodes(sync(mode, copy=False), store, info_fields=INFO_FIELDS)
    steps = drive_vector(envs, 7)
    expected = [plain_loop(SEED + lane, steps[lane]) for lane in range(LANES)]
    assert sum(episodes[-1]["cut"] for episodes in expected) > 0
    steps = drive_vector(envs, 4)
    envs.reset()
    envs.close()
    for lane in range(LANES):
        assert_same(store, SEED + lane, expected[lane] + plain_loop(SEED + lane, steps[lane]))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_masked_reset_concerns_its_lanes_only(store, mode):
    envs = dr.RecordVectorEpisodes(sync(mode, copy=False), store, info_fields=INFO_FIELDS)
    obs, _ = envs.reset(seed=[43, 48, 53])
    assert [env.length for env in envs.unwrapped.envs] == [5, 5, 5]
    options = {"reset_mask": np.array([False, True, False]), "level": 3}
    for call in range(4):
        if call == 2:
            obs, info = envs.reset(options=options)
            assert info["options"][1] == "{'level': 3}"
        envs.set_extra(given=given(obs))
        obs, *_ = envs.step(policy(obs))
    assert options["reset_mask"].tolist() == [False, True, False]
    envs.close()
    assert_same(store, 43, plain_loop(43, 4))
    assert_same(store, 48, plain_loop(48, 4, cut_after=2))
    assert_same(store, 53, plain_loop(53, 4))


def test_a_lane_that_ended_is_left_out_until_its_reset(store):
    class Patient(SyncVectorEnv):
        """Lets lanes that ended be stepped, as batched evaluation does."""

        def step(self, actions):
            self._autoreset_envs[:] = False
            return super().step(actions)

    inner = Patient([Toy] * LANES, autoreset_mode=AutoresetMode.DISABLED)
    envs = dr.RecordVectorEpisodes(inner, store, info_fields=INFO_FIELDS)
    obs, _ = envs.reset(seed=[SEED, 43, 48])
    for call in range(5):
        if call == 3:
            obs, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        envs.set_extra(given=given(obs))
        obs, *_ = envs.step(policy(obs))
    envs.close()
    lengths = [len(episode["reward"]) for episode in stored(store, SEED)]
    assert lengths == [1, 2]
    assert_same(store, SEED, plain_loop(SEED, 3))
    assert_same(store, 43, plain_loop(43, 5))


@pytest.mark.parametrize("mode", AutoresetMode)
def test_after_an_error_in_one_lane_the_episodes_of_all_are_cut_or_discarded(store, mode):
    inner = SyncVectorEnv([Toy, lambda: Toy(fail_at=3), Toy], copy=False, autoreset_mode=mode)
    envs = dr.RecordVectorEpisodes(inner, store, info_fields=INFO_FIELDS)
    obs, _ = envs.reset(seed=[43, 48, 53])
    for _ in range(2):
        envs.set_extra(given=given(obs))
        obs, *_ = envs.step(policy(obs))
    seen = deepcopy(obs)
    envs.set_extra(given=given(obs))
    with pytest.raises(RuntimeError, match="out of order"):
        envs.step(policy(obs))
    envs.set_extra(given=given(seen))
    with pytest.raises(ResetNeeded):
        envs.step(policy(seen))
    envs.discard_episode([True, False, False])
    steps = drive_vector(envs, 2)
    envs.close()
    assert stored(store, 43) == []
    for number in (48, 53):
        assert_same(store, number, plain_loop(number, 2))
    for lane in range(LANES):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, steps[lane]))


def test_an_info_field_that_a_recorded_lane_lacks_is_an_error_that_names_both(plain):
    class Shy(Toy):
        def step(self, action):
            *rest, info = super().step(action)
            return *rest, (info if self.number != SEED + 1 else {})

    store = plain(extra={"phase": dr.Field((), "float32")})
    for mode in AutoresetMode:
        envs = SyncVectorEnv([Shy] * LANES, autoreset_mode=mode)
        envs = dr.RecordVectorEpisodes(envs, store, info_fields=["phase"])
        obs, _ = envs.reset(seed=SEED)
        with pytest.raises(dr.SchemaError, match=r"^phase: info has no value for lane 1, whose step is recorded$"):
            envs.step(policy(obs))
        envs.close()
    store.refresh()
    assert len(store.episodes) == 0


def test_nested_info_fields_are_copied_lane_by_lane(plain):
    class Deep(Toy):
        def step(self, action):
            *rest, info = super().step(action)
            parts = {"time": np.float32(self.t), "pair": np.array([self.number, self.t]), "more": 3}
            return *rest, info | {"parts": parts, "_other": 3}

    fields = {"parts": {"time": dr.Field((), "float32"), "pair": dr.Field((2,), "int64")}}
    store = plain(extra=fields)
    for mode in AutoresetMode:
        envs = dr.RecordVectorEpisodes(SyncVectorEnv([Deep] * LANES, autoreset_mode=mode), store, info_fields=["parts"])
        drive_vector_without_extras(envs)
        envs.close()
    env = dr.RecordEpisodes(Deep(), store, info_fields=["parts"])
    obs, _ = env.reset(seed=43)
    env.step(policy(obs))
    env.close()
    store.refresh()
    for episode in store.episodes:
        t = np.arange(1, len(episode) + 1)
        assert episode["parts"]["time"].tolist() == t.tolist()
        assert episode["parts"]["pair"].tolist() == [[episode.obs["x"][0, 0], i] for i in t]


@pytest.mark.parametrize("layout", ["batched", "list", "objects"])
def test_vectors_that_batch_by_themselves_may_give_final_observations_in_any_layout(store, layout):
    def objects(rows: list) -> np.ndarray:
        array = np.full(len(rows), None, dtype=object)
        array[:] = rows
        return array

    make = {"batched": Own.batch, "list": list, "objects": objects}[layout]
    envs = dr.RecordVectorEpisodes(Own(make), store, info_fields=INFO_FIELDS)
    steps = drive_vector(envs, CALLS)
    envs.close()
    for lane in range(LANES):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, steps[lane]))


@pytest.mark.parametrize("copy", [True, False])
def test_final_observations_that_are_the_next_first_ones_are_not_recorded(store, copy):
    makers = [Toy, Reused, Reused]
    inner = SyncVectorEnv(makers, copy=copy, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = dr.RecordVectorEpisodes(inner, store, info_fields=INFO_FIELDS)
    with pytest.warns(UserWarning, match=r"^lane \d ended, and its final observation in info is the first one") as seen:
        steps = drive_vector(envs, CALLS)
    envs.close()
    assert [warning.filename for warning in seen] == [__file__]
    assert_same(store, SEED, plain_loop(SEED, steps[0]))
    for lane in (1, 2):
        expected = plain_loop(SEED + lane, steps[lane])
        for episode in expected:
            if not episode["cut"]:
                episode["x"], episode["n"] = episode["x"][:-1], episode["n"][:-1]
        assert_same(store, SEED + lane, expected)


def test_same_step_autoreset_without_final_observations_is_an_error(store):
    envs = dr.RecordVectorEpisodes(Own(None), store, info_fields=INFO_FIELDS)
    with pytest.raises(dr.SchemaError, match="lane 0 ended, but info has no final_obs for it"):
        drive_vector(envs, CALLS)
    envs.close()
    assert stored(store, SEED) == []


def test_extra_fields_of_vectors_are_for_one_step_only(store):
    envs = dr.RecordVectorEpisodes(sync(), store, info_fields=INFO_FIELDS)
    obs, _ = envs.reset(seed=SEED)
    envs.set_extra(given=given(obs))
    obs, *_ = envs.step(policy(obs))
    with pytest.raises(dr.SchemaError, match="'given' is missing"):
        envs.step(policy(obs))
    envs.set_extra(given=given(obs)[0])
    with pytest.raises(dr.SchemaError, match="given"):
        envs.step(policy(obs))
    envs.close()


def test_steps_before_the_first_reset_are_refused(plain):
    envs = dr.RecordVectorEpisodes(sync(), plain())
    with pytest.raises(ResetNeeded):
        envs.step((np.zeros(LANES, int), np.zeros((LANES, 2))))
    assert envs.unwrapped is envs.env
    envs.close()


def test_plain_observations_and_actions_of_a_vector(plain):
    class Counter(gym.Env):
        observation_space, action_space = spaces.Discrete(50, start=-2), spaces.MultiBinary(2)

        def reset(self, *, seed=None, options=None):
            self.t = -2
            return self.t, {}

        def step(self, action):
            self.t += 1
            return self.t, sum(map(int, action)), self.t == 1, False, {}

    for mode in AutoresetMode:
        store = plain(Counter())
        envs = dr.RecordVectorEpisodes(SyncVectorEnv([Counter] * 2, autoreset_mode=mode), store)
        envs.reset()
        for _ in range(3):
            envs.step([[0, 1], [1, 1]])
        envs.close()
        store.refresh()
        assert [episode.obs.tolist() for episode in store.episodes] == [[-2, -1, 0, 1]] * 2
        assert sorted(episode.reward.tolist() for episode in store.episodes) == [[1, 1, 1], [2, 2, 2]]
        assert all(episode.terminated for episode in store.episodes)


def test_what_is_no_vector_is_refused_by_name(plain):
    with pytest.raises(ValueError, match=r"^env must be a gymnasium\.vector\.VectorEnv, not Toy: use RecordEpisodes$"):
        dr.RecordVectorEpisodes(Toy(), plain())


def test_environments_whose_recording_was_refused_stay_open():
    envs = sync()
    for store in ("a/path", None):
        with pytest.raises(ValueError, match="^store must be a Store"):
            dr.RecordVectorEpisodes(envs, store)
    gc.collect()
    assert not envs.closed


@pytest.mark.parametrize("flag", [-3.7, 0.5, np.nan, 2], ids=repr)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_reward_in_place_of_a_flag_is_refused_and_ends_the_episode_before_it(plain, place, flag):
    class Swapped(Toy):
        def step(self, action):
            result = list(super().step(action))
            if self.t == 2:
                result[1:4] = [1.0, False, False]
                result[place] = flag
            return tuple(result)

    class SwappedVector(SyncVectorEnv):
        def step(self, actions):
            result = list(super().step(actions))
            if self.envs[0].t == 2:
                result[place] = np.full(LANES, flag)
            return tuple(result)

    store = plain()
    envs = SwappedVector([Toy] * LANES)
    for env in (dr.RecordEpisodes(Swapped(), store), dr.RecordVectorEpisodes(envs, store)):
        obs, _ = env.reset(seed=43)
        obs, *_ = env.step(policy(obs))
        if place == 1:
            env.step(policy(obs))
        else:
            name = ("terminated", "truncated")[place - 2]
            with pytest.raises(dr.SchemaError, match=rf"^{name} .*reward=.* and {name}=.*{flag}"):
                env.step(policy(obs))
        env.close()
    store.refresh()
    assert {len(episode) for episode in store.episodes if episode.obs["x"][0, 0] == 43} == {2 if place == 1 else 1}


@pytest.mark.parametrize("store", ["a/path", None, dr.Store])
def test_what_is_no_store_is_refused_by_name(store: Any) -> None:
    with pytest.raises(ValueError, match=r"^store must be a Store, .*, not "):
        dr.RecordEpisodes(Toy(), store)
    with pytest.raises(ValueError, match=r"^store must be a Store, .*, not "):
        dr.RecordVectorEpisodes(SyncVectorEnv([Toy]), store)


class Precise(Toy):
    """Observes and acts in float64."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-np.inf, np.inf, (3,), np.float64), "n": spaces.Discrete(9, start=5)}
    )
    action_space = spaces.Tuple((spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float64)))

    def look(self) -> dict:
        obs = super().look()
        return {**obs, "x": obs["x"].astype(np.float64) + 1 / 3}


@pytest.mark.parametrize("vector", [False, True])
def test_an_environment_of_float64_is_recorded_as_the_float32_of_a_dtype_map(tmp_store, vector: bool) -> None:
    maker = gym.vector.SyncVectorEnv([Precise, Precise]) if vector else Precise()
    schema = dr.Schema.from_env(maker, dtype_map={"float64": "float32"})
    assert schema == dr.Schema.from_env(Precise(), dtype_map={"float64": "float32"})
    seen, compared = [], 0
    with dr.create(tmp_store, schema) as store:
        env = dr.RecordVectorEpisodes(maker, store) if vector else dr.RecordEpisodes(maker, store)
        obs, _ = env.reset(seed=3)
        for _ in range(40):
            action = env.action_space.sample()
            seen.append((obs["x"].reshape(-1, 3)[0], np.asarray(action[1]).reshape(-1, 2)[0]))
            obs, _, terminated, truncated, _ = env.step(action)
            if not vector and (terminated or truncated):
                obs, _ = env.reset()
        env.close()
        store.refresh()
        for episode in store.episodes:
            assert (episode.obs["x"].dtype, episode.action[str(1)].dtype) == (np.float32, np.float32)
            for x, a in zip(episode.obs["x"], episode.action["1"], strict=False):
                compared += sum(
                    np.array_equal(x, obs.astype(np.float32)) and np.array_equal(a, act.astype(np.float32))
                    for obs, act in seen
                )
        batch = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0).sample()
        assert str(batch.obs["x"].dtype) == "torch.float32"
    assert compared >= 25


def test_an_environment_is_recorded_into_a_store_once(tmp_path):
    paths = tmp_path / "a", tmp_path / "b"
    one, other = (dr.create(path, dr.Schema.from_env(gym.make("CartPole-v1"))) for path in paths)
    for env, record in (
        (gym.make("CartPole-v1"), dr.RecordEpisodes),
        (gym.make_vec("CartPole-v1", 2), dr.RecordVectorEpisodes),
    ):
        env = record(record(env, one), other)  # into two stores
        with dr.open(one.path, "a") as again, pytest.raises(ValueError, match=r"into .*/a already: wrap env\.env"):
            record(env, again)
        env.close()
    one.close(), other.close()


def test_a_step_of_environments_on_a_device_is_waited_for_once(store, monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)

    class OnDevice(Own):
        def reset(self, **kwargs):
            obs, info = super().reset(**kwargs)
            return self.moved(obs), info

        def step(self, actions):
            obs, reward, terminated, truncated, info = super().step(actions)
            return self.moved(obs), *map(device.tensor, (reward, terminated, truncated)), info

        @staticmethod
        def moved(obs):
            return {key: device.tensor(rows) for key, rows in obs.items()}

    envs = dr.RecordVectorEpisodes(OnDevice(lambda rows: rows), store, info_fields=INFO_FIELDS)
    obs, _ = envs.reset(seed=SEED)
    for _ in range(CALLS):
        seen = {key: rows.cpu().numpy() for key, rows in obs.items()}
        envs.set_extra(given=given(seen))
        before = device.stream.waits
        obs, *_ = envs.step(policy(seen))
        assert device.stream.waits == before + 1
    envs.close()
    for lane in range(LANES):
        assert_same(store, SEED + lane, plain_loop(SEED + lane, CALLS))
