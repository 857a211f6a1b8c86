"""The times of a segment's rows: nanoseconds by the clock of its boot, which never fall within a lane."""

import os
from bisect import bisect_right
from typing import Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import read_lane_counter
from diskreplay.format.machine import MOST_NS
from diskreplay.format.mapping import open_regular, opened
from diskreplay.format.marks import map_trusted
from diskreplay.format.segment import Lost, SegmentInfo

_ITEM = 8


def time_bounds(folder: str, per_chunk: int, rows: NDArray[np.int64], lost: Lost) -> tuple[int, int] | None:
    """Return the least and the greatest time of a segment's rows, None where it has none.

    ``folder`` is the segment's, ``rows`` those of each lane. As times never fall, the first and the last row of each
    lane tell; rows that were lost do not count.
    """
    first, stop = np.zeros_like(rows), rows.copy()
    for position, count in lost.ranges:
        row, lane = divmod(position, len(rows))
        if row == first[lane]:
            first[lane] = row + count
    for position, count in reversed(lost.ranges):
        row, lane = divmod(position, len(rows))
        if row + count == stop[lane]:
            stop[lane] = row
    lanes = np.flatnonzero(first < stop).tolist()
    if not lanes:
        return None
    with _Column(folder, per_chunk, len(rows)) as column:
        least = min(column.at(lane, int(first[lane])) for lane in lanes)
        greatest = max(column.at(lane, int(stop[lane]) - 1) for lane in lanes)
    # Clipped: a document with other numbers would be refused, and with it rows that may be whole.
    return min(max(least, 0), MOST_NS), min(max(greatest, 0), MOST_NS)


class _Column:
    """The times of a segment's rows, read one by one: memory that is mapped would be a signal where a disk fails."""

    def __init__(self, folder: str, per_chunk: int, lanes: int) -> None:
        self._folder, self._per_chunk, self._nbytes = f"{folder}/{layout.TIME}", per_chunk, lanes * per_chunk * _ITEM
        self._files: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def at(self, lane: int, row: int) -> int:
        """Return the time of a row."""
        chunk, inside = divmod(row, self._per_chunk)
        fd = self._files.get(chunk)
        if fd is None:
            fd = self._files[chunk] = open_regular(f"{self._folder}/{layout.chunk_key(chunk, 0)}", self._nbytes)
        return int.from_bytes(os.pread(fd, _ITEM, (lane * self._per_chunk + inside) * _ITEM), "little", signed=True)

    def rows_until(self, lane: int, count: int, time: int, guess: int) -> int:
        """Return how many of the first ``count`` rows of a lane came no later than a time; perhaps ``guess``."""
        low, high = 0, count
        for row in (guess - 1, guess):
            if low <= row < high:
                low, high = (row + 1, high) if self.at(lane, row) <= time else (low, row)
        return bisect_right(range(count), time, low, high, key=lambda row: self.at(lane, row))


def last_time(info: SegmentInfo) -> int:
    """Return when the last row of a segment came, in nanoseconds since the epoch; 0 where it has none.

    Raises FormatError or OSError where a file of it is damaged or gone.
    """
    if info.sealed:
        return info.bounds[1]
    rows = map_trusted(info)[1].copy()
    bounds = time_bounds(str(info.path), info.chunk_rows[layout.TIME], rows, info.lost)
    return 0 if bounds is None else bounds[1] + info.clock.wall


def count_until(info: SegmentInfo, time: int) -> int:
    """Count the rows of a segment that came no later than a time, by the clock of its boot.

    Raises FormatError or OSError where a file of it is damaged or gone.
    """
    folder, lanes = str(info.path), len(info.lanes)
    rows = read_lane_counter(f"{folder}/{layout.COMMITTED}", lanes) if info.sealed else map_trusted(info)[1]
    found, guess = 0, 0
    with _Column(folder, info.chunk_rows[layout.TIME], lanes) as column:
        for lane, count in enumerate(rows.tolist()):
            guess = column.rows_until(lane, count, time, guess)  # lanes that take turns have as many
            found += guess
    return found


def repeat_times(
    folder: str, chunk: int, per_chunk: int, rows: NDArray[np.int64], skipped: list[tuple[int, int]], least: int
) -> None:
    """Give rows of a chunk that are zeros the time of the row before them: then the times of a lane still never fall.

    ``skipped`` are their bytes, in order. The chunks before are complete. At the beginning of a lane it is ``least``.
    """
    lanes = len(rows)
    with opened(f"{folder}/{layout.TIME}/{layout.chunk_key(chunk, 0)}", None, os.O_RDWR) as fd:
        for start, stop in skipped:
            for lane, first, count in layout.split_range(start // _ITEM, -(-stop // _ITEM), per_chunk):
                last = min(first + count, int(rows[lane]) - chunk * per_chunk)
                row = chunk * per_chunk + first - 1
                if first >= last:
                    continue
                before = least
                if row >= 0:
                    with _Column(folder, per_chunk, lanes) as column:
                        before = column.at(lane, row)
                data = np.full(last - first, before, "<i8").tobytes()
                os.pwrite(fd, data, (lane * per_chunk + first) * _ITEM)
