"""A store of which something was lost: who counts what, who sees what, and what a repair does beside damaged blocks."""

import errno
import os
import shutil

import numpy as np
import pytest

import diskreplay as dr
from tests.testing import commands
from tests.testing.commands import repair
from tests.testing.limited import LimiterCounts, count_anew
from tests.testing.on_disk import attributes_of, flip, reseal
from tests.testing.support import append_numbered, digest, serial_schema, visible_serials

pytestmark = pytest.mark.usefixtures("no_patience", "tables_of_few_rows")

SEGMENT = "segments/00000001"


def verify(path, **kwargs):
    """What is wrong with a store, but for what repair has set aside."""
    return [problem for problem in commands.verify(path, **kwargs) if problem.kind != "quarantine"]


@pytest.fixture
def path(tmp_store):
    """Eighteen episodes of five steps and a last observation, six of them a segment, eight rewards a chunk."""
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=36) as store, store.writer() as writer:
        for first in range(0, 90, 5):
            append_numbered(writer, range(first, first + 5))
    assert rewards(tmp_store, 2) == [f"c.0.{chunk}" for chunk in range(5)]
    return tmp_store


def rewards(path, segment):
    return sorted(file.name for file in (path / f"segments/0000000{segment}/reward").glob("c.*"))


def flags(path):
    return [flag for chunk in range(5) for flag in (path / SEGMENT / f"done/c.0.{chunk}").read_bytes()]


def attributes(path):
    return attributes_of(path / SEGMENT)


def firsts(path):
    with dr.open(path) as store:
        return [int(episode["serial"][0]) for episode in store.episodes]


def without(*lost):
    return [first for first in range(0, 90, 5) if first not in lost]


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_what_is_lost_is_told_with_episodes_steps_and_ids(path):
    flip(path / SEGMENT / "reward/c.0.1")  # rows 8 to 15: of the episodes in rows 6 to 11 and 12 to 17
    (action,) = repair(path).actions
    base = 1 << 35
    assert (action.what, action.where, action.steps) == ("rebuilt", SEGMENT, 10)
    assert action.detail == (
        "reward/c.0.1 does not match its checksum from sealing: rows 8 to 15 of lane 0; "
        f"2 episodes, 10 steps lost, ids {base + 6} to {base + 17}; "
        f"the damaged one is now counters/quarantine/{SEGMENT}"
    )
    assert firsts(path) == without(35, 40)
    assert attributes(path)["lost"] == [[6, 12]]
    assert (attributes(path)["steps"], attributes(path)["steps_lost"]) == (30, 10)
    assert flags(path)[6:19] == [4, *[0] * 10, 2, 4]


def test_what_is_rebuilt_has_every_other_byte_and_its_holes(path):
    before = {name: (path / SEGMENT / name).read_bytes() for name in digest(path / SEGMENT)}
    flip(path / SEGMENT / "obs/c.0.1.0")
    repair(path)
    repeated = 0
    for name, data in before.items():
        if name.startswith(("action/", "reward/", "extra/", "obs/")) and "/c." in name:
            now = (path / SEGMENT / name).read_bytes()
            assert len(now) == len(data)
            assert all(a in (b, 0) for a, b in zip(now, data, strict=True))
        elif name.startswith("time/c."):
            now = np.fromfile(path / SEGMENT / name, "<i8")
            changed = now != np.frombuffer(data, "<i8")
            assert (now[changed] <= np.frombuffer(data, "<i8")[changed]).all()  # the time of a row before
            repeated += np.count_nonzero(changed)
        elif name not in ("zarr.json", "durable/document", "durable/blocks") and not name.startswith(
            ("done/c.", "episodes/")
        ):
            assert (path / SEGMENT / name).read_bytes() == data
    assert repeated > 0
    assert attributes(path)["writer"] == 0
    assert verify(path, deep=True) == []


