"""Memory for batches, used again and again, but never while a tensor of an earlier batch is alive.

A slot's arrays are made once, and each batch's tensors are made of them. A tensor made of an array holds a reference to
it, and so, through the tensor's storage, does every view of the tensor and every array made of one. When the arrays are
referenced as often as they were before, nobody can see the memory any more. A lease object as the owner of each batch's
memory would tell the same, at the cost of new arrays for each batch: 20 of the 140 microseconds of a small one.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.views.base import ALIGNMENT, Block, Leaf, offsets

Memory = NDArray[np.uint8]
Fields = dict[Any, Any]  # arrays by name, or by path where that has several parts

POISON = 0xFF  # NaN in every float dtype, -1 in every signed one


def ordinary_memory(nbytes: int) -> Memory:
    """Return fresh memory that starts at a cache line."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class Slot:
    """One piece of memory and the block laid out in it.

    ``fields`` are the arrays of the block by name, or by path where that has several parts.
    """

    def __init__(self, memory: Memory, leaves: Sequence[Leaf], size: int) -> None:
        self.memory = memory
        self.poisoned = True
        self.event: torch.cuda.Event | None = None  # after which the device has what it was sent
        self.block = Block(leaves, size, self.memory)
        names = [leaf.path if len(leaf.path) > 1 else leaf.path[0] for leaf in leaves]
        self.fields: Fields = dict(zip(names, self.block.arrays, strict=True))
        self._references_when_free = sum(map(sys.getrefcount, self.block.arrays))

    @property
    def free(self) -> bool:
        """Whether no tensor of the last batch is left, and nothing is being copied out of the memory."""
        if sum(map(sys.getrefcount, self.block.arrays)) != self._references_when_free:
            return False
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None


class BufferPool:
    """Slots, as many as hold batches that are alive at once. Any thread may take one.

    `allocate` returns uint8 memory of a size in bytes; pinned memory has the same form. Free slots are kept for `spare`
    batches. `debug` overwrites the memory of dead batches, so that a pointer that outlived its tensor reads NaN.
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
        """Count the slots, lent and free."""
        return len(self._slots)

    def acquire(self, leaves: Sequence[Leaf], size: int) -> tuple[Slot, Fields]:
        """Return a free slot laid out for a batch of `size` items, and its fields; their contents are arbitrary.

        Nobody else gets the slot while those arrays, or tensors made of them, are referenced.
        """
        with self._lock:
            slots = self._slots
            # Most often one of a few is free, the one that was taken longest ago, and none has to go. It is put last.
            if len(slots) <= self._spare + 1 and not self._debug:
                for number, slot in enumerate(slots):
                    block = slot.block
                    if block.size == size and block.leaves is leaves and slot.free:
                        slots.append(slots.pop(number))
                        return slot, slot.fields.copy()
            slot = self._free_slot(leaves, size)
            return slot, slot.fields.copy()

    def _free_slot(self, leaves: Sequence[Leaf], size: int) -> Slot:
        """Return a free slot, a new one if need be, and drop those that are too many."""
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
        """Return a new slot, in the memory of a free one where it is large enough."""
        _, nbytes = offsets(leaves, size)
        for place, slot in enumerate(self._slots):
            if nbytes <= len(slot.memory) <= 2 * nbytes and slot in free:
                # Another slot in its place at once: an interrupt must not leave one that is half laid out.
                self._slots[place] = laid_out = Slot(slot.memory, leaves, size)
                free.remove(slot)
                return laid_out
        slot = Slot(self._allocate(max(nbytes, 1)), leaves, size)
        self._slots.append(slot)
        return slot

    def clear(self) -> None:
        """Release all memory; batches that are alive keep theirs."""
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
