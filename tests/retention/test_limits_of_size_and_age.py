"""`capacity_bytes` and `max_age_s`: whole sealed segments leave, the oldest first."""

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.on_disk import disk_bytes
from tests.testing.support import serial_schema

WIDE = dr.Field((1024,), "float32")
ROOT_BYTES = 64 << 10  # documents, counters and locks of the store itself


def visible(store):
    store.refresh()
    return [int(serial) for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :]]


def numbers(path):
    return sorted(int(folder.name) for folder in (path / "segments").glob("0*"))


def segment_bytes(path):
    return {number: disk_bytes(path / "segments" / f"{number:08d}") for number in numbers(path)}


def append_wide(writer, serials):
    """Append an episode of rows of 4 KiB."""
    for serial in serials:
        obs = np.full(1024, serial, np.float32)
        writer.append(obs, serial, 0.0, serial == serials[-1], next_obs=obs + 1, serial=serial)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("chunk_bytes", [64 << 10, 16 << 20])
def test_a_store_stays_within_its_capacity_and_two_segments(tmp_store, chunk_bytes, monkeypatch):
    most = 4 << 20
    monkeypatch.setattr(
        "diskreplay.writing.rotation.LEAST_QUARTER_S", 0.0
    )  # the next segment is always made ahead: it counts, too
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=most, segment_steps=64, chunk_bytes=chunk_bytes
    ) as store:
        peak = largest = 0
        with store.writer() as writer:
            for first in range(0, 2400, 8):
                append_wide(writer, range(first, first + 8))
                largest = max(largest, *segment_bytes(tmp_store).values())
                peak = max(peak, disk_bytes(tmp_store))
        shown = visible(store)
        assert most - 2 * largest <= sum(segment_bytes(tmp_store).values()) <= most
        assert peak <= most + 2 * largest + ROOT_BYTES
        assert largest < most / 8
        # The newest are there, without a gap.
        assert shown == list(range(2400 - len(shown), 2400))
        assert len(shown) > 500
        assert store.verify(deep=True) == []
    with dr.open(tmp_store) as late:
        assert visible(late) == shown
        assert late.info()["capacity_bytes"] == most


@pytest.mark.slow(turns=4)
def test_several_writers_add_two_segments_each_at_most(tmp_store, monkeypatch):
    monkeypatch.setattr("diskreplay.writing.rotation.LEAST_QUARTER_S", 0.0)
    most, count = 2 << 20, 3
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=most, segment_steps=32, chunk_bytes=64 << 10
    ) as store:
        writers = [store.writer() for _ in range(count)]
        peak = largest = 0
        for first in range(0, 3000, 10):
            append_wide(writers[(first // 10) % count], range(first, first + 10))
            largest = max(largest, *segment_bytes(tmp_store).values())
            peak = max(peak, disk_bytes(tmp_store))
        for writer in writers:
            writer.close()
        assert peak <= most + 2 * count * largest + ROOT_BYTES
        assert sum(segment_bytes(tmp_store).values()) <= most
        assert store.verify(deep=True) == []


def test_segments_are_a_sixteenth_of_the_capacity_in_bytes(tmp_store):
    with dr.create(tmp_store, serial_schema(WIDE), capacity_bytes=80 << 20) as store, store.writer() as writer:
        step_bytes = 4 * 1024 + 8 + 8 + 4 + 1 + 8
        assert writer._episode_writer.rotation._target == (80 << 20) // 16 // step_bytes


@pytest.mark.slow(turns=4)
def test_readers_lose_the_oldest_segments_and_go_on(tmp_store):
    with (
        dr.create(
            tmp_store, serial_schema(WIDE), capacity_bytes=1 << 20, segment_steps=32, chunk_bytes=64 << 10
        ) as store,
        store.writer() as writer,
        dr.open(tmp_store) as reader,
    ):
        sampler = dr.Sampler(reader, dr.Transitions(), dr.Prioritized(), batch_size=32, seed=0)
        generation = None
        for first in range(0, 1000, 8):
            append_wide(writer, range(first, first + 8))
            batch = sampler.sample()
            fields = batch.numpy()
            assert (fields["obs"][:, 0] == fields["serial"]).all()
            assert reader.snapshot.holds(batch.index.numpy()).all()
            sampler.update_priorities(batch.index, np.ones(32))
            generation = generation or reader.snapshot.generation
        # What leaves in order costs no sampler a new start but when half of the table of episodes is gone.
        assert reader.snapshot.generation - generation < 30
        store._sealer.drain()
        reader.refresh()
        assert {int(first) >> 35 for first in reader.snapshot.episodes.first} <= set(numbers(tmp_store))
        sampler.close()


def test_a_slow_writers_segment_does_not_keep_newer_ones(tmp_store):
    with (
        dr.create(
            tmp_store, serial_schema(WIDE), capacity_bytes=1 << 20, segment_steps=32, chunk_bytes=64 << 10
        ) as store,
        store.writer() as slow,
        store.writer() as fast,
    ):
        append_wide(slow, range(2))
        for first in range(1000, 2000, 8):
            append_wide(fast, range(first, first + 8))
        append_wide(slow, range(2, 12))
        store._sealer.drain()  # nothing leaves while it is read
        left = visible(store)
        assert set(range(2, 12)) <= set(left)
        assert not {0, 1} & set(left)
        assert sum(segment_bytes(tmp_store).values()) < (1 << 20) + 4 * 48 * 4096


@pytest.mark.slow(turns=4)
def test_both_capacities_hold_together(tmp_store):
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity=100, capacity_bytes=4 << 20, segment_steps=16, chunk_bytes=64 << 10
    ) as store:
        with store.writer() as writer:
            for first in range(0, 600, 8):
                append_wide(writer, range(first, first + 8))
                assert len(visible(store)) == min(100, first + 8)
        assert visible(store) == list(range(500, 600))
        assert sum(segment_bytes(tmp_store).values()) < 2 << 20


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True])
def test_a_capacity_in_bytes_that_is_none_is_refused(tmp_store, value):
    with pytest.raises(ValueError, match="capacity_bytes"):
        dr.create(tmp_store, serial_schema(), capacity_bytes=value)
    assert not tmp_store.exists()


# --- age -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_an_age_that_is_none_is_refused(tmp_store, value):
    with pytest.raises(ValueError, match="max_age_s"):
        dr.create(tmp_store, serial_schema(), max_age_s=value)
    assert not tmp_store.exists()
