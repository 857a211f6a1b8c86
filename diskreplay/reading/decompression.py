"""Decompresses what a batch needs of a compressed field: all at once, in some threads."""

import os
import resource
from collections.abc import Iterator, Sequence
from functools import partial
from mmap import MADV_WILLNEED, PAGESIZE

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels.huge_pages import whole_pages
from diskreplay.kernels.table import chosen
from diskreplay.reading.chunk_budget import MEMORY, Room
from diskreplay.segments.shards import Shard
from diskreplay.workers import Job, Workers

# To have one thread more takes a tenth of a millisecond: each gets so many inner chunks at least.
_LEAST = 16
_MOST_THREADS = 4
# After so many calls for which nothing was read from disk, nothing is asked of it beforehand until something is.
_WARM_CALLS = 32
# What is read from disk at once, in bytes, of a field that takes no more than a quarter of the memory, compressed: what
# lies around is soon needed, too.
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = MEMORY // 4


Part = tuple[Ints, Room]
"""Inner chunks of a shard, none of which is of zeros, and memory for them."""


def decompress(shard: Shard, parts: Sequence[Part], *, on_disk: int) -> None:
    """Decompress all parts, which this thread shares with others. Raises FormatError where one is damaged.

    ``on_disk`` are the bytes that all of the field takes there. After an interrupt another thread may still decompress
    a part: it holds the shard, and the memory of all parts.
    """
    numbers = np.concatenate([numbers for numbers, _ in parts])
    before, shared = blocks_read(), iter(parts)
    _cold.ask(shard, numbers, _BLOCK_BYTES if on_disk <= _MOST_BYTES else PAGESIZE)
    cores = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    others = min(cores, len(parts), len(numbers) // _LEAST) - 1
    jobs = [Job(partial(_decompress_next, shard, shared)) for _ in range(others)]
    try:
        for job in jobs:
            _helpers.begin(job)
        _decompress_next(shard, shared)
    finally:
        for job in jobs:
            job.withdraw()
    _cold.note(blocks_read() != before)
    for job in jobs:
        job.result()


def reads_no_disk() -> bool:
    """Whether nothing was read from disk lately for what was decompressed."""
    return _cold.calls_until_warm == 0


def _decompress_next(shard: Shard, parts: Iterator[Part]) -> None:
    """Decompress parts until none is left; other threads take theirs from the same iterator."""
    for numbers, room in parts:
        memory = np.asarray(room.piece)[room.start :]
        shard.decompress(numbers, memory[: len(numbers) * shard.inner_bytes])


class _Cold:
    """Whether something may have to be read from disk, as it had to lately. Any thread; the last one counts."""

    def __init__(self) -> None:
        self.calls_until_warm = _WARM_CALLS

    def ask(self, shard: Shard, numbers: Ints, block: int) -> None:
        """Have the disk read the blocks of these inner chunks at once, and not as the decompression gets there."""
        if self.calls_until_warm > 0:
            chosen("advise")(*_blocks(shard, numbers, block), MADV_WILLNEED)

    def note(self, has_read: bool) -> None:
        """Note whether this thread has read from disk."""
        self.calls_until_warm = _WARM_CALLS if has_read else max(0, self.calls_until_warm - 1)


def _blocks(shard: Shard, numbers: Ints, block: int) -> tuple[Ints, Ints]:
    """Return the blocks of a file in which inner chunks lie: addresses and bytes of ranges of whole pages, in order."""
    first, stop = shard.offsets[numbers], shard.offsets[numbers] + shard.sizes[numbers]
    first, stop = first // block * block, -(-stop // block) * block
    return whole_pages(shard.mapping.address + first, np.minimum(stop, shard.mapping.nbytes) - first)


def blocks_read() -> int:
    """Return how many blocks this thread has had read from disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


_cold = _Cold()
_helpers = Workers(_MOST_THREADS - 1, "diskreplay-decompress")
