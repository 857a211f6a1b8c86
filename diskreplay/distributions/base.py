"""The base class of distributions, the draws that they return, and the uniform distributions."""

import math
import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import Schedule
from diskreplay.distributions.population import Population
from diskreplay.errors import NotEnoughData
from diskreplay.ids import Floats, Ints

# Ids that are drawn for each one that a rank still lacks, over world_size, draw by draw; after these its share is
# listed. A rank with a fair share of the probability gets there with probability e**-32.
_SHARE_OVERDRAWS = (*32 * (1,), 64)


class Draw(NamedTuple):
    """Drawn ids, and what their weights are made of.

    `chances` is the probability of each id, None where all are alike or the distribution is not `weighted`; `size`
    counts the ids it was drawn from; `least` is the smallest chance of any of these; where nothing is weighed, both are
    0. A draw with fewer ids than were asked for comes from a distribution that ends; one without any is its end.
    """

    ids: Ints
    chances: Floats | None = None
    size: int = 0
    least: float = 0.0


class RefreshNeeded(Exception):
    """A draw may be incomplete: refresh, where that is wanted, and draw again. Nothing was drawn."""


class Distribution(ABC):
    """Which ids are drawn. Not thread-safe unless it says so: a sampler calls it under its lock.

    `CONTRIBUTING.md` says how to write one. Only `draw` must be defined; the rest has defaults for a distribution
    without state or priorities. Drawing and weighing are apart because a batch may be drawn several batches before it
    is delivered, and a schedule for beta counts delivered ones.
    """

    # Whether it has priorities: then `weigh` and `update` are called, and beta means something.
    weighted: bool = False
    # The share of the largest error in the priority of a sequence; see `Prioritized`.
    eta: float = 1.0
    # Whether a draw has as many ids as it is asked for, but at its end. If not, it decides itself.
    sized: bool = True
    # Ids that a draw needs at the least.
    least: int = 1
    # Whether what was drawn does not come again by itself. Then what is left of a draw that lost ids stays in its
    # batch, and `delivered` is called.
    gives_once: bool = False
    # Paths of the episode fields that it reads: a sampler refuses it where the store has not all of them.
    episode_fields: tuple[str, ...] = ()
    # Whether there is an end, behind which draws have no ids; then `count_left` is defined.
    ends: bool = False
    # Whether `draw` itself draws of the population's share alone.
    keeps_share: bool = False
    # Of a view's own distribution: tells apart those that draw different ids. One goes on from the state of another
    # with the same key.
    key: str = ""

    # --- drawing -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""

    def draw_share(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share: among themselves they keep their probabilities.

        By rejection, and from the list of them where that finds few. What tells no chances is drawn until it hits.
        NotEnoughData where there is none.
        """
        share = population.share
        if share.world_size == 1 or self.keeps_share:
            return self.draw(population, size, rng)
        ids, chances, missing = [np.zeros(0, np.int64)], [np.zeros(0)], size
        draw, overdraws = Draw(ids[0], None, population.size), iter(_SHARE_OVERDRAWS)
        while missing:
            overdraw = next(overdraws, 0)
            if not overdraw and (self.tells_chances or not population.share_size()):
                more, their_chances = self._draw_listed(population, missing, rng)
                ids.append(more)
                chances.append(their_chances)
                break
            draw = self.draw(population, missing * share.world_size * (overdraw or 1), rng)
            # At random if there are too many: a stratified draw is in order, its first ids are alike.
            mine = np.sort(rng.permutation(np.flatnonzero(share.contains(draw.ids)))[:missing])
            ids.append(draw.ids[mine])
            if draw.chances is not None:
                chances.append(draw.chances[mine])
            missing -= len(mine)
        return draw._replace(ids=np.concatenate(ids), chances=None if draw.chances is None else np.concatenate(chances))

    def _draw_listed(self, population: Population, size: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """Draw ids from the list of those of the population's share; return them, and the chance of each."""
        if not population.share_size():
            raise population.nothing_in_share()
        ids, chances = [], []
        for some in population.ids():
            found = self.chances(population, some)
            ids.append(some[found > 0])
            chances.append(found[found > 0])
        share, mass = np.concatenate(ids), np.concatenate(chances)
        if not len(share):
            rank, world_size = population.share
            raise NotEnoughData(
                f"none of the steps that {self} draws belongs to rank {rank} of {world_size}; 1 is needed, append more"
            )
        at = rng.choice(len(share), size, p=mass / mass.sum())
        return share[at], mass[at]

    def redraw(self, lost: Draw, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw in place of a batch that lost ids before it was delivered; what is left stays where it comes but once.

        NotEnoughData as in `draw_share`.
        """
        left = lost.ids[population.contains(lost.ids)] if self.gives_once else lost.ids[:0]
        if not len(left):
            return self.draw_share(population, size, rng)
        more = self.draw_share(population, size - len(left), rng)
        ids = np.concatenate([left, more.ids])
        return more._replace(ids=ids, chances=self.chances(population, ids) if self.weighted else None)

    def count_left(self, population: Population) -> int:
        """Return how many ids of the population's share later draws have in all, if nothing comes or goes meanwhile."""
        raise NotImplementedError(f"{self} has no end")

    def mixing_error(self) -> str | None:
        """Say why a `Mixture` cannot hold it; None: it can, since it tells the `chances` of its ids."""
        return None if self.tells_chances else f"is {self}, which does not tell the chances of its ids"

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        raise NotImplementedError(f"{self} does not tell the chances of its ids")

    @property
    def tells_chances(self) -> bool:
        """Whether it tells the `chances` of its ids."""
        return type(self).chances is not Distribution.chances

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which `draw_share` draws each id of the population's share, (n,)."""
        found = self.chances(population, ids)
        if population.share.world_size > 1:
            found /= sum(float(self.chances(population, some).sum()) for some in population.ids()) or 1.0
        return found

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities of the population's share, NaN where ids are not drawn by priorities."""
        return math.nan

    def priorities(self, population: Population, ids: Ints) -> Floats:
        """Return the priority |td| + eps of each id, (n,), 0 where it cannot be drawn; of what is `weighted`."""
        raise NotImplementedError(f"{self} has no priorities")

    def left(self, population: Population) -> Ints | None:
        """Return the ids of the population's share that can be drawn, if these are not all of them; None: they are."""
        return None

    # --- what becomes of a draw --------------------------------------------------------------------------------------

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return the weight of each drawn id, or None where all weigh 1.

        `beta` None is the distribution's own; `batches` were delivered before this one. The array becomes the batch's,
        so it is a new one each time.
        """
        return None

    def delivered(self, draw: Draw) -> None:  # noqa: B027  # most keep no count
        """Take note that the batch of a draw was delivered; called where `gives_once`, in the order of the draws."""

    def rewind(self) -> bool:
        """Take back what was drawn and not delivered, to draw it again; tell whether that was done.

        False: draws do not depend on each other, and those that were not delivered stay good.
        """
        return False

    def place(self) -> Any:
        """Return its current state, for `go_back`.

        Called before each draw where it `gives_once`: such a distribution should return it at a cost that does not
        grow with the number of ids.
        """
        return self.state_dict()

    def go_back(self, place: Any) -> None:
        """Go back to a place, as if no id had been drawn and no state loaded since. It may be repeated."""
        if place is not None:
            self.load_state_dict(place)

    def forget(self, population: Population, draw: Draw) -> None:  # noqa: B027  # as `delivered`
        """Take note that the batch of a draw will not be delivered."""

    def accept(self, population: Population, draw: Draw) -> bool:
        """Count as drawn what was drawn ahead when a state was saved, if all of it is still there; tell whether so."""
        return bool(population.contains(draw.ids).all())

    def update(self, population: Population, ids: Ints, errors: Floats) -> int:
        """Set priorities of ids from their errors; return how many ids cannot be drawn. See `Prioritized.update`.

        ValueError where it has no priorities.
        """
        raise ValueError(f"{self} has no priorities to update: draw with Prioritized(...)")

    # --- state -------------------------------------------------------------------------------------------------------

    def claim(self, owner: object) -> None:  # noqa: B027  # most have no state
        """Belong to this owner, where that matters: see `Owned`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return what later draws depend on, beside the population: arrays, numbers, texts. None: nothing."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # as `claim`
        """Go on from what `state_dict` returned; ValueError where this is no such state."""


class OneOwner:
    """What belongs to one sampler, because it holds state of its own."""

    _owner: Any = None  # a weak reference

    def claim(self, owner: object) -> None:
        """Belong to this owner; the same one may claim it again. ValueError where it belongs to another one."""
        if self._owner is not None and self._owner() is not owner:
            name = type(self).__name__
            raise ValueError(f"this {name} holds the state of another sampler: make a new {name} for each sampler")
        self._owner = weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}


class Owned(OneOwner, Distribution):
    """A distribution that belongs to one sampler."""


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


class Distinct(Distribution):
    """Draw ids without replacement within a batch, every set of them with the same probability. Without state."""

    def __repr__(self) -> str:
        return "Distinct()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` different ids; NotEnoughData where the population has fewer."""
        check_enough(population, size)
        return Draw(population.take(rng.choice(population.size, size, replace=False)))


def check_enough(population: Population, size: int) -> None:
    """Raise NotEnoughData where a population has fewer than `size` ids."""
    if population.size < size:
        raise NotEnoughData(f"{population.size} steps are sampleable, and a batch of {size} needs {size}: add more")
