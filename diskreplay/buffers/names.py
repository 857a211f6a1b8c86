"""The names that batches of buffers have beside those of the views."""

from collections.abc import Callable
from typing import Any

import torch

from diskreplay.loading.batch import Batch

# A batch's own name for what each alias shows.
ALIASES = {"states": "obs", "actions": "action", "rewards": "reward", "next_states": "next_obs", "dones": "terminated"}


def with_aliases(fields: dict[str, Any]) -> Batch:
    """Return a batch of these fields, (size, ...), and the aliases of those that are there.

    Scalars are (size, 1) under these names; dones are float32.
    """
    shown = dict(fields)
    for alias, name in ALIASES.items():
        if name in fields:
            shown[alias] = mapped(_column, fields[name].float() if alias == "dones" else fields[name])
    return Batch(shown)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each tensor of a value that may be nested."""
    if isinstance(tree, dict):
        return {name: mapped(function, below) for name, below in tree.items()}
    return function(tree)


def _column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor
