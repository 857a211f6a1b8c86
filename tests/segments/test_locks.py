"""Locks: one holder, whoever lets go, and nothing that a forked child could keep or free."""

import fcntl
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import diskreplay as dr
from diskreplay.errors import FormatError, StoreLocked
from diskreplay.segments.files import locks
from diskreplay.segments.files.locks import held_lock, is_held, is_locked, try_lock
from tests.store.test_locks import as_nobody, locks_of, open_to_all
from tests.testing.support import append_numbered, serial_schema

HOLDER = """
import sys
from diskreplay.segments.files.locks import try_lock
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


class Interrupted(Exception):
    pass


def interrupt_at(number, call):
    """Raise Interrupted at a point of a call where Python may run a signal handler; return whether there is such one.

    These points are the beginnings of Python functions, and the returns of C functions.
    """
    left = number

    def profile(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise Interrupted

    sys.setprofile(profile)
    try:
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return left <= 0  # True if it was raised in `__del__`, which drops exceptions


@pytest.mark.parametrize("dropped", [False, True])
def test_a_release_waits_for_no_other_thread(path, dropped):
    """The garbage collector may drop a lock in any thread, while another one forks and holds `_taking`."""
    with ThreadPoolExecutor(1) as forking, ThreadPoolExecutor(1) as other:
        held = [try_lock(path)]
        forking.submit(locks._taking.acquire).result()
        try:
            other.submit(held.clear if dropped else held[0].release).result(timeout=30)
            fd = os.open(path, os.O_WRONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
        finally:
            forking.submit(locks._taking.release).result()


@pytest.mark.leaks("an exception may come between the opening of a file and the assignment of its descriptor")
@pytest.mark.parametrize("dropped", [False, True])
def test_an_exception_of_a_signal_handler_leaves_a_lock_free(path, dropped, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pytest would keep the traceback of `__del__`

    def hold_it():
        if dropped:
            assert try_lock(path) is not None
            return
        with held_lock(path):
            pass

    number = 1
    while interrupt_at(number, hold_it):
        assert not is_locked(path), number
        number += 1
    assert number > 15


def test_another_call_completes_a_release_that_a_signal_handler_ended(path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # the file object may have closed the descriptor itself
    number = 1
    while interrupt_at(number, (lock := try_lock(path)).release):
        lock.release()
        assert not is_locked(path), number
        number += 1
    assert number > 4


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


@pytest.mark.parametrize("take", [try_lock, is_locked])
def test_a_fork_waits_until_a_lock_that_is_being_taken_is_known(path, monkeypatch, take):
    """A child that inherits the descriptor of a lock without knowing it would hold it beyond its parent's end."""
    path.touch()
    real, forks = fcntl.flock, []

    def forked_meanwhile(fd, operation):
        with ThreadPoolExecutor(1) as other:
            forks.append(not other.submit(locks._taking.acquire, blocking=False).result())
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", forked_meanwhile)
    lock = take(path)
    assert forks[0]
    monkeypatch.undo()
    pid = os.fork()
    if pid == 0:
        with ThreadPoolExecutor(1) as other:
            os._exit(int(other.submit(locks._taking.acquire, blocking=False).result()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    if lock:
        lock.release()


@pytest.mark.parametrize(
    "make", [os.mkdir, os.mkfifo, lambda path: os.symlink("elsewhere", path)], ids=["folder", "pipe", "link"]
)
def test_what_is_no_regular_file_is_refused_as_a_lock(tmp_path, make):
    path = tmp_path / "lock"
    make(path)
    message = f"^{path} is not a regular file; diskreplay repair moves it away$"
    with pytest.raises(FormatError, match=message), held_lock(path):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000])
def test_no_lock_can_be_opened_by_who_may_not_write_it(tmp_store, mask, monkeypatch):
    made = set()
    real = locks._open_lock

    def noted(path):
        fd = real(path)
        made.add((os.path.basename(path), os.fstat(fd).st_mode & 0o777))
        return fd

    monkeypatch.setattr(locks, "_open_lock", noted)
    before = os.umask(mask)
    try:
        limiter = dr.RateLimiter(1.0, 1, 100.0)
        with (
            dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=20) as store,
            store.writer(limiter=limiter) as writer,
            dr.Sampler(store, dr.Transitions(), batch_size=4, limiter=limiter) as sampler,
        ):
            append_numbered(writer, range(30))
            sampler.sample()
            sampler.save("mine")
    finally:
        os.umask(before)
    assert len(locks_of(tmp_store)) >= 3
    expected = {0o022: 0o600, 0o002: 0o660, 0o077: 0o600, 0o000: 0o666}[mask]
    assert {path.stat().st_mode & 0o777 for path in locks_of(tmp_store)} == {expected}
    assert made == {("lock", expected)}  # those that are gone, too: of drafts and of the state


def test_a_lock_is_readable_for_nobody_else_even_in_the_moment_in_which_it_is_made(tmp_path, monkeypatch):
    seen = []
    real = os.fchmod

    def looking(fd, mode):
        seen.append(os.fstat(fd).st_mode & 0o777)
        real(fd, mode)

    monkeypatch.setattr(os, "fchmod", looking)
    before = os.umask(0)
    try:
        try_lock(tmp_path / "lock").release()
    finally:
        os.umask(before)
    assert seen == [0o622]
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666


def test_a_lock_of_an_older_store_is_closed_to_readers_by_the_next_who_takes_it(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    path.chmod(0o644)
    try_lock(path).release()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o464)  # not even the owner may write, but root is asked nothing
    if os.getuid() == 0:
        try_lock(path).release()
        assert path.stat().st_mode & 0o777 == 0o660


def test_what_cannot_be_opened_is_not_free(tmp_path):
    path = tmp_path / "lock"
    open_to_all(tmp_path)
    lock = try_lock(path)
    look = lambda tell: tell([is_held(path), is_locked(path)])  # noqa: E731
    assert as_nobody(look) == [[None, True]]
    lock.release()
    assert as_nobody(look) == [[None, True]]
    assert (is_held(path), is_locked(path)) == (False, False)
    assert is_held(tmp_path / "missing") is False
