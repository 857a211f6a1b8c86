"""From ids to a batch: gathered into free memory, shown as tensors, copied to the device."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.loading.batch import Batch
from diskreplay.loading.ring import Ring
from diskreplay.loading.rollouts import torch_values
from diskreplay.views.base import Reader, View, nested
from diskreplay.views.rollouts import Rollouts


class Gatherer:
    """Makes batches of one view of a store's steps. Not thread-safe: one sampler, under its lock."""

    def __init__(self, view: View, schema: Any, fields: Sequence[str] | None, device: torch.device, ring: Ring) -> None:
        self.reader: Reader = view.reader(schema, fields)
        if isinstance(view, Rollouts) and view.value_fn is not None:
            self.reader.evaluate = torch_values(view.value_fn, device)  # type: ignore[attr-defined]
        self._device, self._ring = device, ring
        leaves = [leaf.path for leaf in self.reader.leaves]
        # A reader may show fields as views of what it gathers, and gather leaves that depend on the batch.
        self._present = getattr(self.reader, "present", None)
        self._leaves_for = getattr(self.reader, "leaves_for", None)
        self._paths = list(getattr(self.reader, "paths", leaves))
        self._names = [path[0] for path in self._paths] if all(len(path) == 1 for path in self._paths) else None
        self._weight = leaves.index(("weight",)) if ("weight",) in leaves else -1
        self.seconds_copying = 0.0

    def batch(
        self,
        snapshot: Any,
        ids: NDArray[np.int64],
        weights: NDArray[np.float32] | None,
        entropy: int | None = None,
    ) -> Batch:
        """Gather these ids; weights None are all 1, and `entropy` seeds what the view draws itself.

        Raises
        ------
        InvalidIndex
            An id is none of the view's.
        SegmentGone
            A segment has been evicted since the snapshot.
        """
        leaves = self.reader.leaves if self._leaves_for is None else self._leaves_for(snapshot, ids)
        slot = self._ring.take(leaves, len(ids))
        if entropy is not None:
            self.reader.seed(entropy)  # type: ignore[attr-defined]
        self.reader.fill(snapshot, ids, slot.block)
        arrays = slot.block.arrays
        if weights is not None:
            arrays[self._weight][:] = weights
        if self._present is not None:
            # Tensors and not arrays: only they keep the block's memory lent while a view of them is alive. To the
            # device first: what is shown several times over is copied once.
            values = self._present([self._copied(torch.from_numpy(array)) for array in arrays])
        elif self._device.type != "cpu":
            values = [self._copied(torch.from_numpy(array)) for array in arrays]
        elif self._names:
            return Batch(slot.by_name.copy())
        else:
            values = arrays
        return Batch(dict(zip(self._names, values)) if self._names else nested(self._paths, values))  # noqa: B905

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return tensor
        started = perf_counter()
        copy = tensor.to(self._device)
        self.seconds_copying += perf_counter() - started
        return copy
