"""`diskreplay inspect`: its tables, of an `info()` of literals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr


@pytest.fixture
def report(run: Callable, small: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Print the report of a store that says this of itself, and return its lines, or those of one table."""

    def inspect(info: dict[str, Any], table: str = "", *options: str, width: int = 160) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(dr.Store, "info", lambda self, progress=None: info)
        lines = [line.rstrip() for line in run("inspect", small, *options).out.splitlines()]
        if not table:
            return lines
        rest = lines[lines.index(table) + 2 :]  # without its name and the names of its columns
        return rest[: rest.index("")]

    return inspect


def facts(lines: list[str]) -> dict[str, str]:
    """Return names and values at the top of a report."""
    top = lines[2 : lines.index("", 2)]
    return {line[:8].rstrip(): line[8:].strip() for line in top}


def test_the_summary_names_everything_that_is_counted(report: Callable, info: dict[str, Any]) -> None:
    assert facts(report(info)) == {
        "format": "version 1, created 2026-01-01 00:00:00 UTC",
        "steps": "1,234,567 of a capacity of 2,000,000 (62%)",
        "episodes": "1,005 (900 terminated, 100 truncated, 3 cut, 2 open)",
        "segments": "3 (1 writing, 1 dead, 1 sealed)",
        "writers": "2 (1 alive, 1 dead)",
        "on disk": "12.3 GB (13.0 GB apparent, 654.3 MB of it holes)",
    }


def test_a_store_without_capacity_and_one_that_evicted_say_so(report: Callable, info: dict[str, Any]) -> None:
    assert facts(report(info | {"capacity": None}))["steps"] == "1,234,567, no capacity set"
    evicting = info | {"steps": 100, "capacity": 100, "steps_evicted": 2_345, "steps_inserted": 2_445}
    assert facts(report(evicting))["steps"] == "100 of a capacity of 100 (100%), 2,345 evicted, 2,445 inserted"
    limited = facts(report(info | {"capacity": None, "capacity_bytes": 3_200_000_000, "max_age_s": 86400.0}))
    assert limited["steps"] == "1,234,567"
    assert limited["limits"] == "3.2 GB of segments, 86,400 s since a segment was sealed"


def test_the_schema_is_shown_in_its_order_with_shapes_types_and_spaces(report: Callable, info: dict[str, Any]) -> None:
    assert [line.split() for line in report(info, "schema")] == [
        ["obs/image", "84x84", "uint8", "Box(0", "to", "255)"],
        ["obs/state/0", "4", "float32", "-"],
        ["obs/state/1", "scalar", "bool", "-"],
        ["action", "scalar", "int64", "Discrete(7)"],
        ["reward", "scalar", "float32", "-"],
        ["extra/log_prob", "scalar", "float32", "-"],
        ["episode/seed", "scalar", "int64", "-"],
    ]


def test_statistics_cover_returns_and_lengths(report: Callable, info: dict[str, Any]) -> None:
    lines = report(info)
    assert lines[lines.index("ended episodes") + 1].split() == ["count", "mean", "std", "min", "median", "max"]
    assert [line.split() for line in report(info, "ended episodes")] == [
        ["length", "1,003", "1,230.5", "0", "9", "1,000", "12,345"],
        ["total_reward", "1,003", "101.2", "7.5", "-3", "99", "500"],
    ]


def test_segments_being_written_come_first_then_the_dead(report: Callable, info: dict[str, Any]) -> None:
    shown = report(info, "segments")
    assert [line.split()[0] for line in shown] == ["2", "1", "0"]
    assert shown[1].split() == ["1", "1", "8", "9", "8", "dead", "4.1", "kB"]


def test_how_many_segments_a_pack_has_is_shown_where_there_is_one(report: Callable, info: dict[str, Any]) -> None:
    assert "merged" not in " ".join(report(info)).split()
    info["segments"][0]["merged"] = 1234
    lines = report(info)
    assert lines[lines.index("segments") + 1].split()[5] == "merged"
    assert report(info, "segments")[-1].split()[5] == "1,234"


def test_writers_alive_come_first(report: Callable, info: dict[str, Any]) -> None:
    assert [line.split() for line in report(info, "writers")] == [
        ["0", "alive", "2", "1", "1,234,559"],
        ["1", "dead", "1", "8", "8"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "rows"), [([], 11), (["--all"], 2000)])
def test_a_long_table_is_cut_short_unless_all_is_asked_for(
    report: Callable, info: dict[str, Any], options: list[str], rows: int
) -> None:
    info["segments"] = [info["segments"][0] | {"number": number} for number in range(2000)]
    shown = report(info, "segments", *options)
    assert len(shown) == rows
    assert shown[0].split()[0] == "1999"
    assert ("1,990 more; --all lists every one" in shown[-1]) is not bool(options)


def test_names_from_the_store_are_no_markup_and_no_escape_sequences(report: Callable, info: dict[str, Any]) -> None:
    info["schema"]["extra"] = {
        "[red]x[red]": {"shape": [], "dtype": "bool"},
        "\x1b[2J": {"shape": [], "dtype": "bool"},
    }
    shown = "\n".join(report(info | {"path": "/tmp/\x1b]0;title\x07"}))
    assert "extra/[red]x[red]" in shown
    assert r"extra/\x1b[2J" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_on_a_narrow_terminal_nothing_is_lost(report: Callable, info: dict[str, Any]) -> None:
    shown = "\n".join(report(info, width=60))
    assert "…" not in shown
    assert "1,234,559" in shown


def test_no_word_of_a_header_is_split_on_a_narrow_terminal(report: Callable, info: dict[str, Any]) -> None:
    lines = report(info, width=40)
    words = " ".join(lines).split()
    for header in ("field", "dtype", "count", "median", "number", "writer", "steps", "state", "segments"):
        assert header in words
    assert max(map(len, lines)) <= 40
    assert "1,234,559" in words
    assert "number 1  writer 1  lanes 8  rows 9" in lines
