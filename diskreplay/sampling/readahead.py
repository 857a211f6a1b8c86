"""Reading what a batch needs from disk at once, not page after page as the copying gets there."""

from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from diskreplay.reading.chunk_table import WIDE_ROW
from diskreplay.reading.decompression import blocks_read
from diskreplay.reading.snapshot import Snapshot
from diskreplay.schema.schema import Schema
from diskreplay.views.base import NO_PAGES, Pages, Reader

# After so many batches that needed nothing from disk, nothing is asked of it until one does: it would be a waste.
WARM_BATCHES = 32


class Readahead:
    """Has the wide rows of batches read from disk, as long as some of them are not in memory.

    ``wide``: whether there are wide rows at all; if not, nothing here needs to be called.

    Concurrency: `ask` may be called by another thread than the rest.
    """

    def __init__(self, reader: Reader, schema: Schema) -> None:
        self._reader = reader
        self.wide = any(field.row_bytes >= WIDE_ROW for field in schema.leaves.values())
        self._asks = WARM_BATCHES
        self.seconds = 0.0

    @property
    def cold(self) -> bool:
        """Whether one of the last batches needed something from disk, or there have been few yet."""
        return self.wide and self._asks > 0

    def ask(self, snapshot: Snapshot, ids: NDArray[np.int64]) -> Pages:
        """Have the disk read what these ids need, if it is cold; return where that comes to lie.

        SegmentGone where a segment has been evicted since the snapshot.
        """
        if not self.cold:
            return NO_PAGES
        before = blocks_read()
        pages = self._reader.pages(snapshot, ids)
        pages.ask()
        self._count(before)
        return pages

    def begin(self, snapshot: Snapshot, ids: NDArray[np.int64], pages: Pages | None) -> int:
        """Return, when what was asked for, or is asked for now, is in memory, what `end` is to be told."""
        before = blocks_read()
        pages = self.ask(snapshot, ids) if pages is None else pages
        if len(pages.starts):
            started = perf_counter()
            pages.wait()
            self.seconds += perf_counter() - started
        return before

    def end(self, before: int) -> None:
        """Say that a batch is complete that was begun here."""
        if not self._count(before):
            self._asks = max(self._asks - 1, 0)

    def _count(self, before: int) -> bool:
        """Tell whether this thread has read from disk since it had read so many blocks."""
        if blocks_read() == before:
            return False
        self._asks = WARM_BATCHES
        return True
