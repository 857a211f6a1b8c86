"""Plain twins of the kernels of `kernels.copying`."""

import ctypes

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels.copying import FIELD
from diskreplay.kernels.gathering import ROW_BYTES
from tests.kernels.plain.frozen import Frozen
from tests.kernels.plain.gathering import row_address, table_at


def find_runs_plain(grid: Ints, record: Ints, runs: Ints, newest: Ints) -> int:
    """Do what `find_runs` does, id by id; of several ids that are not visible, the two may return different ones."""
    seen, columns = Frozen.of(record), grid.shape[1]
    places = [seen.visible_row(step_id) for step_id in grid.flat]
    if None in places:
        return -1 - places.index(None)
    widths = seen.lanes[[place[0] for place in places]].reshape(grid.shape)
    begins = np.ones(grid.shape, np.bool_)
    begins[1:] = grid[1:] != grid[:-1] + widths[:-1]
    for number, item in enumerate(np.flatnonzero(begins).tolist()):
        below = begins[item // columns + 1 :, item % columns]
        count = 1 + int(np.append(below, True).argmax())
        runs[number] = *places[item], count, item
    return int(begins.sum())


def copy_runs_plain(
    record: Ints, lines: Ints, out: Ints, runs: Ints, columns: int, begin: int, until: int
) -> int:  # fmt: skip
    """Do what `copy_runs` does, row after row."""
    seen = Frozen.of(record)
    for leaf, (line, to) in enumerate(zip(lines, out.tolist(), strict=True)):
        table, row_bytes = table_at(line.tolist()), int(line[ROW_BYTES])
        for i, (slot, lane, row, count, item) in enumerate(runs[begin:until].tolist(), begin):
            for j in range(count):
                source = row_address(seen.folder(slot, lane), row + j, *table, row_bytes)
                if not source:
                    return leaf * len(runs) + i
                ctypes.memmove(to + (item + j * columns) * row_bytes, source, row_bytes)
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
