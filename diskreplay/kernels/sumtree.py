"""Masses: powers of priorities, and a tree of their sums, from which leaves are drawn in proportion to their mass.

A power x ** y of a positive number is 2 ** (y * log2 x), both from their power series, which the compiler turns into
vector code; a call of libm for each number takes three times as long. A result y * log2 x bits above 1 is off by at
most about that many units in the last place, and is the same on every machine. With x = m * 2 ** e and m from sqrt(1/2)
to sqrt(2), log2 x = e + 2 / ln 2 * (s + s ** 3 / 3 + s ** 5 / 5 + ...), where s = (m - 1) / (m + 1); what is left out
is below 2 ** -54 of it. 2 ** p = 2 ** n * exp(f ln 2) with n the whole number nearest to p, f = p - n, and the series
of exp.

The tree has 8 children a node, one cache line. `tree` holds all levels one after the other, the leaves first: level l
is tree[starts[l] : starts[l + 1]], and node i of level l + 1 is the sum of the 8 entries from 8 * i on of level l,
added from left to right. The last level is the first with at most `TOP` nodes, and sums[i] is the sum of its nodes
before node i: the last of these is the total. Levels are padded with zeros to a multiple of 8. `least`, which may be
empty, holds the smallest mass that is not zero below each inner node, at the node's place in the tree less starts[1],
and behind them that of all; 0 where all are.

A node is always added up anew from its children, so no rounding error outlives the next update. A search compares with
the same partial sums that made the node: while what it looks for is less than the node's sum, the child it takes
has a mass above zero. Clamping to the largest number below a child's mass keeps that true after the subtraction.
"""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints

from . import jit
from .jit import bits_of, number_of

# Highest power first, for Horner's scheme.
_LOG = tuple(2.0 / math.log(2.0) / (2 * k + 1) for k in range(10, -1, -1))
_EXP = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
_LOG_FIRST, _LOG_REST = _LOG[0], _LOG[1:]
_EXP_FIRST, _EXP_REST = _EXP[0], _EXP[1:]
_ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
_EXPONENT = 52  # the bit where it starts
# Masses lie between two to these: sums of 1e17 of them are finite, and none is lost to denormal numbers.
SMALLEST, LARGEST = -963.0, 963.0
# Added to a number of less than 2 ** 51, it leaves the nearest whole number in the lowest bits.
_ROUND = 1.5 * 2.0**52


@jit.kernel("none", "floats", "float", "float", "float", "out_floats", "out_floats", shared=True)
def powers(values: Floats, exponent: float, low: float, high: float, numbers: Floats, out: Floats) -> None:
    """Raise positive values to a power, and keep the results from 2 ** low to 2 ** high; -1022 <= low <= high <= 1023.

    `numbers` is scratch memory of the same length; none of the three shares any.
    """
    for i in range(values.size):
        bits = bits_of(values[i])
        e = (bits - _ROOT_OF_HALF) >> _EXPONENT
        numbers[i] = number_of(bits - (e << _EXPONENT))
        out[i] = np.float64(e)
    for i in range(values.size):
        s = (numbers[i] - 1.0) / (numbers[i] + 1.0)
        square = s * s
        series = _LOG_FIRST
        for a in _LOG_REST:
            series = series * square + a
        p = exponent * (out[i] + series * s)
        p = p if p > low else low
        p = p if p < high else high
        numbers[i] = p + _ROUND
        f = p - (numbers[i] - _ROUND)
        series = _EXP_FIRST
        for a in _EXP_REST:
            series = series * f + a
        out[i] = series
    for i in range(values.size):
        out[i] = number_of(bits_of(out[i]) + (bits_of(numbers[i]) << _EXPONENT))


@jit.kernel("none", "floats", "float", "float", "out_floats2", "out_floats32")
def weights(chances: Floats, least: float, exponent: float, scratch: Floats, out: NDArray[np.float32]) -> None:
    """Write (least / chance) ** exponent, at most 1; `least` 0 is the smallest of these chances, NaN aside.

    `scratch` is memory, (3, n).
    """
    if least == 0.0:
        # Positive numbers are in the order of their bits, and the compiler may take the least of these eight at a time.
        bits = np.uint64(bits_of(math.inf))
        for i in range(chances.size):
            mine = np.uint64(bits_of(chances[i]))
            bits = mine if mine < bits else bits
        least = number_of(int(bits))
    ratios, numbers, found = scratch[0], scratch[1], scratch[2]
    for i in range(chances.size):
        ratios[i] = least / chances[i]
    powers(ratios, exponent, -1022.0, 0.0, numbers, found)
    for i in range(chances.size):
        out[i] = np.float32(found[i])


FAN_OUT = 8
# Halving a list of so many sums, and adding it up anew, costs less than the levels that would be above.
TOP = 512
SOME = 6  # numbers that `sumtree_find` keeps in memory
FAN_OUT_BITS = 3
# Times any normal number: a little less than that number.
_BELOW = 1.0 - 2.0**-52
# Makes an index that is not tested for being negative.
_at = np.uint64


