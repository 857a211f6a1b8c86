"""The values of a data set as the library of its format reads them, without the package."""

import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np


def plain_values(place: Path) -> list[np.ndarray]:
    """Return every readable array in the files of a data set, and files of plain numbers as bytes."""
    files = sorted(each for each in place.rglob("*") if each.is_file()) if place.is_dir() else [place]
    found = list[np.ndarray]()
    for path in files:
        with suppress(Exception):
            for rows in _arrays(path):
                found.append(rows)
    if place.suffix == ".zip" or any(path.name in (".zarray", "zarr.json") for path in files):
        found += _of_zarr(place)
    # Buffers of several environments have rows of all of them in turn, and begin anywhere.
    lanes = [np.moveaxis(rows, 1, 0) for rows in found if rows.ndim > 1 and rows.shape[1] < 16]
    return [*found, *(np.concatenate([lane, lane]) for some in lanes for lane in some)]


def _arrays(path: Path) -> Iterator[np.ndarray]:
    read = next((read for suffixes, read in READERS.items() if path.name.endswith(suffixes)), None)
    if read is not None:
        yield from read(path)


def _of_npz(path: Path) -> Iterator[np.ndarray]:
    with open(path, "rb") as raw, np.load(raw) as file:  # np.load leaves a damaged file of a path open
        for name in file.files:
            with suppress(Exception):
                yield np.asarray(file[name])


def _of_hdf5(path: Path) -> Iterator[np.ndarray]:
    import h5py

    with h5py.File(path) as file:
        found = list[Any]()
        file.visititems(lambda _, item: found.append(item))
        yield from (
            np.asarray(item[()]) for item in found if isinstance(item, h5py.Dataset) and item.dtype.kind in "biuf"
        )


def _of_table(path: Path) -> Iterator[np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    waiting = list[Any]()
    if path.suffix == ".arrow":
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as opened:
            waiting += opened.read_all().columns
    else:
        with pq.ParquetFile(path) as opened:
            for name in opened.schema_arrow.names:
                try:
                    waiting += opened.read([name]).columns
                except (OSError, pa.ArrowInvalid):
                    for group in range(opened.metadata.num_row_groups):
                        with suppress(OSError, pa.ArrowInvalid):
                            waiting += opened.read_row_group(group, [name]).columns
    while waiting:
        column = waiting.pop()
        if isinstance(column, pa.ChunkedArray):
            waiting += column.chunks
        elif pa.types.is_struct(column.type):
            waiting += column.flatten()
        elif pa.types.is_nested(column.type):
            waiting.append(column.flatten())
        elif pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            yield np.frombuffer(b"".join(each or b"" for each in column.to_pylist()), "u1")
        else:
            yield (
                np.asarray(column.to_numpy(zero_copy_only=False))
                if not pa.types.is_string(column.type)
                else np.zeros(0)
            )


def _of_zarr(place: Path) -> Iterator[np.ndarray]:
    import zarr

    names = list[str]()
    if place.is_dir():
        names = [
            each.parent.relative_to(place).as_posix()
            for each in place.rglob("*")
            if each.name in (".zarray", "zarr.json")
        ]
        store: Any = place
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as file:
            names = [name.rpartition("/")[0] for name in file.namelist() if name.endswith((".zarray", "zarr.json"))]
        store = zarr.storage.ZipStore(place, mode="r")
    group = zarr.open_group(store, mode="r")
    for name in names:
        with suppress(Exception):
            item = group[name]
            rows = np.zeros(item.shape, item.dtype)
            for at in range(len(rows)):
                with suppress(Exception):  # its chunk is damaged
                    rows[at] = item[at]
            yield rows


def _of_bytes(path: Path) -> Iterator[np.ndarray]:
    yield np.fromfile(path, "u1", 1 << 20)


READERS: dict[tuple[str, ...], Callable[[Path], Iterator[np.ndarray]]] = {
    (".npz",): _of_npz,
    (".hdf5", ".h5"): _of_hdf5,
    (".parquet", ".arrow"): _of_table,
    (".memmap", "-of-00001"): _of_bytes,
}
