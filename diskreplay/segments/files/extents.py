"""How far the arrays of a segment are filled: the rows of each lane, and the values of episodes.

The arrays of episode fields have a row for each row of a lane with `EPISODE_VALUES`, in the same order. Rows that were
lost to damage keep the place of their values; see `Lost.values`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.files.mapping import Mapping
from diskreplay.segments.segment import SegmentInfo

Ints = NDArray[np.int64]
MapChunk = Callable[[str, int], Mapping]

_AT_ONCE = 1 << 20


class Extent(NamedTuple):
    """The rows of each lane, and the values among them, ``(lanes,)`` each."""

    rows: Ints
    values: Ints

    def of(self, leaf: str) -> Ints:
        """Return how many rows of each lane an array has."""
        return self.values if layout.is_of_episodes(leaf) else self.rows

    @classmethod
    def begin(cls, lanes: int) -> "Extent":
        """Return that of a segment without rows."""
        return cls(np.zeros(lanes, np.int64), np.zeros(lanes, np.int64))


def extent_of(info: SegmentInfo, rows: Ints, before: Extent | None = None, mapped: MapChunk | None = None) -> Extent:
    """Return the extent of the first rows of each lane by their flags, from that of fewer rows where it is known.

    ``mapped`` gives the mapping of a chunk in place of `SegmentInfo.map_chunk`, whose errors are raised.
    """
    before = before or Extent.begin(len(rows))
    values = before.values.copy()
    if not info.has_values:
        return Extent(rows, values)
    for _, lane, has_values in _flags(info, before.rows, rows, mapped):
        values[lane] += np.count_nonzero(has_values)
    for position, _, count in info.lost.entries:
        row, lane = divmod(position, len(rows))
        if before.rows[lane] <= row < rows[lane]:
            values[lane] += count
    return Extent(rows, values)


def sealed_extent(info: SegmentInfo, rows: Ints) -> Extent:
    """Return the extent of a sealed segment with so many rows, by its attributes.

    Raises FormatError where these name more values than rows.
    """
    values = np.array(info.values or [0] * len(rows), np.int64)
    if (values > rows).any():
        raise FormatError(f"{info.path} names more values of episodes than rows; run `diskreplay repair`")
    return Extent(rows, values)


def rows_with_values(info: SegmentInfo, rows: int, values: int) -> int:
    """Return how many of the first rows, of all lanes alike, have no lane with more than so many values among them."""
    least, seen = rows, [0] * len(info.lanes)
    for row, lane, has_values in _flags(info, np.zeros(len(seen), np.int64), np.full(len(seen), rows), None):
        valued = np.flatnonzero(has_values)
        if (left := max(0, values - seen[lane])) < len(valued):
            least = min(least, row + int(valued[left]))
        seen[lane] += len(valued)
    return least


def _flags(
    info: SegmentInfo, first: Ints, stop: Ints, mapped: MapChunk | None
) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Yield which rows from ``first`` to ``stop`` of each lane have values, some at a time: the first row, the lane."""
    grown, per_chunk = np.flatnonzero(first < stop), info.chunk_rows[layout.DONE]
    if not len(grown):
        return
    for chunk in range(int(first[grown].min()) // per_chunk, -(-int(stop[grown].max()) // per_chunk)):
        begin, above = chunk * per_chunk, (chunk + 1) * per_chunk
        flags = (mapped or info.map_chunk)(layout.DONE, chunk).array(np.uint8, (len(first), per_chunk))
        for lane in grown.tolist():
            # Nothing else of the chunk is read: holes are to stay holes.
            for at in range(max(begin, int(first[lane])), min(above, int(stop[lane])), _AT_ONCE):
                some = flags[lane, at - begin : min(at + _AT_ONCE, above, int(stop[lane])) - begin]
                yield at, lane, (some & layout.EPISODE_VALUES) != 0
