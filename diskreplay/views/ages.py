"""How many steps of a store are newer than each of some: those that were published later, by whichever writer.

Steps are ordered by the times at which they were published and then by their ids. The steps of an episode are in that
order. So of an episode that began later than a step all are newer, of one that ended before it none, and of the others,
which are no more than there are lanes, a search among their times tells.
"""

from typing import NamedTuple

import numpy as np

from diskreplay.ids import EpisodeTable, Ints, locate, places_of
from diskreplay.reading.snapshot import Snapshot
from diskreplay.views.episode_finder import EpisodeTables
from diskreplay.views.gather_plan import row_plan
from diskreplay.views.successors import place
from diskreplay.views.windows import TIME_SOURCE

# Pairs of a step and an episode that are looked at together.
_AT_ONCE = 1 << 18


class _ByTime(NamedTuple):
    """Episodes in the order in which they began: first id, stride and steps of each, and when it began and ended.

    `latest` is the latest end of an episode and all before it, `from_here` the steps of it and all behind it, and 0.
    """

    first: Ints
    stride: Ints
    steps: Ints
    begin: Ints
    end: Ints
    latest: Ints
    from_here: Ints


class Ages:
    """Counts the steps that are newer than others. Not thread-safe: it keeps what it has sorted."""

    def __init__(self) -> None:
        self._times = row_plan([TIME_SOURCE])
        self._tables = EpisodeTables(self._by_time)

    def of(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return how many steps of the snapshot are newer than each of these."""
        times, found = self._times_of(snapshot, ids), np.zeros(len(ids), np.int64)
        for table in self._tables.of(snapshot):
            stop = np.searchsorted(table.begin, times, "right")
            found += table.from_here[stop]
            start = np.minimum(np.searchsorted(table.latest, times), stop)
            pairs = np.cumsum(stop - start)
            bounds = np.searchsorted(pairs, np.arange(_AT_ONCE, pairs[-1] if len(pairs) else 0, _AT_ONCE))
            for items in np.split(np.arange(len(ids)), bounds):
                found[items] += self._inside(snapshot, table, ids[items], times[items], start[items], stop[items])
        return found

    def _inside(self, snapshot: Snapshot, table: _ByTime, ids: Ints, times: Ints, start: Ints, stop: Ints) -> Ints:
        """Return how many steps of the episodes from `start` to `stop` are newer than each step."""
        item = np.repeat(np.arange(len(ids)), stop - start)
        number = places_of(start, stop - start)
        going_on = table.end[number] >= times[item]
        item, number = item[going_on], number[going_on]
        first, stride, steps = table.first[number], table.stride[number], table.steps[number]
        # Of the first `low` steps none is newer, and all from `high` on are.
        low, high = np.zeros(len(item), np.int64), steps.copy()
        while len(left := np.flatnonzero(low < high)):
            middle = (low[left] + high[left]) // 2
            probe, of = first[left] + middle * stride[left], item[left]
            at = self._times_of(snapshot, probe)
            is_newer = (at > times[of]) | ((at == times[of]) & (probe > ids[of]))
            high[left] = np.where(is_newer, middle, high[left])
            low[left] = np.where(is_newer, low[left], middle + 1)
        newer = np.zeros(len(ids), np.int64)
        np.add.at(newer, item, steps - low)
        return newer

    def _by_time(self, snapshot: Snapshot, episodes: EpisodeTable, before: _ByTime | None) -> _ByTime:
        """Make a table; what `before` has of its episodes is not read again: their segments may be gone."""
        episodes = episodes.without_discarded()
        # Of evicted segments the log may still have episodes. All that is visible is newer.
        episodes = episodes.select(locate(episodes.first, snapshot.origin, snapshot.lanes)[0])
        first, stride, steps = episodes.first, episodes.stride, episodes.steps
        begin, end = np.zeros((2, len(first)), np.int64)
        new = np.ones(len(first), np.bool_)
        if before is not None and len(before.first):
            by_id = np.argsort(before.first)
            at = by_id[np.minimum(np.searchsorted(before.first, first, sorter=by_id), len(by_id) - 1)]
            new = before.first[at] != first
            begin, end = before.begin[at], before.end[at]
        begin[new] = self._times_of(snapshot, first[new])
        end[new] = self._times_of(snapshot, (first + (steps - 1) * stride)[new])
        order = np.argsort(begin, kind="stable")
        first, stride, steps, begin, end = (column[order] for column in (first, stride, steps, begin, end))
        from_here = np.append(np.cumsum(steps[::-1])[::-1], 0)
        return _ByTime(first, stride, steps, begin, end, np.maximum.accumulate(end), from_here)

    def _times_of(self, snapshot: Snapshot, ids: Ints) -> Ints:
        """Return when each step was published, in nanoseconds since the epoch; `Snapshot.times` in one call."""
        if not len(ids):
            return np.zeros(0, np.int64)
        windows = place(snapshot, ids)
        times: Ints = self._times.rows(snapshot, windows)[0][:, 0] + snapshot.clocks[windows.slot]
        return times
