"""Batches that hold no id twice, and batches that are refused where there are fewer ids than items."""

import numpy as np

from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.population import Population
from diskreplay.distributions.prioritized import Prioritized
from diskreplay.errors import NotEnoughData


class Distinct(Distribution):
    """Draw ids without replacement within a batch, every set of them with the same probability. Without state."""

    def __repr__(self) -> str:
        return "Distinct()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` different ids; NotEnoughData where the population has fewer."""
        check_enough(population, size)
        return Draw(population.take(rng.choice(population.size, size, replace=False)))


class PrioritizedOfEnough(Prioritized):
    """`Prioritized`, for batches of no more items than there are ids."""

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids; NotEnoughData where the population has fewer."""
        check_enough(population, size)
        return super().draw(population, size, rng)


def check_enough(population: Population, size: int) -> None:
    """Raise NotEnoughData where a population has fewer than `size` ids."""
    if population.size < size:
        raise NotEnoughData(f"{population.size} steps are sampleable, and a batch of {size} needs {size}: add more")
