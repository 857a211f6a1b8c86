"""Plain twins of the kernels of `kernels.huge_pages`."""

import ctypes

from diskreplay.ids import Ints

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise_plain(starts: Ints, sizes: Ints, advice: int) -> int:
    """Do what `advise` does, one call of the C library after the other."""
    ranges = zip(starts.tolist(), sizes.tolist(), strict=True)
    return sum(_libc.madvise(start, size, advice) != 0 for start, size in ranges)
