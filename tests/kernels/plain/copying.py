"""Plain twins of the kernels of `kernels.copying`."""

import ctypes

from diskreplay.ids import Ints
from diskreplay.kernels.copying import FIELD
from diskreplay.kernels.gathering import ROW_BYTES
from tests.kernels.plain.frozen import Frozen
from tests.kernels.plain.gathering import row_address, table_at


def copy_runs_plain(record: Ints, line: Ints, runs: Ints, columns: int, out: int, begin: int, until: int) -> int:
    """Do what `copy_runs` does, row after row."""
    seen, table, row_bytes = Frozen.of(record), table_at(line.tolist()), int(line[ROW_BYTES])
    for i, (slot, lane, row, count, item) in enumerate(runs.T[begin:until].tolist(), begin):
        for j in range(count):
            source = row_address(seen.folder(slot, lane), row + j, *table, row_bytes)
            if not source:
                return i
            ctypes.memmove(out + (item + j * columns) * row_bytes, source, row_bytes)
    return -1


def write_lanes_plain(lanes: Ints, rows: Ints, picked: Ints, record: Ints, fields: int) -> None:
    """Do what `write_lanes` does, lane after lane."""
    for first, shift, row_bytes, source, bases in record[: fields * FIELD].reshape(fields, FIELD).tolist():
        for lane, row, i in zip(lanes.tolist(), rows.tolist(), picked.tolist(), strict=True):
            chunk, inside = divmod(row, 1 << shift)
            target = int(record[bases + chunk - first]) + ((lane << shift) + inside) * row_bytes
            ctypes.memmove(target, source + i * row_bytes, row_bytes)


def stream_plain(target: int, source: int, count: int) -> None:
    """Do what `stream` does."""
    ctypes.memmove(target, source, count)
