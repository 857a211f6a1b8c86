"""The distillation buffer: pairs stay pairs."""

import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from tests.testing.device import Device


def pairs(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(first, first + count)
    return np.stack([numbers, -numbers], axis=1).astype("f4"), numbers * 10


@settings(max_examples=20)
@given(st.integers(1, 40), st.lists(st.one_of(st.none(), st.integers(1, 90)), min_size=1, max_size=10), st.booleans())
def test_a_buffer_holds_its_newest_pairs(capacity: int, adds: list[int | None], stored: bool) -> None:
    with ExitStack() as stack:
        path = Path(stack.enter_context(TemporaryDirectory())) / "store" if stored else None
        buffer = stack.enter_context(dr.DistillationBuffer(capacity, obs_shape=(2,), path=path))
        total = 0
        for count in adds:
            obs, action = pairs(total, count or 1)
            buffer.add(*((obs[0], action[0]) if count is None else (obs, action)))
            total += count or 1
            assert len(buffer) == min(total, capacity)
        obs, action = buffer.sample(len(buffer))
        assert sorted(obs[:, 0].int().tolist()) == list(range(max(0, total - capacity), total))
        assert torch.equal(obs[:, 1], -obs[:, 0])
        assert torch.equal(action, obs[:, 0].long() * 10)


@pytest.mark.parametrize(
    ("obs", "action", "count", "shapes"),
    [
        (np.zeros(4), np.zeros(2), 1, ((4,), (2,))),
        (np.zeros((5, 4)), np.zeros((5, 2)), 5, ((4,), (2,))),
        (np.zeros((5, 4)), np.zeros(5), 5, ((4,), ())),
        (np.zeros((1, 4)), np.zeros((1, 2)), 1, ((4,), (2,))),
        (np.zeros((8, 8), "u1"), 3, 1, ((8, 8), ())),
        ({"a": np.zeros((5, 4)), "b": np.zeros((5, 2))}, np.zeros(5), 5, (None, ())),
        ((np.zeros((5, 4)), np.zeros((5, 2))), np.zeros(5), 5, (None, ())),
        ((np.zeros(4), 3), 1.0, 1, (None, ())),
    ],
)
def test_the_first_add_says_whether_it_is_a_batch(obs: Any, action: Any, count: int, shapes: Any) -> None:
    with dr.DistillationBuffer(100) as buffer:
        buffer.add(obs, action)
        assert len(buffer) == count
        obs, action = buffer.sample(count)
        assert shapes[0] is None or obs.shape == (count, *shapes[0])
        assert action.shape == (count, *shapes[1])


def test_given_shapes_tell_pairs_from_batches() -> None:
    frame = np.zeros((3, 4, 4), "u1")
    with dr.DistillationBuffer(100, obs_shape=(3, 4, 4), action_shape=(3,)) as buffer:
        buffer.add(frame, np.zeros(3))
        assert len(buffer) == 1
        buffer.add(np.stack([frame] * 3), np.zeros((3, 3)))
        assert len(buffer) == 4
        obs, action = buffer.sample(4)
        assert (obs.shape, action.shape, obs.dtype) == ((4, 3, 4, 4), (4, 3), torch.uint8)


@pytest.mark.parametrize(
    ("obs", "action", "message"),
    [
        (np.zeros(3), 0, "obs: got shape (3,), needs (2,), or a batch of these"),
        (np.zeros((4, 2)), np.zeros(3, int), "action: got int64 of shape (3,), needs int64 of shape (4,)"),
        (np.zeros(2), 0.5, "action: got float64 of shape (1,), needs int64 of shape (1,)"),
        (np.zeros((0, 2)), np.zeros(0, int), "obs and action hold no pair"),
    ],
)
def test_what_does_not_fit_changes_nothing(obs: Any, action: Any, message: str) -> None:
    with dr.DistillationBuffer(10) as buffer:
        buffer.add(*pairs(0, 3))
        with pytest.raises(dr.SchemaError, match=re.escape(message)):
            buffer.add(obs, action)
        assert len(buffer) == 3


def test_a_sample_needs_as_many_pairs_and_says_so() -> None:
    with dr.DistillationBuffer(10, obs_shape=(2,)) as buffer:
        for message, count in (("^the buffer has 0 pairs, and a batch of 4 needs 4$", 3), ("has 3 pairs", 0)):
            with pytest.raises(BufferError, match=message):
                buffer.sample(4)
            if count:
                buffer.add(*pairs(0, count))
        with pytest.raises(ValueError, match="batch_size must be an int of at least 1"):
            buffer.sample(-1)


def test_a_buffer_at_a_path_is_continued(tmp_store: Path) -> None:
    for start in (0, 3):
        with dr.DistillationBuffer(5, path=tmp_store) as buffer:
            buffer.add(*pairs(start, 3))
            assert len(buffer) == min(start + 3, 5)
    with pytest.raises(ValueError, match="keeps 5 steps, not 6"):
        dr.DistillationBuffer(6, path=tmp_store)


def test_each_pair_is_drawn_equally_often_and_by_the_seed() -> None:
    def draws(seed: int) -> torch.Tensor:
        with dr.DistillationBuffer(20, seed=seed) as buffer:
            buffer.add(*pairs(0, 20))
            return torch.stack([buffer.sample(5)[0][:, 0] for _ in range(4000)])

    found = draws(0)
    assert all(len(row.unique()) == 5 for row in found)
    counts = found.long().flatten().bincount(minlength=20)
    assert (counts - 1000).abs().max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    assert torch.equal(found, draws(0))
    assert not torch.equal(found, draws(1))


def test_what_was_drawn_is_a_copy() -> None:
    with dr.DistillationBuffer(4, seed=0) as buffer:
        obs, action = pairs(0, 4)
        buffer.add(obs, action)
        drawn, _ = buffer.sample(4)
        before = drawn.clone()
        obs[:] = 9.0
        buffer.add(*pairs(4, 4))
    assert torch.equal(drawn, before)
    with pytest.raises(dr.Closed):
        len(buffer)


def test_pairs_of_a_device_for_a_store_are_waited_for_once(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    obs = torch.arange(2.0, 14.0).reshape(4, 3)
    with dr.DistillationBuffer(4, path=tmp_store, seed=0) as buffer:
        buffer.add(device.tensor(obs), device.tensor(torch.arange(4)))
        assert device.stream.waits == 1
        drawn, action = buffer.sample(4)
        assert torch.equal(drawn, obs[action])
