"""Every step that was ever inserted is in one class, and all who count steps tell the same numbers."""

import dataclasses
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash.power import another_boot
from tests.testing import commands
from tests.testing.on_disk import LANE_COUNTERS, flip
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import whole_or_part

pytestmark = pytest.mark.usefixtures("no_patience")

SEGMENT = "segments/00000001"
CLASSES = ("steps", "steps_hidden", "steps_evicted", "steps_discarded", "steps_lost")


def fill(path: Path, episodes: int, length: int = 5, **kwargs: Any) -> None:
    """Make a store of some episodes, numbered from 0, in segments of 30 steps."""
    options = {"chunk_bytes": 64, "segment_steps": 36, "compaction": "manual", **kwargs}
    with dr.create(path, serial_schema(), **options) as store:
        append(store, 0, episodes, length)


def append(store: dr.Store, first: int, stop: int, length: int = 5) -> None:
    with store.writer() as writer:
        for number in range(first, stop):
            append_numbered(writer, range(number * length, (number + 1) * length))


def account(path: Path) -> dict[str, int]:
    """Return the classes of a store, after checking that they add up."""
    with dr.open(path) as store:
        check_account(store)
        info = store.info(total_reward=False)
    found = {key: info[key] for key in (*CLASSES, "steps_inserted")} | {"quarantined": info["quarantine"]["steps"]}
    return {key.removeprefix("steps_"): steps for key, steps in found.items() if steps}


def serial_of(episode: dr.Episode) -> int:
    return int(episode["serial"][0])


def test_discarded_steps_are_a_class_of_their_own_until_their_segment_is_deleted(tmp_store: Path) -> None:
    fill(tmp_store, 20, capacity=60)
    with dr.open(tmp_store, "a") as store:
        with store.writer() as writer:
            append_numbered(writer, range(100, 107), end="open")
            writer.discard_episode()
        assert account(tmp_store)["discarded"] == 7
        with dr.open(tmp_store) as reader:
            check_account(reader, 107)
        append(store, 30, 60)
    assert account(tmp_store).get("discarded", 0) == 0
    with dr.open(tmp_store) as reader:
        check_account(reader, 257)


def test_a_part_that_was_evicted_and_then_discarded_counts_as_discarded(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps=10, chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(200, 202))
        append_numbered(writer, range(45), end="open")
        store._sealer.drain()
        store.refresh()
        first = len(store.episodes[1])
        assert store.evict(lambda episode: serial_of(episode) == 0) == first
        assert account(tmp_store)["evicted"] == first
        writer.discard_episode()
        append_numbered(writer, range(100, 103))
        for reader in (store, dr.open(tmp_store)):
            check_account(reader, 50)
            info = reader.info()
            assert (info["steps"], info["steps_discarded"], info["steps_evicted"]) == (5, 45, 0)
        assert sum(segment["steps_evicted"] for segment in info["segments"]) == 0


# --- the same numbers everywhere --------------------------------------------------------------------------------------


def test_hidden_evicted_and_visible_steps_add_up_wherever_they_are_told(tmp_store: Path, tmp_path: Path) -> None:
    """1,705 steps go into a capacity of 500."""
    fill(tmp_store, 341, capacity=500, segment_steps=400)
    with dr.open(tmp_store, "a") as store:
        assert store.evict(lambda episode: serial_of(episode) == 1500) == 5
        made = dataclasses.asdict(store.backup(tmp_path / "copy"))
    with dr.open(tmp_store) as store:
        check_account(store, 1705)
        info = store.info()
    assert info["steps"] == 495
    assert info["steps_hidden"] > 100
    assert info["steps_evicted"] > 500
    assert sum(info[key] for key in CLASSES) == info["steps_inserted"] == 1705
    (look,) = commands.run("watch", tmp_store, "--once", "--interval", 0.1)
    assert {key: look[key] for key in CLASSES} == {key: made[key] for key in CLASSES} == {k: info[k] for k in CLASSES}
    assert look["inserted"] == made["steps_inserted"] == 1705
    assert look["steps_in_quarantine"] == made["steps_in_quarantine"] == 0
    assert account(tmp_path / "copy") == account(tmp_store)
    told = commands.run("inspect", tmp_store)
    assert {key: told[key] for key in CLASSES} == {key: info[key] for key in CLASSES}
    words = " ".join(commands.run_lines("inspect", tmp_store).split())
    for key, what in (("steps_hidden", "hidden"), ("steps_evicted", "evicted"), ("steps_inserted", "inserted")):
        assert f"{info[key]:,} {what}" in words


def test_the_account_is_exact_while_steps_come_and_leave(tmp_store: Path) -> None:
    fill(tmp_store, 1, capacity=200, segment_steps=40)
    stop = threading.Event()

    def write() -> None:
        with dr.open(tmp_store, "a") as store, store.writer() as writer:
            number = 1
            while not stop.is_set():
                append_numbered(writer, range(number * 5, number * 5 + 5))
                number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with dr.open(tmp_store) as store:
            for _ in range(whole_or_part(100, 25)):
                check_account(store)
        looks = commands.run("watch", tmp_store, "--count", 15, "--interval", 0.1)
    finally:
        stop.set()
        thread.join()
    for look in looks:
        assert look["inserted"] == look["steps"] + look["steps_hidden"] + look["steps_evicted"]
    seen = [look["inserted"] for look in looks]
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


