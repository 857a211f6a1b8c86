"""The table of a sealed segment's episodes, ``episodes/``: it has one line per episode, and each column is an array.

Readers take reward sums from the table, so they need not read and add rewards.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import Lookup, LookupBelow
from diskreplay.ids import EpisodeTable, Floats, Ints, places_of
from diskreplay.segments.documents import layout
from diskreplay.segments.files.durable import write_file
from diskreplay.segments.files.mapping import data_ranges, opened, read_part, refuse_links
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.segment_reader import LaneSlice, parse_episodes

# The maximum number of rows read at a time, so that sealing needs little memory.
_ROWS_AT_ONCE = 1 << 20


def add_rewards(totals: Floats, episode: Ints, rewards: NDArray[Any]) -> None:
    """Add ``rewards[i]`` to ``totals[episode[i]]`` in float64, for each i in order.

    NumPy adds rewards one by one, so a total has the same bits however the rewards are divided into several calls.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # rewards may be +inf and -inf
        np.add.at(totals, episode, rewards.astype(np.float64))


@dataclass(frozen=True)
class EpisodeRows:
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.columns["position"])

    def files(self) -> Iterator[tuple[str, bytes]]:
        for name, values in self.columns.items() if len(self) else ():
            yield layout.episode_chunk(name), values.tobytes()


def table_of(info: SegmentInfo, rows: Ints) -> EpisodeRows:
    """Return the table of a segment's episodes, computed from its chunk files; lane i has ``rows[i]`` rows.

    Episodes of lost rows are left out. Damaged flags must not prevent sealing, so the table is empty if the flags do
    not form a sequence of episodes. Raises FormatError or OSError if files of flags, times or rewards are missing or
    too short.
    """
    parts, lost = [], [position for position, _ in info.lost.ranges]
    try:
        for episodes in _episodes(info, rows):
            parts.append(_columns(info, episodes.select(~np.isin(episodes.first, lost)) if lost else episodes))
    except _NoEpisodes:
        parts = []
    empty = {name: np.zeros(0, dtype) for name, dtype in layout.EPISODE_COLUMNS.items()}
    return EpisodeRows({name: np.concatenate([none, *(part[name] for part in parts)]) for name, none in empty.items()})


def write_table(info: SegmentInfo, rows: Ints, folder: str) -> tuple[int | None, dict[str, int]]:
    """Write the table of a segment into the new folder ``folder``; errors as for `table_of`.

    Return the number of episodes, and the checksums of the written files by their paths below the segment. If the
    segment has too few or too many rows for a table, return None and no checksums.
    """
    if not layout.LEAST_TABLE_ROWS <= rows.sum() <= layout.MOST_TABLE_ROWS:
        return None, {}
    table = table_of(info, rows)
    sums = {}
    for path, document in info.root.blueprint.episode_documents(len(table)):
        os.mkdir(folder + path.removeprefix(layout.EPISODES))
        sums[f"{path}/{layout.METADATA}"] = _write(folder, f"{path}/{layout.METADATA}", document)
    for name, data in table.files():
        sums[name] = _write(folder, name, data)
    return len(table), sums


def _write(folder: str, name: str, data: bytes) -> int:
    write_file(folder + name.removeprefix(layout.EPISODES), data)
    return int(crc32c(data))


def read_columns(info: SegmentInfo, *names: str) -> list[NDArray[Any]]:
    """Return columns of the table of a sealed segment; empty arrays if the segment has no table.

    Raises FormatError if the file of a column is a link, has the wrong size or does not match its checksum, or if the
    file of positions has holes. Raises FileNotFoundError if a file is missing.
    """
    if not info.episodes:
        return [np.zeros(0, layout.EPISODE_COLUMNS[name]) for name in names]
    with LookupBelow(str(info.path)) as lookup:
        refuse_links(info.path, layout.EPISODE_FOLDERS, lookup)
        _refuse_holes(info, lookup)
        return [_read_column(info, name, lookup) for name in names]


def _refuse_holes(info: SegmentInfo, lookup: Lookup) -> None:
    """Raise FormatError if the file of positions has a hole: a small file with a large hole could fill the memory.

    The positions of an intact table increase, so only the first of them can be 0, and the file has no block of zeros.
    """
    assert info.episodes is not None
    name = layout.episode_chunk("position")
    path, nbytes = f"{info.path}/{name}", info.episodes * np.dtype(layout.EPISODE_COLUMNS["position"]).itemsize
    with opened(path, nbytes, lookup=lookup) as fd:
        if info.episodes > 1 and next(data_ranges(fd, 0, nbytes), None) != (0, nbytes):
            raise FormatError(f"{path} has holes; run `diskreplay repair`")


def _read_column(info: SegmentInfo, name: str, lookup: Lookup) -> NDArray[Any]:
    assert info.episodes is not None
    dtype, file = np.dtype(layout.EPISODE_COLUMNS[name]), layout.episode_chunk(name)
    with opened(f"{info.path}/{file}", info.episodes * dtype.itemsize, lookup=lookup) as fd:
        values = np.empty(info.episodes, dtype)
        if not read_part(fd, 0, values.view(np.uint8)) or crc32c(values.data) != info.checksums.get(file):
            raise FormatError(f"{info.path}/{file} does not fit its checksum; run `diskreplay repair`")
    return values


# --- episodes from the rows ------------------------------------------------------------------------------------------


class _NoEpisodes(Exception):
    pass


