"""Checks of foreign HDF5 files: data sets must be arrays inside of the file, with sizes that the file can hold.

HDF5 lets a file name other files: by external storage, external links, and virtual data sets of parts of other files.
Reading such a data set would copy any file that it names.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_chunks, check_claim

__all__ = ["check_hdf5"]

_MOST_DEEP = 64
# Filters that do not pack: shuffle, and a checksum.
_PLAIN_FILTERS = (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)


def check_hdf5(path: Path) -> None:
    """Check every link and data set of a file before one is read.

    Raises
    ------
    FormatError
        A link or data set leads to another file; a data set is packed several times, or claims more than the file can
        hold. The message names it.
    OSError
        The file is not HDF5.
    """
    stored = path.stat().st_size
    with h5py.File(path, "r") as file:
        for name, item in _items(file.id, path):
            if isinstance(item, h5py.h5d.DatasetID):
                _check_dataset(item, f"{path}: {name}", stored)


# Files may have thousands of arrays, and h5py's objects are ten times slower than their identifiers.
def _check_dataset(item: h5py.h5d.DatasetID, what: str, stored: int) -> None:
    plan, itemsize = item.get_create_plist(), item.get_type().get_size()
    layout = plan.get_layout()
    if plan.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise FormatError(f"{what} is kept in other files; copy its data into this file")
    filters = [plan.get_filter(at)[0] for at in range(plan.get_nfilters())]
    if len([each for each in filters if each not in _PLAIN_FILTERS]) > 1:
        raise FormatError(f"{what} is packed by several filters, {filters}, which is not read")
    shape = item.get_space().get_simple_extent_dims()  # HDF5's own number of points may overflow
    check_claim(math.prod(shape) * itemsize, stored, what)
    if layout == h5py.h5d.CHUNKED:
        chunks = plan.get_chunk()
        check_claim(math.prod(chunks) * itemsize, stored, f"a chunk of {what}")
        check_chunks(shape, chunks, stored, what)


def _items(root: h5py.h5g.GroupID, path: Path) -> Iterator[tuple[str, object]]:
    """Yield the members of all groups, each group once."""
    waiting, seen = [(root, "", 0)], set()
    while waiting:
        group, above, depth = waiting.pop()
        for key in group:
            name = f"{above}{os.fsdecode(key)}"
            link = group.links.get_info(key).type
            if link == h5py.h5l.TYPE_SOFT:
                continue  # its target in this file is listed under its own name
            if link != h5py.h5l.TYPE_HARD:
                raise FormatError(f"{path}: {name} is a link to another file; copy its data into this file")
            item = h5py.h5o.open(group, key)
            if isinstance(item, h5py.h5g.GroupID):
                info = h5py.h5o.get_info(item)
                if (info.fileno, info.addr) in seen:
                    continue
                if depth >= _MOST_DEEP:
                    raise FormatError(f"{path}: {name:.200} is nested deeper than {_MOST_DEEP} groups")
                seen.add((info.fileno, info.addr))
                waiting.append((item, f"{name}/", depth + 1))
            yield name, item
