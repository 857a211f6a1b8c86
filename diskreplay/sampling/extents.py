"""Places for ids: numbers from 0 on that an id keeps, in whatever order the population holds it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.runs import IdRuns
from diskreplay.kernels.table import chosen

Ints = NDArray[np.int64]

# New extents from which on they are sorted in among all others.
SMALL = 1024
# Least room of an extent that has grown.
LEAST_ROOM = 16


class Extents:
    """Runs of ids, each with a place for every id: that of id first + j * stride is base + j. Not thread-safe.

    Attributes
    ----------
    table : (capacity, 8) int64
        What follows, a line an extent.
    first, stride, base, room : (capacity,) int64
        The run, its first place, and how many places it has. Entries from `size` on mean nothing.
    known : (capacity,) int64
        So many of the run's first ids have been seen.
    low, high : (capacity,) int64
        Ids number low to high - 1 can be drawn now.
    want_low, want_high : (capacity,) int64
        Scratch: what `low` and `high` are to become.
    size : int
        How many extents there are.
    end : int
        Places in use or free again; the rest were never given out.
    """

    table: Ints
    first: Ints
    stride: Ints
    base: Ints
    room: Ints
    known: Ints
    low: Ints
    high: Ints
    want_low: Ints
    want_high: Ints

    def __init__(self) -> None:
        # Here and not above: it loads numba, which nobody needs to make a distribution.
        from diskreplay.kernels import extents

        self._locate, self._columns = chosen("locate"), extents.COLUMNS
        self._shown, self._known = (extents.LOW, extents.HIGH), (extents.ZERO, extents.KNOWN)
        self.table = np.zeros((0, len(self._columns)), np.int64)
        self.size = self.end = 0
        self.free: dict[int, list[int]] = {}
        self._allot(64)
        self.index(np.zeros(0, np.int64))

    def _allot(self, capacity: int) -> None:
        # Here and not above: it loads numba.
        from diskreplay.kernels.sumtree import aligned

        width = len(self._columns)
        table = aligned(capacity * width).view(np.int64).reshape(capacity, width)
        table[: self.size] = self.table[: self.size]
        self.table = table
        for number, name in enumerate(self._columns):
            setattr(self, name, table[:, number])
        self.want_low, self.want_high = np.zeros((2, capacity), np.int64)

    def index(self, keys: Ints) -> None:
        """Make all extents findable by the lane keys of their first ids; -1: not this one."""
        at = np.argsort(keys, kind="stable")
        at = at[np.searchsorted(keys[at], 0) :]
        nothing = np.zeros(0, np.int64)
        self._indexes = [(keys[at], at), (nothing, nothing)]

    @property
    def indexes(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Both indexes: the sorted keys of the first, its extents, and those of the second."""
        (keys, at), (more_keys, more_at) = self._indexes
        return keys, at, more_keys, more_at

    def locate(self, ids: Ints, segments: tuple[int, Ints], shown: bool = False) -> tuple[Ints, Ints]:
        """Return the extent (-1: none) of each id and its number there, among those known, or those shown."""
        extent, number = np.full(len(ids), -1), np.zeros(len(ids), np.int64)
        low, high = self._shown if shown else self._known
        scratch = np.empty((2, len(ids)), np.int64)
        for keys, at in self._indexes:
            if len(keys):
                self._locate(ids, *segments, keys, at, self.table, low, high, *scratch, extent, number)
        return extent, number

    def add(self, runs: IdRuns, keys: Ints) -> Ints:
        """Give places to new runs, in their order, and return their extents."""
        count = len(runs.first)
        start, stop = self.size, self.size + count
        if stop > len(self.first):
            self._allot(max(stop, 2 * len(self.first)))
        new = slice(start, stop)
        self.first[new], self.stride[new], self.room[new] = runs
        self.base[new] = self.end + np.cumsum(runs.count) - runs.count
        self.known[new] = self.low[new] = self.high[new] = 0
        self.size, self.end = stop, self.end + int(runs.count.sum())
        extents = np.arange(start, stop)
        if count:
            self._index_more(keys, extents)
        return extents

    def _index_more(self, keys: Ints, extents: Ints) -> None:
        main, rest = self._indexes
        order = np.argsort(keys, kind="stable")
        rest = _merged(rest, (keys[order], extents[order]))
        if len(rest[0]) > SMALL:
            main, rest = _merged(main, rest), (rest[0][:0], rest[1][:0])
        self._indexes = [main, rest]

    def move(self, extent: int, least: int) -> int:
        """Give an extent more room than `least`, elsewhere; return where it was."""
        room, old = room_for(least), int(self.base[extent])
        blocks = self.free.get(room)
        if blocks:
            self.base[extent] = blocks.pop()
        else:
            self.base[extent] = self.end
            self.end += room
        self.free.setdefault(int(self.room[extent]), []).append(old)
        self.room[extent] = room
        return old

    def keep_only(self, alive: NDArray[np.bool_]) -> None:
        """Forget the other extents, and move the rest together: each has room for what it knows."""
        renumbered = np.where(alive, np.cumsum(alive) - 1, -1)
        kept = self.table[: self.size][alive]
        self.table[: len(kept)] = kept
        self.size = int(np.count_nonzero(alive))
        rooms = self.known[: self.size]
        self.room[: self.size] = rooms
        self.base[: self.size] = np.cumsum(rooms) - rooms
        self.end, self.free = int(rooms.sum()), {}
        self._indexes = [_renumbered(index, renumbered) for index in self._indexes]


def room_for(least: int) -> int:
    """Return a power of two that is more than `least`."""
    return max(LEAST_ROOM, 1 << least.bit_length())


def ragged(start: Ints, count: Ints) -> Ints:
    """Return start[0], start[0] + 1, ... (count[0] of them), start[1], ... and so on."""
    if len(start) == 1:
        return np.arange(start[0], start[0] + count[0])
    before = np.cumsum(count) - count
    numbers: Ints = np.arange(count.sum()) + np.repeat(start - before, count)
    return numbers


def _merged(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    at = np.searchsorted(one[0], other[0], "right")
    return np.insert(one[0], at, other[0]), np.insert(one[1], at, other[1])


def _renumbered(index: tuple[Ints, Ints], numbers: Any) -> tuple[Ints, Ints]:
    at = numbers[index[1]]
    return index[0][at >= 0], at[at >= 0]
