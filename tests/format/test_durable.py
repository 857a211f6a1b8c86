"""Locks: one holder, whoever lets go, and nothing that a forked child could keep or free."""

import fcntl
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from diskreplay.errors import FormatError, StorageFull, StoreLocked
from diskreplay.format import durable, machine
from diskreplay.format.durable import held_lock, is_locked, try_lock, write_at, write_atomic, write_file, write_row

HOLDER = """
import sys
from diskreplay.format.durable import try_lock
lock = try_lock(sys.argv[1])
print(lock is not None, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def hold(path):
    """Start a process that holds the lock until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def identities():
    """The functions that tell which machine and boot this is, as if they had never been asked."""
    yield
    for function in (machine.boot_id, machine.machine_id):
        function.cache_clear()


@pytest.mark.parametrize("text", ["", "uninitialized", "localhost"])
def test_a_machine_or_boot_that_is_not_known_is_like_no_other(identities, monkeypatch, text):
    monkeypatch.setattr(machine, "_first_line", lambda paths: "" if "boot_id" in next(iter(paths)) else text)
    seen = set()
    for _ in range(3):
        for function in (machine.boot_id, machine.machine_id):
            function.cache_clear()
            seen.add(function())
            assert function() in seen  # for one process it is one
    assert len(seen) == 6
    assert all(name.startswith("unknown-") for name in seen)


def test_a_lock_has_one_holder_until_it_is_released(path):
    lock = try_lock(path)
    assert lock is not None
    assert is_locked(path)
    assert try_lock(path) is None
    lock.release()
    lock.release()
    assert not is_locked(path)
    again = try_lock(path)
    assert again is not None
    again.release()


def test_a_lock_of_another_process_ends_with_it(path):
    with hold(path) as other:
        assert other.stdout.readline() == "True\n"
        assert is_locked(path)
        assert try_lock(path) is None
        with pytest.raises(StoreLocked, match="another process has held"), held_lock(path, timeout_s=0.01):
            pass
        other.kill()
    with held_lock(path):
        assert is_locked(path)
    assert not is_locked(path)


def test_a_lock_that_nobody_refers_to_is_free(path):
    assert try_lock(path) is not None
    gc.collect()

    assert not is_locked(path)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_exception_while_a_lock_is_taken_leaves_it_free(path, monkeypatch, moment):
    """As a signal's handler may raise one between any two instructions."""
    opened, take = [], fcntl.flock

    def interrupt(fd, how):
        opened.append(fd)
        if moment == "after":
            take(fd, how)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda fd, how: interrupt(fd, how) if how & fcntl.LOCK_EX else take(fd, how))
        with pytest.raises(KeyboardInterrupt):
            try_lock(path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
    assert try_lock(path) is not None


@pytest.mark.leaks("the descriptor, of which nobody knows when the exception comes")
def test_an_exception_before_a_lock_is_known_leaves_it_free(path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(durable.weakref, "finalize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            try_lock(path)
    assert try_lock(path) is not None


def test_any_program_that_uses_flock_sees_it(path):
    lock = try_lock(path)
    with open(path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.release()


def test_a_forked_child_neither_frees_the_lock_nor_keeps_it(path):
    lock = try_lock(path)
    to_child, from_parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(from_parent)
        lock.release()
        os.read(to_child, 1)  # until the parent has let go and looked
        os._exit(0)
    os.close(to_child)
    assert is_locked(path)
    lock.release()
    assert not is_locked(path)
    os.close(from_parent)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_symbolic_link_is_not_followed(tmp_path, path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        try_lock(path)

    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_written_in_part_is_no_space(tmp_path, monkeypatch):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:2]))
    with pytest.raises(OSError, match="No space"):
        write_file(str(tmp_path / "other"), b"data")
    with pytest.raises(StorageFull):
        write_atomic(target, b"new one")

    assert target.read_bytes() == b"old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "other"]


@pytest.mark.parametrize("nbytes", [0, 1, 28224, durable._MOST_HELD, durable._MOST_HELD + 1])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_rows_are_written_as_other_bytes_are(tmp_path, nbytes, kind):
    data = kind(np.random.default_rng(0).bytes(nbytes))
    found = []
    for write in (write_at, write_row):
        with open(tmp_path / write.__name__, "w+b") as file:
            for offset in (5, (1 << 31) - 1, 1 << 31, 1 << 33, 3):
                write(file.fileno(), data, offset)
            size = os.fstat(file.fileno()).st_size
            found.append(
                [size, *(os.pread(file.fileno(), nbytes + 9, offset) for offset in (0, (1 << 31) - 2, (1 << 33) - 1))]
            )
    assert found[0] == found[1]


def test_rows_that_are_written_in_part_are_written_on_and_an_error_is_the_systems(tmp_path, monkeypatch):
    real = durable._pwrite_held

    with open(tmp_path / "file", "w+b") as file, monkeypatch.context() as patch:
        patch.setattr(durable, "_pwrite_held", lambda fd, data, nbytes, offset: real(fd, data, nbytes // 2, offset))
        write_row(file.fileno(), b"0123456789", 3)
        assert os.pread(file.fileno(), 99, 0) == b"\0\0\x000123456789"
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        write_row(file.fileno(), b"0", 0)


@pytest.mark.parametrize("take", [try_lock, is_locked])
def test_a_fork_waits_until_a_lock_that_is_being_taken_is_known(path, monkeypatch, take):
    """A child that inherits the descriptor of a lock without knowing it would hold it beyond its parent's end."""
    path.touch()
    real, forks = fcntl.flock, []

    def forked_meanwhile(fd, operation):
        with ThreadPoolExecutor(1) as other:
            forks.append(not other.submit(durable._taking.acquire, blocking=False).result())
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", forked_meanwhile)
    lock = take(path)
    assert forks[0]
    monkeypatch.undo()
    pid = os.fork()
    if pid == 0:
        with ThreadPoolExecutor(1) as other:
            os._exit(int(other.submit(durable._taking.acquire, blocking=False).result()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    if lock:
        lock.release()


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: os.symlink("elsewhere", path)], ids=["folder", "pipe", "link"]
)
def test_what_is_no_regular_file_is_refused_as_a_lock(tmp_path, make):
    path = tmp_path / "lock"
    make(path)
    message = f"^{path} is no regular file; diskreplay repair moves it away$"
    with pytest.raises(FormatError, match=message), held_lock(path):
        pass
