"""Archives of NumPy, ``.npz``, whose damage is one of the errors that are named here."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

# What NumPy and zipfile raise of damaged files; a TypeError where it is a single array.
UNREADABLE = OSError, ValueError, KeyError, TypeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error


@contextmanager
def opened_npz(path: Path) -> Iterator[NpzFile[Any]]:
    """Have an archive open for a block, in which its arrays are read. Raises one of `UNREADABLE`, also in the block."""
    # Opened here: NumPy leaves a file open that has the first bytes of a zip file and is none.
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
        yield file
