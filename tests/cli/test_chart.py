"""Charts as pictures."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from diskreplay.cli.look.chart import Chart, Series, picture, sparkline

ANY = st.floats(width=64)
HOSTILE = "<script>$x$</script>]]>--&amp;\"'"


def read(svg: bytes) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def texts(svg: bytes) -> list[str]:
    """The text in a picture."""
    return [element.text or "" for element in read(svg).iter("{http://www.w3.org/2000/svg}text")]


def bars_of(svg: bytes) -> list[tuple[float, float]]:
    """The left and right of each bar, behind the two backgrounds."""
    paths = [group[0].get("d", "") for group in read(svg).iter() if group.get("id", "").startswith("patch_")]
    corners = [np.array(re.findall(r"[\d.]+", path), float).reshape(-1, 2)[:, 0] for path in paths]
    return [(each.min(), each.max()) for each in corners if len(each) == 4][2:]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(ANY, min_size=1, max_size=6), st.lists(ANY, max_size=6), st.booleans(), st.booleans())
def test_any_numbers_can_be_drawn(one: list[float], other: list[float], bars: bool, lines: bool) -> None:
    every = [np.abs(values) if bars else np.array(values, np.float64) for values in (one, other)]
    series = [Series(str(at), np.arange(len(y)), y) for at, y in enumerate(every)]
    svg = picture(Chart("title", "x", "y", series, bars=bars, lines=lines and not bars), "svg")
    assert {"title", "x", "y", "0", "1"} <= {*texts(svg)}
    assert "nan" not in svg.decode().replace("title", "").lower()


@pytest.mark.parametrize("bars", [True, False])
def test_several_series_are_named_in_a_picture(bars: bool) -> None:
    rows = [Series(f"element {i}", np.arange(3), np.arange(3) + i) for i in range(2)]
    chart = Chart("title", "across", "up", rows, bars)
    assert {"title", "across", "up", "element 0", "element 1"} <= {*texts(picture(chart, "svg"))}
    on_page = {*texts(picture(chart, "svg", on_page=True))}
    assert {"across", "element 0", "element 1"} <= on_page
    assert {"title", "up"}.isdisjoint(on_page)


def test_names_are_text_and_no_markup() -> None:
    rows = [Series(f"{at}{HOSTILE}", np.arange(2), np.arange(2)) for at in range(2)]
    svg = picture(Chart(HOSTILE, HOSTILE, HOSTILE, rows, bars=False), "svg")
    found = texts(svg)
    assert found.count(HOSTILE) == 3
    assert {f"0{HOSTILE}", f"1{HOSTILE}"} <= {*found}
    assert b"<script" not in svg


@pytest.mark.parametrize("x", [np.array([False, True]), np.array([3, 4]), np.array([7], np.uint8)])
def test_bars_of_whole_numbers_are_named_by_whole_numbers(x: np.ndarray) -> None:
    svg = picture(Chart("", "", "", [Series("", x, np.full(len(x), 10))], bars=True), "svg")
    assert {str(int(value)) for value in x} <= {*texts(svg)}
    assert not any("." in text for text in texts(svg))


def test_bars_of_whole_numbers_far_apart_do_not_cover_each_other() -> None:
    x = np.array([0, 1, 10])
    bars = bars_of(picture(Chart("", "", "", [Series("", x, np.ones(3))], bars=True), "svg"))
    assert len(bars) == 3
    assert bars[0][1] < bars[1][0] < bars[1][1] < bars[2][0]


def test_of_many_points_some_are_drawn() -> None:
    series = [Series("", np.arange(n), np.arange(n)) for n in (900, 90_000)]
    few, many = (picture(Chart("", "", "", [each], bars=False), "svg").count(b"<use") for each in series)
    assert 900 <= few <= many <= 1_050


def test_a_sparkline_has_a_bar_a_count_and_no_text() -> None:
    (bars,) = (svg_path for svg_path in read(sparkline(np.array([1, 0, 900]))).iter() if svg_path.get("clip-path"))
    heights = sorted({round(float(y), 3) for y in bars.get("d", "").replace("\n", " ").split()[2::3]})
    assert len(heights) >= 3
    assert texts(sparkline(np.array([1, 2]))) == []
    assert read(sparkline(np.zeros(2, int))).tag.endswith("svg")
