"""Folders on their way out: moved beside the counters, so that nobody sees one half deleted.

A segment's folder is renamed first, and the counter of evicted steps set next. What the counter has to be is part of
the new name: the next opener sets it if the process dies in between, and other processes that count steps read the
name. All this is done under the store lock. The files are deleted when it is free again.
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import sync_folder

PREFIX = "old-"
_NAME = re.compile(PREFIX + r"[0-9]{8,9}-([0-9]{1,19})")


def removed_path(counters_folder: Path, number: int, evicted: int) -> str:
    """Return where a segment goes with which the counter of evicted steps has to be ``evicted``."""
    return f"{counters_folder}/{PREFIX}{layout.segment_name(number)}-{evicted}"


def discarded_path(path: str) -> str:
    """Return the new path of a folder, in the same one, whose steps count nowhere."""
    folder, name = os.path.split(path)
    return f"{folder}/{PREFIX}{name}-{os.getpid()}-{time.monotonic_ns()}"


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


def destroy(root: Root, gone: Sequence[str]) -> None:
    """Delete folders, without the store lock. Several processes may delete the same folder."""
    if not gone:
        return
    # After a loss of power a segment must not be back in its place without some of its files. A disk that refuses to
    # sync needs the room all the more.
    with suppress(OSError):
        sync_folder(root.segments_folder)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
