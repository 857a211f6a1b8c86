"""The segments that a reader knows, their slots, and the damaged segments that the reader leaves out."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from diskreplay.errors import DamagedSegmentWarning, SegmentGone, warn_caller
from diskreplay.folders import shown
from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable, Ints
from diskreplay.kernels import following, hiding
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.quarantine import QUARANTINE, read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity, UnknownFeature, identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.folder import Pack, take_packs
from diskreplay.segments.packs import merged_numbers
from diskreplay.segments.rebuild import read_shown
from diskreplay.segments.segment import DAMAGE, NeverWritten, SegmentInfo

# (path of the store, segment number) for each segment that this process has warned of; -1 stands for the quarantine.
_warned: set[tuple[str, int]] = set()


def warn_of_quarantine(root: Root) -> None:
    """Warn, once per process and store, that files in quarantine take space in addition to ``capacity_bytes``."""
    key = (str(root.path), -1)
    limit = root.limits.capacity_bytes
    if limit is None or key in _warned:
        return
    if any(entry.segment is not None for entry in read_quarantine(root.folder)):
        _warned.add(key)
        nbytes = disk_usage(root.folder / QUARANTINE)[0]
        warn_caller(
            f"{nbytes} bytes in {root.path / QUARANTINE} do not count in the capacity_bytes of {limit}: "
            "diskreplay repair --restore brings a segment back, and --drop deletes it",
            DamagedSegmentWarning,
        )


def warn_of_damage(root: Root, number: int, detail: str) -> None:
    key = (str(root.path), number)
    if key in _warned:
        return
    _warned.add(key)
    warn_caller(
        f"segment {number} of {root.path} is damaged, and its steps are left out: {detail}. "
        "Run diskreplay repair on the store",
        DamagedSegmentWarning,
    )


# The maximum number of slots, one per segment number from the oldest segment to the newest.
MOST_SLOTS = 1 << 22


class Merged(Exception):
    """Segments were merged into a pack, or appeared again, or a limit changed: the store has to be read again.

    If a pack has a segment older than all known segments, ``least`` is the number of the pack's oldest segment.
    """

    def __init__(self, least: int = layout.MAX_SEGMENTS) -> None:
        self.least = least


class Slots:
    """The facts that a reader knows of each segment, by slot. Not thread-safe.

    The slot of a segment is its number minus ``origin``.

    Snapshots share some arrays: when a value of `lanes`, `sealed` or `clocks` changes, a changed copy replaces the
    array.

    Attributes
    ----------
    lanes : (slots,) int64
        The number of lanes of each segment; 0 if the segment is gone or unreadable.
    lane_base : (slots,) int64
        The place of each segment's first lane among all lanes.
    lane_slot : (lanes,) int64
        The slot of each lane.
    sealed : (slots,) bool
        Whether each segment is sealed and the episodes in all its rows were found.
    folder : (slots,) int64
        The number of the segment itself, or of the pack that has its rows.
    clocks : (slots,) int64
        The wall time at which the clock of each segment showed 0, in nanoseconds since the epoch.
    last : (slots,) int64
        The wall time of each segment's last row, in nanoseconds since the epoch; `hiding.NEVER` for a segment that may
        grow.
    rows : (`following.LANE_ROWS`, lanes) int64
        Five numbers per lane, for the rows read so far: COMMITTED to OPEN_TIME of `kernels.following`.
    """

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.lanes = np.zeros(0, np.int64)
        self.lane_base = np.zeros(0, np.int64)
        self.lane_slot = np.zeros(0, np.int64)
        self.sealed = np.zeros(0, np.bool_)
        self.folder = np.zeros(0, np.int64)
        self.clocks = np.zeros(0, np.int64)
        self.last = np.zeros(0, np.int64)
        self.rows = np.zeros((following.LANE_ROWS, 0), np.int64)

    @property
    def end(self) -> int:
        return self.origin + len(self.lanes)

    def add(self, infos: Sequence[SegmentInfo | None], packs: Sequence[Pack]) -> int:
        """Add slots for new segments; an element of ``infos`` is None if the segment is gone or in a pack."""
        start, count = self.end, len(infos)
        lanes = np.array([0 if info is None else len(info.lanes) for info in infos], np.int64)
        clocks, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        folder = start + np.arange(count)
        for slot, info in enumerate(infos):
            if info is not None:
                clocks[slot], last[slot] = info.clock.wall, info.bounds[1] if info.sealed else hiding.NEVER
        for folded in packs:
            new = folded.numbers >= start
            at = folded.numbers[new] - start
            lanes[at], clocks[at], last[at] = folded.lanes[new], folded.info.clock.wall, folded.info.bounds[1]
            folder[at] = folded.info.number
        added = int(lanes.sum())
        self.lane_base = np.append(self.lane_base, self.rows.shape[1] + np.cumsum(lanes) - lanes)
        self.lane_slot = np.append(self.lane_slot, np.repeat(len(self.lanes) + np.arange(count), lanes))
        self.lanes = np.append(self.lanes, lanes)
        self.sealed = np.append(self.sealed, np.zeros(count, np.bool_))
        self.folder = np.append(self.folder, folder)
        self.clocks, self.last = np.append(self.clocks, clocks), np.append(self.last, last)
        new_rows = np.zeros((following.LANE_ROWS, added), np.int64)
        new_rows[following.OPEN_START] = -1
        self.rows = np.append(self.rows, new_rows, axis=1)
        return added

    def move(self, slots: Ints, pack: Pack) -> None:
        self.clocks, self.last = self.clocks.copy(), self.last.copy()
        self.clocks[slots], self.last[slots] = pack.info.clock.wall, pack.info.bounds[1]
        self.folder[slots] = pack.info.number

    def set_rows(self, places: Ints | slice, committed: Ints, observed: Ints) -> None:
        self.rows[following.COMMITTED, places], self.rows[following.OBSERVED, places] = committed, observed

    def note_sealed(self, slot: int) -> None:
        """Record that a segment is sealed, and that the episodes in all its rows were found."""
        self.sealed = self.sealed.copy()
        self.sealed[slot] = True

    def empty(self, slots: list[int]) -> None:
        self.lanes = self.lanes.copy()
        self.lanes[slots] = 0

    def span(self, slot: int) -> slice:
        base = int(self.lane_base[slot])
        return slice(base, base + int(self.lanes[slot]))

    def places_of(self, episodes: EpisodeTable) -> Ints:
        slot = (episodes.first >> POSITION_BITS) - self.origin
        place: Ints = self.lane_base[slot] + (episodes.first & POSITION_MASK) % episodes.stride
        return place

    def count_open(self) -> int:
        lanes = np.flatnonzero(self.rows[following.OPEN_START] >= 0)
        return int((self.rows[following.COMMITTED, lanes] - self.rows[following.OPEN_START, lanes]).sum())


class KnownSegments:
    """Reads the segments of one store, and records the segments that it cannot read. Not thread-safe.

    The first slot of ``slots`` is for segment ``least``, or for an older segment that may exist. ``damaged`` describes
    the damage of each segment that is left out, by number.
    """

    def __init__(self, root: Root, counters: StoreCounters, words: Ints, warns: bool, least: int) -> None:
        self._root, self._counters, self._warns = root, counters, warns
        self.damaged: dict[int, str] = {}
        self.slots = Slots(min(self._lowest(words), least))

    def _lowest(self, words: Ints) -> int:
        """Return the lowest number that an existing segment may have.

        The counter FIRST_LIVE is only a hint: a user may have moved a segment with a lower number back to the store.
        """
        first = int(words[layout.FIRST_LIVE])
        least = max(0, int(words[layout.NEXT_SEGMENT]) - MOST_SLOTS)
        if first <= least:
            return first
        return min([first, *(number for number in listed_numbers(self._root) if least <= number < first)])

    def read(self, number: int) -> SegmentInfo | None:
        try:
            info = read_shown(self._root, number)
            return None if self._was_removed(info) else info
        except NeverWritten:
            return None
        except DAMAGE as error:
            self.note_damage(number, error)
            return None

    def note_damage(self, number: int, error: Exception) -> None:
        """Record that a segment cannot be read, and warn. Do nothing if the segment was evicted or moved to quarantine.

        Raises
        ------
        FormatError
            A later release of diskreplay wrote the segment, so the segment is not damaged.
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
        """Return whether a limit has evicted a segment whose folder exists again, for example after a power cut."""
        if self._root.has_horizon and info.came_before(self._counters.peek(layout.HORIZON)):
            return True
        limit = self._root.limits.max_age_s
        if limit is None or not info.sealed or info.sealed_at > time.time() - limit:
            return False
        return info.number < self._counters.peek(layout.FIRST_LIVE)

    def has_other(self, known: Mapping[int, Identity | int]) -> bool:
        """Return whether any segment on disk is not in ``known``, or has replaced a segment of ``known``.

        For each segment number, ``known`` has the `Identity` of the segment's metadata file (zarr.json). For a segment
        that may grow, ``known`` has the inode of the segment's folder instead.
        """
        if self._lowest(self._counters.read()) < self.slots.origin:
            return True
        there = [number for number in listed_numbers(self._root) if self.slots.origin <= number < self.slots.end]
        return any(number not in known or self._is_other(number, known[number]) for number in there)

    def _is_other(self, number: int, was: Identity | int) -> bool:
        path = self._root.segment_path(number)
        if isinstance(was, int):
            return identify(path)[0] not in (was, 0)
        return identify(path / layout.METADATA) != was

    # --- packs -------------------------------------------------------------------------------------------------------

    def find_packs(self, infos: list[SegmentInfo | None]) -> list[Pack]:
        """Return the packs among new segments, lowest number first.

        ``infos`` has the attributes of the segments after the last known segment. In ``infos``, the call replaces packs
        and their segments by None.

        Raises
        ------
        Merged
            A segment in one of the packs is unknown, or was gone before its attributes were read.
        """
        start = self.slots.end
        packs = take_packs(infos, start, self.leave_out)
        taken = {number for pack in packs for number in pack.numbers.tolist()}
        if taken and min(taken) < self.slots.origin:
            raise Merged(min(taken))
        if any(number < start and self.slots.lanes[number - self.slots.origin] == 0 for number in taken):
            raise Merged  # the segment is recorded as gone or unreadable
        end = start + len(infos)
        if any(start <= n < end and infos[n - start] is None and n not in taken for n in self.merged_since(end)):
            raise Merged  # the segment was gone before its attributes were read
        return packs

    def leave_out(self, number: int, error: Exception) -> None:
        """Record that a segment is damaged, or raise Merged if its rows are now in a pack that is not known yet."""
        self.check_merged([number])
        self.note_damage(number, error)

    def check_merged(self, gone: Iterable[int]) -> None:
        """Raise Merged if one of these segments or packs is gone, and its rows are in a pack that is not known yet."""
        missing = [number for number in gone if not os.path.lexists(self._root.segment_path(number))]
        if missing and (merged := self.merged_since(self.slots.end)):
            slots = np.flatnonzero(np.isin(self.slots.folder, missing))
            if not merged.isdisjoint((slots + self.slots.origin).tolist()):
                raise Merged

    def merged_since(self, first: int) -> set[int]:
        """Return the numbers of the segments that were merged into packs with numbers from ``first`` on."""
        return merged_numbers(self._root, first) if self._counters.peek(layout.NEXT_SEGMENT) > first else set()
