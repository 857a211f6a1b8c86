"""Which pages of memory the windows of a batch lie in: what has to be read from disk before they can be gathered."""

from collections.abc import Sequence
from mmap import MADV_WILLNEED, PAGESIZE
from typing import Any, NamedTuple

import numpy as np

from diskreplay.kernels.chunk_geometry import BITS, PLACES
from diskreplay.kernels.table import chosen
from diskreplay.store.reading.chunk_table import ChunkTable
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.base import Ints
from diskreplay.views.windows import Copy, Windows

# Advice of `madvise`.
WILL_NEED = MADV_WILLNEED  # start to read the pages from disk
POPULATE_READ = 22  # wait until they are there, and map them; Linux 5.14


class Pages(NamedTuple):
    """Ranges of whole pages, in order and apart from each other: addresses and bytes.

    The addresses are good while ``held`` is referenced.
    """

    starts: Ints
    sizes: Ints
    held: tuple[Any, ...] = ()

    def ask(self) -> None:
        """Have them read from disk while the caller goes on."""
        chosen("advise")(self.starts, self.sizes, WILL_NEED)

    def wait(self) -> None:
        """Return when they are in memory; where the system cannot say, whoever reads them waits."""
        chosen("advise")(self.starts, self.sizes, POPULATE_READ)


NO_PAGES = Pages(np.zeros(0, np.int64), np.zeros(0, np.int64))


def wide_pages(snapshot: Snapshot, windows: Windows, copies: Sequence[Copy]) -> Pages:
    """Return where the rows of wide leaves lie, after mapping the chunks they are in.

    Narrow leaves are left out: the system reads a good deal around each fault, so they soon are in memory as a whole.
    """
    tables = [(copy, snapshot.leaf(copy.leaf)) for copy in copies]
    return merged_pages([_ranges(windows, table, copy) for copy, table in tables if table.wide])


def merged_pages(found: Sequence[Pages]) -> Pages:
    """Return the pages of several ranges of bytes."""
    if not found:
        return NO_PAGES
    starts, sizes = (np.concatenate(arrays) for arrays in ([p.starts for p in found], [p.sizes for p in found]))
    return _merged(starts, sizes, tuple(held for pages in found for held in pages.held))


def _ranges(windows: Windows, table: ChunkTable, copy: Copy) -> Pages:
    """Return a range for each window and chunk."""
    slot, lane, first, last = windows.rows(copy)
    table.ensure(slot, lane, first, last)
    held, _, first_chunk, bases = table.addresses()
    shift, places = table.shift[slot] & BITS, table.shift[slot] >> PLACES
    starts, sizes = [], []
    for further in range(int(((last >> shift) - (first >> shift)).max(initial=-1)) + 1):
        chunk = (first >> shift) + further
        begin, end = np.maximum(first, chunk << shift), np.minimum(last + 1, (chunk + 1) << shift)
        inside = begin & ((1 << shift) - 1)
        base = bases[first_chunk[slot] + lane * places + np.minimum(chunk, last >> shift)]
        starts.append(base + (np.where(places, 0, lane << shift) + inside) * table.row_bytes)
        # Nothing of windows that end in an earlier chunk, or that another thread has released since.
        sizes.append(np.where(base != 0, np.maximum(end - begin, 0), 0) * table.row_bytes)
    return Pages(np.concatenate(starts or [first]), np.concatenate(sizes or [first]), (held,))


def _merged(starts: Ints, sizes: Ints, held: tuple[Any, ...]) -> Pages:
    """Return the pages that these bytes lie in; ranges that overlap or touch become one."""
    some = sizes > 0
    first = starts[some] & -PAGESIZE
    stop = (starts[some] + sizes[some] + PAGESIZE - 1) & -PAGESIZE
    order = np.argsort(first, kind="stable")
    first, reached = first[order], np.maximum.accumulate(stop[order])
    begins = np.concatenate([[True], first[1:] > reached[:-1]]) if len(first) else np.zeros(0, bool)
    ends = np.concatenate([begins[1:], [True]]) if len(first) else begins
    return Pages(first[begins], reached[ends] - first[begins], held)
