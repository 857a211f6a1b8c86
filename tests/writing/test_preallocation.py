"""The segment that is made before it is needed: nobody sees it, and whoever dies with it leaves nothing wrong."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.testing.on_disk import is_locked
from tests.testing.support import REPOSITORY, append_numbered, digest, serial_schema, wait_until
from tests.writing import inner
from tests.writing.inner import CLOSE_LANES

STEPS = 40  # of a segment
WITHOUT_WAITING = "from diskreplay.writing import rotation; rotation.LEAST_QUARTER_S = 0.0\n"


@pytest.fixture(autouse=True)
def _ahead_at_once(monkeypatch):
    """Make the next segment however soon the present one is a quarter full."""
    monkeypatch.setattr("diskreplay.writing.rotation.LEAST_QUARTER_S", 0.0)


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=STEPS) as store:
        yield store


def drafts(store):
    """The folders of segments that were made ahead, once their makers are done."""
    for writer in list(store._writers):
        thread = writer._episode_writer.rotation.preallocator._thread
        if thread is not None:
            thread.join()
    return sorted((store.path / "counters").glob("next-*"))


def serials(store):
    store.refresh()
    return [int(serial) for episode in store.episodes for serial in episode["serial"]]


def half_fill(writer):
    """Append until the segment after the present one is being made; return the next serial."""
    append_numbered(writer, range(22))
    append_numbered(writer, range(22, 24))
    return 24


def test_a_segment_that_is_made_ahead_is_used_and_nothing_is_left(store):
    used = 0
    with store.writer() as writer:
        for first in range(0, 400, 4):
            append_numbered(writer, range(first, first + 4))
            if made := drafts(store):
                used += 1
                assert len(made) == 1
                assert is_locked(made[0] / "committed" / "lock")
    assert used >= 8
    assert drafts(store) == []
    assert serials(store) == list(range(400))
    info = store.info()
    assert [segment["state"] for segment in info["segments"]] == ["sealed"] * len(info["segments"])
    assert {segment["writer"] for segment in info["segments"]} == {0}


def test_lanes_move_into_a_segment_that_was_made_ahead(tmp_store):
    lanes = 5
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=100) as store:
        used = 0
        with store.writer(num_envs=lanes) as writer:
            rows = np.arange(lanes)
            for t in range(200):
                obs = np.repeat(rows[:, None] * 1000.0 + t, 3, 1)
                ends = (t + rows) % 7 == 6
                writer.append(obs, rows, rows * 1.0, ends, ends & False, next_obs=obs + 1, serial=rows * 1000 + t)
                used += bool(drafts(store))
        store.refresh()
        by_lane = [[] for _ in rows]
        for episode in store.episodes:
            by_lane[episode.lane] += episode["serial"].tolist()
        assert used
        assert drafts(store) == []
        assert by_lane == [list(range(1000 * i, 1000 * i + 200)) for i in rows]


def test_nobody_sees_it_before_it_is_used(store):
    with store.writer() as writer:
        half_fill(writer)
        assert len(drafts(store)) == 1
        with dr.open(store.path) as reader:
            assert len(reader) == 24
            assert [s["number"] for s in reader.info()["segments"]] == [0]
            assert [w["segments"] for w in reader.info()["writers"]] == [1]
        walked = [name for name, _ in zarr.open_group(store.path, mode="r").members(max_depth=None)]
        assert not [name for name in walked if "next-" in name]
        # A process that may clean up leaves what a living writer made.
        with dr.open(store.path, "a"):
            assert len(drafts(store)) == 1
        append_numbered(writer, range(24, 80))
    assert serials(store) == list(range(80))


KILLED_AHEAD = (
    WITHOUT_WAITING
    + """
import os, sys
import diskreplay as dr
from tests.testing.support import append_numbered
store = dr.open(sys.argv[1], "a")
writer = store.writer()
append_numbered(writer, range(22))
append_numbered(writer, range(22, 24))
writer._episode_writer.rotation.preallocator._thread.join()
print("ahead", flush=True)
sys.stdin.readline()
"""
)


@pytest.fixture
def killed_ahead(store):
    """The store after its writer was killed with a segment made ahead."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_AHEAD, str(store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    with child:
        assert child.stdout.readline() == b"ahead\n"
        child.send_signal(signal.SIGKILL)
    return store.path


