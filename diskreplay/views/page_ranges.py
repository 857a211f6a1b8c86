"""Which pages of memory the windows of a batch lie in: what has to be read from disk before they can be gathered."""

from collections.abc import Sequence

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels.huge_pages import whole_pages
from diskreplay.reading import chunk_budget
from diskreplay.reading.chunk_budget import DECOMPRESSED
from diskreplay.reading.snapshot import Snapshot
from diskreplay.views.base import NO_PAGES, Pages
from diskreplay.views.windows import Copy, Windows, map_rows


def wide_pages(snapshot: Snapshot, windows: Windows, copies: Sequence[Copy]) -> Pages:
    """Return where the rows of wide leaves lie, after mapping the chunks they are in.

    Narrow leaves are left out: the system reads a good deal around each fault, so they soon are in memory as a whole.
    So is what is decompressed: it is in memory when it is there.
    """
    wide = [copy for copy in copies if snapshot.leaf(copy.leaf).wide]
    if not wide:
        return NO_PAGES
    with snapshot.tables.lock:  # while it is held, nothing leaves for what other threads map
        map_rows(snapshot, windows, wide, chunk_budget.now())
        return merged_pages([_ranges(snapshot, copy.leaf, *windows.rows(copy)) for copy in wide])


def merged_pages(found: Sequence[Pages]) -> Pages:
    """Return the pages of several ranges of bytes."""
    if not found:
        return NO_PAGES
    starts, sizes = (np.concatenate(arrays) for arrays in ([p.starts for p in found], [p.sizes for p in found]))
    return Pages(*whole_pages(starts, sizes), tuple(held for pages in found for held in pages.held))


def _ranges(snapshot: Snapshot, leaf: str, slot: Ints, lane: Ints, first: Ints, last: Ints) -> Pages:
    """Return a range for each window and chunk that is mapped; the caller holds the lock of all tables."""
    table = snapshot.leaf(leaf)
    # What this array has, and not all of them: what the others release meanwhile is to be free at once.
    held, first_chunk, bases = table.holder, table.first_chunk, table.bases
    folder, line, before = snapshot.tables.find(slot, lane)
    shift, first, last = table.shift[folder], before + first, before + last
    starts, sizes = [], []
    for further in range(int(((last >> shift) - (first >> shift)).max(initial=-1)) + 1):
        chunk = (first >> shift) + further
        begin, end = np.maximum(first, chunk << shift), np.minimum(last + 1, (chunk + 1) << shift)
        inside = begin & ((1 << shift) - 1)
        place = first_chunk[folder] + np.minimum(chunk, last >> shift)
        starts.append(bases[place] + ((line << shift) + inside) * table.row_bytes)
        # Nothing of windows that end in an earlier chunk, or that another thread has released since.
        is_mapped = (bases[place] != 0) & (table.how[place] != DECOMPRESSED)
        sizes.append(np.where(is_mapped, np.maximum(end - begin, 0), 0) * table.row_bytes)
    return Pages(np.concatenate(starts or [first]), np.concatenate(sizes or [first]), (held,))
