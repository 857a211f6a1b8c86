"""Columns: a tensor for each field, with a row for each step."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from diskreplay.buffers.values import differ_by_ones, fitted
from diskreplay.sampling.gatherer import BufferPool
from diskreplay.schema.schema import Schema
from diskreplay.schema.spaces import Field
from diskreplay.views.base import Leaf

Columns = dict[str, torch.Tensor]  # the keys are paths of fields

# The number of unreferenced rollouts whose memory is kept for reuse. A training loop still reads one rollout while it
# collects the next rollout.
SPARE = 1

# Dtypes that torch and numpy have. torch can cast the dtypes in CAST to most dtypes, and the dtypes in SELDOM_CAST to
# few dtypes.
CAST = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
)
SELDOM_CAST = (torch.uint16, torch.uint32, torch.uint64)


class ColumnMemory:
    """Makes tensors of fields on a device, one per field, ``(*leading, *shape)``. Not thread-safe.

    On the CPU, the memory of the tensors of a call is reused when none of these tensors is referenced any more.
    """

    def __init__(self, fields: Mapping[str, Field], leading: tuple[int, ...], device: torch.device) -> None:
        self._fields, self._leading, self._device = dict(fields), leading, device
        self._leaves = [Leaf((path,), field.dtype, field.shape) for path, field in fields.items()]
        self._pool = BufferPool(spare=SPARE)

    def columns(self) -> Columns:
        """Return a tensor of each field, with arbitrary contents, in memory that no other tensor references."""
        # In inference mode, new tensors would be inference tensors, which cannot have gradients.
        with torch.inference_mode(False):
            shapes = {path: (*self._leading, *field.shape) for path, field in self._fields.items()}
            if self._device.type != "cpu":
                # torch reuses the memory of devices itself
                made = {path: torch_dtype(field.dtype) for path, field in self._fields.items()}
                return {path: torch.empty(shapes[path], dtype=made[path], device=self._device) for path in made}
            _, arrays = self._pool.acquire(self._leaves, prod(self._leading))
            return {path: torch.from_numpy(arrays[path]).view(shapes[path]) for path in shapes}


def leaf_rows(schema: Schema, part: str, value: Any, leading: tuple[int, ...]) -> list[tuple[str, torch.Tensor]]:
    """Return the path and the values of each leaf of `value`; `part` is the part of a step, such as "obs".

    The values are tensors ``(*leading, *shape)``.
    """
    return [(path, rows_of_field(schema.leaves[path], raw, path, leading)) for path, raw in schema.flatten(part, value)]


def rows_of_field(field: Field, value: Any, path: str, leading: tuple[int, ...]) -> torch.Tensor:
    """Return values of a field as a tensor, ``(*leading, *shape)``.

    A tensor stays on its device if all values of its dtype fit the field; other tensors are copied to the CPU. `value`
    may have additional axes of length 1, or lack axes of length 1.
    """
    shape = leading + field.shape
    if isinstance(value, torch.Tensor) and value.dtype in _fitting(field.dtype):
        tensor: torch.Tensor = value.detach() if value.requires_grad else value
        if tensor.shape == shape:
            return tensor
        if differ_by_ones(tensor.shape, shape):
            return tensor.reshape(shape)
    return tensor_of(field.cast(fitted(field, value, leading), path, leading))


def tensor_of(array: np.ndarray) -> torch.Tensor:
    # torch has no read-only tensors, so a read-only array is copied.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@lru_cache
def _fitting(dtype: np.dtype[Any]) -> frozenset[torch.dtype]:
    """Return the torch dtypes whose values all fit a field of this dtype, by the rules of `Field.cast`."""
    own, wide = torch_dtype(dtype), dtype.kind == "f" and dtype.itemsize >= 4
    if own in SELDOM_CAST:
        return frozenset([own])
    fitting = {own, torch.bfloat16} if wide else {own}
    for other in CAST:
        came = torch.empty(0, dtype=other).numpy().dtype
        if np.can_cast(came, dtype, "safe") or (wide and came.kind in "biu"):
            fitting.add(other)
    return frozenset(fitting)
