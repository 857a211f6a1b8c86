"""Follows the lanes of segments that may still grow, and the steps that a limit of capacity or age hides."""

import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import POSITION_MASK, EpisodeTable, Ints, places_of
from diskreplay.kernels import advancing, following, frozen, hiding
from diskreplay.kernels.packed import pack
from diskreplay.kernels.table import Kernel
from diskreplay.reading.chunk_table import ChunkTables, MappingGuard, no_reference
from diskreplay.reading.episode_log import EpisodeLog
from diskreplay.reading.snapshot import SegmentTable
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.marks import map_trusted
from diskreplay.segments.rebuild import read_shown

# --- hidden steps: the oldest ones by the time of their publication, lane by lane -------------------------------------


class Segments(NamedTuple):
    """The segments from number ``origin`` on, as `kernels.frozen` describes them. The first segment has slot 0.

    ``lanes`` has the number of lanes of each segment. ``lane_base`` has the place of each segment's first lane among
    all lanes. ``clocks`` has the wall time at which each segment's clock showed 0. ``folders`` has the number of each
    segment's folder. ``first_rows`` has a value per lane: the row of the pack at which the lane begins.
    """

    origin: int
    lanes: Ints
    lane_base: Ints
    clocks: Ints
    folders: Ints
    first_rows: Ints


_NO_HEAP, _NO_PLACES = np.zeros((0, hiding.HEAP_COLUMNS), np.int64), np.zeros((hiding.PLACE_ROWS, 0), np.int64)


def _places(oldest: Ints) -> Ints:
    """Return the table `by_place` (see `kernels.hiding`) for lanes that are not in the heap."""
    made = np.zeros((hiding.PLACE_ROWS, len(oldest)), np.int64)
    made[[hiding.LINE, hiding.TAIL]], made[hiding.OLDEST] = -1, oldest
    return made


class CapacityFrontier:
    """The first visible row of each lane, given the limits of the store. Used by one thread.

    The newest ``capacity`` steps stay visible: steps are ordered by time, and steps of the same time by id.
    ``capacity`` is None if the store has no such limit. ``hides`` is False if no step is ever hidden, since the store
    has no limit and never had one.

    Attributes
    ----------
    generation : int
        The value of `EpisodeLog.generation` at the last count of hidden steps.
    oldest : (lanes,) int64
        The first visible row of each lane, `hiding.NEVER` if its segment is gone. The array is replaced when a value
        changes.
    newer : (lanes,) int64
        An array to which the kernel writes the next ``oldest``.
    found : memoryview
        The numbers that `kernels.hiding` calls `found`.
    """

    def __init__(self, capacity: int | None, hides: bool) -> None:
        self._hides = hides
        self._numbers = np.zeros(hiding.FOUND, np.int64)
        self.found = self._numbers.data  # the memory of `_numbers`, read as Python numbers
        self.found[hiding.CAPACITY], self.found[hiding.LAST] = -1 if capacity is None else capacity, -1
        self._set_oldest(np.zeros(0, np.int64))
        self._by_place: Ints | None
        self._heap: Ints
        self._forget(0)

    @property
    def needed(self) -> int:
        """The id of the step whose time the kernel needs."""
        return self.found[hiding.NEEDED]

    def add_lanes(self, count: int) -> None:
        self._set_oldest(np.append(self.oldest, np.zeros(count, np.int64)))
        if self._by_place is not None:
            self._by_place = np.append(self._by_place, _places(np.zeros(count, np.int64)), axis=1)
            heap, ring = self._heap.reshape(2, -1, hiding.HEAP_COLUMNS)
            more = np.zeros((count, hiding.HEAP_COLUMNS), np.int64)
            self._heap = np.concatenate([heap, more, np.roll(ring, -self.found[hiding.FRONT], axis=0), more])
            self.found[hiding.FRONT] = 0

    def _set_oldest(self, oldest: Ints) -> None:
        self.oldest, self.newer = oldest, np.empty(len(oldest), np.int64)
        self.found[hiding.OLDEST_AT] = oldest.ctypes.data

    def drop(self, gone: NDArray[np.bool_], log: EpisodeTable, place: Ints, open_start: Ints) -> None:
        """Hide all steps of lanes whose segments are gone.

        ``gone`` is True for these lanes. ``place`` has a number for each episode of the log: the place of the episode's
        lane among all lanes. ``open_start`` has the first row of each lane's open episode, -1 if the lane has no open
        episode.
        """
        self._take_over()
        found = self.found
        found[hiding.HIDDEN] -= self._hidden_of_open(np.where(gone, open_start, -1))
        episodes, place = log.select(gone[place]), place[gone[place]]
        found[hiding.HIDDEN] += int((episodes.steps - self.hidden_of(episodes, place)).sum())
        found[hiding.REACHED] = max(found[hiding.REACHED], int(episodes.time.max(initial=-1)) + 1)
        self._set_oldest(np.where(gone, hiding.NEVER, self.oldest))
        if self._by_place is not None:
            self._by_place[hiding.OLDEST, gone] = hiding.NEVER
            self._by_place[hiding.LINE, gone] = -1

    def _take_over(self) -> None:
        """If the kernel that hides steps stopped early, set ``oldest`` to the row that it reached in each lane."""
        if self.found[hiding.LAST] >= 0 and self._by_place is not None:
            self._set_oldest(self._by_place[hiding.OLDEST].copy())
            hiding.note_last(self._numbers)

    def hidden_of(self, episodes: EpisodeTable, place: Ints) -> Ints:
        row = (episodes.first & POSITION_MASK) // episodes.stride
        return np.clip(self.oldest[place] - row, 0, episodes.steps)

    def _forget(self, generation: int) -> None:
        self.generation = generation
        self._numbers[[hiding.SEEN, hiding.SIZE, hiding.READY, hiding.FRONT, hiding.WAITING]] = 0
        self._by_place = None  # the array is made when the first steps are hidden
        self._following = np.zeros(0, np.int64)

    def follow(self, log: EpisodeLog, place: Ints, open_start: Ints) -> None:
        """Count the hidden steps again after the generation of the log has changed; for the arrays see `drop`."""
        self._forget(log.generation)
        hidden = int(self.hidden_of(log.table, place).sum()) + self._hidden_of_open(open_start)
        self.found[hiding.HIDDEN] = hidden
        # Every reader must compute the same REACHED, because the order of a sampler's ids depends on it.
        gone = log.table.time[self.oldest[place] == hiding.NEVER].max(initial=-1) + 1
        self.found[hiding.REACHED] = max(self.found[hiding.HIDDEN_BEFORE], int(gone)) if hidden else 0

    def _hidden_of_open(self, open_start: Ints) -> int:
        some = open_start >= 0
        return int(np.maximum(self.oldest[some] - open_start[some], 0).sum())

    def make_ready(self) -> None:
        self._by_place = _places(self.oldest)
        self._heap = np.zeros((2 * len(self.oldest), hiding.HEAP_COLUMNS), np.int64)
        self.found[hiding.READY] = 1

    def arrays(self, segments: Segments, lines: int) -> tuple[Ints, ...]:
        if not self._hides:
            return (self._numbers,)
        if self._by_place is None:
            return self._numbers, *segments[1:], _NO_HEAP, _NO_PLACES, self._following
        if lines > len(self._following):
            self._following = np.append(self._following, np.empty(lines - len(self._following), np.int64))
        return self._numbers, *segments[1:], self._heap, self._by_place, self._following


