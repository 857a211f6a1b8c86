"""Draws of another distribution, of which some ids are left out."""

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.population import Population
from diskreplay.distributions.schedule import Schedule
from diskreplay.errors import NotEnoughData
from diskreplay.ids import Floats, Ints

# How many ids are drawn for one that is missing, attempt by attempt, before those that are left are listed. Where more
# than a hundredth of all is left, a batch is nearly always full by then.
_OVERDRAWS = (1, 8, 64)
_NONE: Ints = np.zeros(0, np.int64)


class Restricted(Distribution):
    """Draw from another distribution, but only some ids, or each only some times more. Not thread-safe.

    Among the ids that are left, each keeps its probability in proportion to the others'. A batch is full, or it is not
    drawn at all. The draws of the other distribution must not depend on what was drawn before.
    """

    keeps_share = True

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self.weighted, self.eta = distribution.weighted, distribution.eta
        self.episode_fields = distribution.episode_fields

    @abstractmethod
    def allowed(self, ids: Ints) -> Ints:
        """Return how many times more each id may be drawn."""

    @abstractmethod
    def left(self, population: Population) -> Ints:
        """Return the ids of the share that may be drawn, in order."""

    @abstractmethod
    def why_not(self, population: Population, times: int, size: int) -> str:
        """Say why a batch of this size is not drawn, where those that are left can be drawn so many times."""

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share; NotEnoughData, and no draw, where there are not so many."""
        ids, chances, draw = _NONE, np.zeros(0), Draw(_NONE)
        for overdraw in _OVERDRAWS:
            draw = self._distribution.draw_share(population, (size - len(ids)) * overdraw, rng)
            allowed = self.allowed(draw.ids) - named(draw.ids, ids)
            good = np.flatnonzero(allowed > 0)
            if len(good) > size - len(ids):
                # At random: a stratified draw is in order, its first ids are alike.
                good = rng.permutation(good)
            # One after the other until there are enough: what is left out behind that must not count.
            is_left = _earlier(draw.ids[good]) < allowed[good]
            good = np.sort(good[is_left][: size - len(ids)])
            ids = np.append(ids, draw.ids[good])
            if draw.chances is not None:
                chances = np.append(chances, draw.chances[good])
            if len(ids) == size:
                break
        else:
            more, their_chances = self._draw_left(population, ids, size, rng)
            ids, chances = np.append(ids, more), np.append(chances, their_chances)
        return draw._replace(ids=ids, chances=None if draw.chances is None else chances)

    def _draw_left(
        self, population: Population, drawn: Ints, size: int, rng: np.random.Generator
    ) -> tuple[Ints, Floats]:
        """Draw what a batch lacks, where most ids may not be drawn; return ids and their chances."""
        left = self.left(population)
        mass = self._distribution.chances(population, left)
        left, mass = left[mass > 0], mass[mass > 0]
        allowed = self.allowed(left) - named(left, drawn)
        if (times := len(drawn) + int(allowed.sum())) < size:
            raise NotEnoughData(self.why_not(population, times, size))
        chosen, missing = _NONE, size - len(drawn)
        while len(chosen) < missing:
            totals = np.cumsum(np.where(allowed > 0, mass, 0.0))
            at = np.searchsorted(totals, rng.random(missing - len(chosen)) * totals[-1], side="right")
            at = np.minimum(at, len(left) - 1)
            at = at[_earlier(at) < allowed[at]]
            np.subtract.at(allowed, at, 1)
            chosen = np.append(chosen, at)
        return left[chosen], mass[chosen]

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return the weight of each drawn id, as the distribution does."""
        return self._distribution.weigh(draw, beta, batches)


def share_of(population: Population) -> str:
    """Return words for the population's share, none where that is all."""
    rank, world_size = population.share
    return "" if world_size == 1 else f" of rank {rank} of {world_size}"


def named(ids: Ints, among: Ints) -> Ints:
    """Return how often each id is among others."""
    ordered = np.sort(among)
    return np.searchsorted(ordered, ids, side="right") - np.searchsorted(ordered, ids, side="left")


def _earlier(ids: Ints) -> Ints:
    """Return how often each id is named before, in the same array."""
    order = np.argsort(ids, kind="stable")
    ordered, numbers = ids[order], np.arange(len(ids))
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ids)]
    earlier = np.empty(len(ids), np.int64)
    earlier[order] = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    return earlier
