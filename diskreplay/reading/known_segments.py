"""Which segments a reader has read, whether they are still the same ones, and which it cannot read."""

import time
from collections.abc import Mapping

from diskreplay.errors import DamagedSegmentWarning, FormatError, SegmentGone, warn_caller
from diskreplay.folders import shown
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.damaged_copies import read_shown
from diskreplay.segments.damage.quarantine import QUARANTINE, read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity, UnknownFeature, identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.segment import NeverWritten, SegmentInfo

# What reading a segment raises if it is damaged, or gone.
DAMAGE = (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError)

# Store and number of the segments that this process was warned of; -1 for the quarantine.
_warned: set[tuple[str, int]] = set()


def warn_of_quarantine(root: Root) -> None:
    """Warn that what is in quarantine takes space beside ``capacity_bytes``, once a process."""
    key = (str(root.path), -1)
    limit = root.limits.capacity_bytes
    if limit is None or key in _warned:
        return
    if any(entry.segment is not None for entry in read_quarantine(root.folder)):
        _warned.add(key)
        nbytes = disk_usage(root.folder / QUARANTINE)[0]
        warn_caller(
            f"{nbytes} bytes in {root.path / QUARANTINE} do not count in the capacity_bytes of {limit}: "
            "diskreplay repair --restore or --drop decides about them",
            DamagedSegmentWarning,
        )


def warn_of_damage(root: Root, number: int, detail: str) -> None:
    """Warn of a segment that cannot be read, once a process."""
    key = (str(root.path), number)
    if key in _warned:
        return
    _warned.add(key)
    warn_caller(
        f"segment {number} of {root.path} is damaged, and its steps are left out: {detail}. "
        "Run diskreplay repair on the store",
        DamagedSegmentWarning,
    )


# Numbers between the oldest living segment and the newest; far more than any store can hold.
MOST_SLOTS = 1 << 22


class KnownSegments:
    """Reads the segments of one store, and knows which it cannot read. Not thread-safe.

    ``damaged`` says what is wrong with each that it leaves out, by number.
    """

    def __init__(self, root: Root, counters: StoreCounters, warns: bool = True) -> None:
        self._root, self._counters, self._warns = root, counters, warns
        self.damaged: dict[int, str] = {}

    def lowest(self) -> int:
        """Return the number from which on segments may be there.

        The counter of the first one is a hint: one that somebody moved back may lie below it.
        """
        words = self._counters.read()
        first = int(words[layout.FIRST_LIVE])
        least = max(0, int(words[layout.NEXT_SEGMENT]) - MOST_SLOTS)
        if first <= least:
            return first
        return min([first, *(number for number in listed_numbers(self._root) if least <= number < first)])

    def read(self, number: int) -> SegmentInfo | None:
        """Read a segment's attributes; None: it is gone, was never written, or is damaged."""
        try:
            info = read_shown(self._root, number)
            return None if self._was_removed(info) else info
        except NeverWritten:
            return None
        except DAMAGE as error:
            self.note_damage(number, error)
            return None

    def note_damage(self, number: int, error: Exception) -> None:
        """Note that a segment cannot be read, and warn of it, unless it was evicted or set aside.

        Raises FormatError where a later release wrote it: that is no damage.
        """
        if isinstance(error, UnknownFeature):
            raise error
        path = self._root.segment_path(number)
        if not path.exists() and not path.is_symlink():
            return
        detail = str(error)
        if isinstance(error, (OSError, SegmentGone)):
            detail = f"{getattr(error, 'filename', None) or path} is missing"
        self.damaged[number] = detail = shown(detail)
        if self._warns:
            warn_of_damage(self._root, number, detail)

    def _was_removed(self, info: SegmentInfo) -> bool:
        """Whether a segment is below the horizon, or is back after a loss of power that had left for its age."""
        if self._root.has_horizon and info.came_before(self._counters.peek(layout.HORIZON)):
            return True
        limit = self._root.limits.max_age_s
        if limit is None or not info.sealed or info.sealed_at > time.time() - limit:
            return False
        return info.number < self._counters.peek(layout.FIRST_LIVE)

    def has_other(self, start: int, stop: int, known: Mapping[int, Identity | int]) -> bool:
        """Whether a segment is there that was not, or is another one than it was.

        ``known`` are those from ``start`` to ``stop`` that were there, with the document that each was read from or,
        if it may grow, the inode of its folder.
        """
        if self.lowest() < start:
            return True
        there = [number for number in listed_numbers(self._root) if start <= number < stop]
        return any(number not in known or self._is_other(number, known[number]) for number in there)

    def _is_other(self, number: int, was: Identity | int) -> bool:
        path = self._root.segment_path(number)
        if isinstance(was, int):
            return identify(path)[0] not in (was, 0)
        return identify(path / layout.METADATA) != was
