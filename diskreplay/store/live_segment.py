"""A segment that may still grow: its counters, and how far its files were looked at."""

import os

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.root import Root
from diskreplay.format.segment import read_segment
from diskreplay.format.trust import map_trusted


class LiveSegment:
    """The counters of a segment that may still grow. Used by one thread.

    ``folder`` is the inode of its folder: another one means that repair has replaced the segment.
    """

    def __init__(self, root: Root, number: int) -> None:
        self.metadata = str(root.segment_path(number) / layout.METADATA)
        self.folder = os.stat(root.segment_path(number)).st_ino
        # Before the document is read: one that replaces it meanwhile is then seen as news.
        self.inode = os.stat(self.metadata).st_ino
        self.info, self.checked_rows = read_segment(root, number), 0
        self.observed, self.committed = map_trusted(root, self.info)
        self.seen = b""

    def has_news(self) -> bool:
        """Whether anything differs from what `read` and `may_be_sealed` found last."""
        if self.observed.tobytes() + self.committed.tobytes() != self.seen:
            return True
        try:
            return os.stat(self.metadata).st_ino != self.inode
        except FileNotFoundError:
            return True

    def read(self, before: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that are committed and those whose observation is there; ``before`` were committed before."""
        # `observed` first: one past a `committed` that was read after it means the observation after those very rows.
        observed = self.observed.copy()
        committed = self.committed.copy()
        lanes = len(committed)
        if (
            (committed < before).any()
            or (observed > committed + 1).any()
            or int(committed.max()) > layout.POSITION_MASK // lanes
        ):
            raise FormatError(f"{self.info.path}: committed or observed is damaged; restore the segment")
        self.seen = observed.tobytes() + committed.tobytes()
        return committed, np.maximum(observed, committed)

    def may_be_sealed(self) -> bool:
        """Whether the attributes were replaced (or are gone)."""
        try:
            inode = os.stat(self.metadata).st_ino
        except FileNotFoundError:
            return True
        changed, self.inode = inode != self.inode, inode
        return changed
