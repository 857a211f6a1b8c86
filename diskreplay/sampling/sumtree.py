"""Masses of numbered leaves, drawn in proportion to them."""

import math

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SumTree:
    """Masses of leaves 0 to capacity - 1, all 0 at first; a leaf of mass 0 is never drawn. Not thread-safe.

    Parameters
    ----------
    capacity : int
        Leaves that there is room for.
    least : bool
        Whether to know the smallest mass that is not 0.
    """

    def __init__(self, capacity: int, least: bool = False) -> None:
        # Here and not above: they load numba, which nobody needs to make a distribution.
        from diskreplay.kernels.sumtree import tree_starts
        from diskreplay.kernels.table import chosen

        self._set, self._find = chosen("sumtree_set"), chosen("sumtree_find")
        self.capacity = capacity
        self._starts = tree_starts(capacity)
        self._tree = np.zeros(self._starts[-1])
        self._least = np.full(self._starts[-1] - self._starts[1] if least else 0, math.inf)

    @property
    def total(self) -> float:
        """The sum of all masses."""
        return float(self._tree[-1])

    @property
    def least(self) -> float:
        """The smallest mass that is not 0, infinite where there is none."""
        return float(self._least[-1])

    @property
    def masses(self) -> Floats:
        """The mass of each leaf; to be changed by `set` alone."""
        return self._tree[: self.capacity]

    def set(self, leaves: Ints, masses: Floats) -> None:
        """Give leaves their masses, (n,) finite and not negative; the last one where a leaf is named twice."""
        self._set(leaves, masses, self._starts, self._tree, self._least)

    def find(self, targets: Floats) -> tuple[Ints, Floats]:
        """Return the leaf at each cumulated mass, from 0 to `total`, and its mass; `targets` is overwritten.

        `total` must not be 0.
        """
        leaves = np.empty(len(targets), np.int64)
        self._find(self._starts, self._tree, targets, leaves)
        return leaves, targets

    def fill(self, masses: Floats) -> None:
        """Give the first leaves these masses, and all others 0."""
        every = np.zeros(self.capacity)
        every[: len(masses)] = masses
        self.set(np.arange(self.capacity), every)
