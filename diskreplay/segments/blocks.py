"""Checksums of the blocks of sealed chunks: damage costs the rows of a block and not a segment.

A sealed segment has one file of them, ``durable/blocks``: the CRC-32C of every block of every chunk file, exclusive-or
that of as many zeros, little-endian uint32, in the order of arrays (sorted paths), chunks, and blocks. So it has holes
where the chunks have. What a chunk's blocks say together is its own CRC-32C, which stands in the segment's attributes:
so each chunk's part of the file proves itself.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.files.durable import write_sparse
from diskreplay.segments.files.mapping import data_ranges, opened, read_part, read_regular
from diskreplay.segments.segment import SegmentInfo

Sums = NDArray[np.uint32]

_WINDOW = 1 << 20
_SHORTER = "a file became shorter while it was read; the store is damaged"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed
_INVERSION = 0xFFFFFFFF


def block_bytes(row_bytes: int) -> int:
    """Return the bytes of a block: as many rows as fit 64 KiB, a power of two up to 512; 64 KiB where none does."""
    if row_bytes > layout.BLOCK_BYTES:
        return layout.BLOCK_BYTES
    return min(layout.BLOCK_ROWS, layout.floor_power_of_two(layout.BLOCK_BYTES // row_bytes)) * row_bytes


@dataclass
class BlockSums:
    """The checksums of a segment's blocks, chunk by chunk, until they are written."""

    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def add(self, array: RowArray, chunk: int, fd: int, block: int | None = None) -> int:
        """Take the checksums of a chunk file's blocks, and return that of the file. Its holes are not read."""
        size, block = os.fstat(fd).st_size, block or block_bytes(array.row_bytes)
        sums, crc = read_sums(fd, size, block)
        self.chunks[array.path, chunk] = stored(sums, size, block)
        return crc

    def content(self) -> bytes:
        """Return the bytes of the file."""
        return b"".join(self.chunks[key] for key in sorted(self.chunks))

    def write(self, segment: str) -> int:
        """Write the file into a segment that is not sealed yet, and return its checksum."""
        data = self.content()
        write_sparse(f"{segment}/{layout.BLOCKS}", data)
        return int(crc32c(data))


