"""Minibatches hold every item of a batch once an epoch, in random order."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr


def batch_of(*shape: int) -> dr.Batch:
    index = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return dr.Batch(
        {"obs": {"image": index[..., None].repeat_interleave(3, -1)}, "ret": -index.float(), "index": index}
    )


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_each_item_is_in_one_minibatch_of_each_epoch(steps: int, envs: int, size: int, epochs: int, seed: int) -> None:
    found = list(batch_of(steps, envs).minibatches(size, epochs, seed))
    items = steps * envs
    each = -(-items // size)
    assert [b.batch_size for b in found] == (
        [size] * (items // size) + [items % size] * (each - items // size)
    ) * epochs
    for epoch in range(epochs):
        index = torch.cat([b.index for b in found[epoch * each : (epoch + 1) * each]])
        assert sorted(index.tolist()) == list(range(items))
    for b in found:
        assert b.ret.tolist() == (-b.index).tolist()
        assert b.obs["image"].tolist() == b.index[:, None].repeat(1, 3).tolist()


def test_the_order_is_a_function_of_the_seed() -> None:
    def orders(seed: int | None) -> list[list[int]]:
        return [b.index.tolist() for b in batch_of(20, 4).minibatches(80, 2, seed)]

    assert orders(3) == orders(3)
    first, second = orders(3)
    assert first != second != list(range(80))
    assert orders(4) != orders(3)
    assert orders(None) != orders(None)


def test_they_are_copies_and_keep_no_other_item_of_the_batch() -> None:
    batch = batch_of(4, 2)
    (part,) = batch.minibatches(8)
    part.ret.zero_()
    assert batch.ret.sum() == -28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "size must be an int of at least 1, not 0"),
        ((2.0,), "size must be an int of at least 1, not 2.0"),
        ((True,), "size must be an int of at least 1, not True"),
        ((4, 0), "epochs must be an int of at least 1, not 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        batch_of(2, 2).minibatches(*arguments)
