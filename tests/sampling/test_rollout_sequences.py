"""Sequences hold every step of a rollout once an epoch, in the order in which it was taken."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr


def rollout(steps: int, envs: int, seed: int, ends: float = 0.3) -> dr.Batch:
    rng = np.random.default_rng(seed)
    index = torch.arange(steps * envs).reshape(steps, envs)
    terminated, truncated = torch.from_numpy(rng.random((2, steps, envs)) < ends)
    obs = {"image": index[..., None].repeat_interleave(3, -1) + 1}
    hidden = torch.stack([index, -index], -1).float()
    return dr.Batch({"obs": obs, "index": index, "terminated": terminated, "truncated": truncated, "hidden": hidden})


def plain(batch: dr.Batch, length: int | None) -> list[list[int]]:
    """The ids of each sequence, by a loop over the columns."""
    found: list[list[int]] = []
    for env in range(batch.index.shape[1]):
        begins = True
        for t in range(batch.index.shape[0]):
            if begins or len(found[-1]) == length:
                found.append([])
            found[-1].append(int(batch.index[t, env]))
            begins = bool(batch.terminated[t, env] or batch.truncated[t, env])
    return found


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 9),
    st.none() | st.integers(1, 14),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.integers(0, 99),
)
def test_sequences_are_those_of_a_loop(
    steps: int, envs: int, size: int, length: int | None, ends: float, seed: int
) -> None:
    batch = rollout(steps, envs, seed, ends)
    expected = {ids[0]: ids for ids in plain(batch, length)}
    parts = list(batch.sequences(size, 2, seed, length=length, start_only=("hidden",)))
    each = -(-len(expected) // size)
    assert [part.batch_size for part in parts] == [*[size] * (each - 1), len(expected) - size * (each - 1)] * 2
    for epoch in (parts[:each], parts[each:]):
        assert sorted(torch.cat([part.index for part in epoch]).tolist()) == sorted(expected)
        for part in epoch:
            longest = max(len(expected[first]) for first in part.index.tolist()) if length is None else length
            assert part.mask.shape == (part.batch_size, longest)
            for i, first in enumerate(part.index.tolist()):
                ids = expected[first]
                padding = [0] * (longest - len(ids))
                assert part.mask[i].tolist() == [True] * len(ids) + [False] * len(padding)
                assert part.obs["image"][i, :, 0].tolist() == [x + 1 for x in ids] + padding
                assert part.hidden[i].tolist() == [first, -first]
                for name in ("terminated", "truncated"):
                    assert part[name][i].tolist() == [*batch[name].flatten()[ids].tolist(), *map(bool, padding)]


def test_the_order_is_a_function_of_the_seed_and_other_in_each_epoch() -> None:
    def orders(seed: int) -> list[list[int]]:
        return [part.index.tolist() for part in rollout(30, 4, 0).sequences(1000, 2, seed)]

    first, second = orders(3)
    assert [first, second] == orders(3)
    assert first != second
    assert orders(4) != orders(3)


def test_they_are_copies() -> None:
    batch = rollout(4, 2, 0)
    before = batch.hidden.clone()
    for part in batch.sequences(3):
        part.hidden.zero_()
    assert torch.equal(batch.hidden, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be an int of at least 1, not 0"),
        ({"size": 2, "epochs": 0}, "epochs must be an int of at least 1, not 0"),
        ({"size": 2, "length": 0}, "length must be an int of at least 1, or None for whole episodes, not 0"),
        ({"size": 2, "start_only": "hidden"}, "start_only must be a sequence of names"),
        ({"size": 2, "start_only": ("state",)}, "start_only must be a sequence of names, of obs, index"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rollout(2, 2, 0).sequences(**arguments)


def test_a_batch_that_is_no_rollout_has_none() -> None:
    batch = rollout(6, 2, 0)
    flat = next(batch.minibatches(6))
    for other in (flat, dr.Batch({name: batch[name] for name in batch if name != "truncated"})):
        with pytest.raises(ValueError, match="^only a batch of Rollouts"):
            other.sequences(2)


def test_a_recurrent_network_sees_what_it_saw_when_it_collected(tmp_store: Path) -> None:
    """Steps through a GRU: from the stored state of its first step, each sequence gives the states that were stored."""
    torch.manual_seed(0)
    cell, rng = torch.nn.GRUCell(3, 5), np.random.default_rng(0)
    field = dr.Field((3,), "float32")
    extra = {"hidden": dr.Field((5,), "float32"), "value": dr.Field((), "float32")}
    schema = dr.Schema(obs=field, action=dr.Field((), "int64"), extra=extra)
    compared = 0
    with dr.create(tmp_store, schema) as store, store.writer(num_envs=4) as writer, torch.no_grad():
        hidden = torch.zeros(4, 5)
        for _ in range(41):
            obs = rng.standard_normal((4, 3)).astype("f4")
            ended, cut = rng.random((2, 4)) < 0.1
            writer.append(obs, np.zeros(4, int), np.ones(4), ended, cut, hidden=hidden, value=np.zeros(4))
            hidden = cell(torch.from_numpy(obs), hidden)
            hidden[torch.from_numpy(ended | cut)] = 0
        batch = dr.Sampler(store, dr.Rollouts(num_steps=40, next_value="value")).sample()
        for part in batch.sequences(5, length=8, start_only=("value",)):
            state = part.hidden[:, 0]
            for t in range(8):
                real = part.mask[:, t]
                torch.testing.assert_close(state[real], part.hidden[real, t])
                compared += int(real.sum())
                state = cell(part.obs[:, t], state)
    assert compared == 160
