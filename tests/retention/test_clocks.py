"""`max_age_s` by clocks that a test moves: none that is set, wrong or another machine's makes a segment leave early."""

import pytest

import diskreplay as dr
from tests.retention.test_limits_of_size_and_age import numbers, visible
from tests.testing.inner import Clock
from tests.testing.support import append_numbered, serial_schema


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


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


def test_a_segment_that_another_machine_sealed_leaves_when_it_was_known_for_so_long(tmp_store, clock):
    write_old(tmp_store, clock)
    clock.machine, clock.boot = "another machine", "its boot"
    clock.now, clock.wall = clock.now + 5000.0, clock.wall - 5000.0 + 1e9
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
