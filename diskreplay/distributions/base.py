"""The base class of distributions, the draws that they return, and the uniform distributions."""

import math
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.number_arguments import Schedule
from diskreplay.distributions.population import Population
from diskreplay.errors import NotEnoughData
from diskreplay.ids import Floats, Ints

# Attempt i of `draw_share` draws _SHARE_OVERDRAWS[i] · world_size ids for each missing id. After the last attempt, the
# missing ids are drawn from a list of the rank's ids. If the rank's ids have 1 / world_size of the total probability,
# the list is needed with a probability below e**-32.
_SHARE_OVERDRAWS = (*32 * (1,), 64)


@dataclass(slots=True, eq=False)
class Draw:
    """Drawn ids, and the numbers from which their weights are computed.

    `chances` is the probability of each id; None if all probabilities are equal, or if the distribution is not
    `weighted`. `size` is the number of ids that could be drawn, and `least` is the smallest probability of these ids.
    Only a `weighted` distribution has to set `chances`, `size` and `least`. A draw of a `sized` distribution has fewer
    ids than requested only if the distribution has ended; see `Distribution.ends`. After a distribution has ended, its
    draws have no ids.
    """

    ids: Ints
    chances: Floats | None = None
    size: int = 0
    least: float = 0.0


class RefreshNeeded(Exception):
    """Raised by a draw that needs a newer snapshot; the draw has not drawn anything yet."""


