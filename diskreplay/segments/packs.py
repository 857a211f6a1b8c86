"""Packs: sealed segments with the rows of many segments, one after another.

A pack is stored as a segment with one lane, so all code that reads, checks or deletes segments also handles packs. Two
tables say which segments a pack has, and where each lane of these segments begins.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.ids import Ints
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import Identity, identify
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.mapping import MappingRefused, map_file, opened, read_regular
from diskreplay.segments.files.numbers import listed_numbers
from diskreplay.segments.segment import SegmentInfo, read_segment
from diskreplay.segments.shards import CRC_BYTES, NOTHING, Shard, index_bytes, most_frame_bytes
from diskreplay.workers import computed_once

# The maximum number of listings of the folder of segments: it is listed again if packs were merged meanwhile.
_ATTEMPTS = 20


@dataclass(frozen=True, eq=False)
class PackTables:
    """The two tables of a pack: one of its segments, and one of the lanes of its segments.

    ``members`` has one line per segment, sorted by segment number, with the columns `layout.MEMBER_COLUMNS`. ``runs``
    has one line per lane of these segments, in the order of ``members``, with the columns `layout.RUN_COLUMNS`. The
    column ``first_row`` counts rows of the pack, and ``first_value`` counts rows of its arrays of episode fields.
    """

    members: Ints
    runs: Ints

    @property
    def numbers(self) -> Ints:
        return self.members[:, 0]

    @property
    def lanes(self) -> Ints:
        return self.members[:, 1]

    @property
    def writers(self) -> Ints:
        return self.members[:, 2]

    @property
    def steps(self) -> Ints:
        return self.members[:, 3]

    @property
    def first_rows(self) -> Ints:
        return self.runs[:, 0]

    @property
    def rows(self) -> Ints:
        return self.runs[:, 1]

    def of(self, leaf: str) -> "PackTables":
        """Return tables in which `first_rows` and `rows` count rows of the array ``leaf``.

        An array of an episode field has one row per value.
        """
        return self._of_values if layout.is_of_episodes(leaf) else self

    @computed_once
    def _of_values(self) -> "PackTables":
        return PackTables(self.members, self.runs[:, [3, 4, 2, 3, 4]])

    @property
    def contents(self) -> tuple[bytes, bytes]:
        members, runs = (np.ascontiguousarray(table, "<i8").tobytes() for table in (self.members, self.runs))
        return members, runs

    @computed_once
    def first_run(self) -> Ints:
        """The index of each segment's first line in ``runs``; the last entry is the number of lines of ``runs``."""
        return np.concatenate([[0], np.cumsum(self.lanes)])

    def places(self, numbers: Ints) -> Ints:
        """Return, for each segment number, its line in ``members``; -1 if the pack does not have the segment."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return np.where(self.numbers[at] == numbers, at, -1)

    def runs_of(self, member: int) -> slice:
        return slice(int(self.first_run[member]), int(self.first_run[member + 1]))

    def ids_of(self, rows: Ints) -> Ints:
        """Return the id of each of these rows of the pack; no row may be an unused row between lanes."""
        run = np.searchsorted(self.first_rows, rows, "right") - 1
        member = np.searchsorted(self.first_run, run, "right") - 1
        position = (rows - self.first_rows[run]) * self.lanes[member] + run - self.first_run[member]
        ids: Ints = self.numbers[member] << layout.POSITION_BITS | position
        return ids

    def rows_of(self, ids: Ints) -> Ints:
        """Return the row of the pack for each of these ids; the pack must have the segments of all ids."""
        member = self.places(ids >> layout.POSITION_BITS)
        row, lane = np.divmod(ids & layout.POSITION_MASK, self.lanes[member])
        rows: Ints = self.first_rows[self.first_run[member] + lane] + row
        return rows

    def holds(self, row: int) -> bool:
        """Return whether a row of the pack is in a lane of a segment, and not an unused row between lanes."""
        run = int(np.searchsorted(self.first_rows, row, "right")) - 1
        return run >= 0 and row < int(self.first_rows[run] + self.rows[run])

    def member_tables(self, number: int, line: int) -> "PackTables":
        """Return tables of segment ``number`` alone; lane i of the segment begins at row ``i * line``."""
        member = int(self.places(np.array([number]))[0])
        runs = self.runs[self.runs_of(member)].copy()
        runs[:, 0] = line * np.arange(len(runs))
        return PackTables(self.members[member : member + 1], runs)

    def split(self, first: int, rows: int) -> list[tuple[int, int]]:
        """Return the ranges of rows that are in lanes, among the ``rows`` rows of the pack from row ``first`` on.

        There is one range per lane, as (first row of the pack, number of rows), in ascending order.
        """
        run = int(np.searchsorted(self.first_rows, first, "right")) - 1
        parts, stop = [], first + rows
        while first < stop and run < len(self.runs):
            begin, end = int(self.first_rows[run]), int(self.first_rows[run] + self.rows[run])
            low, high = max(first, begin), min(stop, end)
            if low < high:
                parts.append((low, high - low))
            first, run = max(first, end), run + 1
        return parts


def read_tables(info: SegmentInfo) -> PackTables:
    """Return the tables of a pack, read from its files.

    Raises FormatError if the tables do not match their checksums or hold impossible values, FileNotFoundError if they
    are missing.
    """
    assert info.packed is not None
    members, runs = (_read_table(info, path) for path in layout.PACK_TABLES)
    tables = PackTables(members, runs)
    rows = (rows for leaf, rows in info.chunk_rows.items() if not layout.is_of_episodes(leaf))
    if not _are_possible(tables, min(rows) - layout.ROWS_BEHIND) or not _are_values(tables, sum(info.values)):
        raise FormatError(f"{info.path}: the tables of the pack hold impossible values; run `diskreplay repair`")
    return tables


def read_members(info: SegmentInfo) -> Ints:
    """Return the table ``members`` of a pack, ``(n, 4)`` int64; for any other segment, a table with one line.

    The steps of an unsealed segment are unknown, and given as 0. Errors as for `read_tables`.
    """
    if info.packed is None:
        return np.array([[info.number, len(info.lanes), info.writer, info.steps or 0]])
    return read_tables(info).members


def open_shard(info: SegmentInfo, leaf: str) -> Shard:
    return Shard(info.chunk_path(leaf, 0), info.chunk_rows[leaf], info.arrays[leaf].row_bytes, info.compressed[leaf])


def _read_table(info: SegmentInfo, path: str) -> Ints:
    shape, name = _shape(info, path), f"{info.path}/{path}/c.0.0"
    try:
        data = _checked(info, path, read_regular(name, None, layout.MAX_TABLE_BYTES))
        with suppress(MappingRefused):
            return map_file(name, len(data)).array("<i8", shape)
    except (OSError, FormatError):
        if not (data := table_from_copy(info, path)):
            raise
    return np.frombuffer(data, "<i8").reshape(shape)


def table_from_copy(info: SegmentInfo, path: str) -> bytes:
    """Return the bytes of the table ``path``, read from the copy of both tables; empty if damaged or gone."""
    with suppress(OSError, FormatError):
        data = read_regular(f"{info.path}/{layout.TABLES_COPY}", None, 2 * layout.MAX_TABLE_BYTES)
        members, runs = (8 * math.prod(_shape(info, table)) for table in layout.PACK_TABLES)
        return _checked(info, path, data[:members] if path == layout.MEMBERS else data[members : members + runs])
    return b""


def _checked(info: SegmentInfo, path: str, data: bytes) -> bytes:
    name = f"{path}/c.0.0"
    lines, columns = _shape(info, path)
    if len(data) != 8 * lines * columns or crc32c(data) != info.checksums.get(name):
        raise FormatError(f"{info.path}/{name} does not fit its checksum; run `diskreplay repair`")
    return data


def _shape(info: SegmentInfo, path: str) -> tuple[int, int]:
    assert info.packed is not None
    which = layout.PACK_TABLES.index(path)
    return info.packed[which], len(layout.PACK_COLUMNS[which])


def _are_possible(tables: PackTables, rows: int) -> bool:
    members, runs = tables.members, tables.runs
    if (members < 0).any() or (runs < 0).any():
        return False
    if (members[:, 2] >= layout.MAX_SEGMENTS).any() or (runs[:, 2] >= layout.MAX_LANES).any():
        return False
    if (members[:, 1] < 1).any() or (members[:, 1] > layout.MAX_LANES).any() or members[:, 1].sum() != len(runs):
        return False
    if (np.diff(tables.numbers) <= 0).any() or int(tables.numbers[-1]) >= layout.MAX_SEGMENTS:
        return False
    most = layout.POSITION_MASK // np.repeat(tables.lanes, tables.lanes)
    if (tables.first_rows > rows).any() or (tables.rows > np.minimum(most, rows)).any():
        return False
    stop = tables.first_rows + tables.rows
    return bool((stop[:-1] <= tables.first_rows[1:]).all() and (stop <= rows).all())


def _are_values(tables: PackTables, count: int) -> bool:
    """Return whether the columns ``first_value`` and ``values`` of ``runs`` agree with the total ``count`` of values.

    The sum of values could overflow, so the sum is used only if no lane has more values than rows.
    """
    values = tables.runs[:, 4]
    stop = np.cumsum(values)
    return bool((values <= tables.rows).all() and (tables.runs[:, 3] == stop - values).all() and stop[-1] == count)


def read_packs(root: Root) -> Iterator[tuple[SegmentInfo, PackTables]]:
    """Yield the readable packs of a store, newest first, without packs that were merged into newer packs."""
    merged = set[int]()
    for info, tables in all_packs(root):
        members = tables.numbers.tolist()
        if merged.isdisjoint(members):
            merged.update(members)
            yield info, tables


def all_packs(root: Root, first: int = 0) -> Iterator[tuple[SegmentInfo, PackTables]]:
    """Yield the readable packs with numbers from ``first`` on, newest first."""
    for number in sorted((number for number in listed_numbers(root) if number >= first), reverse=True):
        folder = root.segment_path(number)
        if os.path.exists(f"{folder}/{layout.MEMBERS}") or os.path.exists(f"{folder}/{layout.TABLES_COPY}"):
            with suppress(OSError, FormatError):
                info = read_segment(root, number)
                if info.packed is not None:
                    yield info, read_tables(info)


def find_pack(root: Root, number: int) -> tuple[SegmentInfo, PackTables] | None:
    """Return the newest readable pack that has segment ``number``; None if there is no such pack or store."""
    with suppress(FormatError):
        for info, tables in _packs_after(root, number):
            if tables.places(np.array([number]))[0] >= 0:
                return info, tables
    return None


def merged_numbers(root: Root, first: int) -> set[int]:
    return {number for _, tables in _packs_after(root, first - 1) for number in tables.numbers.tolist()}


def _packs_after(root: Root, number: int) -> Iterator[tuple[SegmentInfo, PackTables]]:
    """Yield the packs with a higher number than ``number``, newest first.

    If a pack is removed meanwhile, all packs are yielded again, because a new pack may have its rows.
    """
    for _ in range(_ATTEMPTS):
        listed = [other for other in listed_numbers(root) if other > number]
        yield from all_packs(root, number + 1)
        if all(os.path.lexists(root.segment_path(other)) for other in listed):
            return


def current_numbers(root: Root) -> list[int]:
    """Return the sorted numbers of a store's segments and packs, without those that were merged into a newer pack."""
    superseded = merged_into({info.number: tables.numbers.tolist() for info, tables in all_packs(root)})
    return sorted({*listed_numbers(root)} - superseded)


