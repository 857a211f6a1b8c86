"""Quarantine: nothing is deleted but by retention, what is set aside is counted apart, and comes back when asked."""

import json
import os
import shutil
import time
import warnings

import numpy as np
import pytest

import diskreplay as dr
from tests.inner import forget_warnings
from tests.testing.commands import Refused, drop, repair, verify
from tests.testing.limited import LimiterCounts, count_anew
from tests.testing.on_disk import LANE_COUNTERS, flip, is_locked, replace_bytes, reseal, set_words, words
from tests.testing.support import append_numbered, digest, serial_schema

SEGMENT = "segments/00000001"
ASIDE = f"counters/quarantine/{SEGMENT}"


@pytest.fixture(autouse=True)
def not_warned():
    forget_warnings()


def write(store, first, stop):
    """Write episodes of five numbered steps; segments of ten rows hold two of them."""
    with store.writer() as writer:
        for start in range(first, stop, 5):
            append_numbered(writer, range(start, start + 5))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Three sealed segments of ten steps."""
    path = tmp_path_factory.mktemp("original") / "store"
    with dr.create(path, serial_schema(), chunk_bytes=4096, segment_steps=10) as store:
        write(store, 0, 30)
    return path


@pytest.fixture
def store_path(original, tmp_store):
    shutil.copytree(original, tmp_store)
    return tmp_store


def flip_counters(segment):
    """Damage a segment so that no row of it is known, or make it whole again."""
    for name in LANE_COUNTERS:
        flip(segment / name / "c.0")


def flip_documents(segment):
    """Damage a segment's own document and its copy."""
    flip(segment / "zarr.json", 5)
    flip(segment / "durable/document", 5)


def set_aside(path, number=1):
    """Damage a segment, repair the store, and make the segment whole again where it is then."""
    where = f"segments/{number:08d}"
    flip_counters(path / where)
    repair(path)
    flip_counters(path / "counters/quarantine" / where)


def serials(store):
    return sorted(int(serial) for episode in store.episodes for serial in episode["serial"])


def quarantine(path):
    with dr.open(path) as store:
        return store.quarantine


def read(path, mode="r"):
    with dr.open(path, mode) as store:
        return serials(store)


WITHOUT = [*range(10), *range(20, 30)]


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_segment_in_quarantine_says_what_it_is(store_path):
    before = time.time()
    set_aside(store_path)
    with dr.open(store_path) as store:
        (entry,) = store.quarantine
    assert (entry.segment, entry.steps, entry.where, entry.path) == (1, 10, ASIDE, SEGMENT)
    assert entry.reason == "durable/c.0 does not match its checksum from sealing"
    assert before <= entry.since <= time.time()
    with pytest.raises(AttributeError):
        entry.steps = 3
    record = json.loads((store_path / f"{ASIDE}.record.json").read_text())
    assert record == {"segment": 1, "path": SEGMENT, "steps": 10, "reason": entry.reason, "since": entry.since}


@pytest.mark.parametrize("damage", ["missing", "empty", "list", "link", "wrong"])
def test_what_a_lost_record_said_follows_from_the_folder(store_path, damage):
    set_aside(store_path)
    record = store_path / f"{ASIDE}.record.json"
    record.unlink()
    if damage == "link":
        record.symlink_to("/etc/passwd")
    elif damage != "missing":
        said = {"segment": "x", "steps": -1, "reason": 5, "since": "now", "path": None}
        record.write_text({"empty": "", "list": "[]", "wrong": json.dumps(said)}[damage])
    (entry,) = quarantine(store_path)
    assert (entry.segment, entry.steps, entry.path) == (1, 10, SEGMENT)
    assert entry.since > 0
    repair(store_path, restore=1)
    assert read(store_path) == list(range(30))


def test_the_steps_of_a_segment_without_a_readable_document_are_counted_from_its_flags(store_path):
    flip_documents(store_path / SEGMENT)
    repair(store_path)
    (entry,) = quarantine(store_path)
    assert (entry.segment, entry.steps) == (1, 10)
    for name in ("committed", "durable", "observed"):
        shutil.rmtree(store_path / ASIDE / name)
    (store_path / f"{ASIDE}.record.json").unlink()
    (entry,) = quarantine(store_path)
    assert (entry.segment, entry.steps) == (1, None)
    assert [problem.kind for problem in verify(store_path)] == ["quarantine"]


