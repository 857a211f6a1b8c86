"""The ended episodes that a reader has found, and the episodes that it leaves out.

An episode is left out if it was evicted by hand (`Store.evict`), lost to damage, or discarded by its writer.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import (
    CONTINUES,
    CUT,
    DISCARDED,
    END,
    EPISODE_COLUMNS,
    POSITION_BITS,
    POSITION_MASK,
    EpisodeTable,
    Ints,
    row_keys,
)
from diskreplay.segments.documents.eviction_list import EvictionEntries
from diskreplay.segments.documents.root import Root


class EpisodeLog:
    """The ended episodes that a reader has found, in the order of their discovery.

    ``steps`` is the number of steps of all these episodes. ``generation`` changes when an episode gets another position
    in the table, or when the bits of its end change (see `ids.OPEN`).

    Concurrency: one thread appends. A ``table`` that a caller got earlier never changes: appends write after the last
    line of this table, and a removal makes new arrays.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.steps = 0
        self._lines: Ints = np.zeros((0, EPISODE_COLUMNS), np.int64)
        self.table = EpisodeTable(self._lines)

    def __len__(self) -> int:
        return len(self.table.lines)

    def reserve(self, room: int) -> Ints:
        """Return the array of the table's lines, with at least ``room`` free lines at its end for new episodes.

        The caller writes new episodes to the free lines. `extend_to` adds these lines to the table.
        """
        size = len(self.table)
        if size + room > len(self._lines):
            # The array grows by a quarter, and not to twice its size, to leave memory to the page cache.
            lines = np.empty((size + size // 4 + room, EPISODE_COLUMNS), np.int64)
            lines[:size] = self.table.lines
            self._lines = lines
            self.table = EpisodeTable(lines[:size])
        return self._lines

    def extend_to(self, size: int, steps: int) -> None:
        """Extend the table to the first ``size`` lines of the array from `reserve`.

        ``steps`` is the number of steps of all these lines.
        """
        self.table = EpisodeTable(self._lines[:size])
        self.steps = steps

    def append(self, episodes: EpisodeTable) -> None:
        size, more = len(self.table), len(episodes)
        self.reserve(more)[size : size + more] = episodes.lines
        self.extend_to(size + more, self.steps + int(episodes.steps.sum()))

    def remove(self, gone: NDArray[np.bool_]) -> None:
        if not gone.any():
            return
        self.table = self.table.select(~gone)
        self._lines = self.table.lines
        self.steps = int(self.table.steps.sum())
        self.generation += 1

    def discard(self, at: Ints) -> None:
        self.table = self.table.with_discarded(at)
        self._lines = self.table.lines
        self.generation += 1


def _keys(ids: Ints, lanes: Ints) -> Ints:
    row, lane = np.divmod(ids & POSITION_MASK, lanes)
    return row_keys(ids, lanes, lane, row)


class Evicted:
    """The episodes that a snapshot leaves out: evicted by hand, lost to damage, or discarded. Immutable."""

    def __init__(self, episodes: EpisodeTable) -> None:
        key = _keys(episodes.first, episodes.stride)
        order = np.argsort(key, kind="stable")
        self._key, self._steps = key[order], episodes.steps[order]
        self.episodes = episodes

    def __len__(self) -> int:
        return len(self._key)

    def contains(self, ids: Ints, lanes: Ints) -> NDArray[np.bool_]:
        """Return whether each id is a step of these episodes. The segment of ``ids[i]`` has ``lanes[i]`` lanes."""
        if not len(self._key):
            return np.zeros(len(ids), np.bool_)
        key = _keys(ids, lanes)
        at = np.searchsorted(self._key, key, "right") - 1
        inside: NDArray[np.bool_] = (at >= 0) & (key - self._key[at] < self._steps[at])
        return inside

    def with_more(self, episodes: EpisodeTable) -> "Evicted":
        return Evicted(EpisodeTable.concatenate([self.episodes, episodes])) if len(episodes) else self

    def without(self, segments: Ints) -> "Evicted":
        return Evicted(self.episodes.select(~np.isin(self.episodes.first >> POSITION_BITS, segments)))


_NOTHING = Evicted(EpisodeTable.concatenate([]))


class Evictions:
    """Finds episodes that were evicted by hand or lost to damage, by the ids of their first steps. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._entries = EvictionEntries(root)
        self._firsts = np.zeros(0, np.int64)
        self.found = _NOTHING

    def read(self, count: int) -> bool:
        new = self._entries.new(count)[:, 0]
        if len(new):
            self._firsts = np.union1d(self._firsts, new)
        return len(new) > 0

    def add_lost(self, firsts: Ints) -> bool:
        if len(firsts):
            self._firsts = np.union1d(self._firsts, firsts)
        return len(firsts) > 0

    @property
    def has_none(self) -> bool:
        return not len(self._firsts)

    def split(self, episodes: EpisodeTable) -> tuple[EpisodeTable, NDArray[np.bool_]]:
        """Return the episodes that were neither evicted nor lost, and a mask of the evicted and lost episodes.

        The evicted and lost episodes are added to `found`.
        """
        out = np.zeros(len(episodes), np.bool_)
        if len(self._firsts) and len(episodes):
            at = np.minimum(np.searchsorted(self._firsts, episodes.first), len(self._firsts) - 1)
            out = self._firsts[at] == episodes.first
        if not out.any():
            return episodes, out
        self.found = self.found.with_more(episodes.select(out))
        return episodes.select(~out), out

    def discard(self, at: int) -> None:
        self.found = Evicted(self.found.episodes.with_discarded(at))

    def forget(self, segments: Ints) -> None:
        if len(self.found):
            self.found = self.found.without(segments)
            self._firsts = self._firsts[~np.isin(self._firsts >> POSITION_BITS, segments)]


class FollowedLanes(Protocol):
    """The methods of `FollowedRows` that `Discards` uses."""

    @property
    def origin(self) -> int: ...

    def lanes_of(self, slot: int) -> tuple[int, Ints] | None:
        """Return the number of a segment's writer, and the numbers that this writer gave to the segment's lanes.

        Return None if the segment is gone.
        """

    def published_rows(self, slot: int, lane: int) -> int: ...

    def is_followed(self, slot: int, lane: int) -> bool:
        """Return whether the episodes in all published rows of a lane were found, and the last episode has ended."""


class Discards:
    """Finds the discarded episodes in an `EpisodeLog`, and leaves them in the log. Not thread-safe.

    ``episodes`` has the discarded episodes found so far, except those of segments that are gone. An episode that
    continues across segments has a part in each segment. On disk, only the last part has the flag DISCARDED, so this
    class searches for the earlier parts.
    """

    def __init__(self) -> None:
        self.episodes = _NOTHING.episodes
        self._generation, self._read = -1, 0  # the log's generation and length at the last search
        # (slot, lane) of each lane in which an earlier part of a discarded episode has yet to be found.
        self._tails: set[tuple[int, int]] = set()
        # The argument and the result of the last call of `with_evicted`; None after a change of `episodes`.
        self._left_out: tuple[Evicted, Evicted] | None = None

    @property
    def waits(self) -> bool:
        return len(self._tails) > 0

    def with_evicted(self, evicted: Evicted) -> Evicted:
        """Return the discarded episodes and ``evicted`` together.

        Return the same object again if ``evicted`` and the discarded episodes are unchanged.
        """
        if not len(self.episodes):
            return evicted
        if self._left_out is None or self._left_out[0] is not evicted:
            self._left_out = evicted, evicted.with_more(self.episodes)
        return self._left_out[1]

    def forget(self, segments: Ints) -> None:
        if len(self.episodes):
            self._replace(self.episodes.select(~np.isin(self.episodes.first >> POSITION_BITS, segments)))

    def _replace(self, episodes: EpisodeTable) -> None:
        self.episodes, self._left_out = episodes, None

    def follow(self, log: EpisodeLog, evictions: Evictions, follower: FollowedLanes) -> EpisodeTable:
        """Find discarded episodes among the log's new episodes, and flag their earlier parts as DISCARDED.

        Returns the discarded episodes and the earlier parts that this call has found. A later call finds a part whose
        rows were not followed yet.
        """
        if log.generation != self._generation:
            self._generation, self._read = log.generation, 0
            if len(self.episodes):  # an eviction by hand may have removed episodes
                self._replace(self.episodes.select(np.isin(self.episodes.first, log.table.first)))
        lines = log.table.lines[self._read :]
        self._read += len(lines)
        new = EpisodeTable(lines[lines[:, END] & DISCARDED != 0])
        if not len(new) and not self._tails:
            return new  # most calls return here
        if len(new):
            there = [follower.lanes_of(slot) is not None for slot in _slots(new, follower).tolist()]
            new = new.select(np.array(there) & ~np.isin(new.first, self.episodes.first))
        every = [new]
        self._add(new, follower)
        while self._tails:
            parts, is_done = self._find_parts(log, evictions, follower)
            every.append(parts)
            self._add(parts, follower)
            if is_done:
                break
        self._generation = log.generation
        return EpisodeTable.concatenate(every)

    def _add(self, episodes: EpisodeTable, follower: FollowedLanes) -> None:
        if len(episodes):
            self._replace(EpisodeTable.concatenate([self.episodes, episodes]))
            self._seek_parts_before(episodes, follower)

    def _seek_parts_before(self, episodes: EpisodeTable, follower: FollowedLanes) -> None:
        """Record the lanes in which `_find_parts` has to search for earlier parts of these episodes.

        An earlier part is the last episode of the same lane in the writer's previous segment with rows of this lane.
        """
        continuing = episodes.select(episodes.end & CONTINUES != 0)
        positions = ((continuing.first & POSITION_MASK) % continuing.stride).tolist()
        for slot, at in zip(_slots(continuing, follower).tolist(), positions, strict=True):
            own = follower.lanes_of(slot)
            assert own is not None
            writer, numbers = own
            for before in range(slot - 1, max(writer - follower.origin, 0) - 1, -1):
                found = follower.lanes_of(before)
                if found is None or found[0] != writer:
                    continue
                same = np.flatnonzero(found[1] == numbers[at]).tolist()
                if same and follower.published_rows(before, same[0]):
                    self._tails.add((before, same[0]))
                    break

    def _find_parts(self, log: EpisodeLog, evictions: Evictions, follower: FollowedLanes) -> tuple[EpisodeTable, bool]:
        """Set the flag DISCARDED of the earlier parts that can be found now, and return these parts.

        The second value is True if no lane could be searched: the search has to wait for more rows.
        """
        table, found, tails = EpisodeTable.concatenate([log.table, evictions.found.episodes]), [], sorted(self._tails)
        slots, position = _slots(table, follower), (table.first & POSITION_MASK) % table.stride
        for slot, lane in tails:
            is_there = follower.lanes_of(slot) is not None
            if is_there and not follower.is_followed(slot, lane):
                continue
            self._tails.discard((slot, lane))
            at = np.flatnonzero((slots == slot) & (position == lane))
            if not is_there or not len(at):
                continue
            last = int(at[table.first[at].argmax()])
            # The lane's last episode is the sought part, unless damage has destroyed this part.
            if not table.end[last] & CUT or table.end[last] & DISCARDED:
                continue
            if last < len(log):
                found.append(last)
            else:  # the part was evicted or lost, but earlier parts may be in the log
                evictions.discard(last - len(log))
                self._seek_parts_before(table.select([last]), follower)
        if found:
            log.discard(np.array(found))
        return log.table.select(np.array(found, np.int64)), tails == sorted(self._tails)


def _slots(episodes: EpisodeTable, follower: FollowedLanes) -> Ints:
    slots: Ints = (episodes.first >> POSITION_BITS) - follower.origin
    return slots