def test_damage_where_no_row_is_costs_nothing(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=1 << 16) as store, store.writer() as writer:
        for first in range(0, 90, 5):
            append_numbered(writer, range(first, first + 5))
    chunk = tmp_store / "segments/00000000/reward/c.0.0"
    flip(chunk, chunk.stat().st_size - 1)
    done = repair(tmp_store)
    assert [(action.what, action.steps) for action in done.actions] == [("rebuilt", 0)]
    assert ": no counted row; no step is lost" in done.actions[0].detail
    assert firsts(tmp_store) == without()
    assert b"steps_lost" not in (tmp_store / "segments/00000000/zarr.json").read_bytes()
    assert repair(tmp_store).actions == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "short", "long", "link", "folder", "pipe"])
def test_a_chunk_file_that_is_none_costs_the_episodes_in_it(path, tmp_path, how):
    chunk = path / SEGMENT / "reward/c.0.1"
    if how in ("short", "long"):
        os.truncate(chunk, 31 if how == "short" else 4096)
    else:
        chunk.rename(tmp_path / "elsewhere")
    if how == "link":
        chunk.symlink_to(tmp_path / "elsewhere")
    elif how == "folder":
        chunk.mkdir()
    elif how == "pipe":
        os.mkfifo(chunk)
    would, did = repair(path, dry_run=True), repair(path)
    assert did.left == []
    assert [action.what for action in would.actions] == [action.what for action in did.actions]
    assert did.actions[-1].what == "rebuilt"
    assert firsts(path) == (without() if how == "long" else without(35, 40))
    assert verify(path, deep=True) == []


def test_a_block_that_the_disk_refuses_to_read_costs_the_episodes_in_it(path, monkeypatch):
    bad = os.stat(path / SEGMENT / "reward/c.0.1").st_ino
    real = os.pread

    def pread(fd, count, at):
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, count, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        assert [problem.kind for problem in verify(path, deep=True)] == ["unreadable"]
        (action,) = repair(path).actions
    assert (action.what, action.steps) == ("rebuilt", 10)
    assert firsts(path) == without(35, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "lost", "told"),
    [
        (1, [35, 40], "at least 1 episode, 10 steps lost"),  # rows 8 to 15; both reach into them
        (
            3,
            [50, 55],
            "part of an episode, or more, 10 steps lost",
        ),  # rows 24 to 31; the episode before them has its end
        (4, [55], "at least 1 episode, 5 steps lost"),
    ],
)
def test_damaged_flags_cost_what_may_have_reached_into_them(path, chunk, lost, told):
    (path / SEGMENT / f"done/c.0.{chunk}").write_bytes(b"\xff" * 8)  # not one byte, which could be worked out
    (action,) = repair(path).actions
    assert told in action.detail
    assert firsts(path) == without(*lost)
    assert verify(path, deep=True) == []


@pytest.mark.parametrize("damaged", [1, 8])
def test_whether_an_episode_ended_before_damaged_flags_is_told_from_the_checksum_if_it_can_be(tmp_store, damaged):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=40) as store, store.writer() as writer:
        for serial in range(40):
            writer.append(np.zeros(3), 0, 0.0, serial % 8 == 7, serial=serial)
    chunk = tmp_store / "segments/00000000/done/c.0.2"
    assert chunk.read_bytes() == bytes([4, 0, 0, 0, 0, 0, 0, 1])
    chunk.write_bytes(b"\xff" * damaged + chunk.read_bytes()[damaged:])
    assert repair(tmp_store).steps_lost == (8 if damaged == 1 else 16)
    assert firsts(tmp_store) == ([0, 8, 24, 32] if damaged == 1 else [0, 24, 32])
    assert verify(tmp_store, deep=True) == []


def test_a_second_repair_of_a_segment_adds_to_what_is_lost(path):
    for chunk in (0, 4):
        flip(path / SEGMENT / f"reward/c.0.{chunk}")
        repair(path)
    assert attributes(path)["lost"] == [[0, 12], [30, 6]]
    flip(path / SEGMENT / "reward/c.0.1")
    done = repair(path)
    assert done.steps_lost == 5  # rows 6 to 11 were lost already
    assert attributes(path)["lost"] == [[0, 18], [30, 6]]
    assert attributes(path)["steps_lost"] == 20
    assert firsts(path) == without(30, 35, 40, 55)
    assert verify(path, deep=True) == []


