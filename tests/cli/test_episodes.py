import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.cli import episodes, text
from diskreplay.cli.episodes import Ended, SortBy

FLAGS = ("terminated", "truncated", "cut", "open")


@pytest.fixture
def columns() -> episodes.Columns:
    """Six episodes, oldest first: terminated, truncated, cut, both at once, terminated without a number, open."""
    rows = [
        (0, 0, 0, 0, 10, 10.0, "terminated"),
        (10, 0, 0, 10, 30, -3.0, "truncated"),
        (40, 0, 0, 41, 20, 2.5, "truncated cut"),
        (1 << 35, 1, 0, 0, 30, 30.0, "terminated truncated"),
        ((1 << 35) + 1, 1, 1, 0, 5, math.nan, "terminated"),
        ((1 << 35) + 200, 1, 0, 31, 1, 1.0, "open"),
    ]
    names = ("id", "segment", "lane", "start", "length", "total_reward")
    table = {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
    flags = {flag: np.array([flag in row[6].split() for row in rows]) for flag in FLAGS}
    return episodes.with_index(table | {"hidden_steps": np.array([4, 0, 0, 0, 0, 0])} | flags)


@pytest.mark.parametrize(
    ("bounds", "ended", "expected"),
    [
        ({}, [], [0, 1, 2, 3, 4, 5]),
        ({"length": (20, None)}, [], [1, 2, 3]),
        ({"length": (None, 5)}, [], [4, 5]),
        ({"length": (10, 10)}, [], [0]),
        ({"total_reward": (2.5, None)}, [], [0, 2, 3]),
        ({"total_reward": (None, 2.5)}, [], [1, 2, 5]),
        ({"total_reward": (100, None)}, [], []),
        ({}, [Ended.terminated], [0, 3, 4]),
        ({}, [Ended.truncated], [1, 3]),
        ({}, [Ended.cut], [2]),
        ({}, [Ended.open], [5]),
        ({}, [Ended.cut, Ended.open], [2, 5]),
        ({"length": (6, None)}, [Ended.terminated], [0, 3]),
    ],
)
def test_bounds_let_through_what_meets_all_of_them(
    columns: episodes.Columns, bounds: episodes.Bounds, ended: list[Ended], expected: list[int]
) -> None:
    assert episodes.passing(columns, bounds, ended).tolist() == expected


@pytest.mark.parametrize(
    ("sort", "descending", "expected"),
    [
        (SortBy.age, False, [0, 1, 2, 3, 4, 5]),
        (SortBy.age, True, [5, 4, 3, 2, 1, 0]),
        (SortBy.length, False, [5, 4, 0, 2, 1, 3]),
        (SortBy.length, True, [3, 1, 2, 0, 4, 5]),
        (SortBy.total_reward, False, [1, 5, 2, 0, 3, 4]),
        (SortBy.total_reward, True, [3, 0, 2, 5, 1, 4]),
        (SortBy.segment, True, [5, 4, 3, 2, 1, 0]),
        (SortBy.lane, False, [0, 1, 2, 3, 5, 4]),
    ],
)
def test_sorting_keeps_age_among_equals_and_what_is_no_number_last(
    columns: episodes.Columns, sort: SortBy, descending: bool, expected: list[int]
) -> None:
    assert episodes.in_order(columns, np.arange(6), sort, descending).tolist() == expected


def test_bounds_that_leave_nothing_between_them_are_named(small: Path, run: Callable) -> None:
    said = run("episodes", small, "--min-length", 5, "--max-length", 4)
    assert (said.code, "--min-length 5 is more than --max-length 4" in said.err) == (2, True)
    said = run("episodes", small, "--min-total-reward", 0.5, "--max-total-reward", -1)
    assert (said.code, "--min-total-reward 0.5 is more than --max-total-reward -1.0" in said.err) == (2, True)
    assert run("episodes", small, "--min-length", 5, "--max-length", 5, "--max-total-reward", 0).code == 0


def test_records_are_plain_python_values(columns: episodes.Columns) -> None:
    (record,) = episodes.records(columns, np.array([2]))
    assert record == {
        "index": 2,
        "id": 40,
        "segment": 0,
        "lane": 0,
        "start": 41,
        "length": 20,
        "hidden_steps": 0,
        "total_reward": 2.5,
        "terminated": False,
        "truncated": True,
        "cut": True,
        "open": False,
    }
    assert all(type(value) in (int, float, bool) for value in record.values())
    assert episodes.records(columns, np.array([], np.intp)) == []


def test_the_table_names_how_each_episode_ended(columns: episodes.Columns) -> None:
    lines = [line.split() for line in episodes.table(columns, np.arange(6)).splitlines()]
    assert lines[0] == ["index", "id", "segment", "lane", "length", "hidden_steps", "total_reward", "ended"]
    assert [" ".join(line[7:]) for line in lines[1:]] == [
        "terminated",
        "truncated",
        "cut",
        "terminated, truncated",
        "terminated",
        "open",
    ]
    assert lines[5][6] == "nan"


@pytest.mark.parametrize(
    ("found", "shown", "line"),
    [
        ([0, 1, 2], [0, 1, 2], "3 episodes of 6; mean length 20, mean total_reward 3.167"),
        ([0, 1, 2], [0], "3 episodes of 6, 1 shown (--limit 0 for all); mean length 20, mean total_reward 3.167"),
        ([0], [0], "1 episode of 6; mean length 10, mean total_reward 10"),
        ([], [], "0 episodes of 6"),
    ],
)
def test_the_footer_says_what_was_left_out(
    columns: episodes.Columns, found: list[int], shown: list[int], line: str
) -> None:
    assert episodes.footer(columns, np.array(found, np.intp), np.array(shown, np.intp)) == line


def test_names_in_csv_are_neither_formulas_nor_escape_sequences(run, tmp_path):
    schema = dr.Schema(dr.Field((), "f4"), dr.Field((), "f4"), episode={"a\x1b[2J\n=1+1": dr.Field((), "f4")})
    with dr.create(tmp_path / "store", schema) as store, store.writer() as writer:
        writer.append_episode(np.zeros(3), np.zeros(2), np.full(2, -1.0), terminated=True)
    lines = run("episodes", tmp_path / "store", "--csv").out.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(r",episode/a\x1b[2J\n=1+1")
    assert ",-2.0," in lines[1]
    assert [text.csv_cell(cell) for cell in ("=1+1", "+1", "-a", "@a", "a=1", "\t=1")] == [
        *("'=1+1", "'+1", "'-a", "'@a", "a=1", r"\t=1")
    ]
