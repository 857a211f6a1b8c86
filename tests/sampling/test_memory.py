"""Memory of batches is used again only when nobody can see it any more."""

import ctypes
import gc
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr

SCHEMA = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"), extra={"flag": dr.Field((), "bool")})


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, SCHEMA) as store:
        with store.writer() as writer:
            obs = np.arange(153).reshape(51, 3)
            writer.append_episode(obs, np.arange(50), np.zeros(50), terminated=True, flag=np.zeros(50, bool))
        yield store


@pytest.fixture
def sampler(store: dr.Store) -> Iterator[dr.Sampler]:
    with dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0) as sampler:
        yield sampler


def address(batch: dr.Batch) -> int:
    return int(batch.obs.data_ptr())


def comes_again(sampler: dr.Sampler, at: int) -> bool:
    """Tell whether one of the next batches is in the memory that begins there."""
    return at in {address(sampler.sample()) for _ in range(4)}


def test_memory_is_taken_again_when_the_batch_is_gone(sampler: dr.Sampler) -> None:
    first, second = sampler.sample(), sampler.sample()
    at = address(first)
    assert at != address(second)
    del first
    assert address(sampler.sample()) == at


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch.obs[2:5],
        lambda batch: batch.obs.numpy(),
        lambda batch: batch.obs.numpy()[1:, 0],
        lambda batch: batch.flag.view(torch.uint8),
        lambda batch: batch.obs.T.reshape(3, 8),
        lambda batch: batch.obs.untyped_storage(),
        lambda batch: memoryview(batch.obs.numpy()),
        lambda batch: np.asarray(batch.obs).view("i4"),
        lambda batch: (batch.obs * torch.ones(3, requires_grad=True)).sum(),  # which saves it for backward
    ],
)
def test_any_view_of_any_tensor_keeps_the_memory(sampler: dr.Sampler, keep: Any) -> None:
    batch = sampler.sample()
    at, view = address(batch), keep(batch)
    del batch
    gc.collect()
    assert not comes_again(sampler, at)
    del view
    assert comes_again(sampler, at)


def test_a_tensor_saved_for_backward_has_its_values(sampler: dr.Sampler) -> None:
    batch, weight = sampler.sample(), torch.ones(3, requires_grad=True)
    want, loss = batch.obs.sum(0), (batch.obs * weight).sum()
    del batch
    sampler.sample()
    loss.backward()
    assert torch.equal(weight.grad, want)


def test_fields_begin_at_cache_lines(sampler: dr.Sampler) -> None:
    batch = sampler.sample()
    assert {batch[name].data_ptr() % 64 for name in batch} == {0}


def test_memory_grows_with_the_batches_alive_and_shrinks_to_a_few_spare_ones(sampler: dr.Sampler) -> None:
    tracemalloc.start()
    try:
        batches = [sampler.sample(20_000) for _ in range(10)]
        assert len(set(map(address, batches))) == 10
        whole, nbytes = tracemalloc.get_traced_memory()[0], sum(batches[0][name].nbytes for name in batches[0])
        batches.clear()
        assert len({address(sampler.sample(20_000)) for _ in range(20)}) <= 3
        assert whole - tracemalloc.get_traced_memory()[0] > 6 * nbytes
        batch = sampler.sample(20_000)
        want = batch.obs.clone()
        sampler.close()
        assert torch.equal(batch.obs, want)
        del batch, want
        assert whole - tracemalloc.get_traced_memory()[0] > 9 * nbytes
    finally:
        tracemalloc.stop()


def test_memory_serves_another_size_of_about_as_much_only(sampler: dr.Sampler) -> None:
    at = address(sampler.sample(1000))
    assert address(sampler.sample(900)) == at
    assert address(sampler.sample(10)) != at


def test_debug_poisons_the_memory_of_batches_that_are_gone(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0, debug=True) as sampler:
        first, second = sampler.sample(), sampler.sample()
        at, want = address(second), second.obs.clone()
        del first
        sampler.sample()
        assert torch.equal(second.obs, want)
        del second
        third = sampler.sample()
        assert address(third) != at
        assert ctypes.string_at(at, 8 * 3 * 4) == b"\xff" * 8 * 3 * 4  # NaN


def test_a_batch_may_die_in_another_thread(sampler: dr.Sampler) -> None:
    held = [sampler.sample()]
    at = address(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert comes_again(sampler, at)
