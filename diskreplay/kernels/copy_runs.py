"""Copy runs of rows out of lanes, as the columns of a rollout have them.

Where a row is, is found once for all rows of a run that lie in one chunk, and these are read one behind the other. The
batch has them a row of all columns apart. The next runs are on their way from memory meanwhile.
"""

from diskreplay.ids import Ints

from . import frozen, gathering as cols, jit

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


@jit.inner
def _address(line: Ints, folder: int, before: int, lane: int, row: int) -> int:
    """Return where a row is in memory, 0 where it is not mapped; `before` is the lane's in `frozen.FIRST_ROWS`."""
    if folder < 0 or folder >= line[cols.FOLDERS]:
        return 0
    is_own = before == frozen.OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, before), jit.either(is_own, lane, 0)
    bits = jit.load_int(line[cols.SHIFT] + 8 * folder)
    chunk = row >> bits
    place = jit.load_int(line[cols.FIRST_CHUNK] + 8 * folder) + chunk
    if chunk >= jit.load_int(line[cols.CHUNKS] + 8 * folder) or place >= line[cols.BASES_SIZE]:
        return 0
    base = jit.load_int(line[cols.BASES] + 8 * place)
    return base + line[cols.ROW_BYTES] * ((lane << bits) + (row & ((1 << bits) - 1))) if base != 0 else 0


@jit.kernel("int", "ints", "ints", "ints2", "int", "int", "int", "int")
def copy_runs(record: Ints, line: Ints, runs: Ints, columns: int, out: int, begin: int, until: int) -> int:
    """Copy the rows of the runs `begin` to below `until` to the items of a batch at an address.

    The items of a run are so many `columns` apart. `record` is a snapshot's, see `frozen`, and `line` the table of the
    leaf, see `gathering.table_line`. Returns the first run with a row that is not mapped, or -1.
    """
    folders, lane_base, first_rows = record[frozen.FOLDERS], record[frozen.LANE_BASE], record[frozen.FIRST_ROWS]
    row_bytes = line[cols.ROW_BYTES]
    for i in range(begin, until):
        if i + _AHEAD < until:
            slot, lane, row = runs[SLOT, i + _AHEAD], runs[LANE, i + _AHEAD], runs[ROW, i + _AHEAD]
            before = jit.load_int(first_rows + 8 * (jit.load_int(lane_base + 8 * slot) + lane))
            source = _address(line, jit.load_int(folders + 8 * slot), before, lane, row)
            for ahead in range(min(_LINES, 1 + (runs[COUNT, i + _AHEAD] * row_bytes) // _LINE)):
                jit.prefetch(source + ahead * _LINE)
        slot, lane, row = runs[SLOT, i], runs[LANE, i], runs[ROW, i]
        folder = jit.load_int(folders + 8 * slot)
        before = jit.load_int(first_rows + 8 * (jit.load_int(lane_base + 8 * slot) + lane))
        target, left = out + runs[ITEM, i] * row_bytes, runs[COUNT, i]
        while left > 0:
            source = _address(line, folder, before, lane, row)
            if source == 0:
                return i
            mask = (1 << jit.load_int(line[cols.SHIFT] + 8 * folder)) - 1
            inside = (row + jit.either(before == frozen.OWN_FOLDER, 0, before)) & mask
            count = min(left, mask + 1 - inside)
            _copy(target, columns * row_bytes, source, row_bytes, count)
            target += count * columns * row_bytes
            row += count
            left -= count
    return -1
