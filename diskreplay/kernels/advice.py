"""Tell the system which memory is about to be read: a call for each range, without Python in between."""

from diskreplay.ids import Ints

from . import jit
from .jit import madvise


@jit.kernel("int", "ints", "ints", "int")
def advise(starts: Ints, sizes: Ints, advice: int) -> int:
    """Give this advice for ranges of whole pages, by address and bytes; return how many were refused."""
    refused = 0
    for i in range(starts.size):
        refused += madvise(starts[i], sizes[i], advice) != 0
    return refused
