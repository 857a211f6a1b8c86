"""Where a row of a lane is in memory, by the table of an array: what kernels share that read one row at a time."""

from diskreplay.ids import Ints

from . import jit
from .frozen import OWN_FOLDER
from .packed import number

FIRST_CHUNK, CHUNKS, SHIFT, BASES = range(4)
"""The arrays of a `ChunkTable` in a record, see `packed`: how many lines behind the first of these."""


@jit.inner
def row_address(record: Ints, table: int, folder: int, first: int, lane: int, row: int) -> int:
    """Return the address of a row of 8 bytes, 0 where it is not mapped.

    The arrays of the table, which has the folder, are in the record from line `table` on. `first` is that of the lane
    in `frozen.FIRST_ROWS`.
    """
    is_own = first == OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, first), jit.either(is_own, lane, 0)
    bits = number(record, table + SHIFT, folder)
    chunk = row >> bits
    if chunk >= number(record, table + CHUNKS, folder):
        return 0
    base = number(record, table + BASES, number(record, table + FIRST_CHUNK, folder) + chunk)
    return base + 8 * ((lane << bits) + (row & ((1 << bits) - 1))) if base != 0 else 0
