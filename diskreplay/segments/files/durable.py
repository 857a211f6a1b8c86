"""Durable writes, and the guarantees of file systems. Every sync of the package is made here."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diskreplay.errors import StorageFull, warn_caller
from diskreplay.folders import close_when_collected, show_paths, shown

_WAIT_BEFORE = 1
_PAGE_BYTES = 4096
_libc = ctypes.CDLL(None, use_errno=True)
# Called through PyDLL, pwrite keeps the GIL. Declared argument types would cost half a microsecond a call. Without
# declared types, numbers are passed as C ints, so larger offsets are left to `write_at`.
_pwrite_held = ctypes.PyDLL(None).pwrite
_MOST_HELD, _LARGEST_INT = 256 << 10, (1 << 31) - 1
# The page cache gets the pages of one write as one folio. Folios of a page each take the longest to make and to sync.
# Larger folios than these save little more, and after a sync, the first write to each of their pages takes longer.
_ZEROS = bytes(128 << 10)


class descriptor:
    __slots__ = ("_fd",)

    def __init__(self, path: os.PathLike[str] | str, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def write_file(path: str, data: bytes = b"", *, nbytes: int | None = None) -> None:
    """Write a file that no other process looks at yet: ``data``, or ``nbytes`` zeros without disk blocks.

    Raises the system's OSError; ENOSPC if only a part of ``data`` fits. The unfinished file is left.
    """
    with descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as fd:
        if nbytes is not None:
            os.ftruncate(fd, nbytes)
        elif os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def write_zeros(path: str, nbytes: int) -> None:
    """Write a file of zeros that no other process looks at yet, with disk blocks for all its bytes.

    Without blocks, the file could not be read through a mapping on a full disk: in tmpfs, reading a page without a
    block needs room. Raises the system's OSError; the unfinished file is left.
    """
    write_file(path, nbytes=nbytes)
    with descriptor(path, os.O_WRONLY | os.O_NOFOLLOW) as fd:
        os.posix_fallocate(fd, 0, nbytes)


def write_sparse(path: str, data: bytes) -> None:
    """Write a file that no other process looks at yet, with holes for its pages of zeros.

    Raises the system's OSError; the unfinished file is left.
    """
    write_file(path, nbytes=len(data))
    with descriptor(path, os.O_WRONLY | os.O_NOFOLLOW) as fd:
        for at in range(0, len(data), _PAGE_BYTES):
            page = data[at : at + _PAGE_BYTES]
            if page.count(0) != len(page):
                write_at(fd, page, at)


def write_at(fd: int, data: Any, offset: int) -> None:
    count = os.pwrite(fd, data, offset)
    while count < len(data):
        data, offset = memoryview(data)[count:], offset + count
        count = os.pwrite(fd, data, offset)


def write_zeros_at(fd: int, start: int, stop: int) -> None:
    """Write zeros from byte ``start`` to byte ``stop`` of a file, so that its pages are in the page cache."""
    for at in range(start, stop, len(_ZEROS)):
        write_at(fd, _ZEROS[: stop - at], at)


def write_row(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes, or a view of bytes, as `write_at` does; a write of at most 256 KiB keeps the GIL.

    Copying a row into the page cache takes less time than getting the GIL back from another thread.
    """
    nbytes = len(data)
    if nbytes <= _MOST_HELD and offset <= _LARGEST_INT:
        held = data if type(data) is bytes else bytes(data)
        if _pwrite_held(fd, held, nbytes, offset) == nbytes:
            return
    write_at(fd, data, offset)  # completes a partial write; repeats a failed write to get its error


def write_atomic(path: Path, data: bytes, *, synced: bool = False) -> None:
    """Replace ``path`` by ``data``, so that every reader sees either the old file or the new file.

    Without ``synced``, a power loss may leave an empty file. Raises StorageFull if the disk has no room for the new
    file; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_file(str(temporary), data)
        if synced:
            sync_file(temporary)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def overwrite(path: Path, data: bytes) -> bool:
    """Overwrite a small file with ``data`` if the file has the same length; else write nothing, and return False.

    Concurrent readers may see a mixture of old and new bytes. ``data`` must fit one sector of a disk, so that a power
    loss leaves the old or the new content. Raises StorageFull, and writes nothing, if the file system copies on write
    and has no room.
    """
    try:
        opening = descriptor(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    with storage_errors(path), opening as fd:
        if os.fstat(fd).st_size != len(data):
            return False
        write_at(fd, data, 0)
    return True


def storage_error(error: OSError, path: os.PathLike[str] | str, message: str | None = None) -> Exception:
    """Return StorageFull if an error means "no space", else the error itself; both name the path.

    ``message`` replaces the usual message of StorageFull.
    """
    show_paths(error)
    if error.errno == errno.EFBIG:
        limit = "is larger than its file system, or the limit of this process (`ulimit -f`), allows a file to be"
        return StorageFull(error.errno, f"{os.fspath(path)} {limit}; raise that limit, or use a smaller chunk_bytes")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        usual = f"no space for {os.fspath(path)}; free some and repeat the call, nothing was lost"
        return StorageFull(error.errno, message or usual)
    return error


@contextmanager
def storage_errors(path: os.PathLike[str] | str, message: str | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (full := storage_error(error, path, message)) is error:
            raise
        raise full from error


@contextmanager
def drafted(folder: os.PathLike[str] | str) -> Iterator[None]:
    """Remove a folder before the `with` block that makes it, and again if the block raises.

    Raises StorageFull if the disk has no room.
    """
    shutil.rmtree(folder, ignore_errors=True)  # a process that died in the block may have left it
    try:
        with storage_errors(folder):
            yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def sync_file(path: os.PathLike[str] | str) -> None:
    """Wait until the data of a file, mapped writes included, are durable."""
    with descriptor(path, os.O_RDONLY | os.O_NONBLOCK) as fd:  # without O_NONBLOCK, opening a pipe waits for its writer
        os.fdatasync(fd)


def sync_folder(path: os.PathLike[str] | str) -> None:
    with descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def move(source: Path, target: Path) -> None:
    os.rename(source, target)
    for folder in (target.parent, source.parent):
        sync_folder(folder)


def sync_tree(path: os.PathLike[str] | str) -> None:
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            sync_file(os.path.join(folder, name))
        sync_folder(folder)


class NotWritten(OSError):
    """Written data could not be made durable. A later successful sync does not prove that the data are durable."""


@contextmanager
def writing_back() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotWritten(error.errno, error.strerror, error.filename) from error


def sync_file_system(path: os.PathLike[str] | str) -> None:
    with descriptor(path, os.O_RDONLY) as fd:
        _syncfs(fd, path)


class FileSystemSync:
    """Syncs a file system repeatedly, and raises every write-back error that occurs after this object was made.

    The system reports a write-back error once to each open file. This object keeps one file open: a file that is opened
    for each sync would miss errors that were reported to another process before.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with storage_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        close_when_collected(self, self._fd)

    def sync(self) -> None:
        with writing_back():
            _syncfs(self._fd, self._path)


