"""An index of at most so many ids, from which others are removed as they come, and draws of what it holds."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.bounded_json import parse_json
from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.cursor import LaneCursor
from diskreplay.distributions.population import Population
from diskreplay.distributions.restricted import Restricted, share_of
from diskreplay.distributions.saved_state import columns, kind_of, state_of
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.runs import IdRuns, id_blocks

REMOVERS = ("oldest", "lowest_priority", "random")
# More times than any id is drawn.
_ALWAYS = 1 << 40
_NONE: Ints = np.zeros(0, np.int64)


class Index:
    """The ids of one kind that a sampler draws from, `most` at the most, in order: `ids`. Not thread-safe.

    `remover` says which one goes for a new one when it is full: the "oldest", by when steps were published; the one
    with the "lowest_priority", of equal ones the oldest; or a "random" one. The latter two may remove the new one. With
    "random" every id has the same probability to be in it: Vitter's algorithm R (1985), and where steps of the store
    are evicted, random pairing (Gemulla et al. 2008): new ids take the places of evicted ones with the probability that
    these were in it.
    """

    def __init__(self, most: int, remover: str, rng: np.random.Generator) -> None:
        self.most, self._remover, self._rng = most, remover, rng
        self.ids, self._came = _NONE, _NONE  # the second says which came before which
        self._count = 0  # ids that came
        self._cursor = LaneCursor()
        self._size = 0  # ids of the population that was followed last
        # Of a reservoir: evicted ids for which no new one came yet, that were in it and that were not.
        self._evicted, self._others_evicted = 0, 0

    def contains(self, ids: Ints) -> NDArray[np.bool_]:
        """Tell which ids are in it."""
        if not len(self.ids):
            return np.zeros(len(ids), np.bool_)
        found: NDArray[np.bool_] = self.ids[np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)] == ids
        return found

    def follow(self, population: Population, distribution: Distribution) -> None:
        """Bring it up to date with the population; `distribution` knows the priorities of its ids."""
        if self._cursor.is_at(population):
            return
        changes = self._cursor.changes(population)
        runs, place = self._cursor.new_of(population, IdRuns(*changes.runs))
        new = np.concatenate([_NONE, *id_blocks(runs)])
        new = new[np.lexsort((new, population.followed.times(new)))] if len(new) > 1 else new
        evicted = self._drop_evicted(population)
        self._evicted += evicted
        self._others_evicted += max(self._size + len(new) - population.size - evicted, 0)
        came = self._count + np.arange(len(new))
        if self._remover == "random":
            self._add_at_random(new, came, population.size)
        else:
            self._add(new, came)
            if self._remover == "lowest_priority" and len(self.ids) > self.most:
                self._remove_least(distribution.priorities(population, self.ids))
            elif len(self.ids) > self.most:
                self._remove_least(self._came)
        self._cursor.take(runs, place)
        self._count += len(new)
        self._size = population.size
        self._cursor.reach(population, changes)

    def _drop_evicted(self, population: Population) -> int:
        """Drop the ids that are not in the store any more; return how many."""
        if self._cursor.generation != population.generation:
            there = population.contains(self.ids)
        elif self._cursor.visible.oldest is not population.visible.oldest:
            there = self.ids >= population.visible.least_ids(self.ids)
        else:
            return 0
        gone = len(there) - int(np.count_nonzero(there))
        if gone:
            self.ids, self._came = self.ids[there], self._came[there]
        return gone

    def _add(self, new: Ints, came: Ints) -> None:
        """Put ids in; `came` says which came before which."""
        order = np.argsort(new)
        at = np.searchsorted(self.ids, new[order])
        self.ids, self._came = np.insert(self.ids, at, new[order]), np.insert(self._came, at, came[order])

    def _remove(self, which: Ints) -> None:
        self.ids, self._came = np.delete(self.ids, which), np.delete(self._came, which)

    def _remove_least(self, values: NDArray[Any]) -> None:
        """Remove all that are too many: the ids of the least values, and of equal ones the first that came.

        So does a table that takes each new id in, and then removes one, which may be the new one.
        """
        many = len(self.ids) - self.most
        bound = np.partition(values, many - 1)[many - 1]
        less, equal = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
        first = equal[np.argpartition(self._came[equal], many - len(less) - 1)[: many - len(less)]]
        self._remove(np.append(less, first))

    def _add_at_random(self, new: Ints, came: Ints, size: int) -> None:
        """Put new ids in so that each of the `size` ids that there are now has the same probability to be in."""
        paired = min(len(new), self._evicted + self._others_evicted)
        if paired:
            in_place = self._rng.hypergeometric(self._evicted, self._others_evicted, paired)
            self._evicted -= in_place
            self._others_evicted -= paired - in_place
            chosen = np.sort(self._rng.permutation(paired)[:in_place])
            self._add(new[chosen], came[chosen])
        # The others, one after the other: while there is room, and then in place of one at random, or not at all.
        room = paired + max(0, min(len(new) - paired, self.most - len(self.ids)))
        self._add(new[paired:room], came[paired:room])
        rest, came = new[room:], came[room:]
        at = (self._rng.random(len(rest)) * (size - len(rest) + 1 + np.arange(len(rest)))).astype(np.int64)
        # Of those that come to one place, the last.
        places, last = np.unique(at[::-1], return_index=True)
        taken = places < len(self.ids)
        last = len(rest) - 1 - last[taken]
        self._remove(places[taken])
        self._add(rest[last], came[last])

    def state_dict(self) -> dict[str, Any]:
        """Return arrays and numbers."""
        numbers = {"count": self._count, "size": self._size}
        evicted = {"evicted": self._evicted, "others_evicted": self._others_evicted}
        return {"ids": self.ids, "came": self._came, "taken": self._cursor.taken, **numbers, **evicted}

    @classmethod
    def loaded(cls, most: int, remover: str, rng: np.random.Generator, state: Mapping[str, Any]) -> "Index":
        """Return what `state_dict` was of; ValueError where it is of none, or holds more ids."""
        new = cls(most, remover, rng)
        with state_of("an index"):
            (new.ids, new._came), (taken,) = columns(state, ("ids", "came")), columns(state, ("taken",))
            new._cursor, new._count, new._size = LaneCursor(taken), int(state["count"]), int(state["size"])
            new._evicted, new._others_evicted = int(state["evicted"]), int(state["others_evicted"])
            if (np.diff(new.ids) <= 0).any() or min(new._count, new._size, new._evicted, new._others_evicted) < 0:
                raise ValueError("it contradicts itself")
            if len(new.ids) > most:
                raise ValueError(f"it holds {len(new.ids)} ids, and max_size is {most}")
        return new


class Indices:
    """A sampler's indices, one for each kind of id; `seed` is of what they draw. Not thread-safe."""

    def __init__(self, most: int, remover: str, seed: int) -> None:
        self.most, self.remover = most, remover
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._indices: dict[tuple[Any, ...], Index] = {}

    def of(self, kind: tuple[Any, ...]) -> Index:
        """Return the index of a kind of id."""
        return self._indices.setdefault(kind, Index(self.most, self.remover, self._rng))

    def state_dict(self) -> dict[str, Any]:
        """Return the indices, by kind, written as JSON, and the state of the random numbers."""
        indices = {json.dumps(kind): index.state_dict() for kind, index in self._indices.items()}
        return {"rng": json.dumps(self._rng.bit_generator.state), "indices": indices}

    def loaded(self, state: Mapping[str, Any]) -> "Indices":
        """Return such ones with what `state_dict` was of; ValueError where it is of none."""
        found = Indices(self.most, self.remover, 0)
        if state:
            with state_of("the indices of a sampler"):
                found._rng.bit_generator.state = parse_json(state["rng"])
                kinds = {kind_of(kind): index for kind, index in state["indices"].items()}
            arguments = self.most, self.remover, found._rng
            found._indices = {kind: Index.loaded(*arguments, index) for kind, index in kinds.items()}
        return found


