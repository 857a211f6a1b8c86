"""Distributions that leave out some ids of another distribution: ids drawn too often, or ids outside an index."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.bounded_json import parse_json
from diskreplay.distributions.base import Distribution, Draw
from diskreplay.distributions.number_arguments import Schedule
from diskreplay.distributions.population import Column, Cursor, Population
from diskreplay.distributions.saved_state import columns, kind_of, state_of
from diskreplay.errors import NotEnoughData
from diskreplay.ids import Floats, Ints
from diskreplay.kernels.runs import IdRuns, Visible, id_blocks

# Attempt i of a draw draws _OVERDRAWS[i] ids for each missing id. After the last attempt, the missing ids are drawn
# from a list of the allowed ids. The list is almost never needed if more than a hundredth of all ids is allowed.
_OVERDRAWS = (1, 8, 64)
_NONE: Ints = np.zeros(0, np.int64)


class Restricted(Distribution):
    """Draw from another distribution, but only the ids that `allowed` permits.

    The allowed ids keep their relative probabilities. A batch is full or is not drawn at all. Draws of the other
    distribution must not depend on earlier draws.
    """

    keeps_share = True

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self.weighted, self.eta = distribution.weighted, distribution.eta
        self.episode_fields = distribution.episode_fields

    @abstractmethod
    def allowed(self, ids: Ints) -> Ints:
        """Return, for each id, the number of times that it may still be drawn, (n,) int64."""

    @abstractmethod
    def drawable(self, population: Population) -> Ints: ...

    @abstractmethod
    def why_not(self, population: Population, times: int, size: int) -> str:
        """Return the error message for a batch of `size` ids if the allowed ids have `times` draws left in total."""

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        ids, chances, draw = _NONE, np.zeros(0), Draw(_NONE)
        for overdraw in _OVERDRAWS:
            draw = self._distribution.draw_share(population, (size - len(ids)) * overdraw, rng)
            allowed = self.allowed(draw.ids) - named(draw.ids, ids)
            good = np.flatnonzero(allowed > 0)
            if len(good) > size - len(ids):
                # Excess ids are left out at random, because the first ids of a stratified draw are similar.
                good = rng.permutation(good)
            # Only the ids of the batch may count as drawn, so ids are taken one by one until the batch is full.
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
        return replace(draw, ids=ids, chances=None if draw.chances is None else chances)

    def _draw_left(
        self, population: Population, drawn: Ints, size: int, rng: np.random.Generator
    ) -> tuple[Ints, Floats]:
        """Draw the rest of a batch of `size` ids, after the ids `drawn`, from a list of all allowed ids."""
        left = self.drawable(population)
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
        return self._distribution.weigh(draw, beta, batches)


def share_of(population: Population) -> str:
    """Return a text for error messages that names the population's share; "" if the share has all ids."""
    rank, world_size = population.share
    return "" if world_size == 1 else f" of rank {rank} of {world_size}"


def named(ids: Ints, among: Ints) -> Ints:
    """Return the number of times that each of `ids` occurs in `among`."""
    ordered = np.sort(among)
    return np.searchsorted(ordered, ids, side="right") - np.searchsorted(ordered, ids, side="left")


def _earlier(ids: Ints) -> Ints:
    """Return, for each element of `ids`, the number of equal elements before it."""
    order = np.argsort(ids, kind="stable")
    ordered, numbers = ids[order], np.arange(len(ids))
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(ids)]
    earlier = np.empty(len(ids), np.int64)
    earlier[order] = numbers - np.maximum.accumulate(np.where(is_first, numbers, 0))
    return earlier


REMOVERS = ("oldest", "lowest_priority", "random")
# A number of draws that no id can reach.
_ALWAYS = 1 << 40


