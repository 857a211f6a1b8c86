"""A batch: torch tensors by name."""

from collections.abc import Callable, Iterator, KeysView, Mapping
from typing import Any

import torch

Tree = Any  # a tensor, or a dict of trees


class Batch:
    """A frozen record of tensors with one leading axis: `batch.obs` and `batch["obs"]` are the same.

    Nested spaces give nested dicts. A batch is valid as long as any tensor of it, or any view of one, is alive: its
    memory is not used again before. Immutable in its names; the tensors are yours to change.
    """

    __slots__ = ("__weakref__", "_fields")
    _fields: dict[str, Tree]

    def __init__(self, fields: Mapping[str, Tree]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Tree:
        # `_fields` is missing only while a copy is being made.
        if name != "_fields" and name in self._fields:
            return self._fields[name]
        raise AttributeError(f"a batch of {', '.join(self.keys()) if name != '_fields' else 'nothing'} has no {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is frozen: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is frozen: cannot delete {name!r}")

    def __getitem__(self, name: str) -> Tree:
        return self._fields[name]

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
        return Batch, (self._fields,)

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={_describe(value)}' for name, value in self._fields.items())})"

    def keys(self) -> KeysView[str]:
        """Return the names of the fields."""
        return self._fields.keys()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """Return the batch on a device; tensors that are there already are shared."""
        return Batch(_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), self._fields))

    def numpy(self) -> dict[str, Any]:
        """Return the fields as numpy arrays, nested as they are; on the CPU they share memory with the tensors."""
        arrays: dict[str, Any] = _map(lambda tensor: tensor.detach().cpu().numpy(), self._fields)
        return arrays


def _map(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {name: _map(function, below) for name, below in tree.items()}
    return function(tree)


def _describe(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{name}: {_describe(below)}' for name, below in tree.items())}}}"
    return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
