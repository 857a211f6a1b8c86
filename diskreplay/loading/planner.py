"""Which ids make the next batches: drawn in the order of the batches, some of them ahead."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from diskreplay.errors import NotEnoughData
from diskreplay.sampling.admission import Admission
from diskreplay.sampling.base import Distribution, Draw
from diskreplay.sampling.population import Population
from diskreplay.sampling.share import draw_share
from diskreplay.store.episodes import Episode
from diskreplay.store.snapshot import SegmentGone
from diskreplay.views.base import View

# Each failed attempt means that a segment was evicted in the few microseconds since a refresh.
ATTEMPTS = 100


class Plan(NamedTuple):
    """A batch that is drawn and not yet gathered. It keeps its snapshot, and with it what is mapped, alive."""

    snapshot: Any
    draw: Draw


class Planner:
    """Draws batches from a store. Not thread-safe: one sampler, under its lock."""

    def __init__(
        self,
        store: Any,
        view: View,
        distribution: Distribution,
        *,
        seed: Any,
        where: Callable[[Any], bool] | None,
        rank: int,
        world_size: int,
    ) -> None:
        self.distribution = distribution
        self._store = store
        self._view = view
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._admission = Admission(None if where is None else _asking(where))
        self._rank, self._world_size = rank, world_size
        self._queue: deque[Plan] = deque()
        self._population = Population(view.runs, self._admission)

    def aim(self, view: View, distribution: Distribution) -> None:
        """Draw from now on with this view and distribution; what was drawn ahead is dropped."""
        if view is not self._view:
            self._population = Population(view.runs, self._admission)
        self._view, self.distribution = view, distribution
        self._queue.clear()

    def next(self, size: int, ahead: int, refresh: bool) -> Plan:
        """Return the next batch's plan, after drawing so many that `ahead` are left."""
        if not ahead and not self._queue:
            return self.draw(size, refresh)
        while len(self._queue) <= ahead:
            self._queue.append(self.draw(size, refresh))
        return self._queue.popleft()

    def draw(self, size: int, refresh: bool) -> Plan:
        """Draw one batch from the store's snapshot."""
        if refresh:
            self._store.refresh()
        snapshot = self._look()
        if not self._population.size:
            raise NotEnoughData(
                f"the store has {len(snapshot)} steps, 0 of them sampleable as {self._view}; 1 is needed"
            )
        draw = draw_share(self.distribution, self._population, size, self._rng, self._rank, self._world_size)
        return Plan(snapshot, draw)

    def _look(self) -> Any:
        """Bring the population up to the store's snapshot."""
        for _ in range(ATTEMPTS):
            snapshot = self._store.snapshot
            try:
                self._population.refresh(snapshot)
                return snapshot
            except SegmentGone:  # `where` read an episode
                self._store.refresh()
        raise SegmentGone(f"segments were evicted faster than their episodes could be read, {ATTEMPTS} times")


def _asking(where: Callable[[Any], bool]) -> Callable[[Any, int], bool]:
    """Turn a predicate over episodes into one over snapshots and the ids at which episodes begin."""

    def ask(snapshot: Any, first_id: int) -> bool:
        return bool(where(Episode(snapshot, snapshot.find(first_id))))

    return ask
