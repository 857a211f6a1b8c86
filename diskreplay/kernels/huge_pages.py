"""Memory in huge pages, for tables that are read at random: small pages are more than a TLB reaches."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LARGE_PAGE = 2 << 20
CACHE_LINE = 64


def zeros(*parts: tuple[int, DTypeLike]) -> Sequence[NDArray[Any]]:
    """Return arrays of so many zeros, one behind the other, each from the beginning of a cache line on.

    Large pages are asked for as far as whole ones fit, so that no more memory is taken than the arrays have.
    """
    starts, end = [], 0
    for count, dtype in parts:
        starts.append(end)
        end += -(-count * np.dtype(dtype).itemsize // CACHE_LINE) * CACHE_LINE
    # Private: a forked child must not share it. What is not touched takes no room.
    block = mmap.mmap(-1, end + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(block, np.uint8)
    first = -memory.ctypes.data % LARGE_PAGE
    whole = end // LARGE_PAGE * LARGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE, first, whole)
    return [
        memory[first + start : first + start + count * np.dtype(dtype).itemsize].view(dtype)
        for start, (count, dtype) in zip(starts, parts, strict=True)
    ]
