"""Reading the newest steps of all lanes of a store's one writer."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from diskreplay.loading.batch import Batch
from diskreplay.loading.sampler import Sampler
from diskreplay.sampling.base import Draw, RefreshNeeded
from diskreplay.sampling.population import Population
from diskreplay.store.reading.lanes import LaneMap
from diskreplay.store.store import Store
from diskreplay.views.rollout_cursor import RolloutCursor
from diskreplay.views.rollouts import Rollouts
from diskreplay.views.transitions import Transitions

# All of a batch of rollouts but what is estimated from it.
DERIVED = ("reward", "terminated", "truncated", "index")


class RolloutReading:
    """Gathers what was appended since the last `skip`, as often as it is asked to. Not thread-safe.

    Steps that are in the store already count as skipped. It gets one writer, whose lanes step together. Batches are
    delivered on the device.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        self._store, self._device = store, device
        self._samplers: dict[int, Sampler] = {}
        lanes = LaneMap()
        lanes.update(store.snapshot)
        before = np.unique(lanes.key[lanes.key >= 0])
        self._seen: Any = {"lanes": before, "next_ids": np.full(len(before), np.iinfo(np.int64).max)}

    def gather(self, steps: int) -> Batch:
        """Return the oldest `steps` steps of every lane, (steps, lanes, ...), without advantages."""
        if steps not in self._samplers:
            extra = list(self._store.schema.extra)
            fields = ("obs", "action", *DERIVED, *extra)
            self._samplers.clear()
            self._samplers[steps] = Sampler(self._store, _view(steps), fields=fields, device=self._device)
        return self._samplers[steps].gather(self._planned(steps)[1].ids)

    def next_obs(self, ids: torch.Tensor) -> Any:
        """Return what these steps led to, on the device; InvalidIndex where one did not come with it."""
        sampler = Sampler(self._store, Transitions(n_step=1), fields=("next_obs",), device=self._device)
        return sampler.gather(ids)["next_obs"]

    def skip(self, steps: int) -> None:
        """Pass over the oldest `steps` steps of every lane."""
        cursor, draw = self._planned(steps)
        cursor.delivered(draw)
        self._seen = cursor.state_dict()

    def _planned(self, steps: int) -> tuple[RolloutCursor, Draw]:
        population, cursor = Population(_view(steps)), RolloutCursor(_view(steps))
        cursor.load_state_dict(self._seen)
        while True:
            self._store.refresh()
            population.refresh(self._store.snapshot)
            with suppress(RefreshNeeded):
                return cursor, cursor.draw(population, 0, np.random.default_rng(0))


def _view(steps: int) -> Rollouts:
    # With next_value named, the newest step of a lane counts before it is known what it led to.
    return Rollouts(num_steps=steps, value="value", next_value="value")