def test_files_that_were_set_aside_are_entries_without_a_segment(store_path):
    (store_path / "notes.txt").write_text("x")
    (store_path / SEGMENT / "notes.txt").write_text("y")
    repair(store_path)
    found = {entry.where: entry for entry in quarantine(store_path)}
    assert set(found) == {"counters/quarantine/notes.txt", f"{ASIDE}/notes.txt"}
    assert {(entry.segment, entry.steps) for entry in found.values()} == {(None, 0)}
    assert verify(store_path, deep=True) == []
    # The segment itself goes beside them later.
    flip_counters(store_path / SEGMENT)
    repair(store_path)
    flip_counters(store_path / f"{ASIDE}.1")
    assert [entry.where for entry in quarantine(store_path) if entry.segment == 1] == [f"{ASIDE}.1"]
    repair(store_path, restore=1)
    assert read(store_path) == list(range(30))


@pytest.mark.parametrize("where", ["counters/quarantine", "counters/quarantine/segments"])
def test_a_link_in_place_of_the_quarantine_is_not_followed(store_path, tmp_path, where):
    (tmp_path / "elsewhere").mkdir()
    (store_path / where).parent.mkdir(exist_ok=True)
    (store_path / where).symlink_to(tmp_path / "elsewhere")
    flip_counters(store_path / SEGMENT)
    repair(store_path)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (entry,) = [entry for entry in quarantine(store_path) if entry.segment == 1]
    assert (store_path / entry.where / "reward/c.0.0").is_file()
    assert read(store_path) == WITHOUT


# --- counts ----------------------------------------------------------------------------------------------------------


def test_steps_in_quarantine_are_counted_apart_from_evicted_ones(store_path):
    with dr.open(store_path, "a") as store:
        assert store.evict(lambda episode: episode["serial"][0] == 0) == 5
    set_aside(store_path)
    with dr.open(store_path) as store:
        info = store.info()
    assert (info["steps"], info["steps_evicted"]) == (15, 5)
    aside = info["quarantine"]
    assert (aside["steps"], aside["segments"], len(aside["entries"])) == (10, 1, 1)
    assert aside["bytes"] > 0
    assert [segment["number"] for segment in info["segments"]] == [0, 2]


def test_what_limiters_count_never_goes_back(store_path):
    following = LimiterCounts(store_path)

    def counts():
        late = count_anew(store_path)
        assert following.read() == late
        return late

    assert counts() == (30, 30)
    set_aside(store_path)
    assert counts() == (30, 20)
    repair(store_path, restore=1)
    assert counts() == (30, 30)
    set_aside(store_path)
    assert counts() == (30, 20)
    drop(store_path, 1)
    assert counts() == (30, 20)
    assert words(store_path)["evicted"] == 10
    set_aside(store_path, 2)
    (store_path / "counters/quarantine/segments/00000002").rename(store_path / "segments/00000002")
    dr.open(store_path, "a").close()
    assert counts() == (30, 20)
    set_aside(store_path, 0)
    shutil.rmtree(store_path / "counters/quarantine/segments/00000000")
    dr.open(store_path, "a").close()
    assert counts() == (30, 10)
    assert not list((store_path / "counters/quarantine").rglob("*.json"))


def test_a_store_with_a_limit_of_bytes_warns_of_those_in_quarantine(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10, capacity_bytes=1 << 30) as store:
        write(store, 0, 20)
    set_aside(tmp_store)
    with pytest.warns(dr.DamagedSegmentWarning, match="bytes in .*/quarantine do not count in the capacity_bytes of"):
        dr.open(tmp_store, "a").close()
    dr.open(tmp_store, "a").close()
    forget_warnings()
    with dr.open(tmp_store) as store:
        assert store.info()["quarantine"]["bytes"] > 0


# --- the ways back ---------------------------------------------------------------------------------------------------


