"""Copies of segments: what copying tools rely on, and whether each file was copied after it was sealed.

Tools that bring an earlier copy up to date leave out files whose size and time of change are the same. Stores through
mapped memory need not change that time, so marking and sealing do.

Sealing takes away the permission to write from every chunk file. Tools that copy keep that, so a chunk that may be
written was copied before, or by a tool that keeps no permissions: then its checksum decides. Without this, a copy that
began while a segment was written and ended after it was sealed would claim rows that some of its files do not have.
"""

import os
import stat
import time
from collections.abc import Container
from functools import lru_cache

from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.files.durable import descriptor
from diskreplay.segments.files.mapping import opened

WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_BLOCK_BYTES = 1 << 20
_SECOND_NS = 1_000_000_000


def note_changed(file: str | int, *, for_good: bool = False) -> None:
    """Set the time of change of a file that was stored to through mapped memory, or written in its place.

    ``for_good``: it does not change any more. Then the time is in another second than before: rsync compares seconds,
    and would never copy what it misses now.
    """
    now = time.time_ns()
    if for_good:
        now = max(now, (os.stat(file).st_mtime_ns // _SECOND_NS + 1) * _SECOND_NS)
    os.utime(file, ns=(now, now))


def protect(fd: int) -> None:
    """Take away the permission to write a chunk of a segment that is being sealed."""
    note_changed(fd, for_good=True)
    os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~WRITE_BITS)


def open_protected(path: str) -> descriptor:
    """Have a chunk open to read and write it, also one that sealing had protected before it was interrupted."""
    try:
        return opened(path, None, os.O_RDWR)
    except PermissionError:
        os.chmod(path, stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode) | stat.S_IWUSR)
        return opened(path, None, os.O_RDWR)


def is_whole_copy(arrays: Container[str], folder: str, checksums: dict[str, int]) -> bool:
    """Whether the chunks of a sealed segment, which is a copy, are those that were sealed.

    What is damaged in a copy of which every chunk was sealed is damage, and not told here. So is what is missing where
    there are no marks to go by; else it may have been made after the names of the files had been listed.
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
    # The rows may have been copied before they were counted for good.
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


@lru_cache(maxsize=1 << 16)  # a reader asks several times, and a store may have been copied without permissions
def _fits(path: str, crc: int, *_: int) -> bool:
    try:
        with opened(path, None) as fd:
            found = at = 0
            while data := os.pread(fd, _BLOCK_BYTES, at):
                found, at = crc32c(data, found), at + len(data)
    except (OSError, FormatError):
        return False
    return found == crc
