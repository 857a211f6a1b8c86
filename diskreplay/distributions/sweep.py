"""Passes over all ids: each id is drawn once per pass, in random order or oldest first."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Draw, Even, OneOwner
from diskreplay.distributions.number_arguments import int_or_none
from diskreplay.distributions.population import Population
from diskreplay.distributions.saved_state import columns, kind_of, state_of
from diskreplay.errors import SegmentGone
from diskreplay.ids import Ints, mixed
from diskreplay.kernels.runs import NEVER, IdRuns, id_blocks, numbered, pieces_of

ROUNDS = 6
# `TimePass` sorts at least _SORTED_AT_ONCE ids at once, and cuts runs into pieces of at most _PIECE ids. `RandomPass`
# permutes at least _PIECE ids at once.
_SORTED_AT_ONCE, _PIECE = 1 << 16, 1 << 12


class Pass(ABC):
    """One pass: the ids in an order, and a position in this order."""

    def __init__(self, runs: IdRuns, kind: tuple[Any, ...]) -> None:
        self.runs, self.kind = runs, kind

    @classmethod
    @abstractmethod
    def begun(cls, population: Population, rng: np.random.Generator) -> Self: ...

    @abstractmethod
    def peek(self, population: Population, count: int) -> Ints:
        """Return at most `count` of the next ids, and keep the position."""

    @abstractmethod
    def advance(self, count: int) -> None:
        """Move the position behind the first `count` ids that `peek` returned."""

    def is_over(self, population: Population) -> bool:
        return not len(self.peek(population, 1))

    @abstractmethod
    def left(self, population: Population) -> Iterator[Ints]:
        """Yield the remaining ids in arrays, in any order."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.runs._asdict(), "kind": json.dumps(self.kind)}

    @classmethod
    @abstractmethod
    def loaded(cls, state: Mapping[str, Any]) -> Self:
        """Make a pass from a `state_dict`; raise one of `saved_state.INVALID` if the state is invalid."""


class RandomPass(Pass):
    """A pass in a random order; the 63-bit number `key` selects the order."""

    def __init__(self, runs: IdRuns, kind: tuple[Any, ...], key: int, at: int = 0) -> None:
        super().__init__(runs, kind)
        self._key, self._at = key, at
        self._before: Ints = np.cumsum(runs.count) - runs.count
        self._size = int(runs.count.sum())
        self._next: Ints = np.zeros(0, np.int64)  # the next ids, if they are computed already

    @classmethod
    def begun(cls, population: Population, rng: np.random.Generator) -> Self:
        """Return a new pass over the population's ids; their order does not depend on the discovery order."""
        runs = population.runs()
        order = np.argsort(runs.first, kind="stable")
        return cls(IdRuns(*(column[order] for column in runs)), population.kind, int(rng.integers(1 << 63)))

    def _slice(self, start: int, count: int) -> Ints:
        numbers = permuted(np.arange(start, min(start + count, self._size)), self._size, self._key)
        return numbered(self.runs, self._before, numbers)

    def peek(self, population: Population, count: int) -> Ints:
        if len(self._next) < count:
            self._next = self._slice(self._at, max(count, _PIECE))
        return self._next[:count]

    def advance(self, count: int) -> None:
        self._at, self._next = self._at + count, self._next[count:]

    def left(self, population: Population) -> Iterator[Ints]:
        return (self._slice(at, _SORTED_AT_ONCE) for at in range(self._at, self._size, _SORTED_AT_ONCE))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cursor": self._at, "key": self._key}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Self:
        loaded = cls(*_runs_and_kind(state), int(state["key"]), int(state["cursor"]))
        if not 0 <= loaded._key < 1 << 63 or not 0 <= loaded._at < loaded._size:
            raise ValueError("its key or its position is out of range")
        return loaded


