"""All of a store in memory, against its episodes one by one."""

import json

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.support import serial_schema
from tests.testing.without import STORE, run_without


@pytest.fixture
def store(tmp_store):
    schema = serial_schema(
        obs={"image": dr.Field((2, 3), "uint8"), "pair": (dr.Field((4,), "float32"), dr.Field((), "int16"))},
        extra={"belief": {"mean": dr.Field((2,), "float64")}},
        episode={"seed": dr.Field((), "int64"), "goal": {"at": dr.Field((2,), "float32")}},
    )
    rng = np.random.default_rng(0)

    def obs(rows):
        image = rng.integers(0, 255, (rows, 2, 3), np.uint8)
        return {"image": image, "pair": (rng.random((rows, 4), np.float32), np.arange(rows, dtype=np.int16))}

    def rest(steps):
        return {"serial": rng.integers(0, 9, steps), "belief": {"mean": rng.random((steps, 2))}}

    with dr.create(tmp_store, schema, segment_steps=20) as store, store.writer() as one, store.writer() as other:
        for number, (writer, steps, final, ends, seed) in enumerate(
            [(one, 7, 1, (True, False), 3), (other, 11, 0, (False, True), None), (one, 1, 1, (False, False), 5)] * 4
        ):
            values = None if seed is None else {"seed": seed + number, "goal": {"at": np.full(2, number)}}
            reward, action = rng.random(steps, np.float32), rng.integers(0, 3, steps)
            writer.append_episode(
                obs(steps + final), action, reward, terminated=ends[0], truncated=ends[1], episode=values, **rest(steps)
            )
        for _ in range(3):  # an episode that stays open
            step = {name: leaf[0] if name == "serial" else {"mean": leaf["mean"][0]} for name, leaf in rest(1).items()}
            first = obs(1)
            pair = tuple(leaf[0] for leaf in first["pair"])
            one.append({"image": first["image"][0], "pair": pair}, 1, 0.5, False, **step)
        store.refresh()
        yield store


def test_arrays_have_every_step_and_episode(store):
    found, compared = store.to_numpy(), 0
    for number, episode in enumerate(store.episodes):
        rows = np.flatnonzero(found["episode"] == number)
        assert len(rows) == len(episode) == found["episodes"]["length"][number]
        np.testing.assert_array_equal(found["step"][rows], np.arange(len(episode)))
        np.testing.assert_array_equal(found["id"][rows], episode.ids)
        np.testing.assert_array_equal(found["time"][rows], episode.times)
        for name in ("terminated", "truncated"):
            expected = [False] * (len(episode) - 1) + [getattr(episode, name)]
            np.testing.assert_array_equal(found[name][rows], expected)
        for name in ("action", "reward", "serial"):
            np.testing.assert_array_equal(found[name][rows], episode[name])
        np.testing.assert_array_equal(found["belief"]["mean"][rows], episode["belief"]["mean"])
        final = found["episodes"]["final_obs"]
        pairs = [
            (found["obs"]["image"], final["image"], episode.obs["image"]),
            *((found["obs"]["pair"][i], final["pair"][i], episode.obs["pair"][i]) for i in ("0", "1")),
        ]
        for column, last, each in pairs:
            np.testing.assert_array_equal(column[rows], each[: len(episode)], strict=True)
            if len(each) > len(episode):
                np.testing.assert_array_equal(np.asarray(last[number]), each[-1])
            else:
                assert np.ma.getmaskarray(last)[number].all()
        seed, goal = found["episodes"]["seed"], found["episodes"]["goal"]["at"]
        if episode["seed"] is None:
            assert seed.mask[number]
            assert goal.mask[number].all()
        else:
            assert seed[number] == episode["seed"]
            np.testing.assert_array_equal(goal[number], episode["goal"]["at"])
        assert found["episodes"]["total_reward"][number] == episode.total_reward
        assert found["episodes"]["ended"][number] == episode.ended
        assert found["episodes"]["hidden_steps"][number] == 0
        compared += len(rows)
    assert compared == len(store) == len(found["reward"]) == 79


