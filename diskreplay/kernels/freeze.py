"""Make the record of a snapshot: see `frozen`."""

from diskreplay.ids import Ints

from . import following, frozen, jit


@jit.kernel("none", "ints2", "ints2", "ints", "int", "ints", "out_ints")
def freeze(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Write the record of a snapshot: its head, and what is known of the lanes of the segments that may grow.

    `growing` and `rows` are those of `follow`, `oldest` the first row of each lane that is not hidden: none of
    an episode that began at `reached` or later.
    """
    for column in range(frozen.HEAD):
        record[column] = head[column]
    record[frozen.REACHED], record[frozen.ALL_LANES] = reached, rows.shape[1]
    record[frozen.OLDEST], record[frozen.ROWS] = oldest.ctypes.data, rows.ctypes.data
    record[frozen.LIVE] = record.ctypes.data + 8 * frozen.HEAD
    at = record[frozen.LIVE]
    for which in range(growing.shape[0]):
        place, count = growing[which, following.PLACE], 8 * growing[which, following.LANES]
        for row in range(following.LANE_ROWS):
            source = record[frozen.ROWS] + 8 * (row * rows.shape[1] + place)
            jit.copy_bytes(at + 8 * row * head[frozen.LIVE_LANES], source, count)
        at += count
