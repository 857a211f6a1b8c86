"""Makes batches of ids: reads rows from disk, gathers them into free memory, and sends them to the device."""

import sys
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.device_tensors import fetched
from diskreplay.distributions.prioritized import sequence_error
from diskreplay.errors import SegmentGone
from diskreplay.ids import Floats, Ints
from diskreplay.reading.chunk_table import WIDE_ROW
from diskreplay.reading.decompression import blocks_read
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.batch import Batch, torch_values
from diskreplay.sampling.sampler_states import DrawInfo
from diskreplay.sampling.transforms import Arrays, Pipeline
from diskreplay.schema.schema import Schema
from diskreplay.views.base import (
    ALIGNMENT,
    NO_PAGES,
    Block,
    CopyThreads,
    Leaf,
    Pages,
    Reader,
    View,
    nested,
    offsets,
    tuple_fields,
)
from diskreplay.views.requested import OF_DRAWS

Memory = NDArray[np.uint8]
Fields = dict[Any, Any]  # arrays by name, or by path if the path has several parts

POISON = 0xFF  # memory full of this byte reads as NaN in every float dtype, and as -1 in every signed integer dtype


def ordinary_memory(nbytes: int) -> Memory:
    """Return new memory that starts at a cache line."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class Slot:
    def __init__(self, memory: Memory, leaves: Sequence[Leaf], size: int) -> None:
        self.memory = memory
        self.poisoned = True
        self.event: torch.cuda.Event | None = None  # happens when the block's copy to the device has ended
        self.block = Block(leaves, size, self.memory)
        names = [leaf.path if len(leaf.path) > 1 else leaf.path[0] for leaf in leaves]
        self.fields: Fields = dict(zip(names, self.block.arrays, strict=True))
        self._references_when_free = sum(map(sys.getrefcount, self.block.arrays))

    @property
    def free(self) -> bool:
        """True if no tensor of the slot's batch is alive, and no copy of the batch to a device is running."""
        if sum(map(sys.getrefcount, self.block.arrays)) != self._references_when_free:
            return False
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None


class BufferPool:
    """The memory of batches: a `Slot` for each batch that is alive, and some spare slots. Any thread may take a slot.

    A slot's arrays are made once, and each batch in the slot makes tensors of these arrays. Tensors, their views, and
    arrays made of the views keep a reference to the slot's array. A slot is free when its arrays have the reference
    counts of a new slot. Making new arrays would take 20 of the 140 microseconds of a small batch.

    ``allocate(nbytes)`` returns uint8 memory, ordinary or pinned. At most `spare` free slots are kept. `debug`
    overwrites the memory of batches that are no longer referenced, so that a pointer that outlived its tensor reads
    NaN.
    """

    def __init__(
        self, allocate: Callable[[int], Memory] = ordinary_memory, spare: int = 2, debug: bool = False
    ) -> None:
        self._allocate = allocate
        self._spare = spare
        self._debug = debug
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, leaves: Sequence[Leaf], size: int) -> tuple[Slot, Fields]:
        """Return a free slot for a batch of `size` items, and its arrays by field name; their contents are arbitrary.

        The slot is in use while these arrays, or tensors made of them, are referenced.
        """
        with self._lock:
            slots = self._slots
            # A taken slot moves to the end of the list, so the first slot is usually free.
            if len(slots) <= self._spare + 1 and not self._debug:
                for number, slot in enumerate(slots):
                    block = slot.block
                    if block.size == size and block.leaves is leaves and slot.free:
                        slots.append(slots.pop(number))
                        return slot, slot.fields.copy()
            slot = self._free_slot(leaves, size)
            return slot, slot.fields.copy()

    def _free_slot(self, leaves: Sequence[Leaf], size: int) -> Slot:
        free = [slot for slot in self._slots if slot.free]
        if self._debug:
            _poison(free)
        fitting = [slot for slot in free if slot.block.size == size and slot.block.leaves is leaves]
        chosen = fitting[0] if fitting else self._lay_out(free, leaves, size)
        others = [slot for slot in free if slot is not chosen]
        for slot in others[self._spare :]:
            self._slots.remove(slot)
        chosen.poisoned = False
        return chosen

    def _lay_out(self, free: list[Slot], leaves: Sequence[Leaf], size: int) -> Slot:
        """Return a new slot; reuse the memory of a slot in `free` that has one to two times the needed size, if any."""
        _, nbytes = offsets(leaves, size)
        for place, slot in enumerate(self._slots):
            if nbytes <= len(slot.memory) <= 2 * nbytes and slot in free:
                # The slot is replaced by a single assignment, so that an interrupt cannot leave a slot half laid out.
                self._slots[place] = laid_out = Slot(slot.memory, leaves, size)
                free.remove(slot)
                return laid_out
        slot = Slot(self._allocate(max(nbytes, 1)), leaves, size)
        self._slots.append(slot)
        return slot

    def clear(self) -> None:
        """Release all memory, except the memory of batches that are still alive."""
        with self._lock:
            for slot in self._slots:
                if slot.event is not None:
                    slot.event.synchronize()
            self._slots.clear()