def test_what_is_in_the_checksums_of_blocks_alone_is_written_anew(path):
    good = (path / SEGMENT / "durable/blocks").read_bytes()
    flip(path / SEGMENT / "durable/blocks", 5)
    flip(path / SEGMENT / "durable/blocks", 50)
    (action,) = repair(path).actions
    assert (action.what, action.where, action.steps) == ("restored", f"{SEGMENT}/durable/blocks", 0)
    assert (path / SEGMENT / "durable/blocks").read_bytes() == good


def test_a_chunk_costs_its_blocks_though_the_checksums_of_others_are_damaged_too(path):
    blocks = path / SEGMENT / "durable/blocks"
    flip(blocks, 0)  # of an action's chunk, which is whole
    flip(path / SEGMENT / "reward/c.0.1")
    (action,) = repair(path).actions
    assert (action.what, action.steps) == ("rebuilt", 10)
    assert firsts(path) == without(35, 40)
    assert verify(path, deep=True) == []


def test_small_files_and_rows_are_repaired_together(path):
    flip(path / SEGMENT / "committed/c.0")
    (path / SEGMENT / "extra/serial/zarr.json").unlink()
    flip(path / SEGMENT / "zarr.json", 300)
    flip(path / SEGMENT / "reward/c.0.1")
    done = repair(path)
    assert done.left == []
    assert done.actions[-1].what == "rebuilt"
    assert firsts(path) == without(35, 40)
    assert verify(path, deep=True) == []


def test_a_full_disk_changes_nothing(path, monkeypatch):
    flip(path / SEGMENT / "reward/c.0.1")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with dr.open(path, "a") as store:
        before = digest(path)
        monkeypatch.setattr(os, "copy_file_range", full)
        with pytest.raises(dr.StorageFull):
            store.repair()
        assert digest(path) == before


def test_a_disk_that_cannot_copy_by_itself_has_it_copied(path, monkeypatch):
    def other(*_):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "copy_file_range", other)
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    assert firsts(path) == without(35, 40)
    assert verify(path, deep=True) == []


# --- who counts and sees what -----------------------------------------------------------------------------------------


def test_lost_steps_are_counted_apart_from_evicted_ones(path):
    with dr.open(path, "a") as store:
        store.evict(lambda episode: int(episode["serial"][0]) == 0)
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    with dr.open(path) as store:
        info = store.info()
        assert (len(store), info["steps"], info["steps_evicted"], info["steps_lost"]) == (75, 75, 5, 10)
        (segment,) = (segment for segment in info["segments"] if segment["number"] == 1)
        assert (segment["steps"], segment["steps_evicted"], segment["steps_lost"]) == (20, 0, 10)


def test_an_evicted_episode_in_a_damaged_block_stays_an_evicted_one(path):
    with dr.open(path, "a") as store:
        store.evict(lambda episode: int(episode["serial"][0]) == 35)
    flip(path / SEGMENT / "reward/c.0.1")
    assert repair(path).steps_lost == 5
    assert verify(path, deep=True) == []
    flip(path / SEGMENT / "done/c.0.0", 3)
    assert repair(path).steps_lost > 0
    assert verify(path, deep=True) == []
    with dr.open(path) as store:
        info = store.info()
        assert info["steps_evicted"] == 5
        assert info["steps"] == len(store) == 90 - 5 - info["steps_lost"]


