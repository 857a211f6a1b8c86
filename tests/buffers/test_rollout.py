"""The rollout buffer: what is added comes out whole, (steps, environments, ...), and is consumed by clearing only."""

import itertools
import os
import re
import subprocess
import sys
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


@pytest.mark.slow(turns=4)
def test_many_rollouts_use_the_disk_of_a_few(tmp_store: Path) -> None:
    with dr.RolloutBuffer(8, 256, path=tmp_store) as buffer:
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
            BufferError, match=re.escape("the rollout buffer is full, with 6 steps: call clear()")
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
        names = {"observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs"}
        assert set(buffer.sample()) == {*names, "index"}
        buffer.compute_returns_and_advantages(torch.zeros(3))
        for batch in (buffer.sample(), buffer.sample()):
            expected = {name: tensor.flatten(0, 1) for name, tensor in filler.expected().items()}
            assert batch.batch_size == len(buffer) == 12
            assert set(batch) == {*names, "advantages", "returns", "index"}
            for name in names:
                assert torch.equal(batch[name].squeeze(-1), expected[name].squeeze(-1)), name
                assert batch[name].shape == (12, 1) or expected[name].ndim == 2, name
            assert torch.equal(batch.advantages, buffer.advantages.flatten()[:, None])
            assert torch.equal(batch.returns, buffer.returns.flatten()[:, None])
        parts = list(batch.minibatches(5, seed=0))
        assert [part.batch_size for part in parts] == [5, 5, 2]
        assert sorted(torch.cat([part.returns for part in parts]).tolist()) == sorted(batch.returns.tolist())


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
    with dr.RolloutBuffer(capacity=4) as buffer, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for start in (0, 10):
            # The third does not go on where the second ended.
            for t, done in ((0, False), (1, False), (5, True), (6, False)):
                t += start
                buffer.push(dr.Experience(torch.full((1, 2), t), t, float(t), torch.full((1, 2), t + 1), done))
            assert ["the episode was cut there" in str(warning.message) for warning in told] == [True]
            batch = buffer.sample()
            assert set(batch) == {"states", "actions", "rewards", "next_states", "dones", "index"}
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
        buffer.add(np.ones(2), 1, 1.0, True, 0.5, -1.0)
        batch = buffer.sample()
        assert "next_states" not in batch
        assert batch.observations[:, 0].tolist() == [0, 1]
        assert batch["values"].tolist() == [[0], [0.5]]


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
        ({"dones": np.array([0.5, 0])}, "one truth value a lane, bools or 0 and 1; got float64 (2,), reward="),
        ({"truncated": torch.tensor([0, 2])}, "and truncated=array([0, 2])"),
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


def test_a_vector_in_a_buffer_of_one_environment_is_told_of_num_envs() -> None:
    message = "^dones has 3 values, and this buffer is for one environment: for a vector, make it with num_envs=3$"
    zeros = np.zeros(3)
    with dr.RolloutBuffer(num_steps=4) as buffer:
        with pytest.raises(dr.SchemaError, match=message):
            buffer.add(np.zeros((3, 2)), zeros, zeros, zeros, zeros, zeros)
        with pytest.raises(dr.SchemaError, match=message):
            buffer.push(dr.Experience(np.zeros((3, 2)), zeros, zeros, np.zeros((3, 2)), zeros > 0))
        assert buffer.store is None


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
        ({}, "give either num_steps, the steps of each environment, or capacity"),
        ({"num_steps": 2, "capacity": 4}, "give either num_steps, the steps of each environment, or capacity"),
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


# --- time limits -----------------------------------------------------------------------------------------------------


def critic(obs: Any) -> torch.Tensor:
    return torch.as_tensor(obs).double() @ torch.tensor([0.5, -1.0, 0.25], dtype=torch.float64)


