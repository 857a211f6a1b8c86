"""What happens between two steps of a repair, or of a description: each test steps in at a function of the package."""

import os
import shutil

import pytest

import diskreplay as dr
from tests.integrity.repair.test_quarantine import SEGMENT, original, set_aside, store_path
from tests.testing import inner, packed
from tests.testing.commands import Refused, repair
from tests.testing.limited import LimiterCounts, count_anew
from tests.testing.on_disk import flip, locked
from tests.testing.support import append_numbered, serial_schema

assert original, store_path  # fixtures
pytestmark = pytest.mark.usefixtures("no_patience")


def test_a_state_that_was_just_being_replaced_when_it_was_verified_is_left_alone(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema()) as store:
        store.save_sampler_state("run", {"step": 7})
    stale = dr.Problem("metadata", "samplers/run/1/zarr.json", "is of another store")
    real = inner.real(inner.REPAIR_VERIFY)
    monkeypatch.setattr(
        *inner.REPAIR_VERIFY, lambda *args, deep=False, **kwargs: real(*args, deep=deep, **kwargs) + [stale] * deep
    )
    done = repair(tmp_store)
    assert done.actions == done.left == done.quarantine == []
    with dr.open(tmp_store) as store:
        assert store.load_sampler_state("run") == {"step": 7}


@pytest.mark.parametrize("look", inner.LOOKS_AT_DEAD.values(), ids=inner.LOOKS_AT_DEAD)
def test_a_segment_that_is_evicted_while_dead_ones_are_looked_for_is_not_told_of(
    tmp_store, tmp_path, monkeypatch, look
):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096).close()
    with dr.open(tmp_store, "a") as store, store.writer() as one, store.writer() as other:
        append_numbered(one, range(3), end="open")
        append_numbered(other, range(3, 5), end="open")
        other.flush()
        shutil.copytree(tmp_store, tmp_path / "dead")
    real = inner.real(look)

    def after_an_eviction(*args):
        shutil.rmtree(tmp_path / "dead/segments/00000000", ignore_errors=True)
        return real(*args)

    monkeypatch.setattr(*look, after_an_eviction)
    done = repair(tmp_path / "dead")
    assert [(action.what, action.where) for action in done.actions] == [("sealed", "segments/00000001")]
    assert done.left == done.quarantine == []


def test_a_repair_waits_for_the_lock_of_the_store(store_path, monkeypatch):
    held_lock = inner.real(inner.REPAIR_LOCK)
    monkeypatch.setattr(*inner.REPAIR_LOCK, lambda path: held_lock(path, 0.01))
    with locked(store_path / "counters/lock"), pytest.raises(Refused, match="^another process has held "):
        repair(store_path)


def test_a_segment_that_was_put_into_a_pack_since_it_was_looked_at_is_left_alone(tmp_store, monkeypatch):
    packed.write_segments(tmp_store)
    (tmp_store / "segments/00000000/reward/zarr.json").write_bytes(b"{}")
    episodes, verify = packed.shown(tmp_store), inner.real(inner.REPAIR_VERIFY)
    packed.keep_members(monkeypatch)
    merged = []

    def look(path, **kwargs):
        found = verify(path, **kwargs)
        if not merged:
            with dr.open(tmp_store, "a") as store:
                merged.append(store.compact()["segments"])
        return found

    monkeypatch.setattr(*inner.REPAIR_VERIFY, look)
    done = repair(tmp_store)
    assert merged[0] > 5
    assert (done.actions, done.left) == ([], [])
    assert packed.shown(tmp_store) == episodes


def test_a_segment_that_was_sealed_with_bad_flags_is_set_aside_whole(store_path, monkeypatch):
    monkeypatch.setattr(
        "diskreplay.integrity.repair.segment_repair.verify_folder", lambda *args: [dr.Problem("flags", "done", "wrong")]
    )
    flip(store_path / SEGMENT / "reward/c.0.0")
    (action,) = repair(store_path).actions
    assert (action.what, action.steps) == ("quarantined", 10)
    assert sorted(os.listdir(store_path / "counters")) == ["c.0", "lock", "quarantine", "zarr.json"]


def test_a_segment_that_leaves_while_a_store_is_described_is_not_counted(store_path, monkeypatch):
    with dr.open(store_path) as store:
        real = inner.real(inner.SUM_LANE)

        def leaving(snapshot, group, start, returns):
            if int(snapshot.episodes.first[group[0]]) >> 35 == 1 and (store_path / SEGMENT).exists():
                set_aside(store_path)
            return real(snapshot, group, start, returns)

        monkeypatch.setattr(*inner.SUM_LANE, leaving)
        info = store.info()
        assert (info["steps"], info["episodes"]["total"]) == (20, 4)
        assert store.episode_table()["segment"].tolist() == [0, 0, 2, 2]
    assert issubclass(dr.SegmentGone, (dr.ReplayError, LookupError))


def test_limiters_count_from_nothing_once_a_repair(store_path, monkeypatch):
    begun = []
    begin = inner.real(inner.BEGIN_COUNT)
    monkeypatch.setattr(*inner.BEGIN_COUNT, lambda counter: (begun.append(1), begin(counter))[1])
    set_aside(store_path)
    following = LimiterCounts(store_path)
    with dr.open(store_path, "a") as store:
        for serial in (0, 2):
            following.read()
            store.evict(lambda episode, serial=serial: episode["serial"][0] == serial)
        following.read()
        assert len(begun) == 1
        assert following.read() == count_anew(store_path)
    begun.clear()
    repair(store_path, restore=1)
    following.read()
    following.read()
    assert len(begun) == 1
