"""Pickled buffers of Stable-Baselines3: read without running anything of them, exactly, and written for it to load."""

import io
import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.save_util import save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

import diskreplay as dr
from diskreplay.interop.sb3 import DiskReplayBuffer
from diskreplay.interop.sb3_pickle import export_dataset, import_dataset
from tests.interop.round_trips import PLAIN, check_round_trip, make_store

BOX = spaces.Box(-1, 1, (3,), np.float32)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 2, 3), np.uint8), "task": spaces.Discrete(5)})
MOVE = spaces.Box(-1, 1, (2,), np.float64)
CASES: dict[str, Any] = {
    "vectors": (ReplayBuffer, BOX, spaces.Discrete(4), {}),
    "n-step": (NStepReplayBuffer, BOX, spaces.MultiDiscrete([3, 2]), {"n_steps": 5, "gamma": 0.9}),
    "scalars": (ReplayBuffer, spaces.Discrete(7), spaces.MultiBinary(2), {}),
    "dicts": (DictReplayBuffer, DICT, MOVE, {}),
    "no timeouts": (ReplayBuffer, BOX, MOVE, {"handle_timeout_termination": False}),
    "shared": (ReplayBuffer, BOX, MOVE, {"handle_timeout_termination": False, "optimize_memory_usage": True}),
}


def sampled(space: Any, n_envs: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: sampled(inner, n_envs) for key, inner in space.items()}
    return np.array([space.sample() for _ in range(n_envs)])


def filled(case: str, steps: int, n_envs: int = 1, capacity: int = 12) -> ReplayBuffer:
    """A buffer to which so many steps of each environment were added; episodes end at random, some by time limits."""
    made, obs_space, action_space, arguments = CASES[case]
    buffer: ReplayBuffer = made(capacity * n_envs, obs_space, action_space, "cpu", n_envs, **arguments)
    rng = np.random.default_rng(0)
    for space in (obs_space, action_space):
        space.seed(0)
    obs = sampled(obs_space, n_envs)
    for _ in range(steps):
        next_obs, action = sampled(obs_space, n_envs), sampled(action_space, n_envs)
        done, timeout = rng.random(n_envs) < 0.3, rng.random(n_envs) < 0.5
        infos = [{"TimeLimit.truncated": bool(d and t)} for d, t in zip(done, timeout, strict=True)]
        # Copies: a buffer changes the dicts that it is given.
        buffer.add(copied(obs), copied(next_obs), action, rng.random(n_envs), done, infos)
        after = sampled(obs_space, n_envs)  # of the next episode where this one is done
        obs = chosen(done, after, next_obs)
    return buffer


def copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value.copy()


