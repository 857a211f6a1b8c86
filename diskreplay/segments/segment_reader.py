"""Reads from a segment's files its extent, flags and episodes, and checks that all its chunks exist.

An array of an episode field has one value for each row of a lane with the flag `EPISODE_VALUES`, in the order of these
rows. The values of rows that were lost to damage stay in these arrays, as zeros; see `Lost.values`.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import BY_PATH, Lookup, LookupBelow
from diskreplay.ids import (
    CONTINUES,
    CUT,
    DISCARD,
    DISCARD_BEFORE,
    DISCARDED,
    END_MARKER,
    EPISODE_VALUES,
    FIRST,
    OBSERVATION_ONLY,
    POSITION_BITS,
    TERMINATED,
    TRUNCATED,
    EpisodeTable,
    Ints,
)
from diskreplay.segments.documents import layout
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.mapping import Mapping, data_ranges, opened, read_into, read_part
from diskreplay.segments.segment import SegmentInfo

MapChunk = Callable[[str, int], Mapping]

_AT_ONCE = 1 << 20


class Extent(NamedTuple):
    """How far the arrays of a segment are filled.

    ``rows`` has the number of rows of each lane, and ``values`` the number of rows of each lane in the arrays of
    episode fields, ``(lanes,)`` each.
    """

    rows: Ints
    values: Ints

    def of(self, leaf: str) -> Ints:
        return self.values if layout.is_of_episodes(leaf) else self.rows

    @classmethod
    def begin(cls, lanes: int) -> "Extent":
        return cls(np.zeros(lanes, np.int64), np.zeros(lanes, np.int64))


def extent_of(info: SegmentInfo, rows: Ints, before: Extent | None = None, mapped: MapChunk | None = None) -> Extent:
    """Return the extent of the first ``rows[i]`` rows of each lane i, computed from the flags of these rows.

    ``before`` is a known extent of fewer rows: only the flags of later rows are read. If ``mapped`` is given, this
    function maps chunks in place of `SegmentInfo.map_chunk`, and raises the same errors.
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
    """Return the extent of a sealed segment from its attributes; ``rows`` has the number of rows of each lane.

    Raises FormatError if the attributes name more values than rows.
    """
    values = np.array(info.values or [0] * len(rows), np.int64)
    if (values > rows).any():
        raise FormatError(f"{info.path} names more values of episodes than rows; run `diskreplay repair`")
    return Extent(rows, values)


