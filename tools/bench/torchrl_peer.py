"""The peer: TorchRL's replay buffers over its memory-mapped storage."""

import logging
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer, TensorDictReplayBuffer

# It tells of each storage that it makes, in the middle of a table.
logging.getLogger("torchrl").setLevel(logging.WARNING)

KINDS = {"TorchRL ReplayBuffer": ReplayBuffer, "TorchRL TensorDictReplayBuffer": TensorDictReplayBuffer}


def buffer(kind: str, folder: Path, capacity: int, batch_size: int) -> Any:
    """Return an empty buffer whose files lie in `folder`, which is made."""
    folder.mkdir()
    return KINDS[kind](storage=LazyMemmapStorage(capacity, scratch_dir=str(folder)), batch_size=batch_size)


def rows(columns: dict[str, Any], start: int, stop: int) -> TensorDict:
    """Return rows of numpy columns."""
    parts = {name: torch.from_numpy(column[start:stop]) for name, column in columns.items()}
    return TensorDict(parts, [stop - start])


def nested_rows(columns: dict[str, Any], start: int, stop: int) -> TensorDict:
    """Return the same rows under the keys that TorchRL's losses read."""
    flat = rows(columns, start, stop)
    following = {"reward": flat["reward"], "done": flat["done"], "observation": flat["next_obs"]}
    parts = {"observation": flat["obs"], "action": flat["action"], "next": TensorDict(following, [stop - start])}
    return TensorDict(parts, [stop - start])


def transition(obs: Any, action: int, reward: float, terminated: bool, next_obs: Any) -> TensorDict:
    """Return one transition, flat: nested keys cost the peer more."""
    return TensorDict(
        {
            "obs": torch.from_numpy(obs),
            "action": torch.tensor(action),
            "reward": torch.tensor(reward),
            "done": torch.tensor(terminated),
            "next_obs": torch.from_numpy(next_obs),
        },
        [],
    )
