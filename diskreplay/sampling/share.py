"""Which ids are one rank's among several."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import NotEnoughData
from diskreplay.ids import mixed
from diskreplay.sampling.population import Population


def belongs(ids: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.bool_]:
    """Tell which ids are the rank's: by a hash, so that shares are even whatever lanes and windows the ids are of.

    No two ranks share an id, each has one, and it stays there while the store grows.
    """
    mine: NDArray[np.bool_] = mixed(ids.astype(np.uint64)) % np.uint64(world_size) == rank
    return mine


def has_any(population: Population, rank: int, world_size: int, block: int = 1 << 16) -> bool:
    """Search the whole population for an id of the rank."""
    for start in range(0, population.size, block):
        positions = np.arange(start, min(start + block, population.size))
        if belongs(population.take(positions), rank, world_size).any():
            return True
    return False


def nothing_of(population: Population, rank: int, world_size: int) -> NotEnoughData:
    """Return the error that none of the ids is the rank's."""
    return NotEnoughData(
        f"none of the {population.size} sampleable steps belongs to rank {rank} of {world_size}; 1 is needed, append "
        "more"
    )
