"""The data of the charts of `diskreplay plot`."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.look.chart import Chart, Series, draw
from diskreplay.cli.look.plot import (
    Quantity,
    chart_of,
    distribution,
    distributions,
    over_episodes,
    priorities_chart,
    read_priorities,
)
from diskreplay.interop.exchange.exporting import began
from tests.cli.conftest import EPISODES, RETURNS, small_episode
from tests.cli.test_plot_command import WHAT, learned as learned


@pytest.fixture
def store(small: Path) -> Iterator[dr.Store]:
    with dr.open(small) as store:
        yield store


def chart(store: dr.Store, what: str, field: str | None = None) -> Chart:
    return chart_of(Quantity(what), sorted(store.episodes, key=began), store, field, lambda done, total: None)


def every(name: str) -> np.ndarray:
    return np.concatenate([small_episode(e)[name] for e in range(len(EPISODES))])


def test_returns_and_lengths_are_those_of_the_episodes_in_order(store: dr.Store) -> None:
    (returns,) = chart(store, "total_reward").series
    np.testing.assert_array_equal(returns.x, np.arange(6))
    np.testing.assert_allclose(returns.y, RETURNS)
    (lengths,) = chart(store, "length").series
    assert lengths.y.tolist() == [steps for steps, *_ in EPISODES]


def test_rewards_and_actions_are_counted_over_all_steps(store: dr.Store) -> None:
    (rewards,) = chart(store, "rewards").series
    counts, edges = np.histogram(every("reward"), 40)
    np.testing.assert_array_equal(rewards.y, counts)
    np.testing.assert_allclose(rewards.x, (edges[1:] + edges[:-1]) / 2)
    assert rewards.y.sum() == 80
    actions = chart(store, "actions")
    assert [series.name for series in actions.series] == ["[0]", "[1]"]
    expected = np.histogram(every("action")[:, 1], np.histogram_bin_edges(every("action"), 40))[0]
    np.testing.assert_array_equal(actions.series[1].y, expected)
    (flags,) = chart(store, "actions", "obs/state/1").series
    states = np.concatenate([small_episode(e)["obs"]["state"][1][: EPISODES[e][0]] for e in range(6)])
    assert (flags.x.tolist(), flags.y.tolist()) == ([False, True], [80 - states.sum(), states.sum()])


def test_ages_are_before_the_newest_step(store: dr.Store) -> None:
    ages = chart(store, "ages")
    (counts,) = ages.series
    assert ages.x_label == "seconds before the newest"
    assert counts.y.sum() == 80
    assert counts.x.min() >= 0


def test_priorities_are_those_that_samplers_saved(learned: Path) -> None:
    with dr.open(learned) as store:
        saved = read_priorities(store, [])
        assert list(saved) == ["both: transitions", "both: episodes", "one"]
        for name in ("both: transitions", "one"):
            ids, values = saved[name]
            assert values[np.argsort(ids)].tolist() == [*range(1, 80)]  # one episode has no last transition
        ids, values = saved["both: episodes"]
        assert sorted(ids.tolist()) == sorted(int(e.ids[0]) for e in store.episodes)
        assert values.tolist() == [7.0] * 6
        one = priorities_chart(store, ["one"], None)
        assert (one.title, one.x_label, one.y_label) == ("priorities of 79 ids, one", "|td| + eps", "ids")
        (bars,) = one.series
        np.testing.assert_array_equal(bars.y, np.histogram(np.arange(1, 80), 40)[0])
        every = priorities_chart(store, [], None)
        assert [series.name for series in every.series] == list(saved)
        some = priorities_chart(store, ["one"], store.episodes[1].ids)
        assert some.title == "priorities of 60 ids, one"


def test_priorities_that_differ_a_hundredfold_are_drawn_by_their_magnitude(small: Path) -> None:
    with dr.open(small, "a") as store:
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(eps=1e-9), seed=0) as sampler:
            sampler.update_priorities(sampler.ids(), np.repeat([0.001, 1000.0], [40, 39]))
            sampler.save("wide")
        chart = priorities_chart(store, [], None)
    assert chart.x_label == "log10 of |td| + eps"
    assert (chart.series[0].y[0], chart.series[0].y[-1]) == (40, 39)
    assert (round(chart.series[0].x[0]), round(chart.series[0].x[-1])) == (-3, 3)


def test_whole_numbers_are_counted_one_by_one_where_they_are_few() -> None:
    (few,) = distribution("actions", np.array([3, 0, 3, -1]), "value").series
    assert (few.x.tolist(), few.y.tolist()) == ([-1, 0, 3], [1, 1, 2])
    (many,) = distribution("actions", np.arange(1000), "value").series
    assert many.y.tolist() == [25] * 40
    both = distributions("x", {"a": np.array([1, 2]), "b": np.array([2, 2])}, "value").series
    assert [series.y.tolist() for series in both] == [[1, 1], [0, 2]]


def test_what_is_no_number_is_left_out() -> None:
    (counts,) = distribution("x", np.array([np.nan, 1.0, np.inf, 2.0, -np.inf]), "value").series
    assert counts.y.sum() == 2
    (points,) = over_episodes("return", np.array([1.0, np.nan, 3.0, np.inf])).series
    assert (points.x.tolist(), points.y.tolist()) == ([0, 2], [1.0, 3.0])


def test_a_running_mean_is_over_a_twentieth_of_the_episodes() -> None:
    values = np.random.default_rng(0).normal(size=100)
    points, mean = over_episodes("return", values).series
    assert mean.name == "mean of 5"
    np.testing.assert_allclose(mean.y, [values[i - 4 : i + 1].mean() for i in range(4, 100)])
    np.testing.assert_array_equal(mean.x, np.arange(4, 100))
    np.testing.assert_array_equal(points.y, values)


def test_drawing_again_draws_nothing_of_before() -> None:
    first = Chart("first", "x", "y", [Series("", np.arange(3), np.arange(3))], bars=False)
    second = Chart("second", "x", "y", [Series("", np.arange(3), np.ones(3))], bars=True)
    alone = draw(second)
    draw(first)
    assert draw(second) == alone


def test_bars_of_several_series_are_side_by_side_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    x = np.array([0, 1, 10])
    (bottom,) = (line for line in drawn(x, np.array([3, 2, 1]), np.array([1, 2, 3])).splitlines() if "0.00┤" in line)
    assert re.fullmatch(r" *0.00┤(█+▒+ *){3}│", bottom)
    many = np.arange(40)
    assert "▒" not in drawn(many, many, many)


def drawn(x: np.ndarray, *heights: np.ndarray) -> str:
    return draw(Chart("", "", "", [Series(str(at), x, y) for at, y in enumerate(heights)], bars=True))


def test_the_command_draws_each_of_them() -> None:
    assert {*WHAT, "priorities"} == {*Quantity}