def test_an_episode_that_was_lost_since_it_was_chosen_is_not_evicted(tmp_store):
    """One in the same rows of another lane is."""
    with dr.create(tmp_store, serial_schema(), chunk_bytes=8192) as store, store.writer(num_envs=2) as writer:
        for serial in range(600):
            both = np.full(2, serial)
            writer.append(np.zeros((2, 3)), both, both, both % 5 == 4, serial=both)
    with dr.open(tmp_store, "a") as store:
        chosen = [(int(episode.ids[0]), len(episode)) for episode in store.episodes if episode["serial"][0] == 5]
        assert [first % 2 for first, _ in chosen] == [0, 1]
        flip(tmp_store / "segments/00000000/reward/c.0.0")  # the first 512 rows of lane 0
        repair(tmp_store)
        assert store._retention.evict(chosen, lambda: 0) == [chosen[1][0]]
        assert verify(tmp_store, deep=True) == []


def test_lost_steps_are_never_drawn_and_their_ids_are_unknown(path):
    with dr.open(path) as store:
        lost = [int(i) for episode in store.episodes if int(episode["serial"][0]) in (35, 40) for i in episode.ids]
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    with dr.open(path) as store, dr.Sampler(store, dr.Transitions(n_step=2), batch_size=64, seed=0) as sampler:
        assert len(store) == 80
        for _ in range(5):
            assert not set(sampler.sample().index.tolist()) & set(lost)
        with pytest.raises(dr.InvalidIndex):
            sampler.gather(np.array(lost[:1]))
        assert not store.snapshot.holds(np.array(lost)).any()
        stays = [int(i) for episode in store.episodes for i in episode.ids]
        assert store.snapshot.holds(np.array(stays)).all()
        # Windows that run across episodes skip what was lost.
        sampler.view = dr.Sequences(8, stride=1, cross_episodes=True)
        windows = sampler.gather(sampler.ids())
        assert set(windows.serial.flatten().tolist()) == {*range(35), *range(45, 90)}
        steps = windows.serial.diff(dim=1)
        assert set(steps.flatten().tolist()) == {1, 11}
        assert windows.is_first.equal(windows.serial % 5 == 0)


def test_a_limiter_counts_lost_steps_as_inserted_and_not_as_held(path):
    counter = LimiterCounts(path)
    assert counter.read() == (90, 90)
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    assert counter.read() == (90, 80)
    assert count_anew(path) == (90, 80)


def test_a_capacity_counts_what_is_left(tmp_store):
    dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=36, capacity=60).close()
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        for first in range(0, 60, 5):
            append_numbered(writer, range(first, first + 5))
    flip(tmp_store / SEGMENT / "reward/c.0.1")
    with dr.open(tmp_store, "a") as store:
        repair(tmp_store)
        with store.writer() as writer:
            for first in range(60, 90, 5):
                append_numbered(writer, range(first, first + 5))
    with dr.open(tmp_store) as store:
        # 30 and 20 and 30 steps are left: the first segment is needed for the last 10 of 60.
        assert len(store) == 60
        assert store.info()["steps_lost"] == 10
    assert verify(tmp_store, deep=True) == []


def test_what_a_capacity_has_hidden_does_not_come_back(tmp_store):
    dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=36, capacity=47).close()
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        for first in range(0, 90, 5):
            append_numbered(writer, range(first, first + 5))

    def visible():
        with dr.open(tmp_store) as store:
            return visible_serials(store)

    assert visible() == list(range(43, 90))
    flip(tmp_store / "segments/00000002/reward/c.0.1")
    assert repair(tmp_store).steps_lost == 10
    assert visible() == [*range(43, 65), *range(75, 90)]


def test_a_segment_leaves_when_the_rest_of_it_is_evicted(path):
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    counter = LimiterCounts(path)
    with dr.open(path, "a") as store:
        assert store.evict(lambda episode: 30 <= int(episode["serial"][0]) < 60) == 20
    assert not (path / SEGMENT).exists()
    assert counter.read() == (90, 60)


# --- how much may be lost ---------------------------------------------------------------------------------------------


