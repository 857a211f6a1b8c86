"""What is left when a writer dies, a disk is full, a machine boots, or a process forks."""

import contextlib
import errno
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from functools import partial

import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.crash.injection import Interrupt
from tests.testing.inner import seal_together
from tests.testing.on_disk import is_locked
from tests.testing.support import REPOSITORY, append_numbered, serial_schema, wait_until

ENDLESS = """
import sys
import numpy as np
import diskreplay as dr
writer = dr.open(sys.argv[1], "a").writer(num_envs=int(sys.argv[2]) or None)
lanes = int(sys.argv[2])
lead = (lanes,) if lanes else ()
t = 0
while True:
    obs = np.full((*lead, 3), t, np.float32)
    end = np.full(lead, t % 7 == 6) if lanes else t % 7 == 6
    number = np.full(lead, t) if lanes else t
    writer.append(obs, number, number, end, next_obs=obs + 1, serial=number)
    t += 1
    print(t, flush=True)
"""


def lock_of(store, number=0):
    return store.path / "segments" / f"{number:08d}" / "committed" / "lock"


def counter(store, name, number=0):
    return np.fromfile(store.path / "segments" / f"{number:08d}" / name / "c.0", "<i8").tolist()


def first_refused(append, first):
    """Append numbered steps until the disk is full; return the number that was refused."""
    for number in range(first, first + 5000):
        try:
            append(number)
        except dr.StorageFull:
            with pytest.raises(dr.StorageFull, match="free some and repeat the call"):
                append(number)
            return number
    raise AssertionError("the disk was never full")


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("steps", [1, 10, 300])
def test_a_killed_writer_loses_nothing_it_committed(store, lanes, steps):
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(store.path), str(lanes)], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        told = 0
        while told < steps:
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
    assert not is_locked(lock_of(store))

    with dr.open(store.path, "a") as recovered:
        recovered.close()
    with dr.open(store.path) as reader:
        assert [s["state"] for s in reader.info()["segments"]] == ["sealed"]
        by_lane = {}
        for episode in reader.episodes:
            by_lane.setdefault(episode.lane, []).append(episode)
        assert sorted(by_lane) == list(range(max(lanes, 1)))
        for episodes in by_lane.values():
            serials = np.concatenate([e["serial"] for e in episodes])
            assert len(serials) >= told
            assert serials.tolist() == list(range(len(serials)))
            assert all(e.terminated != e.cut for e in episodes)
            # A step is published before the observation behind it: the writer may have been killed in between.
            if len(episodes[-1].obs) == len(episodes[-1]):
                assert episodes.pop().cut
            assert all(len(e.obs) == len(e) + 1 and e.obs[-1][0] == e["serial"][-1] + 1 for e in episodes)


@pytest.mark.parametrize("call", ["posix_fallocate", "ftruncate", "rename"])
def test_a_full_disk_refuses_the_row_and_loses_nothing(store, monkeypatch, call):
    with store.writer() as writer:
        append_numbered(writer, range(500), end="open")
        real = getattr(os, call)
        full = [True]

        def refuse(*args, **kwargs):
            if full[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, call, refuse)
        serial = first_refused(lambda serial: append_numbered(writer, [serial], end="open"), 500)
        store.refresh()
        assert [len(e) for e in store.episodes] == [serial]
        with pytest.raises(dr.StorageFull):
            append_numbered(writer, [serial], end="open")
        full[0] = False
        append_numbered(writer, range(serial, serial + 10))
        store.refresh()

        assert [e["serial"].tolist() for e in store.episodes] == [list(range(serial + 10))]
        assert not list(store.path.rglob(".new-*"))
        # The shape of an array reaches over every chunk, also over one whose creation failed at the shape.
        segment = zarr.open_group(store.path, mode="r")["segments/00000000"]
        assert segment["extra/serial"][0, : serial + 10].tolist() == list(range(serial + 10))


