"""Plain twins of the kernels of `kernels.stream`."""

import ctypes


def stream_plain(target: int, source: int, count: int) -> None:
    """Do what `stream` does."""
    ctypes.memmove(target, source, count)
