"""Eviction by hand: select episodes by a predicate, and evict them."""

from collections.abc import Callable

import numpy as np

from diskreplay.errors import SegmentGone
from diskreplay.ids import POSITION_BITS
from diskreplay.reading.episodes import Episode
from diskreplay.reading.follower import Follower
from diskreplay.reading.snapshot import Snapshot
from diskreplay.retention.retention import Retention


def evict(follower: Follower, retention: Retention, where: Callable[[Episode], bool]) -> int:
    """Evict the episodes of sealed segments for which ``where`` is true, and return the number of their steps.

    The episodes disappear all at once. A segment is deleted when all its steps are evicted or hidden. If ``where``
    raises, nothing changes.
    """
    follower.refresh()
    chosen = chosen_episodes(follower.snapshot, where)
    evicted = 0
    if chosen:
        evicted = sum(chosen[first] for first in retention.evict([*chosen.items()], lambda: hidden_before(follower)))
    retention.enforce()
    follower.refresh()
    return evicted


def hidden_before(follower: Follower) -> int:
    """Refresh and return a time in nanoseconds since the epoch: every hidden step was published before this time."""
    follower.refresh()
    return follower.snapshot.hidden_before


def chosen_episodes(snapshot: Snapshot, where: Callable[[Episode], bool]) -> dict[int, int]:
    """Return the episodes that `evict` would evict, as {id of the first step: number of steps}."""
    episodes, chosen = snapshot.episodes, {}
    for position in np.flatnonzero(snapshot.sealed[(episodes.first >> POSITION_BITS) - snapshot.origin]).tolist():
        try:
            if where(Episode(snapshot, position)):
                chosen[int(episodes.first[position])] = int(episodes.steps[position])
        except SegmentGone:
            continue  # the segment of the episode was evicted during the call
    return chosen