def merged_into(packs: Mapping[int, Iterable[int]]) -> set[int]:
    """Return the numbers of the segments and packs that were merged into one of ``packs``.

    ``packs`` maps the number of a pack to the numbers of its segments.
    """
    merged, older = set[int](), set[int]()
    for number in sorted(packs, reverse=True):
        members = {*packs[number]}
        if not merged.isdisjoint(members):
            older.add(number)
        merged |= members
    return merged | older


def find_present(root: Root, episodes: Sequence[tuple[int, int]], *, has_lost: bool) -> list[tuple[int, int]]:
    """Return those of ``episodes`` whose rows are in the store and not lost to damage.

    An episode is (first id, number of steps). ``has_lost`` tells whether segments may have rows lost to damage.
    """
    numbers = {first >> layout.POSITION_BITS for first, _ in episodes}
    where: dict[int, tuple[SegmentInfo | None, PackTables | None]] = {}
    for pack in read_packs(root):
        where |= dict.fromkeys(numbers & {*pack[1].numbers.tolist()}, pack)
    for number in numbers - where.keys():
        if os.path.exists(root.segment_path(number)):
            where[number] = (read_segment(root, number) if has_lost else None), None
    left = []
    for first, steps in episodes:
        number, position = first >> layout.POSITION_BITS, first & layout.POSITION_MASK
        info, tables = where.get(number, (None, None))
        if info is not None and tables is not None:
            position = int(tables.rows_of(np.array([first]))[0])
        if number in where and not (info is not None and info.lost.holds(position, len(info.lanes))):
            left.append((first, steps))
    return left


