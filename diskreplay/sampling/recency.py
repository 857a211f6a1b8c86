"""Newer steps more often."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.sampling.arrivals import Arrivals
from diskreplay.sampling.base import Draw, Owned
from diskreplay.sampling.number_arguments import number
from diskreplay.sampling.population import Population

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Recency(Owned):
    """Draw each id with a probability that halves with every `half_life` newer steps, with replacement.

    P(i) ∝ 2 ** (-age / half_life), where age counts the steps that can be drawn and were published later, by whichever
    writer. It is exact for one lane; between lanes the order is that in which the steps were found or, of those found
    together, the one of their times, to within a thirtieth of the half-life.

    It belongs to one sampler.

    Parameters
    ----------
    half_life : float
        In steps that can be drawn, above 0.

    Raises
    ------
    ValueError
        `half_life` is none of these.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = number("half_life", half_life, above=0.0)
        self._population: Population | None = None
        self._arrivals = Arrivals(self._half_life)

    def __repr__(self) -> str:
        return f"Recency(half_life={self._half_life:g})"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        return Draw(self._followed(population).draw(size, rng))

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        found = np.zeros(len(ids))
        drawable = population.contains(ids)
        if drawable.any():
            found[drawable] = self._followed(population).chances(ids[drawable])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the order in which the newest ids came."""
        return self._arrivals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the order of ids that `state_dict` returned; those that came since are the newest.

        ValueError where it is none.
        """
        self._arrivals = Arrivals.loaded(self._half_life, state)
        self._population = None

    def _followed(self, population: Population) -> Arrivals:
        if self._population is not population:
            # What was loaded is of the population that is drawn from next.
            if self._population is not None:
                self._arrivals = Arrivals(self._half_life)
            self._population = population
        self._arrivals.follow(population)
        return self._arrivals