# --- one class a step -------------------------------------------------------------------------------------------------


def test_a_step_that_is_hidden_and_evicted_by_hand_is_evicted_and_once(tmp_store: Path) -> None:
    fill(tmp_store, 18, capacity=48)
    before = account(tmp_store)
    assert before == {"steps": 48, "hidden": 12, "evicted": 30, "inserted": 90}
    with dr.open(tmp_store, "a") as store:
        # Two of its five steps are hidden.
        store.evict(lambda episode: serial_of(episode) in (40, 42))
    assert account(tmp_store) == {"steps": 45, "hidden": 10, "evicted": 35, "inserted": 90}
    with dr.open(tmp_store, "a") as store:
        append(store, 18, 36)
    assert not (tmp_store / SEGMENT).exists()
    assert account(tmp_store) == {"steps": 48, "hidden": 12, "evicted": 120, "inserted": 180}


def test_steps_that_are_hidden_for_their_age_or_by_a_smaller_limit_are_hidden(tmp_store: Path) -> None:
    fill(tmp_store, 6)
    with dr.open(tmp_store, "a") as store:
        store.resize(capacity=12)
        assert account(tmp_store) == {"steps": 12, "hidden": 18, "inserted": 30}
        store.resize(capacity=None, max_age_s=1e-6)
        assert account(tmp_store) == {"evicted": 30, "inserted": 30}
        with store.writer() as writer:
            append_numbered(writer, range(30, 35))
            writer.flush()
            assert account(tmp_store) == {"hidden": 5, "evicted": 30, "inserted": 35}


def test_lost_steps_are_lost_until_their_segment_is_deleted(tmp_store: Path) -> None:
    fill(tmp_store, 18)
    with dr.open(tmp_store, "a") as store:
        store.evict(lambda episode: serial_of(episode) == 35)
    flip(tmp_store / SEGMENT / "reward/c.0.1")
    with dr.open(tmp_store, "a") as store:
        store.repair()
    # What is whole was taken from the one in quarantine; what is lost counts once.
    assert account(tmp_store) == {"steps": 80, "evicted": 5, "lost": 5, "inserted": 90}
    with dr.open(tmp_store, "a") as store:
        store.resize(capacity=10)
        append(store, 18, 24)
    assert account(tmp_store) == {"steps": 10, "hidden": 20, "evicted": 90, "inserted": 120}


def test_the_steps_of_a_segment_that_cannot_be_read_are_lost_and_then_in_quarantine(tmp_store: Path) -> None:
    fill(tmp_store, 18)
    for name in LANE_COUNTERS:
        flip(tmp_store / SEGMENT / name / "c.0", at=7)
    with pytest.warns(dr.DamagedSegmentWarning):
        assert account(tmp_store) == {"steps": 60, "lost": 30, "inserted": 90} or account(tmp_store) == {
            "steps": 60,
            "inserted": 60,
        }
    with dr.open(tmp_store, "a") as store:
        store.repair()
    assert account(tmp_store) == {"steps": 60, "quarantined": 30, "inserted": 90}
    assert [problem.kind for problem in commands.verify(tmp_store)] == ["quarantine"]


def test_steps_that_no_mark_proves_are_inserted_when_salvage_takes_them(tmp_store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    fill(tmp_store, 6)
    with dr.open(tmp_store, "a") as store, store.writer(durability="none") as writer:
        append_numbered(writer, range(30, 35))
        writer.flush()
        append_numbered(writer, range(35, 40))
        shutil.copytree(tmp_store, copy)
        assert account(tmp_store) == {"steps": 40, "inserted": 40}
    assert account(copy) == {"steps": 35, "inserted": 35}
    with another_boot(), dr.open(copy, "a"):
        pass
    with dr.open(copy, "a") as store:
        assert account(copy) == {"steps": 35, "inserted": 35}
        store.repair(salvage=True)
    assert account(copy) == {"steps": 40, "inserted": 40}


def test_the_segments_of_a_pack_count_once(tmp_store: Path) -> None:
    fill(tmp_store, 18)
    with dr.open(tmp_store, "a") as store:
        store.evict(lambda episode: serial_of(episode) == 45)
        assert store.compact()["segments"] > 1
        check_account(store, 90)
        store.resize(capacity=70)
    assert account(tmp_store) == {"steps": 70, "hidden": 15, "evicted": 5, "inserted": 90}
    with dr.open(tmp_store) as store:
        info = store.info()
        assert sum(writer["steps"] for writer in info["writers"]) == info["steps"]
        assert any(segment["merged"] for segment in info["segments"])


def test_an_empty_store_has_no_steps_in_any_class(tmp_store: Path) -> None:
    dr.create(tmp_store, serial_schema()).close()
    assert account(tmp_store) == {}
