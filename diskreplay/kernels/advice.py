"""Tell the system which memory is about to be read: a call for each range, without Python in between."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import jit

if jit.COMPILED:
    from diskreplay.kernels.jit import madvise

Ints = NDArray[np.int64]

WILL_NEED = 3  # start to read the pages from disk
POPULATE_READ = 22  # wait until they are there, and map them; Linux 5.14

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@jit.kernel("int", "ints", "ints", "int")
def advise(starts: Ints, sizes: Ints, advice: int) -> int:
    """Give this advice for ranges of whole pages, by address and bytes; return how many were refused."""
    refused = 0
    for i in range(starts.size):
        refused += madvise(starts[i], sizes[i], advice) != 0
    return refused


def advise_plain(starts: Ints, sizes: Ints, advice: int) -> int:
    """Do what `advise` does, one call of the C library after the other."""
    ranges = zip(starts.tolist(), sizes.tolist(), strict=True)
    return sum(_libc.madvise(start, size, advice) != 0 for start, size in ranges)
