"""Durable replace, file locks, and who this machine is. Every sync of the package goes through here."""

import ctypes
import errno
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from diskreplay.errors import ReplayError, StorageFull, StoreLocked

# The default poll of 50 ms would be most of the time it takes to make a segment.
_POLL_S = 0.002
_libc = ctypes.CDLL(None, use_errno=True)


def write_atomic(path: Path, data: bytes, *, sync: bool = False) -> None:
    """Replace ``path`` by ``data`` so that every reader sees the old file or the new one, whole.

    Raises
    ------
    StorageFull
        There is no room for the new file; the old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fdatasync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error
    if sync:
        sync_folder(path.parent)


def storage_error(error: OSError, path: os.PathLike[str] | str) -> Exception:
    """Return StorageFull for the errors that mean "no space", the error itself for all others."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFull(error.errno, f"no space for {os.fspath(path)}; free some and append again, nothing was lost")
    return error


def sync_file(path: os.PathLike[str] | str) -> None:
    """Wait until the data of a file, mapped writes included, is on the platter."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def sync_folder(path: os.PathLike[str] | str) -> None:
    """Wait until the names in a folder are on the platter."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: os.PathLike[str] | str) -> None:
    """Sync every file and folder below ``path``, and ``path`` itself, leaves first."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            sync_file(os.path.join(folder, name))
        sync_folder(folder)


def sync_file_system(path: os.PathLike[str] | str) -> None:
    """Sync the whole file system that holds ``path``: one wait for any number of files."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(path))
    finally:
        os.close(fd)


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Give the blocks of ``[start, stop)`` back; they read as zeros. Where the file system cannot, write zeros."""
    if stop <= start:
        return
    keep_size, punch = 1, 2
    if _libc.fallocate(fd, keep_size | punch, ctypes.c_int64(start), ctypes.c_int64(stop - start)) == 0:
        return
    if (code := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    zeros = bytes(min(stop - start, 1 << 20))
    while start < stop:
        start += os.pwrite(fd, zeros[: stop - start], start)


def new_lock(path: os.PathLike[str] | str) -> FileLock:
    """Return an OS lock on ``path`` that any thread of this process may release and that dies with the process."""
    return FileLock(os.fspath(path), thread_local=False, fallback_to_soft=False, poll_interval=_POLL_S)


def try_lock(path: os.PathLike[str] | str) -> FileLock | None:
    """Take the lock if it is free, else return None."""
    lock = new_lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


@contextmanager
def held_lock(path: os.PathLike[str] | str, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the lock for a block, waiting at most ``timeout_s`` seconds for it.

    Raises
    ------
    StoreLocked
        Another process kept it for the whole time.
    """
    lock = new_lock(path)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout:
        raise StoreLocked(
            f"another process has held {os.fspath(path)} for {timeout_s:g} s; look for a stopped one and try again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def is_locked(path: os.PathLike[str] | str) -> bool:
    """Tell whether a living process holds the lock: asks for it shared, without waiting, and lets go at once."""
    import fcntl  # Unix only; the check of the platform comes first

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _first_line(paths: Iterable[str]) -> str:
    for path in paths:
        try:
            with open(path) as file:
                text = file.readline().strip()
        except OSError:
            continue
        if text:
            return text
    return ""


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return an id that changes when this machine boots."""
    return _first_line(["/proc/sys/kernel/random/boot_id"]) or "unknown"


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Return an id of this machine that survives a boot."""
    return _first_line(["/etc/machine-id", "/var/lib/dbus/machine-id"]) or socket.gethostname()


def check_platform() -> None:
    """Refuse a platform whose stores another core may see out of order.

    Raises
    ------
    ReplayError
        Not Linux on x86-64: the commit protocol relies on stores being seen in order, and on Linux's file calls.
    """
    system, machine = os.uname().sysname, os.uname().machine
    if system != "Linux" or machine not in ("x86_64", "AMD64"):
        raise ReplayError(f"diskreplay runs on Linux on x86-64 for now; this is {system} on {machine}")