def _syncfs(fd: int, path: os.PathLike[str] | str) -> None:
    if _libc.syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))


def check_written(path: os.PathLike[str] | str) -> None:
    """Raise a file's write-back error, even if another caller of `sync_file_system` has already got the error."""
    with descriptor(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        if _libc.sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), _WAIT_BEFORE) != 0:
            code = ctypes.get_errno()
            if code not in (errno.ESPIPE, errno.EINVAL, errno.ENOSYS):
                raise OSError(code, os.strerror(code), os.fspath(path))


def punch_hole(fd: int, start: int, stop: int) -> None:
    """Make the bytes ``[start, stop)`` of a file zeros: free their blocks, or write zeros if that is not possible."""
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


# --- guarantees of file systems ---------------------------------------------------------------------------------------


# The numbers by which statfs names file systems: those of linux/magic.h, and of file systems outside the kernel. All
# FUSE file systems have the same number, virtiofs included.
_LOCAL = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0xF2F52010: "f2fs",
    0x3434: "nilfs2",
    0x3153464A: "jfs",
    0x52654973: "reiserfs",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x7366746E: "ntfs3",
    0x482B: "hfsplus",
    0xF15F: "ecryptfs",
    0x958458F6: "hugetlbfs",
    0x794C7630: "overlay",
}
# Several machines may have these file systems mounted, and may not see each other's locks and writes to mapped memory.
_NETWORK = {
    0x65735546: "fuse",
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x5346414F: "afs",
    0x6B414653: "afs",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x01161970: "gfs2",
    0x7461636F: "ocfs2",
    0x20030528: "orangefs",
    0x73757245: "coda",
    0x564C: "ncpfs",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
}
# These file systems write a reserved block in place. File systems that are not listed may need a new block for each
# write. They may copy on write, make snapshots or compress. Or another machine, or an underlying file system, decides
# where data are written.
_WRITE_IN_PLACE = {"ext4", "xfs", "tmpfs", "ramfs"}
# On these file systems, two calls of `os.stat` may return different inode numbers for one file.
_UNSTABLE_INODES = {"fuse", "9p", "smb", "cifs", "smb2", "vboxsf", "vmhgfs", "overlay"}
_warned: set[str] = set()


def file_system_type(path: os.PathLike[str] | str) -> str:
    """Return the name of the file system that holds a path, for example "ext4" (ext2 and ext3 too) or "0x1badface".

    Raises the system's OSError.
    """
    number = _type_number(path)
    return _LOCAL.get(number) or _NETWORK.get(number) or hex(number)


def _type_number(path: os.PathLike[str] | str) -> int:
    buffer = (ctypes.c_long * 32)()  # struct statfs; its first field is the type
    if _libc.statfs(os.fsencode(path), buffer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(path))
    return buffer[0] & 0xFFFFFFFF


def keeps_reservations(path: os.PathLike[str] | str) -> bool:
    """Return whether a reserved block of a file can always be written, even on a full disk.

    On any other file system, writing to mapped memory on a full disk would end the process by SIGBUS, so files are
    written with pwrite.
    """
    return file_system_type(path) in _WRITE_IN_PLACE


def is_shared(file_system: str) -> bool:
    """Return whether several machines may have a file system of this name mounted; True for an unknown name."""
    return file_system not in _LOCAL.values()


def has_stable_inodes(file_system: str) -> bool:
    return file_system not in _UNSTABLE_INODES


def makes_pages(file_system: str) -> bool:
    """Return whether reserving blocks of a file already makes the file's pages in memory."""
    return file_system == "tmpfs"


def network_warning(file_system: str, path: os.PathLike[str] | str) -> str | None:
    if file_system not in _NETWORK.values():
        return None
    return (
        f"{shown(path)} is on {file_system}. There, locks and writes to mapped memory may be invisible to other "
        "machines, or have no effect at all: write and read this store on one machine at a time, and keep backups, or "
        "put it on a local disk"
    )


def warn_of(file_system: str, path: os.PathLike[str] | str, uuid: str) -> None:
    message = network_warning(file_system, path)
    if message is not None and uuid not in _warned:
        _warned.add(uuid)
        warn_caller(message, RuntimeWarning)
