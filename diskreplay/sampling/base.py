"""What a distribution is, and what it returns."""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.sampling.population import Population


class Draw(NamedTuple):
    """Drawn ids, and what their weights are made of.

    `chances` is the probability of each id, None where all are alike; `size` counts the ids it was drawn from.
    """

    ids: NDArray[np.int64]
    chances: NDArray[np.float64] | None = None
    size: int = 0


class Distribution(Protocol):
    """Which ids are drawn. Not thread-safe unless it says so: a sampler calls it under its lock.

    Drawing and weighing are apart because a batch may be drawn several batches before it is delivered, and a schedule
    for beta counts delivered ones. `weighted` tells whether beta means anything.
    """

    weighted: bool

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty, with replacement."""

    def weigh(self, draw: Draw, beta: float | None) -> NDArray[np.float32] | None:
        """Return the weight of each drawn id, or None where all weigh 1; `beta` None is the distribution's own."""
