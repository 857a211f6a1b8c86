"""Decompresses the inner chunks of a compressed field that a batch needs, in several threads."""

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
# The number of bytes read from disk at once, if the compressed field takes at most `_MOST_BYTES`, a quarter of the
# memory. This read also brings the neighbours of an inner chunk into the page cache, where they stay until batches need
# them.
_BLOCK_BYTES = 64 << 10
_MOST_BYTES = MEMORY // 4


Part = tuple[Ints, Room]
"""The numbers of some inner chunks of a shard, and memory for these chunks.

Inner chunks of only zeros have no bytes in the shard, and are not in a part.
"""


def decompress(shard: Shard, parts: Sequence[Part], *, on_disk: int) -> None:
    """Decompress the inner chunks of all parts into the memory of the parts, in this thread and in helper threads.

    ``on_disk`` is the size of the complete field in bytes, compressed. After an interrupt of this call, a helper thread
    may still finish a part. Until the part is finished, the thread keeps the shard and the memory of all parts alive.

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
    """Predicts from the latest calls of `decompress`, by any thread, whether the next call will read from disk."""

    def __init__(self) -> None:
        self.calls_until_warm = _WARM_CALLS

    def ask(self, shard: Shard, numbers: Ints, block: int) -> None:
        """Request all blocks of these inner chunks from the disk at once, unless they are probably in the page cache.

        A block has ``block`` bytes. Without this request, the disk would read the blocks one by one during the
        decompression.
        """
        if self.calls_until_warm > 0:
            get_kernel("advise")(*_blocks(shard, numbers, block), MADV_WILLNEED)

    def note(self, has_read: bool) -> None:
        self.calls_until_warm = _WARM_CALLS if has_read else max(0, self.calls_until_warm - 1)


def _blocks(shard: Shard, numbers: Ints, block: int) -> tuple[Ints, Ints]:
    """Return, for each inner chunk, the address and size of its range of blocks, rounded to whole pages."""
    first, stop = shard.offsets[numbers], shard.offsets[numbers] + shard.sizes[numbers]
    first, stop = first // block * block, -(-stop // block) * block
    return whole_pages(shard.mapping.address + first, np.minimum(stop, shard.mapping.nbytes) - first)


def blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


_cold = _Cold()
_helpers = Workers(_MOST_THREADS - 1, "diskreplay-decompress")