# --- lanes that may grow ----------------------------------------------------------------------------------------------

# If a lane has at least this many new rows, numpy parses the flags of all these rows at once, as for a sealed segment.
MANY_ROWS = 4096

_NO_TIMES = (np.zeros(0, np.int64),) * 4


class LiveLanesOwner(Protocol):
    """The methods of `FollowedRows` that give `LiveLanes` the segments, times and log."""

    @property
    def keeps_all_ended(self) -> bool:
        """Whether newly ended episodes can be added to the log without a check.

        A check is needed if any episode was evicted or lost, or if an earlier part of a discarded episode is sought
        (see `Discards`).
        """

    def add_ended(self, end: int, steps: int) -> None:
        """Add to the log the episodes that the kernel has written to the log's free lines, up to line ``end``.

        ``steps`` is the number of steps of the log, including these episodes. Episodes that were evicted or lost are
        not added to the log.
        """

    def read_time(self, step_id: int) -> bool:
        """Map the chunk with the time of a step and return True.

        If the chunk cannot be mapped, leave out the segment of the step and return False.
        """

    def prepare_segment(self, slot: int, is_damaged: bool) -> None:
        """Check and map the new rows of a growing segment for the kernel; leave out a segment that is damaged or gone.

        ``is_damaged`` is True if the kernel has found damage in these rows.
        """

    def segment_table(self) -> SegmentTable:
        """Return the table of all segments; return the same object again if nothing in the table has changed."""


class LiveSegment:
    """The counters of a segment that may still grow. Used by one thread.

    ``folder`` is the inode of the segment's folder: it changes if ``diskreplay repair`` replaces the segment.
    """

    def __init__(self, root: Root, number: int) -> None:
        self.metadata = str(root.segment_path(number) / layout.METADATA)
        self.folder = os.stat(root.segment_path(number)).st_ino
        self.info, self.checked_rows = read_shown(root, number), 0
        self.observed, self.committed = map_trusted(self.info)

    def read(self, before: Ints) -> tuple[Ints, Ints]:
        """Return, for each lane, the number of complete rows and the number of rows with an observation.

        ``before`` has the numbers of complete rows from the last call. If a number has decreased, FormatError is
        raised.
        """
        # `observed` must be read before `committed`: steps that a writer publishes in between would make `observed` too
        # large. `observed` may be `committed` + 1: the row after the complete rows may have an observation.
        observed = self.observed.copy()
        committed = self.committed.copy()
        lanes = len(committed)
        if (
            (committed < before).any()
            or (observed > committed + 1).any()
            or int(committed.max()) > layout.POSITION_MASK // lanes
        ):
            raise FormatError(f"{self.info.path}: the counter committed or observed is damaged; restore the segment")
        return committed, np.maximum(observed, committed)

    def may_be_sealed(self) -> bool:
        """Return whether the segment is sealed, or its metadata file (zarr.json) was replaced or deleted."""
        # The segment may have been sealed after the follower read its attributes, and before this object was made.
        return self.info.sealed or identify(self.metadata) != self.info.document


