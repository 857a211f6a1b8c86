"""`Store.compact`: what is merged, what is left as it is, and what others notice of it: nothing."""

import errno
import itertools
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.injection import failing, needs_room
from tests.testing.limited import LimiterCounts, count_anew
from tests.testing.merged import folders
from tests.testing.on_disk import attributes_of, flip, locked, segment_of
from tests.testing.support import append_numbered, digest, serial_schema

NOTHING = {"segments": 0, "steps": 0, "bytes_before": 0, "bytes_after": 0}


def write(store: dr.Store, episodes: int, first: int = 0, length: int = 5) -> None:
    """Write episodes of so many steps, each in a segment of its own."""
    with store.writer() as writer:
        for number in range(first, first + episodes):
            append_numbered(writer, range(length * number, length * (number + 1)))


@pytest.fixture
def store(tmp_store: Path) -> Any:
    """A store of eight segments of an episode each."""
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", compaction="manual") as store:
        write(store, 8)
        store.refresh()
        yield store


def serials(store: dr.Store) -> list[int]:
    store.refresh()
    return [int(serial) for episode in store.episodes for serial in episode["serial"]]


def test_what_was_done_is_returned(store: dr.Store, tmp_store: Path) -> None:
    calls: list[tuple[int, int]] = []
    done = store.compact(progress=lambda at, total: calls.append((at, total)))
    assert (done["segments"], done["steps"]) == (8, 40)
    assert 0 < done["bytes_after"] < done["bytes_before"] / 4
    assert calls[-1] == (done["bytes_before"], done["bytes_before"])
    assert len(folders(tmp_store)) == 1
    (segment,) = store.info()["segments"]
    assert (segment["merged"], segment["steps"], segment["state"]) == (8, 40, "sealed")
    assert serials(store) == list(range(40))


def test_there_is_nothing_to_merge_in_a_store_that_was(store: dr.Store, tmp_store: Path) -> None:
    store.compact()
    before = digest(tmp_store)
    assert store.compact() == NOTHING
    assert digest(tmp_store) == before


@pytest.mark.parametrize("episodes", [0, 1])
def test_there_is_nothing_to_merge_in_a_store_with_one_segment_or_none(tmp_store: Path, episodes: int) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", compaction="manual") as store:
        write(store, episodes)
        assert store.compact() == NOTHING
        assert len(folders(tmp_store)) == episodes


def test_a_reader_may_not_merge(store: dr.Store, tmp_store: Path) -> None:
    before = digest(tmp_store)
    with dr.open(tmp_store) as reader, pytest.raises(dr.ReadOnlyError, match="compact"):
        reader.compact()
    assert digest(tmp_store) == before


def test_a_closed_store_is_not_merged(store: dr.Store, tmp_store: Path) -> None:
    store.close()
    before = digest(tmp_store)
    with pytest.raises(dr.Closed):
        store.compact()
    assert digest(tmp_store) == before


def test_one_merges_at_a_time(store: dr.Store, tmp_store: Path) -> None:
    building = tmp_store / "counters/next-pack"
    (building / "committed").mkdir(parents=True)
    with (
        locked(building / "committed/lock"),
        pytest.raises(dr.StoreLocked, match="another process merges segments of .*; try again when it is done"),
    ):
        store.compact()
    assert len(folders(tmp_store)) == 8  # and the lock is free, as that of one that died
    assert store.compact()["segments"] == 8
    assert not building.exists()


@pytest.mark.slow
def test_on_a_full_disk_all_stays_as_it_was(store: dr.Store, tmp_store: Path) -> None:
    before, shown = digest(tmp_store), serials(store)
    for number in range(40):
        asked = iter(range(1000))

        def refuse(point: Any, number: int = number, asked: Any = asked) -> bool:
            return needs_room(point, tmp_store / "counters") and next(asked) >= number

        with failing(refuse, errno.ENOSPC):
            try:
                done = store.compact()
            except dr.StorageFull:
                done = NOTHING
        if done["segments"]:
            break
        assert {k: v for k, v in digest(tmp_store).items() if k != "counters/c.0"} == {
            k: v for k, v in before.items() if k != "counters/c.0"
        }
        assert serials(store) == shown
    assert number > 20
    assert serials(store) == shown


def test_a_damaged_segment_is_left_and_the_others_are_merged(store: dr.Store, tmp_store: Path) -> None:
    for number, name in ((2, "action/c.0.0"), (5, "committed/c.0"), (6, "zarr.json")):
        flip(segment_of(tmp_store, number) / name, 3)
    before = digest(tmp_store)
    assert store.compact()["segments"] == 5
    assert folders(tmp_store)[:3] == [2, 5, 6]
    after = digest(tmp_store)
    for number in (2, 5, 6):
        assert {k: v for k, v in before.items() if f"{number:08d}" in k} == {
            k: v for k, v in after.items() if f"{number:08d}" in k
        }


