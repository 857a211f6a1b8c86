"""Numbers of segments: reserved on the disk before one is used, so that a loss of power lets none be given twice."""

import shutil

import pytest

import diskreplay as dr
from diskreplay.segments.documents import layout
from diskreplay.segments.files import commit
from diskreplay.segments.files.commit import StoreCounters
from tests.crash.power import another_boot
from tests.testing.support import append_numbered, serial_schema


def write_segment(path, serial):
    """Write a segment and return its number."""
    with dr.open(path, "a") as store, store.writer(durability="none") as writer:
        append_numbered(writer, [serial])
    with dr.open(path) as store:
        return int(store.episodes[-1].ids[-1]) >> layout.POSITION_BITS


def reserved(path):
    return int(StoreCounters(str(path / "counters/c.0")).read()[layout.RESERVED])


@pytest.fixture
def store_path(tmp_store):
    dr.create(tmp_store, serial_schema(), chunk_bytes=64).close()
    return tmp_store


def test_a_number_that_a_loss_of_power_took_back_is_not_given_again(store_path):
    assert write_segment(store_path, 0) == 0
    on_disk = (store_path / "counters/c.0").read_bytes()
    assert [write_segment(store_path, serial) for serial in range(1, 4)] == [1, 2, 3]
    # A sampler has seen these; then the power went.
    (store_path / "counters/c.0").write_bytes(on_disk)
    for number in range(1, 4):
        shutil.rmtree(store_path / "segments" / layout.segment_name(number))
    with another_boot():
        assert write_segment(store_path, 4) == layout.RESERVED_AT_ONCE
        assert write_segment(store_path, 5) == layout.RESERVED_AT_ONCE + 1
    assert reserved(store_path) == 2 * layout.RESERVED_AT_ONCE


@pytest.mark.slow(turns=4)
def test_a_number_is_reserved_on_the_disk_before_it_is_used(store_path, monkeypatch):
    synced, real = [], commit.sync_file

    def sync_file(path):
        real(path)
        synced.append(reserved(store_path))

    monkeypatch.setattr(commit, "sync_file", sync_file)
    for serial in range(layout.RESERVED_AT_ONCE + 2):
        number = write_segment(store_path, serial)
        assert number == serial < synced[-1]
    assert synced == [layout.RESERVED_AT_ONCE, 2 * layout.RESERVED_AT_ONCE]
