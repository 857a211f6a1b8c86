"""Discarded episodes: shown by no reader, whatever became of their segments."""

import itertools
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash.injection import die_at, points_of
from tests.crash.power import another_boot
from tests.testing.support import REPOSITORY, append_numbered, serial_schema

LENGTH = 16  # rows of a segment here: an open episode is cut for its length at twice as many


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=LENGTH, compaction="manual") as store:
        yield store


def serials(store):
    """The steps of each episode, as a running reader and a fresh one see them."""
    store.refresh()
    found = seen(store)
    with dr.open(store.path) as fresh:
        assert seen(fresh) == found
        assert fresh.snapshot.segments.discarded_steps == store.snapshot.segments.discarded_steps
    return found


def seen(store):
    found = sorted(episode["serial"][episode.hidden_steps :].tolist() for episode in store.episodes)
    check_account(store)
    assert len(store) == sum(map(len, found))
    with dr.Sampler(store, dr.Transitions(), batch_size=1) as sampler:
        assert set(sampler.ids().tolist()) <= {int(i) for episode in store.episodes for i in episode.ids}
    return found


def test_an_open_episode_is_discarded_and_the_next_append_begins_another(store):
    reader = dr.open(store.path)
    with store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        assert reader.refresh() == 3
        writer.discard_episode()
        assert reader.refresh() == 0
        assert len(reader) == reader.num_episodes == 0
        append_numbered(writer, range(3, 5), end="open")
        assert serials(reader) == [[3, 4]]
    assert serials(store) == serials(reader) == [[3, 4]]
    assert store.snapshot.segments.discarded_steps == 3
    assert store.verify(deep=True) == []


def test_steps_that_come_discarded_never_count_as_arrived(store):
    reader = dr.open(store.path)
    with store.writer() as writer:
        append_numbered(writer, range(2), end="open")
        reader.refresh()
        append_numbered(writer, range(2, 5), end="open")
        writer.discard_episode()
        append_numbered(writer, range(5, 9))
        assert reader.refresh() == 4
        append_numbered(writer, range(9, 12), end="open")
        writer.discard_episode()
        assert reader.refresh() == 0


def test_without_an_open_episode_nothing_happens(store):
    with store.writer() as writer:
        writer.discard_episode()
        append_numbered(writer, range(3))
        writer.discard_episode()
        writer.discard_episode()
        append_numbered(writer, range(3, 5), end="open")
        writer.end_episode()
        writer.discard_episode()
    assert serials(store) == [[0, 1, 2], [3, 4]]
    assert store.snapshot.segments.discarded_steps == 0


def test_a_vector_discards_the_lanes_of_a_mask(store):
    def append(values):
        obs = np.tile(np.float32(values)[:, None], 3)
        writer.append(obs, [0] * 3, [0.0] * 3, [False] * 3, next_obs=obs + 10, serial=values)

    with store.writer(3) as writer:
        append([0, 1, 2])
        append([10, 11, 12])
        writer.discard_episode([True, False, True])
        append([20, 21, 22])
        assert serials(store) == [[1, 11, 21], [20], [22]]
        with pytest.raises(dr.SchemaError):
            writer.discard_episode([True])
        writer.discard_episode()
        assert serials(store) == []
    assert store.snapshot.segments.discarded_steps == 9
    assert store.verify(deep=True) == []


@pytest.mark.parametrize("merge", [False, True])
def test_the_parts_before_a_length_cut_are_discarded_too(store, merge):
    reader = dr.open(store.path)
    with store.writer() as other, store.writer() as writer:
        append_numbered(writer, range(3))
        append_numbered(other, range(1000, 1003), end="open")
        append_numbered(writer, range(3, 5), end="open")
        writer.end_episode()
        append_numbered(writer, range(5, 120), end="open")
        assert len(serials(reader)) > 4, "there is no part to test"
        if merge:
            store._sealer.drain()
            assert store.compact()["segments"] > 1
            reader.refresh()
        writer.discard_episode()
        assert serials(reader) == [[0, 1, 2], [3, 4], [1000, 1001, 1002]]
        append_numbered(writer, range(120, 123))
        expected = [[0, 1, 2], [3, 4], [120, 121, 122], [1000, 1001, 1002]]
        assert serials(reader) == serials(store) == expected
    assert serials(reader) == expected
    assert reader.snapshot.segments.discarded_steps == 115
    store.compact()
    assert serials(reader) == serials(store) == expected
    assert store.verify(deep=True) == []