def test_a_writer_killed_between_making_and_using_one_leaves_nothing_wrong(killed_ahead):
    (left,) = (killed_ahead / "counters").glob("next-*")
    before = digest(killed_ahead)
    with dr.open(killed_ahead) as reader:
        assert serials(reader) == list(range(24))
        assert [s["state"] for s in reader.info()["segments"]] == ["dead"]
        assert [w["state"] for w in reader.info()["writers"]] == ["dead"]
    assert digest(killed_ahead) == before  # mode "r" writes nothing
    assert left.exists()
    with dr.open(killed_ahead, "a") as store:
        assert not left.exists()
        store.close()
    with dr.open(killed_ahead, "a") as store:
        assert [s["state"] for s in store.info()["segments"]] == ["sealed"]
        with store.writer() as writer:
            append_numbered(writer, range(24, 100))
        assert serials(store) == list(range(100))
        assert [s["number"] for s in store.info()["segments"]] == [0, 1]


@pytest.mark.parametrize("done", [(), ("committed",), ("committed", "committed/lock"), ("committed", "obs")])
def test_a_writer_killed_while_making_one_leaves_nothing_wrong(store, done):
    left = store.path / "counters" / "next-0-1-1"
    left.mkdir()
    for name in done:
        (left / name).touch() if name.endswith("lock") else (left / name).mkdir()
    with dr.open(store.path, "a"):
        assert not left.exists()


def test_one_that_is_only_just_begun_is_not_taken_from_under_its_maker(store, monkeypatch):
    """Between the folder and its lock nobody can tell the maker from a dead one: the maker gives way, and is whole."""
    real = os.mkdir

    def cleaned(path, *args):
        real(path, *args)
        if str(path).endswith("committed") and "next-" in str(path):
            dr.open(store.path, "a").close()

    monkeypatch.setattr(os, "mkdir", cleaned)
    with store.writer() as writer:
        for first in range(0, 200, 4):
            append_numbered(writer, range(first, first + 4))
        assert drafts(store) == []
    assert serials(store) == list(range(200))


def test_close_removes_it(store):
    writer = store.writer()
    half_fill(writer)
    assert len(drafts(store)) == 1
    writer.close()

    assert list((store.path / "counters").glob("next-*")) == []
    assert serials(store) == list(range(24))


def test_one_that_somebody_removed_is_made_again(store):
    with store.writer() as writer:
        at = half_fill(writer)
        (draft,) = drafts(store)
        draft.rename(store.path / "elsewhere")
        append_numbered(writer, range(at, 80))
        append_numbered(writer, range(80, 84))
    assert serials(store) == list(range(84))


def test_one_that_cannot_be_made_is_made_when_it_is_needed(store, monkeypatch):
    refused = []

    def full(*args):
        refused.append(args)
        raise dr.StorageFull(errno.ENOSPC, "full")

    monkeypatch.setattr("diskreplay.writing.rotation.draft_segment", full)
    with store.writer() as writer:
        for first in range(0, 200, 4):
            append_numbered(writer, range(first, first + 4))
    assert refused
    assert serials(store) == list(range(200))


@pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EMFILE])
def test_an_error_of_its_move_into_the_store_is_raised_only_if_it_lasts(store, monkeypatch, kind):
    real, refused = os.rename, []

    def rename(source, target, **kwargs):
        if Path(target).parent.name == "segments" and len(refused) < refusals:
            refused.append(target)
            raise OSError(kind, os.strerror(kind))
        return real(source, target, **kwargs)

    with store.writer() as writer:
        at = half_fill(writer)
        assert len(drafts(store)) == 1
        monkeypatch.setattr(os, "rename", rename)
        refusals = 1
        while not (refused and drafts(store)):
            append_numbered(writer, [at])
            at += 1
        assert len(refused) == 1
        refusals = 1000
        with pytest.raises(OSError, match=rf"^\[Errno {kind}\]"):
            each_alone(writer, range(at, 200))
        assert len(refused) == 3
    refusals = 0
    left = range(len(serials(store)), 200)
    with store.writer() as writer:
        each_alone(writer, left)
    assert serials(store) == list(range(200))


def each_alone(writer, numbers):
    for serial in numbers:
        append_numbered(writer, [serial])


@pytest.mark.parametrize("whole", [False, True])
def test_on_a_full_disk_it_gives_way_to_the_steps(tmp_store, monkeypatch, whole):
    real = os.posix_fallocate
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=STEPS) as store, store.writer() as writer:
        at = half_fill(writer)
        assert len(drafts(store)) == 1

        def full(*args):
            if any((store.path / "counters").glob("next-*")):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        monkeypatch.setattr(os, "posix_fallocate", full)
        if whole:
            rows = np.arange(at, 35)
            obs = np.repeat(np.arange(at, 36)[:, None], 3, 1).astype(np.float32)
            writer.append_episode(obs, rows, rows * 1.0, terminated=True, serial=rows)
        else:
            append_numbered(writer, range(at, 35))
        assert drafts(store) == []
        append_numbered(writer, range(35, 100))
        assert serials(store) == list(range(100))


