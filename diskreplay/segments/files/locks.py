"""The locks of a store, by the system's flock: who writes where, and who is still alive.

filelock takes the lock of compiled kernels, and not these. Its `FileLock` opens the file by itself: readable for all
whom the umask lets read it, who could then hold the lock for ever, and for reading and writing, which one who only
wants to see whether a writer lives may not be allowed. Its `lock_descriptor` locks a file that was opened here, by one
exclusive call of flock. Whether a writer lives is asked by a shared one, so that two who ask at once do not take each
other for the writer. And importing filelock takes 5 MB of the 40 that a process which only writes may have.
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

from diskreplay.errors import FormatError, StoreLocked

# Less than the time for which a lock is usually held: that of making a segment.
_POLL_S = 0.002


class Lock:
    """A file lock of the system (flock) that is held: made by `try_lock`.

    It ends with `release`, with this object, or with the process. It belongs to the process and not to a thread, and
    not to children that are forked from it: theirs is released at once, which changes nothing for the parent.

    Attributes
    ----------
    fd : int
        The descriptor of the file. A program that inherits it keeps the lock when this process dies.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._end = weakref.finalize(self, _unlock, fd, os.getpid())
        self._end.atexit = False  # the end of the process frees it, after whatever still runs then
        _held.add(self)

    @property
    def is_released(self) -> bool:
        """Whether it was released."""
        return not self._end.alive

    def release(self) -> None:
        """Free the lock; releasing twice is fine."""
        self._end()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
# A fork between the system's lock and our note of it would leave the child a descriptor that nobody there knows: it
# would hold the lock for as long as it lives. So a fork waits for that moment to pass.
_taking = threading.RLock()


def _unlock(fd: int, owner: int) -> None:
    if os.getpid() == owner:
        # Closing alone would leave it to a child that was forked and has not closed its copy yet.
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _release_in_child() -> None:
    _taking.release()
    for lock in list(_held):
        lock.release()


os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_release_in_child)


def _open_lock(path: os.PathLike[str] | str) -> int:
    """Open a lock's file for writing, made where it is missing. Who may read it may write it, and nobody else.

    A lock needs no more than a descriptor, so whoever can read its file can hold it. So the file is never readable for
    a class of users, not even when it has just been made, that may not write it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o622)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        writers = mode & 0o222 | 0o200
        if mode & 0o666 != writers | writers << 1:
            os.fchmod(fd, mode & ~0o666 | writers | writers << 1)
    except PermissionError:
        pass  # another user's
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_lock(path: os.PathLike[str] | str) -> None:
    """Make the file of a lock, which is free."""
    os.close(_open_lock(path))


def try_lock(path: os.PathLike[str] | str) -> Lock | None:
    """Take the lock on a file, made where it is missing, if it is free; else return None."""
    with _taking:
        # Before it is locked: then an exception of a signal's handler, here or on the way to the caller, releases it.
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
    """Hold the lock for a block, waiting at most ``timeout_s`` seconds for it.

    Raises StoreLocked where another process kept it for the whole time, FormatError where a link, a folder or anything
    else that is no regular file is in its place.
    """
    until = time.monotonic() + timeout_s
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise FormatError(f"{os.fspath(path)} is no regular file; diskreplay repair moves it away")
    while (lock := try_lock(path)) is None:
        if time.monotonic() > until:
            raise StoreLocked(
                f"another process has held {os.fspath(path)} for {timeout_s:g} s; look for a stopped one and try again"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: os.PathLike[str] | str) -> bool:
    """Tell whether a living process holds the lock, or may do so for all that can be seen; see `is_held`."""
    return is_held(path) is not False


def is_held(path: os.PathLike[str] | str) -> bool | None:
    """Tell whether a living process holds the lock: asks for it shared, without waiting, and lets go at once.

    None: it cannot be seen, as this user may not open the file, or this process has no descriptor left.
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
