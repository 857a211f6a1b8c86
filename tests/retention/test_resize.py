"""What a store keeps at most, changed while it is open: here, in other processes, with samplers and writers."""

import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.injection import die_at, points_of
from tests.reading.inner import before_opening
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import SHARES, each_share, whole_or_part


def made(path, **kwargs):
    return dr.create(path, serial_schema(), segment_steps=10, chunk_bytes=1024, **kwargs)


def filled(path, steps=90, **kwargs):
    store = made(path, **kwargs)
    with store.writer() as writer:
        for serial in range(steps):
            append_numbered(writer, [serial], end="terminated" if serial % 3 == 2 else "open")
    store.refresh()
    return store


def visible(store):
    store.refresh()
    return [int(serial) for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :]]


@pytest.mark.parametrize("place", ["KnownSegments.__init__", "KnownSegments.read"])
@pytest.mark.parametrize("capacities", [(80,), (80, None)])
def test_a_limit_that_changes_while_a_store_is_opened_is_followed(tmp_store, place, capacities):
    with filled(tmp_store, 120) as store:

        def resize():
            for capacity in capacities:
                store.resize(capacity=capacity)

        with before_opening(place, resize):
            reader = dr.open(tmp_store)
        with reader, dr.open(tmp_store) as other:
            assert visible(reader) == visible(other) == [*range(40, 120)]
            with store.writer() as writer:
                append_numbered(writer, range(120, 150))
            assert visible(reader) == visible(other)
            assert len(reader) == (80 if len(capacities) == 1 else 110)


def in_another_process(path, call):
    code = f"import diskreplay as dr\nwith dr.open({str(path)!r}, 'a') as store:\n    store.{call}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_less_hides_and_deletes_the_oldest_for_everybody(tmp_store):
    with filled(tmp_store) as store, dr.open(tmp_store) as reader, dr.Sampler(reader, dr.Transitions()) as sampler:
        store.resize(capacity=25)
        assert store.capacity == 25
        assert visible(store) == visible(reader) == list(range(65, 90))
        assert set(sampler.sample(2000)["serial"].tolist()) == set(range(65, 90))
        assert len(list((tmp_store / "segments").glob("0*"))) <= 4
        assert store.verify(deep=True) == []
        assert store.info()["capacity"] == reader.info()["capacity"] == 25


@pytest.mark.slow
def test_other_processes_follow_at_their_next_refresh_and_append(tmp_store):
    with filled(tmp_store) as store, store.writer() as writer, dr.Sampler(store, dr.Transitions()) as sampler:
        sampler.sample()
        in_another_process(tmp_store, "resize(capacity=30)")
        for serial in range(90, 120):
            append_numbered(writer, [serial], end="terminated" if serial % 3 == 2 else "open")
            assert visible(store) == list(range(serial - 29, serial + 1))
        assert store.capacity == 30
        assert set(sampler.sample(2000)["serial"].tolist()) <= set(range(90, 120))
        writer.close()
        # Segments that nobody needs are deleted by a writer that was open before there was a limit.
        assert len(list((tmp_store / "segments").glob("0*"))) <= 5


@pytest.mark.slow
def test_what_was_hidden_does_not_come_back_by_more(tmp_store):
    with filled(tmp_store, capacity=21) as store, dr.open(tmp_store) as reader:
        store.resize(capacity=40)
        with store.writer() as writer:
            append_numbered(writer, [90])
        expected = list(range(69, 91))
        assert visible(store) == visible(reader) == expected
        store.resize(capacity=None)
        assert visible(store) == visible(reader) == expected
        with dr.open(tmp_store) as fresh:
            assert visible(fresh) == expected
        with store.writer() as writer:
            append_numbered(writer, range(91, 200))
        assert visible(store) == visible(reader) == list(range(69, 200))
        assert store.verify(deep=True) == []


def test_priorities_outlive_a_change_of_the_capacity(tmp_store):
    prioritized = dr.Prioritized(alpha=1.0, eps=1e-9)
    with filled(tmp_store) as store, dr.Sampler(store, dr.Transitions(), prioritized, seed=0) as sampler:
        ids = np.concatenate([episode.ids for episode in store.episodes])
        sampler.update_priorities(ids, np.where(np.arange(90) == 80, 1000.0, 1e-6))
        store.resize(capacity=25)
        assert set(sampler.sample(256)["serial"].tolist()) == {80}


def test_limits_of_bytes_and_age_can_be_set_and_taken_away(tmp_store):
    with filled(tmp_store, max_age_s=3600.0) as store:
        store.resize(capacity_bytes=1)
        assert len(visible(store)) < 90
        store.resize(max_age_s=1e-6)
        assert visible(store) == []
        store.resize(max_age_s=None, capacity_bytes=None, capacity=7)
        info = store.info()
        assert (info["capacity"], info["capacity_bytes"], info["max_age_s"]) == (7, None, None)
        with store.writer() as writer:
            append_numbered(writer, range(100, 120))
        assert visible(store) == list(range(113, 120))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "resize changes capacity, capacity_bytes or max_age_s: give one of them"),
        ({"capacity": 0}, "capacity is 0; it must be at least 1"),
        ({"max_age_s": -1.0}, "max_age_s is -1.0; it must be more than 0 and finite"),
    ],
)
def test_invalid_limits_are_refused_and_change_nothing(tmp_store, arguments, message):
    with filled(tmp_store, capacity=50) as store:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            store.resize(**arguments)
        assert store.capacity == 50
        with dr.open(tmp_store) as reader, pytest.raises(dr.ReadOnlyError, match='open it with mode "a" to resize'):
            reader.resize(capacity=1)


@pytest.mark.slow(turns=2)
@each_share
def test_a_process_that_dies_while_it_resizes_leaves_the_old_limits_or_the_new_ones(tmp_path, share):
    filled(tmp_path / "made", 40).close()

    def resize(path, tell=None):
        with dr.open(path, "a") as store:
            store.resize(capacity=20)

    shutil.copytree(tmp_path / "made", tmp_path / "counted")
    seen = set()
    count = len(points_of(lambda: resize(tmp_path / "counted")))
    for number in [0, *range(1, count, whole_or_part(1, 3))[share::SHARES], count]:
        path = tmp_path / "killed"
        shutil.copytree(tmp_path / "made", path)
        die_at(partial(resize, path), number)
        with dr.open(path, "a") as store:
            found = visible(store)
            assert found == list(range(20 if store.capacity == 20 else 0, 40))
            seen.add(store.capacity)
            store.repair()
            assert store.verify(deep=True) == []
            assert visible(store) == found
        shutil.rmtree(path)
    assert seen == {None, 20}
