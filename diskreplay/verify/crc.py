"""The arithmetic of CRC-32C: checksums of files, of zeros, and of a whole from those of its parts."""

import os
from functools import lru_cache

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.verify.files import read_at

_BLOCK_BYTES = 1 << 20
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed


def checksum(fd: int) -> int:
    """Return the CRC-32C of a file; holes are not read, so that a file of nothing else takes no time."""
    crc, at, size = 0, 0, os.fstat(fd).st_size
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while at < size:
        data = min(_seek(fd, at, os.SEEK_DATA, size), size)
        crc, at = after_zeros(crc, data - at), data
        hole = min(_seek(fd, at, os.SEEK_HOLE, size), size)
        while at < hole:
            block = read_at(fd, min(_BLOCK_BYTES, hole - at), at)
            if not block:
                return crc  # cut off just now
            crc, at = crc32c(block, crc), at + len(block)
    return crc


def _seek(fd: int, at: int, what: int, size: int) -> int:
    try:
        return os.lseek(fd, at, what)
    except OSError:  # nothing of the kind up to the end
        return size


def after_zeros(crc: int, count: int) -> int:
    """Return the CRC-32C of what has the CRC-32C ``crc``, followed by ``count`` zero bytes."""
    return _shifted(crc ^ 0xFFFFFFFF, count) ^ 0xFFFFFFFF


def joined(sums: NDArray[np.uint32], length: int, last: int) -> int:
    """Return the CRC-32C of parts of ``length`` bytes, the last one of ``last``, from their own, of which there is one.

    Without the inversions at either end a checksum is linear: that of a whole is that of its first part, shifted by
    what follows, exclusive-or that of the rest. Neighbours are joined at once; zeros in front change nothing.
    """
    values = sums[:-1] ^ np.uint32(after_zeros(0, length))
    columns = [_shifted(1 << bit, length) for bit in range(32)]
    while len(values) > 1:
        values = np.concatenate([np.zeros(len(values) % 2, np.uint32), values])
        values = _shifted_by(columns, values[0::2]) ^ values[1::2]
        columns = [_times(tuple(columns), column) for column in columns]
    before = int(values[0]) if len(values) else 0
    total = length * (len(sums) - 1) + last
    return _shifted(before, last) ^ int(sums[-1]) ^ after_zeros(0, last) ^ after_zeros(0, total)


def _shifted(state: int, count: int) -> int:
    for power in range(count.bit_length()):
        if count >> power & 1:
            state = _times(_zeros(power), state)
    return state


def _shifted_by(columns: list[int], states: NDArray[np.uint32]) -> NDArray[np.uint32]:
    out = np.zeros_like(states)
    for bit, column in enumerate(columns):
        out ^= (states >> np.uint32(bit) & np.uint32(1)) * np.uint32(column)
    return out


@lru_cache(maxsize=64)
def _zeros(power: int) -> tuple[int, ...]:
    """Return what ``2 ** power`` zero bytes make of each bit of the register: a matrix over GF(2), by columns."""
    if power:
        half = _zeros(power - 1)
        return tuple(_times(half, column) for column in half)
    columns = [1 << bit for bit in range(32)]
    for _ in range(8):
        columns = [column >> 1 ^ (_POLYNOMIAL if column & 1 else 0) for column in columns]
    return tuple(columns)


def _times(columns: tuple[int, ...], state: int) -> int:
    product, bit = 0, 0
    while state:
        if state & 1:
            product ^= columns[bit]
        state, bit = state >> 1, bit + 1
    return product
