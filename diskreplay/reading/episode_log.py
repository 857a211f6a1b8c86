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
    """Ended episodes in the order of their discovery.

    ``table`` has these episodes, and ``steps`` is the number of all their steps. ``generation`` changes when the
    position or the end of an episode in the table changes.

    Concurrency: one thread appends. Tables made earlier never change: appends write after their last line, and a
    removal makes new arrays.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self.steps = 0
        self._lines: Ints = np.zeros((0, EPISODE_COLUMNS), np.int64)
        self.table = EpisodeTable(self._lines)

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.table)

    def reserve(self, room: int) -> Ints:
        """Return the array of all lines, with ``room`` free lines at the end; `extend_to` adds these to the table."""
        size = len(self.table)
        if size + room > len(self._lines):
            # A quarter more, and not twice as much: a reader keeps this memory in addition to the page cache.
            lines = np.empty((size + size // 4 + room, EPISODE_COLUMNS), np.int64)
            lines[:size] = self.table.lines
            self._lines = lines
            self.table = EpisodeTable(lines[:size])
        return self._lines

    def extend_to(self, size: int, steps: int) -> None:
        """Extend the log to its first ``size`` lines, whose episodes have ``steps`` steps in total."""
        self.table = EpisodeTable(self._lines[:size])
        self.steps = steps

    def append(self, episodes: EpisodeTable) -> None:
        """Add episodes at the end."""
        size = len(self.table)
        end = size + len(episodes)
        self.reserve(len(episodes))[size:end] = episodes.lines
        self.extend_to(end, self.steps + int(episodes.steps.sum()))

    def remove(self, gone: NDArray[np.bool_]) -> None:
        """Drop the episodes where ``gone`` is True. This changes positions, so the generation changes."""
        if not gone.any():
            return
        self.table = self.table.select(~gone)
        self._lines = self.table.lines
        self.steps = int(self.table.steps.sum())
        self.generation += 1

    def discard(self, at: Ints) -> None:
        """Mark the episodes at these positions as discarded; the generation changes."""
        self.table = self.table.with_discarded(at)
        self._lines = self.table.lines
        self.generation += 1


class Evicted:
    """The episodes that a snapshot leaves out: evicted by hand, lost to damage, or discarded. Immutable.

    ``episodes`` is their table.
    """

    def __init__(self, episodes: EpisodeTable) -> None:
        key = _keys(episodes.first, episodes.stride)
        order = np.argsort(key, kind="stable")
        self._key, self._steps = key[order], episodes.steps[order]
        self.episodes = episodes

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self._key)

    def contains(self, ids: Ints, lanes: Ints) -> NDArray[np.bool_]:
        """Return whether each id is a step of these episodes; ``lanes`` has the lane count of each id's segment."""
        if not len(self._key):
            return np.zeros(len(ids), np.bool_)
        key = _keys(ids, lanes)
        at = np.searchsorted(self._key, key, "right") - 1
        inside: NDArray[np.bool_] = (at >= 0) & (key - self._key[at] < self._steps[at])
        return inside

    def with_more(self, episodes: EpisodeTable) -> "Evicted":
        """Return these episodes together with ``episodes``."""
        return Evicted(EpisodeTable.concatenate([self.episodes, episodes])) if len(episodes) else self

    def without(self, segments: Ints) -> "Evicted":
        """Return these episodes without the episodes in ``segments``."""
        return Evicted(self.episodes.select(~np.isin(self.episodes.first >> POSITION_BITS, segments)))


class Evictions:
    """Follows the list of evictions by hand, and finds the episodes that its entries name. Not thread-safe.

    Episodes that were lost to damage are found in the same way; their segments list them. ``found`` has the evicted and
    the lost episodes.
    """

    def __init__(self, root: Root) -> None:
        self._entries = EvictionEntries(root)
        self._firsts = np.zeros(0, np.int64)
        self.found = Evicted(EpisodeTable.concatenate([]))

    def read(self, count: int) -> bool:
        """Read the list's entries up to number ``count``; return whether any are new."""
        new = self._entries.new(count)[:, 0]
        if len(new):
            self._firsts = np.union1d(self._firsts, new)
        return len(new) > 0

    def add_lost(self, firsts: Ints) -> bool:
        """Add the first ids of ranges that were lost to damage; return whether ``firsts`` has any."""
        if len(firsts):
            self._firsts = np.union1d(self._firsts, firsts)
        return len(firsts) > 0

    @property
    def has_none(self) -> bool:
        """Whether no episode was evicted or lost."""
        return not len(self._firsts)

    def split(self, episodes: EpisodeTable) -> tuple[EpisodeTable, NDArray[np.bool_]]:
        """Return the episodes that were neither evicted nor lost, and a mask of the others; `found` gets the others."""
        out = np.zeros(len(episodes), np.bool_)
        if len(self._firsts) and len(episodes):
            at = np.minimum(np.searchsorted(self._firsts, episodes.first), len(self._firsts) - 1)
            out = self._firsts[at] == episodes.first
        if not out.any():
            return episodes, out
        self.found = self.found.with_more(episodes.select(out))
        return episodes.select(~out), out

    def discard(self, at: int) -> None:
        """Mark the episode at this position of `found` as discarded."""
        self.found = Evicted(self.found.episodes.with_discarded(at))

    def forget(self, segments: Ints) -> None:
        """Forget the episodes of segments that are gone."""
        if len(self.found):
            self.found = self.found.without(segments)
            self._firsts = self._firsts[~np.isin(self._firsts >> POSITION_BITS, segments)]


