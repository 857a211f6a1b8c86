"""Every id once, and again where there are more passes."""

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.distributions.base import Draw, OneOwner
from diskreplay.distributions.number_arguments import int_or_none
from diskreplay.distributions.passes import ORDERS, Pass
from diskreplay.distributions.population import Population
from diskreplay.distributions.saved_state import state_of
from diskreplay.distributions.uniform import Even
from diskreplay.errors import SegmentGone
from diskreplay.ids import Ints


class Sweep(OneOwner, Even):
    """Draw each id once in a pass, in random order or oldest first; then comes the next pass, or the end.

    A pass goes over the ids that can be drawn when it begins; those that are evicted meanwhile are passed over, and new
    ones wait for the next. Batches stay full across passes. After the last pass a batch is short, and then a draw
    without ids is the end: `for batch in sampler` ends there, and `len(sampler)` is the number of batches until then.
    When the view changes to another kind of id, the pass begins again.

    It holds its place, and so belongs to one sampler, under whose lock it is called; its state brings it back there.
    Its memory grows with the number of episodes, not of ids: a random order is computed, by a small Feistel network
    over the numbers of the ids, and the order of times is made some thousands of ids at a time.

    Parameters
    ----------
    passes : int or None
        How many; None goes on for ever.
    order : {"random", "time"}
        In what order a pass goes over the ids: at random, another one each pass, or by when their steps were
        published, oldest first; of steps of one time that with the least id.

    Raises
    ------
    ValueError
        An argument is invalid.
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
        """How many passes; None goes on for ever."""
        return self._passes

    @property
    def order(self) -> str:
        """In what order a pass goes over the ids: "random" or "time"."""
        return self._order

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw the next `size` ids of the population's share, fewer at the end of the last pass, none after it.

        NotEnoughData where the passes have no end, and none of the ids is in the share.
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
                # What was looked at behind the last one that is needed comes again.
                current.advance(len(ids) if missing else int(good[-1]) + 1)
                is_over = current.is_over(population)
            except SegmentGone:
                if missing == size:
                    raise
                break  # a short batch: what was drawn must not be lost
            if is_over:
                self._pass, self._finished = None, self._finished + 1
        return Draw(np.concatenate(found), None, population.size)

    def _current(self, population: Population) -> Pass | None:
        """Return the pass that has begun over this kind of id."""
        if self._pass is not None and self._pass.kind != population.kind:
            self._pass = None
        return self._pass

    def place(self) -> tuple[int, Pass | None]:
        """Return where it is."""
        return self._finished, copy(self._pass)  # whose attributes are replaced, and not changed in place

    def go_back(self, place: tuple[int, Pass | None]) -> None:
        """Go back to a place."""
        self._finished, self._pass = place

    def count_left(self, population: Population) -> int:
        """Return how many ids of the share come until the end; costs as much as a pass where one has begun."""
        assert self._passes is not None, "it has no end"
        passes, current, found = self._passes - self._finished, self._current(population), 0
        if current is not None:
            found = sum(int(_drawable(population, ids).sum()) for ids in current.left(population))
            passes -= 1
        return found + (passes and passes * population.share_size())

    def mixing_error(self) -> str | None:
        """Return None where it has no end."""
        return None if self._passes is None else f"is {self}, which ends: only Sweep(passes=None) fits"

    def state_dict(self) -> dict[str, Any]:
        """Return where it is: numbers, and the arrays of the pass."""
        state: dict[str, Any] = {"finished": self._finished}
        return state if self._pass is None else {**state, **self._pass.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; ValueError, and no change, where this is no such state."""
        with state_of("a sweep"):
            finished = int(state["finished"])
            loaded = ORDERS[self._order].loaded(state) if "first" in state else None
        self._finished, self._pass = finished, loaded


def _drawable(population: Population, ids: Ints) -> NDArray[np.bool_]:
    return population.share.contains(ids) & population.contains(ids)
