"""How far each lane's ids were taken in, by those who keep ids in the order in which they come."""

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels.runs import IdRuns, Visible, keep
from diskreplay.sampling.population import Population


class LaneEnds:
    """The last id of each lane that was taken in. Not thread-safe.

    `taken` are such ids, of which a saved state knows. `last` has that of each lane of the population that was followed
    last, -1 for none.
    """

    def __init__(self, taken: Ints | None = None) -> None:
        self.last: Ints = np.zeros(0, np.int64) if taken is None else taken
        self._generation: int | None = None
        self._lanes: Ints | None = None  # of each segment, as of the last refresh

    @property
    def taken(self) -> Ints:
        """The ids themselves."""
        return self.last[self.last >= 0]

    def follow(self, population: Population) -> None:
        """Know the lanes of a population."""
        visible = population.visible
        if self._generation == population.generation:
            self.last = np.append(self.last, np.full(len(visible.oldest) - len(self.last), -1))
        else:
            known = self.taken
            place = visible.places(known)
            self.last = np.full(len(visible.oldest), -1)
            self.last[place[place >= 0]] = known[place >= 0]
        if visible.lanes is not self._lanes:
            known = np.flatnonzero(self.last >= 0)
            self.last[known[visible.places(self.last[known]) < 0]] = -1
        self._generation, self._lanes = population.generation, visible.lanes

    def new_of(self, visible: Visible, runs: IdRuns) -> tuple[IdRuns, Ints]:
        """Return what is behind the last ids of these runs, and the place of the lane of each run that is left."""
        place = visible.places(runs.first)
        there = place >= 0
        runs, place = keep(runs, there), place[there]
        skipped = np.clip((self.last[place] - runs.first) // runs.stride + 1, 0, runs.count)
        runs = runs._replace(first=runs.first + skipped * runs.stride, count=runs.count - skipped)
        new = runs.count > 0
        return keep(runs, new), place[new]

    def take(self, runs: IdRuns, place: Ints) -> None:
        """Take in what `new_of` returned."""
        np.maximum.at(self.last, place, runs.first + (runs.count - 1) * runs.stride)