class Index:
    """The ids that a sampler may draw: at most `most` ids of one kind, in ascending order; not thread-safe.

    A full index removes an id for each new id. `remover` chooses the removed id:

    - "oldest": the id that was published first.
    - "lowest_priority": the id with the lowest priority, and the oldest id among equal priorities.
    - "random": a random id.

    With "lowest_priority" and "random", the removed id may be the new id.

    With "random", all ids of the population are in the index with the same probability: Vitter's algorithm R (1985).
    After evictions, the algorithm is random pairing (Gemulla et al. 2008). Each new id takes the place of a random
    evicted id. The new id enters the index only if the evicted id was in the index.
    """

    def __init__(self, most: int, remover: str, rng: np.random.Generator) -> None:
        self.most, self._remover, self._rng = most, remover, rng
        self._column = Column()  # The value of an id is the number of ids that arrived before it.
        self._count = 0  # The number of ids that have arrived.
        self._cursor = Cursor()
        self._size = 0  # The number of ids of the population at the last call of `follow`.
        # For random pairing: the number of evicted ids that were in the index, and the number of other evicted ids. An
        # evicted id counts until a new id takes its place.
        self._evicted, self._others_evicted = 0, 0

    @property
    def ids(self) -> Ints:
        return self._column.ids

    def contains(self, ids: Ints) -> NDArray[np.bool_]:
        return self._column.has(ids)

    def follow(self, population: Population, distribution: Distribution) -> None:
        """Add the new ids of the population, and remove evicted ids; `distribution` gives the priorities of ids.

        If the call is interrupted, nothing changes.
        """
        if self._cursor.is_at(population):
            return
        new = copy(self)
        new._cursor = self._cursor.copy()
        new._take_in(population, distribution)
        vars(self).update(vars(new))  # in one operation, which cannot be interrupted

    def _take_in(self, population: Population, distribution: Distribution) -> None:
        changes = self._cursor.changes(population)
        runs, place, _ = self._cursor.new_of(population, IdRuns(*changes.runs))
        new = np.concatenate([_NONE, *id_blocks(runs)])
        new = new[np.lexsort((new, population.followed.times(new)))] if len(new) > 1 else new
        before = len(self.ids)
        self._column = self._column.at(self._cursor.kept(population, self.ids))
        evicted = before - len(self.ids)
        self._evicted += evicted
        self._others_evicted += max(self._size + len(new) - population.size - evicted, 0)
        came = self._count + np.arange(len(new))
        if self._remover == "random":
            self._add_at_random(new, came, population.size)
        else:
            self._column = self._column.with_others(new, came)
            if self._remover == "lowest_priority" and len(self.ids) > self.most:
                self._remove_least(distribution.priorities(population, self.ids))
            elif len(self.ids) > self.most:
                self._remove_least(self._column.values)
        self._cursor.take(runs, place)
        self._count += len(new)
        self._size = population.size
        self._cursor.reach(population, changes)

    def _remove_least(self, values: NDArray[Any]) -> None:
        """Remove the excess ids: the ids with the smallest values and, among equal values, the ids that arrived first.

        The result is the same as if ids were added one by one, each followed by the removal of one id.
        """
        many = len(self.ids) - self.most
        bound = np.partition(values, many - 1)[many - 1]
        less, equal = np.flatnonzero(values < bound), np.flatnonzero(values == bound)
        first = equal[np.argpartition(self._column.values[equal], many - len(less) - 1)[: many - len(less)]]
        self._remove(np.append(less, first))

    def _remove(self, which: Ints) -> None:
        self._column = Column(*(np.delete(each, which) for each in self._column))

    def _add_at_random(self, new: Ints, came: Ints, size: int) -> None:
        """Add new ids so that all `size` ids of the population are in the index with the same probability.

        `came[i]` is the number of ids that arrived before `new[i]`.
        """
        paired = min(len(new), self._evicted + self._others_evicted)
        if paired:
            in_place = self._rng.hypergeometric(self._evicted, self._others_evicted, paired)
            self._evicted -= in_place
            self._others_evicted -= paired - in_place
            chosen = np.sort(self._rng.permutation(paired)[:in_place])
            self._column = self._column.with_others(new[chosen], came[chosen])
        # New ids that replace no evicted id fill the index. When the index is full, each further id replaces a random
        # id, or is left out.
        room = paired + max(0, min(len(new) - paired, self.most - len(self.ids)))
        self._column = self._column.with_others(new[paired:room], came[paired:room])
        rest, came = new[room:], came[room:]
        at = (self._rng.random(len(rest)) * (size - len(rest) + 1 + np.arange(len(rest)))).astype(np.int64)
        # If several ids replace the same id, the last of them stays.
        places, last = np.unique(at[::-1], return_index=True)
        taken = places < len(self.ids)
        last = len(rest) - 1 - last[taken]
        self._remove(places[taken])
        self._column = self._column.with_others(rest[last], came[last])

    def state_dict(self) -> dict[str, Any]:
        numbers = {"count": self._count, "size": self._size}
        evicted = {"evicted": self._evicted, "others_evicted": self._others_evicted}
        return {"ids": self.ids, "came": self._column.values, "taken": self._cursor.taken, **numbers, **evicted}

    @classmethod
    def loaded(cls, most: int, remover: str, rng: np.random.Generator, state: Mapping[str, Any]) -> "Index":
        new = cls(most, remover, rng)
        with state_of("an index"):
            new._column, (taken,) = Column(*columns(state, ("ids", "came"))), columns(state, ("taken",))
            new._cursor, new._count, new._size = Cursor(taken), int(state["count"]), int(state["size"])
            new._evicted, new._others_evicted = int(state["evicted"]), int(state["others_evicted"])
            if (np.diff(new.ids) <= 0).any() or min(new._count, new._size, new._evicted, new._others_evicted) < 0:
                raise ValueError("its ids are not in ascending order, or a number is negative")
            if len(new.ids) > most:
                raise ValueError(f"it holds {len(new.ids)} ids, and max_size is {most}")
        return new


