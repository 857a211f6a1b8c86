"""What a store refuses beside values that do not fit its schema."""

import gymnasium as gym
import numpy as np
import pytest

import diskreplay as dr

BOX = gym.spaces.Box(np.array([-1, -np.inf], np.float32), np.array([1, 2], np.float32))


def made(path, action_space, validate, extra=None):
    schema = dr.Schema.from_spaces(gym.spaces.Box(-1, 1, (2,)), action_space, extra=extra)
    return dr.create(path, schema, validate=validate)


INVALID = [
    (gym.spaces.Discrete(3), 3, "action: 3 is outside its space, 0 to 2"),
    (gym.spaces.Discrete(3, start=5), 4, "action: 4 is outside its space, 5 to 7"),
    (gym.spaces.MultiDiscrete([2, 4]), np.array([1, 4]), "action: 4 is outside its space, 0 to 3"),
    (gym.spaces.MultiBinary(2), np.array([0, 2], np.int8), "action: 2 is outside its space, 0 to 1"),
    (BOX, np.array([0.5, 2.5], np.float32), "action: 2.5 is outside its space, -inf to 2.0"),
    (BOX, np.array([np.nan, 0], np.float32), "action: nan is outside its space, -1.0 to 1.0"),
    (gym.spaces.Box(0, 255, (2,), np.uint8), None, None),
    (gym.spaces.Dict(a=gym.spaces.Discrete(2)), {"a": 2}, "action/a: 2 is outside its space, 0 to 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("space", "action", "message"), INVALID)
def test_an_action_outside_its_space_is_refused_by_name_and_one_inside_is_not(tmp_store, space, action, message):
    with made(tmp_store, space, "space") as store, store.writer() as writer, store.writer(2) as vector:
        obs, good = np.zeros(2, np.float32), space.sample()
        writer.append(obs, good, 0.0, False)
        stacked = gym.vector.utils.batch_space(space, 2).sample()
        vector.append(np.zeros((2, 2), np.float32), stacked, np.zeros(2), np.zeros(2, bool))
        if message is None:
            return
        with pytest.raises(dr.SchemaError) as caught:
            writer.append(obs, action, 0.0, False)
        assert str(caught.value) == message
        if not isinstance(action, dict):
            rows = np.stack([np.asarray(good), np.asarray(action)])
            with pytest.raises(dr.SchemaError) as caught:
                vector.append(np.zeros((2, 2), np.float32), rows, np.zeros(2), np.zeros(2, bool))
            assert str(caught.value) == message
            with pytest.raises(dr.SchemaError) as caught:
                writer.append_episode(np.zeros((2, 2), np.float32), rows, np.zeros(2), terminated=True)
            assert str(caught.value) == message
            # What a masked lane holds does not matter.
            mask = np.array([True, False])
            vector.append(np.zeros((2, 2), np.float32), rows, np.zeros(2), np.zeros(2, bool), mask=mask)
        writer.append(obs, good, 0.0, True)
        store.refresh()
        assert len(store) == 4 + (not isinstance(action, dict))


@pytest.mark.slow
@pytest.mark.parametrize("validate", ["finite", "space"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(tmp_store, validate, value):
    extra = {"log_prob": dr.Field((), "float32")}
    obs, bad = np.zeros(2, np.float32), np.array([0, value], np.float32)
    with made(tmp_store, gym.spaces.Discrete(2), validate, extra) as store, store.writer() as writer:
        calls = {
            "obs": lambda: writer.append(bad, 0, 0.0, False, log_prob=0.0),
            "obs ": lambda: writer.append(obs, 0, 0.0, False, next_obs=bad, log_prob=0.0),
            "reward": lambda: writer.append(obs, 0, value, False, log_prob=0.0),
            "extra/log_prob": lambda: writer.append(obs, 0, 0.0, False, log_prob=value),
            "obs  ": lambda: writer.append_episode(np.stack([obs, bad]), [0], [0.0], terminated=True, log_prob=[0.0]),
        }
        for name, call in calls.items():
            with pytest.raises(dr.SchemaError) as caught:
                call()
            assert (
                str(caught.value) == f"{name.strip()}: {value} is not finite, and this store takes finite values only"
            )
        store.refresh()
        assert len(store) == 0


def test_it_is_the_stores_and_not_the_process_that_made_it(tmp_store):
    made(tmp_store, gym.spaces.Discrete(2), "space").close()
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        assert store.info()["validate"] == "space"
        assert store.verify() == []
        with pytest.raises(dr.SchemaError, match="outside its space"):
            writer.append(np.zeros(2, np.float32), 2, 0.0, False)


def test_nothing_is_validated_unless_asked_for(tmp_store):
    with made(tmp_store, gym.spaces.Discrete(2), None) as store, store.writer() as writer:
        writer.append(np.full(2, np.nan, np.float32), 7, np.nan, False)
        assert store.info()["validate"] is None


def test_actions_without_a_space_cannot_be_held_against_it(tmp_store):
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with pytest.raises(dr.SchemaError, match='action: validate="space" needs a field that came from a space'):
        dr.create(tmp_store, schema, validate="space")
    with pytest.raises(ValueError, match='validate must be "finite", "space" or None, not \'all\''):
        dr.create(tmp_store, schema, validate="all")
    assert not tmp_store.exists()
