"""Steps that no mark proves are deleted only when a limit has passed them, and never with others that are evicted."""

import json
import shutil
from pathlib import Path

import google_crc32c
import pytest

import diskreplay as dr
from tests.crash.power import another_boot
from tests.testing.support import append_numbered, serial_schema, serials

LIMITS = {"steps": {"capacity": 30}, "bytes": {"capacity_bytes": 200_000}}


def left_by_a_killed_writer(path: Path, limits: dict[str, int], marked: int = 0) -> Path:
    """Return a copy of a store that has deleted steps, with 20 steps of a writer that had not closed, some marked."""
    with dr.create(path, serial_schema(), chunk_bytes=4096, compaction="manual", **limits) as store:
        for first in range(0, 200, 20):
            with store.writer() as writer:
                append_numbered(writer, range(first, first + 20))
        store.refresh()
        assert store.info(total_reward=False)["steps_evicted"] > 0
        with store.writer(durability="none") as writer:
            if marked:
                append_numbered(writer, range(1000, 1000 + marked))
                writer.flush()
            append_numbered(writer, range(1000 + marked, 1020))
            copy = path.with_name("copy")
            shutil.copytree(path, copy)
    return copy


@pytest.mark.parametrize("marked", [0, 5])
@pytest.mark.parametrize("limits", LIMITS)
def test_what_no_mark_proves_is_kept_where_a_limit_has_deleted_before(tmp_store, limits, marked):
    copy = left_by_a_killed_writer(tmp_store, LIMITS[limits], marked)
    for _ in range(2):
        with another_boot(), dr.open(copy, "a"):
            pass
    with dr.open(copy) as store:
        assert store.info(total_reward=False)["steps_unproven"] == 20 - marked
        assert {problem.kind for problem in store.verify(deep=True)} == {"unproven"}
        store_path = store.path
    with dr.open(store_path, "a") as store:
        store.repair(salvage=True)
    assert serials(copy)[-20:] == [*range(1000, 1020)]


def test_what_no_mark_proves_leaves_when_a_capacity_has_newer_steps(tmp_store):
    copy = left_by_a_killed_writer(tmp_store, LIMITS["steps"])
    with another_boot(), dr.open(copy, "a") as store:
        for first in range(2000, 2060, 20):
            with store.writer() as writer:
                append_numbered(writer, range(first, first + 20))
    with dr.open(copy) as store:
        assert store.info(total_reward=False)["steps_unproven"] == 0
        assert store.verify(deep=True) == []


def test_evicting_what_is_proven_keeps_what_is_not(tmp_store):
    copy = left_by_a_killed_writer(tmp_store, LIMITS["steps"], marked=5)
    with another_boot():
        with dr.open(copy, "a"):
            pass
        with dr.open(copy, "a") as store:
            assert store.evict(lambda episode: episode["serial"][0] == 1000) == 5
    with dr.open(copy, "a") as store:
        assert store.info(total_reward=False)["steps_unproven"] == 15
        store.repair(salvage=True)
    assert serials(copy)[-15:] == [*range(1005, 1020)]


def edit(path: Path, **changes: object) -> None:
    """Change attributes of a document, and its checksum with them."""
    document = json.loads(path.read_bytes())
    document["attributes"] |= changes | {"diskreplay_crc32c": "00000000"}
    data = json.dumps(document, separators=(",", ":")).encode()
    document["attributes"]["diskreplay_crc32c"] = f"{google_crc32c.value(data):08x}"
    path.write_bytes(json.dumps(document, separators=(",", ":")).encode())


@pytest.mark.parametrize("changes", [{"unproven_time": 1 << 62}, {"sealed_at": 1e300}])
def test_a_time_at_the_end_of_all_times_leaves_counters_that_can_be_read(tmp_store, changes):
    copy = left_by_a_killed_writer(tmp_store, LIMITS["steps"])
    with another_boot(), dr.open(copy, "a"):
        pass
    edit(max(copy.glob("segments/0*/zarr.json")), **({"unproven_time": 0} | changes))
    with dr.open(copy, "a") as store:
        with store.writer() as writer:
            append_numbered(writer, range(2000, 2020))
        store.resize(capacity_bytes=1)
    with dr.open(copy) as store:
        assert store.verify(deep=True) == []


def test_a_time_beyond_all_times_is_refused(tmp_store):
    copy = left_by_a_killed_writer(tmp_store, LIMITS["steps"])
    with another_boot(), dr.open(copy, "a"):
        pass
    edit(max(copy.glob("segments/0*/zarr.json")), unproven_time=(1 << 62) + 1)
    with pytest.warns(dr.DamagedSegmentWarning, match="unproven_time is 4611686018427387905"), dr.open(copy) as store:
        assert len(store) > 0