def test_a_segment_is_brought_back_while_writers_live_and_readers_follow(store_path):
    with dr.open(store_path) as reader, dr.open(store_path, "a") as store, store.writer() as writer:
        append_numbered(writer, range(30, 33), end="open")
        reader.refresh()
        set_aside(store_path)
        assert reader.refresh() == 0
        assert serials(reader) == [*WITHOUT, *range(30, 33)]
        (action,) = store.repair(restore=1)
        assert (action.what, action.where, action.detail) == ("restored", SEGMENT, f"from {ASIDE}, 10 steps")
        assert store.quarantine == []
        append_numbered(writer, range(33, 35))
        assert reader.refresh() == 12
        store.refresh()
        assert serials(reader) == serials(store) == list(range(35))
        assert is_locked(store_path / "segments/00000003/committed/lock")
    assert verify(store_path, deep=True) == []
    assert read(store_path, "a") == list(range(35))


def limited(path, **limits):
    """A store whose retention has work to do, with segments 0 to 4 of ten steps."""
    with dr.create(path, serial_schema(), chunk_bytes=4096, segment_steps=10, **limits) as store:
        write(store, 0, 50)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("by", ["hand", "repair"])
@pytest.mark.parametrize("limits", [{"capacity": 100}, {"max_age_s": 1e6}, {"capacity_bytes": 1 << 30}])
@pytest.mark.filterwarnings("ignore:.* do not count in the capacity_bytes")
def test_a_segment_below_the_first_live_one_comes_back_to_a_store_with_limits(tmp_store, limits, by):
    """The first live segment is only a hint: retention moved it on while the segment was away."""
    path = limited(tmp_store, **limits)
    with dr.open(path, "a") as store, store.writer() as writer, dr.open(path) as reader:
        append_numbered(writer, range(50, 53), end="open")
        set_aside(path, 0)
        with store.writer() as other:  # retention runs when a segment is made and when it is sealed
            append_numbered(other, range(60, 65))
        assert words(path)["first_live"] == 1
        there = [*range(10, 53), *range(60, 65)]
        reader.refresh()
        assert serials(reader) == there
        if by == "hand":
            (path / "counters/quarantine/segments/00000000").rename(path / "segments/00000000")
            assert read(path) == [*range(10), *there]
            dr.open(path, "a").close()
        else:
            repair(path, restore=0)
        assert words(path)["first_live"] == 0
        reader.refresh()
        store.refresh()
        assert serials(reader) == serials(store) == [*range(10), *there]
        append_numbered(writer, range(53, 55))
        with store.writer() as other:
            append_numbered(other, range(70, 75))
    assert read(path, "a") == [*range(55), *range(60, 65), *range(70, 75)]
    assert verify(path, deep=True) == []
    assert not list((path / "counters/quarantine").rglob("*.json"))


def test_a_segment_that_was_moved_back_by_hand_is_seen_by_readers_that_live(store_path):
    with dr.open(store_path) as reader, dr.open(store_path, "a") as store:
        set_aside(store_path)
        reader.refresh()
        (store_path / ASIDE).rename(store_path / SEGMENT)
        dr.open(store_path, "a").close()
        for opened in (reader, store):
            assert opened.refresh() == (10 if opened is reader else 0)
            assert serials(opened) == list(range(30))


def test_a_process_that_died_while_it_brought_a_segment_back_has_brought_it_back(store_path):
    set_aside(store_path, 0)
    set_words(store_path, first_live=1)
    with dr.open(store_path) as reader:
        (store_path / "counters/quarantine/segments/00000000").rename(store_path / "segments/00000000")
        dr.open(store_path, "a").close()
        reader.refresh()
        assert serials(reader) == list(range(30))
    assert words(store_path)["first_live"] == 0
    # Between the two stores of a counter that goes back, its complement is the older first segment.
    set_words(store_path, first_live=1)
    replace_bytes(store_path / "counters/c.0", 8 * (16 + 1), np.int64(~0).tobytes())
    assert read(store_path) == list(range(30))
    dr.open(store_path, "a").close()
    assert words(store_path)["first_live"] == 0


