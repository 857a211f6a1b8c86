"""Decompresses what a batch needs of a compressed field: all at once, half of it in another thread."""

import os
import resource
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diskreplay.format.shards import Shard
from diskreplay.store.reading.arena import Piece

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Ints = NDArray[np.int64]

# Inner chunks from which on another thread takes half: it takes a tenth of a millisecond to wake up.
_SHARED = 16
# After so many calls that needed nothing from disk, nothing is asked of it beforehand until one does.
_WARM_CALLS = 32


def decompress(shard: Shard, numbers: Ints) -> list[tuple[Ints, Piece]]:
    """Return the addresses of these inner chunks, none of which is of zeros, in their order, and what holds them.

    Raises FormatError where one is damaged.
    """
    _cold.ask(shard, numbers)
    half = len(numbers) // 2 if len(numbers) >= _SHARED and len(os.sched_getaffinity(0)) > 1 else 0
    before = _blocks_read()
    other = _helper().submit(shard.decompress, numbers[half:]) if half else None
    found = [shard.decompress(numbers[:half] if half else numbers)]
    _cold.note(_blocks_read() != before)
    if other is not None:
        found.append(other.result())
    return [(at, Piece(memory, int(at[0]), len(at) * shard.inner_bytes)) for at, memory in found]


class _Cold:
    """Whether what is needed has to come from disk, as it had to lately. Any thread; the last one counts."""

    def __init__(self) -> None:
        self._left = _WARM_CALLS

    def ask(self, shard: Shard, numbers: Ints) -> None:
        """Have the disk read these inner chunks at once, and not as the decompression gets there."""
        if self._left > 0:
            for start, nbytes in zip(shard.offsets[numbers].tolist(), shard.sizes[numbers].tolist(), strict=True):
                shard.mapping.will_need(start, nbytes)

    def note(self, has_read: bool) -> None:
        """Note whether this thread has read from disk."""
        self._left = _WARM_CALLS if has_read else max(0, self._left - 1)


def _blocks_read() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


_cold = _Cold()


@cache
def _helper() -> "ThreadPoolExecutor":
    from concurrent.futures import ThreadPoolExecutor  # a process that only appends does without

    return ThreadPoolExecutor(1, "diskreplay-decompress")


# A child has no such thread: it makes its own.
os.register_at_fork(after_in_child=_helper.cache_clear)
