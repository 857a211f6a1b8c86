"""The arithmetic of CRC-32C: checksums of files, of zeros, and of a whole from those of its parts."""

import os
from functools import lru_cache
from typing import TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.integrity.verify.files import read_at

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
    return _times(_shift(count), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF if count else crc


def joined(sums: NDArray[np.uint32], length: int, last: int) -> int:
    """Return the CRC-32C of parts of ``length`` bytes, the last one of ``last``, from their own, of which there is one.

    Without the inversions at either end a checksum is linear: that of a whole is that of its first part, shifted by
    what follows, exclusive-or that of the rest. Neighbours are joined at once; zeros in front change nothing.
    """
    values, shift = sums[:-1] ^ np.uint32(after_zeros(0, length)), _shift(length)
    while len(values) > 1:
        values = np.concatenate([np.zeros(len(values) % 2, np.uint32), values])
        values, shift = _times(shift, values[0::2]) ^ values[1::2], _times(shift, shift)
    before = int(values[0]) if len(values) else 0
    total = length * (len(sums) - 1) + last
    return _times(_shift(last), before) ^ int(sums[-1]) ^ after_zeros(0, last) ^ after_zeros(0, total)


def _shift(count: int) -> int:
    """Return x to the power of the bits of ``count`` bytes: so many zero bytes multiply the register by it."""
    product = 1 << 31  # polynomials over GF(2), bits reversed: the highest bit is 1, the next one x
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            product = _times(_shift_by_power(bit), product)
    return product


@lru_cache(maxsize=64)
def _shift_by_power(bit: int) -> int:
    return _times(_shift_by_power(bit - 1), _shift_by_power(bit - 1)) if bit else 1 << 23


_Register = TypeVar("_Register", int, NDArray[np.uint32])


def _times(factor: int, register: _Register) -> _Register:
    """Multiply one polynomial, or an array of them, by another, modulo that of CRC-32C."""
    product = register ^ register  # zeros
    for bit in range(31, -1, -1):
        product ^= (register >> bit & 1) * factor
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return product
