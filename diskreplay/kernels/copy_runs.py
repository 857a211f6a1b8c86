"""Copy runs of rows out of lanes, as the columns of a rollout have them.

Where a row is, is found once for all rows of a run that lie in one chunk, and these are read one behind the other. The
batch has them a row of all columns apart. The next runs are on their way from memory meanwhile.
"""

from diskreplay.ids import Ints

from . import jit
from .addresses import row_address
from .frozen import OWN_FOLDER

_AHEAD = 4  # runs
_LINE, _LINES = 64, 6  # bytes that a cache reads at once; what comes behind these is read ahead by the processor

# Rows of the table of runs, a column each: the slot of the segment, the lane, its first row, the number of rows, and
# the item that the first row is in the batch.
SLOT, LANE, ROW, COUNT, ITEM = range(5)
RUN_ROWS = 5


@jit.inner
def _copy(target: int, apart: int, source: int, row_bytes: int, count: int) -> None:
    """Copy successive rows to places that are so many bytes apart."""
    # Of a constant width a copy is a move and no call.
    if row_bytes == 4:
        for j in range(count):
            jit.copy_bytes(target + j * apart, source + j * 4, 4)
    else:
        for j in range(count):
            jit.copy_bytes(target + j * apart, source + j * row_bytes, row_bytes)


@jit.kernel("int", "ints2", *["ints"] * 7, "int", "int", "int", "int", "int")
def copy_runs(
    runs: Ints, folders: Ints, lane_base: Ints, first_rows: Ints, first_chunk: Ints, chunks: Ints, shift: Ints,
    bases: Ints, row_bytes: int, columns: int, out: int, begin: int, until: int,
) -> int:  # fmt: skip
    """Copy the rows of the runs `begin` to below `until` to the items of a batch at an address.

    The items of a run are so many `columns` apart. For `lane_base`, `folders` and `first_rows` see `frozen`; the four
    arrays behind them are of the table of the leaf. Returns the first run with a row that is not mapped, or -1.
    """
    for i in range(begin, until):
        if i + _AHEAD < until:
            slot, lane, row = runs[SLOT, i + _AHEAD], runs[LANE, i + _AHEAD], runs[ROW, i + _AHEAD]
            folder, first = folders[slot], first_rows[lane_base[slot] + lane]
            source = row_address(folder, first, lane, row, row_bytes, first_chunk, chunks, shift, bases)
            for line in range(min(_LINES, 1 + (runs[COUNT, i + _AHEAD] * row_bytes) // _LINE)):
                jit.prefetch(source + line * _LINE)
        slot, lane, row = runs[SLOT, i], runs[LANE, i], runs[ROW, i]
        folder, first = folders[slot], first_rows[lane_base[slot] + lane]
        target, left = out + runs[ITEM, i] * row_bytes, runs[COUNT, i]
        mask = (1 << shift[folder]) - 1
        while left > 0:
            source = row_address(folder, first, lane, row, row_bytes, first_chunk, chunks, shift, bases)
            if source == 0:
                return i
            inside = row + jit.either(first == OWN_FOLDER, 0, first) & mask
            count = min(left, mask + 1 - inside)
            _copy(target, columns * row_bytes, source, row_bytes, count)
            target += count * columns * row_bytes
            row += count
            left -= count
    return -1