def test_the_episode_that_another_one_follows_is_no_part_of_it(store):
    with store.writer() as writer:
        append_numbered(writer, range(40), end="open")
        parts = serials(store)
        writer.end_episode()
        append_numbered(writer, range(40, 43), end="open")
        writer.discard_episode()
    assert serials(store) == parts


def append(writer, serial, mask):
    """Append a step to those of two lanes that `mask` has."""
    obs = np.full((2, 3), serial, np.float32)
    writer.append(obs, [0, 0], [0.0, 0.0], [False] * 2, next_obs=obs + 1, mask=mask, serial=[serial, -serial])


def leave_behind(store, writer):
    """Have the second of two lanes stand idle, and so be cut, while the other one fills segments, and discard it."""
    for serial in range(1, 4):
        append(writer, serial, [True, True])
    writer.end_episode(mask=[True, False])
    for serial in range(4, 400):
        append(writer, serial, [True, False])
        writer.end_episode(mask=[True, False])
    store.refresh()
    (idle,) = (episode for episode in store.episodes if episode["serial"][0] < 0)
    assert idle.cut, "the lane was not left behind"
    writer.discard_episode([False, True])


@pytest.mark.slow(turns=2)
def test_a_part_without_a_step_is_discarded_with_those_before_it(store):
    with store.writer(2) as writer:
        leave_behind(store, writer)
        assert all(each[0] > 0 for each in serials(store))
        append(writer, 5000, [False, True])
        assert [-5000] in serials(store)
    assert store.snapshot.segments.discarded_steps == 3
    assert store.verify(deep=True) == []
    store.compact()
    assert store.snapshot.segments.discarded_steps == 3
    assert [-5000] in serials(store)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_a_marker_without_a_step_stays_when_all_others_of_its_segment_are_evicted(store, merge):
    with store.writer(2) as writer:
        leave_behind(store, writer)
        append(writer, 5000, [True, False])
    store.refresh()
    segments = {int(episode["serial"][0]): episode.segment for episode in store.episodes}
    assert store.evict(lambda episode: episode.segment == segments[5000]) > 0
    if merge:
        store.compact()
    assert all(each[0] > 0 for each in serials(store))
    assert store.snapshot.segments.discarded_steps == 3


