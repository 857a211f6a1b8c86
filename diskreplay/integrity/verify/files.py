"""The problems that verify reports, and a reader for files that may be damaged or hostile.

The reader follows no link, and maps no file into memory.

The modules of this package share constants, the schema and the identity of the machine with the rest of diskreplay, but
no code that reads or writes stores.
"""

import errno
import os
import stat
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.segments.documents import layout

BLOCK_BYTES = 1 << 20
"""The maximum number of bytes that are read at once."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A problem of a store, as `Store.verify` and ``diskreplay verify`` report it.

    Attributes
    ----------
    kind : str
        The kind of problem:

        - ``"missing"``: a file or folder is missing
        - ``"type"``: a link, or a folder in the place of a file
        - ``"size"``: a file has the wrong size
        - ``"unreadable"``: the system cannot read a file
        - ``"metadata"``: a metadata file has impossible content
        - ``"checksum"``: bytes do not match their checksum
        - ``"counters"``: counters are impossible or disagree
        - ``"flags"``: the flags of rows do not describe successive episodes
        - ``"times"``: a row's time is before the time of the previous row
        - ``"priority"``: a priority is negative or not finite
        - ``"episodes"``: a table of episodes disagrees with the rows
        - ``"eviction"``: an eviction by hand does not name an episode
        - ``"unexpected"``: a file or folder does not belong in a store
        - ``"quarantine"``: steps that repair or a recovery has set aside
        - ``"unproven"``: steps that do not count, since nothing proves that they are whole
    where : str
        The path of the file or folder, relative to the store.
    detail : str
        The problem in words.

    Examples
    --------
    >>> dr.open("cartpole.replay").verify(deep=True)  # no problem
    []
    """

    kind: str
    where: str
    detail: str


