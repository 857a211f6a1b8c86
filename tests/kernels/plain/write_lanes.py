"""Plain twin of the kernel of `kernels.write_lanes`."""

import ctypes

from diskreplay.ids import Ints
from diskreplay.kernels.write_lanes import FIELD


def write_lanes_plain(lanes: Ints, rows: Ints, record: Ints, fields: int) -> None:
    """Do what `write_lanes` does, lane after lane."""
    for first, shift, row_bytes, source, bases in record[: fields * FIELD].reshape(fields, FIELD).tolist():
        for i, (lane, row) in enumerate(zip(lanes.tolist(), rows.tolist(), strict=True)):
            chunk, inside = divmod(row, 1 << shift)
            target = int(record[bases + chunk - first]) + ((lane << shift) + inside) * row_bytes
            ctypes.memmove(target, source + i * row_bytes, row_bytes)
