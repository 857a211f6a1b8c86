"""The protocol of snapshots that distributions read, and a filter of episodes."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import OPEN, EpisodeTable, Ints
from diskreplay.kernels.runs import Visible


class Snapshot(Protocol):
    """The attributes and methods of `reading.snapshot.Snapshot` that distributions use."""

    # A time, in nanoseconds since 1970. Episodes that began at this time or later have no hidden steps. Hidden steps
    # are beyond the limits of the store.
    reached: int
    record: Ints  # See `kernels.frozen`.
    log: EpisodeTable  # The ended episodes in discovery order.
    oldest: Ints  # The first visible row of each lane.

    def __len__(self) -> int:
        """Return the number of visible steps."""

    @property
    def generation(self) -> int:
        """A number that changes when episodes in `log` move to other positions."""

    @property
    def origin(self) -> int:
        """The number of the first segment."""

    @property
    def lanes(self) -> Ints:
        """The number of lanes of each segment, 0 for a missing segment."""

    @property
    def segments(self) -> object:
        """An object that is replaced when a segment is added, sealed or removed."""

    @property
    def open(self) -> EpisodeTable: ...

    @property
    def visible(self) -> Visible: ...

    def least_ids(self, ids: Ints) -> Ints:
        """Return, for each id, the smallest visible id of its lane; see `Visible.least_ids`."""

    def holds(self, ids: Ints) -> NDArray[np.bool_]:
        """Return which ids belong to visible steps, (n,) bool."""

    @property
    def has_priorities(self) -> bool:
        """Whether any step may have been appended with a priority."""

    def times(self, ids: Ints) -> Ints:
        """Return the time of each step's publication, in nanoseconds since the epoch."""

    def episode_values(self, leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the value of an episode field for each step's ended episode, and whether the episode has a value."""


class EpisodeFilter:
    """A filter of episodes; it calls `ask` once for an ended episode, and once per snapshot for an open episode.

    `ask(snapshot, first_id)` returns whether the episode with the first id `first_id` is admitted. With `ask` None, all
    episodes are admitted, and `asks` is False. A sampler keeps the filter when the sampler's view changes:
    ids are stable, so the answers stay valid.
    """

    def __init__(self, ask: Callable[[Any, int], bool] | None = None) -> None:
        self._ask, self.asks = ask, ask is not None
        self._ended: dict[int, bool] = {}
        self._open: dict[int, bool] = {}
        self._snapshot: Snapshot | None = None  # the snapshot to which the answers in `_open` belong

    def admit(self, snapshot: Snapshot, episodes: EpisodeTable) -> EpisodeTable:
        """Return the admitted episodes; episodes without visible steps are dropped without a call of `ask`."""
        if self._ask is None or not len(episodes):
            return episodes
        if snapshot is not self._snapshot:
            self._snapshot, self._open = snapshot, {}
        last = episodes.first + (episodes.steps - 1) * episodes.stride
        admitted = np.zeros(len(episodes), bool)
        for i in np.flatnonzero(last >= snapshot.least_ids(last)):
            first = int(episodes.first[i])
            known = self._open if episodes.end[i] & OPEN else self._ended
            if first not in known:
                known[first] = bool(self._ask(snapshot, first))
            admitted[i] = known[first]
        return episodes.select(admitted)

    def keep_only(self, first_ids: NDArray[np.int64]) -> None:
        alive = set(first_ids.tolist())
        self._ended = {first: answer for first, answer in self._ended.items() if first in alive}