class TimeLimited:
    """Steps of which some terminate, some are truncated and some are both, with what came behind each."""

    def __init__(self, steps: int, envs: int, seed: int, ends: float = 0.25) -> None:
        rng = np.random.default_rng(seed)
        self.obs, self.final = rng.standard_normal((2, steps, envs, 3)).astype("f4")
        self.rewards = rng.standard_normal((steps, envs)).astype("f4")
        self.done, self.cut = rng.random((2, steps, envs)) < ends
        self.values = critic(self.obs).numpy().astype("f4")
        self.final_values = critic(self.final).numpy()
        self.last = rng.standard_normal(envs)

    def fill(self, buffer: dr.RolloutBuffer, final: bool = True, dones: Any = None) -> None:
        dones = self.done if dones is None else dones
        for t in range(len(self.obs)):
            zeros = np.zeros(self.obs.shape[1])
            ends = {"truncated": self.cut[t], "final_observations": self.final[t] if final else None}
            buffer.add(self.obs[t], zeros, self.rewards[t], dones[t], self.values[t], zeros, **ends)

    def advantages(self, gamma: float, lam: float) -> np.ndarray:
        steps, envs = self.rewards.shape
        found = np.zeros((steps, envs))
        for env in range(envs):
            run = 0.0
            for t in reversed(range(steps)):
                following = float(self.values[t + 1, env]) if t + 1 < steps else self.last[env]
                if self.cut[t, env]:
                    following, run = self.final_values[t, env], 0.0
                if self.done[t, env]:
                    following, run = 0.0, 0.0
                run = float(self.rewards[t, env]) + gamma * following - float(self.values[t, env]) + gamma * lam * run
                found[t, env] = run
        return found


