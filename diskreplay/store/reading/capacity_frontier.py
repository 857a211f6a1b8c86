"""What a capacity and an age hide: the oldest steps by the time at which they were published, lane by lane."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable, Ints
from diskreplay.kernels import hiding
from diskreplay.kernels.table import Kernel
from diskreplay.store.reading.chunk_table import ChunkTables, Held, unseen
from diskreplay.store.reading.episode_log import EpisodeLog


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


def _places(oldest: Ints) -> Ints:
    """Return what is known of lanes of which none is in the heap yet: see `kernels.hiding`."""
    made = np.zeros((hiding.PLACE_ROWS, len(oldest)), np.int64)
    made[[hiding.LINE, hiding.TAIL]], made[hiding.OLDEST] = -1, oldest
    return made


class CapacityFrontier:
    """Which rows of each lane are hidden. Used by one thread.

    At most ``capacity`` steps are left, or all where it is None: the newest, by when they were published and then by
    id. ``kernel`` is `kernels.hide_oldest` or its plain twin.

    ``generation`` is that of the log that it follows. ``oldest``, ``(lanes,)`` int64, is the first row of each lane
    that is not hidden, `hiding.NEVER` where its segment is gone; a change replaces it. ``hidden`` steps of the log and
    of the open episodes are hidden: all that were published before the time ``until``, in nanoseconds since the epoch,
    and none of an episode that began at ``reached`` or later.
    """

    def __init__(self, capacity: int | None, kernel: Kernel) -> None:
        self.kernel, self._capacity = kernel, capacity
        self.oldest: Ints = np.zeros(0, np.int64)
        self.hidden = self.until = self.reached = 0
        self._by_place: Ints | None
        self._heap: Ints
        self._forget(0)

    def add_lanes(self, count: int) -> None:
        """Add so many lanes behind the others."""
        self.oldest = np.append(self.oldest, np.zeros(count, np.int64))
        if self._by_place is not None:
            self._by_place = np.append(self._by_place, _places(np.zeros(count, np.int64)), axis=1)
            self._heap = np.append(self._heap, np.zeros((count, hiding.HEAP_COLUMNS), np.int64), axis=0)

    def drop(self, gone: NDArray[np.bool_], log: EpisodeTable, place: Ints, open_start: Ints) -> None:
        """Hide all of some lanes, whose segments are gone, and leave out their open episodes.

        ``place`` is the lane of each episode of the log, ``open_start`` the first row of each lane's open one, or -1.
        """
        self.hidden -= self._hidden_of_open(np.where(gone, open_start, -1))
        episodes, place = log.select(gone[place]), place[gone[place]]
        self.hidden += int((episodes.steps - self._hidden_of(episodes, place)).sum())
        self.reached = max(self.reached, int(episodes.time.max(initial=-1)) + 1)
        self.oldest = np.where(gone, hiding.NEVER, self.oldest)
        if self._by_place is not None:
            self._by_place[hiding.OLDEST, gone] = hiding.NEVER
            self._by_place[hiding.LINE, gone] = -1

    def _hidden_of(self, episodes: EpisodeTable, place: Ints) -> Ints:
        row = (episodes.first & POSITION_MASK) // episodes.stride
        return np.clip(self.oldest[place] - row, 0, episodes.steps)

    def _forget(self, generation: int) -> None:
        self.generation = generation
        self._by_place = None  # made when the first steps are hidden: of most stores, none ever is
        self._following = np.zeros(0, np.int64)
        self._numbers = np.zeros(hiding.FOUND, np.int64)
        self._log: EpisodeTable | None = None  # what the arguments of the kernel were collected for
        self._found = self._numbers.data  # the same as Python's own numbers

    def follow(self, log: EpisodeLog, place: Ints, open_start: Ints) -> None:
        """Go on with a log of another generation, and what is hidden in it; see `drop` for both arrays."""
        self._forget(log.generation)
        self.hidden = int(self._hidden_of(log.table, place).sum()) + self._hidden_of_open(open_start)
        if not self.hidden:
            self.reached = 0

    def _hidden_of_open(self, open_start: Ints) -> int:
        some = open_start >= 0
        return int(np.maximum(self.oldest[some] - open_start[some], 0).sum())

    def list_segments(self, growing: Ints, rows: Ints, segments: Segments, tables: ChunkTables) -> None:
        """Take over these arrays, after any of them was replaced: see `LiveLanes` for ``growing`` and ``rows``."""
        self._growing, self._rows, self._segments, self._tables = growing, rows, segments, tables
        self._held: Callable[[], Held | None] = unseen

    def advance(self, log: EpisodeTable, total: int, until: int) -> None:
        """Hide what is more than the capacity of ``total`` steps, and what was published before ``until``.

        Raises SegmentGone or FormatError where the times of the segment that `needed` says cannot be read; it is to be
        dropped.
        """
        found, count = self._found, 0 if self._capacity is None else total - self.hidden - self._capacity
        if until <= self.until:
            if count <= 0:
                return
            until = self.until
        found[hiding.COUNT], found[hiding.UNTIL] = count, until
        found[hiding.HIDDEN], found[hiding.LAST] = self.hidden, -1
        try:
            while True:
                held = self._tables.held  # see `ChunkTables.addresses`
                if log is not self._log or held is not self._held():
                    held = self._prepare(log)
                if self.kernel(*self._arguments) == hiding.DONE:
                    break
                needed = found[hiding.NEEDED]
                slot = (needed >> POSITION_BITS) - self._segments.origin
                row, lane = divmod(needed & POSITION_MASK, self._segments.lanes[slot])
                self._tables.leaves[layout.TIME].ensure(*np.array([[slot], [lane], [row], [row]]))
            self.until = until
        finally:
            self._note_hidden()

    def _prepare(self, log: EpisodeTable) -> Held:
        """Collect the arguments of the kernel.

        Returns what keeps the times mapped whose addresses these have now.
        """
        if len(log) > len(self._following):
            more = len(log) + len(log) // 4 + 64 - len(self._following)
            self._following = np.append(self._following, np.empty(more, np.int64))
        if self._by_place is None:
            self._by_place = _places(self.oldest)
            self._heap = np.zeros((len(self.oldest), hiding.HEAP_COLUMNS), np.int64)
        held, (times,) = self._tables.addresses([layout.TIME])
        self._arguments = (
            log.lines, self._growing, self._rows, *self._segments, *times, self._heap, self._by_place, self._following,
            self._numbers,
        )  # fmt: skip
        self._log, self._held = log, weakref.ref(held)
        return held

    def _note_hidden(self) -> None:
        """Take over what was hidden."""
        last = self._found[hiding.LAST]
        if last >= 0 and self._by_place is not None:
            self.hidden = self._found[hiding.HIDDEN]
            # Steps of one writer have different times, and of two the same only by accident.
            if last >= self.until:
                self.until = last + 1
            if self.until > self.reached:
                self.reached = self.until
            self.oldest = self._by_place[hiding.OLDEST].copy()

    @property
    def needed(self) -> int:
        """The number of the segment whose times could not be read."""
        return self._found[hiding.NEEDED] >> POSITION_BITS
