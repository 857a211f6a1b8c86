"""Decompresses inner chunks of a compressed field in several threads."""

import os
import resource
from collections.abc import Iterator, Sequence
from functools import partial
from mmap import MADV_WILLNEED, PAGESIZE

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels.huge_pages import whole_pages
from diskreplay.kernels.table import get_kernel
from diskreplay.reading.chunk_budget import MEMORY, Room
from diskreplay.segments.shards import Shard
from diskreplay.workers import Job, Workers

# The smallest number of inner chunks per thread: starting a thread takes a tenth of a millisecond.
_LEAST = 16
_MOST_THREADS = 4
# After this many successive calls of `decompress` without a read from disk, `_Cold` requests no blocks until a call
# reads from disk again.
_WARM_CALLS = 32
# If a compressed field takes at most `_MOST_BYTES`, it is read from disk in blocks of this many bytes. A block also has
# neighbours of the inner chunk, and they stay in the page cache for later batches.
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = MEMORY // 4


Part = tuple[Ints, Room]
"""The numbers of some inner chunks of a shard, and memory for these chunks.

An inner chunk that has only zeros is not stored in the shard, so no part has it.
"""


def decompress(shard: Shard, parts: Sequence[Part], *, on_disk: int) -> None:
    """Decompress the inner chunks of all parts into the memory of the parts, in this thread and in helper threads.

    ``on_disk`` is the compressed size of the field in bytes. If this call is interrupted, a helper thread may still
    finish a part. The thread keeps the shard and the memory of the parts alive.

    Raises
    ------
    FormatError
        An inner chunk is damaged.
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
    return _cold.calls_until_warm == 0


def _decompress_next(shard: Shard, parts: Iterator[Part]) -> None:
    for numbers, room in parts:
        memory = np.asarray(room.piece)[room.start :]
        shard.decompress(numbers, memory[: len(numbers) * shard.inner_bytes])


class _Cold:
    """Predicts whether the next call of `decompress` will read from disk, from the latest calls of all threads."""

    def __init__(self) -> None:
        self.calls_until_warm = _WARM_CALLS

    def ask(self, shard: Shard, numbers: Ints, block: int) -> None:
        """Request all blocks of these inner chunks from the disk at once, unless they are probably in the page cache.

        Without this request, the disk would read the blocks one by one during the decompression.
        """
        if self.calls_until_warm > 0:
            get_kernel("advise")(*_blocks(shard, numbers, block), MADV_WILLNEED)

    def note(self, has_read: bool) -> None:
        self.calls_until_warm = _WARM_CALLS if has_read else max(0, self.calls_until_warm - 1)


def _blocks(shard: Shard, numbers: Ints, block: int) -> tuple[Ints, Ints]:
    """Return the address and size of the blocks around each inner chunk, rounded to whole pages."""
    first, stop = shard.offsets[numbers], shard.offsets[numbers] + shard.sizes[numbers]
    first, stop = first // block * block, -(-stop // block) * block
    return whole_pages(shard.mapping.address + first, np.minimum(stop, shard.mapping.nbytes) - first)


def blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


_cold = _Cold()
_helpers = Workers(_MOST_THREADS - 1, "diskreplay-decompress")
