"""Every operation on a batch takes fields of every dtype that a schema does."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
VIEWS: dict[str, Any] = {
    "transitions": dr.Transitions(3, frame_stack=2, next_fields=("action", "extra")),
    "sequences": dr.Sequences(5, overlap=2, frame_stack=2, start_only=("extra",)),
    "across episodes": dr.Sequences(5, overlap=2, cross_episodes=True),
    "episodes": dr.Episodes(),
    "rollouts": dr.Rollouts(8),
}
OPERATIONS: dict[str, Callable[[dr.Batch], Any]] = {
    "to": lambda batch: batch.to("cpu"),
    "select": lambda batch: batch.select([1, 0]),
    "select by mask": lambda batch: batch.select(np.arange(batch.batch_size) % 2 == 0),
    "minibatches": lambda batch: list(batch.minibatches(3, seed=0)),
    "numpy": lambda batch: batch.numpy(),
    "repr": lambda batch: (repr(batch), batch._repr_html_()),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
}


def values(dtype: str, *shape: int) -> np.ndarray:
    return (1 + np.arange(np.prod(shape)).reshape(shape) % 100).astype(dtype)


@pytest.fixture(params=DTYPES)
def store(tmp_store: Path, request: pytest.FixtureRequest) -> Any:
    dtype = request.param
    field, extra = dr.Field((2, 3), dtype), {"value": dr.Field((), "float32"), "extra": dr.Field((2,), dtype)}
    with dr.create(tmp_store, dr.Schema(obs={"image": field}, action=field, extra=extra)) as store:
        with store.writer() as writer:
            for steps in (5, 3, 8):
                writer.append_episode(
                    {"image": values(dtype, steps + 1, 2, 3)}, values(dtype, steps, 2, 3), np.zeros(steps),
                    terminated=True, value=np.zeros(steps), extra=values(dtype, steps, 2),
                )  # fmt: skip
        store.refresh()
        yield store


def test_batches_of_every_view(store: Any) -> None:
    for name, view in VIEWS.items():
        batch = dr.Sampler(store, view, batch_size=4, seed=0).sample()
        for operation, function in OPERATIONS.items():
            found = function(batch)
            if operation in ("copy", "deep copy", "pickle", "to"):
                for one, other in zip(*map(torch.utils._pytree.tree_leaves, (batch, found)), strict=True):
                    assert one.dtype == other.dtype, (name, operation)
                    np.testing.assert_array_equal(one.numpy(), other.numpy())
        if name != "rollouts":
            parts = [(dr.Sampler(store, view, batch_size=4, seed=seed), 0.5) for seed in range(2)]
            assert dr.MixedSampler(parts, batch_size=4, seed=0).sample().obs["image"].dtype == batch.obs["image"].dtype


def test_sequences_of_a_rollout_are_padded_with_zeros(store: Any) -> None:
    batch = dr.Sampler(store, dr.Rollouts(16)).sample()
    (part,) = batch.sequences(3, seed=0, start_only=("extra",))
    image, mask = part.obs["image"].numpy(), part.mask.numpy()
    assert part.obs["image"].dtype == batch.obs["image"].dtype
    assert sorted(mask.sum(axis=1).tolist()) == [3, 5, 8]
    assert (image[~mask] == 0).all()
    assert (image[mask] != 0).all()


def test_sequences_of_a_buffer_are_padded_with_zeros(store: Any) -> None:
    dtype = store.schema.leaves["obs/image"].dtype
    buffer = dr.RolloutBuffer(2, 4, extra={"hidden": dr.Field((2,), dtype)})
    for t in range(4):
        value = values(dtype.name, 2, 2)
        buffer.add(value, value, np.zeros(2), np.full(2, t == 2), np.zeros(2), np.zeros(2), hidden=value)
    buffer.compute_returns_and_advantages(np.zeros(2))
    (part,) = buffer.sequences(4, seed=0)
    hidden = part.hidden.numpy()
    padding = ~part.mask.numpy().reshape(hidden.shape[:2])
    assert padding.any()
    assert (hidden[padding] == 0).all()