def chosen(where: np.ndarray, one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: chosen(where, one[key], other[key]) for key in one}
    return np.where(where.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def in_order(buffer: ReplayBuffer, name: str) -> dict[str, np.ndarray]:
    """The rows of an attribute, oldest first, by key."""
    value = getattr(buffer, name)
    every = value if isinstance(value, dict) else {"": value}
    shift = buffer.pos if buffer.full else 0
    return {key: np.roll(rows, -shift, 0)[: buffer.size()] for key, rows in every.items()}


@pytest.mark.parametrize("case", [case for case in CASES if case != "shared"])
@pytest.mark.parametrize(("steps", "n_envs"), [pytest.param(7, 1, marks=pytest.mark.slow), (30, 3)])
def test_a_buffer_comes_back_equal(tmp_path: Path, case: str, steps: int, n_envs: int) -> None:
    before = filled(case, steps, n_envs)
    save_to_pkl(tmp_path / "buffer.pkl", before)
    imported = import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    assert imported.steps == before.size() * n_envs
    export_dataset(tmp_path / "store", tmp_path / "again.pkl")
    with open(tmp_path / "again.pkl", "rb") as file:
        after = pickle.load(file)
    assert type(after) is type(before)
    assert (after.n_envs, after.pos, after.full) == (n_envs, 0, True)
    assert after.handle_timeout_termination is before.handle_timeout_termination
    assert (after.observation_space, after.obs_shape) == (before.observation_space, before.obs_shape)
    if case == "n-step":
        assert (after.n_steps, after.gamma) == (5, 0.9)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        expected = in_order(before, name)
        for key, rows in in_order(after, name).items():
            np.testing.assert_array_equal(rows, expected[key], f"{name} {key}", strict=True)


def test_episodes_end_where_steps_are_done_and_where_the_buffer_ends(tmp_path: Path) -> None:
    buffer = filled("vectors", 30, 2)
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    rows = {name: in_order(buffer, name)[""] for name in ("observations", "next_observations", "dones", "timeouts")}
    expected = []
    for env in range(2):
        ends = np.append(np.flatnonzero(rows["dones"][:, env]) + 1, 12)
        for start, stop in zip([0, *ends[:-1]], ends, strict=True):
            if start < stop:
                done, timeout = rows["dones"][stop - 1, env], rows["timeouts"][stop - 1, env]
                how = "cut" if not done else "truncated" if timeout else "terminated"
                expected.append((start, env, stop - start, how))
    with dr.open(tmp_path / "store") as store:
        assert [(len(e), e.ended) for e in store.episodes] == [(steps, how) for _, _, steps, how in sorted(expected)]
        for episode, (start, env, steps, _) in zip(store.episodes, sorted(expected), strict=True):
            np.testing.assert_array_equal(episode.obs[:-1], rows["observations"][start : start + steps, env])
            np.testing.assert_array_equal(episode.obs[1:], rows["next_observations"][start : start + steps, env])
        assert store.schema.action.space == {"type": "Discrete", "n": 4, "start": 0}


def test_a_zero_that_changed_its_sign_ends_no_episode_and_another_observation_is_counted(tmp_path: Path) -> None:
    buffer = ReplayBuffer(40, BOX, MOVE, "cpu")
    for t in range(20):
        obs, after = (np.full((1, 3), (t + ahead) / 50, np.float32) * [0, 1, 1] for ahead in (0, 1))
        after[:, 1] += t == 7
        buffer.add(obs, after * [-1, 1, 1], np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    imported = import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    assert (imported.episodes, imported.cut) == (2, 1)


@pytest.mark.parametrize("steps", [7, 30])
def test_a_buffer_that_shares_observations_lacks_those_that_were_replaced(tmp_path: Path, steps: int) -> None:
    buffer = filled("shared", steps, 2)
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    skipped = steps == 30  # the oldest observation of a full buffer is the newest one
    obs, done = in_order(buffer, "observations")[""][skipped:], in_order(buffer, "dones")[""][skipped:]
    with dr.open(tmp_path / "store") as store:
        assert len(store) == obs.shape[0] * 2
        newest = [episode for episode in store.episodes if episode.ended == "cut"]
        assert len(newest) == (done[-1] == 0).sum()
        after = buffer.observations[buffer.pos]
        for episode in newest:
            assert len(episode.obs) == len(episode) + 1
            assert any((episode.obs[-1] == row).all() for row in after)
        for episode in store.episodes:
            if episode.ended == "terminated" and not any((episode.obs[-1] == row).all() for row in after):
                assert len(episode.obs) == len(episode)


def test_a_buffer_of_before_timeouts_were_handled(tmp_path: Path) -> None:
    buffer = filled("no timeouts", 7)
    del buffer.timeouts, buffer.handle_timeout_termination
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        ends = {episode.ended for episode in store.episodes}
    assert "terminated" in ends
    assert ends <= {"terminated", "cut"}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol_and_layout_of_arrays_is_read(tmp_path: Path, protocol: int) -> None:
    buffer = filled("scalars", 7)
    buffer.rewards = np.asfortranarray(buffer.rewards.astype(">f4"))
    buffer.dones = np.repeat(buffer.dones, 2, axis=0)[::2]
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer, protocol))
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        rewards = np.concatenate([episode.reward for episode in store.episodes])
    np.testing.assert_array_equal(rewards, buffer.rewards[:7, 0].astype("<f4"), strict=True)


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["vectors", "doubles", "images", "dicts"])
def test_a_round_trip_keeps_every_value_that_it_does_not_name(tmp_path: Path, case: str) -> None:
    dicts = dr.Schema(
        {"image": dr.Field((2, 2), "uint8"), "mass": dr.Field((), "float64")},
        dr.Field((3,), "float64"),
        dr.Field((), "int32"),
        extra={"log_prob": dr.Field((), "float32")},
        episode={"seed": dr.Field((), "int64")},
    )
    store = make_store(tmp_path / "store", case, schema=dicts if case == "dicts" else None, priorities=True)
    exported = check_round_trip(store, tmp_path / "buffer.pkl", export_dataset, import_dataset)
    expected = {"priority", "ends", "no_final_obs", "schema"}
    expected |= {"reward"} if case in ("doubles", "dicts") else set()
    expected |= {"action", "extra/log_prob", "episode/seed"} if case == "dicts" else set()
    assert {name for name, _ in exported.not_held} == expected