def test_a_data_frame_has_a_row_a_step(store):
    pytest.importorskip("pandas")
    frame, arrays = store.to_pandas(), store.to_numpy()
    assert frame.index.names == ["episode", "step"]
    np.testing.assert_array_equal(frame["reward"], arrays["reward"])
    np.testing.assert_array_equal(frame["obs.pair.0[3]"], arrays["obs"]["pair"]["0"][:, 3])
    np.testing.assert_array_equal(np.stack(frame["obs.image"]), arrays["obs"]["image"])
    np.testing.assert_array_equal(frame["belief.mean[1]"], arrays["belief"]["mean"][:, 1])
    returns = frame["reward"].astype(float).groupby("episode").sum()
    np.testing.assert_allclose(returns, arrays["episodes"]["total_reward"], rtol=1e-12)


def test_a_data_set_has_steps_and_episodes_as_dimensions(store):
    pytest.importorskip("xarray")
    data, arrays = store.to_xarray(), store.to_numpy()
    assert dict(data.sizes).items() >= {"step": 79, "episode": 13, "obs_image_0": 2, "obs_image_1": 3}.items()
    np.testing.assert_array_equal(data["obs.image"], arrays["obs"]["image"])
    np.testing.assert_array_equal(data["episode_of_step"], arrays["episode"])
    np.testing.assert_array_equal(data["has_episode_seed"], ~arrays["episodes"]["seed"].mask)
    np.testing.assert_array_equal(data["episode_seed"], arrays["episodes"]["seed"].filled(0))
    final = arrays["episodes"]["final_obs"]["image"]
    np.testing.assert_array_equal(data["final_obs.image"], final.filled(0))
    assert data["has_final_obs.image"].sum() == 8
    assert abs(data["time"].values.astype("int64") / 1e9 - arrays["time"]).max() < 1e-6


def test_hidden_steps_are_in_all_tables_and_named(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=10) as store, store.writer() as writer:
        for _ in range(3):
            writer.append_episode(
                np.zeros((7, *store.schema.obs.shape)),
                np.zeros(6, int),
                np.ones(6),
                terminated=True,
                serial=np.arange(6),
            )
        store.refresh()
        arrays = store.to_numpy()
        assert len(store) == 10
        assert arrays["hidden"].tolist() == [True] * 2 + [False] * 10
        assert arrays["step"].tolist() == [*range(6)] * 2
        assert arrays["episodes"]["length"].tolist() == store.episode_table()["length"].tolist() == [6, 6]
        assert arrays["episodes"]["hidden_steps"].tolist() == store.episode_table()["hidden_steps"].tolist() == [2, 0]
        assert arrays["episodes"]["total_reward"].tolist() == [6.0, 6.0]
        assert store.info()["total_reward"]["min"] == store.info()["length"]["min"] == 6
        pytest.importorskip("pandas")
        assert store.to_pandas()["hidden"].tolist() == arrays["hidden"].tolist()
        pytest.importorskip("xarray")
        assert store.to_xarray()["hidden"].values.tolist() == arrays["hidden"].tolist()


def test_a_field_called_hidden_keeps_its_name(tmp_store):
    schema = serial_schema(extra={"hidden": dr.Field((), "float32")})
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append(np.zeros(schema.obs.shape), 0, 1.0, True, serial=0, hidden=0.5)
        store.refresh()
        arrays = store.to_numpy()
        assert (arrays["hidden"].tolist(), arrays["is_hidden"].tolist()) == ([0.5], [False])


