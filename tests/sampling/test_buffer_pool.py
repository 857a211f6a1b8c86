"""Memory is used again only when nobody can see it any more."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from diskreplay.sampling.gatherer import POISON, BufferPool, Slot, ordinary_memory
from diskreplay.views.base import Leaf

LEAVES = (
    Leaf(("obs",), np.dtype("float32"), (3,)),
    Leaf(("done",), np.dtype("bool")),
    Leaf(("none",), np.dtype("int8"), (0,)),
)


def lend(slot: Slot) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in slot.block.arrays]


def address(slot: object) -> int:
    return slot.memory.ctypes.data


def test_memory_is_taken_again_when_the_batch_is_gone() -> None:
    ring = BufferPool()
    first = ring.acquire(LEAVES, 8)[0]
    tensors = lend(first)
    assert not first.free
    assert ring.acquire(LEAVES, 8)[0] is not first
    del tensors
    assert first.free
    assert ring.acquire(LEAVES, 8)[0] is first


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[0][2:5],
        lambda t: t[0].numpy(),
        lambda t: t[0].numpy()[1:, 0],
        lambda t: t[1].view(torch.uint8),
        lambda t: t[0].T.reshape(3, 8),
        lambda t: t[0].untyped_storage(),
        lambda t: memoryview(t[0].numpy()),
        lambda t: np.asarray(t[0]).view("i4"),
    ],
)
def test_any_view_of_any_tensor_keeps_the_memory(keep: object) -> None:
    ring = BufferPool()
    slot = ring.acquire(LEAVES, 8)[0]
    slot.block.arrays[0][:] = 7.0
    view = keep(lend(slot))
    gc.collect()
    assert not slot.free
    for _ in range(3):
        other = ring.acquire(LEAVES, 8)[0]
        other.block.arrays[0][:] = 9.0
        assert address(other) != address(slot)
    del view
    assert slot.free


def test_a_tensor_saved_for_backward_keeps_the_memory() -> None:
    ring = BufferPool()
    slot = ring.acquire(LEAVES, 4)[0]
    weight = torch.ones(3, requires_grad=True)
    loss = (lend(slot)[0] * weight).sum()
    assert not slot.free
    loss.backward()
    del loss
    assert slot.free


def test_tensors_have_the_shapes_and_see_the_memory() -> None:
    slot = BufferPool().acquire(LEAVES, 5)[0]
    obs, done, none = lend(slot)
    slot.block.arrays[0][:] = np.arange(15).reshape(5, 3)
    assert obs.tolist() == np.arange(15).reshape(5, 3).tolist()
    assert (obs.dtype, done.dtype) == (torch.float32, torch.bool)
    assert none.shape == (5, 0)
    assert obs.data_ptr() % 64 == done.data_ptr() % 64 == 0


def test_the_ring_grows_with_the_batches_alive_and_shrinks_to_a_few_spare_ones() -> None:
    ring = BufferPool(spare=2)
    batches = []
    for _ in range(10):
        batches.append(lend(ring.acquire(LEAVES, 8)[0]))
    assert len(ring) == 10
    batches.clear()
    ring.acquire(LEAVES, 8)
    assert len(ring) == 3


def test_memory_serves_another_layout_of_about_its_size_only() -> None:
    ring = BufferPool()
    large = ring.acquire(LEAVES, 1000)[0].memory
    smaller = ring.acquire(LEAVES, 900)[0]
    assert smaller.memory is large
    assert ring.acquire(LEAVES, 10)[0].memory is not large
    assert smaller.block.size == 900


def test_memory_comes_from_the_function_given() -> None:
    asked = []

    def allocate(nbytes: int) -> np.ndarray:
        asked.append(nbytes)
        return ordinary_memory(nbytes)

    ring = BufferPool(allocate)
    ring.acquire(LEAVES, 8)
    ring.acquire(LEAVES, 8)
    assert asked == [192]


def test_debug_poisons_the_memory_of_batches_that_are_gone() -> None:
    ring = BufferPool(debug=True)
    slot = ring.acquire(LEAVES, 4)[0]
    slot.block.arrays[0][:] = 1.0
    tensors = lend(slot)
    ring.acquire(LEAVES, 4)
    assert tensors[0].eq(1.0).all()
    del tensors
    ring.acquire(LEAVES, 4)
    assert np.isnan(slot.block.arrays[0]).all()
    assert set(slot.memory[:48].tolist()) == {POISON}


def test_a_ring_that_lets_go_leaves_batches_their_memory() -> None:
    ring = BufferPool()
    slot = ring.acquire(LEAVES, 4)[0]
    slot.block.arrays[0][:] = 3.0
    memory, tensors = weakref.ref(slot.memory.base), lend(slot)
    ring.clear()
    del slot
    gc.collect()
    assert memory() is not None
    assert tensors[0].eq(3.0).all()
    del tensors
    gc.collect()
    assert memory() is None


def test_a_batch_may_die_in_another_thread() -> None:
    ring = BufferPool()
    slot = ring.acquire(LEAVES, 4)[0]
    held = [lend(slot)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert slot.free
