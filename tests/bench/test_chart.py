"""The committed chart shows the committed results."""

import re

import pytest

from tools.bench import chart


def texts(path):
    return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


@pytest.mark.leaks("matplotlib keeps the files of its fonts open")
def test_the_chart_is_the_one_of_the_saved_results(tmp_path):
    chart.draw(tmp_path / "chart.svg")
    shown = texts(chart.CHART)
    assert shown == texts(tmp_path / "chart.svg"), "python -m tools.bench.chart draws it anew"
    numbers = [number for panel in chart.PANELS for number in chart.values(panel).values()]
    assert len(numbers) > 10
    assert set(numbers) <= set(shown)


def test_a_peer_that_a_result_lacks_is_left_out():
    panel = chart.PANELS[0]
    more = panel._replace(rows={**panel.rows, "nobody": "nobody"})
    assert chart.values(more) == chart.values(panel)
