"""Copies of files: by sharing their blocks (reflink), as hard links, or byte by byte without their holes."""

import errno
import fcntl
import os
import stat
from contextlib import suppress

from diskreplay.segments.files.copies import WRITE_BITS
from diskreplay.segments.files.durable import descriptor, write_at
from diskreplay.segments.files.mapping import data_ranges, opened

_FICLONE = 0x40049409
# What the system says where a file system can do this for none of its files.
_NEVER = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EIO)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_BLOCK_BYTES = 1 << 20


class Unreadable(OSError):
    """The system refuses to read a file that is to be copied."""


class FileCopier:
    """Copies files, with their permissions and times of change. Not thread-safe.

    ``share``: files that do not change may share their blocks with the copy, or be the same file.

    Attributes
    ----------
    shared : int
        Bytes on disk of the files that were cloned or linked.
    """

    def __init__(self, *, share: bool) -> None:
        self._clones = self._links = share
        self.shared = 0

    def copy(self, source: str, target: str, *, may_clone: bool = False, may_link: bool = False) -> None:
        """Copy a regular file to a path; what is there is replaced.

        ``may_clone``: nobody writes to the file any more, so the copy may share its blocks. A write to shared blocks
        needs new ones, and a full disk has none. ``may_link``: nobody will write to the copy either, which may be
        the same file. A file that may be written by its permissions is never linked.

        Raises FormatError where the source is a link or no regular file, FileNotFoundError where it is missing,
        Unreadable where it cannot be read, otherwise the system's OSError of the target.
        """
        with suppress(FileNotFoundError):
            os.unlink(target)
        with _opened(source) as fd:
            status = os.fstat(fd)
            may_link = may_link and not status.st_mode & WRITE_BITS
            if (may_clone and self._clone(fd, target, status)) or (may_link and self._link(source, target)):
                self.shared += status.st_blocks * 512
                return
            try:
                with _made(target) as copy:
                    copy_ranges(fd, copy, [(0, status.st_size)])
                    os.ftruncate(copy, status.st_size)
                    _finish(copy, status)
            except Unreadable:
                os.unlink(target)
                raise

    def _clone(self, fd: int, target: str, status: os.stat_result) -> bool:
        if not self._clones:
            return False
        with _made(target) as copy:
            try:
                fcntl.ioctl(copy, _FICLONE, fd)
                _finish(copy, status)
                return True
            except OSError as error:
                self._clones = _may_succeed_later(error)
        os.unlink(target)
        return False

    def _link(self, source: str, target: str) -> bool:
        if not self._links:
            return False
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as error:
            self._links = _may_succeed_later(error)
            return False
        return True


def _opened(source: str) -> opened:
    try:
        return opened(source, None)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise Unreadable(error.errno, error.strerror, source) from error


def _may_succeed_later(error: OSError) -> bool:
    """Tell whether another file may be cloned or linked where one was not; raise the error where there is no space."""
    if error.errno in _NO_SPACE:
        raise error
    return error.errno not in _NEVER


def _made(target: str) -> descriptor:
    return descriptor(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)


def _finish(fd: int, status: os.stat_result) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_ranges(source: int, target: int, ranges: list[tuple[int, int]]) -> None:
    """Copy ranges of bytes to the same places of another file; holes of the source are left out.

    Raises Unreadable where the source cannot be read, otherwise the system's OSError of the target.
    """
    for start, stop in ranges:
        for first, last in _data_ranges(source, start, stop):
            while first < last and (data := _read(source, min(_BLOCK_BYTES, last - first), first)):
                write_at(target, data, first)
                first += len(data)


def _data_ranges(fd: int, start: int, stop: int) -> list[tuple[int, int]]:
    try:
        return list(data_ranges(fd, start, stop))
    except OSError as error:
        raise Unreadable(error.errno, error.strerror) from error


def _read(fd: int, count: int, at: int) -> bytes:
    try:
        return os.pread(fd, count, at)
    except OSError as error:
        raise Unreadable(error.errno, error.strerror) from error
