"""Memory mappings without open descriptors: with Python's mmap, 1,000 chunks would use up a process's descriptors."""

import ctypes
import errno
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskreplay.errors import FormatError, ReplayError
from diskreplay.folders import BY_PATH, Lookup
from diskreplay.segments.files.durable import descriptor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1
_MAP_FAILED = ctypes.c_void_p(-1).value
MADV_RANDOM, MADV_WILLNEED, MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 1, 3, 14, 23

_POPULATED_AT_ONCE = 64 * PAGESIZE


class MappingRefused(ReplayError):
    pass


_there: set[int] = set()  # the address of each mapping of this process
_relief: list[Callable[[], bool]] = []


def count_mappings() -> int:
    return len(_there)


def relieved_by(release: Callable[[], bool]) -> None:
    """Register a function that frees mappings, and returns whether it has freed any.

    The function is called if the system refuses a new mapping. If the function returns True, the new mapping is tried
    again.
    """
    _relief.append(release)


def _map(fd: int, nbytes: int, prot: int) -> int:
    address = _libc.mmap(None, nbytes, prot, _MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map a file: {os.strerror(code)}")
    return int(address)


def _unmap(address: int, nbytes: int) -> None:
    _there.discard(address)  # before munmap, because a new mapping may get the same address
    _libc.munmap(address, nbytes)


def _refused(error: OSError) -> MappingRefused:
    return MappingRefused(
        f"this process has {count_mappings()} files of stores mapped, and the system refuses another one: "
        f"{os.strerror(error.errno or 0)}. Close stores and samplers, and release arrays and episodes, that are not "
        "needed any more; make stores with larger chunk_bytes; or allow a process more memory, or more mappings "
        "(sysctl vm.max_map_count)"
    )


class Mapping:
    """A shared mapping of one file; it is unmapped when no reference to the mapping or its arrays is left.

    Any thread may read the mapping. The code that made the mapping decides which thread may write where. Raises
    MappingRefused if the system allows this process no more mappings or memory.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        self.writable = writable
        prot = _PROT_READ | (_PROT_WRITE if writable else 0)
        while True:
            try:
                self.address = _map(fd, nbytes, prot)
                break
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                if not any([release() for release in _relief]):
                    raise _refused(error) from error
        _there.add(self.address)
        weakref.finalize(self, _unmap, self.address, nbytes).atexit = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, not self.writable)}

    def array(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the file as an array that keeps this mapping alive."""
        return np.asarray(self).view(dtype).reshape(shape)

    def advise(self, advice: int) -> None:
        _libc.madvise(self.address, self.nbytes, advice)

    def populate(self, start: int, stop: int) -> None:
        """Make the pages from byte ``start`` to byte ``stop`` of the file writable without a page fault.

        ``start`` is a multiple of the page size. Raises OSError ENOSPC if the disk has no room for a write to these
        pages. On Linux before 5.14, the method does nothing, because the system call is missing. Only large pages in
        the page cache need this call, and those versions of Linux have no large pages there.
        """
        # Each call populates few pages, because other threads cannot map or unmap memory during a call.
        for first in range(start, stop, _POPULATED_AT_ONCE):
            part = min(stop - first, _POPULATED_AT_ONCE)
            failed = _libc.madvise(self.address + first, part, _MADV_POPULATE_WRITE) != 0
            if failed and ctypes.get_errno() == errno.EFAULT:  # a write to these pages would end the process by SIGBUS
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def will_need(self, start: int, nbytes: int) -> None:
        first = (self.address + start) & -PAGESIZE
        _libc.madvise(first, self.address + start + nbytes - first, MADV_WILLNEED)


def open_regular(path: str, nbytes: int | None, flags: int = os.O_RDONLY, lookup: Lookup = BY_PATH) -> int:
    """Open a regular file of exactly ``nbytes``, never through a symbolic link, and return its descriptor.

    Raises FormatError if the file is a link, not regular, or of another size.
    """
    try:
        fd = lookup.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except IsADirectoryError as error:  # raised only if a folder is opened for writing
        raise _unfit(path, "not a regular file", nbytes) from error
    except OSError as error:
        if os.path.islink(path):
            raise FormatError(f"{path} is a symbolic link; a store has none, restore the file itself") from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or (nbytes is not None and status.st_size != nbytes):
        os.close(fd)
        kind = f"{status.st_size} bytes" if stat.S_ISREG(status.st_mode) else "not a regular file"
        raise _unfit(path, kind, nbytes)
    return fd


class opened(descriptor):
    __slots__ = ()

    def __init__(self, path: str, nbytes: int | None, flags: int = os.O_RDONLY, lookup: Lookup = BY_PATH) -> None:
        self._fd = open_regular(path, nbytes, flags, lookup)


def read_regular(path: str, nbytes: int | None, most: int) -> bytes:
    return read_with_status(path, nbytes, most)[0]


def read_with_status(
    path: str, nbytes: int | None, most: int, lookup: Lookup = BY_PATH
) -> tuple[bytes, os.stat_result]:
    """Return the first ``most`` bytes of a file, and the file's status; errors as for `open_regular`."""
    fd = open_regular(path, nbytes, lookup=lookup)
    try:
        status = os.fstat(fd)
        return os.pread(fd, min(status.st_size, most), 0), status
    finally:
        os.close(fd)


def _unfit(path: str, kind: str, nbytes: int | None) -> FormatError:
    needed = "" if nbytes is None else f" where {nbytes} are needed"
    return FormatError(f"{path} is {kind}{needed}; the store is damaged, restore this file")


def read_into(path: str, nbytes: int, out: NDArray[np.uint8], lookup: Lookup = BY_PATH) -> None:
    with opened(path, nbytes, lookup=lookup) as fd:
        if not read_part(fd, 0, out):
            raise FormatError(f"{path} has become shorter than {nbytes} bytes; the store is damaged, restore this file")


def read_part(fd: int, start: int, out: NDArray[np.uint8]) -> bool:
    """Fill an array with the bytes of a file from ``start`` on; return False if the file is too short."""
    done, view = 0, out.data
    while done < len(view):
        count = os.preadv(fd, [view[done:]], start + done)  # one call reads at most 2 GiB
        if not count:
            return False
        done += count
    return True


def data_ranges(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets (first, stop) of each part of a file that is no hole, from ``start`` to ``stop``.

    Holes read as zeros, and may be larger than any memory.
    """
    while start < stop:
        try:
            first = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
                raise
            return
        if first < stop:
            start = min(os.lseek(fd, first, os.SEEK_HOLE), stop)
            yield first, start
        else:
            return


def map_file(path: str, nbytes: int, *, writable: bool = False) -> Mapping:
    fd = open_regular(path, nbytes, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return Mapping(fd, nbytes, writable=writable)
    finally:
        os.close(fd)


def refuse_links(segment: Path, names: Iterable[str], lookup: Lookup = BY_PATH) -> None:
    """Raise FormatError if one of the paths ``names`` below the folder of a segment is a symbolic link."""
    found = lookup.first_link([f"{segment}/{name}" for name in names])
    if found is not None:
        raise FormatError(f"{found} is a symbolic link; a store has none, restore the file or folder")
