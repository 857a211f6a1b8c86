"""The replay buffer of several environments: each is a stream of its own, against plain loops and peers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from tests.testing.device import Device


class Vector:
    """Steps of environments that end at random; an observation says which environment and step it is of."""

    def __init__(self, num_envs: int, seed: int, ends: float = 0.2) -> None:
        self.num_envs, self.ends, self.rng = num_envs, ends, np.random.default_rng(seed)
        self.serial = np.zeros(num_envs, int)
        self.steps: list[list[dict[str, Any]]] = [[] for _ in range(num_envs)]

    def step(self) -> dict[str, Any]:
        serial, rng = self.serial, self.rng
        done, truncated = rng.random((2, self.num_envs)) < self.ends
        step = {
            "obs": self.obs(serial),
            "action": serial.copy(),
            "reward": rng.standard_normal(self.num_envs).astype("f4"),
            "next_obs": self.obs(serial + 1),
            "done": done,
            "truncated": truncated,
        }
        for env in range(self.num_envs):
            self.steps[env].append({name: value[env] for name, value in step.items()})
        self.serial = serial + 1 + (done | truncated)  # a reset is another observation
        return step

    def obs(self, serial: Any) -> Any:
        return np.stack([np.arange(self.num_envs), serial], 1).astype("f4")

    def window(self, env: int, start: int, n_step: int, gamma: float) -> tuple[float, float, int, bool, list[float]]:
        """The n-step return, discount, number of steps, whether it is done, and the next observation; by a loop."""
        steps, total, k = self.steps[env], 0.0, 0
        while True:
            step = steps[start + k]
            total += gamma**k * float(step["reward"])
            k += 1
            if step["done"] or step["truncated"] or k == n_step:
                break
        done = bool(step["done"])
        return total, 0.0 if done else gamma**k, k, done, step["next_obs"].tolist()


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(2, 5), st.integers(1, 30), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_each_environment_of_a_vector_is_a_stream_of_its_own(
    num_envs: int, count: int, n_step: int, seed: int, clear: bool
) -> None:
    vector = Vector(num_envs, seed)
    with dr.ReplayBuffer(10_000, num_envs=num_envs, n_step=n_step, gamma=0.9) as buffer:
        for t in range(count):
            buffer.add(**vector.step())
            if clear and t == count // 2:
                buffer.clear()
                assert len(buffer) == 0
        begin = count // 2 + 1 if clear else 0
        sampleable = {}
        for env in range(num_envs):
            for start in range(begin, count):
                ends = [s["done"] or s["truncated"] for s in vector.steps[env][start : start + n_step]]
                if any(ends) or len(ends) == n_step:
                    sampleable[env, int(vector.steps[env][start]["action"])] = start
        assert len(buffer) == len(sampleable)
        if not sampleable:
            return
        batch = buffer.sample(len(buffer))
        assert {(int(env), int(serial)) for env, serial in batch.states} == set(sampleable)
        for i, (env, serial) in enumerate(batch.states.int().tolist()):
            total, discount, k, done, next_obs = vector.window(env, sampleable[env, serial], n_step, 0.9)
            assert batch.next_states[i].tolist() == next_obs
            assert (batch.n_steps[i].item(), batch.dones[i].item()) == (k, done)
            assert (batch.discounts[i].item(), batch.rewards[i].item()) == pytest.approx((discount, total), abs=1e-5)
        assert [int(step.state[1]) for step in buffer if step.state[0] == 1] == sorted(
            serial for env, serial in sampleable if env == 1
        )


@pytest.mark.slow
def test_n_step_returns_of_a_vector_are_those_of_stable_baselines3(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    compared = 0
    for n_step in (1, 3, 5):
        vector = Vector(4, seed=n_step)
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        peer = buffers.NStepReplayBuffer(8_000, box, spaces.Discrete(9), "cpu", n_envs=4, n_steps=n_step, gamma=0.97)
        with dr.ReplayBuffer(8_000, num_envs=4, n_step=n_step, gamma=0.97) as buffer:
            for _ in range(2_000):
                step = vector.step()
                buffer.add(**step)
                ended = step["done"] | step["truncated"]
                infos = [{"TimeLimit.truncated": bool(x)} for x in step["truncated"] & ~step["done"]]
                peer.add(*(step[name] for name in ("obs", "next_obs", "action", "reward")), ended, infos)
            batch = buffer.sample(len(buffer))
        env = batch.states[:, 0].int().numpy()
        serials = [{int(step["action"]): t for t, step in enumerate(steps)} for steps in vector.steps]
        at = np.array([serials[e][int(s)] for e, s in zip(env, batch.states[:, 1], strict=True)])
        monkeypatch.setattr(np.random, "randint", lambda *_, size, chosen=env: chosen)
        theirs = peer._get_samples(at)
        assert torch.equal(batch.states, theirs.observations)
        assert torch.equal(batch.next_states, theirs.next_observations)
        assert torch.equal(batch.dones, theirs.dones)
        torch.testing.assert_close(batch.rewards, theirs.rewards)
        torch.testing.assert_close(batch.discounts, theirs.discounts * (1 - theirs.dones))
        compared += batch.batch_size
    assert compared > 23_900


@pytest.mark.slow
def test_n_step_targets_of_a_vector_are_those_of_tianshou() -> None:
    data = pytest.importorskip("tianshou.data")
    algorithms = pytest.importorskip("tianshou.algorithm.algorithm_base")
    weights, count, compared = torch.tensor([0.3, 0.01]), 1_000, 0

    def values(buffer: Any, indices: np.ndarray) -> torch.Tensor:
        return (torch.from_numpy(buffer[indices].obs_next) @ weights)[:, None]

    for n_step in (1, 2, 4):
        vector, peer = Vector(3, seed=n_step), data.VectorReplayBuffer(3 * count, 3)
        with dr.ReplayBuffer(3 * count, num_envs=3, n_step=n_step, gamma=0.95) as buffer:
            for _ in range(count):
                step = vector.step()
                buffer.add(**step)
                cut = step["truncated"] & ~step["done"]
                names = {"act": "action", "rew": "reward", "terminated": "done", "obs": "obs", "obs_next": "next_obs"}
                peer.add(data.Batch({x: step[y] for x, y in names.items()} | {"truncated": cut, "info": {}}))
            batch = buffer.sample(len(buffer))
        at = [{int(step["action"]): t for t, step in enumerate(steps)} for steps in vector.steps]
        indices = np.array([env * count + at[env][serial] for env, serial in batch.states.int().tolist()])
        compute = algorithms.OffPolicyAlgorithm.compute_nstep_return
        theirs = compute(peer[indices], peer, indices, values, gamma=0.95, n_step=n_step).returns
        targets = batch.rewards + batch.discounts * (batch.next_states @ weights)[:, None]
        torch.testing.assert_close(targets, theirs.float(), rtol=1e-5, atol=1e-5)
        compared += batch.batch_size
    assert compared > 8_990


def test_environments_that_were_only_reset_are_passed_over(tmp_store: Path) -> None:
    """With NEXT_STEP autoreset; a recorder of whole vectors has the same episodes."""
    gym = pytest.importorskip("gymnasium")
    rng, envs = np.random.default_rng(0), [gym.make_vec("CartPole-v1", 3, vectorization_mode="sync") for _ in range(2)]
    for vector in envs:
        for env in vector.envs:
            env._max_episode_steps = 12
    with dr.create(tmp_store, dr.Schema.from_env(envs[0])) as store, dr.ReplayBuffer(1000, num_envs=3) as buffer:
        recorded = dr.RecordVectorEpisodes(envs[1], store)
        obs, _ = envs[0].reset(seed=0)
        recorded.reset(seed=0)
        ended = np.zeros(3, bool)
        for _ in range(60):
            action = rng.integers(0, 2, 3)
            next_obs, reward, terminated, truncated, _ = envs[0].step(action)
            recorded.step(action)
            buffer.add(obs, action, reward, next_obs, terminated, truncated, mask=~ended)
            obs, ended = next_obs, terminated | truncated

        def episodes(of: dr.Store) -> list[Any]:
            of.refresh()
            found = [(ep.obs.tolist(), ep.action.tolist(), ep.terminated, ep.truncated) for ep in of.episodes]
            return sorted(found)

        steps = [len(action) for _, action, *_ in episodes(store)]
        assert episodes(buffer.store) == episodes(store)
        assert len(buffer) == sum(steps) > 100


def test_a_vector_needs_its_axis_and_says_so() -> None:
    step = Vector(3, 0).step()
    for change, message in (
        ({"obs": step["obs"][:2]}, "obs: got float32 of shape (2, 2), needs"),
        ({"reward": 1.0}, "reward: got float64 of shape (), needs float32 of shape (3,)"),
        ({"done": [True, False]}, "done needs shape (3,)"),
        ({"next_obs": None, "done": [True, True, False]}, "next_obs may be None only where done is true"),
        ({"mask": [True]}, "mask needs shape (3,)"),
    ):
        with dr.ReplayBuffer(10, num_envs=3) as buffer:
            with pytest.raises(ValueError, match=re.escape(message)):
                buffer.add(**{**step, **change})
            assert buffer.store is None
            buffer.add(**step)
            with pytest.raises(ValueError, match=re.escape(message)):
                buffer.add(**{**Vector(3, 1).step(), **change})
            assert len(buffer) == 3


def test_a_vector_of_tuple_actions_comes_as_a_tuple_of_arrays() -> None:
    vector = Vector(3, 0, ends=0.0)
    with dr.ReplayBuffer(100, num_envs=3) as buffer:
        for _ in range(4):
            step = vector.step()
            buffer.add(**{**step, "action": (step["action"], np.repeat(step["obs"][:, :1], 2, 1))})
        kind, force = buffer.sample(12).actions
        assert (kind.shape, force.shape) == ((12, 1), (12, 2))
        assert sorted(force[:, 0].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_a_step_of_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    with dr.ReplayBuffer(100, num_envs=3, seed=0) as buffer, dr.ReplayBuffer(100, num_envs=3, seed=0) as expected:
        vector = Vector(3, 0)
        for count in range(1, 20):
            step = vector.step()
            expected.add(**step)
            tensors = {name: device.tensor(value) for name, value in step.items()}
            buffer.add(**tensors)
            assert device.stream.waits == count
            for tensor in tensors.values():
                tensor.zero_()  # the caller may change them
        left, right = buffer.sample(40), expected.sample(40)
        assert all(torch.equal(left[name], right[name]) for name in left)
