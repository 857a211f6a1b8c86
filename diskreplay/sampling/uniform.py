"""Every id with the same probability."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.sampling.base import Draw
from diskreplay.sampling.population import Population


class Uniform:
    """Draw every id with the same probability, with replacement. Without state: several samplers may share one."""

    weighted = False

    def __repr__(self) -> str:
        return "Uniform()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        # 53 random bits each: at a billion ids their probabilities differ by less than 2e-7 of themselves.
        return Draw(population.take_fractions(rng.random(size)))

    def weigh(self, draw: Draw, beta: float | None) -> NDArray[np.float32] | None:
        """Return None: all ids weigh 1."""
        return None