def test_a_forked_child_leaves_it_to_its_parent(store):
    with store.writer() as writer:
        at = half_fill(writer)
        (draft,) = drafts(store)
        pid = os.fork()
        if pid == 0:  # leaves at once, whatever happens: this process is a copy of the test runner
            refused = 0
            try:
                append_numbered(writer, [at])
            except dr.WriterClosed:
                refused = 1
            writer.close()
            store.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert is_locked(draft / "committed" / "lock")
        append_numbered(writer, range(at, 80))
        append_numbered(writer, range(80, 90))
    assert serials(store) == list(range(90))


def test_short_segments_and_those_of_one_episode_are_not_made_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("diskreplay.writing.rotation.LEAST_QUARTER_S", 3600.0)
    request = "diskreplay.writing.rotation.Preallocator.request"
    monkeypatch.setattr(request, lambda *args: pytest.fail("was asked for"))
    for name, steps in (("short", STEPS), ("episode", "episode")):
        with dr.create(tmp_path / name, serial_schema(), segment_steps=steps) as store, store.writer() as writer:
            for first in range(0, 200, 4):
                append_numbered(writer, range(first, first + 4))
        with dr.open(tmp_path / name) as reader:
            assert serials(reader) == list(range(200))


LANES, CHUNK_ROWS = 8, 16  # rows of a chunk of obs


def append_until_a_chunk_is_ahead(store):
    """Append almost a chunk of rows to each of some lanes, and wait until the next one is there; return the writer."""
    writer, lanes = store.writer(num_envs=LANES), np.arange(LANES)
    for t in range(CHUNK_ROWS - 2):
        obs = np.repeat(lanes[:, None] * 1000.0 + t, 3, 1)
        writer.append(obs, lanes, lanes * 1.0, lanes < 0, serial=lanes * 1000 + t)
    wait_until(chunk_ahead(store).exists)
    return writer


def chunk_ahead(store):
    return store.path / "segments" / "00000000" / "obs" / "c.0.1.0"


def create_for_lanes(path):
    return dr.create(path, serial_schema(), chunk_bytes=LANES * CHUNK_ROWS * 12)


def check_lanes(store):
    assert sorted(serials(store)) == [lane * 1000 + t for lane in range(LANES) for t in range(CHUNK_ROWS - 2)]
    assert store.verify(deep=True) == []
    wait_until(lambda: not chunk_ahead(store).exists())  # a dead writer's segment is sealed in the background


def test_the_next_chunk_of_lanes_is_there_before_it_is_needed_and_leaves_if_it_was_not(tmp_store):
    with create_for_lanes(tmp_store) as store:
        with append_until_a_chunk_is_ahead(store), dr.open(tmp_store) as reader:
            assert len(reader) == LANES * (CHUNK_ROWS - 2)
            assert reader.verify() == []
        check_lanes(store)


def test_a_crowd_of_lanes_is_a_chunk_ahead_from_its_second_step_on(tmp_store):
    lanes = np.arange(600)
    with dr.create(tmp_store, serial_schema(), chunk_bytes=7200 * CHUNK_ROWS) as store, store.writer(600) as writer:
        for t in range(2):
            obs = np.full((len(lanes), 3), float(t))
            writer.append(obs, lanes, lanes * 1.0, lanes < 0, serial=lanes + t)
        wait_until(chunk_ahead(store).exists)


def test_the_chunks_of_segments_that_lanes_have_left_are_unmapped_while_the_writer_is_open(tmp_store):
    lanes = np.arange(LANES)

    def mapped():
        return [
            line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_store}/segments/0000" in line
        ]

    with dr.create(tmp_store, serial_schema(), segment_steps=64) as store, store.writer(num_envs=LANES) as writer:
        for t in range(64):
            obs = np.repeat(lanes[:, None] * 1000.0 + t, 3, 1)
            writer.append(obs, lanes, lanes * 1.0, np.full(LANES, t % 4 == 3), serial=lanes * 1000 + t)
        written = {segment["number"] for segment in store.info()["segments"]}
        assert len(written) > 4
        newest = f"segments/{max(written):08}/"
        wait_until(lambda: all(newest in line for line in mapped() if "/obs/" in line))