class Indices:
    """The `Index` objects of a sampler, one per kind of id; not thread-safe. `seed` seeds the random numbers."""

    def __init__(self, most: int, remover: str, seed: int) -> None:
        self.most, self.remover = most, remover
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._indices: dict[tuple[Any, ...], Index] = {}

    def of(self, kind: tuple[Any, ...]) -> Index:
        return self._indices.setdefault(kind, Index(self.most, self.remover, self._rng))

    def state_dict(self) -> dict[str, Any]:
        indices = {json.dumps(kind): index.state_dict() for kind, index in self._indices.items()}
        return {"rng": json.dumps(self._rng.bit_generator.state), "indices": indices}

    def loaded(self, state: Mapping[str, Any]) -> "Indices":
        found = Indices(self.most, self.remover, 0)
        if state:
            with state_of("the indices of a sampler"):
                found._rng.bit_generator.state = parse_json(state["rng"])
                kinds = {kind_of(kind): index for kind, index in state["indices"].items()}
            arguments = self.most, self.remover, found._rng
            found._indices = {kind: Index.loaded(*arguments, index) for kind, index in kinds.items()}
        return found


class Bounded(Restricted):
    def __init__(self, distribution: Distribution, index: Index) -> None:
        super().__init__(distribution)
        self._index = index

    def __repr__(self) -> str:
        return f"{self._distribution}, at most {self._index.most} ids,"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        self._index.follow(population, self._distribution)
        return replace(super().draw(population, size, rng), size=len(self._index.ids))

    def allowed(self, ids: Ints) -> Ints:
        return np.where(self._index.contains(ids), _ALWAYS, 0)

    def drawable(self, population: Population) -> Ints:
        self._index.follow(population, self._distribution)
        ids, others = self._index.ids, self._distribution.drawable(population)
        drawable = population.contains(ids) if others is None else np.isin(ids, others)
        return ids[population.share.contains(ids) & drawable]

    def why_not(self, population: Population, times: int, size: int) -> str:
        return (
            f"none of the {len(self._index.ids)} ids that the index holds (max_size) can be drawn{share_of(population)}"
            "; 1 is needed, append more"
        )

    def chances(self, population: Population, ids: Ints) -> Floats:
        total = self._distribution.chances(population, self._index.ids).sum()
        return self._distribution.chances(population, ids) * self._index.contains(ids) / (total or 1.0)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        total = self._distribution.share_chances(population, self.drawable(population)).sum()
        return self._distribution.share_chances(population, ids) * self._index.contains(ids) / (total or 1.0)

    def priority_sum(self, population: Population) -> float:
        share = self._distribution.share_chances(population, self.drawable(population)).sum()
        return float(self._distribution.priority_sum(population) * share)


# `Counts` merges `_new` into `_old` when `_new` has more ids than this, and more than an eighth of the ids in `_old`.
_FEW = 1024


