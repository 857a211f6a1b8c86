"""Charts as SVG inside a page, drawn here: a page has dozens of them, in the colours of its style sheet.

matplotlib takes 0.3 s for each, and 16 kB for a histogram.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.cli.chart import Chart, Series
from diskreplay.cli.plot import numbers
from diskreplay.cli.report.page import SERIES
from diskreplay.markup import NOTHING, Html, element, text as escaped

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 34  # pixels around what is drawn
TICKS = 5
SPARK_WIDTH, SPARK_HEIGHT = 80, 18
LEAST_HEIGHT = 0.05  # of a bar, so that one value among many is seen


_Numbers = TypeVar("_Numbers", float, NDArray[np.float64])


class _Scale(NamedTuple):
    """Maps numbers from ``low`` to ``high`` to pixels from ``start`` to ``stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, values: _Numbers) -> _Numbers:
        return self.start + (values - self.low) / (self.high - self.low) * (self.stop - self.start)


def figure(chart: Chart) -> Html:
    """Return a chart with its title, and a legend where it has several series."""
    parts = [element("figcaption", escaped(chart.title)), _svg(chart)]
    if len(chart.series) > 1:
        names = (element("li", escaped(series.name), class_=_colour(at)) for at, series in enumerate(chart.series))
        parts.append(element("ul", *names, class_="legend"))
    return element("figure", *parts)


def _svg(chart: Chart) -> Html:
    across, up = _scales(chart)
    drawn = [*_axis_across(across, chart.x_label, _ticks_across(chart, across)), *_axis_up(up)]
    for at, series in enumerate(chart.series):
        if chart.bars:
            kind, path = "bars", _bars(series, across, up)
        elif chart.lines or at:
            kind, path = "line", _line(series, across, up)
        else:
            kind, path = "points", _points(series, across, up)
        several = " several" if len(chart.series) > 1 else ""
        drawn.append(element("path", class_=f"{kind}{several} {_colour(at)}", d=path))
    label = f"{chart.title}: {chart.y_label} by {chart.x_label}"
    return element("svg", *drawn, class_="chart", role="img", aria_label=label, viewBox=f"0 0 {WIDTH} {HEIGHT}")


def sparkline(series: Series) -> Html:
    """Return a small histogram without axes."""
    values, up = series.y.astype(np.float64), _Scale(0, 1, SPARK_HEIGHT, 0)
    if not len(values):
        return NOTHING
    across = _Scale(-0.5, len(values) - 0.5, 0, SPARK_WIDTH)
    heights = np.where(values > 0, np.maximum(values / (values.max() or 1.0), LEAST_HEIGHT), 0.0)
    path = _bars(Series("", np.arange(len(values)), heights), across, up)
    box = f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"
    bars = element("path", class_=f"bars {_colour(0)}", d=path)
    return element("svg", bars, class_="spark", role="img", aria_label="histogram", viewBox=box)


def _colour(at: int) -> str:
    return f"series-{at % SERIES}"


def _scales(chart: Chart) -> tuple[_Scale, _Scale]:
    x = _finite(np.concatenate([series.x for series in chart.series]))
    y = _finite(np.concatenate([series.y for series in chart.series]))
    left, right = (float(x.min()), float(x.max())) if len(x) else (0.0, 1.0)
    low, high = (float(y.min()), float(y.max())) if len(y) else (0.0, 1.0)
    if chart.bars:
        half = max((_bar_width(series.x) for series in chart.series), default=1.0) / 2
        left, right, low = left - half, right + half, 0.0
    elif 0 < low < high / 2:
        low = 0.0
    low, high = _apart(low, high)
    margin = 0.0 if chart.bars else 0.04 * (high - low)
    up = _Scale(low - margin, high + margin, HEIGHT - BOTTOM, TOP)
    return _Scale(*_apart(left, right), LEFT, WIDTH - RIGHT), up


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return bounds that differ, also as floats that are multiplied."""
    least = max(abs(low), abs(high)) * 1e-9 or 1e-9
    return (low, high) if high - low > least else (low - max(0.5, least), high + max(0.5, least))


def _finite(values: NDArray[Any]) -> NDArray[np.float64]:
    return numbers(values[np.isfinite(values)])


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``."""
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _ticks_across(chart: Chart, scale: _Scale) -> list[float]:
    """Return round numbers, and whole ones where the bars are those of whole numbers."""
    found = ticks(scale.low, scale.high)
    if chart.bars and all((series.x == np.round(series.x)).all() for series in chart.series):
        return [tick for tick in found if tick == round(tick)]
    return found


