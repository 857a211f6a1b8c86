"""The times of a segment's rows, in nanoseconds since the writer's machine booted; they never decrease in a lane."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from diskreplay.segments.documents import layout
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.machine import MOST_NS
from diskreplay.segments.files.mapping import open_regular, opened
from diskreplay.segments.marks import map_trusted
from diskreplay.segments.packs import read_tables
from diskreplay.segments.segment import Lost, SegmentInfo

_ITEM = 8
_ROWS_AT_ONCE = 1 << 17


def time_bounds(
    folder: str, per_chunk: int, rows: NDArray[np.int64], lost: Lost, begins: Sequence[int] = (0,)
) -> tuple[int, int] | None:
    """Return the smallest and the largest time of a segment's rows, or None if it has no rows.

    ``rows`` has the number of rows of each lane. Times never decrease within a part of a lane, and ``begins`` has the
    first row of each part. Only the first and the last time of a part are read. Lost rows do not count.
    """
    gone: dict[int, list[tuple[int, int]]] = {}
    for position, count in lost.ranges:
        row, lane = divmod(position, len(rows))
        gone.setdefault(lane, []).append((row, row + count))
    parts = [
        (lane, first, stop)
        for lane, count in enumerate(rows.tolist())
        for first, stop in layout.subtract_ranges(_parts(begins, count), gone.get(lane, []))
    ]
    if not parts:
        return None
    with _Column(folder, per_chunk, len(rows)) as column:
        least = min(column.at(lane, first) for lane, first, _ in parts)
        greatest = max(column.at(lane, stop - 1) for lane, _, stop in parts)
    # The times are clipped to the range from 0 to `MOST_NS`, because readers refuse a zarr.json with other times.
    return min(max(least, 0), MOST_NS), min(max(greatest, 0), MOST_NS)


def _parts(begins: Sequence[int], count: int) -> list[tuple[int, int]]:
    return [(first, stop) for first, stop in pairwise([*begins, count]) if first < stop]


class _Column:
    """Reads single times of a segment's rows by `pread`: a read error is an OSError, and not a signal."""

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
        chunk, inside = divmod(row, self._per_chunk)
        fd = self._files.get(chunk)
        if fd is None:
            fd = self._files[chunk] = open_regular(f"{self._folder}/{layout.chunk_key(chunk, 0)}", self._nbytes)
        return int.from_bytes(os.pread(fd, _ITEM, (lane * self._per_chunk + inside) * _ITEM), "little", signed=True)

    def rows_until(self, lane: int, count: int, time: int, guess: int) -> int:
        """Return how many of a lane's first ``count`` rows have at most this ``time``; a good ``guess`` saves reads."""
        low, high = 0, count
        for row in (guess - 1, guess):
            if low <= row < high:
                low, high = (row + 1, high) if self.at(lane, row) <= time else (low, row)
        return bisect_right(range(count), time, low, high, key=lambda row: self.at(lane, row))


def last_time(info: SegmentInfo) -> int:
    """Return the time of the last row of a segment, in nanoseconds since the epoch; 0 if it has no rows.

    For a sealed segment, this is `SegmentInfo.kept_until`. Raises FormatError or OSError if one of the segment's files
    is damaged or gone.
    """
    if info.sealed:
        return info.kept_until
    rows = map_trusted(info)[1].copy()
    bounds = time_bounds(str(info.path), info.chunk_rows[layout.TIME], rows, info.lost)
    return 0 if bounds is None else bounds[1] + info.clock.wall


def count_until(info: SegmentInfo, time: int) -> int:
    """Return the number of rows of a segment with at most this ``time``, in ns since the writer's machine booted.

    Raises FormatError or OSError if one of the segment's files is damaged or gone.
    """
    folder, lanes = str(info.path), len(info.lanes)
    rows = read_lane_counter(f"{folder}/{layout.COMMITTED}", lanes) if info.sealed else map_trusted(info)[1]
    if info.packed is not None:
        return _count_in_pack(info, int(rows[0]), time)
    found, guess = 0, 0
    with _Column(folder, info.chunk_rows[layout.TIME], lanes) as column:
        for lane, count in enumerate(rows.tolist()):
            # the result of one lane is a good guess for the next lane
            guess = column.rows_until(lane, count, time, guess)
            found += guess
    return found


def _count_in_pack(info: SegmentInfo, rows: int, time: int) -> int:
    """Return the number of a pack's rows up to ``time``.

    All times are read, because they are sorted only within a lane.
    """
    tables, found = read_tables(info), 0
    begins = np.zeros(rows + 1, np.int8)  # +1 where a lane begins, -1 after its end: rows between lanes do not count
    np.add.at(begins, tables.first_rows, 1)
    np.add.at(begins, tables.first_rows + tables.rows, -1)
    counts = np.cumsum(begins, dtype=np.int8)[:rows] > 0
    with opened(info.chunk_path(layout.TIME, 0), info.chunk_nbytes(layout.TIME)) as fd:
        for _, first, count in layout.split_range(0, rows, info.chunk_rows[layout.TIME], _ROWS_AT_ONCE):
            times = np.frombuffer(os.pread(fd, count * _ITEM, first * _ITEM), "<i8")
            found += int(np.count_nonzero((times <= time) & counts[first : first + count]))
    return found


def repeat_times(
    folder: str,
    chunk: int,
    per_chunk: int,
    rows: NDArray[np.int64],
    skipped: list[tuple[int, int]],
    least: int,
    begins: NDArray[np.int64],
) -> None:
    """Give zeroed rows of a chunk the time of the row before them, so that times never decrease in a lane.

    ``skipped`` has the byte ranges of the zeroed rows, in ascending order. All times in the chunks before this chunk
    are valid. Zeroed rows at the beginning of a lane get the time ``least``. ``begins`` has the first row of each lane,
    or of each merged lane of a pack, in ascending order.
    """
    lanes = len(rows)
    with opened(f"{folder}/{layout.TIME}/{layout.chunk_key(chunk, 0)}", None, os.O_RDWR) as fd:
        for start, stop in skipped:
            for lane, first, count in layout.split_range(start // _ITEM, -(-stop // _ITEM), per_chunk):
                last = min(first + count, int(rows[lane]) - chunk * per_chunk)
                if first >= last:
                    continue
                row, data = chunk * per_chunk + first, np.full(last - first, least, "<i8")
                begin = begins[np.searchsorted(begins, row) :]
                own = last - first if not len(begin) else min(last - first, int(begin[0]) - row)
                if own:
                    with _Column(folder, per_chunk, lanes) as column:
                        data[:own] = column.at(lane, row - 1)
                os.pwrite(fd, data.tobytes(), (lane * per_chunk + first) * _ITEM)