def test_where_only_one_segment_is_whole_nothing_is_merged(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", compaction="manual") as store:
        write(store, 2)
        flip(segment_of(tmp_store) / "action/c.0.0")
        assert store.compact() == NOTHING
        assert folders(tmp_store) == [0, 1]
        assert os.listdir(tmp_store / "counters/")
        assert not (tmp_store / "counters/next-pack").exists()


def test_a_pack_holds_a_sixteenth_of_the_capacity(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), capacity=16 * 20, segment_steps="episode", compaction="manual") as store:
        write(store, 14)
        store.compact()
        assert [attributes_of(segment_of(tmp_store, number))["steps"] for number in folders(tmp_store)] == [
            15,
            15,
            15,
            15,
            10,
        ]
        store.resize(capacity=16 * 9)  # of which the others fill more than half
        write(store, 2, first=14)
        assert store.compact() == NOTHING


def test_segments_of_different_times_are_neighbours_in_packs(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), capacity=16 * 10, segment_steps="episode") as store:
        write(store, 9)
        store.compact()
        bounds = [attributes_of(segment_of(tmp_store, number))["times"] for number in folders(tmp_store)]
        assert all(one[1] < other[0] for one, other in itertools.pairwise(bounds))


def test_episodes_that_were_evicted_leave_the_disk(tmp_store: Path) -> None:
    wide = serial_schema(dr.Field((1024,), "float32"))
    with dr.create(tmp_store, wide, segment_steps=64, chunk_bytes=1 << 16) as store:
        for first in range(0, 256, 64):
            with store.writer() as writer:
                for at in range(first, first + 64, 16):
                    obs = np.arange(at, at + 17)[:, None] * np.ones(1024, np.float32)
                    action = np.arange(at, at + 16)
                    writer.append_episode(obs, action, action * 1.0, terminated=True, serial=action)
        store.refresh()
        store.evict(lambda episode: int(episode["serial"][0]) % 32 == 0)
        left = serials(store)
        done = store.compact()
        assert done["segments"] == 4
        assert done["bytes_after"] < 0.75 * done["bytes_before"]
        assert serials(store) == left == [n for n in range(256) if n % 32 >= 16]
        with dr.open(tmp_store) as fresh:
            assert serials(fresh) == left
            assert (fresh.episodes[0].obs == np.arange(16, 33)[:, None]).all()


@pytest.mark.slow
def test_a_store_stays_within_its_capacity_exactly_while_it_is_merged(tmp_store: Path) -> None:
    counter = None
    with (
        dr.create(tmp_store, serial_schema(), capacity=160, segment_steps=5, compaction="manual") as store,
        dr.open(tmp_store) as reader,
        store.writer() as writer,
    ):
        counter = LimiterCounts(tmp_store)
        for number in range(70):
            append_numbered(writer, range(5 * number, 5 * number + 5))
            if number % 6 == 5:
                store._sealer.drain()
                store.compact()
            assert counter.read().ever == 5 * number + 5
            if number % 3 == 0:
                seen = serials(reader)
                assert seen == list(range(max(0, 5 * number + 5 - 160), 5 * number + 5))
        assert count_anew(tmp_store).ever == 350
        store._sealer.drain()
        assert folders(tmp_store)[0] > 30
        assert sum(attributes_of(segment_of(tmp_store, n)).get("steps") or 0 for n in folders(tmp_store)) < 160 + 40


def test_the_account_of_a_limiter_does_not_jump(store: dr.Store, tmp_store: Path) -> None:
    counter = LimiterCounts(tmp_store)
    store.evict(lambda episode: int(episode["serial"][0]) == 5)
    before = counter.read()
    store.compact()
    assert counter.read() == count_anew(tmp_store) == before == (40, 35)
    write(store, 2, first=8)
    assert counter.read() == count_anew(tmp_store) == (50, 45)
    store.compact()
    assert counter.read() == count_anew(tmp_store) == (50, 45)


@pytest.mark.slow
def test_packs_leave_for_their_bytes(tmp_store: Path) -> None:
    with dr.create(
        tmp_store, serial_schema(dr.Field((256,), "float32")), capacity_bytes=2 << 20, segment_steps=20
    ) as store:
        for number in range(12):
            with store.writer() as writer:
                for t in range(100):
                    obs = np.full(256, t, np.float32)
                    serial = 100 * number + t
                    writer.append(obs, t, 0.0, t % 20 == 19, next_obs=obs + 1, serial=serial)
            store._sealer.drain()
            store.compact()
        used = sum(segment["bytes"] for segment in store.info()["segments"])
        assert used <= 2 << 20
        shown = serials(store)
        assert shown == list(range(1200 - len(shown), 1200))
        assert len(shown) == 400, "a fifth pack leaves: the next one has to have room beside its five segments"


def test_packs_leave_for_their_age(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), max_age_s=3600, segment_steps="episode") as store:
        write(store, 4)
        store.compact()
        assert serials(store) == list(range(20))
        store.resize(max_age_s=1e-3)
        write(store, 1, first=4)
        store._sealer.drain()
        time.sleep(2e-3)  # the segment that was sealed last has to be so old, too
        store._retention.enforce()
        assert serials(store) == []
        assert folders(tmp_store) == []
        assert count_anew(tmp_store).ever == 25
