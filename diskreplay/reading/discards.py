"""The episodes that their writers discarded, and the parts before them that a length cut had ended."""

from typing import Protocol

import numpy as np

from diskreplay.ids import CONTINUES, CUT, DISCARDED, POSITION_BITS, POSITION_MASK, EpisodeTable, Ints
from diskreplay.reading.episode_log import EpisodeLog, Evicted, Evictions


class FollowedLanes(Protocol):
    """The lanes of the segments that a follower knows, by the slots of these."""

    @property
    def origin(self) -> int:
        """The number of the segment in the first slot."""

    def lanes_of(self, slot: int) -> tuple[int, Ints] | None:
        """Return the writer of a segment and the numbers of its lanes; None: it is gone."""

    def published_rows(self, slot: int, lane: int) -> int:
        """Return how many rows of a lane are published."""

    def is_followed(self, slot: int, lane: int) -> bool:
        """Tell whether all that is published of a lane is in the log."""


class Discards:
    """Finds discarded episodes in the log, which keeps them in their place. Not thread-safe.

    ``episodes`` are all of them, but for segments that are gone.
    """

    def __init__(self) -> None:
        self.episodes = EpisodeTable.concatenate([])
        self._generation, self._read = -1, 0  # of the log, and how much of it was searched
        self._tails: set[tuple[int, int]] = set()  # slots and lanes whose last episode is yet to be found
        self._left_out: tuple[Evicted, Evicted] | None = None

    @property
    def waits(self) -> bool:
        """Whether a part of a discarded episode is yet to be found."""
        return len(self._tails) > 0

    def with_evicted(self, evicted: Evicted) -> Evicted:
        """Return the discarded episodes and others; the same object as before if neither has changed."""
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
        """Search the log's new episodes, mark the parts before discarded ones, and return all that were in the log."""
        if log.generation != self._generation:
            self._generation, self._read = log.generation, 0
            if len(self.episodes):  # some may have been evicted by hand at the same time
                self._replace(self.episodes.select(np.isin(self.episodes.first, log.table.first)))
        new = log.table.select(slice(self._read, None))
        self._read = len(log)
        new = new.select(new.end & DISCARDED != 0)
        if not len(new) and not self._tails:
            return new  # as in nearly every refresh that an episode ended in
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
        """Note where the parts before these are: each is the last of its lane in a segment of the same writer."""
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
        """Mark the parts that are in the log by now, and return them; the second value: no more can be found now."""
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
            # If damage took the part, another episode is the last one there.
            if not table.end[last] & CUT or table.end[last] & DISCARDED:
                continue
            if last < len(log):
                found.append(last)
            else:  # it stays out of the log, and those before it are discarded
                evictions.discard(last - len(log))
                self._seek_parts_before(table.select([last]), follower)
        if found:
            log.discard(np.array(found))
        return log.table.select(np.array(found, np.int64)), tails == sorted(self._tails)


def _slots(episodes: EpisodeTable, follower: FollowedLanes) -> Ints:
    slots: Ints = (episodes.first >> POSITION_BITS) - follower.origin
    return slots
