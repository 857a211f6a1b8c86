import sys
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.reading.inner import limit
from tests.testing.pages import Page

NAME = "<img src=x onerror=alert(1)>"


def filled(path: Path, episodes: int = 1, **options: object) -> dr.Store:
    """A store of episodes of three steps with an image, and a field with a hostile name."""
    schema = dr.Schema(
        {"state": dr.Field((2,), "float32"), "image": dr.Field((5, 4, 3), "uint8")},
        dr.Field((), "int64"),
        extra={NAME: dr.Field((), "float32")},
        episode={f"seed {NAME}": dr.Field((), "int64"), "goal": dr.Field((50,), "float64")},
    )
    store = dr.create(path, schema, **options)
    with store.writer() as writer:
        for e in range(episodes):
            writer.append_episode(
                {"state": np.zeros((4, 2)), "image": np.full((4, 5, 4, 3), e)},
                [0, 1, 2],
                [e, 0.25, 1],
                terminated=e % 2 == 0,
                truncated=e % 2 == 1,
                episode={f"seed {NAME}": e, "goal": np.arange(50.0)},
                **{NAME: [0, 1, 2]},
            )
    store.refresh()
    return store


def test_an_episode_has_its_facts_and_a_strip_of_frames(tmp_store: Path) -> None:
    with filled(tmp_store) as store:
        page = Page(store.episodes[0]._repr_html_())
    assert page.words[:9] == ["Episode", "id", "0", "length", "3", "total_reward", "1.25", "ended", "terminated"]
    assert page.words[9:11] == [f"seed {NAME}", "0"]
    assert page.words[11] == "goal"
    assert len(page.words[12]) < 60
    (image,) = page.all("img")
    assert image["alt"] == "obs/image of 3 steps"
    assert {tag for tag, _ in page.elements} == {"div", "strong", "table", "tbody", "tr", "th", "td", "img"}


def test_without_pillow_there_is_no_strip(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with filled(tmp_store) as store:
        page = Page(store.episodes[0]._repr_html_())
    assert page.all("img") == []
    assert page.words[-2] == "goal"


def test_a_list_of_episodes_has_both_ends(tmp_store: Path) -> None:
    with filled(tmp_store, 13) as store:
        page = Page(store.episodes._repr_html_())
        assert page.words[:2] == ["EpisodeList of 13 episodes", "3 more are not shown"]
        assert page.words[6::4] == [str(at) for at in (0, 1, 2, 3, 4, 8, 9, 10, 11, 12)]
        assert page.words[-4:] == ["12", "3", "13.25", "terminated"]
        assert page.words.count("EpisodeList of 13 episodes") == 1


def test_a_short_list_has_each_episode_once(tmp_store: Path) -> None:
    for count in (0, 1, 7, 10):
        with filled(tmp_store / str(count), count) as store:
            assert len(Page(store.episodes._repr_html_()).all("tr")) == count + 1


def test_what_is_gone_or_closed_is_said_and_not_raised(tmp_store: Path) -> None:
    store = filled(tmp_store, 20, segment_steps=6, capacity=30)
    with dr.open(tmp_store) as reader:
        episodes = reader.episodes
        with store.writer() as writer:
            for _ in range(20):
                writer.append_episode(
                    {"state": np.zeros((2, 2)), "image": np.zeros((2, 5, 4, 3), "u1")},
                    [0],
                    [0],
                    terminated=True,
                    **{NAME: [0]},
                )
        store.close()
        assert "segment 5 was evicted" in episodes[0]._repr_html_()
        assert len(Page(episodes._repr_html_()).all("tr")) == 11
    assert episodes[0]._repr_html_()
    assert episodes._repr_html_()


def test_what_is_large_is_not_read(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, summed_steps=2, shown_bytes=8 * 5 * 4 * 3 - 1)
    with filled(tmp_store) as store:
        page = Page(store.episodes[0]._repr_html_())
    assert "not summed" in page.words
    assert page.all("img") == []
