"""The rollout buffer: what is added comes out whole, (steps, environments, ...), and is consumed by clearing only."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import diskreplay as dr

ATTRIBUTES = ("observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs")


class Filler:
    """Adds random steps to a buffer, and remembers them."""

    def __init__(self, buffer: dr.RolloutBuffer, num_envs: int, privileged: int = 0, seed: int = 0) -> None:
        self.buffer, self.num_envs, self.privileged = buffer, num_envs, privileged
        self.rng = np.random.default_rng(seed)
        self.steps: list[dict[str, Any]] = []

    def add(self, ends: float = 0.3) -> None:
        n, rng = self.num_envs, self.rng
        step = {
            "observations": torch.from_numpy(rng.standard_normal((n, 3)).astype("f4")),
            "actions": torch.from_numpy(rng.integers(0, 9, (n, 2))),
            "rewards": torch.from_numpy(rng.standard_normal(n).astype("f4")),
            "dones": torch.from_numpy((rng.random(n) < ends).astype("f4")),
            "values": torch.from_numpy(rng.standard_normal(n).astype("f4")),
            "log_probs": torch.from_numpy(rng.standard_normal(n).astype("f4")),
        }
        if self.privileged:
            step["privileged_observations"] = torch.from_numpy(rng.standard_normal((n, self.privileged)).astype("f4"))
        self.buffer.add(**step)
        self.steps.append(step)

    def expected(self) -> dict[str, torch.Tensor]:
        return {name: torch.stack([step[name] for step in self.steps]) for name in self.steps[0]}


def plain_gae(data: dict[str, torch.Tensor], last: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    values, dones, advantages = data["values"].double(), data["dones"].double(), []
    run = torch.zeros(len(last), dtype=torch.float64)
    for t in reversed(range(len(values))):
        following = last.double() if t == len(values) - 1 else values[t + 1]
        run = data["rewards"][t] + (1 - dones[t]) * (gamma * following + gamma * lam * run) - values[t]
        advantages.append(run)
    return torch.stack(advantages[::-1]).float()


@pytest.mark.slow
@settings(max_examples=15)
@given(
    num_envs=st.integers(1, 4),
    num_steps=st.integers(1, 40),
    fills=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    privileged=st.integers(0, 2),
    ends=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_rollout_is_what_was_added_since_the_last_one(
    num_envs: int, num_steps: int, fills: list[float], privileged: int, ends: float, seed: int
) -> None:
    with dr.RolloutBuffer(num_envs, num_steps, num_privileged_obs=privileged) as buffer:
        filler = Filler(buffer, num_envs, privileged, seed)
        for fill in fills:
            filler.steps.clear()
            for _ in range(1 + round(fill * (num_steps - 1))):
                filler.add(ends)
            assert len(buffer) == len(filler.steps) * num_envs
            expected = filler.expected()
            last = torch.from_numpy(filler.rng.standard_normal(num_envs).astype("f4"))
            buffer.compute_returns_and_advantages(last, gamma=0.9, gae_lambda=0.8)
            data = buffer.get_all_data()
            assert set(data) == {*ATTRIBUTES, "advantages", "returns"}
            for name, tensor in expected.items():
                assert torch.equal(data[name], tensor), name
                assert data[name].dtype == tensor.dtype, name
            assert privileged or data["privileged_observations"] is None
            advantages = plain_gae(expected, last, 0.9, 0.8)
            torch.testing.assert_close(buffer.advantages, advantages, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(buffer.returns, advantages + expected["values"], rtol=1e-5, atol=1e-5)
            buffer.clear()
            assert len(buffer) == 0


@pytest.mark.slow
def test_many_rollouts_use_the_disk_of_a_few() -> None:
    with dr.RolloutBuffer(8, 256) as buffer:
        filler = Filler(buffer, 8)
        for _ in range(20):
            filler.steps.clear()
            for _ in range(256):
                filler.add(0.01)
            assert torch.equal(buffer.observations, filler.expected()["observations"])
            buffer.empty()
        assert len(buffer.store) <= 8 * 8 * 256


def test_reading_consumes_nothing_and_a_full_buffer_takes_no_step() -> None:
    with dr.RolloutBuffer(2, 3, obs_shape=(3,), action_shape=(2,)) as buffer:
        filler = Filler(buffer, 2)
        for _ in range(3):
            filler.add()
            assert torch.equal(buffer.observations, filler.expected()["observations"])
        with pytest.raises(
            BufferError, match=re.escape("the rollout buffer has all its 6 steps: clear() it")
        ) as caught:
            filler.add()
        assert isinstance(caught.value, dr.ReplayError)
        assert len(buffer) == 6
        assert torch.equal(buffer.rewards, filler.expected()["rewards"])


def test_an_empty_buffer_has_nothing_to_read() -> None:
    with dr.RolloutBuffer(2, 3) as buffer:
        reads = [buffer.sample, buffer.get_all_data, lambda: buffer.compute_returns_and_advantages(torch.zeros(2))]
        for read in [*reads, lambda: buffer.observations]:
            with pytest.raises(BufferError, match="^the rollout buffer has 0 steps, and reading it needs 1: add some$"):
                read()
        assert buffer.advantages is None


def test_a_sample_is_all_steps_flat() -> None:
    with dr.RolloutBuffer(3, 4, num_privileged_obs=2) as buffer:
        filler = Filler(buffer, 3, privileged=2)
        for _ in range(4):
            filler.add()
        batch = buffer.sample()
        assert {"advantage", "ret", "next_states"} & set(batch) == set()
        buffer.compute_returns_and_advantages(torch.zeros(3))
        for batch in (buffer.sample(), buffer.sample()):
            expected = {name: tensor.flatten(0, 1) for name, tensor in filler.expected().items()}
            assert len(batch) == len(buffer) == 12
            assert torch.equal(batch.states, expected["observations"])
            assert torch.equal(batch.actions, expected["actions"])
            assert torch.equal(batch.rewards, expected["rewards"][:, None])
            assert torch.equal(batch.dones, expected["dones"][:, None])
            assert torch.equal(batch.log_prob, expected["log_probs"])
            assert torch.equal(batch.privileged_obs, expected["privileged_observations"])
            assert torch.equal(batch.advantage, buffer.advantages.flatten())
            assert torch.equal(batch.ret, buffer.returns.flatten())
        parts = list(batch.minibatches(5, seed=0))
        assert [len(part) for part in parts] == [5, 5, 2]
        assert sorted(torch.cat([part.ret for part in parts]).tolist()) == sorted(batch.ret.tolist())


def test_a_new_step_makes_the_estimates_old() -> None:
    with dr.RolloutBuffer(2, 3) as buffer:
        filler = Filler(buffer, 2)
        filler.add()
        buffer.compute_returns_and_advantages(np.zeros((2, 1)))
        assert buffer.advantages.shape == buffer.returns.shape == (1, 2)
        filler.add()
        assert buffer.advantages is None
        assert buffer.get_all_data()["returns"] is None


def test_pushed_experiences_keep_what_they_led_to() -> None:
    with dr.RolloutBuffer(capacity=4) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in (0, 10):
            # The third does not go on where the second ended.
            for t, done in ((0, False), (1, False), (5, True), (6, False)):
                t += start
                buffer.push(dr.Experience(torch.full((1, 2), t), t, float(t), torch.full((1, 2), t + 1), done))
            batch = buffer.sample()
            assert (batch.states[:, 0] - start).tolist() == [0, 1, 5, 6]
            assert torch.equal(batch.next_states, batch.states + 1)
            assert batch.dones[:, 0].tolist() == [0, 0, 1, 0]
            assert batch.actions.shape == batch.rewards.shape == (4, 1)
            assert buffer.observations.shape == (4, 1, 2)
            with pytest.raises(BufferError):
                buffer.push(dr.Experience(torch.zeros(1, 2), 0, 0.0, torch.zeros(1, 2), False))
            buffer.empty()


def test_a_rollout_of_pushed_and_added_steps_has_no_next_states() -> None:
    with dr.RolloutBuffer(capacity=4) as buffer:
        buffer.push(dr.Experience(np.zeros(2), 0, 1.0, np.ones(2), False))
        buffer.add(np.full(2, 5.0), 1, 1.0, True, 0.5, -1.0)
        batch = buffer.sample()
        assert "next_states" not in batch
        assert batch.states[:, 0].tolist() == [0, 5]
        assert batch.value.tolist() == [0, 0.5]


@pytest.mark.parametrize("axis", [(), (1,)])
def test_one_environment_comes_with_or_without_its_axis(axis: tuple[int, ...]) -> None:
    with dr.RolloutBuffer(num_steps=2) as buffer:
        for t in range(2):
            numbers = (np.full(axis, value) for value in (float(t), t == 1, 0.5, -0.5))
            buffer.add(np.full((*axis, 3), float(t)), np.full((*axis, 2), t), *numbers)
        buffer.compute_returns_and_advantages(0.0)
        assert buffer.observations.shape == (2, 1, 3)
        assert buffer.actions.shape == (2, 1, 2)
        assert buffer.rewards.tolist() == [[0.0], [1.0]]
        assert buffer.dones.tolist() == [[0.0], [1.0]]
        assert buffer.advantages.shape == (2, 1)


def test_discrete_actions_and_columns_of_scalars() -> None:
    with dr.RolloutBuffer(3, 2) as buffer:
        column = torch.ones(3, 1)
        buffer.add(torch.zeros(3, 1, 4), torch.tensor([1, 2, 3]), column, column, column, column)
        assert buffer.observations.shape == (1, 3, 1, 4)
        assert buffer.actions.tolist() == [[1, 2, 3]]
        assert buffer.values.shape == buffer.dones.shape == (1, 3)
        assert buffer.sample().actions.shape == (3, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": np.zeros((3, 3))}, "obs: got float64 of shape (3, 3), needs float32 of shape (2, 3)"),
        ({"actions": np.zeros((2, 2))}, "action: got float64 of shape (2, 2), needs int64 of shape (2, 2)"),
        ({"rewards": np.zeros(3)}, "reward: got float64 of shape (3,), needs float32 of shape (2,)"),
        ({"dones": np.zeros(3)}, "dones needs shape (2,), one truth value a lane"),
        ({"values": np.zeros((2, 2))}, "extra/value: got float64 of shape (2, 2), needs float32 of shape (2,)"),
        ({"log_probs": None}, "extra/log_prob: got object of shape ()"),
        ({"privileged_observations": np.zeros((2, 1))}, "privileged_observations must be None"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(change: dict[str, Any], message: str) -> None:
    with dr.RolloutBuffer(2, 4) as buffer:
        filler = Filler(buffer, 2)
        filler.add()
        step = {**filler.steps[0], **change}
        with pytest.raises(dr.SchemaError, match=re.escape(message)):
            buffer.add(**step)
        filler.add()
        assert torch.equal(buffer.observations, filler.expected()["observations"])


def test_privileged_observations_must_come_where_they_are_announced() -> None:
    with dr.RolloutBuffer(2, 4, num_privileged_obs=5) as buffer:
        with pytest.raises(dr.SchemaError, match="^privileged_observations needs 5 values: num_privileged_obs is 5$"):
            Filler(buffer, 2).add()
        assert buffer.store is None


def test_the_first_step_must_have_the_environments_axis() -> None:
    with dr.RolloutBuffer(4, 4) as buffer:
        with pytest.raises(
            dr.SchemaError, match=re.escape("obs: got float32 of shape (2, 3), needs a leading axis of 4")
        ):
            Filler(buffer, 2).add()
        with pytest.raises(ValueError, match="^push adds a step of one environment, and this buffer has 4: use add$"):
            buffer.push(dr.Experience(0.0, 0, 0.0, 0.0, False))
        assert buffer.store is None


def test_last_values_must_be_one_for_each_environment() -> None:
    with dr.RolloutBuffer(2, 4) as buffer:
        Filler(buffer, 2).add()
        with pytest.raises(ValueError, match="last_values must be one value for each of 2 environments"):
            buffer.compute_returns_and_advantages(torch.zeros(3))
        with pytest.raises(ValueError, match="gamma must be a number from 0 to 1"):
            buffer.compute_returns_and_advantages(torch.zeros(2), gamma=1.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give num_steps, the steps of each environment, or capacity"),
        ({"num_steps": 2, "capacity": 4}, "give num_steps, the steps of each environment, or capacity"),
        ({"num_envs": 3, "capacity": 4}, "capacity must be a multiple of num_envs, 3, not 4"),
        ({"num_envs": 0, "num_steps": 4}, "num_envs must be an int of at least 1"),
        ({"num_steps": 4, "num_privileged_obs": -1}, "num_privileged_obs must be an int of at least 0"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dr.RolloutBuffer(**arguments)


def test_capacity_counts_the_steps_of_all_environments() -> None:
    with dr.RolloutBuffer(2, capacity=4) as buffer:
        filler = Filler(buffer, 2)
        filler.add()
        filler.add()
        with pytest.raises(BufferError):
            filler.add()


def test_a_buffer_at_the_path_of_another_begins_empty(tmp_store: Path) -> None:
    with dr.RolloutBuffer(2, 4, path=tmp_store) as buffer:
        for _ in range(3):
            Filler(buffer, 2).add()
    with dr.RolloutBuffer(2, 4, path=tmp_store) as buffer:
        assert len(buffer) == 0
        filler = Filler(buffer, 2, seed=5)
        filler.add()
        assert torch.equal(buffer.observations, filler.expected()["observations"])
    with dr.open(tmp_store) as store:
        assert len(store) == 8
        # The fields have the names that views of rollouts look for.
        batch = dr.Sampler(store, dr.Rollouts(num_steps=1, next_value="value")).sample()
        assert batch.value.shape == (1, 4)


def test_a_store_of_other_rollouts_is_refused(tmp_store: Path) -> None:
    with dr.RolloutBuffer(2, 4, path=tmp_store) as buffer:
        Filler(buffer, 2).add()
    with pytest.raises(ValueError, match="keeps 8192 steps, not 65536"):
        dr.RolloutBuffer(8, 1024, path=tmp_store)
    with pytest.raises(dr.SchemaError, match="extra fields"):
        dr.RolloutBuffer(2, 4, num_privileged_obs=1, path=tmp_store)
