"""How a follower follows the lanes of segments that may still grow."""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from diskreplay.errors import FormatError
from diskreplay.ids import Ints, places_of
from diskreplay.kernels import advancing, following, frozen
from diskreplay.kernels.packed import pack
from diskreplay.kernels.table import Kernel
from diskreplay.reading.capacity_frontier import CapacityFrontier, Segments
from diskreplay.reading.chunk_table import ChunkTables, Held, unseen
from diskreplay.reading.episode_log import EpisodeLog
from diskreplay.reading.snapshot import SegmentTable
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.marks import map_trusted
from diskreplay.segments.rebuild import read_shown

# New rows of a lane from which on they are read as those of a sealed segment are.
MANY_ROWS = 4096

_NO_TIMES = (np.zeros(0, np.int64),) * 4


class LiveLanesOwner(Protocol):
    """Does what the lanes of live segments need when they are followed: `FollowedRows`."""

    @property
    def keeps_all_ended(self) -> bool:
        """Whether no episode that ends is one that was evicted, lost, or part of a discarded one."""

    def add_ended(self, end: int, steps: int) -> None:
        """Add the lines behind the log to it, up to ``end``, but for episodes that were evicted or lost."""

    def read_time(self, step_id: int) -> bool:
        """Map the time of a step, or go on without its segment; tell whether it is mapped."""

    def prepare_segment(self, slot: int, is_damaged: bool) -> None:
        """See to it that the rows of a live segment can be followed, or go on without it; it may seem to be damaged."""

    def segment_table(self) -> SegmentTable:
        """Return the table of all segments, a new one where anything in it has changed."""


class LiveSegment:
    """The counters of a segment that may still grow. Used by one thread.

    ``folder`` is the inode of its folder: another one means that repair has replaced the segment.
    """

    def __init__(self, root: Root, number: int) -> None:
        self.metadata = str(root.segment_path(number) / layout.METADATA)
        self.folder = os.stat(root.segment_path(number)).st_ino
        self.info, self.checked_rows = read_shown(root, number), 0
        self.observed, self.committed = map_trusted(self.info)

    def read(self, before: Ints) -> tuple[Ints, Ints]:
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
        return committed, np.maximum(observed, committed)

    def may_be_sealed(self) -> bool:
        """Whether it is sealed, or its attributes were replaced (or are gone)."""
        # It may have been sealed after the follower had read that it was not, and before this was made.
        return self.info.sealed or identify(self.metadata) != self.info.document


