"""Batches as TensorDicts, by the keys that TorchRL's losses and modules look for."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from diskreplay.errors import MissingExtra

if TYPE_CHECKING:
    from tensordict import TensorDict

# Of our names: where TorchRL has them. What is not here keeps its name at the root.
KEYS: Mapping[str, str | tuple[str, str]] = {
    "reward": ("next", "reward"),
    "terminated": ("next", "terminated"),
    "truncated": ("next", "truncated"),
    "n_steps": "steps_to_next_obs",
    "is_first": "is_init",
    "weight": "priority_weight",
}
# Numbers that TorchRL gives an axis of their own.
COLUMNS = frozenset({"reward", "terminated", "truncated", "n_steps", "is_first"})


def to_tensordict(batch: Mapping[str, Any]) -> "TensorDict":
    """Return the fields of a batch, trees of tensors, as a TensorDict; see `Batch.to_tensordict`."""
    with MissingExtra.raised_for("a TensorDict", "torchrl"):
        from tensordict import TensorDict

    shape = batch["reward"].shape if "reward" in batch else batch["index"].shape
    found: dict[Any, Any] = {}
    for name, value in batch.items():
        if name in ("obs", "next_obs"):
            below = {"observation": value} if isinstance(value, torch.Tensor) else value
            found |= _leaves(below, ("next",) if name == "next_obs" else (), shape)
        elif isinstance(value, torch.Tensor):
            spread = _over_steps(value, shape)
            found[KEYS.get(name, name)] = spread[..., None] if name in COLUMNS else spread
        else:
            found |= _leaves(value, (name,), shape)
    if {"terminated", "truncated"} <= batch.keys():
        found["next", "done"] = found["next", "terminated"] | found["next", "truncated"]
    return TensorDict(found, batch_size=shape)


def _over_steps(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return what an item has once, (B, ...), at each of its steps, (B, L, ...)."""
    if value.shape[: len(shape)] == shape:
        return value
    return value[:, None].expand(*shape, *value.shape[1:])


def _leaves(tree: Any, above: tuple[str, ...], shape: torch.Size) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the tensors of a tree, each over all steps, by their keys from the root on.

    So an extra field "next" joins what is there.
    """
    if isinstance(tree, torch.Tensor):
        return {above: _over_steps(tree, shape)}
    return {key: leaf for name, part in tree.items() for key, leaf in _leaves(part, (*above, name), shape).items()}
