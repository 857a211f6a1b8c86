"""Batches on a CUDA device. What copies them is tested in test_copies.py, without a device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

SCHEMA = dr.Schema(
    obs={"image": dr.Field((40, 40), "uint8"), "at": dr.Field((3,), "float32")},
    action=dr.Field((), "int64"),
    extra={"half": dr.Field((2,), "float16"), "flag": dr.Field((), "bool"), "value": dr.Field((), "float32")},
)
VIEWS = (
    dr.Transitions(3, frame_stack={"image": 4}),
    dr.Sequences(length=20, overlap=10),
    dr.Sequences(length=20, stride=4, frame_stack=2, cross_episodes=True),
    dr.Episodes(),
)


@pytest.fixture
def store(tmp_store: Path) -> Any:
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, SCHEMA, chunk_bytes=64 << 10) as store:
        with store.writer() as writer:
            for steps in rng.integers(5, 60, 20):
                obs = {"image": rng.integers(0, 255, (steps + 1, 40, 40), np.uint8)}
                obs["at"] = rng.standard_normal((steps + 1, 3)).astype(np.float32)
                rewards = rng.standard_normal(steps).astype(np.float32)
                extra = {"half": rng.standard_normal((steps, 2)).astype(np.float16), "flag": rng.random(steps) < 0.5}
                extra["value"] = rng.standard_normal(steps).astype(np.float32)
                writer.append_episode(obs, np.arange(steps), rewards, terminated=True, **extra)
        yield store


def same(left: Any, right: Any, equal: Callable[..., bool] = torch.equal) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name], equal) for name in left)
    return right.is_cuda and equal(left, right.cpu())


def nearly(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.allclose(left.double(), right.double(), 1e-6)


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("distribution", [dr.Uniform, dr.Prioritized])
class TestOnADevice:
    pytestmark = gpu

    def test_batches_are_those_of_the_cpu(self, store: Any, view: Any, prefetch: int, distribution: Any) -> None:
        cpu = dr.Sampler(store, view, distribution(), batch_size=64, seed=0, prefetch=prefetch)
        cuda = dr.Sampler(store, view, distribution(), batch_size=64, seed=0, prefetch=prefetch, device="cuda")
        with cpu, cuda:
            for _ in range(20):
                left, right = cpu.sample(), cuda.sample()
                assert all(same(left[name], right[name]) for name in left)
                errors = torch.rand(left.batch_size, device="cuda")
                if distribution is dr.Prioritized:
                    cpu.update_priorities(left.index, errors.cpu())
                    cuda.update_priorities(right.index, errors)

    def test_memory_is_not_used_again_while_kernels_read_it(
        self, store: Any, view: Any, prefetch: int, distribution: Any
    ) -> None:
        weights = torch.randn(4096, 4096, device="cuda")
        with (
            dr.Sampler(store, view, distribution(), batch_size=64, seed=0) as cpu,
            dr.Sampler(store, view, distribution(), batch_size=64, seed=0, prefetch=prefetch, device="cuda") as cuda,
        ):
            sums = []
            for _ in range(50):
                for _ in range(3):
                    weights = torch.tanh(weights @ weights)  # the stream is behind
                sums.append(cuda.sample().action.sum())
            for found in sums:
                assert found.item() == cpu.sample().action.sum().item()


def value_of(obs: Any) -> torch.Tensor:
    return obs["at"].double().sum(-1)


@pytest.mark.parametrize("prefetch", [0, 3])
class TestWhatIsMadeOfBatches:
    pytestmark = gpu

    def test_transforms_do_on_the_device_what_they_do_on_the_cpu(self, store: Any, prefetch: int) -> None:
        def halve(batch: dr.Batch) -> dict[str, torch.Tensor]:
            return {"half": batch["half"] / 2}

        def sampler(device: str) -> dr.Sampler:
            steps = [dr.RandomShift(pad=3, fields=["image"]), dr.ToFloat(), dr.Normalize(obs=["at"]), halve]
            view = dr.Transitions(frame_stack={"image": 2})
            distribution = dr.Prioritized()
            return dr.Sampler(
                store, view, distribution, batch_size=64, seed=0, prefetch=prefetch, device=device, transform=steps
            )

        with sampler("cpu") as cpu, sampler("cuda") as cuda:
            for _ in range(10):
                left, right = cpu.sample(), cuda.sample()
                assert all(same(left[name], right[name], nearly) for name in left)

    def test_rollouts_and_their_parts(self, store: Any, prefetch: int) -> None:
        view = dr.Rollouts(8, 0.99, 0.95, value_fn=value_of)
        with (
            dr.Sampler(store, view, prefetch=prefetch) as cpu,
            dr.Sampler(store, view, prefetch=prefetch, device="cuda") as cuda,
        ):
            for _ in range(3):
                left, right = cpu.sample(), cuda.sample()
                assert all(same(left[name], right[name]) for name in left)
                for of_cpu, of_cuda in (
                    (left.minibatches(4, epochs=2, seed=1), right.minibatches(4, epochs=2, seed=1)),
                    (left.sequences(2, seed=1, length=3), right.sequences(2, seed=1, length=3)),
                ):
                    for one, other in zip(of_cpu, of_cuda, strict=True):
                        assert all(same(one[name], other[name]) for name in one)

    def test_a_mixed_batch(self, store: Any, prefetch: int) -> None:
        def mixed(device: str) -> tuple[dr.MixedSampler, list[dr.Sampler]]:
            views = dr.Transitions(1), dr.Transitions(5)
            samplers = [dr.Sampler(store, view, seed=0, prefetch=prefetch, device=device) for view in views]
            return dr.MixedSampler([(sampler, 1) for sampler in samplers], batch_size=64, seed=0), samplers

        (cpu, cpu_samplers), (cuda, cuda_samplers) = mixed("cpu"), mixed("cuda")
        for _ in range(5):
            left, right = cpu.sample(), cuda.sample()
            assert all(same(left[name], right[name]) for name in left)
        for sampler in (*cpu_samplers, *cuda_samplers):
            sampler.close()

    def test_a_batch_of_given_ids_and_of_another_size(self, store: Any, prefetch: int) -> None:
        with (
            dr.Sampler(store, dr.Transitions(3), seed=0, prefetch=prefetch) as cpu,
            dr.Sampler(store, dr.Transitions(3), seed=0, prefetch=prefetch, device="cuda") as cuda,
        ):
            for size in (7, 500, 64):
                left, right = cpu.sample(size), cuda.sample(size)
                assert all(same(left[name], right[name]) for name in left)
                again = cuda.gather(right.index)
                assert all(same(left[name], again[name]) for name in left)
                part = right.select(torch.arange(3, device="cuda"))
                assert all(same(left.select([0, 1, 2])[name], part[name]) for name in part)
                assert right.to("cpu").index.tolist() == left.index.tolist()
                assert right.numpy().keys() == left.numpy().keys()

    def test_a_sampler_goes_on_from_its_state(self, store: Any, prefetch: int) -> None:
        def sampler() -> dr.Sampler:
            return dr.Sampler(
                store, dr.Transitions(3), dr.Prioritized(), batch_size=32, seed=0, prefetch=prefetch, device="cuda"
            )

        with sampler() as one, sampler() as other:
            for _ in range(5):
                batch = one.sample()
                one.update_priorities(batch.index, torch.rand(32, device="cuda"))
            other.load_state_dict(one.state_dict())
            for _ in range(5):
                left, right = one.sample(), other.sample()
                on_cpu = left.to("cpu")
                assert all(same(on_cpu[name], right[name]) for name in left)