class Counts:
    """A count per id, 0 for most ids; recent counts are in the small column `_new`, so that `add` is fast."""

    def __init__(self, counts: Column | None = None) -> None:
        self._old, self._new = Column() if counts is None else counts, Column()

    def of(self, ids: Ints) -> Ints:
        return self._old.of(ids) + self._new.of(ids)

    def add(self, ids: Ints, number: int, visible: Visible) -> None:
        """For each occurrence of an id in `ids`, add `number` to its count; hidden ids may lose their counts."""
        self._new = self._new.plus(ids, np.full(len(ids), number))
        if len(self._new.ids) > max(_FEW, len(self._old.ids) // 8):
            every = self._old.plus(*self._new)
            there = (every.values > 0) & (every.ids >= visible.least_ids(every.ids))
            self._old, self._new = every.at(there), Column()

    def place(self) -> tuple[Column, Column]:
        return self._old, self._new

    def go_back(self, place: tuple[Column, Column]) -> None:
        self._old, self._new = place

    def state_dict(self, less: Ints = _NONE) -> dict[str, Ints]:
        """Return `ids`, ascending, and their `counts`, (n,), as if the ids in `less` had not been drawn."""
        ids, counts = self._old.plus(*self._new)
        counts = counts - named(ids, less)
        return {"ids": ids[counts > 0], "counts": counts[counts > 0]}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> "Counts":
        with state_of("counts of ids"):
            ids, counts = columns(state, ("ids", "counts"))
            if (np.diff(ids) <= 0).any() or (counts <= 0).any():
                raise ValueError("ids must be in order, with a count above 0 each")
        return cls(Column(ids, counts))


class TimesSampled:
    """The number of times that a sampler has drawn each id, at most `most`, by kind of id; not thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._counts: dict[tuple[Any, ...], Counts] = {}

    def of(self, kind: tuple[Any, ...]) -> Counts:
        return self._counts.setdefault(kind, Counts())

    def state_dict(self, kind: tuple[Any, ...], less: Ints) -> dict[str, Any]:
        """Return the counts of all kinds; for `kind`, as if the ids in `less` had not been drawn."""
        every = self._counts.items()
        return {json.dumps(each): counts.state_dict(less if each == kind else _NONE) for each, counts in every}

    @classmethod
    def loaded(cls, most: int, state: Mapping[str, Any]) -> "TimesSampled":
        found = cls(most)
        with state_of("how often ids were sampled"):
            found._counts = {kind_of(kind): Counts.loaded(counts) for kind, counts in state.items()}
        return found


class AtMost(Restricted):
    """Draw each id of another distribution at most `times.most` times.

    A draw is counted at once, before its delivery; `forget` takes back a draw. `times` counts all draws of the sampler,
    including its draws from other distributions. `kind` is the population's kind of id.
    """

    gives_once = True

    def __init__(self, distribution: Distribution, times: TimesSampled, kind: tuple[Any, ...]) -> None:
        super().__init__(distribution)
        self._times, self._kind = times, kind
        self._counts = times.of(kind)
        self._pending: list[Draw] = []  # Draws that were not delivered yet.
        # The allowed ids that `drawable` found last, in ascending order, and a cursor that finds later changes of the
        # population.
        self._left, self._cursor = _NONE, Cursor()

    def __repr__(self) -> str:
        return f"{self._distribution}, each id at most {self._times.most} times,"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        draw = super().draw(population, size, rng)
        self._take(population, draw)
        return draw

    def place(self) -> tuple[Any, list[Draw]]:
        return self._counts.place(), self._pending.copy()

    def go_back(self, place: tuple[Any, list[Draw]]) -> None:
        counts, self._pending = place
        self._counts.go_back(counts)
        self._cursor = Cursor()  # `_left` may lack ids that are allowed again

    def allowed(self, ids: Ints) -> Ints:
        return self._times.most - self._counts.of(ids)

    def why_not(self, population: Population, times: int, size: int) -> str:
        found = f"can be drawn only {times} times more in all" if times else "cannot be drawn any more"
        return (
            f"the {population.size} sampleable steps{share_of(population)} {found}, and {size} draws are needed: each "
            f"step is drawn at most {self._times.most} times (max_times_sampled). Append more"
        )

    def drawable(self, population: Population) -> Ints:
        """Return the allowed ids of the share; a call takes time for each of these ids, and for each new id."""
        if (others := self._distribution.drawable(population)) is not None:
            return others[self._counts.of(others) < self._times.most]
        changes = self._cursor.changes(population)
        found = [_NONE if changes.whole else self._left]
        for ids in id_blocks(IdRuns(*changes.runs)):
            mine = ids[population.share.contains(ids)]
            found.append(mine[self._counts.of(mine) < self._times.most])
        left = np.unique(np.concatenate(found))
        left = left[self._counts.of(left) < self._times.most]
        self._left = left[self._cursor.kept(population, left)]
        self._cursor.reach(population, changes)
        return self._left

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability of each id, (n,), as if ids could be drawn without limit."""
        return self._distribution.chances(population, ids)

    def share_chances(self, population: Population, ids: Ints) -> Floats:
        return self._distribution.share_chances(population, ids)

    def priority_sum(self, population: Population) -> float:
        """Return the sum of the priorities of the share, including ids that were drawn `most` times already."""
        return self._distribution.priority_sum(population)

    def redraw(self, lost: Draw, population: Population, size: int, rng: np.random.Generator) -> Draw:
        self.forget(population, lost)
        return self.draw(population, size, rng)

    def delivered(self, draw: Draw) -> None:
        """Record that a draw was delivered, so that `forget` can no longer take the draw back."""
        self._pending = [pending for pending in self._pending if pending is not draw]

    def forget(self, population: Population, draw: Draw) -> None:
        if any(pending is draw for pending in self._pending):
            self.delivered(draw)
            self._counts.add(draw.ids, -1, population.visible)
            self._cursor = Cursor()  # `_left` may lack ids that are allowed again

    def accept(self, population: Population, draw: Draw) -> bool:
        is_there = super().accept(population, draw)
        if is_there:
            self._take(population, draw)
        return is_there

    def _take(self, population: Population, draw: Draw) -> None:
        self._counts.add(draw.ids, 1, population.visible)
        self._pending.append(draw)

    def state_dict(self) -> dict[str, Any]:
        return self._times.state_dict(self._kind, np.concatenate([_NONE, *(draw.ids for draw in self._pending)]))
