"""Values of episode fields, read for many episodes at once."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_COLUMNS, EPISODE_VALUES, FIRST, EpisodeTable, Ints, is_end_with_values, locate
from diskreplay.kernels.runs import lane_keys

if TYPE_CHECKING:
    from diskreplay.store.reading.snapshot import Snapshot

# Of the newest ended episodes: most that are asked for have just ended. Then so many times more.
_NEWEST, _MORE = 1024, 8


def ended_episodes(snapshot: "Snapshot", ids: Ints) -> EpisodeTable:
    """Return the ended episode of each of these steps; a line of zeros where it is open or not there any more."""
    found, missing, count = np.zeros((len(ids), EPISODE_COLUMNS), np.int64), np.arange(len(ids)), _NEWEST
    keys = lane_keys(ids, snapshot.origin, snapshot.lanes)
    while len(missing) and len(snapshot.log):
        some = snapshot.log.select(slice(max(0, len(snapshot.log) - count), None))
        begin = lane_keys(some.first, snapshot.origin, snapshot.lanes)
        order = np.argsort(begin)
        at = np.searchsorted(begin[order], keys[missing], "right") - 1
        episode = order[at]
        inside = (at >= 0) & (keys[missing] >= 0) & (keys[missing] - begin[episode] < some.steps[episode])
        found[missing[inside]] = some.lines[episode[inside]]
        missing = missing[~inside]
        if count >= len(snapshot.log):
            break
        count *= _MORE
    return EpisodeTable(found)


def episode_values(snapshot: "Snapshot", leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a value of the episode of each of these steps, and which have one; see `Snapshot.episode_values`."""
    episodes = ended_episodes(snapshot, ids)
    _, slots, _, lane, row = locate(episodes.first, snapshot.origin, snapshot.lanes)
    given = (episodes.end & EPISODE_VALUES) != 0
    slots, lane, last = slots[given], lane[given], (row + episodes.steps)[given]
    behind = np.flatnonzero(last < snapshot.committed_rows(slots, lane))
    flags = np.full(len(last), FIRST, np.uint8)
    flags[behind] = snapshot.leaf("done").values(slots[behind], lane[behind], last[behind])
    last -= ~is_end_with_values(flags)
    values = snapshot.leaf(leaf)
    found = np.zeros((len(ids), *values.shape), values.dtype)
    found[given] = values.values(slots, lane, last)
    return found, given
