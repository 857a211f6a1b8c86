"""Copies of segments: support for copying tools, and detection of files that were copied before the sealing.

Tools that update an earlier copy, such as rsync, skip files with unchanged size and modification time. Writing through
mapped memory may leave the modification time unchanged, so marking and sealing set it.

Sealing removes the write permission of every chunk file, and copying tools keep permissions. So a writable chunk was
copied before the sealing, or by a tool that does not keep permissions. If the chunk's checksum matches, the copy of the
chunk is complete.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Container
from contextlib import suppress
from functools import lru_cache

from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.files.durable import descriptor, write_at
from diskreplay.segments.files.mapping import data_ranges, opened

WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_BLOCK_BYTES = 1 << 20
_SECOND_NS = 1_000_000_000


def note_changed(file: str | int, *, for_good: bool = False) -> None:
    """Set a file's modification time to now, because writing through mapped memory may not change it.

    ``for_good``: the file will not change again. Its new time is in a later second than its old time, because rsync
    compares times in whole seconds.
    """
    now = time.time_ns()
    if for_good:
        now = max(now, (os.stat(file).st_mtime_ns // _SECOND_NS + 1) * _SECOND_NS)
    os.utime(file, ns=(now, now))


def protect(fd: int) -> None:
    note_changed(fd, for_good=True)
    os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~WRITE_BITS)


def open_protected(path: str) -> descriptor:
    """Open a chunk for reading and writing in a `with` block, even if an interrupted sealing had write-protected it."""
    try:
        return opened(path, None, os.O_RDWR)
    except PermissionError:
        os.chmod(path, stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode) | stat.S_IWUSR)
        return opened(path, None, os.O_RDWR)


def is_whole_copy(arrays: Container[str], folder: str, checksums: dict[str, int]) -> bool:
    """Return whether all chunks of a copied sealed segment were copied after the sealing.

    Write-protected chunks were copied after the sealing, so they are not read here. If a copy with marks lacks a chunk,
    the result is False: the copying tool may have listed the files before the chunk was made. In a copy without marks,
    a missing chunk is damage, which is found elsewhere.
    """
    chunks = [name for name in checksums if name.rpartition("/")[0] in arrays and not name.endswith(layout.METADATA)]
    unprotected, missing = list[tuple[str, os.stat_result]](), False
    for name in chunks:
        try:
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)
        except OSError:
            missing = True
            continue
        if stat.S_ISREG(status.st_mode) and status.st_mode & WRITE_BITS:
            unprotected.append((name, status))
    if not unprotected:
        return not missing or not _has_marks(folder)
    # The counter of rows may have been copied before its final value was written, so its checksum is compared too.
    counter = f"{layout.COMMITTED}/c.0"
    try:
        unprotected.append((counter, os.stat(f"{folder}/{counter}", follow_symlinks=False)))
    except OSError:
        return False
    return not missing and all(
        _fits(
            f"{folder}/{name}",
            checksums.get(name, -1),
            at.st_dev,
            at.st_ino,
            at.st_size,
            at.st_mtime_ns,
            at.st_ctime_ns,
        )
        for name, at in unprotected
    )


def _has_marks(folder: str) -> bool:
    try:
        return os.stat(f"{folder}/{layout.MARKS}", follow_symlinks=False).st_size > 0
    except OSError:
        return False


@lru_cache(maxsize=1 << 16)  # readers check the same files repeatedly
def _fits(path: str, crc: int, *_: int) -> bool:
    try:
        with opened(path, None) as fd:
            found = at = 0
            while data := os.pread(fd, _BLOCK_BYTES, at):
                found, at = crc32c(data, found), at + len(data)
    except (OSError, FormatError):
        return False
    return found == crc


# --- making copies ----------------------------------------------------------------------------------------------------


_FICLONE = 0x40049409
# After one of these errors, cloning or linking another file would fail, too.
_NEVER = (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EIO)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Unreadable(OSError):
    pass


class FileCopier:
    """Copies files, with their permissions and modification times. Not thread-safe.

    ``share``: the copy of a file that no longer changes may share disk blocks with the file, or be a hard link to it.
    ``shared`` is the number of bytes on disk of the files that were cloned or linked.
    """

    def __init__(self, *, share: bool) -> None:
        self._clones = self._links = share
        self.shared = 0

    def copy(self, source: str, target: str, *, may_clone: bool = False, may_link: bool = False) -> None:
        """Copy a regular file to a path, and replace an existing file there.

        ``may_clone``: the file is final, so the copy may share its blocks. A file that still changes must not share
        blocks: a write to shared blocks needs new blocks, which a full disk does not have. ``may_link``: the source and
        the copy are final, so the copy may be a hard link. A file with write permission is never linked.

        Raises FormatError if the source is a link or not a regular file, FileNotFoundError if it is missing, Unreadable
        if it cannot be read, and OSError if the target cannot be written.
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
    """Return whether other files may be cloned or linked after this error; raise the error if it means "no space"."""
    if error.errno in _NO_SPACE:
        raise error
    return error.errno not in _NEVER


def _made(target: str) -> descriptor:
    return descriptor(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)


def _finish(fd: int, status: os.stat_result) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode))
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_ranges(source: int, target: int, ranges: list[tuple[int, int]]) -> None:
    """Copy ranges of bytes to the same offsets of another file; holes of the source are left out.

    Raises Unreadable if the source cannot be read, and OSError if the target cannot be written.
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