def _episodes(info: SegmentInfo, rows: Ints) -> Iterator[EpisodeTable]:
    """Yield tables of a segment's episodes, lane by lane; the segment number in the ids is 0."""
    for lane, first, flags, counts in _flags(info, rows):
        same = np.ones_like(counts)
        lanes = lane + np.arange(len(counts))
        where = LaneSlice(0 * same, len(info.lanes) * same, lanes, first * same, counts, same.astype(np.bool_))
        try:
            yield parse_episodes(flags, where).ended
        except FormatError as error:
            raise _NoEpisodes from error


def _flags(info: SegmentInfo, rows: Ints) -> Iterator[tuple[int, int, NDArray[np.uint8], Ints]]:
    """Yield (lane, row, flags, counts): flags of lanes ``lane``, ``lane + 1``, ... from row ``row`` on, concatenated.

    ``counts[i]`` is the number of flags of lane ``lane + i``. A long lane is yielded alone, in parts that end where an
    episode ends.
    """
    per_chunk, longest = info.chunk_rows[layout.DONE], int(rows.max(initial=0))
    chunks = -(-longest // per_chunk)
    together = max(1, _ROWS_AT_ONCE // (max(1, chunks) * per_chunk))
    for lane in range(0, len(rows), together):
        counts = rows[lane : lane + together]
        if len(counts) == 1:
            yield from _flags_of_lane(info, lane, int(counts[0]))
            continue
        parts = [np.zeros((len(counts), 0), np.uint8)]
        for chunk in range(chunks):
            data = _read(info, layout.DONE, chunk, lane * per_chunk, len(counts) * per_chunk)
            parts.append(data.reshape(len(counts), per_chunk))
        flags = np.concatenate(parts, axis=1)
        yield lane, 0, flags[np.arange(flags.shape[1]) < counts[:, None]], counts


def _flags_of_lane(info: SegmentInfo, lane: int, rows: int) -> Iterator[tuple[int, int, NDArray[np.uint8], Ints]]:
    per_chunk, first, kept = info.chunk_rows[layout.DONE], 0, list[NDArray[np.uint8]]()
    for chunk, inside, count in layout.split_range(0, rows, per_chunk, _ROWS_AT_ONCE):
        flags = _read(info, layout.DONE, chunk, lane * per_chunk + inside, count)
        starts = np.flatnonzero(flags & layout.FIRST)
        row = chunk * per_chunk + inside
        if len(starts) and row + int(starts[-1]) > first:
            before = np.concatenate([*kept, flags[: starts[-1]]])
            yield lane, first, before, np.array([len(before)])
            first, kept = row + int(starts[-1]), []
            flags = flags[starts[-1] :]
        kept.append(flags)
    if kept:
        yield lane, first, np.concatenate(kept), np.array([rows - first])


def _columns(info: SegmentInfo, episodes: EpisodeTable) -> dict[str, NDArray[Any]]:
    """Return the columns of the table for these episodes, which must be sorted by lane and row."""
    row, lane = np.divmod(episodes.first, len(info.lanes))
    times, totals = np.zeros(len(episodes), np.int64), np.zeros(len(episodes))
    for which, values in _values(info, layout.TIME, lane, row, row + 1):
        times[which] = values
    for which, values in _values(info, "reward", lane, row, row + episodes.steps):
        add_rewards(totals, which, values)
    found = episodes.first, episodes.steps, episodes.end, times, totals
    return {
        name: values.astype(dtype) for (name, dtype), values in zip(layout.EPISODE_COLUMNS.items(), found, strict=True)
    }


def _values(info: SegmentInfo, leaf: str, lane: Ints, first: Ints, stop: Ints) -> Iterator[tuple[Ints, NDArray[Any]]]:
    """Yield (which, values): the values of an array in the rows ``first[i]`` to ``stop[i]`` of ``lane[i]``, for all i.

    ``values[k]`` belongs to the range ``which[k]``. The row ranges must be sorted by lane and row, and must not
    overlap. The values of each range are yielded in the order of their rows.
    """
    per_chunk = info.chunk_rows[leaf]
    for chunk in range(int(first.min(initial=0)) // per_chunk, -(-int(stop.max(initial=0)) // per_chunk)):
        low, high = (np.clip(rows - chunk * per_chunk, 0, per_chunk) for rows in (first, stop))
        some = np.flatnonzero(low < high)
        begin, end = lane[some] * per_chunk + low[some], lane[some] * per_chunk + high[some]
        for at in range(int(begin[0]), int(end[-1]), _ROWS_AT_ONCE) if len(some) else ():
            here = slice(int(np.searchsorted(end, at, "right")), int(np.searchsorted(begin, at + _ROWS_AT_ONCE)))
            if here.start == here.stop:
                continue
            start = np.maximum(begin[here], at)
            count = np.minimum(end[here], at + _ROWS_AT_ONCE) - start
            base = int(start[0])
            values = _read(info, leaf, chunk, base, int(start[-1] + count[-1]) - base)
            yield np.repeat(some[here], count), values[places_of(start - base, count)]


def _read(info: SegmentInfo, leaf: str, chunk: int, first: int, count: int) -> NDArray[Any]:
    dtype, path = info.arrays[leaf].dtype, info.chunk_path(leaf, chunk)
    data = np.empty(count * dtype.itemsize, np.uint8)
    with opened(path, info.chunk_nbytes(leaf)) as fd:
        if not read_part(fd, first * dtype.itemsize, data):
            raise FormatError(f"{path} has become shorter; the store is damaged, restore this file")
    return data.view(dtype)
