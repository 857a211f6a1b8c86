"""Packs that verify finds whole, and every way in which the tables of one, or what they say of its rows, are wrong."""

import json

import numpy as np
import pytest

import diskreplay as dr
from tests.testing import packed
from tests.testing.commands import verify
from tests.testing.on_disk import POSITION_BITS, flip, set_words

pytestmark = pytest.mark.usefixtures("no_patience")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store of which all is in one pack, and the number of that."""
    path = tmp_path_factory.mktemp("original") / "store"
    return path, packed.write_packed(path)


@pytest.fixture
def pack(original, tmp_store):
    """The path of a copy of it, to be damaged; the number of its pack, and the two tables."""
    path, number = original
    packed.copied(path, tmp_store)
    members, runs = packed.tables(tmp_store, number)
    return tmp_store, number, members, runs


def found(path, deep=False):
    return {(problem.kind, problem.where.rpartition("segments/")[2][9:]) for problem in verify(path, deep=deep)}


@pytest.mark.parametrize("deep", [False, True])
def test_nothing_is_wrong_with_a_pack(original, deep):
    assert verify(original[0], deep=deep) == []


def test_nothing_is_wrong_with_a_pack_whose_wide_field_is_compressed(tmp_store):
    pytest.importorskip("zstandard")
    number = packed.write_packed(tmp_store, compression="zstd")
    assert "compressed" in json.loads((tmp_store / f"segments/{number:08}/zarr.json").read_bytes())["attributes"]
    assert verify(tmp_store, deep=True) == []


def test_nothing_is_wrong_with_segments_beside_the_pack_that_has_their_rows(tmp_store, monkeypatch):
    packed.keep_members(monkeypatch)
    number = packed.write_packed(tmp_store)
    (tmp_store / "segments/00000000/reward/c.0.0").unlink()  # nobody reads it any more
    assert number > 5
    assert verify(tmp_store, deep=True) == []


def merge_again(path, monkeypatch):
    """Make a store of which a pack and segments were merged and are there yet; return what it showed before that."""
    packed.write_packed(path)
    with dr.open(path, "a") as store:
        for _ in range(3):
            with store.writer() as writer:
                packed.append(writer, 5)
        shown = packed.shown(path)
        packed.keep_members(monkeypatch)
        store.compact()
    assert len(packed.pack_numbers(path)) == 2
    return shown


def test_nothing_is_wrong_with_a_pack_beside_one_that_it_was_merged_into(tmp_store, monkeypatch):
    merge_again(tmp_store, monkeypatch)
    assert verify(tmp_store, deep=True) == []


def test_a_pack_that_is_named_as_a_segment_of_another_one_is_found(tmp_store, monkeypatch):
    merge_again(tmp_store, monkeypatch)
    first, second = packed.pack_numbers(tmp_store)
    members, runs = packed.tables(tmp_store, second)
    members[members[:, 0] < first, 0] = first
    packed.change_tables(tmp_store, second, members, runs)
    assert {problem.where for problem in verify(tmp_store)} >= {
        f"segments/{first:08}",
        f"segments/{second:08}/members/c.0.0",
    }


def test_nothing_is_wrong_with_a_pack_that_is_not_counted_yet(tmp_store, monkeypatch):
    shown = merge_again(tmp_store, monkeypatch)
    set_words(tmp_store, next_segment=packed.pack_numbers(tmp_store)[-1])
    assert verify(tmp_store, deep=True) == []
    assert packed.shown(tmp_store) == shown


def test_a_pack_that_is_not_counted_though_its_segments_are_gone_is_found(pack):
    path, number, *_ = pack
    set_words(path, next_segment=number)
    detail = f"the next segment is {number}, but segments/{number:08} is there"
    assert [(problem.kind, problem.detail) for problem in verify(path)] == [("counters", detail)]


@pytest.mark.parametrize("name", ["members/c.0.0", "runs/c.0.0", "durable/tables"])
def test_a_byte_of_a_table_that_changed_does_not_fit(pack, name):
    path, number, *_ = pack
    file = path / f"segments/{number:08}" / name
    flip(file, file.stat().st_size // 2)
    assert found(path) == {("checksum", name)}
    file.unlink()
    assert found(path) == {("missing", name)}


@pytest.mark.parametrize("column", range(4))
def test_a_line_of_the_segments_that_cannot_be_is_found(pack, column):
    path, number, members, runs = pack
    members[1, column] += 1 << 40
    packed.change_tables(path, number, members, runs)
    assert ("counters", "members/c.0.0") in found(path)


@pytest.mark.parametrize("line", [0, -1])
def test_segments_are_in_the_order_of_their_numbers_and_before_the_pack(pack, line):
    path, number, members, runs = pack
    members[line, 0] = number
    packed.change_tables(path, number, members, runs)
    assert found(path) == {("counters", "members/c.0.0")}
    members[-1, 0] = members[-2, 0]
    packed.change_tables(path, number, members, runs)
    assert found(path) == {("counters", "members/c.0.0")}


def test_the_steps_of_the_segments_are_those_of_the_pack_and_of_its_rows(pack):
    path, number, members, runs = pack
    members[0, 3] += 1
    packed.change_tables(path, number, members, runs)
    assert found(path) == {("counters", "members/c.0.0")}
    members[1, 3] -= 1
    packed.change_tables(path, number, members, runs)
    assert found(path) == {("counters", "zarr.json")}


@pytest.mark.parametrize(("column", "more"), [(0, 1), (0, -1), (1, 1), (1, 1 << 40)])
def test_lanes_that_overlap_or_end_elsewhere_are_found(pack, column, more):
    path, number, members, runs = pack
    runs[2 if more < 0 else -1, column] += more
    packed.change_tables(path, number, members, runs)
    assert ("counters", "runs/c.0.0") in found(path)


@pytest.mark.parametrize("first", [1 << 20, (1 << 63) - 1])
@pytest.mark.parametrize("line", [1, -1])
def test_no_reader_looks_behind_the_chunks_of_a_pack(pack, line, first):
    path, number, members, runs = pack
    runs[line, 0] = first
    packed.change_tables(path, number, members, runs)
    assert ("counters", "runs/c.0.0") in found(path)
    with pytest.warns(dr.DamagedSegmentWarning, match="hold impossible values"):
        store = dr.open(path)
    with store:
        assert len(store) == 0


@pytest.mark.parametrize("table", [0, 1])
def test_a_writer_or_lane_with_a_number_that_cannot_be_is_found_and_refused(pack, table):
    path, number, *tables = pack
    tables[table][0, 2] = 1 << 62
    packed.change_tables(path, number, *tables)
    assert found(path) == {("counters", ["members/c.0.0", "runs/c.0.0"][table])}
    with pytest.warns(dr.DamagedSegmentWarning, match="hold impossible values"), dr.open(path) as store:
        assert len(store) == 0


def test_a_lane_that_is_there_twice_is_found(pack):
    path, number, members, runs = pack
    runs[-1, 2] = runs[-2, 2]
    packed.change_tables(path, number, members, runs)
    assert found(path) == {("counters", "runs/c.0.0")}


def test_a_lane_begins_with_an_episode(pack):
    path, number, members, runs = pack
    runs[1, 0] += 1
    runs[1, 1] -= 1
    packed.change_tables(path, number, members, runs)
    assert ("flags", "done") in found(path)


def test_times_may_fall_between_lanes_and_not_within_one(pack):
    path, number, _, runs = pack
    name = f"segments/{number:08}/time/c.0.0"
    times = np.fromfile(path / name, "<i8")
    first, rows, *_ = runs[3]
    assert rows > 4
    times[first + 2] = times[first] - 1
    packed.change(path, number, {"time/c.0.0": times.tobytes()})
    assert ("times", "time") in found(path)


def test_what_was_lost_is_in_one_lane(pack):
    path, number, _, runs = pack
    end = int(runs[0, 1])
    packed.change(path, number, {}, {"lost": [[end - 1, 3]], "steps_lost": 0, "lost_values": [0]})
    assert ("flags", "done") in found(path)


def test_an_eviction_by_hand_names_an_episode_of_a_segment_in_the_pack(pack):
    path, number, *_ = pack
    entries = path / "evictions/c.0.0"
    good = np.fromfile(entries, "<i8")
    assert good[0] >> POSITION_BITS < number
    for change in (1, 1 << POSITION_BITS):
        bad = good.copy()
        bad[1 if change == 1 else 0] += change
        entries.write_bytes(bad.tobytes())
        assert {problem.kind for problem in verify(path)} == {"eviction"}
    bad[0] = number << POSITION_BITS
    entries.write_bytes(bad.tobytes())
    assert "eviction" in {problem.kind for problem in verify(path)}


@pytest.mark.parametrize(
    "attributes",
    [
        {"requires": []},
        {"requires": ["packs", "wings"]},
        {"packed": {"members": 0, "runs": 1}},
        {"lanes": [1]},
        {"packed": None},
        {"sealed": False},
    ],
)
def test_attributes_that_no_pack_has_are_found(pack, attributes):
    path, number, *_ = pack
    packed.change(path, number, {}, attributes)
    assert ("metadata", "zarr.json") in found(path)


def test_a_pack_of_which_a_later_one_has_only_some_segments_is_found(tmp_store, monkeypatch):
    packed.write_packed(tmp_store, evict=False)
    with dr.open(tmp_store, "a") as store:
        for _ in range(3):
            with store.writer() as writer:
                packed.append(writer, 5)
        packed.keep_members(monkeypatch)
        store.compact()
    old, new = packed.pack_numbers(tmp_store)
    members, runs = packed.tables(tmp_store, new)
    at = int(np.flatnonzero(members[:, 0] > old)[0])
    members[at - 1, 0] = old  # instead of the last one of the older pack
    packed.change_tables(tmp_store, new, members, runs)
    problems = verify(tmp_store)
    assert {(problem.kind, problem.where) for problem in problems} == {("counters", f"segments/{old:08}")}


def test_a_copy_without_permissions_is_a_pack_all_the_same(pack):
    path, number, *_ = pack
    folder = path / f"segments/{number:08}"
    chunk = folder / "reward/c.0.0"
    chunk.chmod(0o644)
    flip(chunk)
    assert found(path, deep=True) == {("checksum", "reward/c.0.0")}
    with dr.open(path) as store:
        assert store.num_episodes > 10
