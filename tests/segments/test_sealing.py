"""What a sealed segment says of its files, and what sealing leaves of them."""

import errno
import gc
import json
import os
import shutil
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import diskreplay as dr
from tests.segments.test_marks import copy_while_sealed, marked_serials
from tests.testing import inner
from tests.testing.commands import repair
from tests.testing.on_disk import attributes_of, is_locked, segment_of
from tests.testing.support import append_numbered, serial_schema, serials, wait_until

SCHEMA = serial_schema(
    obs={"image": dr.Field((40, 40, 3), "uint8"), "state": dr.Field((2,), "float32")},
    episode={"seed": dr.Field((), "int64")},
)


def write(writer, steps, serial=0):
    """Append an episode one step at a time; wide rows, narrow rows, and a value of the episode."""
    for t in range(steps):
        last = t == steps - 1
        obs = {"image": np.full((40, 40, 3), serial + t, np.uint8), "state": np.full(2, t, np.float32)}
        writer.append(obs, t, 1.0, last, serial=serial + t, episode={"seed": 5} if last else None)


def files(segment):
    """Every file that the format gives a checksum: all but the segment's own zarr.json, its copy, and its lock."""
    found = [file for file in segment.rglob("*") if file.is_file() and file.name not in ("lock", "document")]
    return {str(file.relative_to(segment)): file for file in found if file != segment / "zarr.json"}


@pytest.mark.parametrize("fails", [False, True])
def test_two_threads_finish_a_segment_that_somebody_waits_for(tmp_store, monkeypatch, fails):
    finish, seal = map(inner.real, (inner.FINISH_CHUNK, inner.SEAL_SEGMENTS))
    helped, shared = threading.Event(), []

    def finish_chunk(segment, array, chunk):
        if threading.current_thread().name.startswith("diskreplay-checksums"):
            shared.append(array.path)
            helped.set()
            if fails:
                raise OSError(errno.EIO, "the disk is gone")
        finish(segment, array, chunk)
        assert helped.wait(60)

    inner.share_chunks(monkeypatch)

    def seal_waited_for(root, infos, is_waited_for):
        helped.clear()  # each attempt is shared
        seal(root, infos, None, lambda: True)

    monkeypatch.setattr(*inner.SEAL_SEGMENTS, seal_waited_for)
    with dr.create(tmp_store, SCHEMA, chunk_bytes=4096) as store:
        writer = store.writer()
        write(writer, 50)
        with monkeypatch.context() as patch:
            patch.setattr(*inner.FINISH_CHUNK, finish_chunk)
            with pytest.raises(OSError, match="the disk is gone") if fails else nullcontext():
                writer.close()
    dr.open(tmp_store, "a").close()  # which waits until what was left is sealed
    with dr.open(tmp_store) as store:
        assert shared
        assert store.verify(deep=True) == []
        (segment,) = store.info()["segments"]
        assert (segment["steps"], segment["state"]) == (50, "sealed")


@pytest.mark.parametrize("segment_steps", [None, 20, "episode"])
@pytest.mark.parametrize("chunk_bytes", [4096, 4 << 20])
def test_checksums_are_of_every_file_as_it_is(tmp_store, segment_steps, chunk_bytes):
    with dr.create(tmp_store, SCHEMA, segment_steps=segment_steps, chunk_bytes=chunk_bytes) as store:
        with store.writer() as writer:
            for episode in range(6):
                write(writer, 7, serial=7 * episode)
        segments = sorted((Path(tmp_store) / "segments").glob("0*"))
        assert len(segments) >= 1
        for segment in segments:
            there = attributes_of(segment)
            assert there["sealed"]
            assert there["checksums"] == {
                name: google_crc32c.value(file.read_bytes()) for name, file in files(segment).items()
            }
            assert (segment / "durable/document").read_bytes() == (segment / "zarr.json").read_bytes()
        assert sum(attributes_of(segment)["steps"] for segment in segments) == 42
        rows = [np.fromfile(segments[0] / name / "c.0", "<i8").tolist() for name in ("committed", "durable")]
        assert rows[0] == rows[1]


