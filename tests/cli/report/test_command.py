import base64
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.report.conftest import HOSTILE
from tests.testing.pages import Page


def written(run: Callable, path: Path, *arguments: object) -> Page:
    """The page of a store, which loads nothing."""
    out = path.with_name("page.html")
    done = run("report", path, "--out", out, *arguments)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(rf"saved {re.escape(str(out))}, [\d.]+ [kM]B\n", done.out)
    page = Page(out.read_text(encoding="utf-8"))
    assert all(url.startswith("data:image/") for url in page.urls)
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    return page


def frames_of(page: Page) -> list[str]:
    """The kinds of the pictures that are frames."""
    found = [image for image in page.all("img") if image["class"] in ("moving", "strip")]
    return [str(image["src"]).partition(";")[0] for image in found]


def after(page: Page, word: str) -> str:
    return page.words[page.words.index(word) + 1]


@pytest.mark.slow
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
    assert frames_of(page) == []
    assert page.words[0] == "Report of vectors"
    at = page.words.index("how episodes end")
    assert page.words[at + 1 : at + 7] == ["terminated", "10", "50%", "truncated", "10", "50%"]
    shares = [bar["style"] for bar in page.all("span") if bar.get("class") == "share"]
    assert shares == ["width:50.0%", "width:50.0%"]


@pytest.mark.slow
def test_images_lie_in_the_page_and_names_are_escaped(run: Callable, images: Path) -> None:
    page = written(run, images.rename(images.with_name(HOSTILE)), "--episodes", 2, "--where", "ended != '<b>'")
    assert page.words[0] == f"Report of {HOSTILE}"
    assert any("with ended != '<b>': 12 episodes" in word for word in page.words)
    assert frames_of(page) == ["data:image/gif", "data:image/png"] * 2
    assert f"extra/{HOSTILE}" in page.words
    titles = {"reward", "action", f"obs/$x$ {HOSTILE}", f"{HOSTILE}, 6 of 24 elements", "flag\\u202e"}
    assert {"extra/flag\\u202e", *titles} <= {*page.words}
    assert any(
        re.fullmatch(r"obs/image: (all \d+|24 of \d+) frames, and those of steps 0, [\d, ]+", word)
        for word in page.words
    )
    assert any("episodes without a total_reward" in word for word in page.words)


@pytest.mark.slow
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


def test_a_field_has_a_line_of_statistics_with_a_histogram(run: Callable, vectors: Path) -> None:
    page = written(run, vectors, "--episodes", 0)
    at = page.words.index("episode/policy")
    assert page.words[at + 1 : at + 11] == ["int64", "scalar", "-", "0", "9.5", "19", "5.766", "5%", "0%", "20"]
    at = page.words.index("obs")
    assert page.words[at + 1 : at + 4] == ["float32", "3", "-"]
    assert len([image for image in page.all("img") if image["class"] == "spark"]) == 4


@pytest.mark.slow
def test_of_many_fields_some_are_shown(run: Callable, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.cli.report.charts.FIELDS", 1)
    monkeypatch.setattr("diskreplay.cli.report.examples.COLUMNS", 2)
    page = written(run, vectors, "--episodes", 1)
    assert "The first 1 of 4 fields." in page.words
    assert "1 more fields are not shown." in page.words
    at = page.words.index("10 more are not shown")
    assert page.words[at + 1 : at + 5] == ["step", "obs", "action", "0"]


@pytest.mark.slow
def test_an_example_that_is_evicted_meanwhile_is_a_line(
    run: Callable, vectors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise dr.SegmentGone("segment 0 was evicted")

    monkeypatch.setattr("diskreplay.cli.report.examples.steps_table", gone)
    assert "Episode 19 was evicted while this was written." in written(run, vectors, "--episodes", 1).words


@pytest.mark.slow
def test_a_sample_is_named(run: Callable, vectors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.cli.report.sample.EPISODES", 7)
    monkeypatch.setattr("diskreplay.cli.report.sample.STEPS", 100)
    monkeypatch.setattr("diskreplay.cli.report.sample.PIECES", 10)
    monkeypatch.setattr("diskreplay.cli.report.sample.ASKED", 10)
    said = "A random sample was read, the same each time: 7 of 20 episodes and 100 of 600 steps."
    assert said in written(run, vectors, "--episodes", 0).words
    words = written(run, vectors, "--where", "length > 1", "--episodes", 0).words
    assert any(word.endswith(": 10 episodes among 10 of 20 that were tested.") for word in words)


def test_without_examples_there_are_none(run: Callable, images: Path) -> None:
    page = written(run, images, "--episodes", 0)
    assert frames_of(page) == []
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::diskreplay.DamagedSegmentWarning")
def test_damage_and_quarantine_are_said(run: Callable, tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((2,), "float32"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema, segment_steps=8) as store, store.writer() as writer:
        for _ in range(6):
            writer.append_episode(np.zeros((5, 2)), np.zeros(4, int), np.zeros(4), terminated=True)
    for name in ("zarr.json", "durable/document"):
        (tmp_store / "segments/00000001" / name).write_text("{}")
    damaged = written(run, tmp_store, "--episodes", 0)
    assert "Damage" in damaged.words
    assert "`diskreplay verify" in after(damaged, "damage")
    assert run("repair", tmp_store, "--yes").code == 1
    repaired = written(run, tmp_store, "--episodes", 0)
    assert "Damage" in repaired.words
    assert after(repaired, "quarantine").startswith("8 steps in 1 segment")


@pytest.mark.slow
def test_charts_are_pictures_that_load_and_run_nothing(run: Callable, images: Path) -> None:
    page = written(run, images, "--episodes", 1)
    charts = [image for image in page.all("img") if image["class"] in ("chart", "spark")]
    assert len(charts) > 10
    assert "reward: how often: steps by value" in [image["alt"] for image in charts]
    for image in charts:
        kind, _, data = str(image["src"]).partition(";base64,")
        assert kind == "data:image/svg+xml"
        for element in ElementTree.fromstring(base64.b64decode(data)).iter():
            assert element.tag.partition("}")[2] not in ("script", "foreignObject", "image", "a")
            assert not any(name.startswith("on") for name in element.attrib)
            links = (value for name, value in element.attrib.items() if name.endswith("href"))
            assert all(link.startswith("#") for link in links)


def test_a_page_takes_the_place_of_an_earlier_one_as_a_whole(run: Callable, vectors: Path, tmp_path: Path) -> None:
    page, earlier, link = tmp_path / "page.html", tmp_path / "earlier.html", tmp_path / "link.html"
    page.write_text("earlier")
    os.link(page, earlier)
    link.symlink_to(page)
    assert run("report", vectors, "--episodes", 0, "--out", link).code == 0
    assert earlier.read_text() == "earlier"
    assert link.is_symlink()
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [*tmp_path.glob(".*")] == []


def test_a_page_can_go_into_a_pipe(run: Callable, vectors: Path, tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert run("report", vectors, "--episodes", 0, "--out", pipe).code == 0
    reader.join()
    assert read[0].startswith("<!DOCTYPE html>")
    assert pipe.is_fifo()


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
