"""`capacity_bytes` and `max_age_s`: whole sealed segments leave, the oldest first."""

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.format import sealing
from diskreplay.format.machine import BootTime, is_clock_synchronized
from diskreplay.store.retention import policy
from diskreplay.store.retention.policy import disk_usage
from diskreplay.store.writing import rotation
from tests.testing.support import append_numbered, serial_schema

WIDE = dr.Field((1024,), "float32")
ROOT_BYTES = 64 << 10  # documents, counters and locks of the store itself


def visible(store):
    store.refresh()
    return [int(serial) for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :]]


def numbers(path):
    return sorted(int(folder.name) for folder in (path / "segments").glob("0*"))


def segment_bytes(path):
    return {number: disk_usage(path / "segments" / f"{number:08d}")[0] for number in numbers(path)}


def append_wide(writer, serials):
    """Append an episode of rows of 4 KiB."""
    for serial in serials:
        obs = np.full(1024, serial, np.float32)
        writer.append(obs, serial, 0.0, serial == serials[-1], next_obs=obs + 1, serial=serial)


@pytest.fixture
def clock(monkeypatch):
    """Clocks that stand still until a test moves them: `now` for all, `wall` alone, another boot, a time service."""

    class Clock:
        now, wall, boot, is_kept = 0.0, 1_000_000.0, "this boot", False

        def time(self):
            return self.now + self.wall

        def boot_time(self):
            return BootTime("this machine", self.boot, self.now)

    clock = Clock()
    for module in (sealing, policy):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "boot_time", clock.boot_time)
    monkeypatch.setattr(policy, "is_clock_synchronized", lambda: clock.is_kept)
    return clock


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("chunk_bytes", [64 << 10, 16 << 20])
def test_a_store_stays_within_its_capacity_and_two_segments(tmp_store, chunk_bytes, monkeypatch):
    most = 4 << 20
    monkeypatch.setattr(rotation, "LEAST_QUARTER_S", 0.0)  # the next segment is always made ahead: it counts, too
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=most, segment_steps=64, chunk_bytes=chunk_bytes
    ) as store:
        peak = largest = 0
        with store.writer() as writer:
            for first in range(0, 2400, 8):
                append_wide(writer, range(first, first + 8))
                largest = max(largest, *segment_bytes(tmp_store).values())
                peak = max(peak, disk_usage(tmp_store)[0])
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
    monkeypatch.setattr(rotation, "LEAST_QUARTER_S", 0.0)
    most, count = 2 << 20, 3
    with dr.create(
        tmp_store, serial_schema(WIDE), capacity_bytes=most, segment_steps=32, chunk_bytes=64 << 10
    ) as store:
        writers = [store.writer() for _ in range(count)]
        peak = largest = 0
        for first in range(0, 3000, 10):
            append_wide(writers[(first // 10) % count], range(first, first + 10))
            largest = max(largest, *segment_bytes(tmp_store).values())
            peak = max(peak, disk_usage(tmp_store)[0])
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


def test_segments_leave_when_they_are_too_old(tmp_store, clock):
    with dr.create(tmp_store, serial_schema(), max_age_s=60, segment_steps=10) as store, dr.open(tmp_store) as reader:
        for first in range(0, 50, 10):
            with store.writer() as writer:
                append_numbered(writer, range(first, first + 10))
            clock.now += 20
        # Sealed 100, 80, 60, 40 and 20 seconds ago; the last look was when the last one was sealed.
        assert visible(reader) == visible(store) == list(range(20, 50))
        with store.writer() as writer:
            append_numbered(writer, [50])
            assert visible(reader) == visible(store) == list(range(30, 51))
            assert numbers(tmp_store) == [3, 4, 5]
        clock.now += 59
        assert store.evict(lambda episode: False) == 0
        assert visible(reader) == visible(store) == [50]
        clock.now += 1
        assert store.evict(lambda episode: False) == 0
        assert visible(reader) == visible(store) == []
        assert numbers(tmp_store) == []
        assert store.info()["steps_evicted"] == 51
        assert store.verify(deep=True) == []


def write_old(path, clock, seconds=100, **kwargs):
    """Make a store that keeps 60 s, with a segment so much older than now."""
    with dr.create(path, serial_schema(), max_age_s=60, **kwargs) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    clock.now += seconds


def left_after_a_look(store):
    store.evict(lambda episode: False)
    return visible(store)


@pytest.mark.parametrize("step", [1e9, -1e5])
def test_a_clock_that_is_set_deletes_nothing_and_keeps_nothing_of_this_boot(tmp_store, clock, step):
    write_old(tmp_store, clock, 59)
    clock.wall += step
    for _ in range(2):  # processes that saw it before the clock was set, and after
        with dr.open(tmp_store, "a") as store:
            assert left_after_a_look(store) == list(range(5))
    with dr.open(tmp_store, "a") as store:
        clock.now += 1
        assert left_after_a_look(store) == []


def test_a_wrong_clock_after_a_boot_deletes_nothing_that_nothing_else_confirms(tmp_store, clock):
    write_old(tmp_store, clock)
    clock.now, clock.wall, clock.boot = 10.0, clock.wall + 1e9, "the next boot"
    with dr.open(tmp_store, "a") as store:
        assert left_after_a_look(store) == list(range(5))
        clock.now = 59.0  # up for less than that
        assert left_after_a_look(store) == list(range(5))
        clock.now = 60.0
        assert left_after_a_look(store) == []


def test_a_clock_that_a_time_service_keeps_is_believed(tmp_store, clock):
    write_old(tmp_store, clock)
    clock.now, clock.wall, clock.boot, clock.is_kept = 10.0, clock.wall + 100, "the next boot", True
    with dr.open(tmp_store, "a") as store:
        assert left_after_a_look(store) == []


def test_a_segment_that_another_machine_sealed_leaves_when_it_was_known_for_so_long(tmp_store, clock, monkeypatch):
    write_old(tmp_store, clock)
    monkeypatch.setattr(policy, "boot_time", lambda: BootTime("another machine", "its boot", 5000.0 + clock.now))
    clock.wall += 1e9
    with dr.open(tmp_store, "a") as store:
        assert left_after_a_look(store) == list(range(5))
        clock.now += 59
        assert left_after_a_look(store) == list(range(5))
        clock.now += 1
        assert left_after_a_look(store) == []


def test_a_segment_from_the_future_is_as_old_as_it_is_known(tmp_store, clock):
    clock.wall += 1e9
    write_old(tmp_store, clock)
    clock.wall, clock.boot, clock.is_kept = clock.wall - 1e9, "the next boot", True
    with dr.open(tmp_store, "a") as store:
        assert left_after_a_look(store) == list(range(5))
        clock.now += 60
        assert left_after_a_look(store) == []


def test_whether_a_time_service_keeps_the_clock_is_asked_of_the_kernel():
    assert is_clock_synchronized() in (True, False)


def test_an_unsealed_segment_never_leaves_and_newer_ones_do(tmp_store, clock):
    with dr.create(tmp_store, serial_schema(), max_age_s=60, segment_steps=10) as store, dr.open(tmp_store) as reader:
        with store.writer() as slow:
            append_numbered(slow, range(3))
            with store.writer() as fast:
                append_numbered(fast, range(100, 110))
            clock.now += 100
            append_numbered(slow, range(3, 6))
            with dr.open(tmp_store, "a") as other, other.writer() as writer:
                append_numbered(writer, range(200, 205))
            assert visible(reader) == visible(store) == [0, 1, 2, 3, 4, 5, *range(200, 205)]
        assert visible(reader) == visible(store) == [0, 1, 2, 3, 4, 5, *range(200, 205)]
        sampler = dr.Sampler(reader, dr.Transitions(), batch_size=64, seed=0)
        assert set(sampler.sample().numpy()["serial"].tolist()) == set(visible(reader))
        sampler.close()


def test_processes_that_evict_by_age_in_turn_agree(tmp_store, clock):
    with (
        dr.create(tmp_store, serial_schema(), max_age_s=60, capacity=40, segment_steps=10) as one,
        dr.open(tmp_store, "a") as two,
    ):
        for turn in range(12):
            for store in (one, two):
                with store.writer() as writer:
                    first = 1000 * turn + 100 * (store is two)
                    append_numbered(writer, range(first, first + 5))
                clock.now += 7
            assert visible(one) == visible(two)
            assert len(one) == min(10 * (turn + 1), 40)
        assert len(numbers(tmp_store)) == 8


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_an_age_that_is_none_is_refused(tmp_store, value):
    with pytest.raises(ValueError, match="max_age_s"):
        dr.create(tmp_store, serial_schema(), max_age_s=value)
    assert not tmp_store.exists()