class TimePass(Pass):
    """A pass in the order of publishing; steps with the same publishing time are in the order of their ids.

    Runs are cut into pieces. The pieces are read in the order of the times of their first ids. `_ids` are the next ids
    in their final order. `_carried` are ids that were read, but are not in `_ids` yet: ids of later pieces may come
    before them. The position is the time and the id of the last drawn step, because a number of drawn ids would be
    wrong after evictions.
    """

    def __init__(self, runs: IdRuns, kind: tuple[Any, ...], last: tuple[int, int] = (-1, -1)) -> None:
        super().__init__(runs, kind)
        self._last = last
        self._pieces: IdRuns | None = None  # unread pieces, sorted by first times; None before the first read
        self._begins: Ints = np.zeros(0, np.int64)
        self._ids = self._carried = np.zeros((2, 0), np.int64)  # a row of times and a row of ids

    @classmethod
    def begun(cls, population: Population, rng: np.random.Generator) -> Self:
        return cls(IdRuns(*(column.copy() for column in population.runs())), population.kind)

    def peek(self, population: Population, count: int) -> Ints:
        while self._ids.shape[1] < count and self._load(population):
            pass
        return self._ids[1, :count]

    def advance(self, count: int) -> None:
        if count:
            self._last = int(self._ids[0, count - 1]), int(self._ids[1, count - 1])
            self._ids = self._ids[:, count:]

    def left(self, population: Population) -> Iterator[Ints]:
        return (self._timed(population, ids)[1] for ids in id_blocks(self.runs))

    def _timed(self, population: Population, ids: Ints) -> Ints:
        """Return the times and the ids, (2, n), of those `ids` that can be drawn and come after the last drawn id."""
        ids = ids[population.contains(ids)]
        times = population.followed.times(ids)
        time, last = self._last
        behind = (times > time) | ((times == time) & (ids > last))
        return np.stack([times[behind], ids[behind]])

    def _load(self, population: Population) -> bool:
        """Read more pieces, and sort their ids into `_ids`; return whether there may be further ids."""
        if self._pieces is None:
            self._cut(population)
        assert self._pieces is not None
        if not len(self._begins) and not self._carried.shape[1]:
            return False
        # Read at least as many ids as are in `_carried`, so that the ids in `_carried` are not sorted again and again.
        ends = np.cumsum(self._pieces.count)
        taken = int(np.searchsorted(ends, max(_SORTED_AT_ONCE, self._carried.shape[1]), "left")) + 1
        next_begins = int(self._begins[taken]) if taken < len(self._begins) else NEVER
        pieces = IdRuns(*(column[:taken] for column in self._pieces))
        ids = np.concatenate([np.zeros(0, np.int64), *id_blocks(pieces)])
        found = np.concatenate([self._carried, self._timed(population, ids)], axis=1)
        found = found[:, np.lexsort(found[::-1])]
        safe = int(np.searchsorted(found[0], next_begins))
        ids, rest = np.concatenate([self._ids, found[:, :safe]], axis=1), IdRuns(*(x[taken:] for x in self._pieces))
        # All attributes are set in one statement at the end, so that an interrupt loses no ids.
        self._ids, self._carried, self._pieces, self._begins = ids, found[:, safe:], rest, self._begins[taken:]
        return True

    def _cut(self, population: Population) -> None:
        pieces, _ = pieces_of(self.runs, _PIECE)
        begins = population.followed.times(pieces.first)
        order = np.argsort(begins, kind="stable")
        self._pieces, self._begins = IdRuns(*(column[order] for column in pieces)), begins[order]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last": np.array(self._last)}

    @classmethod
    def loaded(cls, state: Mapping[str, Any]) -> Self:
        time, last = map(int, state["last"])
        return cls(*_runs_and_kind(state), (time, last))


ORDERS: dict[str, type[Pass]] = {"random": RandomPass, "time": TimePass}


def _runs_and_kind(state: Mapping[str, Any]) -> tuple[IdRuns, tuple[Any, ...]]:
    runs = IdRuns(*columns(state, IdRuns._fields))
    if not ((runs.count > 0) & (runs.stride > 0) & (runs.first >= 0)).all():
        raise ValueError("its runs have an invalid id, stride or count")
    return runs, kind_of(state["kind"])


