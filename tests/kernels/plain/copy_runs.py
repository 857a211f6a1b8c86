"""Plain twin of the kernel of `kernels.copy_runs`."""

import ctypes

from diskreplay.ids import Ints
from diskreplay.kernels.frozen import OWN_FOLDER
from tests.kernels.plain.find_windows import row_address


def copy_runs_plain(
    runs: Ints, folders: Ints, lane_base: Ints, first_rows: Ints, first_chunk: Ints, chunks: Ints, shift: Ints,
    bases: Ints, row_bytes: int, columns: int, out: int, begin: int, until: int,
) -> int:  # fmt: skip
    """Do what `copy_runs` does, row after row."""
    for i, (slot, lane, row, count, item) in enumerate(runs.T[begin:until].tolist(), begin):
        first = int(first_rows[lane_base[slot] + lane])
        where = int(folders[slot]), lane if first == OWN_FOLDER else 0, max(first, 0)
        for j in range(count):
            source = row_address(where, row + j, first_chunk, chunks, shift, bases, row_bytes)
            if not source:
                return i
            ctypes.memmove(out + (item + j * columns) * row_bytes, source, row_bytes)
    return -1