@pytest.mark.slow
def test_a_loaded_model_goes_on_with_an_exported_buffer(tmp_path: Path) -> None:
    from stable_baselines3 import DQN

    def episode(writer: dr.Writer, env: Any) -> None:
        obs, _ = env.reset()
        done = False
        while not done:
            after, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            writer.append(obs, 0, float(reward), terminated, truncated, next_obs=after)
            obs, done = after, terminated or truncated

    env = BitFlippingEnv(n_bits=4)
    with dr.create(tmp_path / "store", dr.Schema.from_env(env)) as store, store.writer() as writer:
        for _ in range(5):
            episode(writer, env)
        steps = store.refresh()
    model = DQN("MultiInputPolicy", env, buffer_size=steps, learning_starts=0, device="cpu")
    for buffer_class in ("DictReplayBuffer", "HerReplayBuffer"):
        export_dataset(tmp_path / "store", tmp_path / f"{buffer_class}.pkl", buffer_class=buffer_class)
        model.load_replay_buffer(tmp_path / f"{buffer_class}.pkl")
        assert type(model.replay_buffer).__name__ == buffer_class
        assert model.replay_buffer.size() == steps
        assert model.replay_buffer.sample(8).rewards.shape == (8, 1)


def test_a_her_buffer_comes_back_with_its_episodes(tmp_path: Path) -> None:
    env = DummyVecEnv([lambda: BitFlippingEnv(n_bits=3, max_steps=4)] * 2)
    arguments: Any = {"n_sampled_goal": 2, "goal_selection_strategy": "final"}
    before = HerReplayBuffer(40, env.observation_space, env.action_space, env, "cpu", 2, **arguments)
    env.seed(0)
    env.action_space.seed(0)  # episodes are open at the end
    obs: Any = env.reset()
    for _ in range(33):
        action = np.array([env.action_space.sample() for _ in range(2)])
        after, reward, done, infos = env.step(action)
        followed = {key: rows.copy() for key, rows in after.items()}
        for i in np.flatnonzero(done):
            for key, rows in followed.items():
                rows[i] = infos[i]["terminal_observation"][key]
        before.add({key: rows.copy() for key, rows in obs.items()}, followed, action, reward, done, infos)
        obs = {key: rows.copy() for key, rows in after.items()}
    save_to_pkl(tmp_path / "buffer.pkl", before)
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    export_dataset(tmp_path / "store", tmp_path / "again.pkl")
    with open(tmp_path / "again.pkl", "rb") as file:
        after = pickle.load(file)
    assert (after.n_sampled_goal, after.her_ratio) == (2, before.her_ratio)
    assert after.goal_selection_strategy is before.goal_selection_strategy
    with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
        before.truncate_last_trajectory()  # as `load_replay_buffer` does: an export has the open episodes like this
    for name in ("rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(in_order(after, name)[""], in_order(before, name)[""])
    # Episodes that were overwritten in part are whole to the export: they may be drawn again.
    lengths = in_order(before, "ep_length")[""]
    is_whole = lengths > 0
    np.testing.assert_array_equal(in_order(after, "ep_length")[""][is_whole], lengths[is_whole])
    after.set_env(env)
    assert after.sample(16).observations["observation"].shape == (16, 3)


def test_environments_that_would_differ_in_length_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    with pytest.raises(dr.SchemaError, match="3 environments would have 12 to 16 steps, and a buffer has the same"):
        export_dataset(store, tmp_path / "buffer.pkl", n_envs=3)
    with pytest.raises(dr.SchemaError, match="n_envs must be at least 1, not 0$"):
        export_dataset(store, tmp_path / "other.pkl", n_envs=0)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_part_of_an_import_is_exported_as_one_environment(tmp_path: Path) -> None:
    save_to_pkl(tmp_path / "buffer.pkl", filled("vectors", 30, 2))
    import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        odd = next(episode.ids[0] for episode in store.episodes if len(episode) % 2)
        exported = export_dataset(store, tmp_path / "again.pkl", where=lambda episode: episode.ids[0] == odd)
    with open(tmp_path / "again.pkl", "rb") as file:
        again = pickle.load(file)
    assert (again.n_envs, again.size()) == (1, exported.steps)


def test_what_no_buffer_holds_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "nested", "nested", PLAIN)
    with pytest.raises(dr.SchemaError, match="no buffer for tuples and nested dicts of observations$"):
        export_dataset(tmp_path / "nested", tmp_path / "buffer.pkl")
    schema = dr.Schema(dr.Field((2,), "float32"), {"move": dr.Field((), "float32")})
    make_store(tmp_path / "actions", "", PLAIN, schema=schema)
    with pytest.raises(dr.SchemaError, match="no buffer for actions that are dicts or tuples$"):
        export_dataset(tmp_path / "actions", tmp_path / "buffer.pkl")
    make_store(tmp_path / "vectors", "vectors", PLAIN)
    with pytest.raises(dr.SchemaError, match="a HerReplayBuffer cannot hold these observations; use a ReplayBuffer$"):
        export_dataset(tmp_path / "vectors", tmp_path / "buffer.pkl", buffer_class="HerReplayBuffer")
    with pytest.raises(dr.SchemaError, match="buffer_class must be ReplayBuffer, .* or None, not 'Ring'$"):
        export_dataset(tmp_path / "vectors", tmp_path / "buffer.pkl", buffer_class="Ring")
    assert not list(tmp_path.glob("*.pkl*"))


