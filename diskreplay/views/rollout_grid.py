"""Which steps of each lane were not given yet, and the oldest of them as a grid of ids."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import CONTINUES, CUT, OBSERVATION_ONLY, OPEN, TERMINATED
from diskreplay.views.base import Ints

if TYPE_CHECKING:
    from diskreplay.views.rollouts import Rollouts


class Positions:
    """How far each lane was given: all its ids below `after`. Immutable; a lane that is not in it is at its start.

    `keys` are lanes, in order, as of `LaneMap`; `after` is the lowest id of each that may be given next.
    """

    def __init__(self, keys: Any = (), after: Any = ()) -> None:
        self.keys: Ints = np.array(keys, np.int64)
        self.after: Ints = np.array(after, np.int64)

    def of(self, keys: Ints) -> Ints:
        """Return the positions of these lanes."""
        if not len(self.keys):
            return np.zeros(len(keys), np.int64)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.after[at], 0)

    def advanced(self, keys: Ints, after: Ints) -> "Positions":
        """Return positions in which these lanes are at least so far."""
        every = np.union1d(self.keys, keys)
        moved = self.of(every)
        np.maximum.at(moved, np.searchsorted(every, keys), after)
        return Positions(every, moved)


class LaneEpisodes(NamedTuple):
    """Episodes in the order of (lane, id): columns of a snapshot's episodes beside the keys of their lanes."""

    key: Ints
    first: Ints
    stride: Ints
    steps: Ints
    obs_rows: Ints
    end: Ints

    @classmethod
    def of(cls, key: Ints, episodes: Any) -> "LaneEpisodes":
        """Take the columns of a table of episodes, in its own order."""
        first, stride, steps, obs_rows, end = (getattr(episodes, name) for name in cls._fields[1:])
        return cls(key, first, stride, steps, obs_rows, end.astype(np.int64))

    def select(self, which: NDArray[Any]) -> "LaneEpisodes":
        """Return the episodes at a mask or positions."""
        return LaneEpisodes(*(column[which] for column in self))

    def with_others(self, others: "LaneEpisodes") -> "LaneEpisodes":
        """Return these and others, in order."""
        both = LaneEpisodes(*(np.concatenate(columns) for columns in zip(self, others, strict=True)))
        return both.select(np.lexsort((both.first, both.key)))


def usable_steps(episodes: LaneEpisodes, view: "Rollouts") -> Ints:
    """Return how many steps of each episode, from its first on, a rollout may hold.

    All of them, but for the last step of a lane while what it is bootstrapped with may yet come (a writer that closes
    takes it away with the lane), and the last one of an episode that nothing is known behind, where that is needed.
    """
    key, end, steps = episodes.key, episodes.end, episodes.steps
    if view.next_value is not None and view.value_fn is None:
        return steps
    has_next = np.append(key[1:] == key[:-1], False)
    continued = np.append(end[1:] & CONTINUES != 0, False) & has_next
    still_open = (end & OPEN != 0) & ~has_next
    if view.value_fn is None:
        # The step behind a cut tells whether it was one for length.
        return steps - (still_open | ((end & CUT != 0) & ~has_next))
    known = (end & (TERMINATED | OBSERVATION_ONLY) != 0) | continued
    if view.next_value is not None:
        known |= ~still_open
    # Of an open episode, `obs_rows` is one more than `steps` where the newest step came with its next observation.
    return np.where(still_open, np.maximum(episodes.obs_rows - 1, 0), steps - ~known)


class Grid(NamedTuple):
    """The oldest steps: `ids` is (num_steps, columns), `keys` says the lane of each column.

    `short` are growing lanes with too few steps, and `counts` how many those have.
    """

    ids: Ints
    keys: Ints
    short: Ints
    counts: Ints


def oldest(
    episodes: LaneEpisodes, usable: Ints, growing: Ints, positions: Positions, least: Ints, num_steps: int
) -> Grid:
    """Take the oldest `num_steps` steps of every lane that has so many, from its position on.

    `least` is the least id that is not hidden in the lane of each episode, in its segment.
    """
    key, first, stride = episodes[:3]
    start = np.maximum(positions.of(key), least)
    skipped = np.clip(-((first - start) // stride), 0, usable)
    count = usable - skipped
    lanes, begin = np.unique(key, return_index=True)
    ends = np.cumsum(count)
    before = ends[begin] - count[begin]
    total = np.diff(np.append(before, ends[-1:]))
    full = total >= num_steps
    wanted = before[full] + np.arange(num_steps)[:, None]
    episode = np.searchsorted(ends, wanted, side="right")
    ids = first[episode] + (skipped[episode] + wanted - (ends[episode] - count[episode])) * stride[episode]
    has = np.zeros(len(growing), np.int64)
    _, at, of = np.intersect1d(growing, lanes, assume_unique=True, return_indices=True)
    has[at] = total[of]
    short = has < num_steps
    return Grid(ids, lanes[full], growing[short], has[short])