def test_fields_called_like_properties_are_columns_of_their_own(tmp_store):
    names = {name: dr.Field((), "float32") for name in ("id", "step", "episodes")}
    values = {name: dr.Field((), "float32") for name in ("length", "total_reward", "ended", "final_obs")}
    schema = serial_schema(extra=names, episode=values)
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        given = dict.fromkeys(values, 7.5)
        writer.append(np.zeros(schema.obs.shape), 0, 1.0, True, serial=0, episode=given, **dict.fromkeys(names, 0.5))
        store.refresh()
        arrays = store.to_numpy()
        episodes = arrays["episodes"]
        assert [arrays[f"extra/{name}"].tolist() for name in names] == [[0.5]] * 3
        assert arrays["id"].tolist() == store.episodes[0].ids.tolist()
        assert arrays["step"].tolist() == [0]
        assert [episodes[f"episode/{name}"].tolist() for name in values] == [[7.5]] * 4
        assert (episodes["length"].tolist(), episodes["total_reward"].tolist()) == ([1], [1.0])
        pytest.importorskip("pandas")
        frame = store.to_pandas()
        assert (frame["extra.id"].tolist(), frame["id"].tolist()) == ([0.5], arrays["id"].tolist())
        assert (frame["extra.step"].tolist(), frame.index.names) == ([0.5], ["episode", "step"])
        pytest.importorskip("xarray")
        data = store.to_xarray()
        assert (data["extra.id"].values.tolist(), data["id"].values.tolist()) == ([0.5], arrays["id"].tolist())
        assert data["episode.length"].values.tolist() == [7.5]
        assert data["episode_length"].values.tolist() == [1]


def test_an_empty_store_has_columns_without_rows(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store:
        arrays = store.to_numpy()
        assert arrays["obs"].shape == (0, *store.schema.obs.shape)
        assert len(arrays["episodes"]["id"]) == 0
        pytest.importorskip("pandas")
        assert len(store.to_pandas()) == 0
        pytest.importorskip("xarray")
        assert store.to_xarray().sizes["step"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("library", "what"), [("pandas", "a data frame"), ("xarray", "a data set")])
def test_what_is_missing_says_which_extra_brings_it(tmp_path, library, what):
    code = f"\nprint(json.dumps(message(dr.open(path).to_{library})))"
    assert json.loads(run_without([library], STORE + code, tmp_path / "store")) == (
        f"{what} needs a library that cannot be imported (No module named '{library}'): "
        f'pip install "diskreplay[{library}]"'
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_total_reward_is_the_same_to_the_last_bit_wherever_it_is_told(tmp_store, dtype):
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(1, 300, 60), 9000, 20_000]
    with dr.create(tmp_store, serial_schema(reward=dr.Field((), dtype))) as store:
        with store.writer() as writer:
            for steps in lengths:
                serials = {"serial": np.arange(steps)}
                reward = rng.normal(size=steps).astype(dtype)
                obs = np.zeros((steps + rng.integers(2), 3))
                writer.append_episode(obs, np.zeros(steps, int), reward, terminated=True, **serials)
        store.refresh()
        told = store.to_numpy()["episodes"]["total_reward"]
        own = [episode.total_reward for episode in store.episodes]
        assert told.tolist() == own
        np.testing.assert_allclose(own, [episode.reward.sum(dtype="f8") for episode in store.episodes], atol=1e-9)


def test_the_steps_between_two_episodes_count_for_neither(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        obs = np.zeros((4, *store.schema.obs.shape))
        for number in range(4):
            rewards, serials = np.full(3, 10.0**number), np.full(3, number)
            writer.append_episode(obs, np.zeros(3, int), rewards, terminated=True, serial=serials)
            for reward in (10**5, 10**6):
                writer.append(obs[0], 0, reward, False, next_obs=obs[1], serial=9)
            writer.discard_episode()
        writer.close()
        store.evict(lambda episode: episode["serial"][0] == 1)
        store.refresh()
        expected = [3.0, 300.0, 3000.0]
        assert [episode.total_reward for episode in store.episodes] == expected
        assert store.episode_table()["total_reward"].tolist() == expected
        assert store.to_numpy()["episodes"]["total_reward"].tolist() == expected
        assert store.info()["total_reward"]["max"] == expected[-1]