class Bounded(Restricted):
    """Draw from another distribution, but only ids that an index holds. Not thread-safe: a sampler's own."""

    def __init__(self, distribution: Distribution, index: Index) -> None:
        super().__init__(distribution)
        self._index = index

    def __repr__(self) -> str:
        return f"{self._distribution}, at most {self._index.most} ids,"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of the population's share; NotEnoughData where the index has no id of the share."""
        self._index.follow(population, self._distribution)
        return super().draw(population, size, rng)._replace(size=len(self._index.ids))

    def allowed(self, ids: Ints) -> Ints:
        """Return how many times more each id may be drawn."""
        return np.where(self._index.contains(ids), _ALWAYS, 0)

    def left(self, population: Population) -> Ints:
        """Return the ids of the share that are in the index, in order."""
        self._index.follow(population, self._distribution)
        ids, others = self._index.ids, self._distribution.left(population)
        drawable = population.contains(ids) if others is None else np.isin(ids, others)
        return ids[population.share.contains(ids) & drawable]

    def why_not(self, population: Population, times: int, size: int) -> str:
        """Say why a batch of this size is not drawn."""
        return (
            f"none of the {len(self._index.ids)} ids that the index holds (max_size) can be drawn{share_of(population)}"
            "; 1 is needed, append more"
        )

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        total = self._distribution.chances(population, self._index.ids).sum()
        return self._distribution.chances(population, ids) * self._index.contains(ids) / (total or 1.0)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id of the share is drawn, (n,)."""
        total = self._distribution.share_chances(population, self.left(population)).sum()
        return self._distribution.share_chances(population, ids) * self._index.contains(ids) / (total or 1.0)

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities of the share's ids in the index."""
        share = self._distribution.share_chances(population, self.left(population)).sum()
        return float(self._distribution.priority_sum(population) * share)
