"""How a follower follows the lanes of segments that may still grow, and what a capacity and an age hide."""

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

# --- what is hidden: the oldest steps by the time at which they were published, lane by lane --------------------------


class Segments(NamedTuple):
    """The number of the first segment, and of each from there on its lanes, their place, and what its times lack.

    And where its rows are: see `kernels.frozen`.
    """

    origin: int
    lanes: Ints
    lane_base: Ints
    clocks: Ints
    folders: Ints
    first_rows: Ints


_NO_HEAP, _NO_PLACES = np.zeros((0, hiding.HEAP_COLUMNS), np.int64), np.zeros((hiding.PLACE_ROWS, 0), np.int64)


def _places(oldest: Ints) -> Ints:
    """Return what is known of lanes of which none is in the heap yet: see `kernels.hiding`."""
    made = np.zeros((hiding.PLACE_ROWS, len(oldest)), np.int64)
    made[[hiding.LINE, hiding.TAIL]], made[hiding.OLDEST] = -1, oldest
    return made


class CapacityFrontier:
    """Which rows of each lane are hidden. Used by one thread.

    At most ``capacity`` steps are left, or all where it is None: the newest, by when they were published and then by
    id; ``hides`` is whether any are ever hidden one by one.

    ``generation`` is that of the log that it follows. ``oldest``, ``(lanes,)`` int64, is the first row of each lane
    that is not hidden, `hiding.NEVER` where its segment is gone; a change replaces it. ``newer`` is memory for what
    replaces it. ``found`` are the kernel's numbers, see `kernels.hiding`.
    """

    def __init__(self, capacity: int | None, hides: bool) -> None:
        self._hides = hides
        self._numbers = np.zeros(hiding.FOUND, np.int64)
        self.found = self._numbers.data  # the same as Python's own numbers
        self.found[hiding.CAPACITY], self.found[hiding.LAST] = -1 if capacity is None else capacity, -1
        self._set_oldest(np.zeros(0, np.int64))
        self._by_place: Ints | None
        self._heap: Ints
        self._forget(0)

    @property
    def needed(self) -> int:
        """The id of the step whose time the kernel asks for."""
        return self.found[hiding.NEEDED]

    @property
    def hidden_before(self) -> int:
        """The time before which every hidden step of a segment that is there was published."""
        return max(self.found[hiding.PAST], self.found[hiding.BEHIND])

    def add_lanes(self, count: int) -> None:
        """Add so many lanes behind the others."""
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
        """Hide all of some lanes, whose segments are gone, and leave out their open episodes.

        ``place`` is the lane of each episode of the log, ``open_start`` the first row of each lane's open one, or -1.
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
        """Take over what the kernel has hidden, where it has stopped before it was done."""
        if self.found[hiding.LAST] >= 0 and self._by_place is not None:
            self._set_oldest(self._by_place[hiding.OLDEST].copy())
            hiding.note_last(self._numbers)

    def hidden_of(self, episodes: EpisodeTable, place: Ints) -> Ints:
        """Return how many steps of each episode are hidden; ``place`` is its lane's place."""
        row = (episodes.first & POSITION_MASK) // episodes.stride
        return np.clip(self.oldest[place] - row, 0, episodes.steps)

    def _forget(self, generation: int) -> None:
        self.generation = generation
        self._numbers[[hiding.SEEN, hiding.SIZE, hiding.READY, hiding.FRONT, hiding.WAITING]] = 0
        self._by_place = None  # made when the first steps are hidden: of most stores, none ever is
        self._following = np.zeros(0, np.int64)

    def follow(self, log: EpisodeLog, place: Ints, open_start: Ints) -> None:
        """Go on with a log of another generation, and what is hidden in it; see `drop` for both arrays."""
        self._forget(log.generation)
        hidden = int(self.hidden_of(log.table, place).sum()) + self._hidden_of_open(open_start)
        self.found[hiding.HIDDEN] = hidden
        # No later than in a reader that begins now: what follows snapshots orders ids by it.
        gone = log.table.time[self.oldest[place] == hiding.NEVER].max(initial=-1) + 1
        self.found[hiding.REACHED] = max(self.hidden_before, int(gone)) if hidden else 0

    def _hidden_of_open(self, open_start: Ints) -> int:
        some = open_start >= 0
        return int(np.maximum(self.oldest[some] - open_start[some], 0).sum())

    def replace_oldest(self) -> None:
        """Take over what the kernel has hidden."""
        self._set_oldest(self.newer)

    def make_ready(self) -> None:
        """Make what the kernel needs to hide steps; `arrays` has it from then on."""
        self._by_place = _places(self.oldest)
        self._heap = np.zeros((2 * len(self.oldest), hiding.HEAP_COLUMNS), np.int64)
        self.found[hiding.READY] = 1

    def arrays(self, segments: Segments, lines: int) -> tuple[Ints, ...]:
        """Return the arrays of the kernel that say what is hidden, where the log has room for so many lines."""
        if not self._hides:
            return (self._numbers,)
        if self._by_place is None:
            return self._numbers, *segments[1:], _NO_HEAP, _NO_PLACES, self._following
        if lines > len(self._following):
            self._following = np.append(self._following, np.empty(lines - len(self._following), np.int64))
        return self._numbers, *segments[1:], self._heap, self._by_place, self._following


# --- lanes that may grow ----------------------------------------------------------------------------------------------

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

    ``kernel`` is `advance` or `advance_hiding` of `kernels.advance`, compiled or not; it writes the lines of episodes
    that end behind ``log``, and hides what ``frontier`` says. ``segments`` are by slot; after a change, `list_segments`
    is called. ``growing``, ``(n, 8)`` int64, is the table of them, see `kernels.following`. ``open_steps`` are the
    steps of the open episodes of all lanes. ``leaves`` are the arrays that are read: flags, and times where they are of
    use.
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
        self._held: Callable[[], MappingGuard | None] = no_reference  # what it was when the tables were read
        self._record = np.zeros(0, np.int64)  # of the next snapshot

    def follow_with(self, kernel: Kernel) -> None:
        """Use another kernel from now on."""
        self._kernel, self._held = kernel, no_reference

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
        self._held = no_reference

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
            self._serve(status, owner)
        self.open_steps = found[following.OPEN_STEPS]
        if not (changes := found[following.CHANGED]):
            return None
        if changes & following.HIDDEN:
            frontier.replace_oldest()
        self._record = np.empty(len(record), np.int64)
        return record

    def _serve(self, status: int, owner: LiveLanesOwner) -> None:
        """Do what the kernel asks for."""
        found, frontier = self._found, self._frontier
        self._held = no_reference  # that may replace some of the arrays
        if status == advancing.UNREADY:
            frontier.make_ready()
        elif status == advancing.UNMAPPED:
            if not owner.read_time(frontier.needed):
                found[following.CHANGED] |= True
                found[following.FOLLOWED] = False
        elif status != following.ADDED:  # many rows of a lane, for which there may be no room behind the log, too
            owner.prepare_segment(int(self.growing[found[following.LEFT], following.SLOT]), status == following.DAMAGED)
            found[following.CHANGED] |= True

    def _prepare(self, owner: LiveLanesOwner) -> MappingGuard:
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
        self._table = self._log.table
        self._size = len(self._table)
        self._found[following.ENDED], self._found[following.ENDED_STEPS] = self._size, self._log.steps