_KILLED = """
import os, signal, sys
import diskreplay as dr
from diskreplay.testing import check_account
from tests.testing.support import append_numbered

store = dr.open(sys.argv[1], "a")
writer = store.writer(durability="episode")
append_numbered(writer, range(3))
append_numbered(writer, range(3, 60), end="open")
writer.discard_episode()
append_numbered(writer, range(60, 62), end="open")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_discarded_episode_stays_so_after_a_kill_in_copies_and_after_a_boot(store, tmp_path):
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(store.path)], cwd=REPOSITORY)
    assert killed.returncode == -signal.SIGKILL
    shutil.copytree(store.path, tmp_path / "copy")
    with dr.open(tmp_path / "copy") as copy:
        assert seen(copy) == [[0, 1, 2]]  # the steps behind it were not flushed
    with another_boot(), dr.open(tmp_path / "copy", "a") as copy:
        assert seen(copy) == [[0, 1, 2]]
        assert {problem.kind for problem in copy.verify(deep=True)} <= {"unproven"}
    assert serials(store) == [[0, 1, 2], [60, 61]]
    store.backup(tmp_path / "backup")
    with dr.open(tmp_path / "backup") as backup:
        assert seen(backup) == [[0, 1, 2], [60, 61]]
    with dr.open(store.path, "a") as again:
        assert seen(again) == [[0, 1, 2], [60, 61]]
        assert again.verify(deep=True) == []


@pytest.mark.slow(turns=2)
def test_a_writer_that_dies_in_a_discard_leaves_the_episode_cut_or_discarded(tmp_path):
    paths = (tmp_path / f"store{number}" for number in itertools.count())

    def work(tell):
        with dr.open(path, "a") as store:
            writer = store.writer(durability="none")
            append_numbered(writer, range(40), end="open")
            store._sealer.drain()  # its operations come in no certain order with those of the discard
            tell("appended")
            writer.discard_episode()
            tell("discarded")
            os._exit(0)

    def made():
        dr.create(path := next(paths), serial_schema(), segment_steps=LENGTH).close()
        return path

    path = made()
    last = len(points_of(lambda: work(lambda _: None)))
    found = set()
    # Threads in the background make more operations in one run than in another: the last run survives.
    for point in [*range(last - 24, last + 1, 2), last + 100]:
        path = made()
        told = die_at(work, point).told
        with dr.open(path, "a") as store:
            left = [serial for each in serials(store) for serial in each]
            assert store.verify() == []
        if "appended" in told:
            assert left in (list(range(40)), [])[-1 if "discarded" in told else 0 :]
            found.add(len(left))
    assert 0 in found
    assert found <= {0, 40}


def test_priorities_for_discarded_steps_are_skipped_and_counted(store):
    with store.writer() as writer:
        append_numbered(writer, range(8))
        append_numbered(writer, range(8, 12), end="open")
        store.refresh()
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=64, seed=0) as sampler:
            ids = sampler.ids()
            assert len(ids) == 12
            sampler.update_priorities(ids, np.full(12, 5.0))
            writer.discard_episode()
            store.refresh()
            assert sampler.sampleable == 8
            with pytest.raises(dr.InvalidIndex, match="discarded"):
                sampler.gather(ids[8:])
            assert sampler.update_priorities(ids, np.full(12, 5.0)) == 4
            assert set(sampler.sample().index.tolist()) <= set(ids[:8].tolist())


def test_rollouts_go_on_with_the_next_episode_of_the_lane(tmp_store):
    extra = {"value": dr.Field((), "float32")}
    with dr.create(tmp_store, serial_schema(extra=extra)) as store, store.writer() as writer:
        append_numbered(writer, range(7), end="open", value=0.0)
        store.refresh()
        with dr.Sampler(store, dr.Rollouts(5), fields=("serial",)) as sampler:
            assert sampler.sample().serial[:, 0].tolist() == [0, 1, 2, 3, 4]
            writer.discard_episode()
            append_numbered(writer, range(7, 20), end="open", value=0.0)
            store.refresh()
            assert sampler.sample().serial[:, 0].tolist() == [7, 8, 9, 10, 11]


def test_a_limiter_counts_discarded_steps_as_inserted(tmp_store):
    limiter = dr.RateLimiter(1.0, 2, 8.0, timeout=0.05)
    with dr.create(tmp_store, serial_schema()) as store, store.writer(limiter=limiter) as writer:
        append_numbered(writer, range(9), end="open")
        writer.discard_episode()
        with pytest.raises(dr.RateLimited):
            append_numbered(writer, range(9, 20), end="open")
        with store.writer(limiter=limiter) as other, pytest.raises(dr.RateLimited):
            append_numbered(other, range(9, 20), end="open")


def test_sequences_that_cross_episodes_leave_out_discarded_steps(tmp_store):
    view = dr.Sequences(4, cross_episodes=True, stride=1)
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(3))
        append_numbered(writer, range(3, 6), end="open")
        store.refresh()
        with dr.Sampler(store, view, batch_size=8, fields=("serial",), seed=0) as sampler:
            sampler.sample()
            writer.discard_episode()
            append_numbered(writer, range(6, 12))
            store.refresh()
            windows = sampler.gather(sampler.ids()).serial.tolist()
    every = [0, 1, 2, *range(6, 12)]
    assert sorted(windows) == [every[i : i + 4] for i in range(len(every) - 3)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_capacity_counts_discarded_steps_the_same_for_all_readers(tmp_store, seed):
    rng, serial = np.random.default_rng(seed), 0
    order = []  # serial, and whether it was discarded
    with dr.create(tmp_store, serial_schema(), segment_steps=8, capacity=60, compaction="manual") as store:
        reader = dr.open(tmp_store)
        with dr.Sampler(reader, dr.Transitions(), dr.Prioritized(), batch_size=4, seed=0) as sampler:
            for _ in range(4):
                with store.writer() as writer:
                    for _ in range(12):
                        steps, discards = int(rng.integers(1, 25)), bool(rng.random() < 0.4)
                        append_numbered(writer, range(serial, serial + steps), end="open")
                        if rng.random() < 0.3:
                            reader.refresh()
                        if discards:
                            writer.discard_episode()
                        else:
                            writer.end_episode()
                        order += [(i, discards) for i in range(serial, serial + steps)]
                        serial += steps
                        if rng.random() < 0.1:
                            store.compact()
                        store._sealer.drain()  # no segment leaves while readers are compared
                        shown = [i for each in serials(reader) for i in each]
                        assert shown == [i for i, gone in order[-60:] if not gone]
                        ids = sorted(int(i) for episode in reader.episodes for i in episode.ids)
                        reader_ids = sorted(sampler.ids().tolist())
                        assert set(reader_ids) <= set(ids)
        assert store.verify(deep=True) == []
