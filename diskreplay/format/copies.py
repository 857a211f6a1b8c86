"""Sealed segments that were copied: whether each file was copied as it was sealed, or before that.

Sealing takes away the permission to write from every chunk file. Tools that copy keep that, so a chunk that may be
written was copied before, or by a tool that keeps no permissions: then its checksum decides. Without this, a copy that
began while a segment was written and ended after it was sealed would claim rows that some of its files do not have.
"""

import os
import stat
from functools import lru_cache

import google_crc32c

from diskreplay.format import layout
from diskreplay.format.root import Root

WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_BLOCK_BYTES = 1 << 20


def open_protected(path: str) -> int:
    """Open a chunk to read and write it, also one that sealing had protected before it was interrupted."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except PermissionError:
        os.chmod(path, stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode) | stat.S_IWUSR)
        return os.open(path, flags)


def is_whole_copy(root: Root, folder: str, checksums: dict[str, int]) -> bool:
    """Whether the chunks of a sealed segment, which is a copy, are those that were sealed.

    What is missing or damaged in a copy of which every chunk was sealed is damage, and not told here.
    """
    arrays = root.blueprint.arrays
    chunks = [name for name in checksums if name.rpartition("/")[0] in arrays and not name.endswith(layout.METADATA)]
    unprotected, missing = [], False
    for name in chunks:
        try:
            status = os.stat(f"{folder}/{name}", follow_symlinks=False)
        except OSError:
            missing = True
            continue
        if stat.S_ISREG(status.st_mode) and status.st_mode & WRITE_BITS:
            unprotected.append((name, status))
    if not unprotected:
        return True
    return not missing and all(
        _fits(f"{folder}/{name}", checksums[name], at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        for name, at in unprotected
    )


@lru_cache(maxsize=1 << 16)  # a reader asks several times, and a store may have been copied without permissions
def _fits(path: str, crc: int, *_: int) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = at = 0
        while data := os.pread(fd, _BLOCK_BYTES, at):
            found, at = google_crc32c.extend(found, data), at + len(data)
        return found == crc
    except OSError:
        return False
    finally:
        os.close(fd)