class LiveLanes:
    """The lanes of segments that may still grow, and how they are followed. Used by one thread.

    ``kernel`` is `kernels.advance` or `kernels.advance_hiding`, compiled or not; it writes the lines of episodes that
    end behind ``log``, and hides what ``frontier`` says. ``segments`` are by slot; after a change, `list_segments` is
    called. ``growing``, ``(n, 8)`` int64, is the table of them, see `kernels.following`. ``open_steps`` are the steps
    of the open episodes of all lanes. ``leaves`` are the arrays that are read: flags, and times where they are of use.
    """

    def __init__(self, kernel: Kernel, log: EpisodeLog, frontier: CapacityFrontier, leaves: Sequence[str]) -> None:
        self.segments: dict[int, LiveSegment] = {}
        self._kernel, self._log, self._frontier = kernel, log, frontier
        self.open_steps = 0
        self._numbers = np.zeros(following.FOUND, np.int64)
        self._arrays: tuple[Ints, ...]  # that the kernel uses
        self._addresses: Ints  # of these
        self._found = self._numbers.data  # the same as Python's own numbers
        self._leaves = leaves
        self._held: Callable[[], Held | None] = unseen  # what it was when the tables were read
        self._record = np.zeros(0, np.int64)  # of the next snapshot

    def follow_with(self, kernel: Kernel) -> None:
        """Use another kernel from now on."""
        self._kernel, self._held = kernel, unseen

    def list_segments(self, lanes: Ints, segments: Segments, tables: ChunkTables) -> None:
        """Make the table of those that may grow, after any of these was replaced.

        ``lanes``, ``(5, n)`` int64, is what is known of all lanes, see `kernels.following`; ``tables`` is where their
        rows are.
        """
        self._lanes, self._segments, self._tables = lanes, segments, tables
        self.growing = np.zeros((len(self.segments), following.GROWING_COLUMNS), np.int64)
        for line, slot in zip(self.growing, sorted(self.segments), strict=True):
            live = self.segments[slot]
            line[following.SLOT], line[following.LANES] = slot, len(live.info.lanes)
            line[following.PLACE] = segments.lane_base[slot]
            line[following.OBSERVED_AT] = live.observed.ctypes.data
            line[following.COMMITTED_AT] = live.committed.ctypes.data
            line[following.CHECKED], line[following.CLOCK] = live.checked_rows, segments.clocks[slot]
            line[following.FOLDER] = segments.folders[slot]
        self._held = unseen

    def set_checked(self, slot: int, checked: int) -> None:
        """Note up to which row all chunks of a segment were found whole."""
        self.segments[slot].checked_rows = checked
        self.growing[self.growing[:, following.SLOT] == slot, following.CHECKED] = checked

    def advance(self, changed: bool, until: int, owner: LiveLanesOwner) -> Ints | None:
        """Follow what lanes have published, and hide what was published before ``until`` or is more than the capacity.

        Returns the record of a snapshot, or None where nothing has changed; ``changed``: something else has.
        """
        found, frontier, record = self._found, self._frontier, self._record
        found[following.CHANGED], found[following.FOLLOWED] = changed, False
        while True:
            held = self._tables.held  # see `ChunkTables.addresses`
            if held is not self._held() or self._log.table is not self._table:
                held = self._prepare(owner)
                record = self._record
            status = self._kernel(self._addresses, until, frontier.newer, record)
            if found[following.ENDED] > self._size:
                owner.add_ended(found[following.ENDED], found[following.ENDED_STEPS])
                self._note_log_end()
            if status == following.DONE:
                break
            self._attend(status, owner)
        self.open_steps = found[following.OPEN_STEPS]
        if not (what := found[following.CHANGED]):
            return None
        if what & following.HIDDEN:
            frontier.replace_oldest()
        self._record = np.empty(len(record), np.int64)
        return record

    def _attend(self, status: int, owner: LiveLanesOwner) -> None:
        """Do what the kernel asks for."""
        found, frontier = self._found, self._frontier
        self._held = unseen  # that may replace some of the arrays
        if status == advancing.UNREADY:
            frontier.make_ready()
        elif status == advancing.UNMAPPED:
            if not owner.read_time(frontier.needed):
                found[following.CHANGED] |= True
                found[following.FOLLOWED] = False
        elif status != following.ADDED:  # many rows of a lane, for which there may be no room behind the log, too
            owner.prepare_segment(int(self.growing[found[following.LEFT], following.SLOT]), status == following.DAMAGED)
            found[following.CHANGED] |= True

    def _prepare(self, owner: LiveLanesOwner) -> Held:
        """Collect the arrays that the kernel uses, which stay the same until one of these is replaced.

        Returns what keeps the chunks mapped whose addresses these have now.
        """
        segments, frontier = owner.segment_table(), self._frontier
        ended = self._log.reserve(2 * MANY_ROWS)
        held, (flags, *times) = self._tables.addresses(self._leaves)
        every = *flags, *(times[0] if times else _NO_TIMES)
        hidden = frontier.arrays(self._segments, len(ended))
        self._arrays = self.growing, *every, self._lanes, ended, segments.head, self._numbers, *hidden
        self._addresses = pack(*self._arrays)
        self._note_log_end()
        self._found[following.OPEN_STEPS] = self._count_open()
        self._found[following.SPLITS] = not owner.keeps_all_ended
        size = frozen.HEAD + following.LANE_ROWS * len(segments.live_places)
        if len(self._record) != size:
            self._record = np.empty(size, np.int64)
        self._held = weakref.ref(held)
        return held

    def _count_open(self) -> int:
        """Count the steps of open episodes: what else changed them has changed the log, or listed the segments."""
        place = places_of(self.growing[:, following.PLACE], self.growing[:, following.LANES])
        start = self._lanes[following.OPEN_START, place]
        return int((self._lanes[following.COMMITTED, place] - start)[start >= 0].sum())

    def _note_log_end(self) -> None:
        """Note where the log ends: what ends next is written behind it, while there is room in the same array."""
        self._table, self._size = self._log.table, len(self._log)
        self._found[following.ENDED], self._found[following.ENDED_STEPS] = self._size, self._log.steps
