import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from diskreplay.cli.chart import Chart, Series
from diskreplay.cli.report.svg import HEIGHT, WIDTH, figure, sparkline, ticks
from tests.testing.pages import Page

ANY = st.floats(width=64)


def drawn(page: Page, kind: str) -> list[str]:
    """The paths of a kind."""
    return [str(path["d"]) for path in page.all("path") if str(path["class"]).split()[0] == kind]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+(?:e[+-]?\d+)?|nan|inf", path)]


@settings(max_examples=40)
@given(st.lists(ANY, max_size=6), st.lists(ANY, max_size=6), st.booleans(), st.booleans())
def test_any_numbers_stay_inside_the_picture(one: list[float], other: list[float], bars: bool, lines: bool) -> None:
    every = [np.abs(values) if bars else np.array(values) for values in (one, other)]
    series = [Series(str(at), np.arange(len(y)), np.array(y, np.float64)) for at, y in enumerate(every)]
    page = Page(figure(Chart("title", "x", "y", series, bars=bars, lines=lines)))
    for path in page.all("path"):
        assert all(-1 <= number <= WIDTH for number in numbers(str(path["d"])))
    assert len(page.all("text")) < 30


@given(st.floats(-1e290, 1e290), st.floats(1e-9, 1e9))
def test_ticks_are_few_round_numbers_in_order(low: float, share: float) -> None:
    high = low + max(abs(low), 1e-9) * share
    found = ticks(low, high)
    assert 1 <= len(found) <= 11
    assert found == sorted(found)
    slack = (high - low) * 1e-6
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_ticks_of_common_ranges() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(-1.5, 1.5) == [-1, 0, 1]
    assert ticks(3, 4.9) == pytest.approx([3, 3.5, 4, 4.5])


def test_points_have_a_dot_each_and_lines_break_where_there_is_no_number() -> None:
    y = np.array([1.0, 2.0, np.nan, 3.0])
    page = Page(figure(Chart("t", "x", "y", [Series("a", np.arange(4), y), Series("b", np.arange(4), y)], bars=False)))
    (points,), (line,) = drawn(page, "points"), drawn(page, "line")
    assert points.count("M") == points.count("h0") == 3
    assert (line.count("M"), line.count("L"), line.count("h0")) == (2, 1, 1)
    assert page.words[0] == "t"
    assert page.words[-2:] == ["a", "b"]
    page = Page(figure(Chart("t", "x", "y", [Series("", np.arange(4), y)], bars=False, lines=True)))
    assert (len(drawn(page, "line")), drawn(page, "points")) == (1, [])
    assert page.all("ul") == []


def test_bars_stand_on_zero_and_are_named_by_whole_numbers() -> None:
    page = Page(figure(Chart("t", "x", "y", [Series("", np.array([0, 1, 2]), np.array([4, 0, 2]))], bars=True)))
    (bars,) = drawn(page, "bars")
    assert bars.count("z") == 2
    first, second = (numbers(bar) for bar in bars.strip("z").split("z"))
    assert first[1] == second[1] == first[-1]
    assert (first[1] - first[2]) == pytest.approx(2 * (second[1] - second[2]), abs=0.2)
    across = [at for at, text in enumerate(page.all("text")) if text["class"] == "across"]
    assert [page.words[1 + at] for at in across] == ["0", "1", "2"]


def test_titles_and_names_are_escaped() -> None:
    hostile = "<script>$x$</script>"
    series = [Series(hostile, np.arange(2), np.arange(2))] * 2
    page = Page(figure(Chart(hostile, hostile, hostile, series, bars=False)))
    assert page.words.count(hostile) == 4
    assert page.all("script") == []


def test_a_sparkline_has_a_bar_a_count() -> None:
    page = Page(sparkline(Series("", np.array([-5, 0, 900]), np.array([1, 2, 4]))))
    (bars,) = drawn(page, "bars")
    assert bars.count("z") == 3
    assert sparkline(Series("", np.zeros(0), np.zeros(0))) == ""
    assert drawn(Page(sparkline(Series("", np.zeros(2), np.zeros(2)))), "bars") == [""]
    assert HEIGHT < WIDTH
