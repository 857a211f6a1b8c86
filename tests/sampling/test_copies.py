"""Copies of batches to a device and back, on stand-ins for streams and events. Batches on a device: test_cuda.py."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from diskreplay.sampling.gatherer import BufferPool, DeviceCopy, HostCopy, ordinary_memory
from diskreplay.views.base import Leaf
from tests.testing.device import Device

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
        self.stream = stream

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


def test_a_copy_to_the_processor_begins_when_it_is_made_behind_the_noted_operations(
    current: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, own = Device(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    copy = HostCopy(torch.device("cuda", 0)).later({"a": device.tensor([2.0, 3.0])}, None)
    assert device.stream.begun == []
    found, nothing = copy()
    assert [event.stream for event in own.waited] == [device.stream]
    assert (found["a"].tolist(), nothing, device.stream.waits) == ([2.0, 3.0], None, 1)


def test_tensors_of_the_cpu_are_not_copied_to_it() -> None:
    values = {"a": torch.zeros(3)}
    assert HostCopy(torch.device("cpu")).later(values)() == (values,)


def test_memory_comes_from_the_function_given() -> None:
    asked = []

    def allocate(nbytes: int) -> np.ndarray:
        asked.append(nbytes)
        return ordinary_memory(nbytes)

    pool = BufferPool(allocate)
    for _ in range(2):
        pool.acquire(LEAVES, 8)
    assert asked == [256]
