"""Every id with the same probability."""

import numpy as np

from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.population import Population
from diskreplay.ids import Floats, Ints


class Even(Distribution):
    """What draws every id as often as any other, in the long run."""

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        return population.contains(ids) / max(population.size, 1)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which `draw_share` draws each id of the population's share, (n,)."""
        return population.contains(ids) / max(population.share_size(), 1)


class Uniform(Even):
    """Draw every id with the same probability, with replacement. Without state: several samplers may share one."""

    def __repr__(self) -> str:
        return "Uniform()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        return Draw(population.random_ids(rng.bit_generator.random_raw() >> 1, size))