def _keys(ids: Ints, lanes: Ints) -> Ints:
    row, lane = np.divmod(ids & POSITION_MASK, lanes)
    return row_keys(ids, lanes, lane, row)


class FollowedLanes(Protocol):
    """The lanes of the segments that a follower knows. The slot of a segment is its number minus ``origin``."""

    @property
    def origin(self) -> int:
        """The number of the segment in the first slot."""

    def lanes_of(self, slot: int) -> tuple[int, Ints] | None:
        """Return the writer of a segment and the numbers of its lanes, or None if the segment is gone."""

    def published_rows(self, slot: int, lane: int) -> int:
        """Return the number of published rows of a lane."""

    def is_followed(self, slot: int, lane: int) -> bool:
        """Return whether all published rows of a lane were followed, and its last episode has ended."""


class Discards:
    """Finds discarded episodes in the log, which keeps them in their place. Not thread-safe.

    ``episodes`` has the discarded episodes found so far, without segments that are gone. An episode that continues
    across segments has a part in each. On disk, only the last part has the flag DISCARDED, so this class searches for
    the earlier parts.
    """

    def __init__(self) -> None:
        self.episodes = EpisodeTable.concatenate([])
        self._generation, self._read = -1, 0  # the log's generation and length when it was last searched
        self._tails: set[tuple[int, int]] = set()  # (slot, lane) of each lane whose last episode is a part to find
        self._left_out: tuple[Evicted, Evicted] | None = None

    @property
    def waits(self) -> bool:
        """Whether a part of a discarded episode is yet to be found."""
        return len(self._tails) > 0

    def with_evicted(self, evicted: Evicted) -> Evicted:
        """Return the discarded and the evicted episodes; the same object as before if neither has changed."""
        if not len(self.episodes):
            return evicted
        if self._left_out is None or self._left_out[0] is not evicted:
            self._left_out = evicted, evicted.with_more(self.episodes)
        return self._left_out[1]

    def forget(self, segments: Ints) -> None:
        """Forget the episodes of segments that are gone."""
        if len(self.episodes):
            self._replace(self.episodes.select(~np.isin(self.episodes.first >> POSITION_BITS, segments)))

    def _replace(self, episodes: EpisodeTable) -> None:
        self.episodes, self._left_out = episodes, None

    def follow(self, log: EpisodeLog, evictions: Evictions, follower: FollowedLanes) -> EpisodeTable:
        """Find discarded episodes among the log's new ones, and mark their earlier parts as discarded.

        Returns the newly found episodes and parts.
        """
        if log.generation != self._generation:
            self._generation, self._read = log.generation, 0
            if len(self.episodes):  # some may have been evicted by hand at the same time
                self._replace(self.episodes.select(np.isin(self.episodes.first, log.table.first)))
        new = log.table.select(slice(self._read, None))
        self._read = len(log)
        new = new.select(new.end & DISCARDED != 0)
        if not len(new) and not self._tails:
            return new  # as in nearly every refresh that finds an ended episode
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
        """Record where the parts before these episodes are, to find them later.

        Each is the last episode of the same lane in an earlier segment of the writer.
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
        """Mark and return the earlier parts whose rows were followed by now, and whether no lane could be searched."""
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
            # If damage took the part, the last episode of the lane is another one.
            if not table.end[last] & CUT or table.end[last] & DISCARDED:
                continue
            if last < len(log):
                found.append(last)
            else:  # the part was evicted or lost, so it stays out of the log, but the parts before it are discarded
                evictions.discard(last - len(log))
                self._seek_parts_before(table.select([last]), follower)
        if found:
            log.discard(np.array(found))
        return log.table.select(np.array(found, np.int64)), tails == sorted(self._tails)


def _slots(episodes: EpisodeTable, follower: FollowedLanes) -> Ints:
    slots: Ints = (episodes.first >> POSITION_BITS) - follower.origin
    return slots
