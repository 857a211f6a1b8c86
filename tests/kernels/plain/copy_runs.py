"""Plain twin of the kernel of `kernels.copy_runs`."""

import ctypes

from diskreplay.ids import Ints
from diskreplay.kernels.gathering import ROW_BYTES
from tests.kernels.plain.find_windows import row_address, table_at
from tests.kernels.plain.frozen import Frozen


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
