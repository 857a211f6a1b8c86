"""Draws charts in the terminal with plotext, or as a picture with matplotlib."""

import io
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from diskreplay.cli.text import number as number_text
from diskreplay.errors import MissingExtra

EXTRA = "plot"
HEIGHT = 22  # the height of a chart in the terminal, in lines
TICKS = 5
LARGEST = 1e300  # larger values are drawn as this value
POINTS = 1_000  # the maximum number of points of a series that has no line
BARS = "█▒▓░x."  # the bars of each series in the terminal, which may have no colours
# Colours that all readers can distinguish (Okabe and Ito 2008), darkened for a white background.
COLOURS = ("#0067a8", "#c05a00", "#00795a", "#a3468a", "#7a6400", "#555e66")


@dataclass(frozen=True)
class Series:
    name: str
    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True)
class Chart:
    """A chart of one or more series.

    If ``bars`` is true, each point is a bar. Otherwise each series is a line, except that the first series is points if
    ``lines`` is false. In the terminal, several series are lines also if their bars would be too narrow.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bars: bool
    lines: bool = False


def draw(chart: Chart) -> str:
    with MissingExtra.raised_for("a plot in the terminal", EXTRA):
        import plotext

    plotext.clear_figure()
    columns, count = max(40, shutil.get_terminal_size().columns), len(chart.series)
    plotext.plot_size(columns, HEIGHT)
    plotext.theme("clear" if not sys.stdout.isatty() else "pro")
    for number, series in enumerate(chart.series):
        x, y, name = series.x.tolist(), series.y.tolist(), series.name or None
        if chart.bars and (count == 1 or 2 * count * len(x) <= columns):
            centres = numbers(series.x)
            between = np.ptp(centres) / max(1, len(x) - 1) or 1.0  # plotext multiplies the width of a bar by this
            room = min(np.diff(centres).tolist(), default=between) / count
            centres += (number - (count - 1) / 2) * room
            plotext.bar(centres.tolist(), y, label=name, width=0.8 * room / between, marker=BARS[number % len(BARS)])
        elif chart.bars or chart.lines or number:
            plotext.plot(x, y, label=name)
        else:
            plotext.scatter(x, y, label=name)
    every = np.concatenate([series.x for series in chart.series])
    few = chart.bars and len(every) <= 2 * TICKS
    ticks = np.unique(every) if few else np.linspace(every.min(), every.max(), TICKS)
    plotext.xticks(ticks.tolist(), [number_text(tick) for tick in ticks.tolist()])
    plotext.title(chart.title)
    plotext.xlabel(chart.x_label)
    plotext.ylabel(chart.y_label)
    text = str(plotext.build())
    plotext.clear_figure()
    return text if sys.stdout.isatty() else str(plotext.uncolorize(text))


def numbers(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return values as float64.

    Infinities become NaN, and large values are clipped so that all differences are finite.
    """
    found = values.astype(np.float64)
    return np.where(np.isfinite(found), found.clip(-LARGEST, LARGEST), np.nan)


def picture(
    chart: Chart, kind: Literal["png", "svg"], inches: tuple[float, float] = (8, 4.5), *, on_page: bool = False
) -> bytes:
    """Return a chart as a PNG or SVG.

    If ``on_page`` is true, the background is transparent, and title and y label are left out.
    """
    with MissingExtra.raised_for("a picture of a plot", EXTRA):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    # Text stays text in an SVG, and a $ in the name of a field does not begin a formula.
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure, file = Figure(inches, layout="constrained"), io.BytesIO()
        axes = figure.subplots()
        opaque = 1.0 if len(chart.series) == 1 else 0.5
        for number, series in enumerate(chart.series):
            x, y, name = numbers(series.x), numbers(series.y), series.name or None
            colour = COLOURS[number % len(COLOURS)]
            if chart.bars:
                width = 0.9 * min(np.diff(x).tolist(), default=1.0)
                axes.bar(x, y, width=width, label=name, color=colour, alpha=opaque)
            elif chart.lines or number:
                axes.plot(x, y, label=name, color=colour)
            else:
                axes.plot(x, y, ".", label=name, color=colour, alpha=0.5, markevery=1 + len(x) // POINTS)
        if all(series.x.dtype.kind in "biu" for series in chart.series):
            axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.set_xlabel(chart.x_label)
        if not on_page:
            axes.set(title=chart.title, ylabel=chart.y_label)
        if len(chart.series) > 1:
            figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(file, format=kind, dpi=150, transparent=on_page)
    return file.getvalue()


def sparkline(counts: NDArray[Any]) -> bytes:
    with MissingExtra.raised_for("a picture of a plot", EXTRA):
        from matplotlib.figure import Figure

    heights = np.where(counts > 0, np.maximum(counts, 0.05 * counts.max()), 0)  # a bar of few values stays visible
    figure, file = Figure((1.1, 0.25)), io.BytesIO()
    axes = figure.add_axes((0, 0, 1, 1), frame_on=False, xticks=[], yticks=[])
    axes.stairs(heights, fill=True, color=COLOURS[0])
    figure.savefig(file, format="svg", transparent=True)
    return file.getvalue()