def test_a_segment_is_brought_back_only_where_that_is_safe(store_path, tmp_path):
    with pytest.raises(Refused, match="^segment 1 is not in .*; diskreplay inspect lists the segments there$"):
        repair(store_path, restore=1)
    flip_counters(store_path / SEGMENT)
    repair(store_path)
    before = digest(store_path)
    with pytest.raises(Refused, match=f"^segment 1 is still damaged: {SEGMENT}/durable/c.0 does not match"):
        repair(store_path, restore=1)
    assert digest(store_path) == before
    flip_counters(store_path / ASIDE)
    assert [action.what for action in repair(store_path, restore=1, dry_run=True).actions] == ["restored"]
    assert (store_path / ASIDE).exists()


def damage_a_row(path):
    """Damage a block of rewards of a segment, or make it whole again."""
    flip(path / "reward/c.0.0", 0)


def rebuilt(path):
    """Have repair rebuild a segment, and make the damaged one whole again in quarantine; return what the store has."""
    damage_a_row(path / SEGMENT)
    assert [action.what for action in repair(path).actions] == ["rebuilt"]
    damage_a_row(path / ASIDE)
    return read(path)


def inserted(path):
    """The steps in all classes."""
    with dr.open(path) as store:
        info = store.info()
    aside = sum(entry["steps"] or 0 for entry in info["quarantine"]["entries"] if not entry["rebuilt"])
    return info["steps"] + info["steps_evicted"] + info["steps_lost"] + aside


def test_an_original_takes_the_place_of_the_rebuilt_segment(store_path):
    assert set(rebuilt(store_path)) < set(range(30))
    before = digest(store_path)
    (planned,) = repair(store_path, restore=1, dry_run=True).actions
    assert planned.detail == f"from {ASIDE}, 5 steps; the one in its place would go to quarantine"
    assert digest(store_path) == before
    with dr.open(store_path) as reader, dr.open(store_path, "a") as store, store.writer() as writer:
        append_numbered(writer, range(30, 33), end="open")
        (action,) = store.repair(restore=1)
        assert (action.what, action.where) == ("restored", SEGMENT)
        assert action.detail == f"from {ASIDE}, 5 steps; the one in its place is now {ASIDE}"
        append_numbered(writer, range(33, 35))
        for opened in (reader, store):
            opened.refresh()
            assert serials(opened) == list(range(35))
        (entry,) = store.quarantine
        assert (entry.segment, entry.steps, entry.rebuilt, entry.where) == (1, 0, True, ASIDE)
    assert inserted(store_path) == 35
    assert verify(store_path, deep=True) == []
    with pytest.raises(Refused, match=f"^{SEGMENT} has more steps than {ASIDE}; "):
        repair(store_path, restore=1)
    assert read(store_path, "a") == list(range(35))
    drop(store_path, 1)
    assert inserted(store_path) == 35
    assert verify(store_path, deep=True) == []


@pytest.mark.parametrize("has_record", [False, True])
def test_an_original_is_kept_if_the_rebuilt_segment_is_merged_before_it_is_back(store_path, has_record):
    """A process died in `--restore`: it had taken the original out of quarantine, and perhaps left its record there."""
    left, out = rebuilt(store_path), store_path / "counters/rebuilt-00000001"
    with dr.open(store_path, "a") as store:
        os.rename(store_path / ASIDE, out)
        if not has_record:
            os.unlink(store_path / f"{ASIDE}.record.json")
        before = digest(out)
        assert store.compact()["segments"] == 3
    with pytest.raises(Refused, match="^segment 1 is not in .*quarantine"):
        repair(store_path, restore=1)
    assert read(store_path, "a") == left
    (entry,) = quarantine(store_path)
    assert (entry.steps, entry.reason) == (0, "its segment was merged meanwhile")
    assert digest(store_path / entry.where) == before
    assert verify(store_path, deep=True) == []


def test_an_original_that_is_still_damaged_leaves_the_rebuilt_segment(store_path):
    left = rebuilt(store_path)
    damage_a_row(store_path / ASIDE)
    before = digest(store_path)
    with pytest.raises(Refused, match=f"^segment 1 is still damaged: {SEGMENT}/reward/c.0.0 .*put a good copy"):
        repair(store_path, restore=1)
    assert digest(store_path) == before
    assert read(store_path) == left


