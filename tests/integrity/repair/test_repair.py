"""What repair does to each kind of damage: nothing is lost, the store opens, and verify finds nothing after it."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.integrity.verify.test_verify import DAMAGE, LANES, SEGMENT, original as collected
from tests.testing.commands import repair, verify
from tests.testing.filesystems import network_disk
from tests.testing.on_disk import is_locked, replace_bytes, reseal, set_words, words
from tests.testing.support import REPOSITORY, append_numbered, digest, serial_schema, serials
from tests.writing.test_recovery import ENDLESS

pytestmark = pytest.mark.usefixtures("no_patience", "tables_of_few_rows")

assert collected, "a fixture: a store with initial priorities"
# What damages the initial priorities, of another store than the one here.
PRIORITIES = {name for name, (_, _, where) in DAMAGE.items() if where.startswith(f"{LANES}/priority")} | {
    "priorities of other chunks"
}

BACKUP = {name for name in DAMAGE if DAMAGE[name][2] == "zarr.json" or "evict" in name} - {
    "evictions that were not counted",
    "root without its end",
    "root that is no JSON",
    "no root",
} | {"counters elsewhere"}
"""Damage to what nothing else in the store repeats, or that leaves no place for a lock."""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "store"
    schema = serial_schema(obs={"image": dr.Field((2, 3), "uint8"), "on": dr.Field((), "bool")})
    with dr.create(path, schema, chunk_bytes=4096, segment_steps=10) as store, store.writer() as writer:
        for serial in range(30):
            obs = {"image": np.full((2, 3), serial, np.uint8), "on": True}
            writer.append(obs, serial, 1.0, serial % 6 == 5, serial=serial, next_obs=obs if serial % 6 == 5 else None)
    return path


@pytest.fixture
def store_path(original, tmp_store):
    shutil.copytree(original, tmp_store)
    return tmp_store


def contents(path):
    """The bytes of every file below a folder, wherever it lies: what repair must not lose."""
    return {data for data in (file.read_bytes() for file in path.rglob("*") if file.is_file()) if data}


def damage_left(path):
    """What verify finds, but for the steps that are in quarantine."""
    return [problem for problem in verify(path, deep=True) if problem.kind != "quarantine"]


def test_a_link_in_a_segments_place_is_set_aside_and_not_followed(store_path):
    segment = store_path / "segments/00000001"
    shutil.rmtree(segment)
    segment.symlink_to("x" * 300)
    assert ("quarantined", "segments/00000001") in [
        (action.what, action.where) for action in repair(store_path).actions
    ]
    assert damage_left(store_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_damaged_priorities_are_repaired_or_set_aside_with_their_steps(collected, tmp_store, name):
    shutil.copytree(collected, tmp_store)
    before = serials(tmp_store)
    DAMAGE[name][0](tmp_store)
    assert damage_left(tmp_store)
    done = repair(tmp_store)
    assert done.left == []
    assert done.actions
    assert damage_left(tmp_store) == []
    left = serials(tmp_store)
    with dr.open(tmp_store) as store:
        assert len(left) + sum(entry.steps for entry in store.quarantine) == len(before)
    assert repair(tmp_store).actions == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DAMAGE.keys() - BACKUP - PRIORITIES))
def test_after_a_repair_verify_finds_nothing_and_nothing_was_deleted(store_path, name):
    DAMAGE[name][0](store_path)
    before = digest(store_path)
    foreseen = repair(store_path, dry_run=True)
    assert digest(store_path) == before
    assert foreseen.actions
    chunks = {data for data in contents(store_path) if len(data) > 8}
    if name == "a checksum of a block":
        chunks.remove((store_path / SEGMENT / "durable/blocks").read_bytes())

    done = repair(store_path)

    assert done.left == []
    assert [action.where for action in done.actions] == [action.where for action in foreseen.actions]
    assert damage_left(store_path) == []
    if name not in ("no segments", "segments elsewhere"):
        assert len(serials(store_path)) >= 18
    with dr.open(store_path, "a") as store, store.writer() as writer:
        obs = {"image": np.zeros((2, 3), np.uint8), "on": True}
        writer.append(obs, 0, 1.0, True, serial=99, next_obs=obs)
    assert 99 in serials(store_path)
    # Documents and counters that were written anew are the only bytes that are gone.
    lost = {data for data in chunks - contents(store_path) if not data.startswith(b"{")}
    assert [len(data) for data in lost if len(data) not in (255, 256)] == []
    zarr.open_group(store_path, mode="r")
    assert repair(store_path).actions == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKUP))
def test_what_cannot_be_mended_is_left_as_it_is_and_told(store_path, name):
    DAMAGE[name][0](store_path)
    before = digest(store_path.parent)
    done = repair(store_path)
    assert done.left
    assert done.actions == []
    assert digest(store_path.parent) == before


def test_a_whole_store_needs_no_repair(store_path):
    before = digest(store_path)
    done = repair(store_path)
    assert (done.actions, done.left) == ([], [])
    assert digest(store_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["obs/zarr.json", "obs/image/zarr.json", "done/zarr.json", "observed/zarr.json", "durable/c.0"]
)
def test_small_files_of_a_sealed_segment_are_written_anew(store_path, file):
    path = store_path / SEGMENT / file
    good = path.read_bytes()
    for damage in (lambda: path.unlink(), lambda: path.write_bytes(b"{}"), lambda: replace_bytes(path, 2, b"\x01")):
        damage()
        done = repair(store_path)
        assert [(action.what, action.where) for action in done.actions] == [("restored", f"{SEGMENT}/{file}")]
        assert path.read_bytes() == good
    assert serials(store_path) == list(range(30))


def test_committed_is_worked_out_from_durable_and_documents_after_it(store_path):
    segment = store_path / SEGMENT
    good = digest(segment)
    (segment / "committed/c.0").write_bytes(bytes(8))
    (segment / "reward/zarr.json").write_bytes(b"{}")
    assert repair(store_path).left == []
    assert digest(segment) == good


def test_a_segment_of_which_nothing_is_left_is_set_aside_and_can_be_moved_back(store_path, tmp_path):
    shutil.move(store_path / SEGMENT / "reward", tmp_path / "reward")
    (action,) = repair(store_path).actions
    assert (action.what, action.where, action.steps) == ("quarantined", SEGMENT, 12)
    assert "reward" in action.detail
    assert serials(store_path) == [*range(12), *range(24, 30)]
    aside = store_path / "counters/quarantine" / SEGMENT
    shutil.move(tmp_path / "reward", aside / "reward")
    aside.rename(store_path / SEGMENT)
    assert verify(store_path, deep=True) == []
    assert serials(store_path) == list(range(30))


def test_what_is_in_quarantine_already_is_not_replaced(store_path):
    for text in ("one", "two", "three"):
        (store_path / "notes.txt").write_text(text)
        repair(store_path)
    kept = sorted((store_path / "counters/quarantine").glob("notes.txt*"))
    texts = [file.read_text() for file in kept if not file.name.endswith(".json")]
    assert texts == ["one", "two", "three"]


def test_a_dead_writers_segment_is_sealed_and_readers_learn_of_it(tmp_store, monkeypatch):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096).close()
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_store), "0"], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        while int(child.stdout.readline()) < 20:
            pass
        child.send_signal(signal.SIGKILL)
    assert verify(tmp_store) == []
    (would,) = repair(tmp_store, dry_run=True).actions
    # Readers learn of it from the counter alone.
    monkeypatch.setattr("diskreplay.reading.follower.CHECK_EVERY_S", 1e9)
    with dr.open(tmp_store) as reader:
        (did,) = repair(tmp_store).actions
        assert not reader.snapshot.sealed.any()
        reader.refresh()
        assert reader.snapshot.sealed.all()
    assert (would.what, did.what) == ("sealed", "sealed")
    assert did.where == would.where == "segments/00000000"
    assert len(serials(tmp_store)) >= 20
    with dr.open(tmp_store) as store:
        assert [segment["state"] for segment in store.info()["segments"]] == ["sealed"]


def test_a_dead_writers_segment_that_is_damaged_is_set_aside_and_others_are_sealed(tmp_store, tmp_path):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096).close()
    with dr.open(tmp_store, "a") as store, store.writer() as one, store.writer() as other:
        append_numbered(one, range(3), end="open")
        append_numbered(other, range(3, 5), end="open")
        one.flush()
        other.flush()
        shutil.copytree(tmp_store, tmp_path / "dead")
    os.truncate(tmp_path / "dead/segments/00000000/action/c.0.0", 3)
    done = repair(tmp_path / "dead")
    assert [(action.what, action.where) for action in done.actions] == [
        ("quarantined", "segments/00000000"),
        ("sealed", "segments/00000001"),
    ]
    assert serials(tmp_path / "dead") == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda segment: os.truncate(segment / "extra/zarr.json", 0), "sealed"),
        (lambda segment: os.truncate(segment / "action/c.0.0", 0), "quarantined"),
        (lambda segment: (segment / "extra/zarr.json").unlink(), "sealed"),
        (lambda segment: os.truncate(segment / "durable/c.0", 0), "sealed"),
        (lambda segment: os.truncate(segment / "zarr.json", 0), "quarantined"),
        (lambda segment: (segment / "zarr.json").unlink(), "quarantined"),
        (lambda segment: (segment / "zarr.json").write_bytes(bytes(600)), "quarantined"),
        (lambda segment: shutil.rmtree(segment / "extra"), "quarantined"),
    ],
)
def test_a_segment_that_a_power_cut_left_without_a_safe_row_is_kept_but_not_shown(tmp_store, tmp_path, damage, what):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer(durability=3600.0) as writer:
        append_numbered(writer, range(3), end="open")
        shutil.copytree(tmp_store, tmp_path / "after")
    damage(tmp_path / "after/segments/00000000")
    kept = contents(tmp_path / "after/segments/00000000/obs")
    assert serials(tmp_path / "after") == []
    assert {problem.kind for problem in verify(tmp_path / "after", deep=True)} <= {"unproven"}
    (planned,) = repair(tmp_path / "after", dry_run=True).actions
    (action,) = repair(tmp_path / "after").actions
    assert (planned.what, planned.where) == (action.what, action.where) == (what, "segments/00000000")
    left = {problem.kind for problem in verify(tmp_path / "after", deep=True)}
    assert left <= ({"unproven"} if what == "sealed" else {"quarantine"})
    assert serials(tmp_path / "after") == []
    rows = {data[:36] for data in kept if len(data) > 1000}  # without the observation behind the last of them
    assert rows <= {data[:36] for data in contents(tmp_path / "after")}


def test_a_segment_to_which_nothing_was_written_is_removed_after_a_reboot(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        shutil.copytree(tmp_store, tmp_path / "after")
    segment = tmp_path / "after/segments/00000000"
    for chunk in segment.rglob("c.*"):
        chunk.write_bytes(bytes(chunk.stat().st_size))
    (action,) = repair(tmp_path / "after").actions
    assert (action.what, action.where) == ("removed", "segments/00000000")
    assert not segment.exists()


def test_a_living_writers_segment_is_left_alone(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        assert repair(tmp_store).actions == []
        chunk = tmp_store / "segments/00000000/reward/zarr.json"
        good = chunk.read_bytes()
        chunk.write_bytes(b"{}")
        done = repair(tmp_store)
        assert done.actions == []
        assert [problem.where for problem in done.left] == ["segments/00000000/reward/zarr.json"]
        chunk.write_bytes(good)
        append_numbered(writer, range(3, 5))
        assert is_locked(tmp_store / "segments/00000000/committed/lock")
    assert serials(tmp_store) == list(range(5))


def came_from_another_machine(path):
    """Have the first segment say that another machine wrote it."""
    other = {"machine_id": "another machine", "boot_id": "its boot"}
    reseal(path / "segments/00000000/zarr.json", lambda attributes: attributes.update(other))


def test_segments_of_another_machine_are_sealed_only_when_asked_for(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(3))
        writer.flush()
        shutil.copytree(tmp_store, tmp_path / "copy")
    came_from_another_machine(tmp_path / "copy")
    with network_disk():
        assert repair(tmp_path / "copy").actions == []
        (action,) = repair(tmp_path / "copy", foreign=True).actions
    assert action.what == "sealed"
    assert serials(tmp_path / "copy") == [0, 1, 2]


def test_on_a_local_disk_a_free_lock_says_that_a_writer_is_gone_whatever_machine_it_was_on(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer()
        append_numbered(writer, range(3))
        writer.flush()
        came_from_another_machine(tmp_store)
        shutil.copytree(tmp_store, tmp_store.with_name("copy"))
        assert repair(tmp_store).actions == []  # it lives
    dr.open(tmp_store.with_name("copy"), "a").close()
    with dr.open(tmp_store.with_name("copy")) as copy:
        assert [segment["state"] for segment in copy.info()["segments"]] == ["sealed"]
    assert serials(tmp_store.with_name("copy")) == [0, 1, 2]


def test_what_processes_left_half_done_is_removed(store_path):
    (store_path / "counters/old-00000007/obs").mkdir(parents=True)
    (store_path / "counters/new-00000008").mkdir()
    wheres = ["counters/new-00000008", "counters/old-00000007"]
    assert [action.where for action in repair(store_path, dry_run=True).actions] == wheres
    done = repair(store_path).actions
    assert [(action.what, action.where) for action in done] == [("removed", w) for w in wheres]
    assert [action.detail for action in done] == ["was left by a process that died", "was being deleted"]
    assert [action.where for action in repair(store_path).actions] == []


# --- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("word", range(32))
def test_a_flipped_bit_of_a_counter_is_put_right(store_path, word):
    set_words(store_path, evicted=24, horizon=2)
    whole, good = np.fromfile(store_path / "counters/c.0", "<i8"), words(store_path)
    for bit in (0, 1, 4, 20, 40, 63):
        data = whole.copy()
        data[word] ^= np.int64(-(1 << 63)) if bit == 63 else np.int64(1 << bit)
        data.tofile(store_path / "counters/c.0")
        repair(store_path)
        mended = words(store_path)
        # Of what only limiters use a small error cannot be told from a writer's death: the larger count is taken.
        # A horizon may be lower than it was, which keeps more. Numbers that are reserved in vain are only unused, and
        # a change or a sealed segment too many has readers look once more.
        loose = {"horizon", "evicted", "reserved", "changes", "boot", "sealed"}
        assert {name: mended[name] for name in mended.keys() - loose} == {
            name: good[name] for name in good.keys() - loose
        }
        more = {name: mended[name] - good[name] for name in loose}
        assert more["horizon"] <= 0 <= more["evicted"] <= 1 << 35
        assert 0 <= more["reserved"] <= 64
        assert 0 <= more["changes"] <= 1
        assert more["sealed"] <= 1
        assert mended["boot"] in (good["boot"], 0)
        assert serials(store_path) == list(range(30))


def test_a_store_whose_counters_are_gone_gets_new_ones(store_path):
    shutil.rmtree(store_path / "counters")
    assert repair(store_path).left == []
    assert [*words(store_path).values()][:5] == [3, 0, 0, 0, 0]
    assert serials(store_path) == list(range(30))


def test_numbers_of_segments_are_never_used_again(store_path):
    shutil.rmtree(store_path / "segments/00000002")
    replace_bytes(store_path / "counters/c.0", 64, b"\0")
    repair(store_path)
    assert words(store_path)["next_segment"] == 3
