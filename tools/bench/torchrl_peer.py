"""The peer: TorchRL's replay buffers over its memory-mapped storage."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)

# It logs each storage that it makes, in the middle of a table.
logging.getLogger("torchrl").setLevel(logging.WARNING)

KINDS = {"TorchRL ReplayBuffer": ReplayBuffer, "TorchRL TensorDictReplayBuffer": TensorDictReplayBuffer}
PRIORITIZED = "TorchRL ReplayBuffer, prioritized"
SLICES, PRIORITIZED_SLICES = "TorchRL SliceSampler", "TorchRL PrioritizedSliceSampler"
NO_EXTENSION = (
    "TorchRL's prioritized samplers need its C++ extension, which does not load here: their rows are left out."
)
FILLED_AT_ONCE = 10_000

Columns = dict[str, Any]


def extension_loads() -> bool:
    """Return whether its prioritized samplers can be made."""
    try:
        PrioritizedSampler(1, 0.6, 0.4)
    except (ImportError, RuntimeError):
        return False
    return True


def buffer(kind: str, folder: Path, capacity: int, batch_size: int, sampler: Any = None) -> Any:
    """Return an empty buffer with files in `folder`, which is made."""
    folder.mkdir()
    storage = LazyMemmapStorage(capacity, scratch_dir=str(folder))
    return KINDS[kind](storage=storage, batch_size=batch_size, **({} if sampler is None else {"sampler": sampler}))


def rollouts(steps: int) -> Any:
    """Return an empty buffer of `steps` steps in memory."""
    return TensorDictReplayBuffer(storage=LazyTensorStorage(steps), batch_size=steps)


def prioritized(folder: Path, capacity: int, batch_size: int, alpha: float, beta: float) -> Any:
    """Return an empty buffer that draws by priority."""
    return buffer("TorchRL ReplayBuffer", folder, capacity, batch_size, PrioritizedSampler(capacity, alpha, beta))


def slices(folder: Path, capacity: int, items: int, length: int, by_priority: bool) -> Any:
    """Return an empty buffer that draws `items` slices of one "episode" each."""
    shared = {"slice_len": length, "traj_key": "episode", "cache_values": True}
    sampler = PrioritizedSliceSampler(capacity, 0.6, 0.4, **shared) if by_priority else SliceSampler(**shared)
    return buffer("TorchRL TensorDictReplayBuffer", folder, capacity, items * length, sampler)


def rows(columns: Columns, start: int, stop: int) -> TensorDict:
    """Return rows of numpy columns."""
    parts = {name: torch.from_numpy(column[start:stop]) for name, column in columns.items()}
    return TensorDict(parts, [stop - start])


def nested_rows(columns: Columns, start: int, stop: int) -> TensorDict:
    """Return the same rows under the keys that TorchRL's losses read."""
    flat = rows(columns, start, stop)
    following = {"reward": flat["reward"], "done": flat["done"], "observation": flat["next_obs"]}
    parts = {"observation": flat["obs"], "action": flat["action"], "next": TensorDict(following, [stop - start])}
    return TensorDict(parts, [stop - start])


def fill(buffer: Any, columns: Columns, make: Callable[[Columns, int, int], TensorDict] = rows) -> None:
    """Add all rows."""
    count = len(columns["reward"])
    for start in range(0, count, FILLED_AT_ONCE):
        buffer.extend(make(columns, start, min(start + FILLED_AT_ONCE, count)))


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
