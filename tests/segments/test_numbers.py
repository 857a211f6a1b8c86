"""Numbers of segments: reserved on the disk before one is used, so that a loss of power lets none be given twice."""

import shutil

import pytest

import diskreplay as dr
from tests.crash.power import another_boot
from tests.testing import inner
from tests.testing.on_disk import POSITION_BITS, segment_of, words
from tests.testing.support import append_numbered, serial_schema

AT_ONCE = 64  # numbers are reserved at once


def write_segment(path, serial):
    """Write a segment and return its number."""
    with dr.open(path, "a") as store, store.writer(durability="none") as writer:
        append_numbered(writer, [serial])
    with dr.open(path) as store:
        return int(store.episodes[-1].ids[-1]) >> POSITION_BITS


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
        shutil.rmtree(segment_of(store_path, number))
    with another_boot():
        assert write_segment(store_path, 4) == AT_ONCE
        assert write_segment(store_path, 5) == AT_ONCE + 1
    assert words(store_path)["reserved"] == 2 * AT_ONCE


@pytest.mark.slow(turns=4)
def test_a_number_is_reserved_on_the_disk_before_it_is_used(store_path, monkeypatch):
    synced, real = [], inner.real(inner.SYNC_COUNTERS)

    def sync_file(path):
        real(path)
        synced.append(words(store_path)["reserved"])

    monkeypatch.setattr(*inner.SYNC_COUNTERS, sync_file)
    for serial in range(AT_ONCE + 2):
        number = write_segment(store_path, serial)
        assert number == serial < synced[-1]
    assert synced == [AT_ONCE, 2 * AT_ONCE]
