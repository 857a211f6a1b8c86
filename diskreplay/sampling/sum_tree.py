"""Masses of numbered leaves, drawn in proportion to them."""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.table import chosen

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SumTree:
    """Masses of leaves 0 to capacity - 1, all 0 at first; a leaf of mass 0 is never drawn. Not thread-safe.

    `least` is whether to know the smallest mass that is not 0. `memory`, (SumTree.room(capacity),) float64 zeros, is
    what the tree is made of, new if None. `starts`, `tree`, `sums` and `smallest` are the arrays as `kernels.sumtree`
    has them, to be changed by kernels alone.
    """

    starts: Ints
    tree: Floats
    sums: Floats
    smallest: Floats

    def __init__(self, capacity: int, least: bool = False, memory: Floats | None = None) -> None:
        # Here and not above: it loads numba, which nobody needs to make a distribution.
        from diskreplay.kernels.sumtree import FAN_OUT, TOP, tree_arrays

        self._set, self._fan_out = chosen("sumtree_set"), FAN_OUT
        self.capacity = capacity
        self.starts, self.tree, self.sums, self.smallest = tree_arrays(capacity, least, TOP, memory)

    @staticmethod
    def room(capacity: int) -> int:
        """Return how many numbers the tree of so many leaves has."""
        from diskreplay.kernels.sumtree import tree_starts

        return int(tree_starts(capacity)[-1])

    @property
    def arrays(self) -> tuple[Ints, Floats, Floats, Floats]:
        """All of the arrays, in this order."""
        return self.starts, self.tree, self.sums, self.smallest

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self.sums[-1])

    @property
    def least(self) -> float:
        """The smallest mass that is not 0, infinite where there is none."""
        return float(self.smallest[-1]) or math.inf

    @property
    def masses(self) -> Floats:
        """The mass of each leaf; to be changed by `set` alone."""
        return self.tree[: self.capacity]

    def set(self, leaves: Ints, masses: Floats) -> None:
        """Give leaves their masses, (n,) finite and not negative; the last one where a leaf is named twice."""
        self._set(leaves, masses, self.starts, self.tree, self.sums, self.smallest, np.empty(len(leaves), np.int64))

    def fill(self, masses: Floats) -> None:
        """Give the first leaves these masses; all others must be 0."""
        self.tree[: len(masses)] = masses
        # One leaf of each node that changes: setting it adds up all of them.
        leaves = np.arange(0, len(masses), self._fan_out)
        self.set(leaves, self.tree[leaves])