# --- the packs that a process has read or made ------------------------------------------------------------------------


class KnownPack(NamedTuple):
    """The identity of a pack's zarr.json when it was read, and the numbers of the pack's segments."""

    document: Identity
    members: set[int]

    @classmethod
    def of(cls, info: SegmentInfo) -> "KnownPack":
        return cls(info.document, {*read_members(info)[:, 0].tolist()})


class KnownPacks:
    """The packs that this process has read or made, by number. Any thread may use this object.

    A pack is ignored if it was quarantined or replaced after this process read or made it.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._packs: dict[int, KnownPack] = {}

    def note(self, info: SegmentInfo) -> None:
        if info.packed is not None:
            self.add(info.number, KnownPack.of(info))

    def add(self, number: int, pack: KnownPack) -> None:
        self._packs[number] = pack

    @property
    def least_member(self) -> int:
        return min((min(pack.members) for pack in list(self._packs.values())), default=layout.MAX_SEGMENTS)

    def find_merged(self, end: int) -> list[tuple[int, int]]:
        """Return (its number, number of the known pack) for each segment or pack that was merged into a known pack.

        Packs with numbers from ``end`` on are ignored. Segments are left out if their folders are gone. Known packs
        that are gone or were replaced are forgotten.
        """
        known = list(self._packs)
        there = {*listed_numbers(self._root)} if known else set[int]()
        for number in known:
            if number not in there or not self.is_same(number):
                self._packs.pop(number, None)
        packs, merged = dict(self._packs), dict[int, int]()  # a copy: other threads add packs
        for number, pack in sorted(packs.items()):
            if number >= end:
                continue  # readers do not see this pack yet
            older = {n for n, other in packs.items() if n < number and other.members <= pack.members}
            merged |= dict.fromkeys((member for member in pack.members & there | older if member < number), number)
        return sorted(merged.items())

    def is_same(self, number: int) -> bool:
        known = self._packs.get(number)  # None if another thread found the pack gone
        return known is not None and identify(self._root.segment_path(number) / layout.METADATA) == known.document


# --- inner chunks that may be damaged ---------------------------------------------------------------------------------


def indexes_of(info: SegmentInfo) -> bytes:
    """Return the concatenated indexes of a pack's compressed arrays; empty if an index is damaged."""
    parts = [InnerChunks(info, leaf).own_index for leaf in sorted(info.compressed)]
    return b"".join(parts) if all(parts) else b""