def test_a_full_disk_refuses_a_new_segment_and_the_writer_goes_on_later(store, monkeypatch):
    with store.writer() as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(dr.StorageFull):
                append_numbered(writer, [0], end="open")
        assert not list((store.path / "segments").glob("0*"))
        assert not list((store.path / "counters").glob("new-*"))
        append_numbered(writer, range(3))
        store.refresh()

        assert [len(e) for e in store.episodes] == [3]


def test_a_vector_step_on_a_full_disk_is_written_for_no_lane(store, monkeypatch):
    def step(t):
        numbers = np.full(4, t)
        writer.append(np.full((4, 3), t), numbers, numbers, numbers < 0, serial=numbers)

    with store.writer(num_envs=4) as writer:
        step(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            done = first_refused(step, 1) - 1
        store.refresh()
        assert {len(e) for e in store.episodes} == {done + 1}
        step(done + 1)
        store.refresh()

        assert {len(e) for e in store.episodes} == {done + 2}


def test_a_copy_of_a_store_that_is_written_shows_only_what_was_flushed(store, tmp_path):
    with store.writer(durability=3600.0) as writer:
        append_numbered(writer, range(3))
        writer.flush()
        append_numbered(writer, range(3, 8))
        shutil.copytree(store.path, tmp_path / "copy")
        with dr.open(tmp_path / "copy") as copy:
            assert [e["serial"].tolist() for e in copy.episodes] == [[0, 1, 2]]
            assert len(copy.episodes[0].obs) == 4


def test_durability_episode_syncs_at_each_end(store):
    with store.writer(durability="episode") as writer:
        append_numbered(writer, range(3))
        assert counter(store, "durable") == [4]
        append_numbered(writer, range(3, 5), end="open")
        assert counter(store, "durable") == [4]
        writer.end_episode()
        assert counter(store, "durable") == counter(store, "committed") == [7]


def test_durability_in_seconds_is_kept_in_the_background(store):
    with store.writer(durability=0.01) as writer:
        append_numbered(writer, range(3), end="open")
        wait_until(lambda: counter(store, "durable") == [3])
        assert counter(store, "committed") == [3]
    with store.writer(durability=3600.0) as writer:
        append_numbered(writer, range(3), end="open")
        assert counter(store, "durable", 1) == [0]


def failing(monkeypatch, code, call="fdatasync", *, once=False):
    """Let every sync fail from now on, or another call, or its next one; return an event that is set when one did."""
    failed, real = threading.Event(), getattr(os, call)

    def fail(*args):
        if once and failed.is_set():
            return real(*args)
        failed.set()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    return failed


def append_until_told(writer, serials):
    """Append numbered steps until what failed in the background is raised; the numbers are taken from an iterator."""
    for serial in serials:
        append_numbered(writer, [serial], end="open")
        time.sleep(0.001)  # the thread that failed takes an instant to tell


def test_a_sync_that_fails_in_the_background_is_raised_by_the_next_append_and_ends_the_writer(store, monkeypatch):
    writer = store.writer(durability=0.01)
    append_numbered(writer, range(3), end="open")
    with monkeypatch.context() as patch:
        failed = failing(patch, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            append_until_told(writer, itertools.count(3))
        assert failed.is_set()
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [3])
    writer.close()
    store.refresh()
    assert len(store) >= 3
    assert not store.snapshot.sealed.any()


def test_what_nobody_foresaw_in_the_background_is_raised_by_the_next_append_too(store, monkeypatch):
    writer = store.writer(durability=0.01)
    failed = threading.Event()

    def fail(*_):
        failed.set()
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("diskreplay.segments.marks.new_rows_crc", fail)
        with pytest.raises(MemoryError, match="no memory"):
            append_until_told(writer, itertools.count())
        assert failed.is_set()
    with contextlib.suppress(dr.WriterClosed):
        writer.close()


def test_where_no_thread_could_be_started_the_next_writer_is_marked(store, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            store.writer(durability=0.01)
    with store.writer(durability=0.01) as writer:
        append_numbered(writer, range(3), end="open")
        wait_until(lambda: counter(store, "durable", max(s["number"] for s in store.info()["segments"])) == [3])


def test_without_room_to_mark_one_append_raises_and_the_next_goes_on(store, monkeypatch):
    writer = store.writer(durability=0.01)
    append_numbered(writer, [0], end="open")
    with monkeypatch.context() as patch:
        failed = failing(patch, errno.ENOSPC, "pwrite", once=True)  # a second time would be told to another append
        serials = itertools.count(1)
        with pytest.raises(dr.StorageFull, match="a power loss would take them"):
            append_until_told(writer, serials)
        assert failed.is_set()
    refused = next(serials) - 1
    append_numbered(writer, [refused], end="open")
    wait_until(lambda: counter(store, "durable") == counter(store, "committed"))
    writer.close()


@pytest.mark.parametrize("later", [errno.ENOSPC, None])
def test_after_a_sync_that_failed_in_the_background_no_mark_is_made_and_no_later_error_hides_it(
    store, monkeypatch, later
):
    writer = store.writer(durability=0.01)
    append_numbered(writer, range(3), end="open")
    wait_until(lambda: counter(store, "durable") == [3])
    with monkeypatch.context() as patch:
        failed = failing(patch, errno.EIO)
        append_numbered(writer, [3], end="open")
        wait_until(failed.is_set)
    with monkeypatch.context() as patch:
        if later is not None:
            failing(patch, later, "pwrite")
        time.sleep(0.2)  # many times the interval of marks
    assert counter(store, "durable") == [3]
    with pytest.raises(OSError, match="Input/output"):
        append_until_told(writer, itertools.count(4))
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [4])


def test_a_segment_whose_sync_failed_in_the_background_is_sealed_by_the_next_store_only(tmp_store, monkeypatch):
    sync, failed, has_left = os.fdatasync, threading.Event(), threading.Event()

    def fail_in_first(fd):
        if "/segments/00000000/" in os.readlink(f"/proc/self/fd/{fd}"):
            has_left.wait()
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(fd)

    seal_together(monkeypatch)
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        writer = store.writer(durability=0.2)
        append_numbered(writer, [0], end="open")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail_in_first)
            append_numbered(writer, [1, 2])
            append_numbered(writer, [3], end="open")  # begins another segment
            has_left.set()
            wait_until(failed.is_set)
        with pytest.raises(OSError, match="Input/output"):
            append_until_told(writer, itertools.count(4))
    with dr.open(tmp_store, mode="r") as store:
        assert [one["state"] for one in store.info()["segments"]] == ["dead", "dead"]
    monkeypatch.undo()
    with dr.open(tmp_store, mode="a") as store:
        wait_until(lambda: {one["state"] for one in store.info()["segments"]} == {"sealed"})
        assert next(iter(store.episodes))["serial"].tolist() == [0, 1, 2]


