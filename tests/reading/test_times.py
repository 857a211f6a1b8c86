import os
import signal
import subprocess
import sys
import time
from itertools import count

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing import ModelStore, check_store
from diskreplay.testing.checks import check_times
from tests.testing.on_disk import attributes_of, segment_of
from tests.testing.support import append_numbered, serial_schema, serials


@pytest.fixture
def ticks(monkeypatch):
    """A clock that goes on by 100 with each look; a look is noted. Who makes a segment looks again."""
    looks = []
    clock = count(100, 100)

    def look(*_):
        looks.append(next(clock))
        return looks[-1]

    monkeypatch.setattr("diskreplay.writing.append_cursor.clock_gettime_ns", look)
    monkeypatch.setattr("diskreplay.writing.episode_writer.clock_ns", look)
    monkeypatch.setattr("diskreplay.segments.sealing.clock_ns", look)
    return looks


def rows(path, segment=0):
    """The times and flags of the first lanes' committed rows."""
    folder = path / f"segments/{segment:08d}"
    committed = np.fromfile(folder / "committed/c.0", "<i8")
    lanes = len(committed)
    times = [np.fromfile(folder / f"time/c.0.{k}", "<i8").reshape(lanes, -1) for k in range(len(chunks(folder)))]
    return [lane[:n].tolist() for lane, n in zip(np.concatenate(times, axis=1), committed, strict=True)]


def chunks(folder):
    return list((folder / "time").glob("c.*"))


def test_a_step_has_the_time_at_which_it_was_published(tmp_store):
    bounds = []
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        for serial in range(50):
            before = time.time()
            append_numbered(writer, [serial], end="terminated" if serial % 10 == 9 else "")
            bounds.append((before, time.time()))
        store.refresh()
        times = np.concatenate([episode.times for episode in store.episodes])
        assert [episode.times.shape for episode in store.episodes] == [(10,)] * 5
        assert times.dtype == np.float64
        # By another clock than the wall's, which runs a little otherwise.
        assert all(low - 0.1 <= at <= high + 0.1 for (low, high), at in zip(bounds, times, strict=True))
        assert (np.diff(times) >= 0).all()
        check_times(store.episodes)
        with dr.open(tmp_store) as fresh:
            found = np.concatenate([episode.times for episode in fresh.episodes])
            assert found.tobytes() == times.tobytes()
    with dr.open(tmp_store) as sealed:
        assert np.concatenate([episode.times for episode in sealed.episodes]).tobytes() == times.tobytes()
        assert sealed.verify(deep=True) == []


def test_each_append_of_a_lone_writer_reads_the_clock_once(tmp_store, ticks):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer() as writer:
        for serial in range(20):
            append_numbered(writer, [serial], end="terminated" if serial % 5 == 4 else "")
            assert len(ticks) == serial + 2
        writer.append(np.zeros(3), 0, 0.0, False, serial=20)
        writer.end_episode(np.zeros(3))
        assert len(ticks) == 23
    # Those of 5 steps each with a final observation, at the time of the last step; then the cut one.
    ended = [at for i in (2, 7, 12, 17) for at in (*range(i, i + 5), i + 4)]
    assert rows(tmp_store) == [[100 * at for at in [*ended, 22, 23]]]


@pytest.mark.parametrize("segment_steps", [None, "episode"])
def test_the_rows_of_a_whole_episode_follow_each_other_by_the_nanosecond(tmp_store, ticks, segment_steps):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=segment_steps) as store:
        with store.writer() as writer:
            obs = np.zeros((8, 3), np.float32)
            writer.append_episode(obs, np.arange(7), np.zeros(7), terminated=True, serial=np.arange(7))
            writer.append_episode(obs[:7], np.arange(7), np.zeros(7), terminated=False, serial=np.arange(7))
        store.refresh()
    first, *rest = [rows(tmp_store)] if segment_steps is None else [rows(tmp_store), rows(tmp_store, 1)]
    second = 300 if segment_steps is None else 400
    assert [*first[0], *(rest[0][0] if rest else [])] == [*range(200, 208), *range(second, second + 8)]


def test_the_lanes_of_a_call_follow_each_other_by_the_nanosecond(tmp_store, ticks):
    ends, none = np.array([False, True, False]), np.zeros(3, bool)
    obs = np.zeros((3, 3), np.float32)
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256) as store, store.writer(num_envs=3) as writer:
        for step in range(6):
            mask = np.array([True, True, step != 3])
            ended = ends if step == 2 else none
            writer.append(obs, np.arange(3), np.zeros(3), ended, none, obs, mask, serial=np.full(3, step))
        assert len(ticks) == 7
        writer.end_episode(obs)
        assert len(ticks) == 8
    steps = [2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 4, 5, 6, 7, 8], [2, 3, 4, 6, 7, 8]
    behind = 100 * 8  # the row that cuts an episode has no step
    assert rows(tmp_store) == [[100 * at + i * (100 * at < behind) for at in lane] for i, lane in enumerate(steps)]


