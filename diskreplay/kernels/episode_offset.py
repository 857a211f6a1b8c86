"""Find how far each step is from the start of its episode, among the flags of its lane."""

import numpy as np
from numpy.typing import NDArray

from diskreplay.ids import FIRST
from diskreplay.kernels import jit
from diskreplay.kernels.jit import load_byte

Ints = NDArray[np.int64]


@jit.kernel("int", *["ints"] * 8, "out_ints", "out_bytes")
def episode_offset(
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
    """Write how many steps of the episode come before each row, and the flags of the episode's first row.

    Rows that retention hides count: windows stay where they are in the true episode. Returns the first item with flags
    that are not mapped or show no start, or -1.
    """
    for i in range(slot.size):
        s = slot[i]
        if s < 0 or s >= chunks.size or lane[i] < 0 or lane[i] >= lanes[s] or row[i] < 0:
            return i
        bits = shift[s]
        mask = (1 << bits) - 1
        chunk, base = -1, 0
        r = row[i]
        while True:
            if r >> bits != chunk:
                chunk = r >> bits
                c = first_chunk[s] + chunk
                if chunk >= chunks[s] or c < 0 or c >= bases.size or bases[c] == 0:
                    return i
                base = bases[c] + (lane[i] << bits)
            found = load_byte(base + (r & mask))
            if found & FIRST:
                break
            r -= 1
            if r < 0:
                return i
        before[i] = row[i] - r
        flags[i] = found
    return -1
