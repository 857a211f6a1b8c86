"""Batches are the same whether or not kernels look at the types of their arguments, which they do in tests alone."""

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.kernels import table
from tests.testing.support import append_numbered, serial_schema


def batches(path, distribution, monkeypatch, checked, capacity):
    """Return what is drawn of a store that grows, and how its priorities are then."""
    monkeypatch.setattr(table, "CHECK", checked)
    table.unchecked.cache_clear()
    found = []
    with (
        dr.create(path, serial_schema(), capacity=capacity, segment_steps=60) as store,
        dr.Sampler(store, dr.Transitions(n_step=3), distribution(), batch_size=16, seed=5) as sampler,
        store.writer() as writer,
    ):
        assert hasattr(table.unchecked("starts"), "signatures") == checked
        for first in range(0, 400, 7):
            append_numbered(writer, range(first, first + 7), end="" if first % 3 else "terminated")
            batch = sampler.sample()
            found += [batch[name].numpy().copy() for name in batch]
            if distribution is dr.Prioritized:
                assert sampler.update_priorities(batch.index, np.abs(np.sin(batch.index.numpy()))) == 0
    table.unchecked.cache_clear()
    return found


@pytest.mark.parametrize("capacity", [None, 90])
@pytest.mark.parametrize("distribution", [dr.Uniform, dr.Prioritized])
def test_batches_of_a_store_that_grows_are_the_same(tmp_path, distribution, capacity, monkeypatch):
    checked, unchecked = (
        batches(tmp_path / str(check), distribution, monkeypatch, check, capacity) for check in (True, False)
    )
    assert len(checked) == len(unchecked) > 100
    for one, other in zip(checked, unchecked, strict=True):
        np.testing.assert_array_equal(one, other)