def _poison(slots: list[Slot]) -> None:
    for slot in slots:
        if not slot.poisoned:
            slot.memory.fill(POISON)
            slot.poisoned = True


def pinned_memory(nbytes: int) -> Memory:
    memory: Memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class Sent(NamedTuple):
    """A batch on its way to a device. `buffer`, on the device, has the whole batch once `event` has happened."""

    buffer: torch.Tensor
    event: torch.cuda.Event


class DeviceCopy:
    """Copies slots to a device. Any thread may call `send`; the thread that uses a batch calls `receive`.

    Copies run concurrently with the trainer's kernels. Only the trainer's stream waits for the copy of a batch; the
    trainer's thread does not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, slot: Slot) -> Sent:
        """Start to copy a slot's block to the device; the slot is not free before the copy ends."""
        nbytes = slot.block.nbytes
        with torch.cuda.stream(self._stream):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            buffer.copy_(torch.from_numpy(slot.memory[:nbytes]), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        slot.event = event
        return Sent(buffer, event)

    def receive(self, slot: Slot, sent: Sent, changed: int | None = None) -> list[torch.Tensor]:
        """Return the block's arrays on the device, to be used on the current stream.

        If an array was written after the slot was sent, `changed` is the array's index in `Block.arrays`, else None.
        This array is sent again.
        """
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.event)
        # The buffer was allocated on the copying stream, and must not be reused there while the current stream reads
        # the buffer.
        sent.buffer.record_stream(current)
        block = slot.block
        tensors = []
        for array, at in zip(block.arrays, block.offsets, strict=True):
            flat = sent.buffer[at : at + array.nbytes].view(torch.from_numpy(array).dtype)
            tensors.append(flat.view(array.shape))
        if changed is not None:
            tensors[changed].copy_(torch.from_numpy(block.arrays[changed]), non_blocking=True)
            slot.event = torch.cuda.Event()
            slot.event.record(current)
        return tensors


