"""`diskreplay episodes`: bounds, order, records, the table and its footer, of a table of literals."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

FLAGS = ("terminated", "truncated", "cut", "open")


@pytest.fixture
def listed(tmp_store: Path, monkeypatch: pytest.MonkeyPatch, run: Callable) -> Callable[..., str]:
    """Six episodes, oldest first: terminated, truncated, cut, both at once, terminated without a number, open."""
    rows = [
        (0, 0, 0, 0, 10, 4, 10.0, "terminated"),
        (10, 0, 0, 10, 30, 0, -3.0, "truncated"),
        (40, 0, 0, 41, 20, 0, 2.5, "truncated cut"),
        (1 << 35, 1, 0, 0, 30, 0, 30.0, "terminated truncated"),
        ((1 << 35) + 1, 1, 1, 0, 5, 0, math.nan, "terminated"),
        ((1 << 35) + 200, 1, 0, 31, 1, 0, 1.0, "open"),
    ]
    names = ("id", "segment", "lane", "start", "length", "hidden_steps", "total_reward")
    table = {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
    table |= {flag: np.array([flag in row[7].split() for row in rows]) for flag in FLAGS}
    dr.create(tmp_store, dr.Schema.from_example(obs=0.0, action=0)).close()
    monkeypatch.setattr(dr.Store, "episode_table", lambda self, progress=None: table)

    def run_episodes(*arguments: object) -> str:
        done = run("episodes", tmp_store, *arguments)
        assert (done.code, done.err) == (0, "")
        return done.out

    return run_episodes


def indices(out: str) -> list[int]:
    return [record["index"] for record in json.loads(out)]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        (["--min-length=20"], [1, 2, 3]),
        (["--max-length=5"], [4, 5]),
        (["--min-length=10", "--max-length=10"], [0]),
        (["--min-total-reward=2.5"], [0, 2, 3]),
        (["--max-total-reward=2.5"], [1, 2, 5]),
        (["--min-total-reward=100"], []),
        (["--ended=terminated"], [0, 3, 4]),
        (["--ended=truncated"], [1, 3]),
        (["--ended=cut"], [2]),
        (["--ended=open"], [5]),
        (["--ended=cut", "--ended=open"], [2, 5]),
        (["--min-length=6", "--ended=terminated"], [0, 3]),
    ],
)
def test_bounds_let_through_what_meets_all_of_them(listed: Callable, bounds: list[str], expected: list[int]) -> None:
    assert indices(listed("--json", *bounds)) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["--reverse"], [5, 4, 3, 2, 1, 0]),
        (["--sort", "age"], [0, 1, 2, 3, 4, 5]),
        (["--sort", "age", "--desc"], [5, 4, 3, 2, 1, 0]),
        (["--sort", "length"], [5, 4, 0, 2, 1, 3]),
        (["--sort", "length", "--desc"], [3, 1, 2, 0, 4, 5]),
        (["--sort", "total_reward"], [1, 5, 2, 0, 3, 4]),
        (["--sort", "total_reward", "--desc"], [3, 0, 2, 5, 1, 4]),
        (["--sort", "segment", "--desc"], [5, 4, 3, 2, 1, 0]),
        (["--sort", "lane"], [0, 1, 2, 3, 5, 4]),
    ],
)
def test_sorting_keeps_age_among_equals_and_what_is_no_number_last(
    listed: Callable, order: list[str], expected: list[int]
) -> None:
    assert indices(listed("--json", *order)) == expected


def test_bounds_that_leave_nothing_between_them_are_named(small: Path, run: Callable) -> None:
    said = run("episodes", small, "--min-length", 5, "--max-length", 4)
    assert (said.code, "--min-length 5 is more than --max-length 4" in said.err) == (2, True)
    said = run("episodes", small, "--min-total-reward", 0.5, "--max-total-reward", -1)
    assert (said.code, "--min-total-reward 0.5 is more than --max-total-reward -1.0" in said.err) == (2, True)
    assert run("episodes", small, "--min-length", 5, "--max-length", 5, "--max-total-reward", 0).code == 0


def test_the_table_names_how_each_episode_ended(listed: Callable) -> None:
    lines = [line.split() for line in listed().splitlines()]
    assert lines[0] == ["index", "id", "segment", "lane", "length", "hidden_steps", "total_reward", "ended"]
    assert [" ".join(line[7:]) for line in lines[1:7]] == [
        "terminated",
        "truncated",
        "cut",
        "terminated, truncated",
        "terminated",
        "open",
    ]
    assert lines[1][4:7] == ["10", "4", "10"]
    assert lines[5][6] == "nan"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--min-length=20"], "3 episodes of 6; mean length 26.67, mean total_reward 9.833"),
        (
            ["--min-length=20", "--limit=1"],
            "3 episodes of 6, 1 shown (--limit 0 for all); mean length 26.67, mean total_reward 9.833",
        ),
        (["--min-length=10", "--max-length=10"], "1 episode of 6; mean length 10, mean total_reward 10"),
        (["--min-length=99"], "0 episodes of 6"),
        (["--limit=2"], "6 episodes, 2 shown (--limit 0 for all); mean length 16, mean total_reward nan"),
    ],
)
def test_the_footer_says_what_was_left_out(listed: Callable, options: list[str], line: str) -> None:
    assert listed(*options).splitlines()[-1] == line


def test_names_in_csv_are_neither_formulas_nor_escape_sequences(run, tmp_path):
    names = ("a\x1b[2J\n=1+1", "=1+1", "+1", "-a", "@a", "\t=1", "a,=1", '"=1')
    schema = dr.Schema(dr.Field((), "f4"), dr.Field((), "f4"), episode={name: dr.Field((), "f4") for name in names})
    with dr.create(tmp_path / "store", schema) as store, store.writer() as writer:
        writer.append_episode(np.zeros(3), np.zeros(2), np.full(2, -1.0), terminated=True)
    lines = run("episodes", tmp_path / "store", "--csv").out.splitlines()
    header, row = csv.reader(lines)
    shown = [r"a\x1b[2J\n=1+1", "=1+1", "+1", "-a", "@a", r"\t=1", "a,=1", '"=1']
    assert header[-len(names) :] == [f"episode/{name}" for name in shown]
    assert not [name for name in header if name.startswith(("=", "+", "-", "@"))]
    assert row[header.index("total_reward")] == "-2.0"