def test_more_than_may_be_lost_is_refused_segment_by_segment(path):
    flip(path / SEGMENT / "reward/c.0.1")
    flip(path / "segments/00000002/reward/c.0.0")
    before = digest(path / SEGMENT)
    with dr.open(path, "a") as store:
        for wrong in ("12", -1, 1.5, True):
            with pytest.raises(ValueError, match="max_lost_steps is a number of steps"):
                store.repair(max_lost_steps=wrong)
    done = repair(path, max_lost_steps=12)
    assert [(a.what, a.where, a.steps) for a in done.actions] == [
        ("rebuilt", SEGMENT, 10),
        ("refused", "segments/00000002", 10),
    ]
    assert done.actions[1].detail.endswith("; 10 steps would be set aside, but only 2 may be")
    assert (done.steps_lost, done.steps_refused) == (10, 10)
    assert digest(path / SEGMENT) != before
    assert verify(path, deep=True) != []
    assert repair(path, max_lost_steps=9).steps_lost == 0
    assert repair(path, max_lost_steps=10).steps_lost == 10
    assert verify(path, deep=True) == []


def test_a_segment_that_would_be_set_aside_whole_is_refused_too(path):
    before = digest(path)
    shutil.rmtree(path / SEGMENT / "reward")
    (action,) = repair(path, max_lost_steps=29).actions
    assert (action.what, action.steps) == ("refused", 30)
    assert len(digest(path)) == len(before) - 6
    (action,) = repair(path, max_lost_steps=30).actions
    assert (action.what, action.steps) == ("quarantined", 30)


def test_a_store_repairs_itself(path):
    flip(path / SEGMENT / "reward/c.0.1")
    with dr.open(path) as store:
        (would,) = store.repair(dry_run=True)
        assert (would.what, would.steps) == ("rebuilt", 10)
        with pytest.raises(dr.ReadOnlyError):
            store.repair()
    with dr.open(path, "a") as store:
        assert [action.what for action in store.repair(max_lost_steps=5)] == ["refused"]
        assert [action.what for action in store.repair(max_lost_steps=10)] == ["rebuilt"]
    assert firsts(path) == without(35, 40)


# --- attributes that cannot be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "steps"),
    [
        (5, 0),
        ([5], 0),
        ([[1, 2, 3]], 0),
        ([[1, True]], 0),
        ([["1", 2]], 0),
        ([[-1, 2]], 0),
        ([[1, 0]], 0),
        ([[1, 1.0]], 0),
        ([[4, 2], [2, 2]], 0),
        ([[2, 3], [3, 3]], 0),
        ([[0, 1 << 35]], 0),
        ([[1 << 35, 1]], 0),
        ([[1, 2]], 3),
        ([[1, 2]], -1),
        ([[1, 2]], "1"),
        ([], 1),
    ],
)
def test_what_cannot_have_been_lost_is_refused(path, lost, steps):
    said = {"lost": lost, "steps_lost": steps, "lost_values": [0] * len(lost) if isinstance(lost, list) else []}
    reseal(path / SEGMENT / "zarr.json", lambda attributes: attributes.update(said))
    with pytest.warns(dr.DamagedSegmentWarning, match="unusable attributes"):
        assert firsts(path) == without(*range(30, 60, 5))


def test_what_was_lost_stays_so_while_a_segment_is_to_be_sealed_anew(path):
    flip(path / SEGMENT / "reward/c.0.1")
    repair(path)
    good, counter = attributes(path), LimiterCounts(path)

    def unseal(attributes):
        attributes["sealed"] = False
        for name in ("steps", "sealed_at", "checksums"):
            del attributes[name]

    reseal(path / SEGMENT / "zarr.json", unseal)
    with dr.open(path) as store:
        assert len(store) == 80
        assert [segment["steps"] for segment in store.info()["segments"]] == [30, 20, 30]
    assert firsts(path) == without(35, 40)
    assert counter.read().ever == 90
    with dr.open(path, "a"):
        pass
    for name in ("lost", "steps_lost", "steps"):
        assert attributes(path)[name] == good[name]
    assert firsts(path) == without(35, 40)
    assert counter.read() == (90, 80)
    assert verify(path, deep=True) == []
