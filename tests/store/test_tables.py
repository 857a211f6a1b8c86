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
        assert found["episodes"]["return"][number] == episode.total_reward
        assert found["episodes"]["ended"][number] == episode.ended
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
    np.testing.assert_allclose(returns, arrays["episodes"]["return"], rtol=1e-12)


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