def test_what_was_begun_behind_the_last_row_is_removed(tmp_store):
    with dr.create(tmp_store, SCHEMA, chunk_bytes=64) as store:
        with store.writer() as writer:
            write(writer, 3)
            segment = Path(tmp_store) / "segments" / "00000000"
            # As a writer leaves it that dies while it creates the chunk of the fourth row.
            writer._episode_writer.lanes[0].segment.reserve(0, 3)
            (segment / "obs" / "image" / ".new-4").write_bytes(b"begun")
            document = json.loads((segment / "obs" / "image" / "zarr.json").read_bytes())
            assert document["shape"][1] == 4

        assert sorted(file.name for file in (segment / "obs" / "image").iterdir()) == [
            *(f"c.0.{chunk}.0.0.0" for chunk in range(3)),
            "zarr.json",
        ]


def test_a_file_that_could_not_be_written_back_keeps_its_segment_from_being_sealed(tmp_store, monkeypatch):
    """Another process's sync of the file system may have been told of it, and this one's then succeeds."""
    failed = []

    def check_written(path):
        if path.endswith("reward/c.0.0"):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    with dr.create(tmp_store, SCHEMA) as store:
        writer = store.writer(durability="none")
        write(writer, 3)
        with monkeypatch.context() as patch:
            patch.setattr(*inner.CHECK_WRITTEN, check_written)
            with pytest.raises(OSError, match="Input/output error"):
                writer.close()
        assert len(failed) == 1  # and no second try, which would find nothing wrong
        assert not attributes_of(tmp_store / "segments/00000000")["sealed"]
        store.refresh()
        assert len(store) == 3
    with dr.open(tmp_store, "a"):
        pass
    assert attributes_of(tmp_store / "segments/00000000")["sealed"]
    assert dr.open(tmp_store).verify(deep=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("segments", [2, 12])
@pytest.mark.parametrize("has_room", [True, False])
def test_segments_that_a_writer_has_left_are_marked_while_they_wait_to_be_sealed(
    tmp_store, monkeypatch, segments, has_room
):
    may_seal, is_postponed, seal_segments = threading.Event(), threading.Event(), inner.real(inner.SEAL_SEGMENTS)

    def seal_late(*args, **kwargs):
        if not has_room and not may_seal.is_set():
            is_postponed.set()
            raise dr.StorageFull(errno.ENOSPC, "no room")
        may_seal.wait()
        seal_segments(*args, **kwargs)

    monkeypatch.setattr(*inner.SEAL_SEGMENTS, seal_late)
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10) as store:
        try:
            with store.writer(durability=0.2) as writer:
                for first in range(0, 10 * segments, 5):
                    append_numbered(writer, range(first, first + 5))
                    assert has_room or first < 10 or is_postponed.wait(60)
                wait_until(lambda: len(marked_serials(tmp_store)) == 10 * segments)
                append_numbered(writer, range(10 * segments, 10 * segments + 15))
                wait_until(lambda: len(marked_serials(tmp_store)) == 10 * segments + 15)
                assert not any(info["state"] == "sealed" for info in store.info()["segments"])
                copy = tmp_store.with_name("copy")
                shutil.copytree(tmp_store, copy)
                may_seal.set()
        finally:
            may_seal.set()
        assert store.verify(deep=True) == []
    with dr.open(copy) as copied:
        assert serials(copied) == [*range(10 * segments + 15)]


def test_who_is_interrupted_while_a_segment_waits_to_be_sealed_keeps_nobody_from_sealing_it(tmp_store, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10) as store:
        writer = store.writer()
        append_numbered(writer, range(10))
        with monkeypatch.context() as patch:
            patch.setattr(*inner.SUBMIT_SEGMENT, interrupt)
            with pytest.raises(KeyboardInterrupt):
                append_numbered(writer, range(10, 15))
        writer.close()
    del writer, store
    gc.collect()
    with dr.open(tmp_store, "a"):
        pass
    with dr.open(tmp_store) as store:
        assert {info["state"] for info in store.info()["segments"]} == {"sealed"}
        assert store.verify(deep=True) == []


