"""How far those have come that follow a population: by what it told them, and by the ids of each lane."""

import weakref
from collections.abc import Callable

import numpy as np

from diskreplay.distributions.population import Changes, Mark, Population
from diskreplay.ids import Ints
from diskreplay.kernels.runs import ALL_VISIBLE, IdRuns, behind, keep, last_ids


def _no_population() -> Population | None:
    """Stand for a weak reference to a population, before the first."""
    return None


class Cursor:
    """How far one follower has seen one population. Not thread-safe.

    `population` is a weak reference: it returns the population that was seen last, None before the first.
    """

    def __init__(self) -> None:
        self.population: Callable[[], Population | None] = _no_population
        self._version = -1
        self._mark: Mark | None = None

    @property
    def is_new(self) -> bool:
        """Whether it has seen no population yet."""
        return self.population is _no_population

    def is_of(self, population: Population) -> bool:
        """Tell whether it is this population that was seen last."""
        return self.population() is population

    def is_at(self, population: Population) -> bool:
        """Tell whether all of a population was seen since its last refresh."""
        return self.population() is population and self._version == population.version

    def changes(self, population: Population) -> Changes:
        """Return what has changed; all of it for another population, or where the last changes were not `reached`."""
        mark, self._mark = self._mark, None
        if not self.is_of(population):
            mark, self.population = None, weakref.ref(population)
        self._version = -1
        return population.changes(mark)

    def reach(self, population: Population, changes: Changes) -> None:
        """Note that what `changes` returned was taken in."""
        self._version, self._mark = population.version, changes.mark


class LaneCursor(Cursor):
    """The cursor of who keeps ids in the order in which they come: it survives in a saved state.

    `taken` are the last ids of each lane that were taken in, of which a saved state knows. `last` has that of each lane
    of the population that was followed last, -1 for none; `generation` and `visible` are as they were when all of that
    was taken in.
    """

    def __init__(self, taken: Ints | None = None) -> None:
        super().__init__()
        self.last: Ints = np.zeros(0, np.int64) if taken is None else taken
        self.generation: int | None = None
        self.visible = ALL_VISIBLE

    @property
    def taken(self) -> Ints:
        """The ids themselves."""
        return self.last[self.last >= 0]

    def changes(self, population: Population) -> Changes:
        """Return what has changed, as `Cursor.changes`, and know the lanes of the population."""
        visible = population.visible
        if not self.is_of(population):
            self.generation = None
        if self.generation == population.generation:
            self.last = np.append(self.last, np.full(len(visible.oldest) - len(self.last), -1))
        else:
            known = self.taken
            place = visible.places(known)
            self.last = np.full(len(visible.oldest), -1)
            self.last[place[place >= 0]] = known[place >= 0]
        if visible.lanes is not self.visible.lanes:
            known = np.flatnonzero(self.last >= 0)
            self.last[known[visible.places(self.last[known]) < 0]] = -1
        return super().changes(population)

    def reach(self, population: Population, changes: Changes) -> None:
        """Note that what `changes` returned was taken in."""
        super().reach(population, changes)
        self.generation, self.visible = population.generation, population.visible

    def new_of(self, population: Population, runs: IdRuns) -> tuple[IdRuns, Ints]:
        """Return what is behind the last ids of these runs, and the place of the lane of each run that is left."""
        place = population.visible.places(runs.first)
        there = place >= 0
        runs, place = keep(runs, there), place[there]
        skipped = np.clip((self.last[place] - runs.first) // runs.stride + 1, 0, runs.count)
        runs = behind(runs, skipped)
        new = runs.count > 0
        return keep(runs, new), place[new]

    def take(self, runs: IdRuns, place: Ints) -> None:
        """Take in what `new_of` returned."""
        np.maximum.at(self.last, place, last_ids(runs))
