"""Two threads for what takes one of them long: each copies half of a large batch. Kernels let go of Python's lock."""

from collections.abc import Callable
from concurrent.futures import Executor

SHARED = 1 << 20
"""Bytes from which on it is worth it: the other thread takes a tenth of a millisecond to wake up."""


def in_halves(helper: Executor, size: int, work: Callable[[int, int], int]) -> int:
    """Do the items 0 to below `size`, half of them in another thread.

    ``work(first, stop)`` returns the first item that it could not do, or -1; so does this.
    """
    half = size // 2
    try:
        other = helper.submit(work, half, size)
    except RuntimeError:  # the interpreter is shutting down
        bad = work(0, half)
        return bad if bad >= 0 else work(half, size)
    try:
        bad = work(0, half)
    finally:
        bad_of_other = other.result()  # whatever happens: nobody may use the memory before
    return bad if bad >= 0 else bad_of_other
