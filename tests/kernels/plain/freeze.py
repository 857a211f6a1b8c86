"""The plain twin of the kernel of `kernels.freeze`."""

from diskreplay.ids import Ints, places_of
from diskreplay.kernels import following
from diskreplay.kernels.frozen import ALL_LANES, HEAD, LIVE, OLDEST, REACHED, ROWS


def freeze_plain(growing: Ints, rows: Ints, oldest: Ints, reached: int, head: Ints, record: Ints) -> None:
    """Do what `freeze` does."""
    record[:HEAD] = head
    record[[REACHED, ALL_LANES, OLDEST, ROWS]] = reached, rows.shape[1], oldest.ctypes.data, rows.ctypes.data
    record[LIVE] = record.ctypes.data + 8 * HEAD
    live = record[HEAD:].reshape(following.LANE_ROWS, -1)
    live[:] = rows[:, places_of(growing[:, following.PLACE], growing[:, following.LANES])]