def test_times_of_a_vector_never_decrease_by_a_clock_that_stands_still(tmp_store, monkeypatch):
    monkeypatch.setattr("diskreplay.writing.episode_writer.clock_ns", lambda: 100)
    obs, none = np.zeros((3, 3), np.float32), np.zeros(3, bool)
    with dr.create(tmp_store, serial_schema()) as store:
        with store.writer(num_envs=3) as writer:
            for step in range(4):
                ends = none | (step == 1)
                writer.append(obs, np.arange(3), np.zeros(3), ends, none, obs, serial=np.full(3, step))
        times = [[100 + lane + 3 * step for step in (0, 1, 1, 2, 3)] for lane in range(3)]
        assert [lane[:5] for lane in rows(tmp_store)] == times
        assert store.verify(deep=True) == []


def test_a_final_observation_that_sealing_makes_a_row_has_the_time_of_sealing(tmp_store):
    code = """
import os, signal, sys
import numpy as np, diskreplay as dr
writer = dr.open(sys.argv[1], "a").writer()
for serial in range(9):
    writer.append(np.zeros(3), 0, 0.0, False, next_obs=np.zeros(3), serial=serial)
os.kill(os.getpid(), signal.SIGKILL)
"""
    dr.create(tmp_store, serial_schema()).close()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_store)], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    with dr.open(tmp_store, "a"):
        pass
    ((*steps, final),) = rows(tmp_store)
    assert len(steps) == 9
    assert steps[-1] < before < final
    assert attributes_of(segment_of(tmp_store))["times"] == [steps[0], final]
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []


def test_salvage_takes_no_row_whose_time_never_got_to_the_disk(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema()) as store, store.writer(durability="none") as writer:
        append_numbered(writer, range(5))
        writer.flush()
        for first in (5, 10):
            append_numbered(writer, range(first, first + 5))
        writer._episode_writer.rotation.abandon(seal=False)
    with open(tmp_store / "segments/00000000/time/c.0.0", "r+b") as file:
        file.seek(8 * 13)  # the second step of the last episode: those before have a row more each
        file.write(bytes(8))
    monkeypatch.setattr("diskreplay.segments.files.machine.boot_id", lambda: "another")
    for module in ("segments.marks", "segments.sealing", "integrity.verify.check_attributes"):
        monkeypatch.setattr(f"diskreplay.{module}.boot_id", lambda: "another")
    with dr.open(tmp_store, "a") as store:
        assert len(store) == 5
        store.repair(salvage=True)
        store.refresh()
        assert [len(episode) for episode in store.episodes] == [5, 5, 1]
        assert [problem.kind for problem in store.verify(deep=True)] == ["unproven"]


@pytest.mark.parametrize("hours", [-1, 1])
def test_segments_of_a_boot_share_a_clock_though_somebody_sets_the_wall_clock(tmp_store, monkeypatch, hours):
    with dr.create(tmp_store, serial_schema(), segment_steps=5) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + hours * 3600 * 10**9)
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        for first in range(5, 20, 5):
            append_numbered(writer, range(first, first + 5))
    assert len({attributes_of(segment_of(tmp_store, number))["clock"]["wall"] for number in range(4)}) == 1
    with dr.open(tmp_store) as store:
        times = np.concatenate([episode.times for episode in store.episodes])
        check_times(store.episodes)
    assert (np.diff(times) >= 0).all()
    assert times[-1] - times[0] < 60


@pytest.mark.parametrize("sealed", [True, False])
def test_after_a_boot_with_the_wall_clock_set_back_what_is_written_is_newer(tmp_store, monkeypatch, sealed):
    with dr.create(tmp_store, serial_schema(), capacity=5, segment_steps=5) as store:
        writer = store.writer()
        append_numbered(writer, range(5))
        if sealed:
            writer.close()
        else:
            writer._episode_writer.rotation.abandon(seal=False)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
    monkeypatch.setattr("diskreplay.segments.files.machine.boot_id", lambda: "another")
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        append_numbered(writer, range(5, 10))
        store.refresh()
        assert serials(store) == [5, 6, 7, 8, 9]


def test_the_kit_finds_times_that_fall_or_are_still_to_come(tmp_store):
    model = ModelStore()
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        double = model.writer()
        for one in (writer, double):
            append_numbered(one, range(5))
    with dr.open(tmp_store) as store:
        check_store(store, model)
    for wall, value in ((0, 1), (1 << 61, None)):
        with open(tmp_store / "segments/00000000/time/c.0.0", "rb") as file:
            whole = file.read()
        path = tmp_store / "segments/00000000/time/c.0.0"
        path.chmod(0o644)
        changed = np.frombuffer(whole, "<i8").copy()
        changed[3 if value else slice(0, 6)] = value or wall
        path.write_bytes(changed.tobytes())
        with dr.open(tmp_store) as store, pytest.raises(AssertionError, match="fall in" if value else "in the future"):
            check_store(store, model)
        path.write_bytes(whole)
