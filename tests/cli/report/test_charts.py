from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.look.chart import Chart
from diskreplay.cli.report import charts
from diskreplay.cli.report.charts import charts_of
from diskreplay.cli.report.sample import read_episodes, sample_steps


@pytest.fixture
def store(vectors: Path) -> Iterator[dr.Store]:
    with dr.open(vectors, "a") as store:
        yield store


def drawn(store: dr.Store) -> dict[str, Chart]:
    episodes = read_episodes(store, None, lambda done, total: None)
    steps = sample_steps(store, None)
    return {chart.title: chart for chart in charts_of(store, store.info(total_reward=False), steps, episodes)}


def test_a_store_has_a_chart_of_each_kind(store: dr.Store) -> None:
    found = drawn(store)
    assert list(found) == [
        *("total_reward of 20 episodes", "length of 20 episodes", "reward: how often", "action: how often"),
        *("ages of steps", "steps by writer over time", "initial priorities, |TD error|"),
    ]
    np.testing.assert_array_equal(found["total_reward of 20 episodes"].series[0].y, 30.0 * np.arange(20))
    assert [series.name for series in found["action: how often"].series] == ["[0]", "[1]"]
    assert found["ages of steps"].series[0].y.sum() == 600
    assert found["initial priorities, |TD error|"].series[0].y.sum() == 600


def test_steps_over_time_are_those_of_each_writer(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    series = drawn(store)["steps by writer over time"].series
    assert [(each.name, each.y.sum()) for each in series] == [("writer 0", 300), ("writer 1", 300)]
    monkeypatch.setattr(charts, "MOST_SERIES", 1)
    series = drawn(store)["steps by writer over time"].series
    assert [(each.name, each.y.sum()) for each in series] == [("2 others", 600)]


def test_a_sample_of_steps_stands_for_all(store: dr.Store) -> None:
    steps = sample_steps(store, None)
    some = type(steps)(steps.snapshot, steps.ids[::2], steps.total)
    episodes = read_episodes(store, None, lambda done, total: None)
    found = {chart.title: chart for chart in charts_of(store, store.info(total_reward=False), some, episodes)}
    assert sum(each.y.sum() for each in found["steps by writer over time"].series) == 600


def test_priorities_that_a_sampler_has_saved_are_drawn(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1.0, 41)
    pages = {"page": np.arange(3), "first": np.arange(3), "stride": np.ones(3, int)}
    kept = {**pages, "known": np.array([(1 << 20) - 1, (1 << 20) - 1, 0]), "values": values}
    none = {**pages, "known": np.zeros(3, int), "values": np.zeros(0)}
    store.save_sampler_state("run1", {"priorities": {"state": {"kind": kept, "other": none}}, "plans": [1, None]})
    chart = drawn(store)["priorities of 40 ids, run1: kind"]
    assert chart.series[0].y.tolist() == [1] * 40
    monkeypatch.setattr(charts, "STATE_BYTES", 0)
    assert "priorities of 40 ids, run1: kind" not in drawn(store)