def test_a_writer_whose_sync_failed_is_not_sealed_by_its_process_when_it_is_dropped(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema()) as store:
        writer = store.writer(durability=0.01)
        append_numbered(writer, [0], end="open")
        with monkeypatch.context() as patch:
            failed = failing(patch, errno.EIO)
            append_numbered(writer, [1], end="open")
            wait_until(failed.is_set)
            time.sleep(0.1)  # the thread that failed takes an instant to tell
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del writer
            gc.collect()
            wait_until(lambda: not is_locked(lock_of(store)))
    with dr.open(tmp_store, mode="r") as store:
        assert [one["state"] for one in store.info()["segments"]] == ["dead"]


def failing_when_told(monkeypatch):
    """Let the next sync wait and then fail; return an event that is set when it waits, and one that lets it fail."""
    waits, may_fail, sync = threading.Event(), threading.Event(), os.fdatasync

    def fail(fd):
        if waits.is_set():
            return sync(fd)
        waits.set()
        may_fail.wait()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    return waits, may_fail


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_call_that_waits_for_a_mark_raises_that_its_sync_failed(tmp_store, monkeypatch, call):
    with dr.create(tmp_store, serial_schema()) as store:
        writer = store.writer(durability=0.01)
        append_numbered(writer, range(3), end="open")
        wait_until(lambda: counter(store, "durable") == [3])
        waits, may_fail = failing_when_told(monkeypatch)
        append_numbered(writer, [3], end="open")
        wait_until(waits.is_set)
        threading.Timer(0.3, may_fail.set).start()
        with pytest.raises(OSError, match="Input/output"):
            getattr(writer, call)()
        assert counter(store, "durable") == [3]
    with dr.open(tmp_store, mode="r") as store:
        assert [one["state"] for one in store.info()["segments"]] == ["dead"]