def tree_starts(capacity: int, top: int = TOP) -> Ints:
    """Return where the levels of a tree start, and its length; the last level has at most `top` nodes."""
    starts, nodes = [0], max(capacity, 1)
    while True:
        starts.append(starts[-1] + -(-nodes // FAN_OUT) * FAN_OUT)
        if nodes <= top:
            return np.array(starts, np.int64)
        nodes = -(-nodes // FAN_OUT)


def tree_arrays(capacity: int, least: bool, top: int, tree: Floats) -> tuple[Ints, Floats, Floats, Floats]:
    """Return `starts`, `tree`, `sums` and `least` of a tree without any mass; `least` is empty if nobody wants it.

    `tree` is memory for it from the beginning of a cache line on: zeros, as many as the last of `tree_starts`.
    """
    starts = tree_starts(capacity, top)
    smallest = np.zeros(starts[-1] - starts[1] + 1 if least else 0)
    return starts, tree, np.zeros(starts[-1] - starts[-2] + 1), smallest


@jit.inner
def _smallest(first: int, count: int, inner: int, tree: Floats, least: Floats) -> float:
    """Return the smallest mass that is not 0 below so many entries, 0 if none; inner nodes start at `inner`."""
    smallest = math.inf
    for i in range(first, first + count):
        mass = least[_at(i - inner)] if i >= inner else tree[_at(i)]
        mass = mass if mass > 0.0 else math.inf
        smallest = mass if mass < smallest else smallest
    return smallest if smallest < math.inf else 0.0


@jit.kernel("none", "ints", "floats", "ints", "out_floats", "out_floats", "out_floats", "out_ints", shared=True)
def sumtree_set(
    leaves: Ints, values: Floats, starts: Ints, tree: Floats, sums: Floats, least: Floats, changed: Ints
) -> None:
    """Give leaves their masses, the last one where a leaf is named twice, and add up the nodes above them.

    A node is added up once where its children follow each other, and where there are more leaves than nodes. `changed`
    is scratch memory, a number a leaf.
    """
    for i in range(leaves.size):
        tree[_at(leaves[i])] = values[i]
        changed[i] = leaves[i]
    count = np.int64(leaves.size)
    for level in range(1, starts.size - 1):
        below, here = starts[level - 1], starts[level]
        nodes = (here - below) >> FAN_OUT_BITS
        every = count >= nodes
        found, previous = np.int64(0), np.int64(-1)
        for i in range(0 if every else count):
            node = changed[_at(i)] >> FAN_OUT_BITS
            found += np.int64(node != previous)
            changed[_at(found - 1)] = node
            previous = node
        count = nodes if every else found
        for i in range(count):
            node = np.int64(i) if every else changed[_at(i)]
            child = below + (node << FAN_OUT_BITS)
            total = 0.0
            for k in range(FAN_OUT):
                total += tree[_at(child + k)]
            tree[_at(here + node)] = total
        for i in range(count if least.size else 0):
            node = np.int64(i) if every else changed[_at(i)]
            first = below + (node << FAN_OUT_BITS)
            least[_at(here + node - starts[1])] = _smallest(first, FAN_OUT, starts[1], tree, least)
    top = starts[starts.size - 2]
    total = 0.0
    for i in range(sums.size - 1):
        total += tree[_at(top + i)]
        sums[_at(i + 1)] = total
    if least.size:
        least[least.size - 1] = _smallest(top, sums.size - 1, starts[1], tree, least)


@jit.kernel("none", "ints", "floats", "floats", "ints2", "out_floats", "out_ints", "out_floats")
def sumtree_find(
    starts: Ints, tree: Floats, sums: Floats, notes: Ints, mass: Floats, leaves: Ints, some: Floats
) -> None:
    """Find the leaf at each cumulated mass from 0 to the total; `mass` is overwritten with the leaf's own.

    `notes` has a byte a leaf, in lines that the caller reads next: those of the leaves found are loaded meanwhile.

    Level by level for all at once, without a branch on data: cache misses overlap. The total must not be 0. `some` is
    scratch memory for `SOME` numbers.
    """
    below_total = sums[_at(sums.size - 1)] * _BELOW
    for i in range(mass.size):
        leaves[i] = 0
        mass[i] = mass[i] if mass[i] > 0.0 else 0.0
        mass[i] = mass[i] if mass[i] < below_total else below_total
    size = sums.size - 1
    while size > 1:
        half = size >> 1
        for i in range(mass.size):
            further = leaves[i] + half
            leaves[i] = jit.either(sums[_at(further)] <= mass[i], further, leaves[i])
        size -= half
    top = starts[starts.size - 2]
    for i in range(mass.size):
        left, most = mass[i] - sums[_at(leaves[i])], tree[_at(top + leaves[i])] * _BELOW
        mass[i] = left if left < most else most
    # In memory, because a choice among registers becomes a branch: the sums before each pair, then before two children.
    some[0] = 0.0
    for level in range(starts.size - 3, -1, -1):
        # What will be read next lies from the address `after` on, `width` bytes for each child.
        start, after, width = starts[level], np.int64(notes.ctypes.data), np.int64(1)
        if level > 0:
            after, width = np.int64(tree.ctypes.data) + 8 * starts[level - 1], np.int64(64)
        for i in range(mass.size):
            # Three sums are compared to find the two children that matter, then the one between these.
            x, j = mass[i], start + (leaves[i] << FAN_OUT_BITS)
            a = tree[_at(j)] + tree[_at(j + 1)]
            b = a + tree[_at(j + 2)] + tree[_at(j + 3)]
            c = b + tree[_at(j + 4)] + tree[_at(j + 5)]
            some[1], some[2], some[3] = a, b, c
            pair = np.int64(a <= x) + np.int64(b <= x) + np.int64(c <= x)
            j += pair << 1
            before = some[_at(pair)]
            some[4], some[5] = before, before + tree[_at(j)]
            second = np.int64(some[5] <= x)
            node = j + second - start
            jit.prefetch(after + node * width)
            leaves[i] = node
            left, most = x - some[_at(second + 4)], tree[_at(j + second)] * _BELOW
            mass[i] = left if left < most else most
    for i in range(mass.size):
        mass[i] = tree[_at(leaves[i])]
