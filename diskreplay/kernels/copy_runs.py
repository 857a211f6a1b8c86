"""Copy runs of rows out of lanes, as the columns of a rollout have them.

Where a row is, is found once for all rows of a run that lie in one chunk, and these are read one behind the other. The
batch has them a row of all columns apart. The next runs are on their way from memory meanwhile.
"""

from diskreplay.ids import Ints

from . import frozen, gathering as cols, jit
from .huge_pages import CACHE_LINE

_AHEAD = 4  # runs
_LINES = 6  # lines of the caches; what comes behind these is read ahead by the processor

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


@jit.inner
def _find(record: Ints, line: Ints, runs: Ints, i: int, done: int) -> tuple[int, int]:
    """Return where row `done` of a run is, 0 if it is not mapped, and how many its chunk has from there on."""
    slot, lane, row = runs[SLOT, i], runs[LANE, i], runs[ROW, i] + done
    folder = jit.load_int(record[frozen.FOLDERS] + 8 * slot)
    if folder < 0 or folder >= line[cols.FOLDERS]:
        return 0, 0
    place = jit.load_int(record[frozen.LANE_BASE] + 8 * slot) + lane
    before = jit.load_int(record[frozen.FIRST_ROWS] + 8 * place)
    is_own = before == frozen.OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, before), jit.either(is_own, lane, 0)
    bits = jit.load_int(line[cols.SHIFT] + 8 * folder)
    chunk, inside = row >> bits, row & ((1 << bits) - 1)
    place = jit.load_int(line[cols.FIRST_CHUNK] + 8 * folder) + chunk
    if chunk >= jit.load_int(line[cols.CHUNKS] + 8 * folder) or place >= line[cols.BASES_SIZE]:
        return 0, 0
    base = jit.load_int(line[cols.BASES] + 8 * place)
    return base + line[cols.ROW_BYTES] * ((lane << bits) + inside) if base != 0 else 0, (1 << bits) - inside


@jit.kernel("int", "ints", "ints", "ints2", "int", "int", "int", "int")
def copy_runs(record: Ints, line: Ints, runs: Ints, columns: int, out: int, begin: int, until: int) -> int:
    """Copy the rows of the runs `begin` to below `until` to the items of a batch at an address.

    The items of a run are so many `columns` apart. `record` is a snapshot's, see `frozen`, and `line` the table of the
    leaf, see `gathering.table_line`. Returns the first run with a row that is not mapped, or -1.
    """
    row_bytes = line[cols.ROW_BYTES]
    for i in range(begin, until):
        if i + _AHEAD < until:
            source, _ = _find(record, line, runs, i + _AHEAD, 0)
            for ahead in range(min(_LINES, 1 + (runs[COUNT, i + _AHEAD] * row_bytes) // CACHE_LINE)):
                jit.prefetch(source + ahead * CACHE_LINE)
        target, done = out + runs[ITEM, i] * row_bytes, 0
        while done < runs[COUNT, i]:
            source, count = _find(record, line, runs, i, done)
            if source == 0:
                return i
            count = min(count, runs[COUNT, i] - done)
            _copy(target + done * columns * row_bytes, columns * row_bytes, source, row_bytes, count)
            done += count
    return -1
