"""How often each id was drawn, and draws of each at most so often."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.cursor import Cursor
from diskreplay.distributions.population import Population
from diskreplay.distributions.restricted import Restricted, named, share_of
from diskreplay.distributions.saved_state import columns, kind_of, state_of
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.runs import IdRuns, Visible, id_blocks

# Newer counts are merged into the older ones when there are more of them than this, and than an eighth of those.
_FEW = 1024
_NONE: Ints = np.zeros(0, np.int64)


class Counts:
    """A number for each id, 0 for most: sorted ids and their counts, older ones apart from newer ones."""

    def __init__(self, ids: Ints = _NONE, counts: Ints = _NONE) -> None:
        self._old, self._new = (ids, counts), (_NONE, _NONE)

    def of(self, ids: Ints) -> Ints:
        """Return the count of each id."""
        return _looked_up(ids, *self._old) + _looked_up(ids, *self._new)

    def add(self, ids: Ints, number: int, visible: Visible) -> None:
        """Add a number to the count of each id, as often as it is named; those that are hidden may be forgotten."""
        self._new = _merged(*self._new, ids, np.full(len(ids), number))
        if len(self._new[0]) > max(_FEW, len(self._old[0]) // 8):
            known, counts = _merged(*self._old, *self._new)
            there = (counts > 0) & (known >= visible.least_ids(known))
            self._old, self._new = (known[there], counts[there]), (_NONE, _NONE)

    def place(self) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
        """Return the arrays, which are replaced, and not changed in place."""
        return self._old, self._new

    def go_back(self, place: tuple[tuple[Ints, Ints], tuple[Ints, Ints]]) -> None:
        """Go back to a place."""
        self._old, self._new = place

    def state_dict(self, less: Ints = _NONE) -> dict[str, Ints]:
        """Return `ids`, in order, and their `counts`, (n,) int64, each less by as often as an id is in `less`."""
        ids, counts = _merged(*self._old, *self._new)
        counts = counts - named(ids, less)
        return {"ids": ids[counts > 0], "counts": counts[counts > 0]}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> "Counts":
        """Return what `state_dict` was of; ValueError where it is of none."""
        with state_of("counts of ids"):
            ids, counts = columns(state, ("ids", "counts"))
            if (np.diff(ids) <= 0).any() or (counts <= 0).any():
                raise ValueError("ids must be in order, with a count above 0 each")
        return cls(ids, counts)


class TimesSampled:
    """How often a sampler has drawn each id, for each kind of id apart; `most` is how often it may. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._counts: dict[tuple[Any, ...], Counts] = {}

    def of(self, kind: tuple[Any, ...]) -> Counts:
        """Return the counts of a kind of id."""
        return self._counts.setdefault(kind, Counts())

    def state_dict(self, kind: tuple[Any, ...], less: Ints) -> dict[str, Any]:
        """Return the counts: by kind, written as JSON. Those of `kind` are less by as often as an id is in `less`."""
        every = self._counts.items()
        return {json.dumps(each): counts.state_dict(less if each == kind else _NONE) for each, counts in every}

    @classmethod
    def loaded(cls, most: int, state: Mapping[str, Any]) -> "TimesSampled":
        """Return what `state_dict` was of; ValueError where it is of none."""
        found = cls(most)
        with state_of("how often ids were sampled"):
            found._counts = {kind_of(kind): Counts.loaded(counts) for kind, counts in state.items()}
        return found


