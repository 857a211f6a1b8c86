from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.look.show import cell
from diskreplay.cli.report import examples
from diskreplay.cli.report.examples import EpisodeParts, charts, choose_examples, read_parts, steps_table
from diskreplay.cli.report.sample import Episodes
from tests.cli.report.conftest import HOSTILE


def known(returns: list[float], ended: list[str] | None = None) -> Episodes:
    """Episodes with these returns, at other places than their numbers."""
    count = len(returns)
    how = np.array(ended or ["terminated"] * count, "<U10")
    at, ones = 10 + np.arange(count), np.ones(count, np.int64)
    return Episodes(at, ones, np.array(returns, np.float64), ones.astype("f8"), how, count, count, count)


def chosen(episodes: Episodes, most: int) -> list[tuple[int, str]]:
    return [(example.at, example.why) for example in choose_examples(episodes, most)]


def test_the_best_worst_median_and_newest_are_examples() -> None:
    assert chosen(known([5, 1, 9, 3, 7]), 4) == [(12, "best"), (11, "worst"), (10, "median"), (14, "newest")]
    assert chosen(known([5, 1, 9]), 4) == [(12, "best, newest"), (11, "worst"), (10, "median")]
    assert chosen(known([5]), 4) == [(10, "best, worst, median, newest")]
    assert chosen(known([5, 1, 9, 3, 7]), 2) == [(12, "best"), (11, "worst")]
    assert chosen(known([5, 1]), 0) == chosen(known([]), 4) == []


def test_further_examples_lie_between() -> None:
    found = chosen(known([float(value) for value in range(101)]), 6)
    assert found[:3] == [(110, "best, newest"), (10, "worst"), (60, "median")]
    assert found[3:] == [
        (24, "above 14% of the episodes"),
        (39, "above 29% of the episodes"),
        (53, "above 43% of the episodes"),
    ]


def test_open_episodes_and_returns_that_are_no_numbers_are_not_ranked() -> None:
    episodes = known([np.nan, 1, 2, np.inf, 99], ["terminated", "cut", "truncated", "terminated", "open"])
    assert chosen(episodes, 4) == [(12, "best"), (11, "worst, median"), (14, "newest")]
    assert chosen(known([np.nan]), 4) == [(10, "newest")]


def shown(path: Path, number: int) -> EpisodeParts:
    with dr.open(path) as store:
        found = read_parts(store, examples.Example(number, store.episodes[number].total_reward, "best"))
    assert found is not None
    return found


def test_an_example_has_frames_plots_and_steps(images: Path) -> None:
    found = shown(images, 1)
    assert (found.facts["ended"], found.facts["lane"], found.facts["<i>"]) == ("truncated", "1", "[1 2]")
    (frames,) = found.frames
    assert (frames.field, frames.moving[:4], frames.strip[1:4]) == ("obs/image", b"GIF8", b"PNG")
    assert (frames.steps[0], frames.steps[-1]) == (0, frames.rows - 1)
    titles = ["reward", "action", f"obs/$x$ {HOSTILE}", f"{HOSTILE}, 6 of 24 elements", "flag\u202e"]
    assert [chart.title for chart in found.charts] == titles
    assert (found.steps.total, found.steps.cells[-1][0]) == (frames.rows, "final")


def test_the_steps_are_the_first_and_last_with_the_final_observation(
    vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "COLUMNS", 2)
    with dr.open(vectors) as store:
        table = steps_table(store.episodes[3], store.schema)
        last = store.episodes[3].obs[-1]
    assert [row[0] for row in table.cells] == [*map(str, [*range(10), *range(20, 30)]), "final"]
    assert (table.headers, table.total, table.fields_left_out) == ([">step", ">obs", ">action"], 31, 1)
    assert table.cells[-1][1:] == [cell(last), ""]


def test_a_chart_holds_what_is_chosen_until_the_next_step(images: Path, vectors: Path) -> None:
    with dr.open(images) as store:
        drawn = {chart.title: chart for chart in charts(store.episodes[0], store.schema)}
        action, episode = drawn["action"].series[0], store.episodes[0]
        np.testing.assert_array_equal(action.y, episode.action.repeat(2))
        np.testing.assert_array_equal(action.x[:5], [0, 1, 1, 2, 2])
    with dr.open(vectors) as store:
        obs = {chart.title: chart for chart in charts(store.episodes[0], store.schema)}["obs"]
        np.testing.assert_array_equal([series.y for series in obs.series], store.episodes[0].obs.T)


def test_of_a_long_episode_the_first_steps_are_drawn(vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "STEPS_DRAWN", 8)
    with dr.open(vectors) as store:
        found = list(charts(store.episodes[0], store.schema))
    assert [len(chart.series[0].x) for chart in found] == [8, 8, 8]
    assert found[-1].x_label == "step, the first 8 of 31"


def test_fields_with_large_rows_are_not_read(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "ROW_BYTES", 100)
    found = shown(images, 0)
    assert found.frames == []
    assert "image" not in " ".join(found.steps.headers)


def test_an_episode_that_left_is_said(tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema, capacity=8, segment_steps=4) as store:
        for _ in range(2):
            with store.writer() as writer:
                for _ in range(6):
                    writer.append_episode(np.arange(5), np.zeros(4, int), np.zeros(4), terminated=True)
            if "reader" not in locals():
                reader = dr.open(tmp_store)
        assert read_parts(reader, examples.Example(0, 0.0, "best")) is None
        reader.close()