def test_of_several_originals_the_last_one_that_is_whole_is_brought_back(store_path):
    rebuilt(store_path)
    flip(store_path / SEGMENT / "obs/c.0.0.0", -1)
    assert [action.what for action in repair(store_path).actions] in (["rebuilt"], ["quarantined"])
    assert len(quarantine(store_path)) == 2
    repair(store_path, restore=1)
    assert read(store_path, "a") == list(range(30))
    assert inserted(store_path) == 30


@pytest.mark.parametrize("salvage", [False, True])
def test_a_repair_evicts_nothing(tmp_store, salvage):
    """Segments that were moved back by hand are more than the capacity: the next writer evicts, and no repair."""
    path = limited(tmp_store, capacity=50)
    for number in (2, 3):
        set_aside(path, number)
    with dr.open(path, "a") as store:
        write(store, 50, 70)
    for number in (2, 3):
        (path / f"counters/quarantine/segments/0000000{number}").rename(path / f"segments/0000000{number}")
    damage_a_row(path / "segments/00000004")
    there = sorted(os.listdir(path / "segments"))
    assert "rebuilt" in [action.what for action in repair(path, salvage=salvage).actions]
    assert sorted(os.listdir(path / "segments")) == there
    assert words(path)["evicted"] == 0
    dr.open(path, "a").close()
    with dr.open(path, "a") as store:
        write(store, 70, 75)
    assert len(os.listdir(path / "segments")) < len(there)


def test_what_is_no_segment_makes_room_for_one(store_path):
    set_aside(store_path)
    (store_path / SEGMENT).mkdir()
    repair(store_path, restore=1)
    assert read(store_path, "a") == list(range(30))
    assert inserted(store_path) == 30
    assert [entry.steps for entry in quarantine(store_path)] == [0]


def test_another_segment_with_its_number_keeps_its_place(store_path):
    set_aside(store_path)
    shutil.copytree(store_path / "segments/00000000", store_path / SEGMENT)
    with pytest.raises(
        Refused, match=f"^{SEGMENT} is a different segment from {ASIDE}; move it out of the store first$"
    ):
        repair(store_path, restore=1)


def test_a_segment_that_retention_would_delete_at_once_is_not_brought_back(tmp_store):
    path = limited(tmp_store, capacity=50)
    set_aside(path, 0)
    with dr.open(path, "a") as store:
        write(store, 50, 80)
    with pytest.raises(Refused, match="^segment 0 has no step newer than the last eviction: it would be evicted at"):
        repair(path, restore=0)
    assert read(path) == list(range(30, 80))
    assert len(quarantine(path)) == 1


def test_a_reader_cannot_repair_but_may_ask(store_path):
    flip_counters(store_path / SEGMENT)
    with pytest.warns(dr.DamagedSegmentWarning):
        reader = dr.open(store_path)
    with reader as store:
        assert [action.what for action in store.repair(dry_run=True)] == ["quarantined"]
        with pytest.raises(dr.ReadOnlyError):
            store.repair()
        assert store.quarantine == []
    with dr.open(store_path, "a") as store:
        assert [action.what for action in store.repair()] == ["quarantined"]
        store.refresh()
        assert serials(store) == WITHOUT


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_a_number_in_quarantine_is_never_given_again(store_path):
    set_aside(store_path, 2)
    set_words(store_path, next_segment=2)
    with dr.open(store_path, "a") as store:
        write(store, 30, 35)
    assert sorted(os.listdir(store_path / "segments")) == ["00000000", "00000001", "00000003", "zarr.json"]
    set_aside(store_path, 3)
    os.unlink(store_path / "counters/c.0")
    assert repair(store_path).left == []
    assert words(store_path)["next_segment"] == 4
    drop(store_path, 3)
    with dr.open(store_path, "a") as store:
        write(store, 40, 45)
    assert (store_path / "segments/00000004").exists()


# --- what retention took out -----------------------------------------------------------------------------------------


