"""Arrays in huge pages of memory, the return of freed memory to the system, and madvise for many ranges."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskreplay.ids import Ints

from . import jit

# The size of a huge page in bytes. With small pages, a large table has more pages than the TLB has entries.
LARGE_PAGE = 2 << 20
# After work on a table with more lines than this, freed memory is given back to the system.
_MANY_LINES = 1 << 16
CACHE_LINE = 64  # bytes


def zeros(*parts: tuple[int, DTypeLike]) -> Sequence[NDArray[Any]]:
    """Return an array of zeros for each (count, dtype), all in one block of memory and aligned to cache lines.

    Huge pages are requested only where the arrays fill them: a partly filled huge page would still take 2 MiB of
    memory.
    """
    starts, end = [], 0
    for count, dtype in parts:
        starts.append(end)
        end += -(-count * np.dtype(dtype).itemsize // CACHE_LINE) * CACHE_LINE
    # The block is MAP_PRIVATE, because a forked child must not share it.
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


def give_back_free(lines: int) -> None:
    """After work on a table of `lines` lines, give freed memory back to the system if the table is large.

    glibc keeps freed memory if memory at higher addresses is still in use. Other C libraries do not have malloc_trim.
    """
    if lines > _MANY_LINES and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def whole_pages(starts: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Extend ranges of memory to full pages; return the addresses and sizes of the extended ranges, in ascending order.

    Sizes are in bytes. Extended ranges that touch or overlap are merged.
    """
    some = sizes > 0
    first = starts[some] & -mmap.PAGESIZE
    stop = (starts[some] + sizes[some] + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(stop[order])
    begins = np.concatenate([[True], first[1:] > reached[:-1]]) if len(first) else np.zeros(0, bool)
    ends = np.concatenate([begins[1:], [True]]) if len(first) else begins
    return first[begins], reached[ends] - first[begins]


@jit.kernel("int", "ints", "ints", "int")
def advise(starts: Ints, sizes: Ints, advice: int) -> int:
    refused = 0
    for i in range(starts.size):
        refused += jit.madvise(starts[i], sizes[i], advice) != 0
    return refused
