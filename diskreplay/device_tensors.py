"""Copies of tensors from CUDA devices to the CPU."""

from collections.abc import Iterable
from types import NoneType
from typing import Any

import numpy as np

# Larger tensors are copied to ordinary memory: Torch keeps pinned memory for later copies, and never frees it.
MOST_PINNED_BYTES = 256 << 20

_NEVER_ON_DEVICE = frozenset({np.ndarray, bool, int, float, NoneType})


def fetched(*values: Any) -> tuple[Any, ...]:
    """Return ``values`` with CPU tensors in place of CUDA tensors. Values may be nested dicts and tuples.

    A copy follows all earlier operations on the current stream of the tensor's device. All copies are complete when the
    function returns. If no tensor is on a CUDA device, the values are returned unchanged.
    """
    if not _are_on_device(values):
        return values
    import torch  # not at the top: a process that writes only arrays never loads torch

    devices = set()

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(map(copied, value))
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return value
        devices.add(value.device)
        # A non-blocking copy goes to pinned memory. Torch reuses this memory only after the copy is complete and the
        # CPU tensor is freed.
        return value.detach().to("cpu", non_blocking=value.numel() * value.element_size() <= MOST_PINNED_BYTES)

    copies = tuple(map(copied, values))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _are_on_device(values: Iterable[Any]) -> bool:
    """Return whether any value is a tensor on a CUDA device. Every append calls this function, so it must be fast."""
    for value in values:
        if type(value) in _NEVER_ON_DEVICE:
            continue
        if isinstance(value, dict):
            if _are_on_device(value.values()):
                return True
        elif isinstance(value, tuple):
            if _are_on_device(value):
                return True
        elif getattr(value, "is_cuda", False):
            return True
    return False
