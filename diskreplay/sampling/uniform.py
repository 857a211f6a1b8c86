"""Every id with the same probability."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.sampling.base import Distribution, Draw
from diskreplay.sampling.population import Population


class Uniform(Distribution):
    """Draw every id with the same probability, with replacement. Without state: several samplers may share one."""

    def __repr__(self) -> str:
        return "Uniform()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        return Draw(population.random_ids(rng.bit_generator.random_raw() >> 1, size))

    def chances(self, population: Population, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        return population.contains(ids) / max(population.size, 1)

    def share_chances(self, population: Population, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the probability with which `draw_share` draws each id of the population's share, (n,)."""
        return population.contains(ids) / max(population.share_size(), 1)
