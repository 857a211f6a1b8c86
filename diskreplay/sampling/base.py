"""What a distribution is, and what it returns."""

import weakref
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskreplay.sampling.population import Population
from diskreplay.sampling.schedule import Schedule


class Draw(NamedTuple):
    """Drawn ids, and what their weights are made of.

    `chances` is the probability of each id, None where all are alike; `size` counts the ids it was drawn from; `least`
    is the smallest chance of any of these, 0 where nobody asked for it. A draw with fewer ids than were asked for comes
    from a distribution that ends; one without any is its end.
    """

    ids: NDArray[np.int64]
    chances: NDArray[np.float64] | None = None
    size: int = 0
    least: float = 0.0


class Distribution(Protocol):
    """Which ids are drawn. Not thread-safe unless it says so: a sampler calls it under its lock.

    Drawing and weighing are apart because a batch may be drawn several batches before it is delivered, and a schedule
    for beta counts delivered ones. `weighted` tells whether beta means anything.

    Some have more: `Prioritized` and `Sweep` have state, with `claim`, `state_dict` and `load_state_dict`; a `Sweep`
    deals a rank its share by `draw_share`, where others are thinned out; those that a `Mixture` may weigh tell the
    `chances` of any ids.
    """

    weighted: bool

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty, with replacement."""

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return the weight of each drawn id, or None where all weigh 1.

        `beta` None is the distribution's own; `batches` were delivered before this one. The array becomes the batch's,
        so it is a new one each time.
        """


class Owned:
    """What belongs to one sampler, because it holds state of its own."""

    def __init__(self) -> None:
        self._owner: Any = None

    def claim(self, owner: object) -> None:
        """Belong to this owner; the same one may claim it again.

        Raises
        ------
        ValueError
            It belongs to another one.
        """
        if self._owner is not None and self._owner() is not owner:
            name = type(self).__name__
            raise ValueError(f"this {name} holds the state of another sampler: make a new {name} for each sampler")
        self._owner = weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}
