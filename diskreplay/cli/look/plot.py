"""`diskreplay plot`: draws statistics of episodes in the terminal or as a picture."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import compress
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.bounded_json import parse_json
from diskreplay.cli import console, text
from diskreplay.cli.look.chart import Chart, Series, draw, numbers, picture
from diskreplay.cli.look.show import chosen_leaves, short
from diskreplay.cli.where import Where, compile_where, matching
from diskreplay.distributions.saved_state import is_priority_table, saved_priorities, state_of
from diskreplay.errors import SegmentGone
from diskreplay.interop.exchange.exporting import in_order
from diskreplay.reading.episodes import Episode
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.documents.state_files import state_names

BINS = 40
WIDE = 100.0  # draw logarithms if the largest priority is at least this many times the smallest
MOST_SERIES = 6  # the maximum number of drawn elements of a vector
Ints = NDArray[np.int64]
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class Quantity(StrEnum):
    length = "length"
    total_reward = "total_reward"
    rewards = "rewards"
    actions = "actions"
    priorities = "priorities"
    ages = "ages"


def plot(
    path: console.StorePath,
    quantity: Annotated[
        Quantity, typer.Argument(metavar="WHAT", help="length, total_reward, rewards, actions, priorities or ages.")
    ],
    where: Where = None,
    field: Annotated[
        str | None, typer.Option("--field", metavar="FIELD", help="The field; default: the reward or the first action.")
    ] = None,
    sampler: Annotated[
        list[str] | None,
        typer.Option("--sampler", metavar="NAME", help="Only priorities of this saved sampler; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Save a .png or .svg file instead of drawing here.")
    ] = None,
) -> None:
    """Plot statistics of the episodes of a store.

    length and total_reward: a point for each ended episode, oldest first, with a running mean. rewards and actions: a
    histogram over all steps. priorities: a histogram of |td| + eps as samplers saved it, or of its logarithm if the
    values differ a hundredfold. ages: a histogram of the time from each step to the newest step. Charts are drawn in
    the terminal by plotext, or saved by matplotlib: pip install "diskreplay[plot]".
    """
    if out is not None and out.suffix not in (".png", ".svg"):
        raise typer.BadParameter(f"--out must end in .png or .svg, not {out}")
    if sampler and quantity is not Quantity.priorities:
        raise typer.BadParameter(f"--sampler is for priorities, not {quantity.value}")
    with dr.open(path) as store, console.bar("Reading episodes") as progress:
        found: list[Episode] = list(store.episodes)
        if where is not None:
            found = list(compress(found, matching(found, compile_where(where, store.schema))))
        if quantity is Quantity.priorities:
            ids = None if where is None else np.concatenate([np.zeros(0, np.int64), *(e.ids for e in found)])
            chart = priorities_chart(store, sampler or (), ids)
        else:
            chart = chart_of(quantity, in_order(found), store, field, progress)
    if out is None:
        console.emit(draw(chart))
    else:
        console.save(out, picture(chart, "svg" if out.suffix == ".svg" else "png"))
        console.emit(f"saved {text.clean(out)}")


def chart_of(
    quantity: Quantity, episodes: Sequence[Episode], store: dr.Store, field: str | None, progress: console.Report
) -> Chart:
    """Return the chart of a quantity other than priorities; raises BadParameter if there is nothing to draw."""

    def each(read: Callable[[Episode], Any]) -> list[Any]:
        found = []
        for done, episode in enumerate(episodes):
            with suppress(SegmentGone):
                found.append(read(episode))
            progress(done + 1, len(episodes))
        return found

    if quantity in (Quantity.length, Quantity.total_reward):
        episodes = [episode for episode in episodes if episode.ended != "open"]
        return over_episodes(quantity.value, np.array(each(attrgetter(quantity.value)), np.float64))
    _some(episodes)
    if quantity is Quantity.ages:
        times = np.concatenate(each(lambda episode: episode.times))
        return distribution("ages of steps", *in_units(times.max() - times, "before the newest"))
    is_reward = quantity is Quantity.rewards and field is None
    path = "reward" if is_reward else chosen_leaves(store.schema, [field or "action"])[0]
    rows = each(lambda episode: episode.rows(path, 0, len(episode)))
    return of_elements(text.clean(short(path)), np.concatenate(rows))


def over_episodes(name: str, values: NDArray[Any]) -> Chart:
    """Return the chart of a value per episode, with a running mean over a twentieth of the episodes."""
    is_number = np.isfinite(values)
    values, numbers = np.array(_some(values[is_number].tolist())), np.flatnonzero(is_number)
    width = max(1, len(values) // 20)
    sums = np.cumsum(np.insert(values, 0, 0.0))
    mean = (sums[width:] - sums[:-width]) / width
    series = [Series(name, numbers, values)]
    if width > 1:
        series.append(Series(f"mean of {width}", numbers[width - 1 :], mean))
    return Chart(f"{name} of {text.plural(len(values), 'episode')}", "episode, oldest first", name, series, bars=False)


def priorities_chart(store: dr.Store, samplers: Sequence[str], steps: Ints | None) -> Chart:
    """Return the chart of saved priorities. If ``samplers`` is empty, use all samplers.

    If ``steps`` is given, only priorities of these ids are drawn. Raises BadParameter if there are no priorities, and
    StoreNotFound if a sampler in ``samplers`` saved nothing.
    """
    saved = read_priorities(store, samplers)
    among = ((name, values if steps is None else values[np.isin(ids, steps)]) for name, (ids, values) in saved.items())
    columns = {name: values for name, values in among if len(values)}
    if not columns:
        which = f"sampler {', '.join(map(text.clean, samplers))}" if samplers else "any sampler of this store"
        raise typer.BadParameter(f"no priorities of these steps were saved by {which} (Sampler.save)")
    every = np.concatenate([*columns.values()])
    title, label = f"priorities of {text.plural(len(every), 'id')}", "|td| + eps"
    if every.min() > 0 and every.max() / every.min() >= WIDE:
        columns, label = {name: np.log10(values) for name, values in columns.items()}, f"log10 of {label}"
    if len(columns) == 1:
        ((name, values),) = columns.items()
        return distributions(f"{title}, {name}", {"": values}, label, "ids")
    return distributions(title, columns, label, "ids")


def distribution(title: str, values: NDArray[Any], label: str) -> Chart:
    """Return a histogram: a bar for each of at most `BINS` different integers, or else `BINS` bins of equal width."""
    return distributions(title, {"": values}, label)


def of_elements(title: str, rows: NDArray[Any]) -> Chart:
    return distributions(*elements(title, rows), "value")


def elements(title: str, rows: NDArray[Any]) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return a title, and the values of the first `MOST_SERIES` elements: {"[0]": the values of element 0 in all rows}.

    If the rows have more elements, the title says so.
    """
    columns = rows.reshape(len(rows), math.prod(rows.shape[1:])).T
    if len(columns) > MOST_SERIES:
        title += f", {MOST_SERIES} of {len(columns)} elements"
    names = [""] if len(columns) == 1 else [f"[{at}]" for at in range(MOST_SERIES)]
    return title, dict(zip(names, columns, strict=False))