def test_close_ends_if_the_call_that_it_waits_for_fails(store, monkeypatch):
    writer = store.writer(durability="none")
    append_numbered(writer, range(3), end="open")
    waits, may_fail = failing_when_told(monkeypatch)

    def flush():
        with pytest.raises(OSError, match="Input/output"):
            writer.flush()

    def close():
        with contextlib.suppress(OSError):
            writer.close()

    threads = [threading.Thread(target=call, daemon=True) for call in (flush, close)]
    threads[0].start()
    wait_until(waits.is_set)
    threads[1].start()
    time.sleep(0.2)  # until it waits
    may_fail.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [3])


LIMITER = dr.RateLimiter(samples_per_insert=1.0, min_size=1, error_buffer=2.0)


def test_an_append_that_waits_for_a_limiter_raises_that_a_sync_failed_in_the_background(store, monkeypatch):
    writer = store.writer(limiter=LIMITER, durability=0.5)
    append_numbered(writer, [0], end="open")
    with monkeypatch.context() as patch:
        failing(patch, errno.EIO, once=True)
        with pytest.raises(OSError, match="Input/output"):
            append_until_told(writer, itertools.count(1))
    with contextlib.suppress(OSError, dr.WriterClosed):  # a call that waited has not closed the writer
        append_numbered(writer, [9])
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [9])


def test_an_append_that_waits_for_a_limiter_goes_on_if_a_mark_finds_no_room_and_the_next_raises(store, monkeypatch):
    writer, serials = store.writer(limiter=LIMITER, durability=0.5), itertools.count(1)
    append_numbered(writer, [0], end="open")
    with monkeypatch.context() as patch, dr.Sampler(store, dr.Transitions(), batch_size=1, limiter=LIMITER) as sampler:
        failed = failing(patch, errno.ENOSPC, "pwrite", once=True)

        def draw():
            failed.wait()
            time.sleep(0.2)  # the append waits and looks at the writer meanwhile
            sampler.sample()

        drawing = threading.Thread(target=draw)
        drawing.start()
        with pytest.raises(dr.StorageFull, match="a power loss would take them"):
            append_until_told(writer, serials)
        drawing.join()
        sampler.sample()
    refused = next(serials) - 1
    append_numbered(writer, [refused])
    writer.close()
    store.refresh()
    assert [e["serial"].tolist() for e in store.episodes] == [[*range(refused + 1)]]


@pytest.mark.parametrize("lanes", [None, 2])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("following", ["append", "end_episode", "flush"])
def test_without_room_to_mark_an_episode_the_next_call_raises_and_no_step_is_there_twice(
    store, monkeypatch, lanes, whole, following
):
    writer = store.writer(lanes, durability="episode")
    shape = (1,) if whole else () if lanes is None else (lanes,)

    def append(serial, ends=True):
        number = np.full(shape, serial)
        obs, given = np.full((*shape, 3), serial, np.float32), {"action": number, "reward": number, "serial": number}
        if whole:
            writer.append_episode(*[0] * (lanes is not None), obs, **given, terminated=True)
        else:
            writer.append(obs, **given, terminated=np.full(shape, ends))

    follow = partial(append, 2, False) if following == "append" else getattr(writer, following)
    append(0)
    with monkeypatch.context() as patch:
        failed = failing(patch, errno.ENOSPC, "pwrite")
        append(1)
        assert failed.is_set()
        for _ in range(2):
            with pytest.raises(dr.StorageFull, match="a power loss would take them"):
                follow()
    rows = counter(store, "committed")
    follow()
    assert all(now >= before for now, before in zip(counter(store, "durable"), rows, strict=True))
    append(3)
    assert counter(store, "durable") == counter(store, "committed")
    writer.close()
    store.refresh()
    for lane in range(1 if whole or lanes is None else lanes):
        found = [serial for e in store.episodes if e.lane == lane for serial in e["serial"]]
        assert found == [0, 1, *[2] * (following == "append"), 3]


