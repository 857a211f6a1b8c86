"""HDF5 files that others made: their data sets are arrays inside of the file, as long as the file can hold.

HDF5 lets a file name others: external storage, external links, and virtual data sets of parts of other files. Reading
such a data set would copy whatever file it names.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import h5py

from diskreplay import FormatError
from diskreplay.interop.exchange.foreign import check_claim

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
        It is no HDF5 file.
    """
    stored = path.stat().st_size
    with h5py.File(path, "r") as file:
        for name, item in _items(file, path):
            if isinstance(item, h5py.Dataset) and item.shape is not None:
                _check_dataset(item, f"{path}: {name}", stored)


def _check_dataset(item: h5py.Dataset, what: str, stored: int) -> None:
    if item.external or item.is_virtual:
        raise FormatError(f"{what} is kept in other files; copy its data into this file")
    plan = item.id.get_create_plist()
    filters = [plan.get_filter(at)[0] for at in range(plan.get_nfilters())]
    if len([each for each in filters if each not in _PLAIN_FILTERS]) > 1:
        raise FormatError(f"{what} is packed by several filters, {filters}, which is not read")
    if item.chunks is not None:
        check_claim(math.prod(item.chunks) * item.dtype.itemsize, stored, f"a chunk of {what}")
    check_claim(math.prod(item.shape) * item.dtype.itemsize, stored, what)


def _items(group: h5py.Group, path: Path) -> Iterator[tuple[str, h5py.Group | h5py.Dataset]]:
    """Yield the members of all groups, each group once."""
    waiting, seen = [(group, 0)], set()
    while waiting:
        group, depth = waiting.pop()
        for key in group:
            name = f"{group.name}/{key}".lstrip("/")
            link = group.get(key, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                raise FormatError(f"{path}: {name} is a link to another file; copy its data into this file")
            if isinstance(link, h5py.SoftLink):
                continue  # its target in this file has a name of its own
            item = group[key]
            info = h5py.h5o.get_info(item.id)
            if isinstance(item, h5py.Group) and (info.fileno, info.addr) not in seen:
                if depth >= _MOST_DEEP:
                    raise FormatError(f"{path}: {name:.200} is nested deeper than {_MOST_DEEP} groups")
                seen.add((info.fileno, info.addr))
                waiting.append((item, depth + 1))
            yield name, item