class HostCopy:
    """Copies tensors from a device to the CPU, concurrently with the trainer's kernels.

    Only one thread calls `later`; any thread may call the function that it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def later(self, *values: Any) -> Callable[[], tuple[Any, ...]]:
        """Return a function that waits for the work so far of the current stream, then returns `fetched(*values)`.

        The tensors among `values` must not change before a call of the returned function has ended.
        """
        stream = self._stream
        if stream is None:
            return lambda: values
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))

        def copy() -> tuple[Any, ...]:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                return fetched(*values)

        return copy


# After this number of batches without a read from disk, rows are not requested until a batch reads from disk again.
WARM_BATCHES = 32


class Readahead:
    """Requests the wide rows of batches from disk before the rows are used; pauses while the rows are in memory.

    Wide rows have at least `WIDE_ROW` bytes. ``wide`` is True if a field of the schema has wide rows. If it is False,
    callers may skip all methods.

    Concurrency: `ask` may run in another thread than the other methods.
    """

    def __init__(self, reader: Reader, schema: Schema) -> None:
        self._reader = reader
        self.wide = any(field.row_bytes >= WIDE_ROW for field in schema.leaves.values())
        self._asks = WARM_BATCHES
        self.seconds = 0.0

    @property
    def cold(self) -> bool:
        """Whether `ask` requests rows.

        False if `wide` is False, or after `WARM_BATCHES` successive batches without a read from disk.
        """
        return self.wide and self._asks > 0

    def ask(self, snapshot: Snapshot, ids: NDArray[np.int64]) -> Pages:
        """Request the pages of these ids from disk, if `cold`, and return the pages."""
        if not self.cold:
            return NO_PAGES
        before = blocks_read()
        pages = self._reader.pages(snapshot, ids)
        pages.ask()
        self._count(before)
        return pages

    def begin(self, snapshot: Snapshot, ids: NDArray[np.int64], pages: Pages | None) -> int:
        """Wait until the pages of these ids are in memory; return the argument of the next call of `end`.

        `pages` is a result of `ask`, or None if `ask` was not called.
        """
        before = blocks_read()
        pages = self.ask(snapshot, ids) if pages is None else pages
        if len(pages.starts):
            started = perf_counter()
            pages.wait()
            self.seconds += perf_counter() - started
        return before

    def end(self, before: int) -> None:
        if not self._count(before):
            self._asks = max(self._asks - 1, 0)

    def _count(self, before: int) -> bool:
        """Return whether this thread has read from disk. `before` is an earlier result of `blocks_read`."""
        if blocks_read() == before:
            return False
        self._asks = WARM_BATCHES
        return True


NOTHING = Pipeline()


# The slot of a gathered batch, the batch's arrays by name, and the copy to a CUDA device (None on other devices).
Gathered = tuple[Slot, Fields, Sent | None]


class Destination:
    """The device of batches, and the memory in which batches are gathered.

    If the device is neither the CPU nor a CUDA device, a batch is copied when it becomes a `Batch`.
    """

    def __init__(self, device: torch.device, spare: int = 2, debug: bool = False) -> None:
        self.device = device
        self.device_copy = DeviceCopy(device) if device.type == "cuda" else None
        self.pool = BufferPool(pinned_memory if self.device_copy else ordinary_memory, spare, debug)


class Gatherer:
    """Makes batches of one view. Only one thread at a time may call `gather`; the same holds for `to_batch`.

    `draw_fields` maps the names of fields about the draw (see `OF_DRAWS`) to positions in `Block.arrays`. `threads`, if
    given, copy parts of large arrays; `close` ends these threads.
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
        # Usually a batch gets arrays, and makes a tensor of an array when the field is first read.
        self._gives_arrays = device.type == "cpu" and self.reader.shows_leaves and self._names is not None
        self._weight = leaves.index(("weight",)) if ("weight",) in leaves else -1
        self.draw_fields = {
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
        draw_info: DrawInfo | None = None,
        pages: Pages | None = None,
    ) -> Gathered:
        """Gather these ids' items into a free slot, with weights of 1; for a CUDA device, start to copy the slot.

        `entropy` seeds the random numbers of the view. `pages` are the pages already requested from disk, or None.
        """
        if self._threads is not None and self._threads.jobs:  # jobs of an interrupted call
            self._threads.settle()
        begun = self.disk.begin(snapshot, ids, pages) if self.disk.wide else 0
        started = perf_counter()
        reader = self.reader
        leaves = reader.leaves_for(snapshot, ids) if reader.depends_on_ids else reader.leaves
        slot, fields = self._pool.acquire(leaves, len(ids))
        if entropy is not None or self._is_seeded:  # an interrupted call leaves a seed
            self._is_seeded = True
            reader.seed(entropy)
        reader.fill(snapshot, ids, slot.block)
        self._is_seeded = False
        if draw_info is not None:
            for name, at in self.draw_fields.items():
                slot.block.arrays[at][:] = draw_info[name]
        sent = None if self.device_copy is None else self.device_copy.send(slot)
        self.seconds_gathering += perf_counter() - started
        if self.disk.wide:
            self.disk.end(begun)
        return slot, fields, sent

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def to_batch(self, gathered: Gathered, weights: NDArray[np.float32] | None = None) -> Batch:
        """Return a gathered batch as a `Batch`. If `weights` is None, all weights are 1."""
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
            # A view of a tensor keeps the slot in use, but a view of an array does not. So tensors are made here.
            values = [torch.from_numpy(array) for array in arrays]
        values = self.reader.present(values)
        if self._names:
            return Batch(dict(zip(self._names, values)), self._kind)  # noqa: B905
        return Batch(nested(self._paths, values, self._tuples), self._kind)

    def transformed(self, gathered: Gathered, prepared: Sequence[Arrays], entropy: int | None) -> Batch:
        batch = self.to_batch(gathered)
        started = perf_counter()
        batch = self.pipeline.apply(batch, prepared, entropy)
        self.seconds_transforming += perf_counter() - started
        return batch