def rows_with_values(info: SegmentInfo, rows: int, values: int) -> int:
    """Return the largest r up to ``rows`` for which the first r rows of each lane have at most ``values`` values."""
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
    """Yield (row, lane, mask): ``mask[i]`` is whether row ``row + i`` of the lane has values of an episode.

    All parts together have the rows ``first[lane]`` to ``stop[lane]`` of each lane.
    """
    grown, per_chunk = np.flatnonzero(first < stop), info.chunk_rows[layout.DONE]
    if not len(grown):
        return
    for chunk in range(int(first[grown].min()) // per_chunk, -(-int(stop[grown].max()) // per_chunk)):
        begin, above = chunk * per_chunk, (chunk + 1) * per_chunk
        flags = (mapped or info.map_chunk)(layout.DONE, chunk).array(np.uint8, (len(first), per_chunk))
        for lane in grown.tolist():
            # No other rows are read, because in some file systems, reading a hole through a mapping fills the hole.
            for at in range(max(begin, int(first[lane])), min(above, int(stop[lane])), _AT_ONCE):
                some = flags[lane, at - begin : min(at + _AT_ONCE, above, int(stop[lane])) - begin]
                yield at, lane, (some & layout.EPISODE_VALUES) != 0


# --- flags ------------------------------------------------------------------------------------------------------------


# Holes are left out if there are at least `_LARGE` flags, and less than 1 / `_SPARSE` of the flags are on disk.
_LARGE, _SPARSE = 1 << 20, 4


class Gaps(NamedTuple):
    """Zeros that were left out of an array of flags: ``rows[i]`` zeros after position ``at[i]`` of the array."""

    at: Ints
    rows: Ints

    def before(self, positions: Ints) -> Ints:
        total: Ints = np.append(0, np.cumsum(self.rows))
        return total[np.searchsorted(self.at, positions)]


class LaneFlags(NamedTuple):
    """The flags of several lanes, one lane after another; ``rows`` has each lane's number of flags in ``flags``.

    ``gaps`` are runs of zeros that were left out of ``flags``; None: nothing was left out.
    """

    flags: NDArray[np.uint8]
    rows: Ints
    gaps: Gaps | None = None

    @staticmethod
    def concatenate(parts: "list[LaneFlags]") -> "LaneFlags":
        if len(parts) == 1:
            return parts[0]
        flags, rows = (np.concatenate([part[i] for part in parts]) for i in range(2))
        if all(part.gaps is None for part in parts):
            return LaneFlags(flags, rows)
        start = np.cumsum([0, *(len(part.flags) for part in parts[:-1])])
        gaps = [(part.gaps.at + first, part.gaps.rows) for part, first in zip(parts, start, strict=True) if part.gaps]
        return LaneFlags(flags, rows, Gaps(*(np.concatenate(column) for column in zip(*gaps, strict=True))))


def read_lanes(
    info: SegmentInfo, lane: Ints, first: Ints, stop: Ints, dense: Callable[[], NDArray[np.uint8]]
) -> LaneFlags:
    """Return the flags of the rows ``first[i]`` to ``stop[i]`` of each ``lane[i]``; all chunks must exist.

    ``dense`` is a function that returns these flags, one lane after another. For a large segment with most flags in
    holes of its files, ``dense`` is not called. The result then leaves out the zeros of the holes to save memory: see
    ``gaps`` of `LaneFlags`.
    """
    rows = stop - first
    wanted = int(rows.sum())
    if wanted < _LARGE or info.packed is not None or _SPARSE * _allocated(info, int(stop.max())) > wanted:
        return LaneFlags(dense(), rows)
    per_chunk, size = info.chunk_rows[layout.DONE], info.chunk_nbytes(layout.DONE)
    parts: list[NDArray[np.uint8]] = []
    counts, gaps, total = [], [], 0
    for which, row, end in zip(lane.tolist(), first.tolist(), stop.tolist(), strict=True):
        before = total
        for chunk, inside, count in layout.split_range(row, end, per_chunk):
            at = which * per_chunk + inside
            with opened(info.chunk_path(layout.DONE, chunk), size) as fd:
                for part, left_out in _read_sparse(fd, at, at + count):
                    parts.append(part)
                    total += len(part)
                    if left_out:
                        gaps.append((total - 1, left_out))
        counts.append(total - before)
    at_gap, left = np.array(gaps, np.int64).reshape(-1, 2).T
    return LaneFlags(np.concatenate(parts), np.array(counts, np.int64), Gaps(at_gap, left))


def _read_sparse(fd: int, start: int, stop: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield (part, left_out): bytes of a file from ``start`` to ``stop``, and the number of zeros left out after them.

    A hole is yielded as one zero.
    """
    at = start
    for first, last in chain(data_ranges(fd, start, stop), [(stop, stop)]):
        if first > at:
            yield np.zeros(1, np.uint8), first - at - 1
        part = np.empty(last - first, np.uint8)
        read_part(fd, first, part)
        yield part, 0
        at = last


def _allocated(info: SegmentInfo, rows: int) -> int:
    chunks = range(-(-rows // info.chunk_rows[layout.DONE]))
    return sum(os.stat(info.chunk_path(layout.DONE, chunk)).st_blocks * 512 for chunk in chunks)


def check_chunks(info: SegmentInfo, checked: int, rows: int, lookup: Lookup = BY_PATH) -> int:
    """Check that each chunk with a row from ``checked`` to ``rows`` exists at its full size.

    ``checked`` is the result of an earlier call, or 0. Return the row up to which all chunks are known to exist. Raises
    FileNotFoundError if a chunk is missing, FormatError if a chunk has the wrong size.
    """
    if rows <= checked:
        return checked
    known = []
    folder = str(info.path)
    for leaf, array in info.arrays.items():
        per_chunk, begin, stop = info.chunk_rows[leaf], checked, rows
        if array.is_of_episodes:
            begin, stop = 0, max(info.values, default=0)  # an unsealed segment has no `values`
        chunks = -(-stop // per_chunk)
        if not array.is_of_episodes:
            known.append(chunks * per_chunk)
        size, dimensions = info.chunk_nbytes(leaf), len(array.shape)
        for chunk in range(-(-begin // per_chunk), chunks):
            path = f"{folder}/{leaf}/{layout.chunk_key(chunk, dimensions)}"
            found = lookup.status(path).st_size
            if found != size:
                raise FormatError(
                    f"{path} is {found} bytes where {size} are needed; the store is damaged, restore this file"
                )
    return min(known)


def read_sealed(info: SegmentInfo) -> tuple[Ints, LaneFlags]:
    """Return the number of rows of each lane of a sealed segment, and the flags of these rows.

    The files are read by position, not mapped, because there may be thousands of small segments. Raises
    FileNotFoundError if the segment was evicted or lacks a file, FormatError if it is damaged.
    """
    lanes = len(info.lanes)
    with LookupBelow(str(info.path)) as lookup:
        committed = read_lane_counter(f"{info.path}/{layout.COMMITTED}", lanes, lookup=lookup)
        least, most = int(committed.min()), int(committed.max())
        if least < 0 or most * lanes > layout.POSITION_MASK:
            raise FormatError(f"{info.path}: committed is damaged; restore it")
        sealed_extent(info, committed)
        check_chunks(info, 0, most, lookup)
        if most * lanes < _LARGE:  # true for nearly all segments of a large store
            return committed, LaneFlags(_read_dense(info, committed, lookup), committed)
        bounds = np.arange(lanes), np.zeros_like(committed), committed
        return committed, read_lanes(info, *bounds, lambda: _read_dense(info, committed, lookup))


def _read_dense(info: SegmentInfo, committed: Ints, lookup: Lookup) -> NDArray[np.uint8]:
    """Return the flags of the first ``committed[lane]`` rows of each lane, one lane after another.

    If at least a quarter of the rows of the chunks are committed, whole chunks are read: this is faster than one read
    per lane. With fewer committed rows, whole chunks would take too much memory.
    """
    lanes, per_chunk, most = len(info.lanes), info.chunk_rows[layout.DONE], int(committed.max())
    chunks, size = -(-most // per_chunk), info.chunk_nbytes(layout.DONE)
    paths = [info.chunk_path(layout.DONE, chunk) for chunk in range(chunks)]
    if lanes == 1 or chunks * size > _SPARSE * int(committed.sum()):
        return _read_rows(paths, size, per_chunk, committed, lookup)
    flags = np.empty(chunks * size, np.uint8)
    for path, chunk in zip(paths, flags.reshape(chunks, size), strict=True):
        read_into(path, size, chunk, lookup)
    by_lane = flags.reshape(chunks, lanes, per_chunk).transpose(1, 0, 2).reshape(lanes, -1)
    if int(committed.min()) == most:
        return np.ascontiguousarray(by_lane[:, :most]).reshape(-1)  # without this copy, all chunks could stay in memory
    return by_lane[np.arange(by_lane.shape[1]) < committed[:, None]]


def _read_rows(paths: Sequence[str], size: int, per_chunk: int, committed: Ints, lookup: Lookup) -> NDArray[np.uint8]:
    """Return the flags of the first ``committed[lane]`` rows of each lane, and read no other flags.

    ``paths`` are the chunk files, of ``size`` bytes and ``per_chunk`` rows per lane.
    """
    flags = np.empty(int(committed.sum()), np.uint8)
    starts = np.cumsum(committed) - committed
    for chunk, path in enumerate(paths):
        with opened(path, size, lookup=lookup) as fd:
            for lane, (start, rows) in enumerate(zip(starts.tolist(), committed.tolist(), strict=True)):
                first = chunk * per_chunk
                part = flags[start + first : start + min(first + per_chunk, rows)]
                if not read_part(fd, lane * per_chunk, part):
                    raise FormatError(f"{path} has become shorter than {size} bytes; restore this file from a backup")
    return flags


# --- episodes ---------------------------------------------------------------------------------------------------------


_ENDS = TERMINATED | TRUNCATED | OBSERVATION_ONLY | END_MARKER


class LaneSlice(NamedTuple):
    """Slices of lanes; each column has one entry per slice.

    A slice is ``rows`` rows of the lane ``lane``, from row ``first_row`` on. The first row of a slice begins an
    episode. ``segment`` is the number of the slice's segment, and ``lanes`` this segment's number of lanes.
    """

    segment: Ints
    lanes: Ints
    lane: Ints
    first_row: Ints
    rows: Ints
    sealed: NDArray[np.bool_]


class ParsedEpisodes(NamedTuple):
    """The ended episodes, and the open episode of each slice.

    ``open_start`` is the first row of the open episode, or -1 if no episode is open. ``open_continues`` is whether the
    open episode continues an episode that was cut for its length.
    """

    ended: EpisodeTable
    open_start: Ints
    open_continues: NDArray[np.bool_]


def parse_episodes(flags: NDArray[np.uint8], slices: LaneSlice, gaps: Gaps | None = None) -> ParsedEpisodes:
    """Return the episodes of slices of lanes; ``flags`` has the flags of all slices, concatenated.

    ``gaps`` are zeros that were left out of ``flags``. ``slices.rows`` does not count the rows of these zeros. Raises
    FormatError if the flags of a slice do not form a sequence of episodes.
    """
    end_at = np.cumsum(slices.rows)
    begin_at = end_at - slices.rows
    filled = np.flatnonzero(slices.rows)
    starts, marks = _starts(flags)
    # The first row of every slice begins an episode, so an episode ends where the next episode begins.
    discards = marks[marks >= DISCARDED]
    if ((discards != DISCARD) & (discards != DISCARD_BEFORE)).any() or not (flags[begin_at[filled]] & FIRST).all():
        raise _damaged(flags, slices, "the flags in done are damaged at row {}")
    stops = np.append(starts[1:], len(flags))[: len(starts)]
    last = flags[stops - 1]
    extra = (last & (OBSERVATION_ONLY | END_MARKER)) != 0
    begin, start, stop = begin_at, starts, stops
    if gaps is not None:
        begin, start, stop = (positions + gaps.before(positions) for positions in (begin_at, starts, stops))
    steps = stop - start - extra
    if ((steps < 1) & (last != DISCARD_BEFORE)).any():
        raise _damaged(flags, slices, "an episode without a step in done after row {}")
    step_flags = np.where(extra, flags[stops - 1 - extra], last)
    step_flags[steps < 1] = 0
    expected = np.count_nonzero(extra) + np.count_nonzero(step_flags & (TERMINATED | TRUNCATED))
    if np.count_nonzero(marks & _ENDS) != expected:
        raise _damaged(flags, slices, "an episode in done ends twice after row {}")
    end = step_flags & (TERMINATED | TRUNCATED | EPISODE_VALUES)
    end |= np.where(extra, last & (TRUNCATED | OBSERVATION_ONLY | CUT | EPISODE_VALUES | DISCARDED), np.uint8(0))
    end |= np.where(last & DISCARDED, np.uint8(TRUNCATED | CUT), np.uint8(0))
    end |= np.where(flags[starts] & CUT, np.uint8(CONTINUES), np.uint8(0))

    newest = np.searchsorted(starts, end_at[filled]) - 1  # the last episode of each slice: it may be open
    is_open = ((end[newest] & (TERMINATED | TRUNCATED)) == 0) & ~slices.sealed[filled]
    open_start, open_continues = np.full(len(end_at), -1), np.zeros(len(end_at), np.bool_)
    opened, newest = filled[is_open], newest[is_open]
    open_start[opened] = start[newest] - begin[opened] + slices.first_row[opened]
    open_continues[opened] = (end[newest] & CONTINUES) != 0
    # An episode without an end flag was cut by its writer, without a final observation.
    end[(end & (TERMINATED | TRUNCATED)) == 0] |= TRUNCATED | CUT
    if len(newest):
        starts, start, steps, end = (np.delete(column, newest) for column in (starts, start, steps, end))
    if not len(starts):
        return ParsedEpisodes(EpisodeTable.concatenate([]), open_start, open_continues)
    # Empty slices begin at the same position as the slice after them: `side="right"` finds the slice that has rows.
    which = np.searchsorted(begin_at, starts, side="right") - 1 if len(begin_at) > 1 else np.zeros(1, np.int64)
    row, stride = start + (slices.first_row - begin)[which], slices.lanes[which]
    first = ((slices.segment << POSITION_BITS) + slices.lane)[which] + row * stride
    ended = EpisodeTable.of(first, stride, steps, steps + ((end & OBSERVATION_ONLY) != 0), end)
    return ParsedEpisodes(ended, open_start, open_continues)


def _starts(flags: NDArray[np.uint8]) -> tuple[Ints, NDArray[np.uint8]]:
    """Return the positions of flags that begin an episode, and an array with all nonzero flags, in order."""
    # In long episodes most flags are 0, so eight flags are compared at once.
    whole = len(flags) & ~7
    words = np.flatnonzero(flags[:whole].view(np.uint64))
    if 4 * len(words) > len(flags) // 8:
        return np.flatnonzero(flags & FIRST), flags
    some = flags[:whole].reshape(-1, 8)[words].reshape(-1)
    at, rest = np.flatnonzero(some & FIRST), np.flatnonzero(flags[whole:] & FIRST)
    return np.concatenate([(words[at >> 3] << 3) + (at & 7), rest + whole]), np.append(some, flags[whole:])


def _damaged(flags: NDArray[np.uint8], slices: LaneSlice, problem: str) -> FormatError:
    """Parse each slice alone, and return an error that names the damaged slice."""
    number = 0
    stops = np.cumsum(slices.rows).tolist()
    if len(stops) > 1:
        for number, stop in enumerate(stops):
            alone = LaneSlice._make(column[number : number + 1] for column in slices)
            try:
                parse_episodes(flags[stop - int(alone.rows[0]) : stop], alone)
            except FormatError as error:
                return error
    where = f"segment {slices.segment[number]}, lane {slices.lane[number]}"
    return FormatError(f"{where}: {problem.format(slices.first_row[number])}; restore the segment")
