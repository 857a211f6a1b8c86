"""Random numbers, and a search for the ids at given or random positions in runs of ids."""

import numpy as np

from diskreplay.ids import Floats, Ints, mixed

from . import jit, packed
from .runs import BEFORE, BLOCK, COARSE, COARSE_BITS, FIRST, STRIDE

mix = jit.inner(mixed)


@jit.inner
def fraction(key: int, i: int) -> float:
    """Return random number `i` of a sequence, 0 <= number < 1.

    The number is the highest 53 bits of output `i` of splitmix64 with the seed `key` (Steele et al. 2014).
    """
    number = mix(np.uint64(key) + np.uint64(i + 1) * np.uint64(0x9E3779B97F4A7C15))
    return float(np.int64(number >> np.uint64(11)) * 2.0**-53)


@jit.inner
def _write_ids(wanted: Ints, low: int, high: int, block: Ints, coarse: Ints, out: Ints) -> None:
    """Write the id at each position of `wanted` to `out`; positions are counted from the first id of run 0.

    All positions are in runs `low` to `high` - 1. For `block` and `coarse` see `runs.RULE`. The search finds the last
    run that starts at or before a position. If there are many runs, `coarse` is searched first, because it fills few
    cache lines. All searches halve their ranges together, without a branch on data. So cache misses overlap, and the
    inner loop becomes vector code.
    """
    before, first, stride = block[BEFORE], block[FIRST], block[STRIDE]
    covered = coarse.size << COARSE_BITS
    is_coarse = covered > low
    start = low >> COARSE_BITS if is_coarse else low
    for i in range(out.size):
        out[i] = start
    numbers, width = coarse if is_coarse else before, coarse.size - start if is_coarse else high - low
    while True:
        while width > 1:
            half = width >> 1
            for i in range(out.size):
                further = out[i] + half
                out[i] = jit.either(numbers[np.uint64(further)] <= wanted[i], further, out[i])
            width -= half
        if not is_coarse:
            break
        for i in range(out.size):
            out[i] <<= COARSE_BITS
        numbers, width, is_coarse = before, 1 << COARSE_BITS, False
    for i in range(out.size if low < covered < high else 0):  # search again in the runs that `coarse` leaves out
        if before[covered] <= wanted[i]:
            out[i], width = covered, high - covered
            while width > 1:
                half = width >> 1
                further = out[i] + half
                out[i] = jit.either(before[np.uint64(further)] <= wanted[i], further, out[i])
                width -= half
    for i in range(out.size):
        run = np.uint64(out[i])
        out[i] = first[run] + (wanted[i] - before[run]) * stride[run]


@jit.kernel("none", "floats", "int", "int", "ints2", "out_ints2")
def ids_at(positions: Floats, low: int, high: int, record: Ints, memory: Ints) -> None:
    """Write to the first row of `memory` the id at the integer part of each position in runs `low` to `high` - 1.

    Positions are counted from the first id of run `low`. For the `record` see `runs.RULE`; its array COARSE may leave
    out the last runs. `memory` is (2, positions); its second row is scratch memory.
    """
    block, coarse, out, wanted = packed.ints2(record, BLOCK), packed.ints(record, COARSE), memory[0], memory[1]
    for i in range(out.size):
        wanted[i] = np.int64(positions[i]) + block[BEFORE, low]
    _write_ids(wanted, low, high, block, coarse, out)


@jit.kernel("none", "int", "int", "int", "ints2", "out_ints2")
def random_ids(key: int, low: int, high: int, record: Ints, memory: Ints) -> None:
    """Write random ids of runs `low` to `high` - 1, all with the same probability, to the first row of `memory`.

    For `key` see `fraction`, for `record` and `memory` see `ids_at`.
    """
    block, coarse, out, wanted = packed.ints2(record, BLOCK), packed.ints(record, COARSE), memory[0], memory[1]
    count = block[BEFORE, high] - block[BEFORE, low]
    for i in range(out.size):
        wanted[i] = np.int64(fraction(key, i) * count) + block[BEFORE, low]
    _write_ids(wanted, low, high, block, coarse, out)
