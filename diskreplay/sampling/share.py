"""One trainer's share of a distribution: the ids that belong to its rank."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import NotEnoughData
from diskreplay.ids import mixed
from diskreplay.sampling.base import Distribution, Draw
from diskreplay.sampling.population import Population

# Draws without one hit, each of at least world_size ids, after which the population is searched for a hit. A rank with
# its fair share of ids gets there with probability e**-32.
FRUITLESS_DRAWS = 32


def belongs(ids: NDArray[np.int64], rank: int, world_size: int) -> NDArray[np.bool_]:
    """Tell which ids are the rank's: by a hash, so that shares are even whatever lanes and windows the ids are of.

    No two ranks share an id, each has one, and it stays there while the store grows.
    """
    mine: NDArray[np.bool_] = mixed(ids.astype(np.uint64)) % np.uint64(world_size) == rank
    return mine


def draw_share(
    distribution: Distribution,
    population: Population,
    size: int,
    rng: np.random.Generator,
    rank: int = 0,
    world_size: int = 1,
) -> Draw:
    """Draw `size` of the rank's ids, by rejection: among themselves they keep the probabilities they had.

    A distribution that knows better how to share has a `draw_share` of its own.

    Raises
    ------
    NotEnoughData
        The population holds no id of the rank.
    """
    if world_size == 1:
        return distribution.draw(population, size, rng)
    if hasattr(distribution, "draw_share"):
        shared: Draw = distribution.draw_share(population, size, rng, rank, world_size)
        return shared
    ids, chances, missing, fruitless = [], [], size, 0
    while missing:
        draw = distribution.draw(population, missing * world_size, rng)
        # At random if there are too many: a stratified draw is in order, its first ids are alike.
        mine = np.sort(rng.permutation(np.flatnonzero(belongs(draw.ids, rank, world_size)))[:missing])
        ids.append(draw.ids[mine])
        if draw.chances is not None:
            chances.append(draw.chances[mine])
        missing -= len(mine)
        fruitless = 0 if len(mine) else fruitless + 1
        if fruitless == FRUITLESS_DRAWS and not _has_any(population, rank, world_size):
            raise NotEnoughData(
                f"none of the {population.size} sampleable steps belongs to rank {rank} of {world_size}; "
                "1 is needed, append more"
            )
    return Draw(np.concatenate(ids), np.concatenate(chances) if chances else None, draw.size, draw.least)


def _has_any(population: Population, rank: int, world_size: int, block: int = 1 << 16) -> bool:
    """Search the whole population for an id of the rank."""
    for start in range(0, population.size, block):
        positions = np.arange(start, min(start + block, population.size))
        if belongs(population.take(positions), rank, world_size).any():
            return True
    return False
