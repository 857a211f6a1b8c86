"""Locks and those who may not write: they can hold none, and take no living writer for a dead one."""

import contextlib
import fcntl
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.injection import in_child
from tests.testing.commands import main
from tests.testing.on_disk import words
from tests.testing.support import append_numbered, serial_schema, serials

NOBODY = 65534


def as_nobody(work):
    """Run ``work(tell)`` in a child of another user and return what it told."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")

    def changed(tell):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work(tell)

    return in_child(changed).told


def open_to_all(path):
    """Let everybody reach a folder."""
    for folder in [path, *path.parents]:
        if folder.stat().st_uid == os.getuid() and Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(folder.stat().st_mode | 0o055)


def locks_of(path):
    return sorted(path.rglob("lock"))


def test_who_may_only_read_holds_up_no_writer_and_takes_none_for_dead(tmp_store):
    schema = dr.Schema(
        obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"), extra={"value": dr.Field((), "float32")}
    )
    with dr.create(tmp_store, schema, chunk_bytes=4096, segment_steps=20) as store, store.writer(2) as writer:
        open_to_all(tmp_store)

        def step(terminated=False):
            writer.append(np.zeros((2, 3)), np.zeros(2, int), np.zeros(2), np.full(2, terminated), value=np.zeros(2))

        for _ in range(8):
            step()
        with dr.Sampler(store, dr.Rollouts(6, next_value=None)) as sampler:
            sampler.sample()  # the other user may not be able to import and compile what that takes

        def read(tell):
            refused = 0
            for path in locks_of(tmp_store):
                try:
                    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except PermissionError:
                    refused += 1
            tell([refused, len(locks_of(tmp_store))])
            with dr.open(tmp_store) as reader:
                info = reader.info()
                tell([[segment["state"] for segment in info["segments"]], [w["state"] for w in info["writers"]]])
                with dr.Sampler(reader, dr.Rollouts(6, next_value=None)) as sampler:
                    try:
                        sampler.sample()
                        tell("sampled")
                        sampler.sample()
                    except dr.ReplayError as error:
                        tell([type(error).__name__, str(error)])

        (refused, count), shown, *rest = as_nobody(read)
        assert refused == count >= 2
        assert shown == [["unknown"], ["unknown"]]
        assert rest[-1][0] == "NotEnoughData"  # a lane of a writer that is not closed: wait
        step(terminated=True)
    assert {segment["state"] for segment in dr.open(tmp_store).info()["segments"]} == {"sealed"}


def test_who_may_only_read_finds_a_whole_store_whole(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=20) as store, store.writer() as writer:
        for first in range(0, 100, 5):
            append_numbered(writer, range(first, first + 5))
        open_to_all(tmp_store)
        assert store.verify(deep=True) == []
        assert as_nobody(lambda tell: tell([str(problem) for problem in dr.open(tmp_store).verify(deep=True)])) == [[]]
    assert as_nobody(lambda tell: tell([str(problem) for problem in dr.open(tmp_store).verify(deep=True)])) == [[]]


def test_inspect_says_that_it_cannot_see_whether_a_writer_lives(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(3))
        open_to_all(tmp_store)
        main(["inspect", str(tmp_store)])  # the other user may not be able to import what that takes

        def inspect(tell):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                code = main(["inspect", str(tmp_store)])
            tell([code, printed.getvalue()])

        ((code, out),) = as_nobody(inspect)
        assert code == 0
        assert re.search(r"^segments +1 +.*1 unknown", out, re.MULTILINE), out
        assert re.search(r"^writers +1 +.*1 unknown", out, re.MULTILINE), out


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("diskreplay.segments.files.locks.held_lock.__wrapped__.__defaults__", (0.2,))


HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that holds the store lock until it is told to end."""

    def __init__(self, path):
        command = [sys.executable, "-c", HOLD, str(path / "counters" / "lock")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "held\n"

    def end(self):
        self.process.communicate("")
        assert self.process.returncode == 0


def one(writer, serial):
    writer.append(np.full(3, serial), serial, float(serial), False, serial=serial)


def lanes(writer, serial):
    value = np.full(2, serial)
    writer.append(np.full((2, 3), serial), value, value.astype("f4"), value < 0, serial=value)


def whole(writer, serial):
    value = np.full(1, serial)
    writer.append_episode(np.full((2, 3), serial), value, value.astype("f4"), terminated=True, serial=value)


@pytest.mark.slow
@pytest.mark.parametrize(("envs", "call"), [(None, one), (2, lanes), (None, whole)])
def test_an_append_that_finds_the_store_locked_writes_nothing_and_may_be_repeated(tmp_store, impatient, envs, call):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=8) as store:
        writer, refused = store.writer(envs), 0
        for serial in range(40):
            holder = Holder(tmp_store) if serial % 5 == 0 else None
            for _ in range(2):
                try:
                    call(writer, serial)
                    break
                except dr.StoreLocked as error:
                    refused += "another process has held" in str(error)
                    store.refresh()
                    assert len(store) == serial * (envs or 1)
            else:
                holder.end()
                holder = None
                call(writer, serial)
            if holder is not None:
                writer.flush()
                holder.end()
        assert refused >= 2
        writer.close()
        store.refresh()
        found = sorted(serials(store))
        assert found == [serial for serial in range(40) for _ in range(envs or 1)]
        assert store.verify(deep=True) == []
        assert {segment["state"] for segment in store.info()["segments"]} == {"sealed"}


def test_sealing_does_not_wait_for_the_store_lock_to_tell_readers(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer()
        one(writer, 0)
        holder = Holder(tmp_store)
        begun = time.monotonic()
        writer.close()
        assert time.monotonic() - begun < 30  # readers look once a second, and a minute is the most for other calls
        holder.end()
        assert [segment["state"] for segment in store.info()["segments"]] == ["sealed"]
        assert words(tmp_store)["sealed"] == 0
        one(writer := store.writer(), 1)
        writer.close()
        assert words(tmp_store)["sealed"] == 1
        assert store.verify(deep=True) == []
