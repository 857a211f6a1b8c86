"""Pages of memory: huge ones for tables that are read at random, those of ranges of bytes, and those that are free.

And advice: the system is told which memory is about to be read, range by range, without Python in between.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskreplay.ids import Ints

from . import jit

# Small ones are more than a TLB reaches.
LARGE_PAGE = 2 << 20
# Lines of a table from which on what was freed while it was made is worth giving back.
_MANY_LINES = 1 << 16
CACHE_LINE = 64  # bytes that a cache reads at once


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


def give_back_free(lines: int) -> None:
    """Give memory that was freed back to the system, after so many lines of a table were made, if these are many.

    The C library keeps it, as glibc does with what lies below memory in use; others have no such function.
    """
    if lines > _MANY_LINES and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def whole_pages(starts: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return the pages in which ranges of bytes lie, addresses and bytes, in order; those that touch become one."""
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
    """Give this advice for ranges of whole pages, by address and bytes; return how many were refused."""
    refused = 0
    for i in range(starts.size):
        refused += jit.madvise(starts[i], sizes[i], advice) != 0
    return refused