@settings(max_examples=30)
@given(
    steps=st.integers(1, 20),
    envs=st.integers(1, 4),
    seed=st.integers(0, 99),
    ends=st.sampled_from([0.05, 0.3]),
    stored=st.booleans(),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_a_time_limit_is_bootstrapped_from_the_final_observation(
    steps: int, envs: int, seed: int, ends: float, stored: bool, gamma: float, lam: float
) -> None:
    given = TimeLimited(steps, envs, seed, ends)
    given.last[given.done[-1] | given.cut[-1]] = np.nan  # what lies behind an end is not read
    seen = []

    def value_fn(obs: torch.Tensor) -> torch.Tensor:
        seen.append(obs)
        return critic(obs)

    left = given.cut & ~given.done
    with dr.RolloutBuffer(envs, steps) as buffer:
        given.fill(buffer, final=stored)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not left.any() else "error")  # of a rollout with nothing to bootstrap
            if stored:
                buffer.compute_returns_and_advantages(given.last, gamma, lam, value_fn=value_fn)
                assert len(seen) == left.any()
                if seen:
                    assert torch.equal(seen[0], torch.from_numpy(given.final[left]))
            else:
                final_values = np.where(left, given.final_values, np.nan)
                buffer.compute_returns_and_advantages(given.last, gamma, lam, final_values=final_values)
        advantages = given.advantages(gamma, lam)
        np.testing.assert_allclose(buffer.advantages, advantages, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(buffer.returns, advantages + given.values, rtol=1e-5, atol=1e-5)
        assert buffer.dones.bool().tolist() == given.done.tolist()
        assert buffer.truncated.bool().tolist() == given.cut.tolist()


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])  # Apple's devices lack float64
def test_estimates_keep_their_values_when_others_are_computed(wide: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr("diskreplay.buffers.estimates.wide_dtype", lambda device: wide)
    given, lambdas, found = TimeLimited(6, 3, seed=0, ends=0.2), (0.5, 0.9), []
    with dr.RolloutBuffer(3, 6) as buffer:
        given.fill(buffer)
        for lam in lambdas:
            buffer.compute_returns_and_advantages(given.last, 0.9, lam, final_values=given.final_values)
            found.append((buffer.advantages, buffer.returns))
    for lam, (advantages, returns) in zip(lambdas, found, strict=True):
        np.testing.assert_allclose(advantages, given.advantages(0.9, lam), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(returns, given.advantages(0.9, lam) + given.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("name", ["rewards", "values"])
def test_a_nan_stays_in_its_episode(name: str, is_left: bool) -> None:
    given, found = TimeLimited(6, 2, seed=0, ends=0.0), []
    (given.cut if is_left else given.done)[2, 0] = (
        True  # episodes of the first environment are steps 0 to 2, and 3 to 5
    )
    for number in (getattr(given, name)[3, 0], np.nan):
        getattr(given, name)[3, 0] = number
        with dr.RolloutBuffer(2, 6) as buffer:
            given.fill(buffer)
            buffer.compute_returns_and_advantages(given.last, 0.9, 0.8, final_values=given.final_values)
            found.append((buffer.advantages.numpy().copy(), buffer.returns.numpy().copy()))
    for without, estimate in zip(*found, strict=True):
        assert np.isnan(estimate[:, 0]).tolist() == [False, False, False, True, False, False]
        np.testing.assert_array_equal(estimate[:3], without[:3])
        np.testing.assert_array_equal(estimate[:, 1], without[:, 1])


@pytest.mark.parametrize("numbers", [{"gamma": 1.5}, {"gae_lambda": -0.1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, float]) -> None:
    given = TimeLimited(2, 1, seed=0)
    with dr.RolloutBuffer(1, 2) as buffer:
        given.fill(buffer)
        with pytest.raises(ValueError, match="must be a number from 0 to 1"):
            buffer.compute_returns_and_advantages(given.last, value_fn=critic, **numbers)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stored", [False, True])
def test_the_store_at_a_path_has_the_episodes_and_each_final_observation(
    seed: int, stored: bool, tmp_store: Path
) -> None:
    steps, envs = 20, 1 + seed
    given = TimeLimited(steps, envs, seed)
    with dr.RolloutBuffer(envs, steps, path=tmp_store) as buffer:
        given.fill(buffer, final=stored)
        store = buffer.store
        store.refresh()
        assert len(store) == steps * envs
        ended = [[t for t in range(steps) if given.done[t, env] or given.cut[t, env]] for env in range(envs)]
        episodes = [episode for episode in store.episodes if episode.terminated or episode.truncated]
        assert len(episodes) == sum(map(len, ended))
        finals = {tuple(given.final[t, env]) for env in range(envs) for t in ended[env] if given.cut[t, env] and stored}
        assert {tuple(ep.obs[-1]) for ep in episodes if len(ep.obs) > len(ep)} == finals
        assert not any(episode.cut for episode in episodes)
        rows = [row for episode in store.episodes for row in episode.obs[: len(episode)].tolist()]
        assert sorted(rows) == sorted(given.obs.reshape(-1, 3).tolist())


def test_time_limits_are_bootstrapped_as_by_stable_baselines3() -> None:
    """Its PPO adds what the final observation is worth to the reward (`OnPolicyAlgorithm.collect_rollouts`)."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    steps, envs, compared, bootstrapped = 256, 8, 0, 0
    for seed, (gamma, lam) in enumerate([(0.99, 0.95), (0.9, 1.0), (1.0, 0.0)]):
        given = TimeLimited(steps, envs, seed, ends=0.05)
        box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        peer = buffers.RolloutBuffer(steps, box, spaces.Discrete(2), "cpu", lam, gamma, envs)
        limits, starts = given.cut & ~given.done, np.ones(envs)
        rewards = given.rewards + gamma * given.final_values * limits
        ended = given.done | given.cut
        for t in range(steps):
            values, zeros = torch.from_numpy(given.values[t]), torch.zeros(envs)
            peer.add(given.obs[t], np.zeros((envs, 1)), rewards[t], starts, values, zeros)
            starts = ended[t]
        peer.compute_returns_and_advantage(torch.from_numpy(given.last), ended[-1])
        with dr.RolloutBuffer(envs, steps) as buffer:
            given.fill(buffer)
            buffer.compute_returns_and_advantages(given.last, gamma, lam, value_fn=critic)
            np.testing.assert_allclose(buffer.advantages, peer.advantages, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(buffer.returns, peer.returns, rtol=1e-4, atol=1e-4)
        compared, bootstrapped = compared + peer.advantages.size, bootstrapped + int(limits.sum())
    assert (compared, bootstrapped > 200) == (3 * steps * envs, True)


def test_a_truncation_that_nothing_tells_the_value_of_is_bootstrapped_with_its_own_and_a_warning() -> None:
    given = TimeLimited(8, 2, seed=1)
    given.cut[3, 1], given.done[3, 1] = True, False
    with dr.RolloutBuffer(2, 8) as buffer:
        given.fill(buffer, final=False)
        with pytest.warns(UserWarning, match="was truncated, and the value of its final") as told:
            buffer.compute_returns_and_advantages(given.last, 0.9, 0.8)
        assert told[0].filename == __file__
        given.final_values = given.values
        np.testing.assert_allclose(buffer.advantages, given.advantages(0.9, 0.8), rtol=1e-5, atol=1e-5)
    with dr.RolloutBuffer(2, 8) as buffer:
        given.fill(buffer, final=False)
        buffer.compute_returns_and_advantages(given.last, 0.9, 0.8, final_values=buffer.values)  # without a warning
        np.testing.assert_allclose(buffer.advantages, given.advantages(0.9, 0.8), rtol=1e-5, atol=1e-5)


def test_final_observations_that_value_fn_needs_must_be_there() -> None:
    given = TimeLimited(8, 2, seed=1)
    given.done[:], given.cut[:] = False, False
    given.cut[3, 1] = True
    with dr.RolloutBuffer(2, 8) as buffer:
        given.fill(buffer, final=False)
        with pytest.raises(dr.ReplayError, match="was not added.*give final_observations to add, or final_values$"):
            buffer.compute_returns_and_advantages(given.last, value_fn=critic)
        for arguments, message in (
            ({"value_fn": critic, "final_values": given.final_values}, "give one of them"),
            ({"final_values": given.final_values[:4]}, re.escape("final_values must be [8, 2], one for each step")),
        ):
            with pytest.raises(ValueError, match=message):
                buffer.compute_returns_and_advantages(given.last, **arguments)
        assert buffer.advantages is None
        buffer.clear()
        given.fill(buffer)
        with pytest.raises(ValueError, match=re.escape("value_fn gave shape (3,) for 1 observations")):
            buffer.compute_returns_and_advantages(given.last, value_fn=lambda obs: torch.zeros(3))


def test_time_limits_that_are_given_as_terminations_too_are_told() -> None:
    given = TimeLimited(8, 2, seed=2)
    with dr.RolloutBuffer(2, 8) as buffer:
        given.fill(buffer, dones=given.done | given.cut)
        with pytest.warns(UserWarning, match="every truncated step is done as well") as told:
            buffer.compute_returns_and_advantages(given.last, value_fn=critic)
        assert told[0].filename == __file__
        buffer.compute_returns_and_advantages(given.last, value_fn=critic)  # once


@pytest.mark.parametrize("nested", [False, True])
def test_final_observations_come_as_gymnasium_has_them(nested: bool) -> None:
    gym = pytest.importorskip("gymnasium")
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from gymnasium.wrappers import TransformObservation

    box = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def make() -> Any:
        env = gym.make("CartPole-v1", max_episode_steps=9)
        if not nested:
            return env
        return TransformObservation(env, lambda obs: {"a": obs, "b": -obs}, gym.spaces.Dict(a=box, b=box))

    envs = SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    truncations, rng = [], np.random.default_rng(0)
    with dr.RolloutBuffer(3, 40) as buffer:
        obs, _ = envs.reset(seed=0)
        for _ in range(40):
            next_obs, reward, terminated, truncated, info = envs.step(rng.integers(0, 2, 3))
            final = info.get("final_obs")
            more = {"truncated": truncated, "final_observations": final}
            buffer.add(obs, np.zeros(3), reward, terminated, np.zeros(3), np.zeros(3), **more)
            truncations += [final[env] for env in np.flatnonzero(truncated & ~terminated)]
            obs = next_obs
        seen: list[Any] = []
        value_fn = lambda obs: (seen.append(obs), torch.zeros(len(obs["a"] if nested else obs)))[1]  # noqa: E731
        buffer.compute_returns_and_advantages(np.zeros(3), value_fn=value_fn)
    assert len(truncations) > 5
    for key in ("a", "b") if nested else ("",):
        found, expected = (seen[0][key], [x[key] for x in truncations]) if nested else (seen[0], truncations)
        assert found.tolist() == np.stack(expected).tolist()


def fails_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the append of a store with this number, and no other, find a full disk."""
    append, calls = dr.VectorWriter.append, itertools.count()

    def failing(self: dr.VectorWriter, *args: Any, **kwargs: Any) -> None:
        if next(calls) == number:
            raise dr.StorageFull("no room")
        append(self, *args, **kwargs)

    monkeypatch.setattr(dr.VectorWriter, "append", failing)


@pytest.mark.parametrize("number", [3, 4])  # the first or the second part of the step with a final observation
def test_a_disk_that_fills_up_is_told_by_the_next_call_and_leaves_the_buffer_whole(
    number: int, tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = TimeLimited(6, 3, seed=0)
    given.cut[:4], given.cut[3] = False, [True, False, False]
    given.cut[4:] = False
    with dr.RolloutBuffer(3, 6, path=tmp_store) as buffer:
        fails_once(monkeypatch, number)
        for t in range(6):
            step = given.obs[t], np.zeros(3), given.rewards[t], given.done[t], given.values[t], np.zeros(3)
            more = {"truncated": given.cut[t], "final_observations": given.final[t]}
            if t == 3:
                buffer.add(*step, **more)
                with pytest.raises(dr.StorageFull, match="^no room$"):
                    buffer.get_all_data()
            else:
                buffer.add(*step, **more)
        assert torch.equal(buffer.observations, torch.from_numpy(given.obs))
        buffer.compute_returns_and_advantages(given.last, 0.9, 0.8, value_fn=critic)
        np.testing.assert_allclose(buffer.advantages, given.advantages(0.9, 0.8), rtol=1e-5, atol=1e-5)
    with dr.open(tmp_store) as store:
        stored = [episode.obs[: len(episode)].tolist() for episode in store.episodes]
        rows = [row for episode in stored for row in episode]
        kept = [*given.obs[[0, 1, 2, 4, 5]].reshape(-1, 3), *(given.obs[3, :1] if number == 4 else [])]
        assert sorted(rows) == sorted(row.tolist() for row in kept)
        # No episode has a gap.
        assert not any(given.obs[2, env].tolist() in episode[:-1] for episode in stored for env in (1, 2))


def add_for_ever(filler: Filler) -> None:
    while True:
        filler.add()


def test_a_failure_of_the_store_is_told_by_add_or_by_close(
    tmp_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_once(monkeypatch, 0)
    with pytest.raises(dr.StorageFull), dr.RolloutBuffer(2, 8, path=tmp_store) as buffer:
        Filler(buffer, 2).add()
    assert buffer.close() is None
    fails_once(monkeypatch, 0)
    with dr.RolloutBuffer(2, 10_000, path=tmp_path / "other") as buffer:
        filler = Filler(buffer, 2)
        with pytest.raises(dr.StorageFull):
            add_for_ever(filler)
        assert len(buffer) == 2 * len(filler.steps)
        filler.add()
        assert torch.equal(buffer.observations, filler.expected()["observations"])


def test_what_a_buffer_adds_is_in_its_store_when_that_is_asked_for(tmp_store: Path) -> None:
    with dr.RolloutBuffer(2, 100, path=tmp_store) as buffer:
        assert buffer.store is None
        filler = Filler(buffer, 2)
        for _ in range(100):
            filler.add(0.0)
        kept = buffer.observations.clone()
        buffer.observations.zero_()  # the tensors are the user's to change
        buffer.clear()
        for _ in range(50):
            filler.add(0.0)
        buffer.store.refresh()
        assert len(buffer.store) == 300
        stored = np.concatenate([episode.obs[:100] for episode in buffer.store.episodes])
        assert stored.tolist() == kept.transpose(0, 1).flatten(0, 1).tolist()


def test_a_step_whose_store_cannot_be_made_is_not_added(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.write_bytes(b"a file")
    step = np.ones((2, 3), "f4"), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2)
    seen = []
    with dr.RolloutBuffer(2, 4, path=folder / "store") as buffer:
        for _ in range(2):
            with pytest.raises(FileExistsError):
                buffer.add(*step, truncated=np.ones(2), final_observations=np.full((2, 3), 7.0))
            assert len(buffer) == 0
        folder.unlink()
        folder.mkdir()
        buffer.add(*step, truncated=np.ones(2), final_observations=np.full((2, 3), 5.0))
        buffer.compute_returns_and_advantages(np.zeros(2), value_fn=lambda obs: seen.append(obs) or obs[:, 0])
        assert [obs.tolist() for obs in seen] == [[[5.0] * 3] * 2]
        buffer.store.refresh()
        assert len(buffer.store) == 2


UNCLOSED = """
import sys
import numpy as np
import diskreplay as dr
buffer = dr.RolloutBuffer(3, 30, path=sys.argv[1])
for t in range(30):
    buffer.add(np.full((3, 2), float(t)), np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3))
"""
FORKED = """
import os
pid = os.fork()
if pid == 0:
    print(buffer.observations[:, 0, 0].sum().item(), len(buffer), flush=True)
    buffer.clear()
    try:
        for t in range(3):
            buffer.add(np.zeros((3, 2)), np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3))
            len(buffer), buffer.rewards
    except dr.Closed as error:
        print(error, flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
buffer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [UNCLOSED, UNCLOSED + "del buffer\n", UNCLOSED + FORKED])
def test_steps_that_wait_are_stored_at_the_end_of_the_process(code: str, tmp_store: Path) -> None:
    root = Path(dr.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_store)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    if FORKED in code:
        assert re.fullmatch(r"435\.0 90\nthis writer belongs to the parent of this forked process.*\n", done.stdout)
    with dr.open(tmp_store) as store:
        assert len(store) == 90
        assert [episode.obs[:, 0].tolist() for episode in store.episodes] == [list(range(30))] * 3


def test_nested_observations_and_actions_come_as_they_were_given() -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (6, 2, 4, 4), "u1")
    speeds, finals = rng.standard_normal((2, 6, 2)).astype("f4")
    cut = np.zeros((6, 2), bool)
    cut[2, 1] = cut[5, 0] = True
    seen: list[Any] = []

    def value_fn(obs: Any) -> torch.Tensor:
        seen.append(obs)
        return obs["at"][1]

    with dr.RolloutBuffer(2, 6) as buffer:
        for t in range(6):
            obs = {"image": frames[t], "at": (np.arange(2), speeds[t])}
            final = {"image": frames[t], "at": (np.arange(2), finals[t])}
            action = (np.full(2, t), np.ones((2, 3)))
            more = {"truncated": cut[t], "final_observations": final}
            buffer.add(obs, action, *np.zeros((4, 2)), **more)
        buffer.compute_returns_and_advantages(np.zeros(2), gamma=1.0, gae_lambda=0.0, value_fn=value_fn)
        np.testing.assert_allclose(buffer.advantages, np.where(cut, finals, 0.0))
        assert torch.equal(buffer.observations["at"][1], torch.from_numpy(speeds))
        batch = buffer.sample()
        assert (batch.observations["at"]["1"].shape, batch.actions[0].shape) == ((12, 1), (12, 1))
        assert torch.equal(batch.observations["image"], torch.from_numpy(frames).flatten(0, 1))
        part = next(buffer.sequences(4))
        assert part.actions[1].shape == (3, 6, 3)
    assert seen[0]["image"].shape == (2, 4, 4)


# --- recurrent networks ----------------------------------------------------------------------------------------------


def test_sequences_are_whole_episodes_with_masks_and_initial_states() -> None:
    given = TimeLimited(20, 3, seed=0, ends=0.1)
    hidden = dr.Field((2, 4), "float32")
    with dr.RolloutBuffer(3, 20, num_privileged_obs=1, extra={"hidden": hidden}) as buffer:
        for t in range(20):
            numbers = [given.rewards[t], given.done[t], given.values[t], np.full(3, -t)]
            more = {"hidden": np.full((3, 2, 4), t), "privileged_observations": np.ones((3, 1))}
            buffer.add(given.obs[t], np.arange(3), *numbers, truncated=given.cut[t], **more)
        buffer.compute_returns_and_advantages(given.last, final_values=given.final_values)
        names = {"observations", "privileged_observations", "actions", "rewards", "dones", "values", "log_probs"}
        names |= {"hidden", "advantages", "returns", "index", "mask"}
        ended = given.done | given.cut
        for length in (None, 6):
            seen = np.zeros((20, 3), int)
            for part in buffer.sequences(4, seed=1, length=length, start_only=("hidden",)):
                assert set(part) == names
                size, longest = part.mask.shape[:2]
                assert part.batch_size == size
                assert part.mask.shape == part.rewards.shape == part.advantages.shape == (size, longest, 1)
                assert part.observations.shape == (size, longest, 3)
                assert part.hidden.shape == (size, 2, 4)
                for i in range(size):
                    count, env = int(part.mask[i].sum()), int(part.actions[i, 0])
                    first = int(part.hidden[i, 0, 0])  # which step's state it is
                    rows = slice(first, first + count)
                    seen[rows, env] += 1
                    assert first == 0 or ended[first - 1, env] or (length is not None and count > 0)
                    assert not ended[first : first + count - 1, env].any()
                    assert part.observations[i, :count].tolist() == given.obs[rows, env].tolist()
                    assert torch.equal(part.advantages[i, :count, 0], buffer.advantages[rows, env])
                    assert not part.observations[i, count:].any()
            assert (seen == 1).all()
        assert len(buffer) == 60  # none was consumed


@pytest.mark.parametrize("name", ["value", "states", "returns", "next_hidden", "obs"])
def test_an_extra_field_has_a_name_of_its_own(name: str) -> None:
    extra = {name: dr.Field((), "float32")}
    with pytest.raises(ValueError, match=f"{name!r}"), dr.RolloutBuffer(1, 4, extra=extra) as buffer:
        buffer.add(np.zeros(3), 0, 0.0, False, 0.0, 0.0, **{name: 0.0})


# --- tensors ---------------------------------------------------------------------------------------------------------


def trees(rng: np.random.Generator, n: int, dtype: str) -> Any:
    """Random observations of n environments: nested, with a leaf of the dtype."""
    image = rng.integers(0, 2 if dtype == "bool" else 200, (n, 2, 2)).astype(dtype)
    return {"image": image, "at": (rng.standard_normal(n).astype("f4"), rng.integers(0, 9, (n, 3)))}


def leaves(tree: Any) -> list[np.ndarray]:
    return [tree["image"], *tree["at"]]


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(["float32", "float16", "uint8", "bool", "uint16", "int64", "float64"]),
    envs=st.integers(1, 4),
    fills=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    as_tensors=st.booleans(),
    held=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_tensors_hold_what_was_added_and_outlive_clear(
    dtype: str, envs: int, fills: list[int], as_tensors: bool, held: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kept: list[tuple[dr.Batch, list[np.ndarray], np.ndarray]] = []
    with dr.RolloutBuffer(envs, 9) as buffer:
        for steps in fills:
            every = [trees(rng, envs, dtype) for _ in range(steps)]
            expected = [np.stack(parts) for parts in zip(*map(leaves, every), strict=True)]
            numbers = rng.standard_normal((steps, 3, envs)).astype("f4")
            for obs, (reward, value, log_prob) in zip(every, numbers, strict=True):
                given = obs
                if as_tensors:
                    given = {"image": torch.from_numpy(obs["image"]), "at": tuple(map(torch.from_numpy, obs["at"]))}
                buffer.add(given, np.zeros((envs, 2), "f4"), reward, np.zeros(envs), value[:, None], log_prob)
                for array in leaves(obs):
                    array[...] = 0  # the caller's own memory, which it may use again
            assert len(buffer) == steps * envs
            for found, array in zip(leaves(buffer.observations), expected, strict=True):
                assert found.numpy().tolist() == array.astype(found.numpy().dtype).tolist()
            assert str(buffer.observations["image"].dtype) == (
                "torch.float32" if dtype == "float64" else f"torch.{dtype}"
            )
            assert buffer.rewards.numpy().tolist() == numbers[:, 0].tolist()
            assert buffer.values.numpy().tolist() == numbers[:, 1].tolist()
            batch = buffer.sample()
            if held:
                kept.append((batch, [leaf.numpy().copy() for leaf in leaves(batch.observations)], numbers[:, 0]))
            del batch
            buffer.clear()
    index = [number for batch, *_ in kept for number in batch.index.tolist()]
    assert index == list(range(len(index)))
    for batch, observations, rewards in kept:
        assert batch.rewards.flatten().tolist() == rewards.flatten().tolist()
        for found, array in zip(leaves(batch.observations), observations, strict=True):
            assert found.numpy().tolist() == array.tolist()


def test_memory_is_used_again_unless_a_tensor_of_it_is_alive() -> None:
    with dr.RolloutBuffer(4, 3) as buffer:
        filler = Filler(buffer, 4)

        def fill() -> int:
            buffer.clear()
            filler.steps.clear()
            for _ in range(3):
                filler.add()
            return buffer.observations.data_ptr()

        first = fill()
        assert fill() == first
        held = buffer.sample().rewards[2:3]  # a view of a view
        value, second = held.item(), fill()
        assert second != first
        assert fill() == second
        assert held.item() == value
        del held
        assert fill() in (first, second)


def test_attributes_are_the_tensors_of_the_buffer() -> None:
    with dr.RolloutBuffer(2, 4) as buffer:
        filler = Filler(buffer, 2)
        filler.add()
        filler.add()
        assert buffer.rewards.shape == (2, 2)
        buffer.rewards[0, 1] = 7.0
        assert buffer.get_all_data()["rewards"][0, 1] == 7.0
        filler.add()
        assert buffer.sample().rewards[1, 0] == 7.0
        assert buffer.observations.data_ptr() == buffer.sample().observations.data_ptr()


def test_a_loss_can_be_computed_from_steps_that_were_added_in_inference_mode() -> None:
    network = torch.nn.Linear(3, 1)
    with dr.RolloutBuffer(2, 4) as buffer:
        for rollout in range(2):
            with torch.inference_mode():
                for _ in range(4):
                    obs = torch.randn(2, 3)
                    buffer.add(obs, torch.zeros(2), torch.ones(2), torch.zeros(2), network(obs), torch.zeros(2))
                buffer.compute_returns_and_advantages(network(obs))
                batch = buffer.sample()
            loss = (network(batch.observations) - batch.returns).square().mean() + batch.advantages.mean()
            loss.backward()
            assert network.weight.grad.abs().sum() > 0
            assert not buffer.observations.requires_grad
            assert all(part.index.sum() >= 0 for part in batch.minibatches(3, seed=rollout))
            buffer.clear()


def test_values_with_a_gradient_are_added_without_it() -> None:
    network = torch.nn.Linear(3, 1)
    with dr.RolloutBuffer(2, 1) as buffer:
        obs = torch.randn(2, 3, requires_grad=True)
        values = network(obs)
        buffer.add(obs, torch.zeros(2), torch.ones(2), torch.zeros(2), values, values.sum(1))
        buffer.compute_returns_and_advantages(network(obs))
        batch = buffer.sample()
        assert not any(batch[name].requires_grad for name in batch)
        assert batch["values"].tolist() == values.tolist()


def test_each_step_is_in_one_minibatch_an_epoch_and_orders_differ() -> None:
    with dr.RolloutBuffer(5, 20) as buffer:
        for t in range(20):
            numbers = np.arange(5.0) + 5 * t
            buffer.add(numbers[:, None], np.zeros(5), numbers, np.zeros(5), numbers, numbers)
        orders = []
        for seed in range(200):
            parts = list(buffer.sample().minibatches(30, epochs=2, seed=seed))
            assert [part.batch_size for part in parts] == [30, 30, 30, 10] * 2
            order = torch.cat([part.rewards[:, 0] for part in parts]).reshape(2, 100)
            assert (order.sort().values == torch.arange(100.0)).all()
            assert torch.equal(torch.cat([part.observations[:, 0] for part in parts]), order.flatten())
            orders.append(order)
        # The place of a step is uniform: its mean over 400 orders is within five standard deviations.
        places = torch.cat(orders).argsort().double().mean(0)
        assert (places - 49.5).abs().max() < 5 * np.sqrt((100**2 - 1) / 12 / 400)