class InnerChunks:
    """The inner chunks (see `shards`) of a compressed array of a pack; each is checked when it is read."""

    def __init__(self, info: SegmentInfo, leaf: str) -> None:
        self._info, self._leaf, self._how = info, leaf, info.compressed[leaf]
        self.rows = self._how.rows
        self.count = info.chunk_rows[leaf] // self.rows

    @computed_once
    def own_index(self) -> bytes:
        size = index_bytes(self._info.chunk_rows[self._leaf], self.rows)
        return _whole_index(self._read(self._how.nbytes - size, size))

    @computed_once
    def _index(self) -> Ints | None:
        """The offset and size in bytes of each inner chunk, ``(n, 2)``; None if the index and its copy are damaged.

        The size is 0 for an inner chunk of zeros, and -1 if offset or size are impossible.
        """
        data = self.own_index or self._copied_index()
        if not data:
            return None
        entries = np.frombuffer(data[:-CRC_BYTES], "<u8").reshape(-1, 2)
        most = most_frame_bytes(self.rows * self._info.arrays[self._leaf].row_bytes)
        is_possible = (entries < self._how.nbytes).all(axis=1) & (entries[:, 1] <= most)
        index: Ints = np.where(is_possible[:, None], entries, 0).astype(np.int64)
        index[~is_possible & (entries[:, 0] != NOTHING), 1] = -1
        return index

    def _copied_index(self) -> bytes:
        info, start = self._info, 0
        for leaf in sorted(info.compressed):
            size = index_bytes(info.chunk_rows[leaf], info.compressed[leaf].rows)
            if leaf == self._leaf:
                with suppress(OSError, FormatError), opened(f"{info.path}/{layout.INDEXES_COPY}", None) as fd:
                    return _whole_index(os.pread(fd, size, start))
            start += size
        return b""

    def _read(self, start: int, nbytes: int) -> bytes:
        with suppress(OSError, FormatError), opened(self._info.chunk_path(self._leaf, 0), None) as fd:
            return os.pread(fd, nbytes, max(0, start))
        return b""

    def frame(self, number: int) -> bytes | None:
        """Return a compressed inner chunk; empty if it is all zeros, None if it is damaged."""
        if self._index is None:
            return None
        offset, nbytes = self._index[number].tolist()
        if 0 <= nbytes <= CRC_BYTES:
            return b""
        data = self._read(offset, max(0, nbytes))
        frame, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        return frame if len(data) == nbytes and int(crc32c(frame)) == int.from_bytes(crc, "little") else None

    def lost_rows(self) -> list[tuple[int, int]]:
        lost = [number for number in range(self.count) if self.frame(number) is None]
        return layout.merge_ranges([(number * self.rows, (number + 1) * self.rows) for number in lost])


def _whole_index(data: bytes) -> bytes:
    entries, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    return data if entries and int(crc32c(entries)) == int.from_bytes(crc, "little") else b""
