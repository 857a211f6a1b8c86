"""Kernels that copy successive rows into a batch, one row into each of many lanes, or bytes without using the caches.

`write_lanes` writes rows that are mostly in separate pages of memory. With prefetches of the rows of later lanes, a
call takes a third of the time. Streaming rows of 192 bytes takes two thirds of the remaining time.

An ordinary write instruction first reads the cache line that it overwrites. A streamed (non-temporal) write omits this
read. With batches of 14 MB, streaming had 1.45 times the bandwidth of memcpy; with batches of 37 MB, it had 1.7 to 2.4
times the bandwidth. But the next reader has to fetch a streamed batch from memory, so smaller batches are not streamed.
"""

from diskreplay.ids import Ints

from . import frozen, gathering as cols, jit
from .huge_pages import CACHE_LINE
from .jit import STREAM_BLOCK, copy_bytes, stream_block

_RUNS_AHEAD = 4
_LINES = 6  # cache lines to prefetch at the start of a run; the processor itself prefetches the next lines

# Rows of the table `runs` of `copy_runs`. Each column is a run, that is, successive rows of a lane.
# - SLOT (see `frozen`), LANE and ROW identify the first row of the run.
# - ITEM: the position in the batch to which the first row is copied.
SLOT, LANE, ROW, COUNT, ITEM = range(5)
RUN_ROWS = 5


@jit.inner
def _copy_spaced(target: int, spacing: int, source: int, row_bytes: int, count: int) -> None:
    # A copy of constant width is a move instruction, not a call.
    if row_bytes == 4:
        for j in range(count):
            copy_bytes(target + j * spacing, source + j * 4, 4)
    else:
        for j in range(count):
            copy_bytes(target + j * spacing, source + j * row_bytes, row_bytes)


@jit.inner
def _find_row(record: Ints, line: Ints, runs: Ints, i: int, done: int) -> tuple[int, int]:
    """Return the address of row `done` of run `i` (0: unmapped), and the number of rows until the end of the chunk."""
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
    """Copy the rows of runs `begin` to `until` - 1 to a batch at address `out`; for `runs` see `SLOT`.

    An item of the batch is one row. Successive rows of a run are copied to items that are `columns` apart. `record` is
    the record of a snapshot, see `frozen`. `line` is the result of `gathering.table_line` for the stored array of the
    rows. Returns the number of the first run with an unmapped row, or -1.
    """
    row_bytes = line[cols.ROW_BYTES]
    for i in range(begin, until):
        if i + _RUNS_AHEAD < until:
            source, _ = _find_row(record, line, runs, i + _RUNS_AHEAD, 0)
            for ahead in range(min(_LINES, 1 + (runs[COUNT, i + _RUNS_AHEAD] * row_bytes) // CACHE_LINE)):
                jit.prefetch(source + ahead * CACHE_LINE)
        target, done = out + runs[ITEM, i] * row_bytes, 0
        while done < runs[COUNT, i]:
            source, count = _find_row(record, line, runs, i, done)
            if source == 0:
                return i
            count = min(count, runs[COUNT, i] - done)
            _copy_spaced(target + done * columns * row_bytes, columns * row_bytes, source, row_bytes, count)
            done += count
    return -1


# Indices of the numbers that the record of `write_lanes` has for each field.
# - FIRST_CHUNK: the number of the first chunk to write to.
# - SHIFT: the binary logarithm of the number of rows per chunk.
# - SOURCE: the address of the rows to copy from.
# - BASES: the index in the record of the address of chunk FIRST_CHUNK. The addresses of the next chunks follow.
FIRST_CHUNK, SHIFT, ROW_BYTES, SOURCE, BASES = range(5)
FIELD = 5

_LANES_AHEAD = 8


@jit.inner
def _copy_row(target: int, source: int, count: int) -> None:
    if count == 4:
        copy_bytes(target, source, 4)
    elif count == 8:
        copy_bytes(target, source, 8)
    elif count == 1:
        copy_bytes(target, source, 1)
    else:
        copy_bytes(target, source, count)


@jit.kernel("none", "ints", "ints", "ints", "ints", "int")
def write_lanes(lanes: Ints, rows: Ints, picked: Ints, record: Ints, fields: int) -> None:
    """For every field and every i, copy row picked[i] at the field's `SOURCE` to row rows[i] of lane lanes[i].

    `record` has `FIELD` numbers for each of the `fields` fields, see `FIRST_CHUNK`. For every field, all
    chunks from the first to the last one that this call writes must be mapped.
    """
    last = rows.size - 1
    for field in range(fields):
        bits, row_bytes = record[field * FIELD + SHIFT], record[field * FIELD + ROW_BYTES]
        source, mask = record[field * FIELD + SOURCE], (1 << bits) - 1
        chunks = record[field * FIELD + BASES] - record[field * FIELD + FIRST_CHUNK]
        if row_bytes % CACHE_LINE == 0:
            # Whole cache lines are streamed: thousands of lanes fill the caches before a reader needs the rows.
            for i in range(rows.size):
                inside = (lanes[i] << bits) + (rows[i] & mask)
                target = record[chunks + (rows[i] >> bits)] + inside * row_bytes
                stream(target, source + picked[i] * row_bytes, row_bytes)
            continue
        for i in range(rows.size):
            ahead = min(i + _LANES_AHEAD, last)
            inside = (lanes[ahead] << bits) + (rows[ahead] & mask)
            begin = record[chunks + (rows[ahead] >> bits)] + inside * row_bytes
            jit.prefetch(begin)
            if row_bytes > CACHE_LINE:
                jit.prefetch(begin + CACHE_LINE)
                jit.prefetch(begin + row_bytes - 1)
            inside = (lanes[i] << bits) + (rows[i] & mask)
            target = record[chunks + (rows[i] >> bits)] + inside * row_bytes
            _copy_row(target, source + picked[i] * row_bytes, row_bytes)
    jit.fence()


WIDE = 1024
"""The smallest size in bytes of a run that is streamed: streaming smaller runs gains nothing."""


@jit.kernel("none", "int", "int", "int")
def stream(target: int, source: int, count: int) -> None:
    """Copy `count` bytes from one address to another, bypassing the caches; the ranges must not overlap.

    The caller must call `jit.fence` before another thread reads the copy; one call after several copies is enough.
    """
    head = min(-target & 31, count)
    if head > 0:
        copy_bytes(target, source, head)
    target += head
    source += head
    for _ in range((count - head) // STREAM_BLOCK):
        stream_block(target, source)
        target += STREAM_BLOCK
        source += STREAM_BLOCK
    if (count - head) % STREAM_BLOCK > 0:
        copy_bytes(target, source, (count - head) % STREAM_BLOCK)
