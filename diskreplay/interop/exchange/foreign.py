"""Data sets that others made: regular files alone, sizes that are bounded before they are believed, one class of error.

Nothing in a data set is trusted. It may name files that block or never end, claim more than it holds, or make a library
raise whatever its authors did not think of.
"""

import errno
import math
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from diskreplay import FormatError, ReplayError
from diskreplay.bounded_json import parse_json

__all__ = [
    "NUMBERS",
    "check_chunks",
    "check_claim",
    "check_files",
    "check_memory",
    "foreign",
    "read_document",
    "reading",
]

NUMBERS = "biuf"
"""The kinds of NumPy's dtypes whose values are bytes of a fixed size."""

_DOCUMENTS = (".json", ".jsonl", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_DOCUMENT_BYTES = 64 << 20
# Deflate packs at most 1032 bytes into one.
_SMALL_BYTES, _MOST_PACKED = 256 << 20, 1100
_MOST_ABSENT = 1 << 17  # chunks
# Errors of the system that say nothing of the data: they pass as they are.
_OF_THE_SYSTEM = {
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR),
}


@contextmanager
def foreign(place: Path) -> Iterator[int]:
    """Have a data set opened in a block, which is given its size in bytes.

    Raises
    ------
    FormatError
        It has something other than regular files and folders, or the block met any error of damaged data.
    """
    with reading(place):
        yield check_files(place)


@contextmanager
def reading(name: Path | str) -> Iterator[None]:
    """Raise FormatError for every error that damaged data causes in a block; others as they are.

    Errors of this package, missing libraries, and errors of the disk or of permissions are no fault of the data. An
    error of this package becomes one printable line, which names the data set where a path is given.
    """
    try:
        yield
    except ImportError:
        raise
    except ReplayError as error:
        line, place = _line(error), _line(name)
        if isinstance(name, Path) and place not in line:
            line = f"{place}: {line}"
        if line == str(error):
            raise
        raise type(error)(line) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
            raise
        raise FormatError(f"{name} cannot be read: {_reason(error)}; get an undamaged copy of it") from error


def _line(text: object) -> str:
    """Return a text in one line; names in a data set, and words of a library, may have any character."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(line.split()))


def _reason(error: Exception) -> str:
    line = _line(error)
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    if isinstance(error, MemoryError):
        return "it claims more than the memory holds"
    return f"{type(error).__name__}: {line:.200}" if line else type(error).__name__


def check_files(place: Path) -> int:
    """Check that a data set is a regular file, or a folder of regular files; return how many bytes these have.

    Links lead to files of the same data set, or to the blobs of the Hugging Face cache that the folder lies in. A place
    where nothing is has 0 bytes.

    Raises
    ------
    FormatError
        It has a pipe, device or socket, a link that leads elsewhere, or a document of more than 64 MiB.
    """
    root = os.path.realpath(place)
    try:
        status = os.stat(root)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if not stat.S_ISDIR(status.st_mode):
        raise FormatError(f"{place} is not a regular file or a folder; give the path of a data set")
    total, folders, blobs = 0, [root], _blobs(root)
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    total += _linked(entry.path, root, blobs)
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += _checked(entry.path, entry.stat(follow_symlinks=False))
                else:
                    raise _irregular(entry.path)
    return total


def _blobs(root: str) -> str | None:
    """Return the folder that links of a snapshot in the Hugging Face cache lead to; None elsewhere."""
    above, snapshots = os.path.split(os.path.dirname(root))
    return os.path.join(above, "blobs") if snapshots == "snapshots" else None


def _linked(path: str, root: str, blobs: str | None) -> int:
    target = os.path.realpath(path)
    if target.startswith(f"{root}{os.sep}") and (os.path.isdir(target) or not os.path.lexists(target)):
        return 0  # the walk checks the files of that folder
    if os.path.dirname(target) == blobs or target.startswith(f"{root}{os.sep}"):
        return _checked(path, os.stat(target))
    raise FormatError(f"{path} is a link that leads out of the data set; copy the data set with `cp -rL` first")


def _checked(path: str, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path)
    if status.st_size > _DOCUMENT_BYTES and path.endswith(_DOCUMENTS):
        raise FormatError(
            f"{path} has {status.st_size} bytes, and a document of a data set has at most {_DOCUMENT_BYTES}"
        )
    return status.st_size


def _irregular(path: str) -> FormatError:
    return FormatError(f"{path} is not a regular file; remove it from the data set")


def read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a data set.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    FormatError
        It is not a JSON object.
    """
    try:
        document = parse_json(path.read_bytes())
    except NotADirectoryError:
        raise FileNotFoundError(path) from None
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FormatError(f"{path} is not a JSON object")
    return document


def check_claim(nbytes: int, stored: int, what: str, small: int = _SMALL_BYTES) -> None:
    """Check that so many bytes can come from a file, or a data set, of ``stored`` bytes.

    A claim of up to ``small`` bytes passes for any file: constant values take next to nothing.
    Raises FormatError where no compression packs more than that.
    """
    if nbytes < 0 or nbytes > max(small, stored * _MOST_PACKED):
        raise FormatError(f"{what} claims {nbytes} bytes, which cannot come from {stored} stored bytes; it is damaged")


def check_chunks(shape: Sequence[int], chunks: Sequence[int], stored: int, what: str) -> None:
    """Check that an array of so many chunks can come from ``stored`` bytes: a library takes memory and time for each.

    An index has eight bytes or more for a chunk. Few chunks pass in any case, since a file may lack chunks of zeros.
    Raises FormatError for more.
    """
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if count > max(_MOST_ABSENT, stored // 8):
        raise FormatError(f"{what} claims {count} chunks, which cannot come from {stored} stored bytes; it is damaged")


def check_memory(nbytes: int, what: str) -> None:
    """Check that so many bytes may be held in memory at once.

    Raises FormatError beyond half of the machine's memory.
    """
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if nbytes > most:
        raise FormatError(f"{what} takes {nbytes} bytes at once, and {most} are half of this machine's memory")


_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, NDArray[Any]]:
    """Return the wanted arrays of an archive by their names, or all. They cannot be written to.

    Raises
    ------
    FormatError
        The archive is damaged, or there is none. A wanted array does not have the bytes of its header's shape, or has
        Python objects.
    """
    # Opened here: the module leaves a file open that has the first bytes of a zip file and is none.
    with reading(path), open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
        members = archive.infolist()
        nbytes = sum(member.file_size for member in members)
        check_claim(nbytes, path.stat().st_size, str(path))
        check_memory(nbytes, str(path))
        named = {member.filename.removesuffix(".npy"): member for member in members}
        return {
            name: _read_member(archive, member, path)
            for name, member in named.items()
            if wanted is None or wanted(name)
        }


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> NDArray[Any]:
    what = f"{path}: {member.filename!r:.80}"
    with archive.open(member) as opened:
        read_header = _HEADERS.get(npy.read_magic(opened))
        if read_header is None:
            raise FormatError(f"{what} is no array of a version that is read")
        shape, is_fortran, dtype = read_header(opened)
        if dtype.hasobject:
            raise FormatError(f"{what} is an array of Python objects, which could run code")
        nbytes = member.file_size - opened.tell()
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise FormatError(f"{what} does not have the bytes of its shape {shape!s:.80}")
        # All at once: NumPy reads 256 KiB at a time, which zlib takes longer for. No more than the directory says.
        return np.ndarray(shape, dtype, opened.read(nbytes), order="F" if is_fortran else "C")