def permuted(numbers: Ints, size: int, key: int) -> Ints:
    """Permute numbers below `size`: return the image of each number under a permutation that `key` selects.

    A Feistel network permutes the numbers below a power of four that is at least `size`. An image that is not below
    `size` is permuted again (cycle walking). This gives a permutation of the numbers below `size`.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    out = numbers.astype(np.uint64)
    beyond = np.arange(len(out))
    while len(beyond):
        left, right = out[beyond] >> half, out[beyond] & mask
        for round_key in round_keys:
            left, right = right, left ^ (mixed(right + round_key) & mask)
        out[beyond] = (left << half) | right
        beyond = beyond[out[beyond] >= size]
    return out.astype(np.int64)


class Sweep(OneOwner, Even):
    """Draw each id once in a pass, in random order or oldest first.

    A pass covers the ids that can be drawn when the pass begins. The pass skips ids that are evicted meanwhile, and new
    ids wait for the next pass. A batch at the end of a pass is filled from the next pass. The last batch of the last
    pass may be short. After this batch, draws have no ids, and `for batch in sampler` ends. `len(sampler)` is the
    number of batches that are left. The pass begins again when the view changes to another kind of id.

    A sweep has a position, so it belongs to one sampler. The position is part of the saved state. The sampler calls the
    sweep under the sampler's lock. The memory of a sweep grows with the number of episodes, not with the number of ids.
    A small Feistel network computes the random order: it permutes the positions of ids. The order by time is computed
    for some ten thousand ids at a time.

    Parameters
    ----------
    passes : int or None
        Number of passes; None: no end.
    order : {"random", "time"}
        "random": a new random order for each pass. "time": by the time of publishing, oldest first, then by id.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> store = dr.open("cartpole.replay")
    >>> sampler = dr.Sampler(store, dr.Transitions(), dr.Sweep(passes=1, order="time"), batch_size=64)
    >>> sum(batch.batch_size for batch in sampler) == sampler.sampleable
    True
    """

    gives_once = True
    keeps_share = True

    def __init__(self, passes: int | None = 1, order: str = "random") -> None:
        self._passes = int_or_none("passes", passes, "no end")
        if order not in ORDERS:
            raise ValueError(f'order must be "random" or "time", not {order!r}')
        self._order, self.ends = order, self._passes is not None
        self._finished = 0
        self._pass: Pass | None = None

    def __repr__(self) -> str:
        return f"Sweep(passes={self._passes}{'' if self._order == 'random' else f', order={self._order!r}'})"

    @property
    def passes(self) -> int | None:
        """Number of passes; None: no end."""
        return self._passes

    @property
    def order(self) -> str:
        """The order of a pass: "random" or "time"."""
        return self._order

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw the next `size` ids of the population's share; the last batch of the last pass may have fewer ids.

        After the last pass, draws have no ids. NotEnoughData if the passes have no end and the share is empty.
        """
        found, missing = [np.zeros(0, np.int64)], size
        fruitless = False
        while missing:
            current = self._current(population)
            if current is None:
                if self._passes is not None and self._finished >= self._passes:
                    break
                if fruitless:
                    raise population.nothing_in_share()
                current = self._pass = ORDERS[self._order].begun(population, rng)
                fruitless = self._passes is None
            try:
                ids = current.peek(population, missing * population.share.world_size)
                good = np.flatnonzero(_drawable(population, ids))[:missing]
                missing -= len(good)
                fruitless = fruitless and not len(good)
                found.append(ids[good])
                # Move the position only behind the last used id, because the next draw begins there.
                current.advance(len(ids) if missing else int(good[-1]) + 1)
                is_over = current.is_over(population)
            except SegmentGone:
                if missing == size:
                    raise
                break  # return a short batch: the drawn ids must not be lost
            if is_over:
                self._pass, self._finished = None, self._finished + 1
        return Draw(np.concatenate(found), None, population.size)

    def _current(self, population: Population) -> Pass | None:
        """Return the current pass, or None if no pass over this kind of id has begun."""
        if self._pass is not None and self._pass.kind != population.kind:
            self._pass = None
        return self._pass

    def place(self) -> tuple[int, Pass | None]:
        """Return the number of finished passes and the current pass."""
        return self._finished, copy(self._pass)  # a shallow copy is enough: a pass replaces its arrays

    def go_back(self, place: tuple[int, Pass | None]) -> None:
        """Restore a state that `place` returned."""
        self._finished, self._pass = place

    def count_left(self, population: Population) -> int:
        """Return the number of ids of the share that are left to draw until the end of the last pass.

        If a pass has begun, this takes time for each of its remaining ids.
        """
        assert self._passes is not None, "it has no end"
        passes, current, found = self._passes - self._finished, self._current(population), 0
        if current is not None:
            found = sum(int(_drawable(population, ids).sum()) for ids in current.left(population))
            passes -= 1
        return found + (passes and passes * population.share_size())

    def mixing_error(self) -> str | None:
        """Return None if the sweep has no end, else why no `Mixture` can contain the sweep."""
        return None if self._passes is None else f"is {self}, which ends: only Sweep(passes=None) fits"

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished passes, and the state of the current pass if one has begun."""
        state: dict[str, Any] = {"finished": self._finished}
        return state if self._pass is None else {**state, **self._pass.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; ValueError, and no change, if `state` is invalid."""
        with state_of("a sweep"):
            finished = int(state["finished"])
            loaded = ORDERS[self._order].loaded(state) if "first" in state else None
        self._finished, self._pass = finished, loaded


def _drawable(population: Population, ids: Ints) -> NDArray[np.bool_]:
    return population.share.contains(ids) & population.contains(ids)
