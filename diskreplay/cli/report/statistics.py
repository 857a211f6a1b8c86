"""What the values of each field are like."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import text
from diskreplay.cli.chart import Series
from diskreplay.cli.plot import distribution
from diskreplay.cli.report.sample import STEPS, Episodes, Steps
from diskreplay.cli.report.svg import sparkline
from diskreplay.errors import SegmentGone
from diskreplay.markup import Html, table, text as escaped

ELEMENTS = 4_000_000  # most that are read of a field
FIELDS = 60  # most of which there is a line

HEADERS = (
    *("field", "dtype", "shape", "space", ">min", ">mean", ">max", ">std", ">zeros", ">not finite"),
    *("histogram", ">values"),
)


@dataclass(frozen=True)
class Statistics:
    """What values are like: None where there is no finite one. Shares are from 0 to 1."""

    count: int
    least: float | None
    mean: float | None
    greatest: float | None
    deviation: float | None
    zeros: float
    not_finite: float
    histogram: Series | None


def statistics_of(values: NDArray[Any]) -> Statistics:
    """Return what an array's elements are like."""
    every = values.ravel()
    finite = every[np.isfinite(every)]
    if not len(finite):
        return Statistics(len(every), None, None, None, None, 0.0, 1.0 if len(every) else 0.0, None)
    numbers = finite.astype(np.float64)
    with np.errstate(over="ignore"):  # sums of the largest floats
        mean, deviation = float(numbers.mean()), float(numbers.std())
    (histogram,) = distribution("", finite, "").series
    zeros, lacking = 1 - np.count_nonzero(every) / len(every), 1 - len(finite) / len(every)
    return Statistics(
        len(every), float(numbers.min()), mean, float(numbers.max()), deviation, zeros, lacking, histogram
    )


def fields_table(store: dr.Store, steps: Steps, episodes: Episodes) -> Html:
    """Return the table of the fields, with what their values are like."""
    leaves = store.schema.leaves
    rows = [_row(path, leaves[path], statistics_of(values)) for path, values in _values(store, steps, episodes)]
    return table(HEADERS, rows, len(leaves))


def _values(store: dr.Store, steps: Steps, episodes: Episodes) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the path of each field, the first ones, with values of it."""
    firsts = store.snapshot.episodes.first[episodes.at]
    for path, leaf in [*store.schema.leaves.items()][:FIELDS]:
        most = max(1, min(STEPS, ELEMENTS // math.prod(leaf.shape)))
        yield (
            path,
            steps.read(path, most)[1] if path in store.schema.step_leaves else _given(store, path, firsts[:most]),
        )


def _given(store: dr.Store, path: str, firsts: NDArray[np.int64]) -> NDArray[Any]:
    """Return the values of an episode field that episodes were given; none where one of them has just left."""
    try:
        values, given = store.snapshot.episode_values(path, firsts)
    except SegmentGone:
        return np.zeros(0)
    found: NDArray[Any] = values[given]
    return found


def _row(path: str, leaf: dr.Field, found: Statistics) -> list[Html]:
    said = [path, leaf.dtype.name, "×".join(map(str, leaf.shape)) or "scalar", text.space(leaf.space)]
    said += [text.number(value) for value in (found.least, found.mean, found.greatest, found.deviation)]
    said += [_percent(share) if found.count else text.NOTHING for share in (found.zeros, found.not_finite)]
    histogram = escaped(text.NOTHING) if found.histogram is None else sparkline(found.histogram)
    return [*map(escaped, said), histogram, escaped(text.count(found.count))]


def _percent(share: float) -> str:
    """Give a share so that a little is not nothing, and nearly all not all."""
    if 0 < share < 0.001:
        return "< 0.1%"
    return "> 99.9%" if 0.999 < share < 1 else f"{100 * share:.1f}".removesuffix(".0") + "%"
