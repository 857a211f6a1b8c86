"""Newer ids more often."""

import math

import numpy as np
from numpy.typing import NDArray

from diskreplay.kernels.runs import SEGMENT_SHIFT, lane_keys
from diskreplay.sampling.base import Draw
from diskreplay.sampling.population import Population
from diskreplay.sampling.schedule import Schedule, number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Recency:
    """Draw each id with a probability that halves with every `half_life` newer ones, with replacement.

    P(i) ∝ 2 ** (-age / half_life), where age counts the ids that can be drawn and are newer. Ids are as old as their
    order says: segment by segment, and inside a segment row by row through all lanes.

    Without state of its own, but with an index that is made anew when the store has news: not thread-safe, and quicker
    when each sampler has its own.

    Parameters
    ----------
    half_life : float
        In ids that can be drawn (steps, for transitions), above 0.

    Raises
    ------
    ValueError
        `half_life` is none of these.
    """

    weighted = False

    def __init__(self, half_life: float) -> None:
        self._half_life = number("half_life", half_life, above=0.0)
        self._index: tuple[Population, int, _Ages] | None = None

    def __repr__(self) -> str:
        return f"Recency(half_life={self._half_life:g})"

    def draw(self, population: Population, size: int, rng: np.random.Generator) -> Draw:
        """Draw `size` ids of a population that is not empty."""
        # The inverse of the distribution function 1 - 2 ** (-age / half_life), cut off at the oldest.
        rate = math.log(2.0) / self._half_life
        below = -math.expm1(-rate * population.size)
        ages = np.log1p(rng.random(size) * -below) / -rate
        return Draw(self._ages(population).ids(np.minimum(ages.astype(np.int64), population.size - 1)))

    def chances(self, population: Population, ids: Ints) -> Floats:
        """Return the probability with which each id is drawn, (n,); 0 where it cannot be."""
        found = np.zeros(len(ids))
        drawable = population.contains(ids)
        if drawable.any():
            rate = math.log(2.0) / self._half_life
            ages = self._ages(population).of(ids[drawable])
            # Those of all ages add up to 1: a geometric series.
            found[drawable] = np.exp(-rate * ages) * (math.expm1(-rate) / math.expm1(-rate * population.size))
        return found

    def weigh(self, draw: Draw, beta: float | Schedule | None, batches: int = 0) -> NDArray[np.float32] | None:
        """Return None: all ids weigh 1."""
        return None

    def _ages(self, population: Population) -> "_Ages":
        if self._index is None or self._index[0] is not population or self._index[1] != population.version:
            self._index = population, population.version, _Ages(population)
        return self._index[2]


class _Ages:
    """The ids of a population in the order of their age."""

    def __init__(self, population: Population) -> None:
        # Here and not above: it loads numba, which nobody needs to make a distribution.
        from diskreplay.kernels.table import chosen

        self._newest, self._count_newer = chosen("newest"), chosen("count_newer")
        first, stride, count = population.runs()
        origin, lanes = population.segments
        order = np.argsort(lane_keys(first, origin, lanes), kind="stable")
        first, stride, count = first[order], stride[order], count[order]
        segment = first >> SEGMENT_SHIFT
        lane = first % lanes[segment - origin]
        in_lane = np.ones(len(first), np.bool_)
        in_lane[1:] = (segment[1:] != segment[:-1]) | (lane[1:] != lane[:-1])
        starts = np.flatnonzero(in_lane)
        in_segment = np.flatnonzero(np.append(True, segment[starts][1:] != segment[starts][:-1]))
        before = np.cumsum(count)
        ends = np.append(starts, len(first))
        after = np.repeat(before[ends[1:] - 1], np.diff(ends)) - before
        self._segments = segment[starts[in_segment]]
        segment_ends = np.append(starts[in_segment], len(first))[1:]
        newer = before[-1] - before[segment_ends - 1]
        self._arrays = newer, np.append(in_segment, len(starts)), ends, first, stride, count, after

    def ids(self, ages: Ints) -> Ints:
        """Return the id of each age."""
        out = np.empty(len(ages), np.int64)
        self._newest(ages, *self._arrays, out)
        return out

    def of(self, ids: Ints) -> Ints:
        """Return the age of each id."""
        out = np.empty(len(ids), np.int64)
        self._count_newer(ids, np.searchsorted(self._segments, ids >> SEGMENT_SHIFT), *self._arrays, out)
        return out
