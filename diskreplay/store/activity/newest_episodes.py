"""The episodes that ended last, and their total rewards, followed from snapshot to snapshot."""

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from diskreplay.errors import SegmentGone
from diskreplay.ids import POSITION_BITS, POSITION_MASK, EpisodeTable
from diskreplay.reading.snapshot import Snapshot

# Of what is found at once, where the newest are looked for: in a log of millions it would take long to ask for all.
_CANDIDATES = 8192


class Ended(NamedTuple):
    """An episode that ended: when its last step was published, in nanoseconds since the epoch, and its total reward."""

    time: int
    total_reward: float


class NewestEpisodes:
    """The newest episodes that ended, ``most`` at most, and how many ended since the first look. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._generation, self._read = -1, 0
        self.seen = 0
        self.newest: list[Ended] = []

    def follow(self, snapshot: Snapshot) -> None:
        """Take in the episodes that ended since the snapshot before."""
        log, is_first = snapshot.log, self._generation < 0
        if snapshot.generation == self._generation:
            new = log.select(slice(self._read, None)).without_discarded()
            self.seen += len(new)
            self._take(snapshot, new)
        else:  # positions in the log mean other episodes now; those that are newer than the newest are new
            count = self._take(snapshot, log.without_discarded(), self.newest[-1].time if self.newest else 0)
            self.seen += 0 if is_first else count
        self._generation, self._read = snapshot.generation, len(log)

    def _take(self, snapshot: Snapshot, ended: EpisodeTable, after: int = 0) -> int:
        """Keep the newest of some episodes, and return how many of them ended after a time."""
        if not len(ended):
            return 0
        ended = _candidates(ended, self._most)
        ended = ended.select(snapshot.hidden_steps(ended) < ended.steps)
        try:
            times = snapshot.times(ended.first + (ended.steps - 1) * ended.stride)
        except SegmentGone:
            return 0
        newest = np.argsort(times, kind="stable")[-self._most :]
        for at in newest[times[newest] > after].tolist():
            try:
                rewards = snapshot.rows("reward", int(ended.first[at]), int(ended.steps[at]))
            except SegmentGone:
                continue
            with np.errstate(invalid="ignore"):  # rewards may be infinite both ways
                self.newest.append(Ended(int(times[at]), float(rewards.sum(dtype=np.float64))))
        self.newest = sorted(self.newest, key=attrgetter("time"))[-self._most :]
        return int(np.count_nonzero(times > after))


def count_ended(snapshot: Snapshot) -> int:
    """Count the ended episodes of a snapshot of which any step is visible."""
    log = snapshot.log.without_discarded()
    # None of an episode that began at `reached` or later is hidden; most of a log need not be asked for.
    older = log.select(log.time < snapshot.reached)
    return len(log) - int(np.count_nonzero(snapshot.hidden_steps(older) >= older.steps))


def _candidates(ended: EpisodeTable, most: int) -> EpisodeTable:
    """Return episodes among which the newest are: of the newest segments, and of many of one its last rows."""
    segment = ended.first >> POSITION_BITS
    counts = np.bincount(segment - segment.min())
    enough = np.searchsorted(np.cumsum(counts[::-1]), 4 * most)  # writers may have segments side by side
    ended = ended.select(segment >= segment.max() - enough)
    if len(ended) > _CANDIDATES:
        row = (ended.first & POSITION_MASK) // ended.stride
        ended = ended.select(np.argsort(row, kind="stable")[-_CANDIDATES:])
    return ended
