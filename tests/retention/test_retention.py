"""Capacity: the oldest steps leave first, exactly for readers, as whole segments on disk."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from diskreplay.testing import ModelStore, check_store
from diskreplay.testing.scripts import WriterPlan, play
from diskreplay.testing.strategies import episode_plans, schemas
from tests.testing.support import append_numbered, check_views, quiet, scratch, serial_schema


def visible(store):
    store.refresh()
    shown = (serial for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :])
    return [*map(int, shown)]


def segments_on_disk(path):
    return sorted(int(folder.name) for folder in (path / "segments").glob("0*"))


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [1, 7, 20, 33])
def test_exactly_the_newest_steps_are_visible_after_every_append(tmp_store, capacity):
    with (
        dr.create(tmp_store, serial_schema(), capacity=capacity, segment_steps=10, chunk_bytes=1024) as store,
        store.writer() as writer,
    ):
        for first in range(0, 90, 3):
            for serial in range(first, first + 3):
                append_numbered(writer, [serial], end="terminated" if serial % 3 == 2 else "open")
                expected = list(range(max(0, serial + 1 - capacity), serial + 1))
                assert visible(store) == expected
                assert len(store) == len(expected)


@pytest.mark.slow(turns=4)
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    schemas(),
    st.lists(episode_plans(20), min_size=1, max_size=12).map(tuple),
    st.integers(1, 60),
    st.integers(1, 30),
    st.booleans(),
    st.integers(0, 1000),
    st.tuples(st.none() | st.integers(1, 6), st.sampled_from((0.9, 1.0)), st.integers(1, 3)),
)
def test_what_is_left_of_a_store_equals_the_model(schema, episodes, capacity, segment_steps, close, seed, view):
    """The same calls on a store without capacity tell the id of every step, and so which are the oldest."""
    plan = WriterPlan(None, (episodes,), "sometimes", close=close, seed=seed)
    with scratch() as folder:
        kwargs = {"segment_steps": segment_steps, "chunk_bytes": 64}
        with (
            dr.create(Path(folder) / "all", schema, **kwargs) as whole,
            dr.create(Path(folder) / "some", schema, capacity=capacity, **kwargs) as limited,
            whole.writer() as one,
            limited.writer() as other,
        ):
            model = ModelStore()
            play(plan, schema, [model.writer(), quiet(one), quiet(other)])
            whole.refresh()
            limited.refresh()
            ids = check_store(whole, model, length_cuts=True)
            model.trim(capacity, ids)
            left = check_store(limited, model, length_cuts=True)

            assert len(limited) == min(capacity, len(whole))
            assert left.items() <= ids.items()
            check_views(limited, model, left, [view])


def test_lanes_lose_their_oldest_rows_together(tmp_path):
    lanes, steps, capacity = 4, 60, 50
    stores = [
        dr.create(tmp_path / name, serial_schema(), capacity=limit, segment_steps=24, chunk_bytes=64)
        for name, limit in (("all", None), ("some", capacity))
    ]
    writers = [store.writer(num_envs=lanes) for store in stores]
    rows = np.arange(lanes)
    for t in range(steps):
        for writer in writers:
            ends = np.full(lanes, t % 5 == 4)
            writer.append(np.zeros((lanes, 3)), rows, np.ones(lanes), ends, ends & False, serial=1000 * rows + t)
    for store in stores:
        store.refresh()
    every, left = (np.sort(np.concatenate([ep.ids[ep.hidden_steps :] for ep in store.episodes])) for store in stores)

    assert len(every) == lanes * steps
    assert left.tolist() == every[-capacity:].tolist()
    for store in stores:
        store.close()


@pytest.mark.slow
def test_old_segments_leave_the_disk(tmp_store):
    capacity, target = 100, 20
    with dr.create(tmp_store, serial_schema(), capacity=capacity, segment_steps=target, chunk_bytes=1024) as store:
        most = 0
        for first in range(0, 1200, 400):
            with store.writer() as writer:
                for start in range(first, first + 400, 4):
                    append_numbered(writer, range(start, start + 4))
            store.refresh()
            assert visible(store) == list(range(first + 300, first + 400))
        store.close()
        # 5 rows an episode of 4 steps: a segment holds at least 16 of them.
        most = capacity / 16 + 2
        assert len(segments_on_disk(tmp_store)) <= most
        assert segments_on_disk(tmp_store)[0] > 30
    with dr.open(tmp_store) as reader:
        assert visible(reader) == list(range(1100, 1200))


def test_segment_numbers_are_never_used_again(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=10, segment_steps=5) as store:
        newest = -1
        for first in range(0, 100, 5):
            with store.writer() as writer:
                append_numbered(writer, range(first, first + 5))
            store.refresh()
            number = int(store.episodes[-1].ids[-1]) >> 35
            assert number > newest
            newest = number


def test_a_slow_writers_fresh_steps_are_not_taken_for_old_ones(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(), capacity=100, segment_steps=20, chunk_bytes=1024) as store,
        store.writer() as slow,
        store.writer() as fast,
    ):
        append_numbered(slow, range(2))
        for first in range(1000, 1500, 5):
            append_numbered(fast, range(first, first + 5))
        append_numbered(slow, range(2, 12))
        left = visible(store)

        assert set(range(2, 12)) <= set(left)
        assert set(left) - set(range(12)) == set(range(1410, 1500))


@pytest.mark.slow
def test_a_slow_writers_endless_episode_moves_on_before_it_is_hidden(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(), capacity=100, segment_steps=20, chunk_bytes=1024) as store,
        store.writer() as slow,
        store.writer() as fast,
    ):
        append_numbered(slow, range(3), end="open")
        for first in range(1000, 1500, 5):
            append_numbered(fast, range(first, first + 5))
        append_numbered(slow, range(3, 6), end="open")

        assert {3, 4, 5} <= set(visible(store))
        assert len(store) == 100


@pytest.mark.slow
def test_an_old_snapshot_can_be_sampled_after_its_steps_left(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(), capacity=40, segment_steps=10, chunk_bytes=1024) as store,
        store.writer() as writer,
        dr.open(tmp_store) as reader,
    ):
        for first in range(0, 40, 5):
            append_numbered(writer, range(first, first + 5))
        reader.refresh()
        sampler = dr.Sampler(reader, dr.Transitions(n_step=3), batch_size=64, seed=0)
        assert (sampler.sample().numpy()["serial"] < 40).all()
        for first in range(40, 400, 5):
            append_numbered(writer, range(first, first + 5))
        held = sampler.sample().numpy()
        sampler.close()
        reader.refresh()

        assert (held["obs"][:, 0] == held["serial"]).all()
        assert visible(reader) == list(range(360, 400))


@pytest.mark.slow
def test_a_sampler_without_refresh_never_fails_while_segments_leave(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(), capacity=40, segment_steps=10, chunk_bytes=1024) as store,
        store.writer() as writer,
        dr.open(tmp_store) as reader,
    ):
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=16, seed=0, refresh=False)
        frozen = dr.Sampler(reader, dr.Transitions(), batch_size=16, seed=0, refresh=False)
        for first in range(0, 250, 5):
            append_numbered(writer, range(first, first + 5))
            if first == 35:
                store.refresh()
                reader.refresh()
            if first >= 35:
                for batch in (sampler.sample().numpy(), frozen.sample().numpy()):
                    assert (batch["obs"][:, 0] == batch["serial"]).all()
                    assert (batch["next_obs"][:, 0] == batch["serial"] + 1).all()
        frozen.close()
        sampler.close()


def test_an_id_that_left_is_refused_by_gather(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=20, segment_steps=10) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        store.refresh()
        old = store.episodes[0].ids
        for first in range(5, 200, 5):
            append_numbered(writer, range(first, first + 5))
        store.refresh()
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=4)

        with pytest.raises(dr.InvalidIndex, match="evicted"):
            sampler.gather(old)
        sampler.close()


def test_a_reader_that_opens_late_sees_what_is_left(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=20, segment_steps=10) as store, store.writer() as writer:
        for first in range(0, 200, 5):
            append_numbered(writer, range(first, first + 5))
        with dr.open(tmp_store) as reader:
            assert visible(reader) == list(range(180, 200))


def test_without_a_capacity_nothing_leaves(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=10, chunk_bytes=1024) as store, store.writer() as writer:
        for first in range(0, 200, 5):
            append_numbered(writer, range(first, first + 5))

        assert visible(store) == list(range(200))


@pytest.mark.slow
def test_a_store_of_one_group_an_episode_keeps_its_capacity(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=50, segment_steps="episode") as store:
        with store.writer() as writer:
            for first in range(0, 1000, 5):
                append_numbered(writer, range(first, first + 5))
        assert visible(store) == list(range(950, 1000))
        assert segments_on_disk(tmp_store) == list(range(190, 200))


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [20, "episode"])
def test_stores_that_evict_in_turn_keep_the_newest_steps_of_all(tmp_store, segment_steps):
    """Each keeps its own account of the segments, which the others make and remove."""
    with (
        dr.create(tmp_store, serial_schema(), capacity=100, segment_steps=segment_steps, chunk_bytes=1024) as one,
        dr.open(tmp_store, "a") as two,
    ):
        for turn in range(8):
            with (one, two)[turn % 2].writer() as writer:
                for first in range(50 * turn, 50 * turn + 50, 5):
                    append_numbered(writer, range(first, first + 5))
            for store in (one, two):
                assert visible(store) == list(range(max(0, 50 * turn - 50), 50 * turn + 50))
        # 20 segments of 5 steps, or 6 of 20 and one more of each of both last writers.
        assert len(segments_on_disk(tmp_store)) <= (20 if segment_steps == "episode" else 8)
