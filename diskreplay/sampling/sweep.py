"""Every id once, then again."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import mixed
from diskreplay.kernels.runs import IdRuns
from diskreplay.sampling.base import Draw, Owned
from diskreplay.sampling.number_arguments import int_or_none
from diskreplay.sampling.population import Population
from diskreplay.sampling.saved_state import columns, state_of

Ints = NDArray[np.int64]
Bits = NDArray[np.uint64]

ROUNDS = 6


class Sweep(Owned):
    """Draw each id once in a pass, in random order, and go on with the next pass.

    A pass goes over the ids that can be drawn when it begins; those that are evicted meanwhile are passed over, and new
    ones wait for the next. Batches stay full across passes. After the last pass a batch is short, and then a draw
    without ids is the end. When the view changes to another kind of id, the pass begins again.

    It holds its place, and so belongs to one sampler, under whose lock it is called; its state brings it back there.
    Its memory grows with the number of episodes, not of ids: the order is computed, by a small Feistel network over
    the numbers of the ids.

    Parameters
    ----------
    passes : int or None
        How many; None goes on for ever.

    Raises
    ------
    ValueError
        `passes` is invalid.
    """

    gives_once = True
    keeps_share = True

    def __init__(self, passes: int | None = None) -> None:
        self._passes = int_or_none("passes", passes, "no end")
        self._finished = 0
        self._pass: _Pass | None = None

    def __repr__(self) -> str:
        return f"Sweep(passes={self._passes})"

    @property
    def passes(self) -> int | None:
        """How many passes; None goes on for ever."""
        return self._passes

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw the next `size` ids of the population's share, fewer at the end of the last pass, none after it.

        NotEnoughData where the passes have no end, and none of the ids is in the share.
        """
        found, missing = [np.zeros(0, np.int64)], size
        fruitless = False
        if self._pass is not None and self._pass.kind != population.kind:
            self._pass = None
        while missing:
            if self._pass is None:
                if self._passes is not None and self._finished >= self._passes:
                    break
                if fruitless:
                    raise population.nothing_in_share()
                self._pass, fruitless = _Pass.begun(population, rng), self._passes is None
            ids = self._pass.peek(missing * population.share.world_size)
            good = np.flatnonzero(population.share.contains(ids) & population.contains(ids))[:missing]
            missing -= len(good)
            fruitless = fruitless and not len(good)
            found.append(ids[good])
            # What was permuted behind the last one that is needed comes again.
            self._pass.cursor += len(ids) if missing else int(good[-1]) + 1
            if self._pass.cursor == self._pass.size:
                self._pass, self._finished = None, self._finished + 1
        return Draw(np.concatenate(found), None, population.size)

    def chances(self, population: Population, ids: Ints) -> NDArray[np.float64]:
        """Return the probability with which each id is drawn, over all places in a pass; 0 where it cannot be."""
        return population.contains(ids) / max(population.size, 1)

    def mixing_error(self) -> str | None:
        """Return None where it has no end."""
        return None if self._passes is None else f"is {self}, which ends: only Sweep(passes=None) fits"

    def state_dict(self) -> dict[str, Any]:
        """Return where it is: numbers, and the arrays of the pass."""
        state: dict[str, Any] = {"finished": self._finished}
        if self._pass is not None:
            state |= self._pass.runs._asdict()
            state |= {"cursor": self._pass.cursor, "key": self._pass.key, "kind": json.dumps(self._pass.kind)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; ValueError, and no change, where this is no such state."""
        with state_of("a sweep"):
            finished, loaded = int(state["finished"]), None
            if "first" in state:
                runs = IdRuns(*columns(state, IdRuns._fields))
                loaded = _Pass(runs, tuple(json.loads(state["kind"])), int(state["key"]), int(state["cursor"]))
                good = (runs.count > 0).all() and 0 <= loaded.key < 1 << 63
                if not good or not 0 <= loaded.cursor < loaded.size:
                    raise ValueError("it contradicts itself")
        self._finished, self._pass = finished, loaded


class _Pass:
    """Ids in a random order of their own, and how far it has come."""

    def __init__(self, runs: IdRuns, kind: tuple[Any, ...], key: int, cursor: int = 0) -> None:
        self.runs, self.kind, self.key, self.cursor = runs, kind, key, cursor
        self._before: Ints = np.cumsum(runs.count) - runs.count
        self.size = int(runs.count.sum())

    @classmethod
    def begun(cls, population: Population, rng: np.random.Generator) -> "_Pass":
        """Take the population's ids, in an order that does not depend on when they were found."""
        runs = population.runs()
        order = np.argsort(runs.first, kind="stable")
        return cls(IdRuns(*(column[order] for column in runs)), population.kind, int(rng.integers(1 << 63)))

    def peek(self, count: int) -> Ints:
        """Return the next ids, at most `count`."""
        numbers = permuted(np.arange(self.cursor, min(self.cursor + count, self.size)), self.size, self.key)
        run = np.searchsorted(self._before, numbers, side="right") - 1
        ids = self.runs.first[run] + (numbers - self._before[run]) * self.runs.stride[run]
        return np.asarray(ids, np.int64)


def permuted(numbers: Ints, size: int, key: int) -> Ints:
    """Return where each number goes in a permutation of 0 to size - 1 that the key chooses.

    A Feistel network permutes the numbers of an even number of bits; one that lands beyond is sent on until it does
    not, which leaves a permutation of the others.
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
