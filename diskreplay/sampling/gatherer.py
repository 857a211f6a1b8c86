"""From ids to a batch: gathered into free memory, sent to the device, shown as tensors."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, torch_values
from diskreplay.sampling.buffer_pool import BufferPool, Fields, Slot, ordinary_memory
from diskreplay.sampling.cuda import DeviceCopy, Sent, pinned_memory
from diskreplay.sampling.readahead import Readahead
from diskreplay.sampling.sampler_states import Told
from diskreplay.sampling.transforms import Arrays, Pipeline
from diskreplay.schema.schema import Schema
from diskreplay.views.base import CopyThreads, Pages, Reader, View, nested, tuple_fields
from diskreplay.views.requested import OF_DRAWS

NOTHING = Pipeline()


# A batch in memory (see `BufferPool.acquire`), and on its way to a CUDA device where that is wanted.
Gathered = tuple[Slot, Fields, Sent | None]


class Destination:
    """Where batches go: a device, and the memory they are gathered in on the way there; see `BufferPool`.

    CUDA devices have a `device_copy`; to others but the CPU a batch is copied when it becomes a `Batch`.
    """

    def __init__(self, device: torch.device, spare: int = 2, debug: bool = False) -> None:
        self.device = device
        self.device_copy = DeviceCopy(device) if device.type == "cuda" else None
        self.pool = BufferPool(pinned_memory if self.device_copy else ordinary_memory, spare, debug)


class Gatherer:
    """Makes batches of one view of a store's steps. One thread at a time gathers, and one makes batches.

    `drawn` are the fields that say how a batch was drawn, and the places of their arrays in a block; `pipeline` is what
    is done to batches. For view, schema and fields see `Sampler`. `threads`, if any, copy parts of what is
    large; `close` ends them.
    """

    def __init__(
        self,
        view: View,
        schema: Schema,
        fields: Sequence[str] | None,
        destination: Destination,
        *,
        threads: CopyThreads | None = None,
        pipeline: Pipeline = NOTHING,
    ) -> None:
        device, self._kind = destination.device, view.kind
        self.reader: Reader = view.reader(schema, fields)
        if self.reader.evaluate is not None:
            self.reader.evaluate = torch_values(self.reader.evaluate, device)
        if device.type != "cpu":
            self.reader = self.reader.for_device()
        self._device, self._pool, self.device_copy = device, destination.pool, destination.device_copy
        leaves = [leaf.path for leaf in self.reader.leaves]
        self._paths = self.reader.paths
        self._names = [path[0] for path in self._paths] if all(len(path) == 1 for path in self._paths) else None
        self._tuples = tuple_fields([path[0] for path in self._paths], schema)
        # Nearly always: a batch's arrays become tensors when they are asked for.
        self._gives_arrays = device.type == "cpu" and self.reader.shows_leaves and self._names is not None
        self._weight = leaves.index(("weight",)) if ("weight",) in leaves else -1
        self.drawn = {
            path[0]: at for at, path in enumerate(leaves) if path[0] in OF_DRAWS and path[0] not in schema.extra
        }
        self.disk = Readahead(self.reader, schema)
        self.reader.threads = self._threads = threads
        self.seconds_gathering = self.seconds_copying = self.seconds_transforming = 0.0
        self.pipeline = pipeline
        self._is_seeded = False

    def gather(
        self,
        snapshot: Snapshot,
        ids: NDArray[np.int64],
        entropy: int | None = None,
        told: Told | None = None,
        pages: Pages | None = None,
    ) -> Gathered:
        """Gather these ids; all weights are 1.

        `entropy` seeds what the view draws itself; `told` has the fields that `drawn` names; `pages` is what the disk
        was asked for, None if it was not.
        InvalidIndex where an id is not one of the view's, SegmentGone where a segment was evicted since the snapshot.
        """
        if self._threads is not None and self._threads.jobs:  # after an interrupt
            self._threads.settle()
        begun = self.disk.begin(snapshot, ids, pages) if self.disk.wide else 0
        started = perf_counter()
        reader = self.reader
        leaves = reader.leaves_for(snapshot, ids) if reader.depends_on_ids else reader.leaves
        slot, fields = self._pool.acquire(leaves, len(ids))
        if entropy is not None or self._is_seeded:  # the latter if an interrupt came before `fill`
            self._is_seeded = True
            reader.seed(entropy)
        reader.fill(snapshot, ids, slot.block)
        self._is_seeded = False
        if told is not None:
            for name, at in self.drawn.items():
                slot.block.arrays[at][:] = told[name]
        sent = None if self.device_copy is None else self.device_copy.send(slot)
        self.seconds_gathering += perf_counter() - started
        if self.disk.wide:
            self.disk.end(begun)
        return slot, fields, sent

    def close(self) -> None:
        """End the threads that help."""
        if self._threads is not None:
            self._threads.close()

    def to_batch(self, gathered: Gathered, weights: NDArray[np.float32] | None = None) -> Batch:
        """Return the batch, with these weights if they are not all 1."""
        slot, fields, sent = gathered
        if self._gives_arrays:
            if weights is not None:
                ones = fields["weight"]
                if type(weights) is np.ndarray and weights.dtype == ones.dtype and weights.shape == ones.shape:
                    fields["weight"] = weights
                else:
                    ones[:] = weights
            return Batch(fields, self._kind)
        arrays = slot.block.arrays
        if weights is not None:
            arrays[self._weight][:] = weights
        values: Sequence[Any] = arrays
        if sent is not None and self.device_copy is not None:
            values = self.device_copy.receive(slot, sent, None if weights is None else self._weight)
        elif self._device.type != "cpu":
            started = perf_counter()
            values = [torch.from_numpy(array).to(self._device) for array in arrays]
            self.seconds_copying += perf_counter() - started
        elif not self.reader.shows_leaves:
            # Tensors and not arrays: only they keep the block's memory lent while a view of them is alive.
            values = [torch.from_numpy(array) for array in arrays]
        values = self.reader.present(values)
        if self._names:
            return Batch(dict(zip(self._names, values)), self._kind)  # noqa: B905
        return Batch(nested(self._paths, values, self._tuples), self._kind)

    def transformed(self, gathered: Gathered, prepared: Sequence[Arrays], entropy: int | None) -> Batch:
        """Return what the pipeline makes of a batch whose weights are all 1."""
        batch = self.to_batch(gathered)
        started = perf_counter()
        batch = self.pipeline.apply(batch, prepared, entropy)
        self.seconds_transforming += perf_counter() - started
        return batch
