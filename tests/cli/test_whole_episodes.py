"""Episodes whose first steps a capacity hides are whole in every command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

LENGTH, COUNT, CAPACITY = 30, 4, 100
HIDDEN = LENGTH * COUNT - CAPACITY


@pytest.fixture
def limited(tmp_path: Path) -> Path:
    """Four episodes of 30 steps and rewards of 1: a capacity of 100 hides 20 steps of the first one."""
    schema = dr.Schema.from_example(obs=np.zeros(1, np.float32), action=0)
    with dr.create(tmp_path / "limited", schema, capacity=CAPACITY) as store, store.writer() as writer:
        for number in range(COUNT):
            obs = np.arange(LENGTH + 1, dtype=np.float32)[:, None] + number
            writer.append_episode(obs, np.zeros(LENGTH, int), np.ones(LENGTH), terminated=True)
    return tmp_path / "limited"


def records(run: Callable[..., Any], *arguments: object) -> list[dict[str, Any]]:
    done = run("episodes", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def test_episodes_lists_whole_ones_and_how_many_steps_are_hidden(run: Callable[..., Any], limited: Path) -> None:
    listed = records(run, limited, "--sort", "total_reward")
    assert [record["index"] for record in listed] == [0, 1, 2, 3]
    assert [record["length"] for record in listed] == [LENGTH] * COUNT
    assert [record["total_reward"] for record in listed] == [float(LENGTH)] * COUNT
    assert [record["hidden_steps"] for record in listed] == [HIDDEN, 0, 0, 0]
    assert records(run, limited, "--max-total-reward", LENGTH - 1) == []
    assert len(records(run, limited, "--min-total-reward", LENGTH, "--min-length", LENGTH)) == COUNT
    assert [r["index"] for r in records(run, limited, "--sort", "hidden_steps", "--desc", "--limit", 1)] == [0]
    assert [r["index"] for r in records(run, limited, "--where", "hidden_steps > 0 and length == 30")] == [0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("return", "'return' is called total_reward"),
        ("ret", "'ret' is called total_reward"),
        ("returns", "'returns' is called total_reward"),
        ("steps", "'steps' is called length"),
        ("len", "'len' is called length"),
        ("colour", "'colour' is not one of age, segment, lane, length, hidden_steps, total_reward"),
    ],
)
def test_other_names_to_sort_by_are_refused_with_the_right_one(
    run: Callable[..., Any], limited: Path, name: str, message: str
) -> None:
    done = run("episodes", limited, "--sort", name)
    assert (done.code, done.out) == (2, "")
    assert f"--sort: {message}" in done.err


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["episodes", "--min-return", "3"], "--min-total-reward"),
        (["episodes", "--max-return", "3"], "--max-total-reward"),
        (["plot", "returns"], "'total_reward'"),
        (["plot", "lengths"], "'length'"),
    ],
)
def test_options_of_other_names_are_refused_with_the_right_one(
    run: Callable[..., Any], limited: Path, arguments: list[str], right: str
) -> None:
    command, *rest = arguments
    done = run(command, limited, *rest)
    assert (done.code, done.out) == (2, "")
    assert right in done.err


def test_statistics_are_of_whole_episodes(run: Callable[..., Any], limited: Path) -> None:
    info = json.loads(run("inspect", limited, "--json").out)
    assert info["steps"] == CAPACITY
    for name in ("length", "total_reward"):
        assert (info[name]["count"], info[name]["min"], info[name]["mean"]) == (COUNT, LENGTH, LENGTH)


def test_the_hidden_steps_are_shown(run: Callable[..., Any], limited: Path) -> None:
    done = run("show", limited, 0)
    assert "30 steps (20 hidden), total_reward 30, terminated" in done.out
    shown = json.loads(run("show", limited, 0, "--json").out)
    assert (shown["length"], shown["hidden_steps"], len(shown["steps"])) == (LENGTH, HIDDEN, LENGTH)
    hidden_id = shown["steps"][0]["id"]
    assert run("show", limited, hidden_id, "--id", "--steps", "0").out.startswith("episode 0 of 4")


def test_a_report_has_no_rest_of_an_episode_among_its_examples(
    run: Callable[..., Any], limited: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert run("report", limited, "--out", page).code == 0
    html = page.read_text()
    assert "total_reward of 4 episodes" in html
    assert run("report", limited, "--where", "total_reward < 30", "--out", tmp_path / "worst.html").code == 0
    assert "0 episodes of 4" in (tmp_path / "worst.html").read_text()


def test_copies_and_exports_are_of_whole_episodes_and_limits_hide_again(
    run: Callable[..., Any], limited: Path, tmp_path: Path
) -> None:
    whole = f"{COUNT} episodes of {COUNT * LENGTH} steps"
    assert whole in run("copy", limited, tmp_path / "copy").out
    with dr.open(tmp_path / "copy") as copied:
        assert len(copied) == CAPACITY
        assert [(ep.length, ep.hidden_steps) for ep in copied.episodes] == [(LENGTH, HIDDEN), *[(LENGTH, 0)] * 3]
    assert run("diff", limited, tmp_path / "copy").code == 0
    merged = run("merge", limited, tmp_path / "copy", tmp_path / "merged")
    assert f"{2 * COUNT} episodes of {2 * COUNT * LENGTH} steps" in merged.out
    with dr.open(tmp_path / "merged") as store:
        assert len(store) == 2 * COUNT * LENGTH
    assert whole in run("export", limited, f"npz:{tmp_path / 'npz'}").out
    assert whole in run("import", f"npz:{tmp_path / 'npz'}", tmp_path / "imported").out
