"""What leaves of packs, by hand and by limits."""

import os
import shutil
from pathlib import Path

import pytest

import diskreplay as dr
from tests.retention.test_limits_of_size_and_age import ROOT_BYTES, WIDE, append_wide, visible
from tests.testing import packed
from tests.testing.commands import repair
from tests.testing.limited import count_anew
from tests.testing.on_disk import disk_bytes, flip, set_words, words
from tests.testing.support import serial_schema

MOST_BYTES = 4 << 20


@pytest.fixture
def store(tmp_store):
    packed.write_packed(tmp_store)
    with dr.open(tmp_store, "a") as store:
        yield store


def inserted(store):
    return count_anew(store.path)


def test_episodes_of_a_pack_are_evicted_here_and_elsewhere(store):
    steps, ever = len(store), inserted(store).ever
    with dr.open(store.path) as reader:
        assert store.evict(lambda episode: 30 in episode["serial"] or 104 in episode["serial"]) > 5
        reader.refresh()
        assert len(reader) == len(store) < steps
        assert not {30, 104} & {serial for episode in reader.episodes for serial in episode["serial"].tolist()}
    assert store.evict(lambda episode: 30 in episode["serial"]) == 0
    assert inserted(store) == (ever, len(store))
    assert store.verify() == []


def test_an_episode_is_evicted_while_its_segment_is_beside_the_pack(tmp_store, monkeypatch):
    packed.keep_members(monkeypatch)
    packed.write_packed(tmp_store, evict=False)
    with dr.open(tmp_store, "a") as store:
        steps = len(store)
        assert store.evict(lambda episode: 30 in episode["serial"]) == 5
        assert len(store) == steps - 5
        assert inserted(store).held == steps - 5


def test_a_pack_leaves_when_all_of_it_is_evicted(store):
    steps, ever = len(store), inserted(store).ever
    evicted = store.info()["steps_evicted"]
    assert store.evict(lambda episode: True) == steps
    assert os.listdir(store.path / "segments") == ["zarr.json"]
    info = store.info()
    assert (info["steps"], info["steps_evicted"], info["segments"]) == (0, steps + evicted, [])
    assert inserted(store) == (ever, 0)
    with store.writer() as writer:
        packed.append(writer, 4)
    store.refresh()
    assert (len(store), store.num_episodes) == (4, 1)


def test_what_was_lost_to_damage_is_not_evicted_too(store):
    number = packed.pack_numbers(store.path)[0]
    file = store.path / f"segments/{number:08}/extra/wide/c.0.0.0"
    store.refresh()
    before = packed.shown(store.path)

    def damage(episode):
        if not repaired:
            flip(file, 300 * 100)
            repaired.append(repair(store.path))
        return True

    repaired = []
    steps = len(store)
    evicted = store.evict(damage)
    lost = repaired[0].steps_lost
    assert lost > 0
    assert evicted == steps - lost
    assert len(before) > 5
    assert store.info()["steps_lost"] in (0, lost)
    assert len(store) == 0


def test_the_writers_of_a_pack_are_those_of_its_segments(tmp_store):
    packed.write_segments(tmp_store)
    with dr.open(tmp_store, "a") as store:
        store.evict(lambda episode: 7 in episode["serial"])
        writers = store.info()["writers"]
        store.compact()
        info = store.info()
    assert [segment["merged"] for segment in info["segments"]] == [sum(one["segments"] for one in writers)]
    assert info["writers"] == writers


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_pack_whose_tables_are_gone_keeps_nobody_from_writing(tmp_store):
    packed.write_packed(tmp_store, evict=False, capacity=3000)
    number = packed.pack_numbers(tmp_store)[0]
    for name in ("members", "durable/tables"):
        path = tmp_store / f"segments/{number:08}" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.warns(dr.DamagedSegmentWarning):
        store = dr.open(tmp_store, "a")
    with store:
        for _ in range(3):
            with store.writer() as writer:
                packed.append(writer, 12)
        store.refresh()
        assert len(store) == 36
    assert (tmp_store / f"segments/{number:08}").exists()


def test_segments_of_a_pack_may_be_below_the_first_that_may_exist(store):
    """That is a hint: it may be above them where a pack came back."""
    episodes = packed.shown(store.path)
    number = packed.pack_numbers(store.path)[0]
    store.close()
    set_words(store.path, first_live=number)
    assert packed.shown(store.path) == episodes
    assert store.verify() == []
    with dr.open(store.path, "a") as again:
        assert len(again) == sum(len(values["reward"]) // 4 for values in episodes.values())
    assert words(store.path)["first_live"] == 0


def test_a_pack_that_is_being_made_is_not_removed_by_who_has_just_placed_one(tmp_store):
    with dr.create(tmp_store, packed.serial_schema(), compaction="manual") as one, dr.open(tmp_store, "a") as other:
        placing = one._retention.making_pack(0)
        os.rename(placing.__enter__(), tmp_store / "counters/next-placed")  # as it is placed
        making = other._retention.making_pack(0)
        building = making.__enter__()
        placing.__exit__(None, None, None)
        assert os.listdir(building) == ["committed"]
        assert os.listdir(tmp_store / "counters/next-placed") == ["committed"]
        making.__exit__(None, None, None)
        assert not os.path.exists(building)


def write_wide(store, episodes):
    with store.writer() as writer:
        for number in range(episodes):
            append_wide(writer, range(8 * number, 8 * number + 8))


@pytest.mark.slow(turns=2)
def test_the_space_of_a_merge_counts_in_the_capacity_in_bytes(tmp_store, monkeypatch):
    peaks = []

    rename = os.rename

    def note_peak(source, target, **kwargs):
        if os.fspath(source).endswith("counters/next-pack"):
            peaks.append(disk_bytes(tmp_store))  # when the pack is complete, and what is in it still there
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", note_peak)
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=MOST_BYTES, segment_steps=8, compaction="manual"
    ) as store:
        write_wide(store, 200)
        before = visible(store)
        assert store.info()["steps_evicted"] > 0
        assert disk_bytes(tmp_store / "segments") > MOST_BYTES * 15 // 16
        assert store.compact()["segments"] > 10
        assert len(peaks) > 1
        assert max(peaks) <= MOST_BYTES + ROOT_BYTES
        shown = visible(store)
        assert before[0] < shown[0], "without the oldest, nothing would have had to leave"
        assert shown == before[-len(shown) :]
        assert len(shown) > len(before) * 3 // 4
        assert store.verify(deep=True) == []


@pytest.mark.slow(turns=2)
def test_a_pack_that_another_process_makes_counts_as_far_as_it_is_made(tmp_store):
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=MOST_BYTES, segment_steps=8, compaction="manual"
    ) as store:
        write_wide(store, 200)
        with dr.open(tmp_store, "a") as other:
            making = other._retention.making_pack(0)
            Path(making.__enter__(), "c.0.0").write_bytes(bytes(MOST_BYTES // 2))
            write_wide(store, 2)
            assert disk_bytes(tmp_store) <= MOST_BYTES + ROOT_BYTES
            assert disk_bytes(tmp_store / "segments") > MOST_BYTES // 4
            making.__exit__(None, None, None)