class Distribution(ABC):
    """A distribution over ids.

    A sampler calls a distribution under the sampler's lock: a distribution is not thread-safe unless its class says so.
    `CONTRIBUTING.md` says how to write a distribution. Only `draw` must be defined; the other methods have defaults for
    a distribution without state and priorities. `draw` and `weigh` are separate methods, because a batch may be drawn
    long before its delivery, while a schedule for beta counts the delivered batches.
    """

    # Whether the distribution has priorities. If True, `weigh` and `update` are called, and beta is used.
    weighted: bool = False
    # The weight of the largest |td| in the priority of a sequence, see `Prioritized`. The mean |td| has the weight
    # 1 - eta.
    eta: float = 1.0
    # Whether a draw has exactly `size` ids, until the distribution ends. If False, the distribution itself chooses the
    # number of ids.
    sized: bool = True
    # A draw needs a population with at least this number of ids.
    least: int = 1
    # Whether a drawn id is used up, as in a pass over all ids. If True, `delivered` is called, and a batch that loses
    # ids before its delivery keeps its other ids.
    gives_once: bool = False
    # Paths of the episode fields that the distribution reads. A sampler refuses the distribution if the store lacks one
    # of these fields.
    episode_fields: tuple[str, ...] = ()
    # Whether the distribution ends: from some time on, draws have no ids. If True, the distribution must define
    # `count_left`.
    ends: bool = False
    # Whether `draw` draws only ids of the population's share, so that `draw_share` need not reject any ids.
    keeps_share: bool = False
    # The key of the distribution's state in the saved state of a sampler, if a view has made the distribution. Another
    # distribution with the same key can resume from this state.
    key: str = ""

    # --- drawing -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""

    def draw_share(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share, with the same ratios of probabilities as in `draw`.

        Draws from all ids of the population, and rejects the ids of other ranks. If too few ids remain, draws the
        missing ids from a list of the share's ids. If the distribution does not define `chances`, it draws and rejects
        until no id is missing. Raises NotEnoughData if the share is empty.
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
            # Excess ids are left out at random, because the first ids of a stratified draw are similar to each other.
            mine = np.sort(rng.permutation(np.flatnonzero(share.contains(draw.ids)))[:missing])
            ids.append(draw.ids[mine])
            if draw.chances is not None:
                chances.append(draw.chances[mine])
            missing -= len(mine)
        return replace(draw, ids=np.concatenate(ids), chances=None if draw.chances is None else np.concatenate(chances))

    def _draw_listed(self, population: Population, size: int, rng: np.random.Generator) -> tuple[Ints, Floats]:
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
        """Return a draw of `size` ids in place of the draw `lost`: ids of `lost` were evicted before its delivery.

        If `gives_once` is True, the result contains the ids of `lost` that were not evicted. Raises NotEnoughData if
        the share is empty.
        """
        left = lost.ids[population.contains(lost.ids)] if self.gives_once else lost.ids[:0]
        if not len(left):
            return self.draw_share(population, size, rng)
        more = self.draw_share(population, size - len(left), rng)
        ids = np.concatenate([left, more.ids])
        return replace(more, ids=ids, chances=self.chances(population, ids) if self.weighted else None)

    def count_left(self, population: Population) -> int:
        """Return the number of ids that are left to draw from the rank's share, if the population does not change."""
        raise NotImplementedError(f"{self} does not define count_left, the number of ids in later draws")

    def mixing_error(self) -> str | None:
        """Return why a `Mixture` cannot contain the distribution, or None if it can.

        By default, a mixture can contain any distribution that defines `chances`.
        """
        return None if self.tells_chances else f"is {self}, which does not define chances, the probabilities of ids"

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        raise NotImplementedError(f"{self} does not define chances, the probabilities of its ids")

    @property
    def tells_chances(self) -> bool:
        """Whether the distribution defines `chances`."""
        return type(self).chances is not Distribution.chances

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability that `draw_share` draws each id, (n,); all ids must be in the population's share."""
        found = self.chances(population, ids)
        if population.share.world_size > 1:
            found /= sum(float(self.chances(population, some).sum()) for some in population.ids()) or 1.0
        return found

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities of the population's share, NaN for a distribution without priorities."""
        return math.nan

    def priorities(self, population: Population, ids: Ints) -> Floats:
        """Return the priority |td| + eps of each id, (n,); 0 for an id that cannot be drawn.

        Only `weighted` distributions have priorities.
        """
        raise NotImplementedError(f"{self} has no priorities")

    def drawable(self, population: Population) -> Ints | None:
        """Return the ids of the population's share that can be drawn; None if all ids of the share can be drawn."""
        return None

    # --- after a draw ---------------------------------------------------------------------------------------------

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return the weight of each drawn id, or None if all weights are 1.

        With `beta` None, the distribution's own beta is used. `batches` is the number of batches that were delivered
        before this batch. The returned array must be a new array, because it becomes part of the batch.
        """
        return None

    def delivered(self, draw: Draw) -> None:  # noqa: B027  # most keep no count
        """Record that the batch of a draw was delivered.

        Samplers call this only if `gives_once` is True, in the order of the draws.
        """

    def rewind(self) -> bool:
        """Take back all draws that were not delivered, so that they are drawn again; return whether this was done.

        The default does nothing and returns False: it is for draws that do not depend on each other.
        """
        return False

    def place(self) -> Any:
        """Return the current state, for `go_back`.

        If `gives_once` is True, a sampler calls this before each draw. So the time of a call should not grow with the
        number of ids.
        """
        return self.state_dict()

    def go_back(self, place: Any) -> None:
        """Restore a state that `place` returned, as if nothing had been drawn or loaded since `place` was called.

        The same state can be restored several times.
        """
        if place is not None:
            self.load_state_dict(place)

    def forget(self, population: Population, draw: Draw) -> None:  # noqa: B027  # most keep no count
        """Record that the batch of a draw will not be delivered."""

    def accept(self, population: Population, draw: Draw) -> bool:
        """Return whether all ids of a draw from a saved state can still be drawn; if they can, record the draw."""
        return bool(population.contains(draw.ids).all())

    def update(self, population: Population, ids: Ints, errors: Floats) -> int:
        """Set the priorities of ids from their errors; return the number of ids that cannot be drawn.

        See `Prioritized.update`. Raises ValueError for a distribution without priorities.
        """
        raise ValueError(f"{self} has no priorities to update: draw with Prioritized(...)")

    # --- state -------------------------------------------------------------------------------------------------------

    def claim(self, owner: object) -> None:  # noqa: B027  # most have no state
        """Bind the distribution to the sampler `owner`, if it can belong to only one sampler; see `Owned`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state on which later draws depend, as arrays, numbers and texts; None if there is no state."""
        return None

    def load_state_dict(self, state: Any) -> None:  # noqa: B027  # most have no state
        """Resume from a `state_dict`; ValueError if `state` is invalid."""


class OneOwner:
    """A base class of objects with the state of one sampler; several samplers cannot share such an object."""

    _owner: Any = None  # a weak reference

    def claim(self, owner: object) -> None:
        """Bind the object to `owner`, possibly again; ValueError if it is bound to another object."""
        if self._owner is not None and self._owner() is not owner:
            name = type(self).__name__
            raise ValueError(f"this {name} holds the state of another sampler: make a new {name} for each sampler")
        self._owner = weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": None}


class Owned(OneOwner, Distribution):
    """A distribution that belongs to one sampler."""


class Even(Distribution):
    """A base class of distributions that draw all ids equally often in the long run."""

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        return population.contains(ids) / max(population.size, 1)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability that `draw_share` draws each id, (n,); all ids must be in the population's share."""
        return population.contains(ids) / max(population.share_size(), 1)


class Uniform(Even):
    """Draw every id with the same probability, with replacement.

    A `Uniform` has no state, so several samplers may share it.

    Examples
    --------
    >>> batch = dr.Sampler("cartpole.replay", dr.Transitions(), dr.Uniform(), batch_size=4).sample()
    >>> batch.weight
    tensor([1., 1., 1., 1.])
    """

    def __repr__(self) -> str:
        return "Uniform()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        return Draw(population.random_ids(rng.bit_generator.random_raw() >> 1, size))


class Distinct(Distribution):
    """Draw ids without replacement within a batch; every set of ids has the same probability."""

    def __repr__(self) -> str:
        return "Distinct()"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        check_enough(population, size)
        return Draw(population.take(rng.choice(population.size, size, replace=False)))


def check_enough(population: Population, size: int) -> None:
    if population.size < size:
        raise NotEnoughData(f"{population.size} steps are sampleable, and a batch of {size} needs {size}: add more")
