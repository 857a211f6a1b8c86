"""Findings, and reading files of a store that may be damaged or hostile: no link is followed, nothing is mapped.

The modules of this package are one independent reader. They share constants and the schema with the rest of
diskreplay, and none of the code that reads or writes stores.
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
"""Bytes of a file, or of flags, that are read at once."""


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """Something wrong with a store, as `Store.verify` and ``diskreplay verify`` report it.

    Attributes
    ----------
    kind : str
        ``"missing"`` (a file or folder), ``"type"`` (a link, or a folder where a file must be), ``"size"`` (of a
        file), ``"unreadable"`` (the system refuses), ``"metadata"`` (a document that says what cannot be),
        ``"checksum"`` (bytes that are not those that were sealed), ``"counters"``, ``"flags"`` (no sequence of
        episodes), ``"times"`` (a row that was published before the previous one), ``"priority"`` (one that is negative
        or not finite), ``"episodes"`` (a table of episodes that says something else than the rows), ``"eviction"``
        (an eviction by hand of what is not an episode), ``"unexpected"`` (what has no place), ``"quarantine"`` (steps
        that repair or a recovery has set aside) or ``"unproven"`` (steps that do not count, as nothing proves that they
        are whole).
    where : str
        The file or folder, relative to the store.
    detail : str
        What is wrong with it.
    """

    kind: str
    where: str
    detail: str


class Files:
    """Reads files below a folder and collects what is wrong with them.

    Names are relative to the folder and made of parts that the caller knows to be safe. ``on_read`` is told the bytes
    on disk of each file whose checksum was checked. Not thread-safe.
    """

    def __init__(self, root: str, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
        self.root, self.on_read = root, on_read
        self.problems: list[Problem] = []

    def report(self, kind: str, where: str, detail: str) -> None:
        """Add a finding."""
        self.problems.append(Problem(kind, where, detail))

    def quiet(self) -> "Files":
        """Return a reader of the same folder whose findings are no findings of this one."""
        return Files(self.root)

    def path(self, where: str) -> str:
        """Return the full path of a name."""
        return os.path.join(self.root, where or ".")  # the root itself may be a link to the store

    def listing(self, where: str) -> dict[str, str] | None:
        """Return "file", "folder", "link" or "other" for each name; None where a problem was reported."""
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
        """Report what a folder has and is not known: links, and names without a place; hidden files may be there."""
        for name, kind in sorted(names.items()):
            if name in known:
                continue
            where = f"{folder}/{name}" if folder else name
            if kind in ("link", "other"):
                self.report("type", where, "is a symbolic link" if kind == "link" else "is neither a file nor a folder")
            elif name != layout.METADATA and not name.startswith("."):
                self.report("unexpected", where, "has no place in a store")

    def is_folder(self, where: str) -> bool:
        """Whether a name is a folder; where it is not, that is reported."""
        fd = self._open(where, os.O_RDONLY | os.O_DIRECTORY, "folder")
        if fd is not None:
            os.close(fd)
        return fd is not None

    def check_lock(self, where: str) -> None:
        """Check that a lock is a regular file, if it exists: taking it creates it.

        It is not opened, and holds nothing: who may not write to the store may not read it.
        """
        with suppress(OSError):
            mode = os.lstat(self.path(where)).st_mode
            if not stat.S_ISREG(mode):
                what = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"
                self.report("type", where, what)

    @contextmanager
    def opened(self, where: str, nbytes: int | None = None) -> Iterator[int | None]:
        """Have a regular file open for a block, of ``nbytes`` if given; None where a problem was reported.

        Where the block cannot read it, that is reported too.
        """
        # A pipe must not make this wait for its other end.
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
        """Return a small file whole, or None where a problem was reported."""
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
            self.report("missing", where, f"is not there, a {wanted} has to be")
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
    """Return the error message of the system."""
    return error.strerror or type(error).__name__


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Return ``nbytes`` bytes at ``offset``; fewer only where the file ends."""
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes or not data:
        return data
    parts = [data]
    nbytes, offset = nbytes - len(data), offset + len(data)
    while nbytes > 0 and (data := os.pread(fd, nbytes, offset)):
        parts.append(data)
        nbytes, offset = nbytes - len(data), offset + len(data)
    return b"".join(parts)


# --- CRC-32C: of files, of zeros, and of a whole from that of its parts ----------------------------------------------

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed


def checksum(fd: int) -> int:
    """Return the CRC-32C of a file; holes are not read, so that a file of nothing else takes no time."""
    crc, at, size = 0, 0, os.fstat(fd).st_size
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while at < size:
        data = min(_seek(fd, at, os.SEEK_DATA, size), size)
        crc, at = after_zeros(crc, data - at), data
        hole = min(_seek(fd, at, os.SEEK_HOLE, size), size)
        while at < hole:
            block = read_at(fd, min(BLOCK_BYTES, hole - at), at)
            if not block:
                return crc  # cut off just now
            crc, at = crc32c(block, crc), at + len(block)
    return crc


def _seek(fd: int, at: int, what: int, size: int) -> int:
    try:
        return os.lseek(fd, at, what)
    except OSError:  # nothing of the kind up to the end
        return size


def after_zeros(crc: int, count: int) -> int:
    """Return the CRC-32C of what has the CRC-32C ``crc``, followed by ``count`` zero bytes."""
    return _times(_shift(count), crc ^ 0xFFFFFFFF) ^ 0xFFFFFFFF if count else crc


def joined(sums: NDArray[np.uint32], length: int, last: int) -> int:
    """Return the CRC-32C of parts of ``length`` bytes, the last one of ``last``, from their own, of which there is one.

    Without the inversions at either end a checksum is linear: that of a whole is that of its first part, shifted by
    what follows, exclusive-or that of the rest. Neighbours are joined at once; zeros in front change nothing.
    """
    values, shift = sums[:-1] ^ np.uint32(after_zeros(0, length)), _shift(length)
    while len(values) > 1:
        values = np.concatenate([np.zeros(len(values) % 2, np.uint32), values])
        values, shift = _times(shift, values[0::2]) ^ values[1::2], _times(shift, shift)
    before = int(values[0]) if len(values) else 0
    total = length * (len(sums) - 1) + last
    return _times(_shift(last), before) ^ int(sums[-1]) ^ after_zeros(0, last) ^ after_zeros(0, total)


def _shift(count: int) -> int:
    """Return x to the power of the bits of ``count`` bytes: so many zero bytes multiply the register by it."""
    product = 1 << 31  # polynomials over GF(2), bits reversed: the highest bit is 1, the next one x
    for bit in range(count.bit_length()):
        if count >> bit & 1:
            product = _times(_shift_by_power(bit), product)
    return product


@lru_cache(maxsize=64)
def _shift_by_power(bit: int) -> int:
    return _times(_shift_by_power(bit - 1), _shift_by_power(bit - 1)) if bit else 1 << 23


_Register = TypeVar("_Register", int, NDArray[np.uint32])


def _times(factor: int, register: _Register) -> _Register:
    """Multiply one polynomial, or an array of them, by another, modulo that of CRC-32C."""
    product = register ^ register  # zeros
    for bit in range(31, -1, -1):
        product ^= (register >> bit & 1) * factor
        factor = factor >> 1 ^ (_POLYNOMIAL if factor & 1 else 0)
    return product
