"""Which rows of a segment count: those in memory where its writer put them, else those that prove themselves.

The process that writes a segment publishes rows in memory that all processes of this boot share. A reader may trust
these counters only where it has the very same file: in the same boot, on the same volume, with the same inode. Anywhere
else (after a reboot, in a copy, a move, a snapshot) memory says nothing, and only the marks do.
"""

import os

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import map_lane_counter
from diskreplay.format.machine import boot_id
from diskreplay.format.marks import Place, proven_rows
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo

Ints = NDArray[np.int64]


def place_of(info: SegmentInfo) -> Place:
    """Return where the rows of a segment are."""
    return Place(str(info.path), len(info.lanes), info.chunk_rows)


def shows_live_rows(info: SegmentInfo) -> bool:
    """Whether rows that may be only in this machine's memory can be trusted; those of a sealed segment always can."""
    return info.sealed or (bool(info.boot) and info.boot == boot_id() and info.is_in_place)


def map_trusted(root: Root, info: SegmentInfo) -> tuple[Ints, Ints]:
    """Map the rows of each lane whose observation, and that as a whole, can be trusted: ``(lanes,)`` each.

    Those of a segment that has to prove its rows do not change; every marked byte of it is read. Raises
    FileNotFoundError where the segment was evicted, FormatError where a counter is damaged.
    """
    if not shows_live_rows(info):
        rows = proven_rows(root, place_of(info))
        os.stat(info.path)  # one that was evicted meanwhile proves nothing
        return rows, rows
    observed, committed = (
        map_lane_counter(f"{info.path}/{name}", len(info.lanes)) for name in (layout.OBSERVED, layout.COMMITTED)
    )
    return observed, committed
