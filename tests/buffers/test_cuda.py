"""Buffers whose tensors are on a CUDA device: they hold what those on the CPU hold."""

from pathlib import Path

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.sampling.test_cuda import gpu, same

pytestmark = gpu


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_replay_buffer_samples_what_one_on_the_cpu_does(prioritized: bool) -> None:
    rng = np.random.default_rng(0)
    every = torch.from_numpy(rng.standard_normal((201, 3)).astype("f4"))
    with (
        dr.ReplayBuffer(150, prioritized=prioritized, seed=0) as cpu,
        dr.ReplayBuffer(150, prioritized=prioritized, seed=0, device="cuda") as cuda,
    ):
        for number in range(200):
            for buffer, device in ((cpu, "cpu"), (cuda, "cuda")):
                # What a policy on the device gives goes in as it is.
                obs, following = every[number : number + 2].to(device)
                buffer.add(obs, torch.tensor(number, device=device), number / 4, following, number % 50 == 49)
        assert len(cpu) == len(cuda) == 150
        for _ in range(10):
            left, right = cpu.sample(32), cuda.sample(32)
            assert left.keys() == right.keys()
            assert all(same(left[name], right[name]) for name in left)
            if prioritized:
                errors = torch.rand(32)
                cpu.update_priorities(left.index, errors)
                cuda.update_priorities(right.index, errors.cuda())


def test_a_rollout_buffer_estimates_what_one_on_the_cpu_does() -> None:
    rng = np.random.default_rng(0)
    with dr.RolloutBuffer(3, 16) as cpu, dr.RolloutBuffer(3, 16, device="cuda") as cuda:
        for _ in range(2):
            for _ in range(16):
                step = {
                    "observations": torch.from_numpy(rng.standard_normal((3, 4)).astype("f4")),
                    "actions": torch.from_numpy(rng.integers(0, 9, (3, 2))),
                    "rewards": torch.from_numpy(rng.standard_normal(3).astype("f4")),
                    "dones": torch.from_numpy((rng.random(3) < 0.2).astype("f4")),
                    "values": torch.from_numpy(rng.standard_normal(3).astype("f4")),
                    "log_probs": torch.from_numpy(rng.standard_normal(3).astype("f4")),
                }
                cpu.add(**step)
                cuda.add(**{name: tensor.cuda() for name, tensor in step.items()})
            last = torch.from_numpy(rng.standard_normal(3).astype("f4"))
            cpu.compute_returns_and_advantages(last)
            cuda.compute_returns_and_advantages(last.cuda())
            for name in ("observations", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns"):
                assert same(getattr(cpu, name), getattr(cuda, name)), name
            left, right = cpu.sample(), cuda.sample()
            assert all(same(left[name], right[name]) for name in left)
            parts = zip(left.minibatches(8, seed=0), right.minibatches(8, seed=0), strict=True)
            assert all(same(a[name], b[name]) for a, b in parts for name in a)
            parts = zip(cpu.sequences(4, seed=0), cuda.sequences(4, seed=0), strict=True)
            assert all(same(a[name], b[name]) for a, b in parts for name in a)
            cpu.clear()
            cuda.clear()


def test_a_distillation_buffer_samples_what_one_on_the_cpu_does() -> None:
    obs = torch.arange(120.0).reshape(40, 3)
    with dr.DistillationBuffer(30, seed=0) as cpu, dr.DistillationBuffer(30, seed=0, device="cuda") as cuda:
        cpu.add(obs, torch.arange(40))
        cuda.add(obs.cuda(), torch.arange(40).cuda())
        for _ in range(3):
            assert all(same(left, right) for left, right in zip(cpu.sample(16), cuda.sample(16), strict=True))


def test_a_buffer_of_stable_baselines3_has_tensors_on_the_device() -> None:
    pytest.importorskip("stable_baselines3")
    from gymnasium import spaces

    from diskreplay.interop.sb3 import DiskReplayBuffer

    box, actions = spaces.Box(-1, 1, (3,)), spaces.Discrete(4)
    buffers = [DiskReplayBuffer(100, box, actions, device=device) for device in ("cpu", "cuda")]
    rng = np.random.default_rng(0)
    every = rng.uniform(-1, 1, (61, 1, 3)).astype("f4")
    for number in range(60):
        for buffer in buffers:
            buffer.add(every[number], every[number + 1], np.array([number % 4]), np.ones(1), np.zeros(1), [{}])
    found = []
    for buffer in buffers:
        np.random.seed(0)
        found.append(buffer.sample(32))
        buffer.close()
    assert all(same(left, right) for left, right in zip(*found, strict=True) if isinstance(left, torch.Tensor))


def test_the_store_of_a_rollout_buffer_has_what_one_on_the_cpu_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = torch.randn(4096, 4096, device="cuda")
    with (
        dr.RolloutBuffer(3, 16, path=tmp_path / "cpu") as cpu,
        dr.RolloutBuffer(3, 16, path=tmp_path / "cuda", device="cuda") as cuda,
    ):
        for _ in range(3):
            for _ in range(16):
                obs, final = torch.from_numpy(rng.standard_normal((2, 3, 4)).astype("f4"))
                done, truncated = torch.from_numpy((rng.random((2, 3)) < 0.2).astype("f4"))
                reward, value, log_prob = torch.from_numpy(rng.standard_normal((3, 3)).astype("f4"))
                step = (obs, obs[:, :2], reward, done, value, log_prob, None, truncated, final)
                cpu.add(*step)
                weights = torch.tanh(weights @ weights)  # the stream is behind
                moved = [None if tensor is None else tensor.cuda() + 0 * weights[0, 0] for tensor in step]
                cuda.add(*moved)
                for tensor in moved:
                    if tensor is not None:
                        tensor.zero_()  # the caller may change them
            cpu.clear()
            cuda.clear()
        found = []
        for buffer in (cpu, cuda):
            store = buffer.store
            assert store is not None
            store.refresh()
            found.append([(e.obs.tolist(), e.reward.tolist(), e.terminated, e.truncated) for e in store.episodes])
        assert len(found[0]) > 20
        assert found[0] == found[1]
