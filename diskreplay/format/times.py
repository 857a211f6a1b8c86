"""The times of a segment's rows: nanoseconds by the clock of its boot, which never fall within a lane."""

import os

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.lost import Lost
from diskreplay.format.machine import MOST_NS
from diskreplay.format.mapping import open_regular
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo
from diskreplay.format.trust import map_trusted

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
    lanes = np.flatnonzero(first < stop)
    if not len(lanes):
        return None
    ends = np.concatenate([first[lanes], stop[lanes] - 1])
    times = _read(folder, per_chunk, len(rows), np.concatenate([lanes, lanes]), ends)
    # Clipped: a document with other numbers would be refused, and with it rows that may be whole.
    return int(times.min().clip(0, MOST_NS)), int(times.max().clip(0, MOST_NS))


def last_time(root: Root, info: SegmentInfo) -> int:
    """Return when the last row of a segment came, in nanoseconds since the epoch; 0 where it has none.

    Raises
    ------
    FormatError, OSError
        A file of it is damaged or gone.
    """
    if info.sealed:
        return info.bounds[1]
    rows = map_trusted(root, info)[1].copy()
    bounds = time_bounds(str(info.path), info.chunk_rows[layout.TIME], rows, info.lost)
    return 0 if bounds is None else bounds[1] + info.clock.wall


def count_until(root: Root, info: SegmentInfo, time: int) -> int:
    """Count the rows of a segment that came no later than a time, by the clock of its boot.

    Raises
    ------
    FormatError, OSError
        A file of it is damaged or gone.
    """
    rows = map_trusted(root, info)[1].copy()
    first, stop = np.zeros_like(rows), rows
    while len(lanes := np.flatnonzero(first < stop)):
        middle = (first + stop)[lanes] // 2
        times = _read(str(info.path), info.chunk_rows[layout.TIME], len(rows), lanes, middle)
        is_older = times <= time
        first[lanes[is_older]] = middle[is_older] + 1
        stop[lanes[~is_older]] = middle[~is_older]
    return int(first.sum())


def _read(
    folder: str, per_chunk: int, lanes: int, lane: NDArray[np.int64], row: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the times of some rows."""
    times = np.zeros(len(row), np.int64)
    for chunk in np.unique(row // per_chunk).tolist():
        path = f"{folder}/{layout.TIME}/{layout.chunk_key(chunk, 0)}"
        fd = open_regular(path, lanes * per_chunk * _ITEM)
        try:
            for i in np.flatnonzero(row // per_chunk == chunk).tolist():
                at = (int(lane[i]) * per_chunk + int(row[i]) % per_chunk) * _ITEM
                times[i] = int.from_bytes(os.pread(fd, _ITEM, at), "little", signed=True)
        finally:
            os.close(fd)
    return times


def repeat_times(
    folder: str, chunk: int, per_chunk: int, rows: NDArray[np.int64], skipped: list[tuple[int, int]], least: int
) -> None:
    """Give rows of a chunk that are zeros the time of the row before them: then the times of a lane still never fall.

    ``skipped`` are their bytes, in order. The chunks before are complete. At the beginning of a lane it is ``least``.
    """
    lanes = len(rows)
    fd = os.open(f"{folder}/{layout.TIME}/{layout.chunk_key(chunk, 0)}", os.O_RDWR | os.O_CLOEXEC)
    try:
        for start, stop in ((first // _ITEM, -(-last // _ITEM)) for first, last in skipped):
            for lane in range(start // per_chunk, -(-stop // per_chunk)):
                first, last = max(start - lane * per_chunk, 0), min(stop - lane * per_chunk, per_chunk)
                last = min(last, int(rows[lane]) - chunk * per_chunk)
                row = chunk * per_chunk + first - 1
                if first >= last:
                    continue
                before = least
                if row >= 0:
                    before = int(_read(folder, per_chunk, lanes, np.array([lane]), np.array([row]))[0])
                data = np.full(last - first, before, "<i8").tobytes()
                os.pwrite(fd, data, (lane * per_chunk + first) * _ITEM)
    finally:
        os.close(fd)