# The largest number of windows that are read at once.
_AT_ONCE = 256


class ItemErrors:
    """Reads the loss masks of a view's items, and computes the initial |td| of items.

    Not thread-safe: a sampler calls it under its lock.
    """

    def __init__(self, view: View, schema: Schema) -> None:
        self._view, self._schema = view, schema
        self._readers: dict[tuple[str, ...], Gatherer] = {}
        self._has_windows = True  # False once a call has shown that the view has no windows

    def loss_mask(self, snapshot: Snapshot, ids: Ints, length: int) -> NDArray[np.bool_]:
        """Return the loss mask of sequences, (n, length) bool, False after the end of a sequence.

        Raises ValueError if the view has no sequences, or sequences of more than `length` steps.
        """
        mask = np.zeros((len(ids), length), np.bool_)
        if not len(ids):
            return mask
        found = self._gathered(snapshot, ids, "loss_mask")
        if found is None:
            raise ValueError(f"td_error must have one axis, (batch,) or (batch, 1): {self._view} has no sequences")
        steps = found[0].shape[1]
        if steps > length:
            raise ValueError(f"td_error has {length} steps a sequence, and these sequences have {steps}")
        mask[:, :steps] = found[0]
        return mask

    def initial(self, snapshot: Snapshot, ids: Ints, eta: float) -> Floats:
        """Return the initial |td| of items, (n,), from the initial priorities of their steps.

        The |td| of a window is eta · max + (1 - eta) · mean of initial priorities. The maximum and the mean are over
        the steps that the window's loss mask selects. The |td| is NaN if none of these steps has an initial priority,
        or if the segment was evicted since the snapshot.
        """
        blocks = []
        for at in range(0, len(ids), _AT_ONCE):
            try:
                found = self._gathered(snapshot, ids[at : at + _AT_ONCE], "loss_mask", "priority")
            except SegmentGone:
                blocks.append(np.full(len(ids[at : at + _AT_ONCE]), np.nan))
                continue
            if found is None:
                return snapshot.priorities(ids)
            mask, priorities = found
            given = mask & ~np.isnan(priorities)
            blocks.append(np.where(given.any(axis=1), sequence_error(priorities, given, eta), np.nan))
        return np.concatenate(blocks)

    def _gathered(self, snapshot: Snapshot, ids: Ints, *fields: str) -> list[NDArray[Any]] | None:
        if self._has_windows and fields not in self._readers:
            try:
                destination = Destination(torch.device("cpu"), 0)
                self._readers[fields] = Gatherer(self._view, self._schema, fields, destination)
            except ValueError:
                self._has_windows = False
        if not self._has_windows:
            return None
        slot, _, _ = self._readers[fields].gather(snapshot, ids)
        paths = [leaf.path for leaf in slot.block.leaves]
        return [slot.block.arrays[paths.index((name,))] for name in fields]