def distributions(title: str, columns: dict[str, NDArray[Any]], label: str, of: str = "steps") -> Chart:
    every = _finite(np.concatenate([*columns.values()]))
    if every.dtype.kind in "biu" and (distinct := np.unique(every)).size <= BINS:
        series = [Series(name, distinct, _counts(values, distinct)) for name, values in columns.items()]
    else:
        edges = _edges(numbers(every))
        centres = (edges[1:] + edges[:-1]) / 2
        histograms = ((name, np.histogram(numbers(_finite(v)), edges)[0]) for name, v in columns.items())
        series = [Series(name, centres, counts) for name, counts in histograms]
    return Chart(title, label, of, series, bars=True)


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of `BINS` bins of equal width. This width is above 0, even if all values are equal."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        apart = max(0.5, 1e-9 * abs(low))
        low, high = low - apart, high + apart
    return np.linspace(low, high, BINS + 1)


def _counts(values: NDArray[Any], distinct: NDArray[Any]) -> NDArray[np.int64]:
    return np.bincount(np.searchsorted(distinct, values), minlength=len(distinct))


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = values[np.isfinite(values)]
    return found


def _some(values: Sequence[Any]) -> Sequence[Any]:
    if not values:
        raise typer.BadParameter("there is no episode to plot")
    return values


def in_units(seconds: NDArray[np.float64], label: str) -> tuple[NDArray[np.float64], str]:
    """Return times in the largest unit that is at most half of the longest time, and a label with this unit."""
    name, unit = next(((n, u) for n, u in _UNITS if seconds.max() >= 2 * u), _UNITS[-1])
    return seconds / unit, f"{name} {label}"


Saved = dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def read_priorities(store: dr.Store, samplers: Sequence[str]) -> Saved:
    """Return the saved ids of each sampler, and their priorities |td| + eps.

    If ``samplers`` is empty, use all samplers.
    """
    found: Saved = {}
    for name in samplers or state_names(read_root(store.path)):
        state = store.load_sampler_state(name)
        tables = list(_tables(state, ""))
        for kind, table in tables:
            with state_of(f"the sampler {name!r}"):
                label = name if len(tables) == 1 else f"{name}: {kind}"
                found[text.clean(label)] = saved_priorities(table)
    return found


def _tables(tree: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each table of priorities in a sampler's saved state, with the kind of the ids in the table."""
    if not isinstance(tree, Mapping):
        return
    if is_priority_table(tree):
        yield _kind(key), tree
        return
    for name, below in tree.items():
        yield from _tables(below, name)


def _kind(key: str) -> str:
    try:
        return " ".join(map(str, parse_json(key)))
    except (ValueError, TypeError):
        return key
