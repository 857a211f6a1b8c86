"""What the index reads of a segment's files: its flags, its counters, and whether all of its chunks are there."""

import os

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.commit import read_lane_counter
from diskreplay.format.mapping import read_into
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo, chunk_nbytes, chunk_path


def check_chunks(root: Root, info: SegmentInfo, checked: int, rows: int) -> int:
    """Check that every chunk is there, whole, that has one of the rows from ``checked`` to ``rows``.

    Return up to which row all chunks are known to be there.

    Raises
    ------
    FileNotFoundError
        One is not.
    FormatError
        One has another size.
    """
    if rows <= checked:
        return checked
    known = []
    lanes, folder = len(info.lanes), str(info.path)
    for leaf, array in root.blueprint.arrays.items():
        per_chunk = info.chunk_rows[leaf]
        chunks = -(-rows // per_chunk)
        known.append(chunks * per_chunk)
        size = lanes * per_chunk * array.row_bytes
        for chunk in range(checked // per_chunk, chunks):
            path = f"{folder}/{leaf}/{array.chunk_key(chunk)}"
            found = os.stat(path).st_size
            if found != size:
                raise FormatError(
                    f"{path} is {found} bytes where {size} are needed; the store is damaged, restore this file"
                )
    return min(known)


def read_sealed(root: Root, info: SegmentInfo) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return how many rows each lane of a sealed segment has, and their flags, lane after lane.

    By position and not mapped: it may be one of thousands of small ones.

    Raises
    ------
    FileNotFoundError
        It was evicted, or a file of it is missing.
    FormatError
        It is damaged.
    """
    lanes, per_chunk = len(info.lanes), info.chunk_rows[layout.DONE]
    committed = read_lane_counter(f"{info.path}/{layout.COMMITTED}", lanes)
    least, most = int(committed.min()), int(committed.max())
    if least < 0 or most * lanes > layout.POSITION_MASK:
        raise FormatError(f"{info.path}: committed is damaged; restore it")
    check_chunks(root, info, 0, most)
    chunks = -(-most // per_chunk)
    flags = np.empty((chunks, lanes, per_chunk), np.uint8)
    size = chunk_nbytes(root, info, layout.DONE)
    for chunk in range(chunks):
        # Of a single lane, what lies behind its rows need not be read.
        wanted = min(per_chunk, most - chunk * per_chunk) if lanes == 1 else size
        read_into(chunk_path(root, info, layout.DONE, chunk), size, flags[chunk].reshape(-1)[:wanted])
    by_lane = flags.transpose(1, 0, 2).reshape(lanes, -1)
    if least == most:
        return committed, by_lane[:, :most].reshape(-1)
    return committed, by_lane[np.arange(by_lane.shape[1]) < committed[:, None]]
