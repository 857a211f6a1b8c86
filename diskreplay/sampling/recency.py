"""Newer ids more often."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import POSITION_BITS
from diskreplay.kernels.runs import IdRuns, joined, keep, lane_keys
from diskreplay.kernels.table import chosen
from diskreplay.sampling.base import Draw
from diskreplay.sampling.population import Mark, Population
from diskreplay.sampling.schedule import Schedule, number

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Ended runs from which on they are sorted in among all others.
SMALL = 1024


class Recency:
    """Draw each id with a probability that halves with every `half_life` newer ones, with replacement.

    P(i) ∝ 2 ** (-age / half_life), where age counts the ids that can be drawn and are newer. Ids are as old as their
    order says: segment by segment, and inside a segment row by row through all lanes.

    Without state of its own, but with an index that follows the store: not thread-safe, and quicker when each sampler
    has its own.

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
        self._index: tuple[Population, _Ages] | None = None

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
        if self._index is None or self._index[0] is not population:
            self._index = population, _Ages()
        ages = self._index[1]
        ages.follow(population)
        return ages


class _Groups(NamedTuple):
    """Runs in groups, one a lane.

    First, stride, count and `after` of each run, (4, n), and of each group its segment, where its runs start and stop,
    and how many ids it has.
    """

    runs: Ints
    segment: Ints
    starts: Ints
    stops: Ints
    size: Ints


class _Ages:
    """The ids of a population in the order of their age; to follow it costs what is new, and now and then a sort.

    Ids that the frontier has passed may still be among them: they are the oldest, and change no other's age.
    """

    def __init__(self) -> None:
        self._newest, self._count_newer = chosen("newest"), chosen("count_newer")
        self._version = 0
        self._mark: Mark | None = None
        self._settled = _grouped(_NO_RUNS, 0, 0, _NO_RUNS.first)
        self._recent = _NO_RUNS  # ended runs that are not settled
        self._runs = np.zeros((4, 0), np.int64)  # the settled ones, and room for the others

    def follow(self, population: Population) -> None:
        """Look at what has changed."""
        if population.version == self._version:
            return
        changes = population.changes(self._mark)
        ended = len(changes.runs.first) - changes.loose
        new, still_open = _part(changes.runs, 0, ended), _part(changes.runs, ended + changes.left, None)
        if changes.whole:
            self._settle(joined([new, _part(changes.runs, ended, ended + changes.left)]), population)
        else:
            self._recent = joined([self._recent, new])
            if len(self._recent.first) > SMALL:
                self._settle(joined([IdRuns(*self._settled.runs[:3]), self._recent]), population)
        self._mark = changes.mark
        self._arrange(_grouped(joined([self._recent, still_open]), population.frontier, *population.segments))
        self._version = population.version

    def _settle(self, runs: IdRuns, population: Population) -> None:
        """Sort these runs for good."""
        self._mark = None  # until all is done, and again where that fails
        self._recent = _NO_RUNS
        self._settled = _grouped(runs, population.frontier, *population.segments)
        self._runs = self._settled.runs

    def _arrange(self, others: _Groups) -> None:
        """Put the groups of the runs that are not settled beside those that are, in the order of their segments."""
        settled = self._settled
        count = settled.runs.shape[1]
        end = count + others.runs.shape[1]
        if end > self._runs.shape[1]:
            self._runs = np.empty((4, 2 * end - count + SMALL), np.int64)
            self._runs[:, :count] = settled.runs
            self._settled = settled._replace(runs=self._runs[:, :count])
        self._runs[:, count:end] = others.runs
        segment = np.append(settled.segment, others.segment)
        order = np.argsort(segment, kind="stable")
        segment, starts = segment[order], np.append(settled.starts, others.starts + count)[order]
        stops = np.append(settled.stops, others.stops + count)[order]
        groups = _where_new(segment)
        sizes = np.cumsum(np.append(settled.size, others.size)[order])[np.append(groups[1:], len(segment)) - 1]
        self._segments = segment[groups]
        self._arrays = sizes[-1:] - sizes, np.append(groups, len(segment)), starts, stops, *self._runs[:, :end]

    def ids(self, ages: Ints) -> Ints:
        """Return the id of each age."""
        out = np.empty(len(ages), np.int64)
        self._newest(ages, *self._arrays, out)
        return out

    def of(self, ids: Ints) -> Ints:
        """Return the age of each id."""
        out = np.empty(len(ids), np.int64)
        self._count_newer(ids, np.searchsorted(self._segments, ids >> POSITION_BITS), *self._arrays, out)
        return out


_NO_RUNS = IdRuns(*(np.zeros(0, np.int64) for _ in IdRuns._fields))


def _grouped(runs: IdRuns, frontier: int, origin: int, lanes: Ints) -> _Groups:
    """Sort the runs that do not lie below the frontier whole; the segments of those may be gone."""
    runs = keep(runs, runs.first + (runs.count - 1) * runs.stride >= frontier)
    order = np.argsort(lane_keys(runs.first, origin, lanes), kind="stable")
    first, stride, count = (column[order] for column in runs)
    segment = first >> POSITION_BITS
    starts = _where_new(segment, first % lanes[segment - origin])
    stops = np.append(starts[1:], len(first)) if len(first) else starts
    before = np.cumsum(count)
    size = np.diff(before[stops - 1], prepend=0)
    after = np.repeat(before[stops - 1], stops - starts) - before
    return _Groups(np.stack([first, stride, count, after]), segment[starts], starts, stops, size)


def _where_new(*columns: Ints) -> Ints:
    """Return the places at which any of these differs from what is before it."""
    new = np.ones(len(columns[0]), np.bool_)
    new[1:] = False
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def _part(runs: IdRuns, start: int, stop: int | None) -> IdRuns:
    return IdRuns(*(column[start:stop] for column in runs))