def test_segments_that_there_is_no_room_to_seal_stay_locked_until_they_are_sealed(tmp_store, monkeypatch):
    seal_segments, submit = map(inner.real, (inner.SEAL_SEGMENTS, inner.SUBMIT_SEGMENT))
    submitted: list[int] = []
    locked: list[bool] = []
    has_room, may_refuse, has_begun, seals_last = (threading.Event() for _ in range(4))

    def submit_noted(self, info, *args, **kwargs):
        submit(self, info, *args, **kwargs)
        submitted.append(info.number)

    def seal(root, infos, *args, **kwargs):
        if has_room.is_set():
            locked.extend(is_locked(info.lock_path) for info in infos)
            return seal_segments(root, infos, *args, **kwargs)
        has_begun.set()
        may_refuse.wait()
        if [info.number for info in infos] == [2]:
            seals_last.set()
            has_room.wait()
        raise dr.StorageFull(errno.ENOSPC, "no room")

    def flush(writer):
        with suppress(dr.StorageFull):
            writer.flush()

    monkeypatch.setattr(*inner.SEAL_SEGMENTS, seal)
    monkeypatch.setattr(*inner.SUBMIT_SEGMENT, submit_noted)
    with (
        dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=10) as store,
        store.writer(durability=3600.0) as writer,
    ):
        try:
            append_numbered(writer, range(10))
            append_numbered(writer, range(10, 20))
            assert has_begun.wait(60)
            append_numbered(writer, range(20, 30))
            append_numbered(writer, range(30, 35), end="open")
            may_refuse.set()
            assert seals_last.wait(60)
            # The sealer is not done with segment 1 and 2 yet when flush hands in segment 1 again.
            flushing = threading.Thread(target=flush, args=(writer,))
            flushing.start()
            wait_until(lambda: submitted.count(1) == 2, 60)
        finally:
            may_refuse.set()
            has_room.set()
        flushing.join()
    assert len(locked) >= 4
    assert all(locked)


def test_segments_of_dead_writers_that_there_is_no_room_to_seal_hold_no_descriptors(tmp_store, monkeypatch):
    copy = tmp_store.with_name("copy")

    def refuse(*args, **kwargs):
        raise dr.StorageFull(errno.ENOSPC, "no room")

    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer(durability="none") as writer:
        append_numbered(writer, range(5))
        shutil.copytree(tmp_store, copy)
    with monkeypatch.context() as patch:
        patch.setattr(*inner.SEAL_SEGMENTS, refuse)
        store = dr.open(copy, "a")
        wait_until(lambda: not any(thread.name == "diskreplay-sealer" for thread in threading.enumerate()), 60)
        assert not is_locked(segment_of(copy) / "committed/lock")
    store.close()
    with dr.open(copy) as store:
        assert {info["state"] for info in store.info()["segments"]} == {"sealed"}


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("marked", [0, 1])
def test_a_copy_whose_sealing_was_interrupted_still_proves_its_rows(tmp_store, monkeypatch, marked):
    """Its chunks are protected by then, and its counters say what is proven: its document alone says what it is."""

    def interrupt(*_):
        raise dr.StorageFull(errno.ENOSPC, "no room")

    copy = copy_while_sealed(tmp_store, marked)
    with monkeypatch.context() as patch:
        patch.setattr(*inner.FORGET_CLAIMS, interrupt)
        with pytest.raises(dr.StorageFull):
            dr.open(copy, "a").close()
    with dr.open(copy) as reader:
        assert serials(reader) == [*range(marked)]
        assert {p.kind for p in reader.verify(deep=True)} == {"unproven"}
        dr.open(copy, "a").close()
        reader.refresh()
        assert serials(reader) == [*range(marked)]
        assert {p.kind for p in reader.verify(deep=True)} == {"unproven"}
    assert repair(copy).actions == []


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("marked", [0, 1])
def test_a_copy_that_is_sealed_while_its_document_is_read_shows_what_is_proven(tmp_store, monkeypatch, marked):
    copy, is_whole_copy, waiting = copy_while_sealed(tmp_store, marked), inner.real(inner.IS_WHOLE_COPY), [True]

    def seal_first(*args):
        if waiting:
            waiting.clear()
            dr.open(copy, "a").close()
        return is_whole_copy(*args)

    monkeypatch.setattr(*inner.IS_WHOLE_COPY, seal_first)
    with dr.open(copy) as reader:
        assert not waiting
        assert serials(reader) == [*range(marked)]
