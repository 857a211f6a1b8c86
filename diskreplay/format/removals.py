"""Segments on their way out: moved beside the counters, so that nobody sees one half deleted.

A segment's folder is renamed first, and the counter of evicted steps set next. What the counter has to be is part of
the new name: the next opener sets it if the process dies in between, and whoever counts steps sees that they are about
to be.
"""

import os
import re
from pathlib import Path

from diskreplay.format import layout
from diskreplay.format.root import Root

PREFIX = "old-"
_NAME = re.compile(PREFIX + r"[0-9]{8,9}-([0-9]{1,19})")


def removed_path(counters_folder: Path, number: int, evicted: int) -> str:
    """Return where a segment goes with which the counter of evicted steps has to be ``evicted``."""
    return f"{counters_folder}/{PREFIX}{layout.segment_name(number)}-{evicted}"


def evicted_by_removals(root: Root) -> int:
    """Return what the counter of evicted steps has to be by the names of the segments that are being deleted.

    0 where there are none, or the store was deleted.
    """
    try:
        names = os.listdir(root.counters_folder)
    except FileNotFoundError:
        return 0
    found = map(_NAME.fullmatch, names)
    return min(max((int(counted[1]) for counted in found if counted), default=0), layout.MOST_COUNTED)