def back_after_a_power_cut(path, number, change):
    """Make a change by which a segment leaves, and put it back as if its name had still been on the disk."""
    name = f"segments/{number:08d}"
    shutil.copytree(path / name, path.parent / "kept")
    change()
    assert not (path / name).exists()
    (path.parent / "kept").rename(path / name)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["capacity", "age", "hand"])
def test_an_evicted_segment_that_a_power_cut_brought_back_stays_evicted(tmp_store, how):
    limits = {"capacity": {"capacity": 50}, "age": {"max_age_s": 600.0}, "hand": {}}[how]
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10, **limits) as store:
        write(store, 0, 10)
    if how == "age":

        def age(attributes):
            attributes["sealed_at"] -= 1200
            attributes["sealed_clock"][2] -= 1200

        reseal(tmp_store / "segments/00000000/zarr.json", age)
    with dr.open(tmp_store, "a") as store:

        def change():
            write(store, 10, 80)
            if how == "hand":
                store.evict(lambda episode: episode["serial"][0] < 10)

        back_after_a_power_cut(tmp_store, 0, change)
        expected = sorted(set(read(tmp_store)) - set(range(10)))
    assert read(tmp_store) == expected
    evicted = words(tmp_store)["evicted"]
    assert read(tmp_store, "a") == expected
    assert not (tmp_store / "segments/00000000").exists()
    if how == "capacity":
        assert words(tmp_store)["evicted"] == evicted
    assert not (tmp_store / "counters/quarantine").exists()


def test_a_segment_that_was_never_counted_is_counted_and_not_deleted(store_path):
    """Its maker died between the rename and the counter."""
    set_words(store_path, next_segment=2)
    assert read(store_path) == list(range(20))
    assert read(store_path, "a") == list(range(30))
    assert words(store_path)["next_segment"] == 3


def test_retention_deletes_no_damaged_segment(tmp_store):
    path = limited(tmp_store, capacity=50)
    flip_documents(path / "segments/00000000")
    with pytest.warns(dr.DamagedSegmentWarning):
        store = dr.open(path, "a")
    with store:
        write(store, 50, 120)
        store.refresh()
        assert serials(store) == list(range(70, 120))
    assert sorted(os.listdir(path / "segments"))[0] == "00000000"
    repair(path)
    assert [(entry.segment, entry.steps) for entry in quarantine(path)] == [(0, 10)]
    assert read(path, "a") == list(range(70, 120))


# --- deleting --------------------------------------------------------------------------------------------------------


def test_a_dropped_segment_is_gone_and_counts_as_evicted(store_path):
    set_aside(store_path)
    action = drop(store_path, 1)
    assert (action.what, action.where, action.steps) == ("deleted", ASIDE, 10)
    assert quarantine(store_path) == []
    assert not list((store_path / "counters").glob("old-*"))
    assert verify(store_path, deep=True) == []
    with dr.open(store_path) as store:
        assert store.info()["steps_evicted"] == 10
    with pytest.raises(Refused, match="^segment 1 is not in "):
        drop(store_path, 1)


def test_a_process_that_died_while_it_dropped_a_segment_has_dropped_it(store_path):
    set_aside(store_path)
    (store_path / f"{ASIDE}.record.json").unlink()
    (store_path / ASIDE).rename(store_path / "counters/old-00000001-10")
    dr.open(store_path, "a").close()
    assert words(store_path)["evicted"] == 10
    assert not list((store_path / "counters").glob("old-*"))


# --- around a damaged segment ----------------------------------------------------------------------------------------

