"""Charts of series: drawn in the terminal by plotext, or saved as a picture by matplotlib."""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.cli.text import number as number_text
from diskreplay.errors import MissingExtra

EXTRA = "plot"
HEIGHT = 22  # lines of a terminal
TICKS = 5


@dataclass(frozen=True)
class Series:
    """Points, with the name they have where there are several series."""

    name: str
    x: NDArray[Any]
    y: NDArray[Any]


@dataclass(frozen=True)
class Chart:
    """What is drawn: points over x where ``bars`` is false, the later series as lines; else a bar at each x.

    With ``lines``, which needs ``bars`` to be false, the first series is a line, too.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bars: bool
    lines: bool = False


def draw(chart: Chart) -> str:
    """Return a chart as lines of text as wide as the terminal; in colours where stdout is one."""
    with MissingExtra.raised_for("a plot in the terminal", EXTRA):
        import plotext

    plotext.clear_figure()
    plotext.plot_size(max(40, shutil.get_terminal_size().columns), HEIGHT)
    plotext.theme("clear" if not sys.stdout.isatty() else "pro")
    for number, series in enumerate(chart.series):
        x, y, name = series.x.tolist(), series.y.tolist(), series.name or None
        if chart.bars and len(chart.series) == 1:
            plotext.bar(x, y, label=name)
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


def save(chart: Chart, path: Path) -> None:
    """Save a chart as a PNG or SVG, by the end of the path."""
    with MissingExtra.raised_for("a picture of a plot", EXTRA):
        from matplotlib import rc_context
        from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a $ in the name of a field is no formula
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        for number, series in enumerate(chart.series):
            name = series.name or None
            if chart.bars:
                width = (series.x.max() - series.x.min()) / max(1, len(series.x) - 1) or 1.0
                alpha = 1.0 if len(chart.series) == 1 else 0.5
                axes.bar(series.x, series.y, width=0.9 * width, label=name, alpha=alpha)
            elif chart.lines or number:
                axes.plot(series.x, series.y, label=name)
            else:
                axes.plot(series.x, series.y, ".", alpha=0.5, label=name)
        axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        if len(chart.series) > 1:
            axes.legend(loc="best")  # which warns that it takes long only where it was not asked for
        figure.savefig(path, format=path.suffix.removeprefix("."), dpi=150)
