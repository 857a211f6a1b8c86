"""What the values of each field are like."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli.plot import distribution
from diskreplay.cli.report.sample import STEPS, Episodes, Steps
from diskreplay.errors import SegmentGone

ELEMENTS = 4_000_000  # most that are read of a field
FIELDS = 60  # most of which there is a line


@dataclass(frozen=True)
class Statistics:
    """What values are like: None where there is no finite one. Shares are from 0 to 1, None where there is no value."""

    count: int
    least: float | None = None
    mean: float | None = None
    greatest: float | None = None
    deviation: float | None = None
    zeros: float | None = None
    not_finite: float | None = None
    histogram: NDArray[np.int64] | None = None


def statistics_of(values: NDArray[Any]) -> Statistics:
    """Return what an array's elements are like."""
    every = values.ravel()
    finite = every[np.isfinite(every)]
    if not len(finite):
        return Statistics(len(every), zeros=0.0, not_finite=1.0) if len(every) else Statistics(0)
    numbers = finite.astype(np.float64)
    with np.errstate(over="ignore"):  # sums of the largest floats
        mean, deviation = float(numbers.mean()), float(numbers.std())
    return Statistics(
        count=len(every),
        least=float(numbers.min()),
        mean=mean,
        greatest=float(numbers.max()),
        deviation=deviation,
        zeros=1 - np.count_nonzero(every) / len(every),
        not_finite=1 - len(finite) / len(every),
        histogram=distribution("", finite, "").series[0].y,
    )


def statistics_of_fields(
    store: dr.Store, steps: Steps, episodes: Episodes
) -> Iterator[tuple[str, dr.Field, Statistics]]:
    """Yield the path of each field, the first ones, with what its values are like."""
    firsts = store.snapshot.episodes.first[episodes.at]
    for path, leaf in [*store.schema.leaves.items()][:FIELDS]:
        most = max(1, min(STEPS, ELEMENTS // math.prod(leaf.shape)))
        of_steps = path in store.schema.step_leaves
        yield path, leaf, statistics_of(steps.read(path, most)[1] if of_steps else _given(store, path, firsts[:most]))


def _given(store: dr.Store, path: str, firsts: NDArray[np.int64]) -> NDArray[Any]:
    """Return the values of an episode field that episodes were given; none where one of them has just left."""
    try:
        values, given = store.snapshot.episode_values(path, firsts)
    except SegmentGone:
        return np.zeros(0)
    found: NDArray[Any] = values[given]
    return found