DAMAGE = {
    "document": lambda segment: flip(segment / "zarr.json", 5),
    "no document": lambda segment: (segment / "zarr.json").unlink(),
    "document that is a folder": lambda segment: ((segment / "zarr.json").unlink(), (segment / "zarr.json").mkdir()),
    "unknown flags": lambda segment: (segment / "done/c.0.0").write_bytes(b"\xff" * 16),
    "no flags": lambda segment: shutil.rmtree(segment / "done"),
    "counters": lambda segment: flip(segment / "committed/c.0", 6),
    "short counters": lambda segment: os.truncate(segment / "committed/c.0", 3),
    "no counters": lambda segment: shutil.rmtree(segment / "committed"),
    "no chunk": lambda segment: (segment / "action/c.0.0").unlink(),
    "a short chunk": lambda segment: os.truncate(segment / "action/c.0.0", 3),
    "a file in its place": lambda segment: (shutil.rmtree(segment), segment.write_text("x")),
    "a link in its place": lambda segment: (segment.rename(segment.parent.parent / "x"), segment.symlink_to("../x")),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("name", DAMAGE)
def test_a_store_opens_around_a_damaged_segment(store_path, mode, name):
    path = store_path
    DAMAGE[name](path / SEGMENT)
    with pytest.warns(dr.DamagedSegmentWarning, match=f"^segment 1 of {path} is damaged, .* diskreplay repair") as told:
        store = dr.open(path, mode)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serials(store) == WITHOUT
        table = store.episode_table()
        assert table["segment"].tolist() == [0, 0, 2, 2]
        info = store.info()
        assert info["steps"] == 20
        assert [segment["state"] for segment in info["segments"] if segment["number"] == 1] == ["damaged"]
        assert info["steps_inserted"] >= 20
        with dr.Sampler(store, dr.Transitions(), batch_size=64, seed=0) as sampler:
            assert set(sampler.sample().numpy()["serial"].tolist()) <= set(WITHOUT)
        if mode == "a":
            write(store, 30, 45)
            store.refresh()
            assert serials(store) == [*WITHOUT, *range(30, 45)]
        assert os.path.lexists(path / SEGMENT)
        store.close()


def test_a_segment_of_a_later_release_is_no_damage(store_path):
    reseal(store_path / SEGMENT / "zarr.json", lambda attributes: attributes.update(requires=["telepathy"]))
    with pytest.raises(dr.FormatError, match="telepathy.*update diskreplay"):
        dr.open(store_path)


def test_a_damaged_segment_is_known_again_when_it_was_repaired(store_path):
    document = store_path / SEGMENT / "done/zarr.json"
    good = (store_path / SEGMENT / "committed/c.0").read_bytes()
    (store_path / SEGMENT / "committed/c.0").write_bytes(b"\xff" * 8)
    document.write_bytes(b"{}")
    with pytest.warns(dr.DamagedSegmentWarning):
        reader = dr.open(store_path)
    with reader:
        assert serials(reader) == WITHOUT
        assert {action.what for action in repair(store_path).actions} == {"restored"}
        assert (store_path / SEGMENT / "committed/c.0").read_bytes() == good
        assert reader.refresh() == 10
        assert serials(reader) == list(range(30))


def test_a_dead_writers_damaged_segment_keeps_nobody_from_writing_and_closing(store_path):
    with dr.open(store_path, "a") as store, store.writer() as writer:
        append_numbered(writer, range(30, 33), end="open")
        shutil.copytree(store_path, store_path.parent / "dead")  # nobody holds the copy's lock
        inode = os.stat(store_path.parent / "dead/segments/00000003/committed/c.0").st_ino
    path = store_path.parent / "dead"
    reseal(path / "segments/00000003/zarr.json", lambda attributes: attributes.update(inode=inode))
    os.truncate(path / "segments/00000003/action/c.0.0", 5)
    with pytest.warns(dr.DamagedSegmentWarning, match="^segment 3 of "):
        store = dr.open(path, "a")
    write(store, 40, 45)
    store.close()
    assert (path / "segments/00000003").exists()
    assert [(action.what, action.where) for action in repair(path).actions] == [("quarantined", "segments/00000003")]
    assert read(path) == [*range(30), *range(40, 45)]


@pytest.mark.parametrize("time", [float("nan"), -1, "now", True, None])
def test_a_segment_sealed_at_no_time_is_left_out(store_path, time):
    reseal(store_path / SEGMENT / "zarr.json", lambda attributes: attributes.update(sealed_at=time))
    with pytest.warns(dr.DamagedSegmentWarning, match="sealed_at is"), dr.open(store_path) as store:
        assert serials(store) == WITHOUT


def test_a_segment_that_becomes_damaged_while_it_is_written_is_left_out_by_the_next_refresh(tmp_store):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=1000).close()
    with dr.open(tmp_store, "a") as store, dr.open(tmp_store) as reader:
        one, other = store.writer(), store.writer()
        append_numbered(one, range(5))
        append_numbered(other, range(10, 15))
        assert reader.refresh() == 10
        held = reader.episodes[0]
        (tmp_store / "segments/00000000/done/c.0.0").write_bytes(b"\xff" * 4096)
        append_numbered(one, range(5, 7), end="open")
        append_numbered(other, range(15, 17))
        flags = np.memmap(tmp_store / "segments/00000000/done/c.0.0", np.uint8, "r+")
        flags[:] = 255
        with pytest.warns(dr.DamagedSegmentWarning, match="^segment 0 of "):
            assert reader.refresh() == 2
        assert serials(reader) == [*range(10, 17)]
        assert held["serial"].tolist() == list(range(5))
        assert reader.refresh() == 0
        other.close()
        one.close()


