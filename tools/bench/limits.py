"""The limit of a gather: the same bytes copied from the same mappings, by one call of C's memcpy for each run.

It uses as many threads as a sampler: two if it may use two processors.
"""

import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import cycle
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels import cache
from diskreplay.kernels.table import MODULES
from diskreplay.views.base import copy_threads
from diskreplay.views.windows import Windows
from tests.kernels.plain.gathering import row_address

Ints = NDArray[np.int64]

COPY, STREAM = "plain copy of the same bytes", "the same, past the caches"
# Buffers in turn, as in a sampler: the next target is not the last one.
TARGETS = 3


class Runs(NamedTuple):
    """Contiguous runs of a batch: addresses, bytes, and the place of each in the batch."""

    sources: Ints
    counts: Ints
    places: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.counts.sum())


@functools.cache
def copy_kernel() -> Callable[..., None]:
    """Return a function that copies runs: sources, counts, places, the target's address, and past the caches or not."""
    package = cache.import_kernels(cache.folder())
    jit, copies = import_module(f"{package}.jit"), import_module(f"{package}.{MODULES['stream']}")
    copy_bytes, stream, fence = jit.copy_bytes, copies.stream, jit.fence

    @numba.njit(nogil=True)
    def copy(sources: Ints, counts: Ints, places: Ints, target: int, streamed: int) -> None:
        for i in range(sources.size):
            if streamed:
                stream(target + places[i], sources[i], counts[i])
            else:
                copy_bytes(target + places[i], sources[i], counts[i])
        fence()

    return copy


def windows_of(snapshot: Any, ids: Ints, n: int, stack: int = 1) -> Windows:
    """Return the places of the windows of these ids."""
    windows = Windows(len(ids))
    if windows.find(snapshot, ids, n, stack, False) >= 0:
        raise ValueError("an id cannot be sampled")
    return windows


def runs(snapshot: Any, leaf: str, windows: Windows, spans: Sequence[tuple[Ints, Ints]]) -> Runs:
    """Return the runs of rows first to last of each window and span, cut at the ends of chunks."""
    table = snapshot.leaf(leaf)
    found, place = [], 0
    for first, last in spans:
        table.ensure(windows.slot, windows.lane, first, last)
        columns = (column.tolist() for column in (windows.slot, windows.lane, first, last))
        for slot, lane, a, b in zip(*columns, strict=True):
            while a <= b:
                where = tuple(int(column[0]) for column in snapshot.tables.find(*np.array([[slot], [lane]])))
                bits, before = int(table.shift[where[0]]), where[2]
                until = min(b, ((before + a) | ((1 << bits) - 1)) - before)
                at = row_address(
                    where, a, table.first_chunk, table.chunks, table.shift, table.bases, table.row_bytes
                )  # fmt: skip
                nbytes = (until + 1 - a) * table.row_bytes
                found.append((at, nbytes, place))
                place, a = place + nbytes, until + 1
    return Runs(*np.ascontiguousarray(np.array(found, np.int64).T))


def copying(batches: Sequence[Runs], streamed: bool) -> Callable[[], None]:
    """Return a function that copies the next batch into one of several buffers, in turn."""
    targets = [np.zeros(max(batch.nbytes for batch in batches) + 64, np.uint8) for _ in range(TARGETS)]
    pairs = cycle(
        zip(batches, cycle([target.ctypes.data + -target.ctypes.data % 64 for target in targets]), strict=False)
    )

    threads, kernel = copy_threads(reserved=0), copy_kernel()

    def copy(keep: object = targets) -> None:
        batch, target = next(pairs)

        def work(first: int, stop: int) -> int:
            kernel(*(column[first:stop] for column in batch), target, int(streamed))
            return -1

        items = len(batch.sources)
        if threads is None:
            work(0, items)
        else:
            threads.copy(threads.parts(batch.nbytes), items, work)

    return copy
