"""Values of episodes that the gymnasium wrappers record: what `set_episode` and the arguments of `reset` give."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import diskreplay as dr
from tests.interop.test_gymnasium import LANES, SEED, Toy, policy, sync

FIELDS = {"seed": dr.Field((), "int64"), "task": dr.Field((2,), "float32")}


def make(path: Path, episode: dict[str, Any]) -> dr.Store:
    return dr.create(path, dr.Schema.from_env(Toy(), episode=episode))


def values_of(store: dr.Store) -> list[Any]:
    """Return the seed of each episode, and the first number of its task."""
    store.refresh()
    found = []
    for episode in store.episodes:
        task = episode["task"]
        found.append((episode["seed"], None if task is None else task[0]))
    return found


def run(env: gym.Env, obs: dict) -> None:
    """Step until the episode ends."""
    ended = False
    while not ended:
        obs, _, terminated, truncated, _ = env.step(policy(obs))
        ended = terminated or truncated


def test_the_seeds_of_reset_are_recorded(tmp_store):
    with make(tmp_store, {"seed": FIELDS["seed"]}) as store:
        env = dr.RecordEpisodes(Toy(), store)
        for seed in (3, np.int64(4), None, 0):
            run(env, env.reset(seed=seed)[0])
        env.close()
        store.refresh()
        assert [episode["seed"] for episode in store.episodes] == [3, 4, None, 0]


@pytest.mark.parametrize("seed", [1.5, [8, 9]])
def test_a_seed_of_another_kind_is_what_the_environment_and_the_field_take(tmp_path, seed):
    class Seedless(Toy):
        def reset(self, *, seed=None, options=None):
            return super().reset()

    plain = dr.RecordEpisodes(Seedless(), make(tmp_path / "plain", {}))
    plain.reset(seed=seed)
    with make(tmp_path / "store", {"seed": FIELDS["seed"]}) as store:
        env = dr.RecordEpisodes(Seedless(), store)
        with pytest.raises(dr.SchemaError, match="seed"):
            env.reset(seed=seed)
    field = dr.Field(np.shape(seed), "float64" if isinstance(seed, float) else "int64")
    with make(tmp_path / "fitting", {"seed": field}) as store:
        env = dr.RecordEpisodes(Seedless(), store)
        run(env, env.reset(seed=seed)[0])
        env.close()
        store.refresh()
        assert np.array_equal(store.episodes[0]["seed"], seed)
    plain.close()


def test_values_belong_to_the_running_episode_else_to_the_next(tmp_store):
    with make(tmp_store, FIELDS) as store:
        env = dr.RecordEpisodes(Toy(), store)
        env.set_episode(task=[1, 0])  # before any episode
        run(env, env.reset(seed=40)[0])
        env.set_episode(task=[2, 0])  # between two
        obs, _ = env.reset(seed=43)
        env.reset(seed=44)  # no step came: the episode and its values are dropped
        obs, _ = env.reset()  # and now none
        env.step(policy(obs))
        env.set_episode(task=[3, 0])  # in place of the one before
        obs, _ = env.reset(seed=48)  # cuts it
        env.step(policy(obs))
        env.close()
        env.close()
        assert values_of(store) == [(40, 1), (0, 3), (48, 0)]
        assert [episode.cut for episode in store.episodes] == [False, True, True]


def test_values_survive_an_error_of_the_environment_and_of_a_step(tmp_store):
    with make(tmp_store, FIELDS) as store:
        env = dr.RecordEpisodes(Toy(fail_at=2), store)
        obs, _ = env.reset(seed=43)
        obs, *_ = env.step(policy(obs))
        with pytest.raises(RuntimeError, match="out of order"):
            env.step(policy(obs))
        obs, _ = env.reset(seed=48)
        obs, *_ = env.step(policy(obs))
        with pytest.raises(dr.SchemaError):
            env.step("north")  # not stepped: the episode goes on
        env.close()
        assert values_of(store) == [(43, 0), (48, 0)]


@pytest.mark.parametrize("vector", [False, True])
def test_values_that_do_not_fit_are_refused_before_anything_changes(tmp_store, vector):
    with make(tmp_store, FIELDS | {"won": dr.Field((), "bool"), "options": {"level": dr.Field((), "int8")}}) as store:
        env: Any = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        good = np.ones((LANES, 2)) if vector else np.ones(2)
        obs, _ = env.reset(seed=SEED)
        env.step(policy(obs))
        with pytest.raises(dr.SchemaError, match="set_episode: 'goal' is no episode field.* known are seed, task, won"):
            env.set_episode(task=good, goal=1)
        with pytest.raises(dr.SchemaError, match="episode/task"):
            env.set_episode(task=good[..., :1])
        for arguments in ({"seed": 1 << 70}, {"options": {"level": 1000}}, {"options": {"levels": 1}}):
            with pytest.raises(dr.SchemaError):
                env.reset(**arguments)
        env.close()
        store.refresh()
        assert {len(episode) for episode in store.episodes} == {1}  # none was cut by these calls and begun again
        assert {episode["task"].tolist()[0] for episode in store.episodes} == {0}


def test_names_that_come_from_info_are_not_set(tmp_store):
    with make(tmp_store, {"length": dr.Field((), "int32"), "task": FIELDS["task"]}) as store:
        env = dr.RecordEpisodes(Toy(), store, info_fields=["length"])
        with pytest.raises(dr.SchemaError, match="set_episode: 'length' is copied from info; known are task"):
            env.set_episode(length=3)
        obs, _ = env.reset(seed=SEED)
        env.set_episode(task=(5, 0))
        run(env, obs)
        env.close()
        store.refresh()
        (episode,) = store.episodes
        assert (episode["length"], episode["task"][0]) == (len(episode), 5)


@pytest.mark.parametrize("vector", [False, True])
def test_a_seed_that_was_set_is_kept_by_a_reset_without_one_and_replaced_by_another(tmp_store, vector):
    lanes = LANES if vector else 1
    with make(tmp_store, FIELDS) as store:
        env: Any = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        for seed in (None, SEED):
            env.set_episode(seed=np.full(LANES, 7) if vector else 7)
            obs, _ = env.reset(seed=seed)
            env.step(policy(obs))
            env.close()
            env = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        env.close()
        assert sorted(seed for seed, _ in values_of(store)) == [7] * lanes + [SEED + i for i in range(lanes)]


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("error", [False, True])
def test_values_of_an_episode_without_a_step_are_not_those_of_the_next(tmp_store, vector, error):
    class Crashes(Toy):
        def step(self, action):
            if error and self.number < 50:
                raise RuntimeError("out of order")
            return super().step(action)

    with make(tmp_store, FIELDS) as store:
        inner: Any = gym.vector.SyncVectorEnv([Crashes] * LANES) if vector else Crashes()
        env: Any = dr.RecordVectorEpisodes(inner, store) if vector else dr.RecordEpisodes(inner, store)
        obs, _ = env.reset(seed=43)
        env.set_episode(task=np.ones((LANES, 2)) if vector else [1, 1])
        if error:
            with pytest.raises(RuntimeError, match="out of order"):
                env.step(policy(obs))
        obs, _ = env.reset(seed=53)
        env.step(policy(obs))
        env.close()
        assert sorted(values_of(store)) == [(53 + i, 0) for i in range(LANES if vector else 1)]


@pytest.mark.parametrize("mode", [*AutoresetMode])
def test_an_autoreset_begins_the_episode_that_values_are_set_for(tmp_store, mode):
    with make(tmp_store, FIELDS) as store:
        envs = dr.RecordVectorEpisodes(sync(mode), store)
        obs, _ = envs.reset(seed=SEED)
        assert envs.unwrapped.envs[0].length == 1
        obs, _, terminated, truncated, _ = envs.step(policy(obs))
        assert (terminated | truncated)[0]
        envs.set_episode(task=np.full((LANES, 2), 5))
        obs, _ = envs.reset()  # drops the episode of lane 0 that SAME_STEP had begun; the others have not begun yet
        envs.step(policy(obs))
        envs.close()
        store.refresh()
        first, second = (episode["task"] for episode in store.episodes if episode.lane == 0)
        assert first[0] == 0
        assert second is None if mode is AutoresetMode.SAME_STEP else second[0] == 5


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("steps", [0, 1])
def test_values_of_a_discarded_episode_are_dropped_and_later_ones_are_stored(tmp_store, vector, steps):
    def task(number: float) -> np.ndarray:
        return np.full((LANES, 2) if vector else 2, number)

    with make(tmp_store, FIELDS) as store:
        env: Any = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        obs, _ = env.reset(seed=[43, 48, 53] if vector else 43)  # each lasts 5 steps
        env.set_episode(task=task(1))
        for _ in range(steps):
            obs, *_ = env.step(policy(obs))
        env.discard_episode()
        obs, *_ = env.step(policy(obs))  # begins another one
        env.set_episode(task=task(2))
        obs, _ = env.reset(seed=[63, 68, 73] if vector else 63)
        env.step(policy(obs))
        env.close()
        lanes = LANES if vector else 1
        assert sorted(values_of(store)) == [(0, 2)] * lanes + [(63 + 5 * i, 0) for i in range(lanes)]


@pytest.mark.parametrize("vector", [False, True])
def test_an_environment_may_be_closed_after_its_store(tmp_store, vector):
    with make(tmp_store, FIELDS) as store:
        env: Any = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        obs, _ = env.reset(seed=43)
        env.step(policy(obs))
    env.close()


@pytest.mark.parametrize("field", [dr.Field((), "int64"), {"levels": dr.Field((), "int64")}])
def test_options_that_a_field_does_not_take_are_refused_with_what_to_do(tmp_store, field):
    with make(tmp_store, {"options": field}) as store:
        env = dr.RecordEpisodes(Toy(), store)
        with pytest.raises(
            dr.SchemaError, match=r"^reset: episode/options: .*pass values that fit, or give the fields"
        ):
            env.reset(options={"level": 3})
        env.close()


@pytest.mark.parametrize("vector", [False, True])
def test_options_are_recorded_where_a_field_takes_them(tmp_store, vector):
    options = {"level": 3, "start": np.array([0.5, 1.0])}
    fields = {"options": {"level": dr.Field((), "int8"), "start": dr.Field((2,), "float32")}}
    with make(tmp_store, fields) as store:
        env: Any = dr.RecordVectorEpisodes(sync(), store) if vector else dr.RecordEpisodes(Toy(), store)
        for given in (options, None, {}):
            obs, _ = env.reset(seed=SEED, options=given)
            env.step(policy(obs))
        if vector:
            obs, _ = env.reset(options=options | {"reset_mask": np.array([True, False, False])})
            env.step(policy(obs))
        env.close()
        store.refresh()
        found = [episode["options"] for episode in store.episodes]
        assert sum(value is not None for value in found) == (LANES + 1 if vector else 1)
        for value in found:
            assert value is None or (value["level"] == 3 and value["start"].tolist() == [0.5, 1.0])


@pytest.mark.parametrize("mode", [*AutoresetMode])
@pytest.mark.parametrize("seed", [SEED, [41, None, 7], None], ids=["int", "list", "none"])
def test_values_of_a_vector_follow_each_lane(tmp_store, mode, seed):
    rng = np.random.default_rng(5)
    seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(LANES)]
    held: list[dict[str, float]] = [{} if value is None else {"seed": value} for value in seeds]
    expected: list[list[tuple[Any, Any]]] = [[] for _ in range(LANES)]
    running, idle = np.zeros(LANES, bool), np.zeros(LANES, bool)

    def end(lane: int) -> None:
        values = held[lane]
        expected[lane].append((values.get("seed", 0), values.get("task", 0)) if values else (None, None))
        held[lane] = {}

    with make(tmp_store, FIELDS) as store:
        envs = dr.RecordVectorEpisodes(sync(mode), store)
        obs, _ = envs.reset(seed=seed)
        for call in range(40):
            if rng.random() < 0.2:
                tasks = np.stack([10.0 * call + np.arange(LANES), np.zeros(LANES)], axis=1)
                envs.set_episode(task=tasks)
                for lane in range(LANES):
                    held[lane]["task"] = tasks[lane, 0]
            obs, _, terminated, truncated, _ = envs.step(policy(obs))
            ended = terminated | truncated
            running = (running | ~idle) & ~ended
            for lane in np.flatnonzero(ended & ~idle):
                end(lane)
            idle = ended if mode is AutoresetMode.NEXT_STEP else np.zeros(LANES, bool)
            if mode is AutoresetMode.DISABLED and ended.any():
                obs, _ = envs.reset(seed=100 * call, options={"reset_mask": ended})
                for lane in np.flatnonzero(ended):
                    held[lane]["seed"] = 100 * call + lane
        for lane in np.flatnonzero(running):
            end(lane)
        envs.close()
        store.refresh()
        found: list[list[tuple[Any, Any]]] = [[] for _ in range(LANES)]
        for episode in store.episodes:
            task = episode["task"]
            found[episode.lane].append((episode["seed"], None if task is None else task[0]))
        assert found == expected
        assert sum(map(len, found)) > 20
