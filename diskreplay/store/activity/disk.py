"""The bytes of a store on disk, measured again and again: segments at rest are measured once."""

import os
from collections.abc import Callable, Collection

from diskreplay.retention.policy import disk_usage
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.numbers import listed_numbers

Progress = Callable[[int, int], None]


class DiskUse:
    """The bytes that a store takes on disk. Not thread-safe.

    A segment is measured at each look while it may grow, and at the next one, for sealing it releases what it had
    reserved. Then it does not change.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._at_rest: dict[int, int] = {}
        self._growing_before: Collection[int] = ()

    def read(self, growing: Collection[int], progress: Progress | None = None) -> int:
        """Return the bytes on disk; ``growing`` are the numbers of the segments that may grow."""
        there = listed_numbers(self._root)
        self._at_rest = {number: self._at_rest[number] for number in there if number in self._at_rest}
        measured = [number for number in there if number not in self._at_rest]
        total = sum(self._at_rest.values())
        for done, number in enumerate(measured):
            nbytes = disk_usage(self._root.segment_path(number))[0]
            total += nbytes
            if number not in growing and number not in self._growing_before:
                self._at_rest[number] = nbytes
            if progress is not None:
                progress(done + 1, len(measured))
        self._growing_before = growing
        beside = [name for name in os.listdir(self._root.folder) if name != layout.SEGMENTS]
        beside.append(f"{layout.SEGMENTS}/{layout.METADATA}")
        return total + sum(disk_usage(self._root.folder / name)[0] for name in beside)
