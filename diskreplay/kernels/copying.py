"""Kernels that copy successive rows into a batch, one row into each of many lanes, or bytes without using the caches.

`find_runs` finds the successive rows that `copy_runs` copies.

`write_lanes` writes rows that are mostly in separate pages of memory. With prefetches of the rows of later lanes, a
call takes a third of the time. Streaming rows of 192 bytes takes two thirds of the remaining time.

An ordinary write instruction first reads the cache line that it overwrites. A streamed (non-temporal) write omits this
read. With batches of 14 MB, streaming had 1.45 times the bandwidth of memcpy; with batches of 37 MB, it had 1.7 to 2.4
times the bandwidth. But the next reader has to fetch a streamed batch from memory, so smaller batches are not streamed.
"""

from diskreplay.ids import POSITION_BITS, POSITION_MASK, Ints

from . import frozen, gathering as cols, jit
from .following import COMMITTED
from .huge_pages import CACHE_LINE
from .jit import STREAM_BLOCK, copy_bytes, stream_block

_RUNS_AHEAD = 4
_LINES = 6  # cache lines to prefetch at the start of a run; the processor itself prefetches the next lines

# Columns of the table `runs`. Each line is a run: successive rows of a lane, for successive steps of a column of ids.
# - SLOT (see `frozen`), LANE and ROW identify the first row of the run.
# - COUNT: the number of rows.
# - ITEM: the position in the batch of the first row.
SLOT, LANE, ROW, COUNT, ITEM = range(5)
RUN_COLUMNS = 5

# Rows of the scratch memory of `find_runs`. Each has a number for the newest run of every column of ids.
# - WIDTH: the difference between the ids of successive rows.
# - STOP: the end of the lane.
# - NUMBER: the line of the run in the table `runs`.
WIDTH, STOP, NUMBER = range(3)
NEWEST_ROWS = 3


@jit.inlined
def _begin_run(step_id: int, record: Ints, runs: Ints, at: int) -> tuple[int, int]:
    """Write SLOT, LANE and ROW of a run that begins at a step; return the lane's WIDTH and STOP, or 0 and 0.

    The result is 0 and 0 if the step is not visible.
    """
    slot = (step_id >> POSITION_BITS) - record[frozen.ORIGIN]
    if slot < 0 or slot >= record[frozen.SLOTS]:
        return 0, 0
    width = jit.load_int(record[frozen.LANES] + 8 * slot)
    if width <= 0:
        return 0, 0
    row = (step_id & POSITION_MASK) // width
    lane = (step_id & POSITION_MASK) - row * width
    place = jit.load_int(record[frozen.LANE_BASE] + 8 * slot) + lane
    column = jit.load_int(record[frozen.LIVE_BASE] + 8 * slot)
    if column >= 0:
        stop = jit.load_int(record[frozen.LIVE] + 8 * (COMMITTED * record[frozen.LIVE_LANES] + column + lane))
    else:
        stop = jit.load_int(record[frozen.ROWS] + 8 * (COMMITTED * record[frozen.ALL_LANES] + place))
    kept = jit.load_int(record[frozen.OLDEST] + 8 * place) if record[frozen.REACHED] != 0 else 0
    if row < kept or row >= stop:
        return 0, 0
    runs[at, SLOT], runs[at, LANE], runs[at, ROW] = slot, lane, row
    return width, stop


@jit.kernel("int", "ints2", "ints", "out_ints2", "out_ints2")
def find_runs(grid: Ints, record: Ints, runs: Ints, newest: Ints) -> int:
    """Write the runs of a grid of ids to `runs`, in the order of the positions where they begin.

    `grid` is (steps, columns); a column has the ids of successive steps. `record` is the record of a snapshot, see
    `frozen`. `runs` has at least a line for each id; for `newest` see `WIDTH`. Returns the number of runs. If an id is
    not the id of a visible row, returns -1 minus the position of such an id.
    """
    steps, columns = grid.shape
    count = 0
    for t in range(steps + 1):
        for c in range(columns):
            if 0 < t < steps and grid[t, c] - grid[t - 1, c] == newest[WIDTH, c]:
                continue
            if t > 0:
                run = newest[NUMBER, c]
                begin = runs[run, ITEM] // columns
                runs[run, COUNT] = t - begin
                if runs[run, ROW] + t - begin > newest[STOP, c]:
                    return -1 - ((begin + newest[STOP, c] - runs[run, ROW]) * columns + c)
            if t < steps:
                newest[WIDTH, c], newest[STOP, c] = _begin_run(grid[t, c], record, runs, count)
                if newest[WIDTH, c] == 0:
                    return -1 - (t * columns + c)
                newest[NUMBER, c], runs[count, ITEM] = count, t * columns + c
                count += 1
    return count


