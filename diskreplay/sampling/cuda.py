"""Batches on their way to a CUDA device and steps on their way from one: through pinned memory, on own streams."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from diskreplay.device_tensors import fetched
from diskreplay.sampling.buffer_pool import Memory, Slot


def pinned_memory(nbytes: int) -> Memory:
    """Return fresh memory that a device reads by itself, while the processor goes on."""
    memory: Memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class Sent(NamedTuple):
    """A batch that is being copied: its memory on the device, complete after `event`."""

    buffer: torch.Tensor
    event: torch.cuda.Event


class DeviceCopy:
    """Copies slots to a device. Any thread may send; who computes with a batch receives it.

    The copies run beside the trainer's kernels, and the trainer's stream waits for the copy of a batch, not the
    trainer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, slot: Slot) -> Sent:
        """Begin to copy a slot's block as a whole; the slot is not free before it is there."""
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

        `changed` is the number of an array that was written since the slot was sent: it is sent again.
        """
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.event)
        # The memory came from the other stream: it must not be given away there while this one reads it.
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
    """Copies tensors of a device to the processor, in a thread and next to the trainer's kernels.

    One thread notes tensors; any thread copies them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def later(self, *values: Any) -> Callable[[], tuple[Any, ...]]:
        """Return a call that returns values as `fetched` does, behind the operations so far of the current stream.

        The tensors must not change before it returns. Without a CUDA device it returns the values.
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