class LiveLanes:
    """Reads the new rows of lanes of segments that may still grow. Used by one thread.

    ``kernel`` is `advance` or `advance_hiding` of `kernels.advance`, compiled or not. The kernel writes newly ended
    episodes to the free lines of ``log``, and moves the first visible rows of ``frontier``. ``leaves`` has the names of
    the arrays that the kernel reads: the flags, and also the times if steps may be hidden.

    Attributes
    ----------
    segments : dict of int to LiveSegment
        The segments, by slot. Call `list_segments` after each change of this dict.
    growing : (segments, 8) int64
        The table of the segments, see `kernels.following`.
    open_steps : int
        The number of steps of the open episodes of all lanes.
    """

    def __init__(self, kernel: Kernel, log: EpisodeLog, frontier: CapacityFrontier, leaves: Sequence[str]) -> None:
        self.segments: dict[int, LiveSegment] = {}
        self._kernel, self._log, self._frontier = kernel, log, frontier
        self.open_steps = 0
        self._numbers = np.zeros(following.FOUND, np.int64)
        self._arrays: tuple[Ints, ...]  # the arguments of the kernel
        self._addresses: Ints  # the addresses of `_arrays`
        self._found = self._numbers.data  # the memory of `_numbers`, read as Python numbers
        self._leaves = leaves
        self._held: Callable[[], MappingGuard | None] = no_reference  # returns the last `_prepare`'s guard, or None
        self._record = np.zeros(0, np.int64)  # the record of the next snapshot, see `kernels.frozen`

    def follow_with(self, kernel: Kernel) -> None:
        self._kernel, self._held = kernel, no_reference

    def list_segments(self, lanes: Ints, segments: Segments, tables: ChunkTables) -> None:
        """Make a new table of growing segments.

        Call this whenever ``lanes``, ``segments`` or ``tables`` was replaced by another object.

        ``lanes``, ``(5, n)`` int64, has five numbers per lane: COMMITTED to OPEN_TIME of `kernels.following`.
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
        self._held = no_reference

    def set_checked(self, slot: int, checked: int) -> None:
        self.segments[slot].checked_rows = checked
        self.growing[self.growing[:, following.SLOT] == slot, following.CHECKED] = checked

    def advance(self, changed: bool, until: int, owner: LiveLanesOwner) -> Ints | None:
        """Read newly published rows. Hide steps that were published before ``until`` or exceed the capacity.

        Returns the record of a new snapshot, or None if nothing has changed. ``changed`` is True if the caller has
        found other changes of the store.
        """
        found, frontier, record = self._found, self._frontier, self._record
        found[following.CHANGED], found[following.FOLLOWED] = changed, False
        while True:
            held = self._tables.held  # for `held` see `ChunkTables.addresses`
            if held is not self._held() or self._log.table is not self._table:
                held = self._prepare(owner)
                record = self._record
            status = self._kernel(self._addresses, until, frontier.newer, record)
            if found[following.ENDED] > self._size:
                owner.add_ended(found[following.ENDED], found[following.ENDED_STEPS])
                self._note_log_end()
            if status == following.DONE:
                break
            self._serve(status, owner)
        self.open_steps = found[following.OPEN_STEPS]
        if not (changes := found[following.CHANGED]):
            return None
        if changes & following.HIDDEN:
            # The kernel has set OLDEST_AT.
            frontier.oldest, frontier.newer = frontier.newer, np.empty(len(frontier.newer), np.int64)
        self._record = np.empty(len(record), np.int64)
        return record

    def _serve(self, status: int, owner: LiveLanesOwner) -> None:
        found, frontier = self._found, self._frontier
        self._held = no_reference  # some of the kernel's arrays may be replaced here
        if status == advancing.UNREADY:
            frontier.make_ready()
        elif status == advancing.UNMAPPED:
            if not owner.read_time(frontier.needed):
                found[following.CHANGED] |= True
                found[following.FOLLOWED] = False
        elif status != following.ADDED:  # the rows are damaged, unchecked, unmapped, or too many for the log
            owner.prepare_segment(int(self.growing[found[following.LEFT], following.SLOT]), status == following.DAMAGED)
            found[following.CHANGED] |= True

    def _prepare(self, owner: LiveLanesOwner) -> MappingGuard:
        """Set `_arrays` to the kernel's arguments, and return a guard.

        While the guard exists, the chunks stay at the addresses in `_arrays`.
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
        place = places_of(self.growing[:, following.PLACE], self.growing[:, following.LANES])
        start = self._lanes[following.OPEN_START, place]
        return int((self._lanes[following.COMMITTED, place] - start)[start >= 0].sum())

    def _note_log_end(self) -> None:
        """Tell the kernel where the log ends."""
        self._table = self._log.table
        self._size = len(self._table.lines)
        self._found[following.ENDED], self._found[following.ENDED_STEPS] = self._size, self._log.steps
