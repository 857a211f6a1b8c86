"""Minibatches: the items of a batch in random order, some at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from diskreplay.sampling.schedule import int_argument


def minibatches(batch: Any, size: int, epochs: int = 1, seed: int | None = None) -> Iterator[Any]:
    """Return an iterator over shuffled minibatches; see `Batch.minibatches`."""
    size, epochs = int_argument("size", size), int_argument("epochs", epochs)
    return _shuffled(batch, size, epochs, np.random.Generator(np.random.PCG64(seed)))


def _shuffled(batch: Any, size: int, epochs: int, rng: np.random.Generator) -> Iterator[Any]:
    axes = batch["index"].ndim
    flat = {name: _flattened(batch[name], axes) for name in batch}
    index = flat["index"]
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(index))).to(index.device)
        for start in range(0, len(order), size):
            yield type(batch)(_taken(flat, order[start : start + size]))


def _flattened(tree: Any, axes: int) -> Any:
    if isinstance(tree, dict):
        return {name: _flattened(below, axes) for name, below in tree.items()}
    return tree.flatten(0, axes - 1)


def _taken(tree: Any, which: torch.Tensor) -> Any:
    if isinstance(tree, dict):
        return {name: _taken(below, which) for name, below in tree.items()}
    return tree[which]