# --- hostile and damaged files ---------------------------------------------------------------------------------------


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def hostile() -> dict[str, Any]:
    return {
        "posix.system": Runs(os.system, "touch ran"),
        "builtins.eval": Runs(eval, "open('ran', 'w')"),
        "builtins.getattr": Runs(getattr, "text", "format"),
        "io.open": Runs(io.open, "ran", "w"),
        "builtins.object": Runs(object),
        "numpy.load": Runs(np.load, "ran"),
        "copyreg._reconstructor": Runs(__import__("copyreg")._reconstructor, dict, object, None),
    }


@pytest.mark.parametrize("name", hostile())
def test_a_pickle_that_would_run_code_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer: Any = filled("vectors", 7)
    buffer.infos = [hostile()[name]]
    for number, value in enumerate((buffer, hostile()[name])):
        (tmp_path / f"{number}.pkl").write_bytes(pickle.dumps(value, 4))
        with pytest.raises(dr.FormatError, match=r"\.pkl is refused: it asks for '.*', which is not loaded: it could"):
            import_dataset(tmp_path / f"{number}.pkl", tmp_path / "store")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pkl", "1.pkl"]


@pytest.mark.parametrize(
    "code",
    [
        b"cposix\nsystem\n(S'touch ran'\ntR.",  # protocol 0
        b"\x80\x02cnumpy\ndtype\n(N}X\x05\x00\x00\x00known}stb.",  # attributes of a class
        b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93)R.",
        b"\x80\x02cnumpy._core.numeric\n_frombuffer\n(tR.",
        b"\x80\x02cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R\x86R.",
        b"\x80\x02Pnumber.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension
        b"\x80\x04\x8c\x05numpy\x8c\x11dtype.__subclasses\x93.",
    ],
)
def test_tricks_with_what_may_be_loaded_end_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "buffer.pkl").write_bytes(code)
    with pytest.raises(dr.FormatError, match=r"buffer\.pkl is (refused|damaged|not a pickled replay buffer)"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["buffer.pkl"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* steps lead to another observation than the next row has:UserWarning")
def test_damaged_bytes_never_raise_anything_else(tmp_path: Path) -> None:
    whole = pickle.dumps(filled("dicts", 3, 2, capacity=4), 5)
    rng, refused, messages = random.Random(0), 0, []
    for number in range(200):
        if number < 100:
            data = whole[: number * len(whole) // 100]
        else:
            data = bytearray(whole)
            for _ in range(rng.choice([1, 3])):
                data[rng.randrange(len(data))] = rng.randrange(256)
        file = tmp_path / "buffer.pkl"
        file.write_bytes(data)
        with suppress(KeyboardInterrupt):
            try:
                import_dataset(file, tmp_path / f"{number}", progress=_stop)
            except (dr.FormatError, dr.SchemaError) as error:
                refused += 1
                messages.append(str(error))
        assert number >= 100 or not (tmp_path / f"{number}").exists()
    assert not any("\n" in message for message in messages)
    assert refused > 100


def _stop(*_: int) -> None:
    raise KeyboardInterrupt


def test_what_is_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="buffer.pkl cannot be read: No such file or directory$"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps({"observations": 1}))
    with pytest.raises(dr.FormatError, match="buffer.pkl is not a pickled replay buffer of Stable-Baselines3$"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    ours = DiskReplayBuffer(8, BOX, MOVE, path=tmp_path / "disk")
    save_to_pkl(tmp_path / "buffer.pkl", ours)
    ours.close()
    with pytest.raises(dr.FormatError, match="buffer.pkl has no steps: it names a store of this package"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    buffer = filled("vectors", 7)
    buffer.dones[2] = 0.5
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    with pytest.raises(dr.FormatError, match="dones is one truth value a step, a bool or 0 or 1, not 0.5$"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    buffer.dones[2], buffer.rewards = 0, buffer.rewards[:3]
    save_to_pkl(tmp_path / "buffer.pkl", buffer)
    with pytest.raises(dr.FormatError, match="the reward has the shape \\(3, 1\\) and dones have \\(12, 1\\)$"):
        import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_actions_of_float64_stay_so_where_the_buffer_has_them(tmp_path: Path) -> None:
    """Releases before 2.1 kept float64; this one casts to float32 when a step is added."""
    buffer = filled("no timeouts", 9)
    buffer.actions = buffer.actions.astype(np.float64) + 1e-12
    with open(tmp_path / "old.pkl", "wb") as file:
        pickle.dump(buffer, file)
    import_dataset(tmp_path / "old.pkl", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        action = np.concatenate([episode.action for episode in store.episodes])
        np.testing.assert_array_equal(action, buffer.actions[:9, 0], strict=True)