class AtMost(Restricted):
    """Draw from another distribution, but each id at most so many times. Not thread-safe: a sampler's own.

    Draws count from when they are drawn, until they are forgotten. `times` counts what was drawn so far, from this
    distribution or another one, and `kind` is that of the population.
    """

    gives_once = True

    def __init__(self, distribution: Distribution, times: TimesSampled, kind: tuple[Any, ...]) -> None:
        super().__init__(distribution)
        self._times, self._kind = times, kind
        self._counts = times.of(kind)
        self._pending: list[Draw] = []  # drawn and not delivered
        # The ids that are left, in order, where they were listed, and how far that is.
        self._left, self._cursor = _NONE, Cursor()

    def __repr__(self) -> str:
        return f"{self._distribution}, each id at most {self._times.most} times,"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share; NotEnoughData, and no draw, where there are not so many."""
        draw = super().draw(population, size, rng)
        self._take(population, draw)
        return draw

    def place(self) -> tuple[Any, list[Draw]]:
        """Return the counts and the draws that are pending."""
        return self._counts.place(), self._pending.copy()

    def go_back(self, place: tuple[Any, list[Draw]]) -> None:
        """Go back to a place."""
        counts, self._pending = place
        self._counts.go_back(counts)
        self._cursor = Cursor()  # more ids may be left now

    def allowed(self, ids: Ints) -> Ints:
        """Return how many times more each id may be drawn."""
        return self._times.most - self._counts.of(ids)

    def why_not(self, population: Population, times: int, size: int) -> str:
        """Say why a batch of this size is not drawn, where those that are left can be drawn so many times."""
        found = f"can be drawn only {times} times more" if times else "cannot be drawn any more"
        return (
            f"the {population.size} sampleable steps{share_of(population)} {found}, {size} draws are needed: each is "
            f"drawn at most {self._times.most} times (max_times_sampled), append more"
        )

    def left(self, population: Population) -> Ints:
        """Return the ids of the share that may be drawn, in order, at a cost of these and of what is new."""
        if (others := self._distribution.left(population)) is not None:
            return others[self._counts.of(others) < self._times.most]
        changes = self._cursor.changes(population)
        found = [_NONE if changes.whole else self._left]
        for ids in id_blocks(IdRuns(*changes.runs)):
            mine = ids[population.share.contains(ids)]
            found.append(mine[self._counts.of(mine) < self._times.most])
        left = np.unique(np.concatenate(found))
        left = left[self._counts.of(left) < self._times.most]
        self._left = left[population.contains(left)]
        self._cursor.reach(population, changes)
        return self._left

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id as if none had been drawn too often."""
        return self._distribution.chances(population, ids)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id of the share as if none had been drawn too often."""
        return self._distribution.share_chances(population, ids)

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities of the share, of ids that were drawn too often as well."""
        return self._distribution.priority_sum(population)

    def redraw(self, lost: Draw, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw in place of a batch that lost ids, which does not count."""
        self.forget(population, lost)
        return self.draw(population, size, rng)

    def delivered(self, draw: Draw) -> None:
        """Count a draw for good."""
        self._pending = [pending for pending in self._pending if pending is not draw]

    def forget(self, population: Population, draw: Draw) -> None:
        """Do not count a draw that will not be delivered."""
        if any(pending is draw for pending in self._pending):
            self.delivered(draw)
            self._counts.add(draw.ids, -1, population.visible)
            self._cursor = Cursor()  # what was not left is now

    def accept(self, population: Population, draw: Draw) -> bool:
        """Count what was drawn ahead when a state was saved, if all of it is still there; tell whether so."""
        is_there = super().accept(population, draw)
        if is_there:
            self._take(population, draw)
        return is_there

    def _take(self, population: Population, draw: Draw) -> None:
        self._counts.add(draw.ids, 1, population.visible)
        self._pending.append(draw)

    def state_dict(self) -> dict[str, Any]:
        """Return how often each id of each kind was delivered."""
        return self._times.state_dict(self._kind, np.concatenate([_NONE, *(draw.ids for draw in self._pending)]))


def _looked_up(ids: Ints, known: Ints, counts: Ints) -> Ints:
    if not len(known):
        return np.zeros(len(ids), np.int64)
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[at] == ids, counts[at], 0)


def _merged(ids: Ints, counts: Ints, others: Ints, more: Ints) -> tuple[Ints, Ints]:
    """Return the ids of both, each once and in order, and the sums of their counts."""
    every, where = np.unique(np.concatenate([ids, others]), return_inverse=True)
    sums = np.zeros(len(every), np.int64)
    np.add.at(sums, where, np.concatenate([counts, more]))
    return every, sums
