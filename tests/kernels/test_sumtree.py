"""The sum tree against sums and searches in plain numpy, and its kernels against their twins."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.ids import POSITION_BITS
from diskreplay.kernels.huge_pages import zeros
from diskreplay.kernels.priority_pages import COLUMNS, PAGE
from diskreplay.kernels.sumtree import FAN_OUT, SOME, TOP, tree_arrays, tree_starts
from tests.kernels.pairs import KERNELS

seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from((1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 5000)) | st.integers(1, 600)
tops = st.sampled_from((1, 4, TOP))  # small ones make trees of many levels
kinds = [pytest.param(1, id="plain"), pytest.param(0, id="compiled")]


class Tree:
    """A tree of one kind of kernel, and its leaves beside it."""

    def __init__(self, capacity: int, kind: int, least: bool = True, top: int = TOP) -> None:
        (memory,) = zeros((tree_starts(capacity, top)[-1], np.float64))
        self.starts, self.tree, self.sums, self.least = tree_arrays(capacity, least, top, memory)
        self.leaves, self.notes = np.zeros(capacity), np.zeros((-(-capacity // PAGE), COLUMNS), np.int64)
        self._set, self._find = KERNELS["sumtree_set"][kind], KERNELS["sumtree_find"][kind]

    def set(self, leaves: np.ndarray, masses: np.ndarray) -> None:
        self._set(leaves, masses, self.starts, self.tree, self.sums, self.least, np.empty(len(leaves), np.int64))
        for leaf, mass in zip(leaves.tolist(), masses.tolist(), strict=True):
            self.leaves[leaf] = mass

    def find(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mass, found = targets.copy(), np.full(len(targets), -7)
        self._find(self.starts, self.tree, self.sums, self.notes, mass, found, np.empty(SOME))
        return found, mass


def masses(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw masses of very different size, some of them 0."""
    return rng.random(size) * 10.0 ** rng.integers(-12, 12, size) * (rng.random(size) < rng.random())


def test_levels_follow_each_other_until_one_is_small() -> None:
    assert tree_starts(1).tolist() == [0, 8]
    assert tree_starts(512).tolist() == [0, 512]
    assert tree_starts(513).tolist() == [0, 520, 592]
    assert tree_starts(8 * 512 + 1).tolist() == [0, 4104, 4624, 4696]
    assert tree_starts(65, top=1).tolist() == [0, 72, 88, 96, 104]


def test_nodes_are_cache_lines() -> None:
    for capacity in (1, 100, 10_000):
        assert Tree(capacity, kind=1, least=False).tree.ctypes.data % 64 == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds)
