"""A batch is a frozen record of tensors."""

import copy
import pickle
import re

import pytest
import torch

from diskreplay.loading.batch import Batch


@pytest.fixture
def batch() -> Batch:
    return Batch(
        {
            "obs": {"image": torch.zeros(2, 4, dtype=torch.uint8), "state": torch.ones(2, 3)},
            "reward": torch.tensor([1.0, 2.0]),
            "index": torch.tensor([7, 8]),
        }
    )


def test_fields_are_attributes_and_items(batch: Batch) -> None:
    assert batch.reward is batch["reward"]
    assert batch.obs["image"] is batch["obs"]["image"] is batch["obs/image"]
    assert list(batch.keys()) == list(batch) == ["obs", "reward", "index"]
    assert "obs" in batch
    assert "action" not in batch
    assert len(batch) == 2
    assert {"obs", "reward", "keys"} <= set(dir(batch))


def test_a_name_it_has_not_is_an_error_that_lists_the_others(batch: Batch) -> None:
    message = "a batch of obs, reward, index has no 'rewards'"
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        batch.rewards  # noqa: B018  (the access is what is tested)
    for name in ("rewards", "rewards/image", "obs/", "obs/picture"):
        with pytest.raises(KeyError):
            batch[name]


def test_names_cannot_be_set(batch: Batch) -> None:
    with pytest.raises(AttributeError, match="^a batch is frozen: cannot set 'reward'$"):
        batch.reward = torch.zeros(2)
    with pytest.raises(AttributeError, match="^a batch is frozen: cannot delete 'reward'$"):
        del batch.reward


def test_numpy_shares_memory_and_keeps_the_nesting(batch: Batch) -> None:
    arrays = batch.numpy()
    arrays["obs"]["state"][0] = 5
    assert batch.obs["state"][0].tolist() == [5, 5, 5]
    assert arrays.keys() == batch.keys()


def test_to_moves_every_tensor(batch: Batch) -> None:
    moved = batch.to("meta")
    assert moved.obs["image"].device.type == moved.reward.device.type == "meta"
    assert batch.to("cpu").reward is batch.reward


def test_it_is_copied_and_pickled_by_value(batch: Batch) -> None:
    for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), copy.copy(batch)):
        assert other.reward.equal(batch.reward)
        assert other.obs["state"].equal(batch.obs["state"])


def test_its_repr_tells_dtypes_and_shapes(batch: Batch) -> None:
    assert repr(batch) == "Batch(obs={image: uint8[2, 4], state: float32[2, 3]}, reward=float32[2], index=int64[2])"
