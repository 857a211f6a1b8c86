"""Archives of NumPy, ``.npz``, that others made."""

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_claim, check_memory, reading

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


@contextmanager
def opened_npz(path: Path) -> Iterator[NpzFile[Any]]:
    """Have an archive open for a block, in which its arrays are read.

    Each array has the bytes of its header's shape, and no array holds objects.

    Raises
    ------
    FormatError
        The archive is damaged, or there is none; the block may meet the damage.
    """
    # Opened here: NumPy leaves a file open that has the first bytes of a zip file and is none.
    with reading(path), open(path, "rb") as raw:
        with zipfile.ZipFile(raw) as archive:
            _check(archive, path)
        raw.seek(0)
        with np.load(raw, allow_pickle=False) as file:
            yield file


def _check(archive: zipfile.ZipFile, path: Path) -> None:
    nbytes = sum(member.file_size for member in archive.infolist())
    check_claim(nbytes, path.stat().st_size, str(path))
    check_memory(nbytes, str(path))
    for member in archive.infolist():
        what = f"{path}: {member.filename!r:.80}"
        with archive.open(member) as opened:
            read_header = _HEADERS.get(npy.read_magic(opened))
            if read_header is None:
                raise FormatError(f"{what} is no array of a version that is read")
            shape, _, dtype = read_header(opened)
            if dtype.hasobject:
                raise FormatError(f"{what} is an array of Python objects, which could run code")
            if math.prod(shape) * dtype.itemsize != member.file_size - opened.tell():
                raise FormatError(f"{what} does not have the bytes of its shape {shape!s:.80}")