class Files:
    """Reads files below a folder and collects their problems.

    Not thread-safe. A method that returns None has reported a problem. Names are relative to the folder; the caller
    checks that a name has no part such as ``".."``. ``on_read`` is called with the disk usage, in bytes, of each file
    whose checksum was checked.
    """

    def __init__(self, root: str, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
        self.root, self.on_read = root, on_read
        self.problems: list[Problem] = []

    def report(self, kind: str, where: str, detail: str) -> None:
        self.problems.append(Problem(kind, where, detail))

    def quiet(self) -> "Files":
        """Return a new `Files` of the same folder, with a separate list of problems."""
        return Files(self.root)

    def path(self, where: str) -> str:
        return os.path.join(self.root, where or ".")  # the root itself may be a link to the store

    def listing(self, where: str) -> dict[str, str] | None:
        """Return "file", "folder", "link" or "other" for each name in a folder."""
        fd = self._open(where, os.O_RDONLY | os.O_DIRECTORY, "folder")
        if fd is None:
            return None
        try:
            with os.scandir(fd) as entries:
                return {entry.name: _type(entry) for entry in entries}
        except OSError as error:
            self.report("unreadable", where, reason(error))
            return None
        finally:
            os.close(fd)

    def report_unknown(self, folder: str, names: Mapping[str, str], known: Container[str]) -> None:
        """Report the names in a folder that are not in ``known``; hidden files and folders are allowed."""
        for name, kind in sorted(names.items()):
            if name in known:
                continue
            where = f"{folder}/{name}" if folder else name
            if kind in ("link", "other"):
                self.report("type", where, "is a symbolic link" if kind == "link" else "is neither a file nor a folder")
            elif name != layout.METADATA and not name.startswith("."):
                self.report("unexpected", where, "does not belong in a store")

    def is_folder(self, where: str) -> bool:
        fd = self._open(where, os.O_RDONLY | os.O_DIRECTORY, "folder")
        if fd is not None:
            os.close(fd)
        return fd is not None

    def check_lock(self, where: str) -> None:
        """Check that a lock file is a regular file.

        The file may be missing: the first use of the lock creates the file. The lock is not opened, because a user
        without write access may not be able to read it.
        """
        with suppress(OSError):
            mode = os.lstat(self.path(where)).st_mode
            if not stat.S_ISREG(mode):
                detail = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"
                self.report("type", where, detail)

    @contextmanager
    def opened(self, where: str, nbytes: int | None = None) -> Iterator[int | None]:
        """Open a regular file for a `with` block, and yield its descriptor, or None after a problem was reported.

        If ``nbytes`` is given, any other size is a problem. An OSError in the block, such as a failed read, is
        reported, too.
        """
        # Without O_NONBLOCK, opening a pipe would wait for a writer of the pipe.
        fd = self._open(where, os.O_RDONLY | os.O_NONBLOCK, "file")
        if fd is None:
            yield None
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self.report("type", where, "is not a regular file")
            elif nbytes is not None and status.st_size != nbytes:
                self.report("size", where, f"has {status.st_size} bytes and not {nbytes}")
            else:
                yield fd
                return
            yield None
        except OSError as error:
            self.report("unreadable", where, reason(error))
        finally:
            os.close(fd)

    def read(self, where: str, most: int, nbytes: int | None = None) -> bytes | None:
        with self.opened(where, nbytes) as fd:
            if fd is None:
                return None
            if (size := os.fstat(fd).st_size) <= most:
                return read_at(fd, size, 0)
            self.report("size", where, f"has {size} bytes, more than any such file")
        return None

    def _open(self, where: str, flags: int, wanted: str) -> int | None:
        try:
            return os.open(self.path(where), flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self.report("missing", where, f"is missing; a {wanted} must be there")
        except OSError as error:
            if os.path.islink(self.path(where)):
                self.report("type", where, "is a symbolic link")
            elif error.errno in (errno.ENOTDIR, errno.ENXIO):
                self.report("type", where, f"is not a {wanted}")
            else:
                self.report("unreadable", where, reason(error))
        return None


def _type(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "link"
    return "file" if entry.is_file() else "folder" if entry.is_dir() else "other"


def reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return ``nbytes`` bytes at ``offset``; fewer only at the end of the file."""
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes or not data:
        return data
    parts = [data]
    nbytes, offset = nbytes - len(data), offset + len(data)
    while nbytes > 0 and (data := os.pread(fd, nbytes, offset)):
        parts.append(data)
        nbytes, offset = nbytes - len(data), offset + len(data)
    return b"".join(parts)


# --- CRC-32C: of files, of zeros, and of joined parts ----------------------------------------------------------------

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed


def checksum(fd: int) -> int:
    """Return the CRC-32C of a file; holes are not read, so a sparse file takes little time."""
    crc, at, size = 0, 0, os.fstat(fd).st_size
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while at < size:
        data = min(_seek(fd, at, os.SEEK_DATA, size), size)
        crc, at = after_zeros(crc, data - at), data
        hole = min(_seek(fd, at, os.SEEK_HOLE, size), size)
        while at < hole:
            block = read_at(fd, min(BLOCK_BYTES, hole - at), at)
            if not block:
                return crc  # the file was truncated meanwhile
            crc, at = crc32c(block, crc), at + len(block)
    return crc


def _seek(fd: int, at: int, whence: int, size: int) -> int:
    try:
        return os.lseek(fd, at, whence)
    except OSError:  # there is no data, or no hole, up to the end
        return size


def after_zeros(crc: int, count: int) -> int:
    """Return the CRC-32C of data followed by ``count`` zero bytes; ``crc`` is the CRC-32C of the data."""
    return _times(_shift(count), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF if count else crc


def joined(sums: NDArray[np.uint32], length: int, last: int) -> int:
    """Return the CRC-32C of data that has several parts; ``sums``, ``(parts,)`` uint32, has each part's CRC-32C.

    There is at least one part. All parts have ``length`` bytes, except the last part, which has ``last`` bytes. Without
    the inversions of the register, a CRC is linear: crc(a + b) is the exclusive-or of crc(b) and crc(a) shifted by the
    length of b. Each round joins pairs of neighbouring parts. An additional first part of zeros does not change the
    result.
    """
    values, shift = sums[:-1] ^ np.uint32(after_zeros(0, length)), _shift(length)
    while len(values) > 1:
        values = np.concatenate([np.zeros(len(values) % 2, np.uint32), values])
        values, shift = _times(shift, values[0::2]) ^ values[1::2], _times(shift, shift)
    before = int(values[0]) if len(values) else 0
    total = length * (len(sums) - 1) + last
    return _times(_shift(last), before) ^ int(sums[-1]) ^ after_zeros(0, last) ^ after_zeros(0, total)


def _shift(count: int) -> int:
    """Return the polynomial x ** (8 * count): appending ``count`` zero bytes multiplies the CRC register by it."""
    product = 1 << 31  # polynomials over GF(2), bits reversed: the highest bit stands for 1, the next bit for x
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            product = _times(_shift_by_power(bit), product)
    return product


@lru_cache(maxsize=64)
def _shift_by_power(bit: int) -> int:
    return _times(_shift_by_power(bit - 1), _shift_by_power(bit - 1)) if bit else 1 << 23


_Register = TypeVar("_Register", int, NDArray[np.uint32])


def _times(factor: int, register: _Register) -> _Register:
    """Return ``factor`` times ``register``, both polynomials, modulo the polynomial of CRC-32C."""
    product = register ^ register  # zeros
    for bit in range(31, -1, -1):
        product ^= (register >> bit & 1) * factor
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return product
