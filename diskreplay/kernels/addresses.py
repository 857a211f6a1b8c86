"""Where a row of a lane is in memory, by the table of an array: what kernels share that read one row at a time."""

from diskreplay.ids import Ints

from . import jit
from .frozen import OWN_FOLDER


@jit.inner
def row_address(
    folder: int, first: int, lane: int, row: int, row_bytes: int, first_chunk: Ints, chunks: Ints, shift: Ints,
    bases: Ints,
) -> int:  # fmt: skip
    """Return the address of a row, 0 where it is not mapped.

    `first` is that of the lane in `frozen.FIRST_ROWS`; the arrays are those of a `ChunkTable`, which has the folder.
    """
    is_own = first == OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, first), jit.either(is_own, lane, 0)
    bits = shift[folder]
    chunk = row >> bits
    base = bases[first_chunk[folder] + chunk] if chunk < chunks[folder] else 0
    return base + ((lane << bits) + (row & ((1 << bits) - 1))) * row_bytes if base != 0 else 0