def read_sums(fd: int, size: int, block: int) -> tuple[Sums, int]:
    """Return the checksums of the blocks of a file's first ``size`` bytes, and that of all of them.

    A block inside of a hole is not read. Raises FormatError where the file became shorter, OSError where the disk
    refuses to read it.
    """
    if size <= block:  # many segments are small
        data = os.pread(fd, size, 0)
        if len(data) != size:
            raise FormatError(_SHORTER)
        crc = int(crc32c(data))
        return np.array([crc] if size else [], np.uint32), crc
    sums, at, done, crc = _of_zeros(size, block), 0, 0, 0
    window = np.empty(min(size, _WINDOW // block * block), np.uint8)
    for first, last in data_ranges(fd, 0, size):
        at, stop = max(at, first - first % block), min(size, -(-last // block) * block)
        while at < stop:
            part = window[: stop - at]
            if not read_part(fd, at, part):
                raise FormatError(_SHORTER)
            count = len(part)
            sums[at // block : -(-(at + count) // block)] = [
                crc32c(part.data[i : min(i + block, count)]) for i in range(0, count, block)
            ]
            crc, at, done = crc32c(part.data, crc), at + count, done + count
    # To read it twice, from the cache, takes less than the arithmetic, which only holes before the last data need.
    crc = crc if done == at else combine(sums[: -(-at // block)], at, block)
    return sums, with_zeros(crc, size - at)


# --- how they are stored ---------------------------------------------------------------------------------------------


def stored(sums: Sums, size: int, block: int) -> bytes:
    """Return how the checksums of a file's blocks stand in ``durable/blocks``."""
    return (sums ^ _of_zeros(size, block)).astype("<u4").tobytes()


def parse(data: bytes, size: int, block: int) -> Sums:
    """Return the checksums of the blocks of a file of ``size`` bytes from its part of ``durable/blocks``."""
    return np.frombuffer(data, "<u4").astype(np.uint32) ^ _of_zeros(size, block)


def _of_zeros(size: int, block: int) -> Sums:
    sums = np.full(-(-size // block), _sum_of_zeros(block), np.uint32)
    if size % block:
        sums[-1] = _sum_of_zeros(size % block)
    return sums


# --- the arithmetic of checksums --------------------------------------------------------------------------------------


def combine(sums: Sums, size: int, block: int) -> int:
    """Return the checksum of a file of ``size`` bytes from those of its blocks.

    That of two strings together is that of the first, followed by as many zeros as the second is long without the
    inversions at either end, exclusive-or that of the second.
    """
    if len(sums) < 2:
        return int(sums.sum())
    # Two neighbours become one of twice the length, until one is left; the last block may be a short one.
    values, zeros = sums[:-1], _zeros(block)
    while len(values) > 1:
        if len(values) % 2:
            values = np.concatenate([np.zeros(1, np.uint32), values])  # of no bytes, which change nothing
        values = _multiply(zeros, values[0::2]) ^ values[1::2]
        zeros = _multiply(zeros, zeros)
    last = _zeros(size - (len(sums) - 1) * block)
    return _multiply(last, int(values[0])) ^ int(sums[-1])


def with_zeros(crc: int, nbytes: int) -> int:
    """Return the checksum of a string with so many zeros behind it, from its own; inversions begin and end it."""
    return _multiply(_zeros(nbytes), crc ^ _INVERSION) ^ _INVERSION if nbytes else crc


@lru_cache(maxsize=64)
def _sum_of_zeros(nbytes: int) -> int:
    return with_zeros(0, nbytes)


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> int:
    """Return the polynomial by which ``nbytes`` zeros multiply the register: x to the power of their bits."""
    product = 1 << 31  # 1: bits are reversed
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            product = _multiply(_power_of_two_zeros(bit), product)
    return product


@cache
def _power_of_two_zeros(bit: int) -> int:
    """Return the same of two to a power."""
    half = _power_of_two_zeros(bit - 1) if bit else 0
    return _multiply(half, half) if bit else 1 << 23  # x**8


_Register = TypeVar("_Register", int, Sums)


def _multiply(polynomial: int, register: _Register) -> _Register:
    """Multiply polynomials over GF(2), one or an array of them, modulo that of CRC-32C."""
    product = register ^ register  # zeros
    for bit in range(31, -1, -1):
        product ^= (register >> bit & 1) * polynomial
        polynomial = polynomial >> 1 ^ (_POLYNOMIAL if polynomial & 1 else 0)
    return product


# --- what a sealed segment says of its blocks -------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk file of a sealed segment: its array, its number, its name below the segment, and its bytes."""

    array: RowArray
    number: int
    name: str
    nbytes: int
    block: int  # bytes


def sealed_chunks(info: SegmentInfo) -> Iterator[Chunk]:
    """Yield the chunk files that a sealed segment has a checksum of, in the order of their blocks."""
    numbers: dict[str, list[int]] = {}
    for name in info.checksums:
        leaf, _, file = name.rpartition("/")
        array = info.arrays.get(leaf)
        if array is not None and (number := array.chunk_number(file)) is not None:
            numbers.setdefault(leaf, []).append(number)
    for leaf in sorted(numbers):
        array = info.arrays[leaf]
        for number in sorted(numbers[leaf]):
            block = layout.BLOCK_BYTES if leaf in info.compressed else block_bytes(array.row_bytes)
            yield Chunk(array, number, f"{leaf}/{array.chunk_key(number)}", info.chunk_nbytes(leaf), block)


def known_sums(info: SegmentInfo) -> dict[str, Sums]:
    """Return the checksums of the blocks of each chunk file, by its name, where they fit that of the whole file."""
    chunks = list(sealed_chunks(info))
    counts = [-(-chunk.nbytes // chunk.block) for chunk in chunks]
    try:
        data = read_regular(f"{info.path}/{layout.BLOCKS}", None, 4 * sum(counts))
    except (OSError, FormatError):
        return {}
    known, at = {}, 0
    is_whole = crc32c(data) == info.checksums.get(layout.BLOCKS)
    for chunk, count in zip(chunks, counts, strict=True):
        part = data[at : (at := at + 4 * count)]
        if len(part) == 4 * count:
            sums = parse(part, chunk.nbytes, chunk.block)
            if is_whole or combine(sums, chunk.nbytes, chunk.block) == info.checksums[chunk.name]:
                known[chunk.name] = sums
    return known


def derive_blocks(info: SegmentInfo) -> bytes:
    """Return what ``durable/blocks`` has to hold, from the chunk files as they are; nothing where one is damaged."""
    blocks = BlockSums()
    for chunk in sealed_chunks(info):
        try:
            with opened(f"{info.path}/{chunk.name}", chunk.nbytes) as fd:
                crc = blocks.add(chunk.array, chunk.number, fd, chunk.block)
        except (OSError, FormatError):
            return b""
        if crc != info.checksums[chunk.name]:
            return b""
    return blocks.content()
