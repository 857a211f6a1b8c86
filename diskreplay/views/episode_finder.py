"""The episodes of a snapshot, looked up by the ids of their steps at a cost that does not grow with the store."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from diskreplay.ids import EPISODE_COLUMNS, EpisodeTable, Ints, locate, row_keys
from diskreplay.reading.snapshot import Snapshot

Table = TypeVar("Table")

# Ended episodes that are not worth sorting those before anew.
_FEW = 1024


class EpisodeTables(Generic[Table]):
    """Two tables that `make` makes of a snapshot's episodes. Not thread-safe.

    One is of most ended ones and made anew when there are an eighth more of them, or some have gone: then `make` is
    given the one before, too. The other, of the rest and of open ones, is made for each snapshot.
    """

    def __init__(self, make: Callable[[Snapshot, EpisodeTable, Table | None], Table]) -> None:
        self._make = make
        self._most: Table | None = None
        self._rest: Table | None = None
        self._snapshot: Snapshot | None = None
        self._count = self._generation = -1

    def of(self, snapshot: Snapshot) -> tuple[Table, Table]:
        """Return both tables of a snapshot, which may be an older one than the last."""
        if snapshot is self._snapshot and self._most is not None and self._rest is not None:
            return self._most, self._rest
        self._snapshot, log = None, snapshot.log
        is_other = snapshot.generation != self._generation or len(log) < self._count
        if self._most is None or is_other or len(log) - self._count > max(_FEW, self._count // 8):
            self._generation = -1  # until the rest is done
            self._most, self._count = self._make(snapshot, log, self._most), len(log)
            self._generation = snapshot.generation
        rest = EpisodeTable.concatenate([log.select(slice(self._count, None)), snapshot.open])
        self._rest = self._make(snapshot, rest, None)
        self._snapshot = snapshot
        return self._most, self._rest


class _ByPlace(NamedTuple):
    """Episodes in the order of segment, lane and row, and the key of each one's first step; see `row_keys`."""

    keys: Ints
    episodes: EpisodeTable


class EpisodeFinder:
    """Finds the episodes that steps belong to. Not thread-safe: it keeps what it has sorted."""

    def __init__(self) -> None:
        self._tables = EpisodeTables(_by_place)

    def find(self, snapshot: Snapshot, ids: Ints) -> EpisodeTable:
        """Return the episode of each of these visible steps, whole, as the snapshot has it."""
        keys = _keys(snapshot, ids)
        found, best = np.zeros((len(ids), EPISODE_COLUMNS), np.int64), np.full(len(ids), -1)
        for table in self._tables.of(snapshot):
            if not len(table.keys):
                continue
            # Of the last episode of each table that begins before a step, the later one is the step's.
            at = np.maximum(np.searchsorted(table.keys, keys, "right") - 1, 0)
            is_better = (table.keys[at] <= keys) & (table.keys[at] > best)
            found = np.where(is_better[:, None], table.episodes.lines[at], found)
            best = np.where(is_better, table.keys[at], best)
        return EpisodeTable(found)

    def steps_before(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return how many steps of its episode come before each of these visible steps, hidden ones included."""
        episodes = self.find(snapshot, ids)
        before: Ints = (ids - episodes.first) // episodes.stride
        return before


def _by_place(snapshot: Snapshot, episodes: EpisodeTable, _: _ByPlace | None) -> _ByPlace:
    keys = _keys(snapshot, episodes.first)
    order = np.argsort(keys, kind="stable")
    return _ByPlace(keys[order], episodes.select(order))


def _keys(snapshot: Snapshot, ids: Ints) -> Ints:
    _, _, width, lane, row = locate(ids, snapshot.origin, snapshot.lanes)
    return row_keys(ids, width, lane, row)
