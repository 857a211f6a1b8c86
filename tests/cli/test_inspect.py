import io
from typing import Any

import pytest
from rich.console import Console

from diskreplay.cli import inspect


def rendered(part: object, width: int = 160) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_the_summary_names_everything_that_is_counted(info: dict[str, Any]) -> None:
    assert dict(inspect.summary(info)) == {
        "format": "version 1, created 2026-01-01 00:00:00 UTC",
        "steps": "1,234,567 of a capacity of 2,000,000 (62%)",
        "episodes": "1,005 (900 terminated, 100 truncated, 3 cut, 2 open)",
        "segments": "3 (1 writing, 1 dead, 1 sealed)",
        "writers": "2 (1 alive, 1 dead)",
        "on disk": "12.3 GB (13.0 GB apparent, 654.3 MB of it holes)",
    }


def test_a_store_without_capacity_and_one_that_evicted_say_so(info: dict[str, Any]) -> None:
    assert inspect.steps_line(info | {"capacity": None}) == "1,234,567, no capacity set"
    evicting = info | {"steps": 100, "capacity": 100, "steps_evicted": 2_345, "steps_inserted": 2_445}
    assert inspect.steps_line(evicting) == "100 of a capacity of 100 (100%), 2,345 evicted, 2,445 inserted"
    limited = info | {"capacity": None, "capacity_bytes": 3_200_000_000, "max_age_s": 86400.0}
    assert inspect.steps_line(limited) == "1,234,567"
    assert dict(inspect.summary(limited))["limits"] == "3.2 GB of segments, 86,400 s since a segment was sealed"


def test_fields_are_listed_by_path_in_the_order_of_the_schema(info: dict[str, Any]) -> None:
    lines = rendered(inspect.schema_table(info["schema"])).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        "obs/image",
        "obs/state/0",
        "obs/state/1",
        "action",
        "reward",
        "extra/log_prob",
        "episode/seed",
    ]


def test_the_schema_is_shown_with_shapes_types_and_spaces(info: dict[str, Any]) -> None:
    lines = [line.split() for line in rendered(inspect.schema_table(info["schema"])).splitlines()]
    assert ["obs/image", "84x84", "uint8", "Box(0", "to", "255)"] in lines
    assert ["action", "scalar", "int64", "Discrete(7)"] in lines
    assert ["obs/state/0", "4", "float32", "-"] in lines


def test_statistics_cover_returns_and_lengths(info: dict[str, Any]) -> None:
    lines = [line.split() for line in rendered(inspect.statistics_table(info)).splitlines()]
    assert ["count", "mean", "std", "min", "median", "max"] in lines
    assert ["total_reward", "1,003", "101.2", "7.5", "-3", "99", "500"] in lines
    assert ["length", "1,003", "1,230.5", "0", "9", "1,000", "12,345"] in lines


def test_segments_being_written_come_first_then_the_dead(info: dict[str, Any]) -> None:
    shown = rendered(inspect.segments_table(info["segments"], None)).splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["2", "1", "0"]
    assert shown[3].split() == ["1", "1", "8", "9", "8", "dead", "4.1", "kB"]


def test_how_many_segments_a_pack_has_is_shown_where_there_is_one(info: dict[str, Any]) -> None:
    assert "merged" not in rendered(inspect.segments_table(info["segments"], None))
    segments = [info["segments"][0] | {"merged": 1234}, *info["segments"][1:]]
    shown = rendered(inspect.segments_table(segments, None)).splitlines()
    assert shown[1].split()[5] == "merged"
    assert shown[-1].split()[5] == "1,234"


def test_writers_alive_come_first(info: dict[str, Any]) -> None:
    shown = rendered(inspect.writers_table(info["writers"], None)).splitlines()
    assert [line.split() for line in shown[2:]] == [
        ["0", "alive", "2", "1", "1,234,559"],
        ["1", "dead", "1", "8", "8"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("all_rows", "lines"), [(False, 13), (True, 2002)])
def test_a_long_table_is_cut_short_unless_all_is_asked_for(info: dict[str, Any], all_rows: bool, lines: int) -> None:
    segments = [info["segments"][0] | {"number": number} for number in range(2000)]
    limit = None if all_rows else inspect.ROWS_SHOWN
    shown = rendered(inspect.segments_table(segments, limit)).splitlines()
    assert len(shown) == lines
    assert shown[2].split()[0] == "1999"
    assert ("1,990 more; --all lists every one" in shown[-1]) is not all_rows


def test_the_report_of_an_empty_store_has_no_statistics(info: dict[str, Any]) -> None:
    nothing = dict.fromkeys(info["episodes"], 0)
    empty = info | {
        "steps": 0,
        "episodes": nothing,
        "total_reward": None,
        "length": None,
        "segments": [],
        "writers": [],
    }
    shown = rendered(inspect.report(empty))
    assert "ended episodes" not in shown
    assert "0 (0 terminated, 0 truncated, 0 cut, 0 open)" in shown


def test_names_from_the_store_are_no_markup_and_no_escape_sequences(info: dict[str, Any]) -> None:
    info["schema"]["extra"] = {
        "[red]x[red]": {"shape": [], "dtype": "bool"},
        "\x1b[2J": {"shape": [], "dtype": "bool"},
    }
    shown = rendered(inspect.report(info | {"path": "/tmp/\x1b]0;title\x07"}))
    assert "extra/[red]x[red]" in shown
    assert r"extra/\x1b[2J" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_on_a_narrow_terminal_nothing_is_lost(info: dict[str, Any]) -> None:
    shown = rendered(inspect.report(info), width=60)
    assert "…" not in shown
    assert "1,234,559" in shown


def test_no_word_of_a_header_is_split_on_a_narrow_terminal(info: dict[str, Any]) -> None:
    shown = rendered(inspect.report(info), width=40)
    words = shown.split()
    for header in ("field", "dtype", "count", "median", "number", "writer", "steps", "state", "segments"):
        assert header in words
    assert max(map(len, shown.splitlines())) <= 40
    assert "1,234,559" in words
    assert "number 1  writer 1  lanes 8  rows 9" in shown