def chunks_to_write(path, segment):
    """Return the numbers of the chunks of obs that this process has mapped for writing, in a segment."""
    before = f"{path}/segments/{segment:08}/obs/c.0."
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if before in line]
    return {int(line[-1].removeprefix(before).split(".")[0]) for line in lines if "w" in line[1]}


@pytest.mark.parametrize("lanes", [LANES, 600])
def test_chunks_that_no_lane_writes_again_are_unmapped_while_others_are_written(tmp_store, monkeypatch, lanes):
    kernel, gaps = inner.write_lanes(), []

    def noted(*args):
        gaps.append(inner.has_gap(*args))
        kernel(*args)

    monkeypatch.setattr(*inner.IF_MADE, lambda _: noted)
    every, appended = np.arange(lanes), [[] for _ in range(lanes)]
    lone, nobody = every == 0, every < 0
    schema, chunk_bytes = serial_schema(), lanes * CHUNK_ROWS * 12
    with dr.create(tmp_store, schema, chunk_bytes=chunk_bytes, segment_steps=9 * CHUNK_ROWS * lanes) as store:
        with store.writer(num_envs=lanes) as writer:

            def append(steps, mask, ends=nobody):
                for _ in range(steps):
                    t = np.array([len(steps) for steps in appended])
                    obs = np.repeat((every * 10_000.0 + t)[:, None], 3, 1)
                    writer.append(obs, every, t * 1.0, ends, mask=mask, serial=every * 10_000 + t)
                    for lane in np.flatnonzero(mask):
                        appended[lane].append(t[lane])

            append(9 * CHUNK_ROWS + 8, ~nobody)
            append(1, ~nobody, lone)  # then only lane 0 moves to the next segment
            append(5 * CHUNK_ROWS, ~nobody)
            wait_until(lambda: append(1, ~nobody) or min(chunks_to_write(tmp_store, 0)) >= 13, 60)
            wait_until(lambda: append(1, ~nobody) or 3 not in chunks_to_write(tmp_store, 1), 60)
            assert 0 in chunks_to_write(tmp_store, 1)  # the others will begin there
            append(1, ~lone, ~lone)  # they follow lane 0, which is more than four chunks ahead
            append(3 * CHUNK_ROWS, ~nobody)
        store.refresh()
        found = [[] for _ in range(lanes)]
        for episode in store.episodes:
            assert (episode["obs"][: len(episode), 0] == episode["serial"]).all()
            assert (episode["serial"] == episode["reward"] + episode.lane * 10_000).all()
            found[episode.lane] += episode["reward"].tolist()
        assert found == appended
        assert len(store.info()["segments"]) == 2
        assert any(gaps) == (lanes > CLOSE_LANES)  # compiled code writes to both sides of a gap
        assert store.verify(deep=True) == []


def test_a_process_that_dies_with_a_chunk_ahead_loses_nothing(tmp_store):
    create_for_lanes(tmp_store).close()
    killed = (
        "import os, signal, sys\n"
        "import diskreplay as dr\n"
        "from tests.writing.test_preallocation import append_until_a_chunk_is_ahead\n"
        "store = dr.open(sys.argv[1], 'a')\n"
        "writer = append_until_a_chunk_is_ahead(store)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(tmp_store)], cwd=REPOSITORY)
    assert done.returncode == -signal.SIGKILL
    with dr.open(tmp_store, "a") as store:
        check_lanes(store)


def test_lanes_that_are_reserved_for_in_the_background_keep_what_was_appended(tmp_store):
    lanes, steps = 600, 90
    rng = np.random.default_rng(0)
    schema = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"), reward=dr.Field((), "float32"))
    expected = [[] for _ in range(lanes)]
    every = np.arange(lanes)
    with dr.create(tmp_store, schema, chunk_bytes=lanes * 8 * 4, segment_steps=lanes * 25) as store:
        with store.writer(num_envs=lanes) as writer:
            for t in range(steps):
                ends, mask = rng.random(lanes) < 0.1, rng.random(lanes) < 0.9
                obs = np.repeat((every * 100.0 + t)[:, None], 3, 1).astype(np.float32)
                writer.append(obs, every * 100 + t, every * 1.0, ends, mask=mask)
                for lane in np.flatnonzero(mask):
                    expected[lane].append(lane * 100 + t)
        store.refresh()
        found = [[] for _ in range(lanes)]
        for episode in store.episodes:
            actions = episode["action"]
            found[episode.lane] += actions.tolist()
            assert (episode["obs"][: len(actions), 0] == actions).all()
        assert found == expected
        assert len(store.info()["segments"]) > 1
        assert store.verify(deep=True) == []
