"""The tables of packs: ids and rows, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.packs import PackTables, _are_possible, merged_into, read_members, read_tables
from diskreplay.segments.segment import read_segment
from tests.crash.workloads import create
from tests.testing.merged import folders
from tests.testing.support import append_numbered, serial_schema


def tables_of(segments: list[tuple[int, list[int]]], gap: int = 0) -> PackTables:
    """Return the tables of a pack of segments: the number of each, and the rows of its lanes."""
    members = [[number, len(rows), number % 7, sum(rows)] for number, rows in segments]
    runs, first = [], 0
    for _, rows in segments:
        for lane, count in enumerate(rows):
            runs.append([first, count, lane])
            first += count + gap
    return PackTables(np.array(members, np.int64), np.array(runs, np.int64))


segments = st.lists(
    st.tuples(st.integers(0, 10_000), st.lists(st.integers(0, 9), min_size=1, max_size=5)),
    min_size=1, max_size=8, unique_by=lambda segment: segment[0],
).map(sorted)  # fmt: skip


@given(segments, st.integers(0, 3))
def test_ids_and_rows_are_each_others_inverse(made: list[tuple[int, list[int]]], gap: int) -> None:
    tables = tables_of(made, gap)
    assert _are_possible(tables, 1 << 40)
    rows, ids = [], []
    for line, (number, lanes) in enumerate(made):
        for lane, count in enumerate(lanes):
            first = int(tables.first_rows[tables.runs_of(line)][lane])
            rows += range(first, first + count)
            ids += [number << layout.POSITION_BITS | row * len(lanes) + lane for row in range(count)]
    assert tables.ids_of(np.array(rows, np.int64)).tolist() == ids
    assert tables.rows_of(np.array(ids, np.int64)).tolist() == rows
    assert [row for row in range(max(rows, default=0) + 2 * gap + 2) if tables.holds(row)] == rows
    assert [row for first, count in tables.split(0, 1 << 40) for row in range(first, first + count)] == rows


@given(segments, st.integers(0, 20), st.integers(0, 20))
def test_a_range_is_split_where_another_lane_begins(made: list[tuple[int, list[int]]], first: int, rows: int) -> None:
    tables = tables_of(made)
    parts = tables.split(first, rows)
    total = int(tables.rows.sum())
    assert [row for a, count in parts for row in range(a, a + count)] == list(range(first, min(first + rows, total)))
    begins = {*tables.first_rows.tolist()}
    assert all(row not in begins for a, count in parts for row in range(a + 1, a + count))


def test_segments_that_are_not_in_a_pack_have_no_place() -> None:
    tables = tables_of([(3, [2]), (5, [1, 1]), (9, [4])])
    assert tables.places(np.array([0, 3, 4, 5, 9, 10])).tolist() == [-1, 0, -1, 1, 2, -1]


@pytest.mark.parametrize(
    ("column", "line", "value"),
    [
        (("members", 0), 0, -1),  # no number
        (("members", 0), 1, 3),  # the same number twice
        (("members", 0), 2, layout.MAX_SEGMENTS),
        (("members", 1), 1, 0),  # no lanes
        (("members", 1), 1, 3),  # more than there are lines
        (("members", 1), 1, layout.MAX_LANES + 1),
        (("members", 2), 0, layout.MAX_SEGMENTS),
        (("runs", 0), 2, 1),  # in the lane before
        (("runs", 1), 0, 3),  # into the next one
        (("runs", 1), 3, 1 << 36),  # more than ids can tell apart
        (("runs", 1), 3, -4),
        (("runs", 2), 1, layout.MAX_LANES),
    ],
)
def test_tables_that_say_what_cannot_be_are_refused(column: tuple[str, int], line: int, value: int) -> None:
    tables = tables_of([(3, [2]), (5, [1, 1]), (9, [4])])
    assert _are_possible(tables, 1 << 40)
    table = tables.members if column[0] == "members" else tables.runs
    table[line, column[1]] = value
    assert not _are_possible(PackTables(tables.members, tables.runs), 1 << 40)


@pytest.fixture
def pack(tmp_store: Path) -> Any:
    """Return the attributes of a pack of three segments."""
    with dr.create(tmp_store, serial_schema(), segment_steps=4, compaction="manual") as store:
        with store.writer() as writer:
            for first in (0, 4, 8):
                append_numbered(writer, range(first, first + 4))
        store.compact()
    (number,) = folders(tmp_store)
    return read_segment(read_root(tmp_store), number)


def test_a_pack_is_a_sealed_segment_with_one_lane_that_names_what_it_needs(pack: Any) -> None:
    tables = read_tables(pack)
    assert pack.attributes()["requires"] == ["packs"]
    assert (pack.lanes, pack.sealed, pack.steps) == ((0,), True, 12)
    assert tuple(pack.packed) == (3, 3)
    assert read_members(pack).tolist() == tables.members.tolist()
    assert merged_into({pack.number: tables.numbers.tolist()}) == {*tables.numbers.tolist()}
    assert tables.steps.tolist() == [4, 4, 4]
    assert {*pack.checksums} >= {"members/c.0.0", "runs/c.0.0", "committed/c.0", "done/c.0.0", layout.BLOCKS}


def test_an_earlier_release_would_refuse_a_pack_by_name(pack: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diskreplay.segments.documents import metadata

    monkeypatch.setattr(metadata, "FEATURES", ())
    with pytest.raises(dr.FormatError, match=r"needs \['packs'\], which this release does not know; update diskreplay"):
        read_segment(pack.root, pack.number)


def test_a_store_without_packs_requires_nothing(tmp_store: Path) -> None:
    with create(tmp_store) as store, store.writer():
        pass
    root = read_root(tmp_store)
    assert all(read_segment(root, number).attributes()["requires"] == [] for number in folders(tmp_store))
