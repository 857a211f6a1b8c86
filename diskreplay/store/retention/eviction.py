"""Eviction by hand: which episodes a predicate chooses, and how they are hidden."""

from collections.abc import Callable

import numpy as np

from diskreplay.errors import SegmentGone
from diskreplay.ids import POSITION_BITS
from diskreplay.store.reading.episodes import Episode
from diskreplay.store.reading.follower import Follower
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.store.retention.retention import Retention


def evict(follower: Follower, retention: Retention, where: Callable[[Episode], bool]) -> int:
    """Hide the episodes of sealed segments for which ``where`` is true, and return how many visible steps they had.

    They are hidden all at once; segments of which nothing is left are deleted. Nothing changes if ``where`` raises.
    """
    follower.refresh()
    chosen = chosen_episodes(follower.snapshot, where)
    evicted = 0
    if chosen:
        episodes = [(first, steps) for first, (steps, _) in sorted(chosen.items())]
        evicted = sum(chosen[first][1] for first in retention.evict(episodes, lambda: hidden_before(follower)))
    retention.enforce()
    follower.refresh()
    return evicted


def hidden_before(follower: Follower) -> int:
    """Return the time before which limits hide everything now."""
    follower.refresh()
    return follower.snapshot.hidden_before


def chosen_episodes(snapshot: Snapshot, where: Callable[[Episode], bool]) -> dict[int, tuple[int, int]]:
    """Return steps, and visible steps, of the episodes that `evict` would hide, by the id of their first step."""
    log, visible = snapshot.log, snapshot.episodes
    # What a capacity hides moves an episode's start, never its end.
    last = log.first + (log.steps - 1) * log.stride
    order = np.argsort(last)
    chosen = {}
    sealed = np.flatnonzero(snapshot.sealed[(visible.first >> POSITION_BITS) - snapshot.origin])
    ends = visible.first + (visible.steps - 1) * visible.stride
    whole = order[np.searchsorted(last, ends[sealed], sorter=order)]
    for position, at in zip(sealed.tolist(), whole.tolist(), strict=True):
        try:
            if where(Episode(snapshot, position)):
                chosen[int(log.first[at])] = int(log.steps[at]), int(visible.steps[position])
        except SegmentGone:
            continue  # its segment has left meanwhile
    return chosen
