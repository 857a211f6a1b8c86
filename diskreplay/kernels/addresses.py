"""Where a row of a lane is in memory, by the table of an array: what kernels share that read one row at a time."""

from diskreplay.ids import Ints
from diskreplay.kernels import jit
from diskreplay.kernels.frozen import OWN_FOLDER


@jit.kernel("int", *["int"] * 5, *["ints"] * 4, inner=True, inlined=True)
def row_address(
    folder: int, first: int, lane: int, row: int, row_bytes: int, first_chunk: Ints, chunks: Ints, shift: Ints,
    bases: Ints,
) -> int:  # fmt: skip
    """Return the address of a row, 0 where it is not mapped.

    `first` is that of the lane in `frozen.FIRST_ROWS`; the arrays are those of a `ChunkTable`, which has the folder.
    """
    if first != OWN_FOLDER:
        row, lane = row + first, 0
    bits = shift[folder]
    chunk = row >> bits
    base = bases[first_chunk[folder] + chunk] if chunk < chunks[folder] else 0
    return base + ((lane << bits) + (row & ((1 << bits) - 1))) * row_bytes if base != 0 else 0