# --- beside a trainer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["uniform", "prioritized", "recency"])
def test_a_trainer_goes_on_when_a_segment_is_set_aside_and_brought_back(store_path, distribution):
    made = {"uniform": dr.Uniform, "prioritized": dr.Prioritized, "recency": lambda: dr.Recency(10)}[distribution]()
    with dr.open(store_path) as store, dr.Sampler(store, dr.Transitions(), made, batch_size=256, seed=0) as sampler:

        def drawn():
            batch = sampler.sample()
            if distribution == "prioritized":
                sampler.update_priorities(batch.index, np.ones(256))
            return set(batch.numpy()["serial"].tolist())

        assert drawn() == set(range(30))
        old = sampler.sample()
        set_aside(store_path)
        seen = set().union(*(drawn() for _ in range(5)))
        assert seen == set(WITHOUT)
        assert len(store) == 20
        gone = [i for i in old.index.tolist() if i >> 35 == 1]
        with pytest.raises(dr.InvalidIndex):
            sampler.gather(gone[:1])
        repair(store_path, restore=1)
        seen = set().union(*(drawn() for _ in range(5)))
        assert seen == set(range(30))
        assert (sampler.gather(gone[:5]).index.numpy() == gone[:5]).all()


@pytest.mark.parametrize("distribution", [dr.Uniform, dr.Prioritized])
def test_a_trainer_draws_lost_steps_again_when_their_original_is_brought_back(store_path, distribution):
    left = set(rebuilt(store_path))
    how = {"batch_size": 256, "seed": 0}
    with dr.open(store_path) as store, dr.Sampler(store, dr.Transitions(), distribution(), **how) as sampler:
        assert set(sampler.sample().numpy()["serial"].tolist()) == left
        repair(store_path, restore=1)
        assert set(sampler.sample().numpy()["serial"].tolist()) == set(range(30))


def test_a_segment_that_was_replaced_by_another_with_its_number_is_read_again(store_path):
    """As repair does that rebuilds one: the damaged one goes into quarantine, the new one into its place."""
    with dr.open(store_path) as reader:
        new = store_path.parent / "new"
        shutil.copytree(store_path / SEGMENT, new)
        ids = [int(i) for episode in reader.episodes for i in episode.ids]
        set_aside(store_path)
        new.rename(store_path / SEGMENT)
        generation = reader.snapshot.generation
        reader.refresh()
        assert reader.snapshot.generation > generation
        assert serials(reader) == list(range(30))
        assert [int(i) for episode in reader.episodes for i in episode.ids] == ids
        assert os.path.realpath(reader.snapshot.tables.info(1).path) == str(store_path / SEGMENT)


@pytest.mark.parametrize("byte", [0, 255])
def test_a_segment_whose_counters_are_all_damaged_is_told_with_the_steps_it_says_it_has(store_path, byte):
    for name in LANE_COUNTERS:
        counter = store_path / SEGMENT / name / "c.0"
        counter.chmod(0o644)
        counter.write_bytes(bytes([byte]) * 8)
    assert repair(store_path).steps_lost == 10
    with dr.open(store_path) as store:
        assert len(store) == 20
        assert store.info()["quarantine"]["steps"] == 10
        (problem,) = store.verify(deep=True)
        assert problem.kind == "quarantine"
        assert problem.detail.startswith("10 steps of writer")
