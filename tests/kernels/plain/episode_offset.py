"""Plain twins of the kernels of `kernels.episode_offset`."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import FIRST
from diskreplay.kernels.episode_offset import Ints
from tests.kernels.plain.find_windows import row_address


def episode_offset_plain(
    slot: Ints,
    lane: Ints,
    row: Ints,
    first_chunk: Ints,
    chunks: Ints,
    shift: Ints,
    lanes: Ints,
    bases: Ints,
    before: Ints,
    flags: NDArray[np.uint8],
) -> int:
    """Do what `episode_offset` does, row after row."""
    for i in range(len(slot)):
        for r in range(int(row[i]), -2, -1):
            address = row_address(int(slot[i]), int(lane[i]), r, first_chunk, chunks, shift, lanes, bases, 1)
            if not address:
                return i
            found = ctypes.string_at(address, 1)[0]
            if found & FIRST:
                before[i], flags[i] = row[i] - r, found
                break
        else:
            return i
    return -1
