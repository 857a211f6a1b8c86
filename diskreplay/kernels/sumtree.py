"""A tree of sums that draws leaves in proportion to their masses; a mass is a power of a priority.

A power x ** y of a positive number is 2 ** (y * log2 x). The functions 2 ** p and log2 are computed by power series,
which the compiler turns into vector code. A call of libm for each number takes three times as long. The error of 2 ** p
is at most about p units in the last place. The result is the same on every machine. For x = m * 2 ** e with m from
sqrt(1/2) to sqrt(2), log2 x = e + 2 / ln 2 * (s + s ** 3 / 3 + s ** 5 / 5 + ...), where s = (m - 1) / (m + 1). The
relative error of the truncated series is below 2 ** -54. The function 2 ** p is 2 ** n * exp(f ln 2), where n is the
integer nearest to p and f = p - n.

A node of the tree has 8 children, which fill one cache line. `tree` has all levels one after the other, the leaves
first: level l is tree[starts[l] : starts[l + 1]]. Node i of level l + 1 is the sum of entries 8 * i to 8 * i + 7 of
level l, added from left to right. Levels are padded with zeros to a multiple of 8. The last level is the first level
with at most `TOP` nodes. sums[i] is the sum of the last level's nodes before node i, so the last entry of `sums` is the
total. `least` is empty, or has an entry for each inner node: the smallest positive mass of the leaves below the node,
or 0. The entry of the node tree[i] is least[i - starts[1]]. The last entry of `least` is the smallest positive mass of
all leaves.

A node is always summed again from all of its children, so rounding errors do not accumulate. A search and the sum of a
node use the same partial sums. So if the searched mass is less than the node's sum, the search selects a child with a
positive mass. The search subtracts the masses before this child, and limits the difference to less than the child's
mass. So the child at the next level has a positive mass, too.
"""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import Floats, Ints

from . import jit
from .jit import bits_of, number_of

# Coefficients of the power series, highest power first, for Horner's scheme.
_LOG = tuple(2.0 / math.log(2.0) / (2 * k + 1) for k in range(10, -1, -1))
_EXP = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
_LOG_FIRST, _LOG_REST = _LOG[0], _LOG[1:]
_EXP_FIRST, _EXP_REST = _EXP[0], _EXP[1:]
_ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
_EXPONENT = 52  # The position of the exponent's lowest bit in a float64.
# The smallest and the largest mass, as binary logarithms. With these limits, sums of 1e17 masses are finite, and no
# mass is a denormal number.
SMALLEST, LARGEST = -963.0, 963.0
# If this number is added to a number below 2 ** 51, the lowest bits of the sum are the nearest integer.
_ROUND = 1.5 * 2.0**52


@jit.kernel("none", "floats", "float", "float", "float", "out_floats", "out_floats", shared=True)
def powers(values: Floats, exponent: float, low: float, high: float, numbers: Floats, out: Floats) -> None:
    """Raise positive values to a power, and clip the results to 2 ** low and 2 ** high; -1022 <= low <= high <= 1023.

    `numbers` is scratch memory, as long as `values`. The three arrays must not overlap.
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
    """Write min(1, (least / chance) ** exponent) for each chance.

    If `least` is 0, the smallest chance that is not NaN replaces `least`. `scratch` is scratch memory, (3, n).
    """
    if least == 0.0:
        # Positive floats sort like their bits, read as integers. The compiler turns a search for the smallest integer
        # into vector code.
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
# The largest number of nodes in the last level, at the top of the tree. A binary search among this many sums costs less
# than more levels.
TOP = 512
SOME = 6  # the length of the scratch memory of `sumtree_find`
FAN_OUT_BITS = 3
# A factor that makes any normal number slightly smaller.
_BELOW = 1.0 - 2.0**-52
_at = np.uint64


def tree_starts(capacity: int, top: int = TOP) -> Ints:
    """Return the index in `tree` where each level starts and, as the last entry, the length of `tree`."""
    starts, nodes = [0], max(capacity, 1)
    while True:
        starts.append(starts[-1] + -(-nodes // FAN_OUT) * FAN_OUT)
        if nodes <= top:
            return np.array(starts, np.int64)
        nodes = -(-nodes // FAN_OUT)


def tree_arrays(capacity: int, least: bool, top: int, tree: Floats) -> tuple[Ints, Floats, Floats, Floats]:
    """Return `starts`, `tree`, `sums` and `least` of a tree without any mass; `tree` must be zeros.

    The array `least` is empty if the argument `least` is False.
    """
    starts = tree_starts(capacity, top)
    smallest = np.zeros(starts[-1] - starts[1] + 1 if least else 0)
    return starts, tree, np.zeros(starts[-1] - starts[-2] + 1), smallest


@jit.inner
def _smallest(first: int, count: int, inner: int, tree: Floats, least: Floats) -> float:
    """Return the smallest positive mass of leaves below nodes `first` to `first + count - 1` of `tree`, or 0.

    Entries of `tree` before index `inner` are leaves, and count with their own mass.
    """
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
    """Set the masses of leaves, and sum the nodes above them; if a leaf occurs twice, its last mass counts.

    If the leaves of a node are not next to each other in `leaves`, the node may be summed several times. `changed` is
    scratch memory with a number per leaf.
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
    """Write the leaf at each cumulative mass in `mass` to `leaves`; then write the masses of these leaves to `mass`.

    All searches go down the tree together, level by level and without a branch on data, so that cache misses overlap.
    `notes` is memory with a byte per leaf. The call prefetches the bytes of the found leaves, because the caller reads
    these bytes next. The total mass must not be 0. `some` is scratch memory for `SOME` numbers.
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
    # Entries 0 to 3 of `some` are the sums of the masses before each pair of children. Entries 4 and 5 are the sums of
    # the masses before the two children of the found pair. The sums are in an array, because a choice among registers
    # would become a branch.
    some[0] = 0.0
    for level in range(starts.size - 3, -1, -1):
        # `after` is the address of the data to prefetch: the next lower level, or `notes` below the leaves. Each child
        # has `width` bytes of this data.
        start, after, width = starts[level], np.int64(notes.ctypes.data), np.int64(1)
        if level > 0:
            after, width = np.int64(tree.ctypes.data) + 8 * starts[level - 1], np.int64(64)
        for i in range(mass.size):
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
