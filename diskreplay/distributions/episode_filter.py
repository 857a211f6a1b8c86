"""Which episodes a sampler's `where` lets in."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.snapshot import Snapshot
from diskreplay.ids import OPEN, EpisodeTable


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
