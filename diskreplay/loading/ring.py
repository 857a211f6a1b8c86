"""Memory for batches, used again and again, but never while a tensor of an earlier batch is alive.

A slot's arrays are made once, and each batch's tensors are made of them. A tensor made of an array holds a reference to
it, and so, through the tensor's storage, does every view of the tensor and every array made of one. When the arrays are
referenced as often as they were before, nobody can see the memory any more. Batches that are made at once share a slot:
a tensor of one keeps the memory of all. A lease object as the owner of each batch's
memory would tell the same, at the cost of new arrays for each batch: 20 of the 140 microseconds of a small one.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.views.base import ALIGNMENT, Block, Leaf, offsets

Memory = NDArray[np.uint8]

POISON = 0xFF  # NaN in every float dtype, -1 in every signed one


def ordinary_memory(nbytes: int) -> Memory:
    """Return fresh memory that starts at a cache line."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


class Slot:
    """One piece of memory and the block laid out in it.

    ``parts`` are the arrays of each batch in it, as a list and by the first part of their names.
    """

    def __init__(self, memory: Memory, leaves: Sequence[Leaf], size: int, batches: int = 1) -> None:
        self.memory = memory
        self.poisoned = True
        self.event: torch.cuda.Event | None = None  # after which the device has what it was sent
        self.lay_out(leaves, size, batches)

    def lay_out(self, leaves: Sequence[Leaf], size: int, batches: int = 1) -> None:
        """Divide the memory anew, for so many batches one behind the other; only while the slot is free."""
        self.layout = size, batches
        self.block = Block(leaves, size * batches, self.memory)
        arrays = [self.block.arrays]
        if batches > 1:
            arrays = [[array[i * size : (i + 1) * size] for array in self.block.arrays] for i in range(batches)]
        # Dicts are copied for each batch, which takes a third of the time of making one of ten.
        names = [leaf.path[0] for leaf in leaves]
        self.parts = [(part, dict(zip(names, part, strict=True))) for part in arrays]
        self._lent = [array for part in arrays for array in part]
        self._references_when_free = sum(map(sys.getrefcount, self._lent))

    @property
    def free(self) -> bool:
        """Whether no tensor of the last batches is left, and nothing is being copied out of the memory."""
        if sum(map(sys.getrefcount, self._lent)) != self._references_when_free:
            return False
        if self.event is not None and self.event.query():
            self.event = None
        return self.event is None


class Taken(NamedTuple):
    """A batch's share of a slot: nobody else gets the slot while `arrays` are referenced here, or those of others."""

    slot: Slot
    arrays: tuple[NDArray[Any], ...]
    by_name: dict[str, NDArray[Any]]


class Ring:
    """Slots, as many as hold batches that are alive at once. Any thread may take one.

    Parameters
    ----------
    allocate : callable
        Returns uint8 memory of a size in bytes; pinned memory has the same form.
    spare : int
        Free slots are kept for so many batches.
    debug : bool
        Overwrite the memory of dead batches, so that a pointer that outlived its tensor reads NaN.
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

    def take(self, leaves: Sequence[Leaf], size: int, batches: int = 1) -> list[Taken]:
        """Return a free slot laid out for batches of `size` items, as the share of each; its contents are arbitrary."""
        with self._lock:
            slot = self._free_slot(leaves, (size, batches))
            return [Taken(slot, tuple(arrays), by_name) for arrays, by_name in slot.parts]

    def _free_slot(self, leaves: Sequence[Leaf], layout: tuple[int, int]) -> Slot:
        if not self._debug and (len(self._slots) - 1) * layout[1] <= self._spare:
            for slot in self._slots:
                if slot.layout == layout and slot.block.leaves is leaves and slot.free:
                    return slot
        free = [slot for slot in self._slots if slot.free]
        if self._debug:
            _poison(free)
        chosen: Slot | None = None
        for slot in free:
            if slot.layout == layout and slot.block.leaves is leaves:
                chosen = slot
                break
        if chosen is None:
            chosen = self._lay_out(free, leaves, layout)
        free = [slot for slot in free if slot is not chosen]
        spare = 0
        for slot in free:
            if spare >= self._spare:
                self._slots.remove(slot)
            spare += slot.layout[1]
        chosen.poisoned = False
        return chosen

    def _lay_out(self, free: list[Slot], leaves: Sequence[Leaf], layout: tuple[int, int]) -> Slot:
        """Return a new slot, in the memory of a free one where it is large enough."""
        size, batches = layout
        _, nbytes = offsets(leaves, size * batches)
        for slot in free:
            if nbytes <= len(slot.memory) <= 2 * nbytes:
                slot.lay_out(leaves, size, batches)
                return slot
        slot = Slot(self._allocate(max(nbytes, 1)), leaves, size, batches)
        self._slots.append(slot)
        return slot

    def clear(self) -> None:
        """Let go of all memory; batches that are alive keep theirs."""
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
