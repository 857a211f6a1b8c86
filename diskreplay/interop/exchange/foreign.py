"""Checks of untrusted data sets: only regular files, sizes within bounds, and one class of error.

A data set may refer to pipes and devices, which block or never end. It may claim more data than it has, or make a
library raise errors of any class.
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

NUMBERS = "biuf"
"""The values of ``dtype.kind`` for booleans, integers and floats. Imports read no other dtypes."""

DTYPES = {
    *("bool", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
"""The names of these dtypes, for formats that name dtypes: some libraries register others, such as bfloat16."""

_DOCUMENTS = (".json", ".jsonl", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_DOCUMENT_BYTES = 64 << 20
# A file of any size may claim `_SMALL_BYTES` bytes of uncompressed data. A larger claim must be at most `_MOST_PACKED`
# times the stored bytes: deflate compresses at most 1032 bytes into one.
_SMALL_BYTES, _MOST_PACKED = 256 << 20, 1100
_MOST_ABSENT = 1 << 17  # an array may have up to this number of chunks in a file of any size
_OF_THE_SYSTEM = {
    *(errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR),
}


@contextmanager
def foreign(place: Path) -> Iterator[int]:
    """Check the files of a data set, and yield their total size in bytes.

    Errors of the ``with`` block are converted as by `reading`.
    """
    with reading(place):
        yield check_files(place)


@contextmanager
def reading(name: Path | str) -> Iterator[None]:
    """Convert errors of the ``with`` block to FormatError if damaged data can cause them.

    Errors of this package, of import statements, of the disk and of permissions keep their class. The text of this
    package's errors becomes one printable line. If ``name`` is the path of a data set, the message contains this path.
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
    """Return a text as one printable line.

    Names in a data set, and messages of libraries, may have any characters.
    """
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
    """Check that a data set is a regular file or a folder of regular files; return the total size in bytes.

    A link may lead to a file of the same data set. In a snapshot of the Hugging Face cache, a link may also lead to a
    file in the folder ``blobs`` of this cache. The size of a missing data set is 0.
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
    """If ``root`` is a snapshot in the Hugging Face cache, return the cache's folder ``blobs``, otherwise None."""
    above, snapshots = os.path.split(os.path.dirname(root))
    return os.path.join(above, "blobs") if snapshots == "snapshots" else None


def _linked(path: str, root: str, blobs: str | None) -> int:
    target = os.path.realpath(path)
    is_inside = os.path.commonpath((root, target)) == root
    if is_inside and (os.path.isdir(target) or not os.path.lexists(target)):
        return 0  # `check_files` also comes to a linked folder by its own path, and counts it there
    if is_inside or os.path.dirname(target) == blobs:
        return _checked(path, os.stat(target))
    raise FormatError(f"{path} is a link that leads out of the data set; copy the data set with `cp -rL` first")


def _checked(path: str, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path)
    check_document(path, status.st_size)
    return status.st_size


def check_document(name: str, nbytes: int) -> None:
    """Raise FormatError if a metadata file, such as zarr.json, is too large to be read at once."""
    if nbytes > _DOCUMENT_BYTES and name.endswith(_DOCUMENTS):
        raise FormatError(f"{name} has {nbytes} bytes, and a document of a data set has at most {_DOCUMENT_BYTES}")


def _irregular(path: str) -> FormatError:
    return FormatError(f"{path} is not a regular file; remove it from the data set")


def read_document(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raise FileNotFoundError if the file does not exist."""
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
    """Check the claim that a file or data set of ``stored`` bytes has ``nbytes`` bytes of uncompressed data.

    A claim of up to ``small`` bytes passes for any file, since constant values compress to almost nothing. A larger
    claim raises FormatError if no compressor could pack ``nbytes`` bytes into ``stored`` bytes.
    """
    if nbytes < 0 or nbytes > max(small, stored * _MOST_PACKED):
        raise FormatError(f"{what} claims {nbytes} bytes, which cannot come from {stored} stored bytes; it is damaged")


def check_chunks(shape: Sequence[int], chunks: Sequence[int], stored: int, what: str) -> None:
    """Raise FormatError if a file of ``stored`` bytes is too small to list all chunks of an array.

    A file's list of chunks has at least eight bytes for each chunk. A small number of chunks always passes the check,
    since a file may omit chunks of zeros.
    """
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if count > max(_MOST_ABSENT, stored // 8):
        raise FormatError(f"{what} claims {count} chunks, which cannot come from {stored} stored bytes; it is damaged")


def check_memory(nbytes: int, what: str) -> None:
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if nbytes > most:
        raise FormatError(f"{what} takes {nbytes} bytes at once, more than half of this machine's memory, {most}")


_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npz(path: Path, wanted: Callable[[str], bool] | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz archive by name: those that ``wanted`` accepts, or all if ``wanted`` is None.

    The arrays are read-only.
    """
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
            raise FormatError(f"{what} is not an array of a supported version of the .npy format")
        shape, is_fortran, dtype = read_header(opened)
        if dtype.hasobject:
            raise FormatError(f"{what} is an array of Python objects, which could run code")
        nbytes = member.file_size - opened.tell()
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise FormatError(f"{what} has another number of bytes than its shape {shape!s:.80} needs")
        # One read of all bytes is faster than NumPy's reads of 256 KiB. `read_npz` has checked that the bytes fit into
        # memory.
        return np.ndarray(shape, dtype, opened.read(nbytes), order="F" if is_fortran else "C")
