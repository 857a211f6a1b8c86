"""A batch: torch tensors by name."""

from collections.abc import Callable, Iterator, KeysView
from typing import Any

import numpy as np
import torch

from diskreplay.loading.minibatches import minibatches

Tree = Any  # a tensor, an array that has yet to become one, or a dict of trees


class Batch:
    """A frozen record of tensors with one leading axis: `batch.obs` and `batch["obs"]` are the same.

    Nested spaces give nested dicts. A batch is valid as long as it, any tensor of it, or any view of one, is alive: its
    memory is not used again before. Immutable in its names; the tensors are yours to change.
    """

    __slots__ = ("__weakref__", "_fields")
    _fields: dict[str, Tree]

    def __init__(self, fields: dict[str, Tree]) -> None:
        # Kept as it is, arrays and all: an array becomes a tensor when somebody asks for it. Most training loops leave
        # some fields alone, and each costs nearly a microsecond to make and to drop.
        _set_fields(self, fields)

    def __getattr__(self, name: str) -> Tree:
        # `_fields` is missing only while a copy is being made.
        if name != "_fields" and name in self._fields:
            return self[name]
        raise AttributeError(f"a batch of {', '.join(self.keys()) if name != '_fields' else 'nothing'} has no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is frozen: cannot delete {name!r}")

    def __getitem__(self, name: str) -> Tree:
        value = self._fields[name]
        if type(value) is np.ndarray:
            value = self._fields[name] = _tensor(value)
        elif type(value) is dict and _has_arrays(value):
            value = self._fields[name] = _map(torch.as_tensor, value)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        """Return the number of items, the length of the leading axis."""
        return len(self._fields["index"])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def __reduce__(self) -> tuple[Any, ...]:
        return Batch, (self._tensors(),)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={_describe(value)}' for name, value in self._tensors().items())})"

    def _tensors(self) -> dict[str, Tree]:
        return {name: self[name] for name in self._fields}

    def keys(self) -> KeysView[str]:
        """Return the names of the fields."""
        return self._fields.keys()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device; tensors that are there already are shared."""
        return Batch(_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), self._tensors()))

    def numpy(self) -> dict[str, Any]:
        """Return the fields as numpy arrays, nested as they are; on the CPU they share memory with the tensors."""
        arrays: dict[str, Any] = _map(lambda tensor: tensor.detach().cpu().numpy(), self._tensors())
        return arrays

    def minibatches(self, size: int, epochs: int = 1, seed: int | None = None) -> Iterator["Batch"]:
        """Return an iterator over the items in random order, `size` at a time; an epoch's last batch may be smaller.

        The items of a rollout are its steps, (num_steps, num_envs) of them. Minibatches are copies.

        Parameters
        ----------
        size : int
            Items of a minibatch, its leading axis.
        epochs : int
            How often each item is given, in another order each time.
        seed : int or None
            Makes the orders a function of the seed (give each rollout another); None is different each time.

        Raises
        ------
        ValueError
            `size` or `epochs` is no int of at least 1.
        """
        return minibatches(self, size, epochs, seed)


# Looked up once: a batch is made and read in a few microseconds.
_set_fields: Callable[[Batch, dict[str, Tree]], None] = Batch.__dict__["_fields"].__set__
_tensor = torch.from_numpy


def _has_arrays(tree: Tree) -> bool:
    return any(map(_has_arrays, tree.values())) if isinstance(tree, dict) else not isinstance(tree, torch.Tensor)


def _map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _map(function, below) for name, below in tree.items()}
    return function(tree)


def _describe(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{name}: {_describe(below)}' for name, below in tree.items())}}}"
    return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
