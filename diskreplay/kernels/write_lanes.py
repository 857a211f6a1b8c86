"""Write a step of many lanes: a row of each, in several fields, in one call.

The rows of lanes are apart in memory, most of them in pages of their own. Those of the lanes after the next ones are on
their way into the caches by the time they are written: that takes a third of the time.
"""

from diskreplay.ids import Ints

from . import jit
from .huge_pages import CACHE_LINE

# A field in the record: its first chunk that any of the rows is in, the binary logarithm of the rows of a chunk, the
# bytes of a row, the address of the rows that are written, and where in the record the addresses of its chunks begin.
FIRST_CHUNK, SHIFT, ROW_BYTES, SOURCE, BASES = range(5)
FIELD = 5

_AHEAD = 8  # lanes


@jit.inner
def _copy(target: int, source: int, count: int) -> None:
    # Of a constant width a copy is a move and no call.
    if count == 4:
        jit.copy_bytes(target, source, 4)
    elif count == 8:
        jit.copy_bytes(target, source, 8)
    elif count == 1:
        jit.copy_bytes(target, source, 1)
    else:
        jit.copy_bytes(target, source, count)


@jit.kernel("none", "ints", "ints", "ints", "int")
def write_lanes(lanes: Ints, rows: Ints, record: Ints, fields: int) -> None:
    """Write row rows[i] of lanes[i] in so many fields of a record, the i-th of those at each field's `SOURCE`.

    All chunks between the first and the last that rows are in are mapped.
    """
    last = rows.size - 1
    for field in range(fields):
        bits, row_bytes = record[field * FIELD + SHIFT], record[field * FIELD + ROW_BYTES]
        source, mask = record[field * FIELD + SOURCE], (1 << bits) - 1
        chunks = record[field * FIELD + BASES] - record[field * FIELD + FIRST_CHUNK]
        for i in range(rows.size):
            ahead = min(i + _AHEAD, last)
            inside = (lanes[ahead] << bits) + (rows[ahead] & mask)
            begin = record[chunks + (rows[ahead] >> bits)] + inside * row_bytes
            jit.prefetch(begin)
            if row_bytes > CACHE_LINE:
                jit.prefetch(begin + CACHE_LINE)
                jit.prefetch(begin + row_bytes - 1)
            inside = (lanes[i] << bits) + (rows[i] & mask)
            target = record[chunks + (rows[i] >> bits)] + inside * row_bytes
            _copy(target, source + i * row_bytes, row_bytes)
