"""What a capacity and an age hide: the oldest steps by the time at which they were published, lane by lane."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_MASK, EpisodeTable, Ints
from diskreplay.kernels import hiding
from diskreplay.reading.episode_log import EpisodeLog


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
