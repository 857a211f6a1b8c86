"""Batches on a CUDA device; what does not need one runs on stand-ins for streams and events."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.loading.buffer_pool import BufferPool
from diskreplay.loading.cuda import DeviceCopy
from diskreplay.views.base import Leaf

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

SCHEMA = dr.Schema(
    obs={"image": dr.Field((40, 40), "uint8"), "at": dr.Field((3,), "float32")},
    action=dr.Field((), "int64"),
    extra={"half": dr.Field((2,), "float16"), "flag": dr.Field((), "bool")},
)
VIEWS = (
    dr.Transitions(3, frame_stack={"image": 4}),
    dr.Sequences(length=20, overlap=10),
    dr.Sequences(length=20, stride=4, frame_stack=2, cross_episodes=True),
    dr.Episodes(),
)
LEAVES = (
    Leaf(("a",), np.dtype("float16"), (3,)),
    Leaf(("b",), np.dtype("bool")),
    Leaf(("none",), np.dtype("int64"), (0,)),
)
LEAVES += (Leaf(("c",), np.dtype("int64")), Leaf(("weight",), np.dtype("float32")))


class Event:
    """Happens when it is told to."""

    def __init__(self) -> None:
        self.happened = False

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


class Stream:
    """Does everything at once."""

    def __init__(self, device: Any = None) -> None:
        self.waited: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Put stand-ins in the place of torch's streams and events, and return the current stream."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return stream


def test_one_copy_brings_all_arrays(current: Stream) -> None:
    ring, courier = BufferPool(), DeviceCopy(torch.device("cpu"))
    slot = ring.acquire(LEAVES, 5)[0]
    for number, array in enumerate(slot.block.arrays):
        array[:] = np.arange(array.size).reshape(array.shape) + number
    sent = courier.send(slot)
    slot.block.arrays[4][:] = 7.0
    tensors = courier.receive(slot, sent, changed=4)
    assert current.waited == [sent.event]
    for tensor, array in zip(tensors, slot.block.arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    slot.memory.fill(0)
    assert tensors[4].tolist() == [7.0] * 5


def test_a_slot_is_free_when_the_device_has_it(current: Stream) -> None:
    ring, courier = BufferPool(), DeviceCopy(torch.device("cpu"))
    slot, arrays = ring.acquire(LEAVES, 5)
    sent = courier.send(slot)
    del arrays
    assert ring.acquire(LEAVES, 5)[0] is not slot
    sent.event.happened = True
    assert ring.acquire(LEAVES, 5)[0] is slot
    again = courier.send(slot)
    courier.receive(slot, again, changed=4)
    again.event.happened = True
    assert not slot.free  # the weights are on their way
    ring.clear()
    assert slot.free


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
                writer.append_episode(obs, np.arange(steps), rewards, terminated=True, **extra)
        yield store


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    return right.is_cuda and torch.equal(left, right.cpu())


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
