"""A mixture of several distributions."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.number_arguments import Schedule, number
from diskreplay.distributions.population import Population
from diskreplay.ids import Floats, Ints


class Mixture(Distribution):
    """Draw each item of a batch from one of several distributions, chosen at random by their shares.

    An id has the probability P(i) = Σ share_d · P_d(i), a sum over the distributions d. If any distribution is
    prioritized, the weight of an id is (N · P(i)) ** -beta divided by the largest weight of the batch. Here beta
    belongs to the first prioritized distribution, and N is the number of ids that can be drawn. Without a prioritized
    distribution, all weights are 1.

    Not thread-safe: a sampler calls a mixture under the sampler's lock. A mixture belongs to one sampler if one of its
    distributions belongs to one sampler.

    Parameters
    ----------
    parts : sequence of (distribution, share)
        Shares are above 0; only their ratios count.

    Raises
    ------
    ValueError
        `parts` is empty, a share is invalid, or a distribution does not fit: a `Sweep` must have `passes=None`, and
        `Prioritized` must have `normalize="batch"`.

    Examples
    --------
    >>> distribution = dr.Mixture([(dr.Recency(half_life=100), 0.5), (dr.Uniform(), 0.5)])
    >>> dr.Sampler("cartpole.replay", dr.Transitions(), distribution, batch_size=8).sample().batch_size
    8
    """

    keeps_share = True

    def __init__(self, parts: Sequence[tuple[Distribution, float]]) -> None:
        try:
            given = [(distribution, share) for distribution, share in parts]
        except (TypeError, ValueError):
            raise ValueError(f"parts must be (distribution, share) pairs, not {parts!r}") from None
        if not given:
            raise ValueError("parts must name at least one distribution")
        self._parts: list[Distribution] = []
        shares = []
        for i, (distribution, share) in enumerate(given):
            if not isinstance(distribution, Distribution):
                raise ValueError(f"parts[{i}] must begin with a distribution such as Uniform(), not {distribution!r}")
            if (error := distribution.mixing_error()) is not None:
                raise ValueError(f"parts[{i}] {error}")
            self._parts.append(distribution)
            shares.append(number(f"the share of parts[{i}]", share, above=0.0))
        self._shares = np.array(shares) / sum(shares)
        self.episode_fields = tuple(field for part in self._parts for field in part.episode_fields)
        self._prioritized = [part for part in self._parts if part.weighted]
        self.weighted = len(self._prioritized) > 0
        self.gives_once = any(part.gives_once for part in self._parts)
        self.eta = self._prioritized[0].eta if self.weighted else 1.0

    def __repr__(self) -> str:
        return f"Mixture([{', '.join(f'({p}, {s:g})' for p, s in zip(self._parts, self._shares, strict=True))}])"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share, each by a distribution chosen at random.

        The share must not be empty.
        """
        # Each distribution draws from the share, because rejecting ids after the draw would lose ids of a sweep. With
        # several ranks, `chances` is exact only if each distribution draws equally often from the share of each rank.
        ids = np.empty(size, np.int64)
        which = np.searchsorted(np.cumsum(self._shares)[:-1], rng.random(size), side="right")
        for i, part in enumerate(self._parts):
            chosen = np.flatnonzero(which == i)
            if len(chosen):
                ids[chosen] = part.draw_share(population, len(chosen), rng).ids
        return Draw(ids, self.chances(population, ids) if self.weighted else None, population.size)

    def chances(self, population: Population, ids: Ints) -> NDArray[np.float64]:
        """Return the probability of each id, (n,); 0 for an id that cannot be drawn."""
        return self._sum(part.chances(population, ids) for part in self._parts)

    def share_chances(self, population: Population, ids: Ints) -> NDArray[np.float64]:
        """Return the probability that `draw_share` draws each id, (n,); all ids must be in the population's share."""
        return self._sum(part.share_chances(population, ids) for part in self._parts)

    def _sum(self, chances: Iterable[Floats]) -> Floats:
        return np.asarray(sum(map(operator.mul, self._shares, chances)), np.float64)

    def priorities(self, population: Population, ids: Ints) -> Floats:
        """Return the priority of each id in the first prioritized distribution; see `Distribution.priorities`."""
        return self._prioritized[0].priorities(population, ids)

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return the weights that the first prioritized distribution gives to drawn ids; None: all weights are 1."""
        return self._prioritized[0].weigh(draw, beta, batches) if self.weighted else None

    def update(self, population: Population, ids: Ints, errors: Floats) -> int:
        """Set the priorities in all prioritized distributions; see `Prioritized.update`."""
        return max((part.update(population, ids, errors) for part in self._prioritized), default=0)

    def place(self) -> list[Any]:
        """Return the states of all distributions, for `go_back`."""
        return [part.place() for part in self._parts]

    def go_back(self, place: list[Any]) -> None:
        """Restore the states that `place` returned."""
        for part, its_place in zip(self._parts, place, strict=True):
            part.go_back(its_place)

    def claim(self, owner: object) -> None:
        """Bind all distributions to this owner; see `Owned`."""
        for part in self._parts:
            part.claim(owner)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each distribution that has a state; a key is an index in `parts`, as a text."""
        states = {str(i): part.state_dict() for i, part in enumerate(self._parts)}
        return {key: state for key, state in states.items() if state is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; ValueError if `state` is of another mixture."""
        stateful = self.state_dict()
        if set(stateful) != set(state):
            raise ValueError(f"this is not a state of {self}: its parts are {sorted(state)}, not {sorted(stateful)}")
        for key in stateful:
            self._parts[int(key)].load_state_dict(state[key])
