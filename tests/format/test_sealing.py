"""What a sealed segment says of its files, and what sealing leaves of them."""

import errno
import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import diskreplay as dr
from diskreplay.format import sealing
from diskreplay.store.writing import sealer
from tests.testing.support import serial_schema

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


def attributes(segment):
    return json.loads((segment / "zarr.json").read_bytes())["attributes"]


def files(segment):
    """Every file that the format gives a checksum: all but the segment's own zarr.json, its copy, and its lock."""
    found = [file for file in segment.rglob("*") if file.is_file() and file.name not in ("lock", "document")]
    return {str(file.relative_to(segment)): file for file in found if file != segment / "zarr.json"}


@pytest.mark.parametrize("fails", [False, True])
def test_two_threads_finish_a_segment_that_somebody_waits_for(tmp_store, monkeypatch, fails):
    finish, seal, helped, shared = sealing._finish_chunk, sealer.seal_segments, threading.Event(), []

    def finish_chunk(segment, array, chunk):
        if threading.current_thread().name.startswith("diskreplay-checksums"):
            shared.append(array.path)
            helped.set()
            if fails:
                raise OSError(errno.EIO, "the disk is gone")
        finish(segment, array, chunk)
        assert helped.wait(60)

    monkeypatch.setattr(sealing, "_SHARED_BYTES", 0)

    def seal_waited_for(root, infos, is_waited_for):
        helped.clear()  # each attempt is shared
        seal(root, infos, None, lambda: True)

    monkeypatch.setattr(sealer, "seal_segments", seal_waited_for)
    with dr.create(tmp_store, SCHEMA, chunk_bytes=4096) as store:
        writer = store.writer()
        write(writer, 50)
        with monkeypatch.context() as patch:
            patch.setattr(sealing, "_finish_chunk", finish_chunk)
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
            there = attributes(segment)
            assert there["sealed"]
            assert there["checksums"] == {
                name: google_crc32c.value(file.read_bytes()) for name, file in files(segment).items()
            }
            assert (segment / "durable/document").read_bytes() == (segment / "zarr.json").read_bytes()
        assert sum(attributes(segment)["steps"] for segment in segments) == 42
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
            patch.setattr(sealing, "check_written", check_written)
            with pytest.raises(OSError, match="Input/output error"):
                writer.close()
        assert len(failed) == 1  # and no second try, which would find nothing wrong
        assert not attributes(tmp_store / "segments/00000000")["sealed"]
        store.refresh()
        assert len(store) == 3
    with dr.open(tmp_store, "a"):
        pass
    assert attributes(tmp_store / "segments/00000000")["sealed"]
    assert dr.open(tmp_store).verify(deep=True) == []
