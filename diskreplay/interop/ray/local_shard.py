"""A shard on the trainer's own node: its store, read in the trainer's process."""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.interop.ray.batch_form import Form
from diskreplay.interop.ray.messages import Part, Target
from diskreplay.interop.ray.shared_sampler import SharedSampler


class LocalShard:
    """Reads a store without its actor. Priorities are the actor's, for all trainers: with them, ids come from there.

    `draws` tells whether ids are drawn here: uniformly, nobody has to be asked.
    """

    def __init__(self, store: dr.Store, target: Target, seed: int) -> None:
        self._store, self._seed = store, seed
        self.draws, self._reading = self._read_by(target)

    @classmethod
    def opened(cls, path: str, uuid: str, target: Target, seed: int) -> Self | None:
        """Open the store at a path; None where there is not the one of this UUID."""
        try:
            store = dr.open(path)
        except (OSError, dr.ReplayError):
            return None
        if store.uuid != uuid:
            store.close()
            return None
        return cls(store, target, seed)

    def set_target(self, target: Target) -> None:
        """Read by another view, or draw by another distribution."""
        self._reading.close()
        self.draws, self._reading = self._read_by(target)

    def _read_by(self, target: Target) -> tuple[bool, SharedSampler]:
        draws = not target.distribution.weighted
        uniform = target._replace(distribution=dr.Uniform(), where=target.where if draws else None)
        return draws, SharedSampler(self._store, uniform, run="", seed=self._seed)

    def mass(self) -> tuple[float, int]:
        """Return how many ids can be drawn, as mass and population."""
        return self._reading.mass()

    def draw(self, size: int) -> Part:
        """Draw a part; NotEnoughData where there is nothing to draw from."""
        return self._reading.draw([size], ids_only=False)

    def gather(self, ids: NDArray[np.int64]) -> tuple[Form, list[NDArray[Any]]]:
        """Return the fields of these ids; InvalidIndex or SegmentGone where one was evicted meanwhile."""
        return self._reading.gather(ids)

    def close(self) -> None:
        """Close the store."""
        self._reading.close()
        self._store.close()
