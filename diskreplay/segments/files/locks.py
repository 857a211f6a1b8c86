"""The locks of a store, based on the system's flock: they tell which process writes, and whether it is alive.

The library filelock is used for the cache of compiled kernels, but not here. The class `FileLock` of filelock creates
files that other users may be able to read, and therefore to lock forever. `FileLock` also opens files for writing, and
a process that only checks for a living writer may lack the permission to write. Filelock's function `lock_descriptor`
takes exclusive locks only, so two simultaneous checks would take each other for the writer.
"""

import errno
import fcntl
import os
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from diskreplay.errors import FormatError, StoreLocked

# The pause between two attempts to take a lock. The usual reason to hold a lock is to make a segment. Making a segment
# takes longer than this pause.
_POLL_S = 0.002


class Lock:
    """A held file lock of the system (flock), made by `try_lock`.

    The lock ends with `release`, when this object is garbage collected, or with the process. A forked child releases
    its copy of the lock at once, and the parent keeps the lock. A program that inherits the descriptor ``fd`` keeps the
    lock when this process dies.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self._owner = fd, os.getpid()
        # The file is in this list until a call of `release` takes it out. If a signal handler raises an exception, the
        # end of the file object still closes the descriptor.
        self._files = [FileIO(fd, "w")]
        _held.add(self)

    @property
    def is_released(self) -> bool:
        return not self._files

    def release(self) -> None:
        """Release the lock, even if a signal handler raises an exception meanwhile."""
        # The garbage collector may call this in any thread, so it must not wait. If another thread is releasing the
        # lock, there is nothing to do.
        try:
            file = self._files.pop()
        except IndexError:
            return
        try:
            if os.getpid() == self._owner:
                # Without this call, a forked child that has not closed its copy of the descriptor yet would still hold
                # the lock.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            file.close()

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
# `_taking` is held from before a lock is taken until the lock is in `_held`, so that no fork happens meanwhile. A
# forked child closes only the locks in `_held`, and would hold any other lock.
_taking = threading.RLock()


def _release_in_child() -> None:
    _taking.release()
    for lock in list(_held):
        lock.release()


os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_release_in_child)


def _open_lock(path: os.PathLike[str] | str) -> int:
    """Open a lock's file for writing, and create it if it is missing; only users who may write it may read it.

    Any user who can read the file could lock it. So the file is readable only for those classes of users (owner, group,
    others) that may write it. This must hold from the file's creation on, so only the owner can read a new file.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o622)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        writers = mode & 0o222 | 0o200
        if mode & 0o666 != writers | writers << 1:
            os.fchmod(fd, mode & ~0o666 | writers | writers << 1)
    except PermissionError:
        pass  # the file belongs to another user
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_lock(path: os.PathLike[str] | str) -> None:
    os.close(_open_lock(path))


def try_lock(path: os.PathLike[str] | str) -> Lock | None:
    """Take and return the lock on a file, without waiting; None if it is already taken. A missing file is created."""
    with _taking:
        # The object is made before locking: if a signal handler raises an exception after locking, the lock is
        # released.
        lock = Lock(fd := _open_lock(path))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.release()
            return None
        except BaseException:
            lock.release()
            raise
        return lock


@contextmanager
def held_lock(path: os.PathLike[str] | str, timeout_s: float = 60.0) -> Iterator[None]:
    """Hold the lock on a file for a `with` block, after waiting at most ``timeout_s`` seconds for it.

    Raises StoreLocked if another process held the lock for the whole time, FormatError if a link, a folder or anything
    else that is not a regular file is at ``path``.
    """
    until = time.monotonic() + timeout_s
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise FormatError(f"{os.fspath(path)} is not a regular file; diskreplay repair moves it away")
    while (lock := try_lock(path)) is None:
        if time.monotonic() > until:
            raise StoreLocked(
                f"another process has held {os.fspath(path)} for {timeout_s:g} s; look for a stopped process, and try "
                "again"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: os.PathLike[str] | str) -> bool:
    """Return whether a living process holds the lock; True also if this is unknown. See `is_held`."""
    return is_held(path) is not False


def is_held(path: os.PathLike[str] | str) -> bool | None:
    """Return whether a living process holds the lock; to find out, take the lock shared for a moment, without waiting.

    None: unknown, because this user may not open the file, or this process has no descriptor left.
    """
    with _taking:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return False if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False