@given(sizes, tops, seeds)
def test_every_node_is_the_sum_of_its_leaves_and_knows_the_smallest(
    kind: int, capacity: int, top: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree(capacity, kind, top=top)
    for _ in range(4):
        some = rng.integers(0, capacity, rng.integers(0, 2 * capacity + 1))  # with duplicates: the last one counts
        tree.set(some, masses(rng, len(some)))
    np.testing.assert_array_equal(tree.tree[:capacity], tree.leaves)
    for level in range(1, len(tree.starts) - 1):
        start, end, width = tree.starts[level], tree.starts[level + 1], FAN_OUT**level
        for node in range(-(-capacity // width)):
            below = tree.leaves[node * width : (node + 1) * width]
            assert tree.tree[start + node] == pytest.approx(math.fsum(below), rel=1e-13)
            assert tree.least[start + node - tree.starts[1]] == min(below[below > 0], default=0.0)
        assert not tree.tree[start + -(-capacity // width) : end].any()
    np.testing.assert_array_equal(tree.sums, np.concatenate([[0.0], np.cumsum(tree.tree[tree.starts[-2] :])]))
    assert tree.sums[-1] == pytest.approx(math.fsum(tree.leaves), rel=1e-13)
    assert tree.least[-1] == min(tree.leaves[tree.leaves > 0], default=0.0)


@pytest.mark.parametrize("kind", kinds)
@given(sizes, tops, seeds)
def test_a_search_finds_the_leaf_where_the_cumulated_masses_pass_it(
    kind: int, capacity: int, top: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree(capacity, kind, least=False, top=top)
    values = rng.integers(0, 4, capacity).astype(float)  # whole numbers: every sum is exact
    values[rng.integers(capacity)] = 1.0
    tree.set(np.arange(capacity), values)
    total = values.sum()
    targets = np.concatenate([rng.random(30) * total, np.floor(rng.random(30) * total), [0.0, total - 1]])
    found, mass = tree.find(targets)
    assert found.tolist() == np.searchsorted(np.cumsum(values), targets, side="right").tolist()
    np.testing.assert_array_equal(mass, values[found])


@pytest.mark.parametrize("kind", kinds)
@given(sizes, tops, seeds)
def test_no_search_ends_at_a_leaf_of_mass_zero(kind: int, capacity: int, top: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = Tree(capacity, kind, top=top)
    values = masses(rng, capacity)
    values[rng.integers(capacity)] = 10.0 ** rng.integers(-290, 280)
    tree.set(np.arange(capacity), values)
    total, edges = tree.sums[-1], np.cumsum(values)
    around = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, math.inf)])
    targets = np.concatenate([around, rng.random(50) * total, [0.0, -1.0, total, total * 1.001, 1e308, math.inf]])
    found, mass = tree.find(targets)
    assert ((found >= 0) & (found < capacity)).all()
    assert (mass > 0).all()
    np.testing.assert_array_equal(mass, values[found])


def drift(kind: int, updates: int, size: int) -> float:
    """Return how far the root is from the exact sum after so many updates of changing scale, relative."""
    rng = np.random.default_rng(0)
    tree = Tree(20_000, kind, least=False)
    tree.set(np.arange(20_000), rng.random(20_000))
    for i in range(updates // size):
        leaves = rng.integers(0, 20_000, size)
        tree._set(
            leaves,
            rng.random(size) * 10.0 ** (i % 13 - 6),
            tree.starts,
            tree.tree,
            tree.sums,
            tree.least,
            np.empty(size, np.int64),
        )
    exact = math.fsum(tree.tree[:20_000])
    return abs(tree.sums[-1] - exact) / exact


@pytest.mark.parametrize("kind", kinds)
def test_the_root_stays_the_exact_sum(kind: int) -> None:
    assert drift(kind, 100_000, 1_000) < 1e-13


@pytest.mark.slow
def test_the_root_stays_the_exact_sum_over_ten_million_updates() -> None:
    assert drift(0, 10_000_000, 256) < 1e-12


@given(sizes, tops, seeds)
def test_the_tree_kernels_do_what_their_twins_do(capacity: int, top: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    trees = [Tree(capacity, kind, top=top) for kind in (0, 1)]
    for _ in range(3):
        some = rng.integers(0, capacity, rng.integers(1, 2 * capacity + 1))
        values = masses(rng, len(some))
        values[0] = 1.0
        for tree in trees:
            tree.set(some, values)
        np.testing.assert_array_equal(trees[0].tree, trees[1].tree)
        np.testing.assert_array_equal(trees[0].sums, trees[1].sums)
        np.testing.assert_array_equal(trees[0].least, trees[1].least)
        if trees[0].sums[-1]:
            targets = rng.random(40) * trees[0].sums[-1] * 1.01
            for one, other in zip(trees[0].find(targets), trees[1].find(targets), strict=True):
                np.testing.assert_array_equal(one, other)


def runs_of_lanes(rng: np.random.Generator) -> tuple[int, np.ndarray, list[tuple[int, int, int]]]:
    """Return the first segment, the lanes of segments, and runs of ids that do not overlap."""
    origin, lanes = int(rng.integers(0, 3)), rng.integers(0, 4, rng.integers(0, 4))
    runs = []
    for slot, width in enumerate(lanes.tolist()):
        for lane in range(width):
            row = 0
            for _ in range(rng.integers(0, 4)):
                step, count = int(rng.integers(1, 3)), int(rng.integers(1, 6))
                row += int(rng.integers(0, 3))
                runs.append((((slot + origin) << POSITION_BITS) | (row * width + lane), width * step, count))
                row += step * count
    return origin, lanes, [runs[i] for i in rng.permutation(len(runs))]
