import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli.report import sample
from diskreplay.cli.report.page import shares
from diskreplay.format import layout
from tests.cli.report.conftest import HOSTILE
from tests.testing.pages import Page


def written(run: Callable, path: Path, *arguments: object) -> Page:
    """The page of a store, which loads nothing."""
    out = path.with_name("page.html")
    done = run("report", path, "--out", out, *arguments)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(rf"saved {re.escape(str(out))}, [\d.]+ kB\n", done.out)
    page = Page(out.read_text(encoding="utf-8"))
    assert all(url.startswith("data:image/") for url in page.urls)
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    return page


def after(page: Page, word: str) -> str:
    return page.words[page.words.index(word) + 1]


def test_the_page_says_what_the_store_is(run: Callable, vectors: Path) -> None:
    page = written(run, vectors)
    with dr.open(vectors) as store:
        assert (after(page, "path"), after(page, "uuid")) == (str(vectors), store.uuid)
    assert after(page, "steps") == "600, no capacity set"
    assert after(page, "episodes") == "20 (10 terminated, 10 truncated, 0 cut, 0 open)"
    titles = ["Store", "Plots", "Fields", "Example episodes", "Disk use", "Writers and segments"]
    assert [word for word in page.words if word in titles] == titles
    assert "Damage" not in page.words
    assert sum("sample was read" in word for word in page.words) == 0
    examples = [word for word in page.words if ": episode " in word]
    assert examples[:3] == ["Best, newest: episode 19", "Worst: episode 0", "Median: episode 9"]
    assert len(examples) == 4
    assert page.all("img") == []
    assert page.words[0] == "Report of vectors"


def test_images_lie_in_the_page_and_names_are_escaped(run: Callable, images: Path) -> None:
    page = written(run, images, "--episodes", 2)
    assert [str(image["src"])[:14] for image in page.all("img")] == ["data:image/gif", "data:image/png"] * 2
    assert f"extra/{HOSTILE}" in page.words
    assert "extra/flag\\u202e" in page.words
    assert any("episodes without a total_reward" in word for word in page.words)


def test_a_condition_is_named_and_chooses(run: Callable, vectors: Path) -> None:
    page = written(run, vectors, "--where", "policy < 4 and total_reward > 0", "--episodes", 9)
    said = "Statistics, plots and examples are of the episodes with policy < 4 and total_reward > 0: 3 episodes of 20."
    assert said in page.words
    assert [word for word in page.words if ": episode " in word] == [
        *("Best, newest: episode 3", "Worst: episode 1", "Median: episode 2"),
    ]
    assert "total_reward of 3 episodes" in page.words
    assert after(page, "terminated") == "1"
    empty = written(run, vectors, "--where", "policy > 100")
    assert "No episodes." in empty.words
    assert "Example episodes" not in empty.words


def test_a_sample_is_named(run: Callable, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "EPISODES", 7)
    monkeypatch.setattr(sample, "STEPS", 100)
    monkeypatch.setattr(sample, "PIECES", 10)
    monkeypatch.setattr(sample, "ASKED", 10)
    said = "A random sample was read, the same each time: 7 of 20 episodes and 100 of 600 steps."
    assert said in written(run, vectors).words
    words = written(run, vectors, "--where", "length > 1").words
    assert any(word.endswith(": 10 episodes among 10 of 20 that were asked.") for word in words)


def test_without_examples_there_are_none(run: Callable, images: Path) -> None:
    page = written(run, images, "--episodes", 0)
    assert page.all("img") == []
    assert "Example episodes" not in page.words


def test_an_empty_store_has_a_page(run: Callable, tmp_store: Path) -> None:
    dr.create(tmp_store, dr.Schema(dr.Field((8, 8), "uint8"), dr.Field((), "int64"))).close()
    page = written(run, tmp_store)
    assert "No episodes." in page.words


def test_a_store_that_is_written_has_a_page(run: Callable, tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((2,), "float32"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for _ in range(3):
            writer.append(np.zeros(2), 0, 1.0, False, next_obs=np.zeros(2))
        page = written(run, tmp_store)
    assert after(page, "open") == "1"
    assert [word for word in page.words if ": episode " in word] == ["Newest: episode 0"]


@pytest.mark.filterwarnings("ignore::diskreplay.DamagedSegmentWarning")
def test_damage_and_quarantine_are_said(run: Callable, tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((2,), "float32"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema, segment_steps=8) as store, store.writer() as writer:
        for _ in range(6):
            writer.append_episode(np.zeros((5, 2)), np.zeros(4, int), np.zeros(4), terminated=True)
    for name in (layout.METADATA, layout.DOCUMENT_COPY):
        (tmp_store / "segments/00000001" / name).write_text("{}")
    damaged = written(run, tmp_store)
    assert "Damage" in damaged.words
    assert "`diskreplay verify" in after(damaged, "damage")
    assert run("repair", tmp_store, "--yes").code == 1
    repaired = written(run, tmp_store)
    assert "Damage" in repaired.words
    assert after(repaired, "quarantine").startswith("8 steps in 1 segment")


def test_shares_are_drawn_by_their_part_of_all() -> None:
    page = Page(shares({"a": 3, "b": 1, "c": 0}))
    assert page.words == ["a", "3", "75.0%", "b", "1", "25.0%", "c", "0", "0.0%"]
    assert [bar["style"] for bar in page.all("span")] == ["width:75.0%", "width:25.0%"]
    assert Page(shares({"a": 0})).all("span") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episodes", "21"], "Invalid value for '--episodes'"),
        (["--where", "colour > 1"], "--where: unknown name 'colour'"),
        (["--out", "nowhere/page.html"], "--out nowhere/page.html: there is no folder nowhere"),
    ],
)
def test_a_wrong_argument_takes_one_line(
    run: Callable, vectors: Path, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("report", vectors, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "report.html").exists()