def test_an_episode_without_room_for_its_mark_is_durable_when_the_writer_closed(store, monkeypatch):
    writer = store.writer(durability="episode")
    with monkeypatch.context() as patch:
        failing(patch, errno.ENOSPC, "pwrite")
        append_numbered(writer, range(3))
        assert counter(store, "durable") == [0]
    writer.close()
    store.refresh()
    assert store.snapshot.sealed.all()
    assert [e["serial"].tolist() for e in store.episodes] == [[0, 1, 2]]


def test_a_writer_whose_sync_fails_closes_and_promises_nothing_more(store, monkeypatch):
    writer = store.writer()
    append_numbered(writer, range(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            writer.flush()
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [3])
    store.refresh()

    assert [len(e) for e in store.episodes] == [3]


def test_flush_covers_segments_that_the_writer_has_left(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10) as store, store.writer() as writer:
        for first in range(0, 40, 4):
            append_numbered(writer, range(first, first + 4))
        writer.flush()
        for info in store.info()["segments"]:
            assert counter(store, "durable", info["number"]) == counter(store, "committed", info["number"])


def test_a_refresh_that_is_interrupted_loses_nothing(store, monkeypatch):
    with store.writer() as writer, dr.open(store.path) as reader:
        for i in range(3):
            append_numbered(writer, range(10 * i, 10 * i + 5))
        with monkeypatch.context() as patch:
            extend_to = "diskreplay.reading.episode_log.EpisodeLog.extend_to"
            patch.setattr(extend_to, lambda *a: (_ for _ in ()).throw(Interrupt))
            with pytest.raises(Interrupt):
                reader.refresh()
        reader.refresh()

        assert [e["serial"][0] for e in reader.episodes] == [0, 10, 20]


def test_what_dead_processes_left_half_removed_is_cleaned_up(store):
    (store.path / "counters" / "old-00000007" / "obs").mkdir(parents=True)
    with dr.open(store.path, "a"):
        assert not list((store.path / "counters").glob("old-*"))


@pytest.mark.slow
def test_a_reader_lets_go_of_every_chunk_of_an_evicted_segment(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=100, segment_steps=50, chunk_bytes=64) as store:
        with store.writer() as writer, dr.open(tmp_store) as reader:
            for first in range(0, 2000, 5):
                append_numbered(writer, range(first, first + 5))
                reader.refresh()
                assert reader.episodes[0].obs is not None
        with dr.open(tmp_store, "a"):
            pass
        with open("/proc/self/maps") as maps:
            deleted = sum(str(tmp_store) in line and "deleted" in line for line in maps)
        assert deleted == 0


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_reader_learns_that_a_segment_was_sealed(store, monkeypatch, is_counted):
    if not is_counted:  # whoever sealed it died before that
        monkeypatch.setattr(store._sealer, "_after", lambda: None)
    writer = store.writer()
    with dr.open(store.path) as reader:
        append_numbered(writer, range(5), end="open")
        reader.refresh()
        assert reader.episodes[0].ended == "open"
        writer.close()
        if not is_counted:
            assert reader.refresh() == 0
            monkeypatch.setattr("diskreplay.reading.follower.time.monotonic", lambda: float("inf"))
        reader.refresh()
        assert reader.episodes[0].ended == "cut"