@jit.inner
def _copy_spaced(target: int, spacing: int, source: int, row_bytes: int, count: int) -> None:
    # A copy of constant width is a move instruction, not a call.
    if row_bytes == 4:
        for j in range(count):
            copy_bytes(target + j * spacing, source + j * 4, 4)
    elif row_bytes == 1:
        for j in range(count):
            copy_bytes(target + j * spacing, source + j, 1)
    else:
        for j in range(count):
            copy_bytes(target + j * spacing, source + j * row_bytes, row_bytes)


@jit.inner
def _find_row(record: Ints, lines: Ints, leaf: int, runs: Ints, i: int, done: int) -> tuple[int, int]:
    """Return the address of row `done` of run `i` (0: unmapped), and the number of rows until the end of the chunk."""
    slot, lane, row = runs[i, SLOT], runs[i, LANE], runs[i, ROW] + done
    folder = jit.load_int(record[frozen.FOLDERS] + 8 * slot)
    if folder < 0 or folder >= lines[leaf, cols.FOLDERS]:
        return 0, 0
    place = jit.load_int(record[frozen.LANE_BASE] + 8 * slot) + lane
    before = jit.load_int(record[frozen.FIRST_ROWS] + 8 * place)
    is_own = before == frozen.OWN_FOLDER
    row, lane = row + jit.either(is_own, 0, before), jit.either(is_own, lane, 0)
    bits = jit.load_int(lines[leaf, cols.SHIFT] + 8 * folder)
    chunk, inside = row >> bits, row & ((1 << bits) - 1)
    place = jit.load_int(lines[leaf, cols.FIRST_CHUNK] + 8 * folder) + chunk
    if chunk >= jit.load_int(lines[leaf, cols.CHUNKS] + 8 * folder) or place >= lines[leaf, cols.BASES_SIZE]:
        return 0, 0
    base = jit.load_int(lines[leaf, cols.BASES] + 8 * place)
    source = base + lines[leaf, cols.ROW_BYTES] * ((lane << bits) + inside)
    return source if base != 0 else 0, (1 << bits) - inside


@jit.kernel("int", "ints", "ints2", "ints", "ints2", "int", "int", "int")
def copy_runs(record: Ints, lines: Ints, out: Ints, runs: Ints, columns: int, begin: int, until: int) -> int:
    """Copy the rows of runs `begin` to `until` - 1 of several stored arrays; for `runs` see `SLOT`.

    Line i of `lines` is the result of `gathering.table_line` for an array, and out[i] is the address of the array's
    rows in the batch. An item of the batch is one row. Successive rows of a run are copied to items that are `columns`
    apart. `record` is the record of a snapshot, see `frozen`. Returns -1, or the number of a run with an unmapped row
    plus, for each array before, the number of all runs.
    """
    for leaf in range(out.size):
        row_bytes = lines[leaf, cols.ROW_BYTES]
        for i in range(begin, until):
            if i + _RUNS_AHEAD < until:
                source, _ = _find_row(record, lines, leaf, runs, i + _RUNS_AHEAD, 0)
                for ahead in range(min(_LINES, 1 + (runs[i + _RUNS_AHEAD, COUNT] * row_bytes) // CACHE_LINE)):
                    jit.prefetch(source + ahead * CACHE_LINE)
            target, done = out[leaf] + runs[i, ITEM] * row_bytes, 0
            while done < runs[i, COUNT]:
                source, count = _find_row(record, lines, leaf, runs, i, done)
                if source == 0:
                    return leaf * len(runs) + i
                count = min(count, runs[i, COUNT] - done)
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

    `record` has `FIELD` numbers for each of the `fields` fields, see `FIRST_CHUNK`. For every field, each chunk that
    this call writes to must be mapped. The address of any other chunk may be 0.
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
