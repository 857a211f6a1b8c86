"""A batch is a frozen record of tensors."""

import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate, default_convert

import diskreplay as dr


@pytest.fixture
def batch() -> dr.Batch:
    return dr.Batch(
        {
            "obs": {"image": torch.zeros(2, 4, dtype=torch.uint8), "state": torch.ones(2, 3)},
            "reward": torch.tensor([1.0, 2.0]),
            "index": torch.tensor([7, 8]),
        }
    )


def test_fields_are_attributes_and_items(batch: dr.Batch) -> None:
    assert batch.reward is batch["reward"]
    assert batch.obs["image"] is batch["obs"]["image"] is batch["obs/image"]
    assert list(batch.keys()) == list(batch) == ["obs", "reward", "index"]
    assert "obs" in batch
    assert "action" not in batch
    assert batch.batch_size == 2
    assert {"obs", "reward", "keys"} <= set(dir(batch))


def test_a_name_it_has_not_is_an_error_that_lists_the_others(batch: dr.Batch) -> None:
    message = "a batch of obs, reward, index has no 'rewards'"
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        batch.rewards  # noqa: B018  (the access is what is tested)
    for name in ("rewards", "rewards/image", "obs/", "obs/picture", "obs/image/0", "reward/0"):
        assert name not in batch
        assert batch.get(name) is None
        with pytest.raises(KeyError):
            batch[name]
    assert "obs/image" in batch


def test_names_cannot_be_set(batch: dr.Batch) -> None:
    with pytest.raises(AttributeError, match="^a batch is frozen: cannot set 'reward'$"):
        batch.reward = torch.zeros(2)
    with pytest.raises(AttributeError, match="^a batch is frozen: cannot delete 'reward'$"):
        del batch.reward


def test_numpy_shares_memory_and_keeps_the_nesting(batch: dr.Batch) -> None:
    arrays = batch.numpy()
    arrays["obs"]["state"][0] = 5
    assert batch.obs["state"][0].tolist() == [5, 5, 5]
    assert arrays.keys() == batch.keys()


def test_to_moves_every_tensor(batch: dr.Batch) -> None:
    moved = batch.to("meta")
    assert moved.obs["image"].device.type == moved.reward.device.type == "meta"
    assert batch.to("cpu").reward is batch.reward


def test_its_repr_tells_dtypes_and_shapes(batch: dr.Batch) -> None:
    assert repr(batch) == "Batch(obs={image: uint8[2, 4], state: float32[2, 3]}, reward=float32[2], index=int64[2])"


def test_it_is_a_mapping_of_names_to_tensors(batch: dr.Batch) -> None:
    assert isinstance(batch, Mapping)
    assert len(batch) == len(dict(batch)) == 3
    assert dict(batch)["reward"] is batch.reward is next(value for name, value in batch.items() if name == "reward")
    assert [type(value) for value in batch.values()] == [dict, torch.Tensor, torch.Tensor]
    assert batch.get("rewards") is None
    assert batch.get("reward") is batch.reward
    assert {**batch}.keys() == batch.keys()
    assert batch == batch
    assert batch != dr.Batch(dict(batch))
    assert len({batch, batch}) == 1


def test_a_loaders_collation_stacks_batches_and_converts_them(batch: dr.Batch) -> None:
    stacked = default_collate([batch, batch])
    assert stacked["obs"]["image"].shape == (2, 2, 4)
    assert default_convert(batch)["reward"].equal(batch.reward)


def test_arrays_become_tensors_whichever_way_they_are_read() -> None:
    batch = dr.Batch({"reward": np.zeros(2, np.float32), "pair": {"a": np.ones(2)}, "index": np.array([7, 8])})
    assert all(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(dict(batch.items())))
    assert isinstance(batch.get("reward"), torch.Tensor)


@pytest.mark.parametrize("indices", [[1, 0, 1], np.array([1, 0, 1]), torch.tensor([1, 0, 1])])
def test_items_are_selected_in_the_order_of_their_indices(batch: dr.Batch, indices: Any) -> None:
    found = batch.select(indices)
    assert type(found) is dr.Batch
    assert found.batch_size == 3
    assert found.index.tolist() == [8, 7, 8]
    assert found.obs["state"].shape == (3, 3)
    found.reward[0] = 9.0  # copies
    assert batch.reward.tolist() == [1.0, 2.0]


def test_a_mask_selects_items_and_so_does_an_empty_list(batch: dr.Batch) -> None:
    assert batch.select([True, False]).index.tolist() == [7]
    assert batch.select(batch.reward > 1).index.tolist() == [8]
    assert batch.select([]).obs["image"].shape == (0, 4)


@pytest.mark.parametrize("indices", [0, [[0]], [2], [True]])
def test_what_names_no_items_is_an_index_error(batch: dr.Batch, indices: Any) -> None:
    with pytest.raises(IndexError):
        batch.select(indices)


JAX = """
import jax, torch
import diskreplay as dr

batch = dr.Batch({"obs": {"image": torch.zeros(2, 4, dtype=torch.uint8)}, "reward": torch.tensor([1.0, 2.0])})
arrays = jax.tree.map(jax.dlpack.from_dlpack, dict(batch))
assert arrays["obs"]["image"].dtype == "uint8"
assert float(jax.numpy.sum(arrays["reward"])) == 3.0
assert arrays["reward"].unsafe_buffer_pointer() == batch.reward.data_ptr()
"""


@pytest.mark.slow
def test_jax_takes_its_tensors_without_a_copy() -> None:
    if find_spec("jax") is None:
        pytest.skip("jax is not installed")
    # In a process of its own: its threads outlive the test, and no later one could fork.
    subprocess.run([sys.executable, "-c", JAX], check=True, timeout=600)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned for the CUDA device")
def test_without_a_device_pinned_memory_is_refused_in_one_line(batch: dr.Batch) -> None:
    with pytest.raises(ValueError, match=r"^torch cannot pin memory here, leave pin_memory\(\) out: ") as told:
        batch.pin_memory()
    assert "\n" not in str(told.value)
