"""The protocol of snapshots, so that populations know nothing of stores, and a filter of their episodes."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import OPEN, EpisodeTable, Ints
from diskreplay.kernels.runs import Visible


class Snapshot(Protocol):
    """A frozen set of steps; see `reading.snapshot.Snapshot`."""

    reached: int
    record: Ints  # what kernels read of it; see `kernels.frozen`
    log: EpisodeTable  # the ended episodes in the order in which they were found
    oldest: Ints  # the first row of each lane that is not hidden

    def __len__(self) -> int:
        """Return the number of visible steps."""

    @property
    def generation(self) -> int:
        """Changes when positions in ``log`` do."""

    @property
    def origin(self) -> int:
        """The number of the first segment."""

    @property
    def lanes(self) -> Ints:
        """The lanes of each segment, 0 where it is gone."""

    @property
    def segments(self) -> object:
        """The same object in all snapshots between which no segment came, was sealed or went."""

    @property
    def open(self) -> EpisodeTable:
        """The other episodes."""

    @property
    def visible(self) -> Visible:
        """What is hidden of each lane."""

    def least_ids(self, ids: Ints) -> Ints:
        """Return the least id that is not hidden in the lane of each of these."""

    def holds(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids are those of visible steps."""

    @property
    def has_priorities(self) -> bool:
        """Whether any step may have been appended with a priority."""

    def times(self, ids: Ints) -> Ints:
        """Return when each step was published."""

    def episode_values(self, leaf: str, ids: Ints) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the value of an episode field for the ended episode of each step, and which have one."""


class EpisodeFilter:
    """Asks about episodes: once about an ended one, once a snapshot about an open one.

    What it was told outlives the population: the ids of steps are stable, so a sampler keeps it when its view changes.
    `ask(snapshot, first_id)` tells whether the episode that begins at an id counts; None: all do, and ``asks`` is
    False.
    """

    def __init__(self, ask: Callable[[Any, int], bool] | None = None) -> None:
        self._ask, self.asks = ask, ask is not None
        self._ended: dict[int, bool] = {}
        self._open: dict[int, bool] = {}
        self._snapshot: Snapshot | None = None  # that of the answers about open ones

    def admit(self, snapshot: Snapshot, episodes: EpisodeTable) -> EpisodeTable:
        """Keep the episodes that count; those that are hidden whole are dropped unasked."""
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
        """Forget the answers for episodes that are not among these."""
        alive = set(first_ids.tolist())
        self._ended = {first: answer for first, answer in self._ended.items() if first in alive}