def _axis_across(scale: _Scale, label: str, at: Iterable[float]) -> Iterator[Html]:
    bottom = HEIGHT - BOTTOM
    yield element("path", class_="axis", d=f"M{LEFT} {bottom}H{WIDTH - RIGHT}")
    for tick in at:
        yield element("text", escaped(_short(tick)), x=_px(scale(tick)), y=bottom + 13, class_="across")
    yield element("text", escaped(label), x=(LEFT + WIDTH - RIGHT) // 2, y=HEIGHT - 5, class_="across label")


def _axis_up(scale: _Scale) -> Iterator[Html]:
    for tick in ticks(scale.low, scale.high):
        at = _px(scale(tick))
        yield element("path", class_="grid", d=f"M{LEFT} {at}H{WIDTH - RIGHT}")
        yield element("text", escaped(_short(tick)), x=LEFT - 5, y=at, class_="up", dy="0.32em")


def _short(tick: float) -> str:
    """Give a tick in few characters: 20k, 1.5M, 0.001."""
    size = abs(tick) if abs(tick) < 1e13 else 0.0
    unit, name = (1e9, "G") if size >= 1e9 else (1e6, "M") if size >= 1e6 else (1e3, "k") if size >= 1e4 else (1.0, "")
    return f"{tick / unit:.4g}{name}"


def _px(pixels: float) -> str:
    return f"{pixels:.1f}".removesuffix(".0")


def _runs(series: Series) -> Iterator[NDArray[np.intp]]:
    """Yield the places of successive points that are numbers."""
    finite = np.isfinite(series.x) & np.isfinite(series.y)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]]).astype(np.int8)))
    return (np.arange(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _line(series: Series, across: _Scale, up: _Scale) -> str:
    return "".join(
        "M" + "L".join(_pairs(series, run, across, up)) + ("h0" if len(run) == 1 else "") for run in _runs(series)
    )


def _points(series: Series, across: _Scale, up: _Scale) -> str:
    return "".join(f"M{pair}h0" for run in _runs(series) for pair in _pairs(series, run, across, up))


def _pairs(series: Series, at: NDArray[np.intp], across: _Scale, up: _Scale) -> Iterable[str]:
    x, y = numbers(series.x[at]), numbers(series.y[at])
    return (f"{_px(px)} {_px(py)}" for px, py in zip(across(x), up(y), strict=True))


def _bars(series: Series, across: _Scale, up: _Scale) -> str:
    """Return rectangles from zero up, a little apart."""
    width = _bar_width(series.x) * 0.9
    bottom = _px(up(0.0))
    shown = np.isfinite(series.y) & (series.y > 0)
    parts = []
    for x, y in zip(numbers(series.x[shown]).tolist(), numbers(series.y[shown]).tolist(), strict=True):
        left, right = _px(across(x - width / 2)), _px(across(x + width / 2))
        parts.append(f"M{left} {bottom}V{_px(up(y))}H{right}V{bottom}z")
    return "".join(parts)


def _bar_width(x: NDArray[Any]) -> float:
    """Return the distance of two bars, the least where they differ."""
    apart = [other - one for one, other in pairwise(x.astype(np.float64).tolist())]
    return min(apart, default=1.0)
