"""Reads the rows of segments and packs. After a merge, the rows of a merged segment are read from the pack."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.folders import shown_paths
from diskreplay.ids import EPISODE_VALUES, POSITION_BITS, Floats, Ints, places_of
from diskreplay.segments.documents import layout
from diskreplay.segments.episode_table import read_columns
from diskreplay.segments.files.mapping import Mapping, read_into, refuse_links
from diskreplay.segments.packs import PackTables, find_pack, open_shard, read_tables
from diskreplay.segments.segment import DAMAGE, SegmentInfo
from diskreplay.segments.segment_reader import LaneFlags, read_sealed
from diskreplay.segments.shards import Shard
from diskreplay.workers import computed_once


class RewardSums(NamedTuple):
    """Three columns of the table of episodes of a sealed segment, with one entry per episode.

    ``keys`` has `_key` of the episode's lane and first row, in ascending order.
    """

    keys: Ints
    steps: NDArray[np.int32]
    sums: Floats

    @classmethod
    def read(cls, info: SegmentInfo) -> Self:
        """Read the columns from a sealed segment's table; they are empty if the table is damaged or gone."""
        try:
            position, steps, sums = read_columns(info, "position", "steps", "total_reward")
        except DAMAGE:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
        row, lane = np.divmod(position, len(info.lanes))
        return cls(_key(lane, row), steps, sums)

    def find(self, lane: Ints, row: Ints, steps: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """Return each episode's reward sum, and a mask that is False where the sum is unknown.

        An episode is given by its lane, its first row and its number of steps.
        """
        if not len(self.keys):
            return np.zeros(len(row)), np.zeros(len(row), np.bool_)
        keys = _key(lane, row)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        # The number of steps must match too: `repair --salvage` may add steps to the last episode of a lane.
        return self.sums[at], (self.keys[at] == keys) & (self.steps[at] == steps)


def _key(lane: Ints, row: Ints) -> Ints:
    return (lane << POSITION_BITS) + row


Flags = Callable[[int, int, int], Iterable[NDArray[np.uint8]]]
"""A function that takes a line (see `ValueRows`), a first row and a stop row, and yields these rows' flags in parts."""


class ValueRows:
    """Finds the values of a row in the arrays of episode fields; only rows with the flag `EPISODE_VALUES` have values.

    A *line* is a lane of a segment, or all rows of a pack. The flags of a line are read when they are first needed.

    Concurrency: any thread. While `find` reads flags, it holds the lock that its caller passes.
    """

    def __init__(self, info: SegmentInfo, pack: PackTables | None) -> None:
        lanes = len(info.lanes)
        self._least = 0 if pack is None else int((pack.first_rows + pack.rows)[-1])
        self._known: tuple[Ints, Ints] = np.zeros(lanes, np.int64), np.zeros(0, np.int64)
        # Values of lost rows stay in the arrays, but these rows do not have the flag `EPISODE_VALUES`.
        row, lane = np.divmod(np.array([position for position, _ in info.lost.ranges], np.int64), lanes)
        lost = _key(lane, row)
        order = np.argsort(lost)
        self._lost = lost[order]
        self._lost_values = np.append(0, np.cumsum(np.array(info.lost.values, np.int64)[order]))

    def find(self, flags: Flags, lock: AbstractContextManager[Any], line: Ints, row: Ints, stop: Ints) -> Ints:
        """Return, for each row, the index of its values among all values of its line.

        Row ``row[i]`` of line ``line[i]`` must have values. Flags that are not known yet are read by ``flags``, up to
        row ``stop[i]``.
        """
        rows, valued = self._known
        if (row >= rows[line]).any():
            rows, valued = self._extend(flags, lock, line, stop)
        begin = line << POSITION_BITS
        found = np.searchsorted(valued, begin | row) - np.searchsorted(valued, begin)
        if len(self._lost):
            upto, before = (self._lost_values[np.searchsorted(self._lost, at)] for at in (begin | row, begin))
            found += upto - before
        return found

    def _extend(self, flags: Flags, lock: AbstractContextManager[Any], line: Ints, stop: Ints) -> tuple[Ints, Ints]:
        """Read the flags of line ``line[i]`` up to row ``stop[i]``, or all flags of a pack.

        Return (number of rows read in each line, sorted keys of the rows with values); `_key` makes a key.
        """
        with lock:
            known, valued = self._known
            rows, more = known.copy(), [valued]
            np.maximum.at(rows, line, np.maximum(stop, self._least))
            for at in np.flatnonzero(rows > known).tolist():
                first = int(known[at])
                for part in flags(at, first, int(rows[at])):
                    more.append((np.flatnonzero(part & EPISODE_VALUES) + first) | at << POSITION_BITS)
                    first += len(part)
            self._known = rows, np.sort(np.concatenate(more))
            return self._known


_LINE = 1 << POSITION_BITS  # more rows than a lane can have

GONE = "the segment of these steps was evicted or set aside; draw again"

# The rows of a merged pack are copied from the later pack in parts of about this many bytes.
PART_BYTES = 16 << 20

LACKING = -1
"""`Folder.division` returns this as its first number if the folder does not have the array."""

T = TypeVar("T")


class Folder:
    """Reads the rows of one segment. Its subclass `Pack` reads the rows of many segments.

    Readers with an older snapshot can use this object even after a merge: it reads the segment's rows from the pack.
    """

    _tables: PackTables | None = None
    info: SegmentInfo
    _now: tuple[SegmentInfo, PackTables | None]  # where the rows were last found: the segment, or a pack

    def __init__(self, info: SegmentInfo) -> None:
        self.note(info)

    def note(self, info: SegmentInfo) -> None:
        """Use ``info`` from now on: the newly read attributes of the same segment."""
        self.info, self._now = info, (info, self._tables)

    def lanes_of(self, number: int) -> tuple[int, Ints]:
        """Return the number of the writer of segment ``number``, and the numbers of the segment's lanes."""
        return self.info.writer, np.array(self.info.lanes, np.int64)

    def division(self, leaf: str) -> tuple[int, int]:
        """Return (log2 of the number of rows in a chunk of an array, 1); see `LACKING`.

        The 1 is a lower bound of the array's number of chunks.
        """
        return self.info.chunk_rows.get(leaf, 0).bit_length() - 1, 1

    @computed_once
    def reward_sums(self) -> RewardSums:
        return RewardSums.read(self.info)

    @computed_once
    def value_rows(self) -> ValueRows:
        return ValueRows(self.info, self._tables)

    @shown_paths
    def open(
        self, leaf: str, chunk: int, first: int, rows: int, memory: NDArray[np.uint8] | None
    ) -> Mapping | NDArray[np.uint8]:
        """Read a chunk of an array into ``memory``, and return ``memory``; if ``memory`` is None, return a mapping.

        The file of a pack does not have the chunks of a merged segment. If this segment was merged, ``rows`` rows of
        each lane, from row ``first`` on, are copied from the pack into new memory.
        """
        at = 0 if self._tables is not None else chunk

        def read(info: SegmentInfo, tables: PackTables | None) -> Mapping | NDArray[np.uint8]:
            if tables is not None and info is not self.info:
                lines = range(len(self.info.lanes))
                return self._copied(leaf, [(line * _LINE + first, rows) for line in lines], info, tables)
            refuse_links(info.path, above(leaf))
            if memory is None:
                return info.map_chunk(leaf, at)
            read_into(info.chunk_path(leaf, at), info.chunk_nbytes(leaf), memory)
            return memory

        return self._read(leaf, at, read)

    def _read(self, leaf: str, chunk: int, read: Callable[[SegmentInfo, Any], T]) -> T:
        """Return ``read(info, tables)`` for this segment, or for the pack that has its rows after a merge.

        ``tables`` is None for a segment. Raises FormatError if a file of an existing folder is missing, SegmentGone if
        the segment is gone and no pack has its rows.
        """
        while True:
            info, tables = self._now
            try:
                return read(info, tables)
            except FileNotFoundError:
                if info.path.exists():
                    path = info.chunk_path(leaf, chunk if info is self.info else 0)
                    raise FormatError(f"{path} is missing; the store is damaged, restore this file") from None
                number = self.info.number
                found = find_pack(info.root, number if self._tables is None else int(self._tables.numbers[0]))
                if found is None:
                    raise SegmentGone(f"segment {number} was evicted or set aside; refresh and draw again") from None
                self._now = found

    def _copied(
        self, leaf: str, ranges: Sequence[tuple[int, int]], info: SegmentInfo, tables: PackTables
    ) -> NDArray[np.uint8]:
        """Copy ranges of this segment's rows from the pack ``info``, and return the bytes of all ranges, concatenated.

        A range is (first row, number of rows); row r of lane i is given as ``i * _LINE + r``. Rows that the pack does
        not have are zeros. Raises FileNotFoundError if the pack is gone.
        """
        now, row_bytes, total = tables.of(leaf), self.info.arrays[leaf].row_bytes, sum(count for _, count in ranges)
        before = now.member_tables(self.info.number, _LINE) if self._tables is None else self._tables.of(leaf)
        try:
            copied = _zeros(total * row_bytes)
        except MemoryError:
            raise MemoryError(f"no memory for {leaf} of {self.info.path}") from None
        rows, at = copied.reshape(total, row_bytes), 0
        if leaf in info.chunk_rows:  # a pack may lack the array of priorities
            read = _row_reader(info, leaf)
            for first, count in ranges:
                parts = np.array(before.split(first, count), np.int64).reshape(-1, 2)
                found = now.rows_of(before.ids_of(parts[:, 0]))
                for (row, some), place in zip(parts.tolist(), found.tolist(), strict=True):
                    read(place, rows[at + row - first : at + row - first + some])
                at += count
        if leaf == layout.TIME:
            rows.view("<i8")[:] += info.clock.wall - self.info.clock.wall
        return copied


class Pack(Folder):
    """Reads the rows of a pack. Making this object reads the pack's tables, and raises the errors of `read_tables`.

    ``numbers`` are the numbers of the segments in the pack, in ascending order. ``lanes`` has the number of lanes of
    each segment, and ``first_rows`` the row of the pack at which each lane begins.
    """

    _tables: PackTables

    def __init__(self, info: SegmentInfo) -> None:
        self._tables = read_tables(info)
        super().__init__(info)
        self.numbers, self.lanes, self.first_rows = self._tables.numbers, self._tables.lanes, self._tables.first_rows
        self._shards: dict[str, Shard] = {}

    def lost_ids(self) -> Ints:
        """Return the first id of each range of lost rows. Unused rows between lanes have no ids, and are left out."""
        positions = [position for position, _ in self.info.lost.ranges if self._tables.holds(position)]
        return self._tables.ids_of(np.array(positions, np.int64))

    def lanes_of(self, number: int) -> tuple[int, Ints]:
        member = int(self._tables.places(np.array([number]))[0])
        return int(self._tables.writers[member]), self._tables.runs[self._tables.runs_of(member), 2]

    def rows_of(self, member: int) -> Ints:
        return self._tables.rows[self._tables.runs_of(member)]

    def division(self, leaf: str) -> tuple[int, int]:
        """Return (log2 of the number of rows in a part of an array, the array's number of parts); see `LACKING`.

        The parts of a compressed array are its inner chunks. The parts of an uncompressed array have about `PART_BYTES`
        bytes.
        """
        rows, compressed = self.info.chunk_rows.get(leaf), self.info.compressed.get(leaf)
        if rows is None:
            return LACKING, 1
        part = max(1, PART_BYTES // self.info.arrays[leaf].row_bytes) if compressed is None else compressed.rows
        bits = part.bit_length() - 1
        return bits, -(-rows >> bits)

    def compressed_bytes(self, leaf: str) -> int | None:
        compressed = self.info.compressed.get(leaf)
        return None if compressed is None else compressed.nbytes

    def read_flags(self, members: Ints) -> tuple[Ints, LaneFlags]:
        """Return the number of rows of each lane of the segments ``numbers[members]``, and the flags of these rows.

        Errors as for `read_sealed`.
        """
        tables = self._tables
        (rows,), (flags, *_) = read_sealed(self.info)
        if rows != int((tables.first_rows + tables.rows).max()):
            raise FormatError(f"{self.info.path}: committed is damaged; restore it")
        which = np.zeros(len(tables.lanes), np.bool_)
        which[members] = True
        runs = np.repeat(which, tables.lanes)
        count, first = tables.rows[runs], tables.first_rows[runs]
        if int(count.sum()) != rows:
            flags = flags[places_of(first, count)]
        return count, LaneFlags(flags, count)

    @shown_paths
    def open_compressed(self, leaf: str, inner: Ints) -> tuple[Shard, Ints] | NDArray[np.uint8]:
        """Return an open compressed array and the numbers of the inner chunks to read, or the rows of these chunks.

        ``inner`` has the numbers of inner chunks (see `shards`) of this pack. After this pack was merged into a later
        pack, the array and the numbers are those of the later pack. If the later pack has inner chunks of another size,
        the decompressed rows are returned.
        """
        rows = self.info.compressed[leaf].rows

        def read(info: SegmentInfo, tables: PackTables) -> tuple[Shard, Ints] | NDArray[np.uint8]:
            if info is self.info:
                if leaf not in self._shards:
                    self._shards[leaf] = open_shard(info, leaf)
                return self._shards[leaf], inner
            if leaf not in info.compressed or info.compressed[leaf].rows != rows:
                return self._copied(leaf, [(number * rows, rows) for number in inner.tolist()], info, tables)
            return open_shard(info, leaf), tables.rows_of(self._tables.ids_of(inner * rows)) // rows

        return self._read(leaf, 0, read)


def lost_ids(info: SegmentInfo) -> Ints:
    positions = np.array([position for position, _ in info.lost.ranges], np.int64)
    return positions | info.number << POSITION_BITS


def take_packs(infos: list[SegmentInfo | None], start: int, leave_out: Callable[[int, Exception], None]) -> list[Pack]:
    """Replace packs, and the segments that are in packs, by None in ``infos``; return the packs.

    ``infos[i]`` is the segment with the number ``start + i``. Packs are returned in ascending order of their numbers,
    without packs that were merged into another pack. For a damaged pack, ``leave_out`` is called with its number and
    the error.
    """
    found, taken = list[Pack](), set[int]()
    for at in range(len(infos) - 1, -1, -1):
        info = infos[at]
        if info is None or info.packed is None:
            continue
        infos[at] = None
        if at + start in taken:
            continue
        try:
            pack = Pack(info)
        except DAMAGE as error:
            leave_out(at + start, error)
            continue
        numbers = pack.numbers.tolist()
        if taken.isdisjoint(numbers):  # False for a pack that was merged into another pack
            found.append(pack)
            taken.update(numbers)
    for number in taken:
        if number >= start:
            infos[number - start] = None
    return found[::-1]


def _zeros(nbytes: int) -> NDArray[np.uint8]:
    zeros = np.empty(nbytes, np.uint8)  # np.zeros would allocate pages later, and this could fail
    zeros[:] = 0
    return zeros


def _row_reader(info: SegmentInfo, leaf: str) -> Callable[[int, NDArray[np.uint8]], None]:
    """Return a function that reads rows of a pack: it takes a first row, and an array ``(rows, row_bytes)``.

    The array must be zeros, because the function skips inner chunks of zeros. Raises FileNotFoundError if the pack is
    gone.
    """
    row_bytes = info.arrays[leaf].row_bytes
    refuse_links(info.path, above(leaf))
    if leaf not in info.compressed:
        packed = info.map_chunk(leaf, 0).array(np.uint8, (info.chunk_rows[leaf], row_bytes))
        return lambda first, out: np.copyto(out, packed[first : first + len(out)])
    shard = open_shard(info, leaf)

    def decompress(first: int, out: NDArray[np.uint8]) -> None:
        for row, data in shard.rows(first, first + len(out), row_bytes):
            rows = data.reshape(-1, row_bytes)
            out[row - first : row - first + len(rows)] = rows

    return decompress


def above(leaf: str) -> list[str]:
    """Return the paths of the groups that contain an array, outermost first, and the path of the array."""
    parts = leaf.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
