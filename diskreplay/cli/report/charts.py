"""Makes the charts of a report, and the statistics of each field."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typer import BadParameter

import diskreplay as dr
from diskreplay.cli.look.chart import Chart, Series
from diskreplay.cli.look.plot import MOST_SERIES, distribution, in_units, of_elements, over_episodes, priorities_chart
from diskreplay.cli.report.sample import STEPS, Episodes, Steps
from diskreplay.errors import ReplayError, SegmentGone
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.documents.state_files import state_names

BINS = 40  # the number of bins of the time axis
ACTIONS, STATES = 3, 4  # a report has charts of at most this many actions, and this many saved states
STATE_BYTES = 64 << 20  # larger saved states are not read


def charts_of(store: dr.Store, info: Mapping[str, Any], steps: Steps, episodes: Episodes) -> Iterator[Chart]:
    ended = episodes.ended != "open"
    for name in ("total_reward", "length"):
        values = getattr(episodes, name)[ended].astype(np.float64)
        if np.count_nonzero(np.isfinite(values)) > 1:
            yield over_episodes(name, values)
    yield from _of_fields(store, steps)
    yield from _of_times(info, steps)
    yield from _of_priorities(store, steps)


def _of_fields(store: dr.Store, steps: Steps) -> Iterator[Chart]:
    actions = [path for path in store.schema.step_leaves if path.split("/")[0] == "action"]
    for path in ["reward", *actions[:ACTIONS]]:
        rows = steps.read(path)[1]
        if np.isfinite(rows).any():
            yield of_elements(f"{path}: how often", rows)


def _of_times(info: Mapping[str, Any], steps: Steps) -> Iterator[Chart]:
    ids, times = steps.times()
    if not len(times):
        return
    yield distribution("ages of steps", *in_units(times.max() - times, "before the newest"))
    after, unit = in_units(times - times.min(), "after the oldest")
    writers = {row["number"]: row["writer"] for row in info["segments"]}
    segments, place = np.unique(ids >> layout.POSITION_BITS, return_inverse=True)
    named = np.array([-1 if (writer := writers.get(number)) is None else writer for number in segments.tolist()])[place]
    edges = np.linspace(0, after.max() or 1.0, BINS + 1)
    weight = steps.total / len(steps.ids)
    series = [
        Series(name, (edges[1:] + edges[:-1]) / 2, weight * np.histogram(after[mask], edges)[0])
        for name, mask in _by_writer(named)
    ]
    yield Chart("steps by writer over time", unit, "steps", series, bars=False, lines=True)


def _by_writer(writers: NDArray[np.int64]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield the name of each of the writers with the most steps, and a mask of its steps.

    At the end, yield all other writers as one, if there are any.
    """
    numbers, counts = np.unique(writers, return_counts=True)
    most = numbers[np.argsort(-counts, kind="stable")]
    alone = most if len(most) <= MOST_SERIES else most[: MOST_SERIES - 1]
    for number in np.sort(alone).tolist():
        yield "unknown writer" if number < 0 else f"writer {number}", writers == number
    if len(alone) < len(most):
        yield f"{len(most) - len(alone)} others", ~np.isin(writers, alone)


def _of_priorities(store: dr.Store, steps: Steps) -> Iterator[Chart]:
    priorities = steps.snapshot.priorities(np.ascontiguousarray(steps.ids))
    if np.isfinite(priorities).any():
        yield distribution("initial priorities, |TD error|", priorities, "priority")
    root = read_root(store.path)
    for name in islice(state_names(root), STATES):
        if disk_usage(root.folder / layout.SAMPLERS / name)[0] <= STATE_BYTES:
            try:
                yield priorities_chart(store, [name], None)
            except (ReplayError, ValueError, BadParameter):
                continue  # the state has no priorities, was deleted, or is damaged (see `diskreplay verify`)


ELEMENTS = 4_000_000  # the maximum number of elements of a field that are read
FIELDS = 60  # the maximum number of fields in the table


@dataclass(frozen=True)
class Statistics:
    """Statistics of ``count`` values.

    ``zeros`` and ``not_finite`` are shares of the values, from 0 to 1; None if there are no values. All other
    attributes are about the finite values; None if no value is finite.
    """

    count: int
    least: float | None = None
    mean: float | None = None
    greatest: float | None = None
    deviation: float | None = None
    zeros: float | None = None
    not_finite: float | None = None
    histogram: NDArray[np.int64] | None = None


def statistics_of(values: NDArray[Any]) -> Statistics:
    every = values.ravel()
    finite = every[np.isfinite(every)]
    if not len(finite):
        return Statistics(len(every), zeros=0.0, not_finite=1.0) if len(every) else Statistics(0)
    numbers = finite.astype(np.float64)
    with np.errstate(over="ignore"):  # a sum of large floats may overflow
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
    firsts = store.snapshot.episodes.first[episodes.at]
    for path, leaf in [*store.schema.leaves.items()][:FIELDS]:
        most = max(1, min(STEPS, ELEMENTS // math.prod(leaf.shape)))
        of_steps = path in store.schema.step_leaves
        yield path, leaf, statistics_of(steps.read(path, most)[1] if of_steps else _given(store, path, firsts[:most]))


def _given(store: dr.Store, path: str, firsts: NDArray[np.int64]) -> NDArray[Any]:
    try:
        values, given = store.snapshot.episode_values(path, firsts)
    except SegmentGone:
        return np.zeros(0)
    found: NDArray[Any] = values[given]
    return found
