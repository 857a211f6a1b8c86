"""Checks of untrusted HDF5 files: data sets must be arrays inside of the file, with sizes that the file can hold.

An HDF5 file can refer to other files by external storage, external links and virtual data sets. If an import followed
these references, it could copy any file of the machine into the store.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, StoreNotFound
from diskreplay.interop.exchange.foreign import NUMBERS, check_chunks, check_claim

Shape = tuple[int, ...]

_MOST_DEEP = 64
_SUFFIXES = ".hdf5", ".h5"
_SHOWN = 5  # a message lists at most this number of files
_PLAIN_FILTERS = (h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32)  # these filters do not compress


def check_is_file(path: Path) -> None:
    if path.is_dir():
        found = [file.name for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES]
        listed = f": {', '.join(found[:_SHOWN])}{' and others' * (len(found) > _SHOWN)}" if found else " in HDF5"
        raise StoreNotFound(f"{path} is a folder; give the path of a file{listed}")
    if not path.is_file():
        raise StoreNotFound(f"there is no file {path}")


def check_hdf5(path: Path) -> dict[str, Shape | None]:
    """Check every link and data set of a file, before any of its data are read.

    Returns
    -------
    dict of str to tuple of int or None
        The shapes of the data sets by name. The value is None for a soft link. If a group has several names, the value
        is None for each name after the first.
    """
    stored, found = path.stat().st_size, dict[str, Shape | None]()
    with h5py.File(path, "r") as file:
        for name, item in _items(file.id, path):
            if isinstance(item, h5py.h5d.DatasetID):
                found[name] = _check_dataset(item, f"{path}: {name}", stored)
            elif item is None:
                found[name] = None
    return found


# The functions below use h5py's low-level identifiers: files may have thousands of arrays, and `h5py.Dataset` and
# `h5py.Group` are ten times slower.


def member(group: h5py.h5g.GroupID, name: str) -> Any:
    """Return the member of a group at a name or path; raise KeyError if the member is missing or a broken link."""
    return h5py.h5o.open(group, os.fsencode(name))


def read_array(item: h5py.h5d.DatasetID) -> Any:
    dtype, shape = item.dtype, item.shape
    if dtype.kind not in NUMBERS or not shape:
        return h5py.Dataset(item)[()]
    rows = np.empty(shape, dtype)
    read_into(item, rows)
    return rows


def read_into(item: h5py.h5d.DatasetID, rows: NDArray[Any]) -> None:
    """Read a data set of numbers into ``rows``, a contiguous array with the shape and dtype of the data set."""
    if rows.size:
        item.read(h5py.h5s.ALL, h5py.h5s.ALL, rows)


def attribute_names(item: h5py.h5g.GroupID) -> list[str]:
    names: list[bytes] = []
    h5py.h5a.iterate(item, names.append)
    return [os.fsdecode(name) for name in names]


def read_attribute(item: h5py.h5g.GroupID, name: str) -> Any:
    opened = h5py.h5a.open(item, os.fsencode(name))
    dtype, shape = opened.dtype, opened.shape
    if dtype.kind not in NUMBERS or shape is None:
        return h5py.Group(item).attrs[os.fsencode(name)]
    value = np.empty(shape, dtype)
    opened.read(value)
    return value[()]


def _check_dataset(item: h5py.h5d.DatasetID, what: str, stored: int) -> Shape:
    plan, itemsize = item.get_create_plist(), item.get_type().get_size()
    layout = plan.get_layout()
    if plan.get_external_count() or layout == h5py.h5d.VIRTUAL:
        raise FormatError(f"{what} is kept in other files; copy its data into this file")
    filters = [plan.get_filter(at)[0] for at in range(plan.get_nfilters())]
    if len([each for each in filters if each not in _PLAIN_FILTERS]) > 1:
        raise FormatError(f"{what} is compressed by several filters, {filters}, which is not supported; use one filter")
    shape: Shape = item.shape or ()  # the sizes are multiplied in Python, since HDF5's own product may overflow
    check_claim(math.prod(shape) * itemsize, stored, what)
    if layout == h5py.h5d.CHUNKED:
        chunks = plan.get_chunk()
        check_claim(math.prod(chunks) * itemsize, stored, f"a chunk of {what}")
        check_chunks(shape, chunks, stored, what)
    return shape


def _items(root: h5py.h5g.GroupID, path: Path) -> Iterator[tuple[str, object]]:
    """Go through all groups of a file, and yield the full name and the object of each member.

    The object is None for a soft link, and for a group that was found before by another name.
    """
    waiting, seen = [(root, "", 0)], set()
    while waiting:
        group, above, depth = waiting.pop()
        links: list[tuple[bytes, int]] = []
        group.links.iterate(lambda key, link, links=links: links.append((key, link.type)), info=True)
        for key, link in links:
            name = f"{above}{os.fsdecode(key)}"
            if link == h5py.h5l.TYPE_SOFT:
                yield name, None  # if the link's target is in this file, the target is yielded by its own name
                continue
            if link != h5py.h5l.TYPE_HARD:
                raise FormatError(f"{path}: {name} is a link to another file; copy its data into this file")
            item = h5py.h5o.open(group, key)
            if isinstance(item, h5py.h5g.GroupID):
                info = h5py.h5o.get_info(item)
                if (info.fileno, info.addr) in seen:
                    yield name, None
                    continue
                if depth >= _MOST_DEEP:
                    raise FormatError(f"{path}: {name:.200} is nested deeper than {_MOST_DEEP} groups")
                seen.add((info.fileno, info.addr))
                waiting.append((item, f"{name}/", depth + 1))
            yield name, item
