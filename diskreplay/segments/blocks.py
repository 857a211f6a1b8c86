"""Checksums of the blocks of sealed chunk files: a damaged block loses only its own rows, not the whole segment.

A block is a part of a chunk file with its own checksum. docs/format.md describes the file ``durable/blocks``, which
stores these checksums. Each stored CRC-32C is XORed with the CRC-32C of a block of zeros. So the entry of a block of
zeros is 0, and entries of 0 can be holes of ``durable/blocks``.
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
_POLYNOMIAL = 0x82F63B78  # CRC-32C's polynomial, with its bits reversed
_INVERSION = 0xFFFFFFFF


def block_bytes(row_bytes: int) -> int:
    if row_bytes > layout.BLOCK_BYTES:
        return layout.BLOCK_BYTES
    return min(layout.BLOCK_ROWS, layout.floor_power_of_two(layout.BLOCK_BYTES // row_bytes)) * row_bytes


@dataclass
class BlockSums:
    """The checksums of the blocks of a segment's chunks, collected in memory until `write` writes them.

    ``chunks`` maps (path of an array, number of a chunk) to the checksums of this chunk's blocks, as returned by
    `stored`.
    """

    chunks: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def add(self, array: RowArray, chunk: int, fd: int, block: int | None = None) -> int:
        """Add the checksums of the blocks of the open chunk file ``fd``, and return the checksum of the whole file.

        ``block`` is the size of a block in bytes. If ``block`` is None, `block_bytes` gives the size.
        """
        size, block = os.fstat(fd).st_size, block or block_bytes(array.row_bytes)
        sums, crc = read_sums(fd, size, block)
        self.chunks[array.path, chunk] = stored(sums, size, block)
        return crc

    def content(self) -> bytes:
        return b"".join(self.chunks[key] for key in sorted(self.chunks))

    def write(self, segment: str) -> int:
        data = self.content()
        write_sparse(f"{segment}/{layout.BLOCKS}", data)
        return int(crc32c(data))


def read_sums(fd: int, size: int, block: int) -> tuple[Sums, int]:
    """Return the checksums of the blocks of a file's first ``size`` bytes, and the checksum of all these bytes.

    Blocks inside holes are not read. Raises FormatError if the file is shorter than ``size``.
    """
    if size <= block:  # faster for small files, which are common
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
    # `crc` covers only the bytes that were read. `combine` is slower, and is needed only if holes were skipped.
    crc = crc if done == at else combine(sums[: -(-at // block)], at, block)
    return sums, with_zeros(crc, size - at)


# --- checksums as `durable/blocks` stores them -----------------------------------------------------------------------


def stored(sums: Sums, size: int, block: int) -> bytes:
    return (sums ^ _of_zeros(size, block)).astype("<u4").tobytes()


def parse(data: bytes, size: int, block: int) -> Sums:
    return np.frombuffer(data, "<u4").astype(np.uint32) ^ _of_zeros(size, block)


def _of_zeros(size: int, block: int) -> Sums:
    sums = np.full(-(-size // block), _sum_of_zeros(block), np.uint32)
    if size % block:
        sums[-1] = _sum_of_zeros(size % block)
    return sums


# --- the arithmetic of checksums --------------------------------------------------------------------------------------


def combine(sums: Sums, size: int, block: int) -> int:
    """Return the checksum of a file of ``size`` bytes from the checksums of its blocks.

    For bytes A and B, ``crc(A + B) == _multiply(_zeros(len(B)), crc(A)) ^ crc(B)``.
    """
    if len(sums) < 2:
        return int(sums.sum())
    # The checksums of neighbouring blocks are combined in pairs until one checksum is left. The file's last block may
    # be shorter than the others, so its checksum is combined at the end.
    values, zeros = sums[:-1], _zeros(block)
    while len(values) > 1:
        if len(values) % 2:
            # an empty block in front makes the number of values even
            values = np.concatenate([np.zeros(1, np.uint32), values])
        values = _multiply(zeros, values[0::2]) ^ values[1::2]
        zeros = _multiply(zeros, zeros)
    last = _zeros(size - (len(sums) - 1) * block)
    return _multiply(last, int(values[0])) ^ int(sums[-1])


def with_zeros(crc: int, nbytes: int) -> int:
    """Return the checksum of some bytes followed by ``nbytes`` zeros; ``crc`` is the checksum of the bytes alone."""
    return _multiply(_zeros(nbytes), crc ^ _INVERSION) ^ _INVERSION if nbytes else crc


@lru_cache(maxsize=64)
def _sum_of_zeros(nbytes: int) -> int:
    return with_zeros(0, nbytes)


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> int:
    """Return x**(8 * nbytes): CRC-32C's register is multiplied by this polynomial to append ``nbytes`` zeros."""
    product = 1 << 31  # the polynomial 1, with its bits reversed
    for bit in range(nbytes.bit_length()):
        if nbytes >> bit & 1:
            product = _multiply(_power_of_two_zeros(bit), product)
    return product


@cache
def _power_of_two_zeros(bit: int) -> int:
    half = _power_of_two_zeros(bit - 1) if bit else 0
    return _multiply(half, half) if bit else 1 << 23  # x**8


_Register = TypeVar("_Register", int, Sums)


def _multiply(polynomial: int, register: _Register) -> _Register:
    """Return ``polynomial`` times ``register`` over GF(2), modulo CRC-32C's polynomial."""
    product = register ^ register  # zeros
    for bit in range(31, -1, -1):
        product ^= (register >> bit & 1) * polynomial
        polynomial = polynomial >> 1 ^ (_POLYNOMIAL if polynomial & 1 else 0)
    return product


# --- the blocks of a sealed segment -----------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A chunk file of a sealed segment; ``name`` is the file's path below the segment's folder."""

    array: RowArray
    number: int
    name: str
    nbytes: int
    block: int  # the size of a block in bytes


def sealed_chunks(info: SegmentInfo) -> Iterator[Chunk]:
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
    """Return a dict from `Chunk.name` to the checksums of the chunk file's blocks, read from ``durable/blocks``.

    A chunk file is left out if its checksums in ``durable/blocks`` are damaged. The result is empty if
    ``durable/blocks`` cannot be read.
    """
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
    """Return the content of ``durable/blocks``, computed from the chunk files; empty if a chunk file is damaged."""
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
