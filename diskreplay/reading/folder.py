"""What a reader knows of a folder of rows, and where it finds these after they were merged into a pack."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError, SegmentGone
from diskreplay.folders import shown_paths
from diskreplay.ids import EPISODE_VALUES, POSITION_BITS, Floats, Ints
from diskreplay.reading.chunk_budget import Piece, lone_piece
from diskreplay.segments.documents import layout
from diskreplay.segments.episode_table import read_columns
from diskreplay.segments.files.mapping import Mapping, read_into, refuse_links
from diskreplay.segments.packs import PackTables, find_pack, open_shard
from diskreplay.segments.segment import DAMAGE, SegmentInfo
from diskreplay.segments.shards import Shard


class RewardSums(NamedTuple):
    """Columns of the table of episodes of a folder: ``keys`` of lane and row of the first steps, steps, and sums."""

    keys: Ints
    steps: NDArray[np.int32]
    sums: Floats

    @classmethod
    def read(cls, info: SegmentInfo) -> Self:
        """Read the table of a sealed segment; nothing where that is damaged or gone: the rows say the same."""
        try:
            position, steps, sums = read_columns(info, "position", "steps", "total_reward")
        except DAMAGE:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0))
        row, lane = np.divmod(position, len(info.lanes))
        return cls(_key(lane, row), steps, sums)

    def find(self, lane: Ints, row: Ints, steps: Ints) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the sums of the rewards of episodes, and which are known; the others are arbitrary."""
        if not len(self.keys):
            return np.zeros(len(row)), np.zeros(len(row), np.bool_)
        keys = _key(lane, row)
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        # `repair --salvage` may add steps to the last episode of a lane.
        return self.sums[at], (self.keys[at] == keys) & (self.steps[at] == steps)


def _key(lane: Ints, row: Ints) -> Ints:
    return (lane << POSITION_BITS) + row


Flags = Callable[[int, int, int], Iterable[NDArray[np.uint8]]]
"""Returns the flags of a line of a folder from one row to before another, in parts."""


class ValueRows:
    """The rows with `EPISODE_VALUES` of each line of a folder, as far as they are known.

    Concurrency: any thread. What is known is replaced, under the lock that `find` is given.
    """

    def __init__(self, info: SegmentInfo, pack: PackTables | None) -> None:
        lanes = len(info.lanes)
        self._least = 0 if pack is None else int((pack.first_rows + pack.rows)[-1])
        self._known: tuple[Ints, Ints] = np.zeros(lanes, np.int64), np.zeros(0, np.int64)
        # The values of lost rows have their places, and no flags.
        row, lane = np.divmod(np.array([position for position, _ in info.lost.ranges], np.int64), lanes)
        lost = _key(lane, row)
        order = np.argsort(lost)
        self._lost = lost[order]
        self._lost_values = np.append(0, np.cumsum(np.array(info.lost.values, np.int64)[order]))

    def find(self, flags: Flags, lock: AbstractContextManager[Any], line: Ints, row: Ints, stop: Ints) -> Ints:
        """Return the place of the values of some rows, each of which has them, in the arrays of episode fields.

        What is not known yet of a line is read from its ``flags`` up to the row ``stop``.
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
        """Read the flags of lines up to these rows; of a pack, all."""
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


# More rows than a lane can have.
_LINE = 1 << POSITION_BITS

GONE = "the segment of these steps was evicted or set aside; draw again"

T = TypeVar("T")


class Folder:
    """A folder of rows: that of a segment, or of a pack with its ``tables``.

    Whoever still has a snapshot from before it was merged into a pack reads on: the rows come from there.

    Concurrency: any thread.
    """

    info: SegmentInfo
    _now: tuple[SegmentInfo, PackTables | None]  # of the one that has its rows, as far as that is known

    def __init__(self, info: SegmentInfo, tables: PackTables | None = None) -> None:
        self.tables = tables
        self.note(info)

    def note(self, info: SegmentInfo) -> None:
        """Take in its attributes, which may have been written anew."""
        self.info, self._now = info, (info, self.tables)

    @cached_property
    def reward_sums(self) -> RewardSums:
        """What a sealed one keeps of the sums of rewards."""
        return RewardSums.read(self.info)

    @cached_property
    def value_rows(self) -> ValueRows:
        """Where it has the values of its rows."""
        return ValueRows(self.info, self.tables)

    @shown_paths()
    def open(self, leaf: str, chunk: int, first: int, rows: int, piece: Piece | None) -> Mapping | Piece:
        """Read a chunk into memory, or map its file where there is none; that of a pack has all chunks.

        Where it was merged into a pack, the chunk is copied from there: so many rows of each line, from one on.
        """
        at = 0 if self.tables is not None else chunk

        def read(info: SegmentInfo, tables: PackTables | None) -> Mapping | Piece:
            if tables is not None and info is not self.info:
                lines = range(len(self.info.lanes))
                return self._copied(leaf, [(line * _LINE + first, rows) for line in lines], info, tables)
            refuse_links(info.path, above(leaf))
            if piece is None:
                return info.map_chunk(leaf, at)
            read_into(info.chunk_path(leaf, at), info.chunk_nbytes(leaf), np.asarray(piece))
            return piece

        return self._read(leaf, at, read)

    def _read(self, leaf: str, chunk: int, read: Callable[[SegmentInfo, Any], T]) -> T:
        """Return what is read where the rows are now: in its own files, or in a pack that it was merged into.

        Raises FormatError where one that has not left as a whole lacks a file, SegmentGone where no pack has the rows.
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
                found = find_pack(info.root, number if self.tables is None else int(self.tables.numbers[0]))
                if found is None:
                    raise SegmentGone(f"segment {number} was evicted or set aside; refresh and draw again") from None
                self._now = found

    def _copied(self, leaf: str, ranges: Sequence[tuple[int, int]], info: SegmentInfo, tables: PackTables) -> Piece:
        """Return ranges of its rows, one behind the other, from a pack: first rows, and numbers of rows.

        Those of line i of a segment begin at row i * `_LINE`. Raises FileNotFoundError where the pack is gone.
        """
        now, row_bytes, total = tables.of(leaf), self.info.arrays[leaf].row_bytes, sum(count for _, count in ranges)
        before = now.alone(self.info.number, _LINE) if self.tables is None else self.tables.of(leaf)
        piece = lone_piece(total * row_bytes)
        if piece is None:
            raise MemoryError(f"no memory for {leaf} of {self.info.path}")
        rows, at = np.asarray(piece).reshape(total, row_bytes), 0
        rows[:] = 0
        if leaf in info.chunk_rows:  # else no step has a priority
            read = _row_reader(info, leaf)
            for first, count in ranges:
                parts = np.array(before.split(first, count), np.int64).reshape(-1, 2)  # without rows between lanes
                found = now.rows_of(before.ids_of(parts[:, 0]))
                for (row, some), place in zip(parts.tolist(), found.tolist(), strict=True):
                    read(place, rows[at + row - first : at + row - first + some])
                at += count
        if leaf == layout.TIME:
            rows.view("<i8")[:] += info.clock.wall - self.info.clock.wall
        return piece


class Pack(Folder):
    """The folder of a pack."""

    tables: PackTables

    def __init__(self, info: SegmentInfo, tables: PackTables) -> None:
        super().__init__(info, tables)
        self._shards: dict[str, Shard] = {}

    @shown_paths()
    def open_shard(self, leaf: str, inner: Ints) -> tuple[Shard, Ints] | Piece:
        """Open a compressed array, or that of a pack that this one was merged into; return also which inner chunks.

        Or these themselves, where they are not in the other as they were.
        """
        rows = self.info.compressed[leaf].rows

        def read(info: SegmentInfo, tables: PackTables) -> tuple[Shard, Ints] | Piece:
            if info is self.info:
                if leaf not in self._shards:
                    self._shards[leaf] = open_shard(info, leaf)
                return self._shards[leaf], inner
            if leaf not in info.compressed or info.compressed[leaf].rows != rows:
                return self._copied(leaf, [(number * rows, rows) for number in inner.tolist()], info, tables)
            return open_shard(info, leaf), tables.rows_of(self.tables.ids_of(inner * rows)) // rows

        return self._read(leaf, 0, read)


def _row_reader(info: SegmentInfo, leaf: str) -> Callable[[int, NDArray[np.uint8]], None]:
    """Return what reads rows of an array of a pack, from one on, into memory of zeros, ``(rows, row_bytes)``.

    Raises FileNotFoundError where the pack is gone.
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
    """Return the paths of an array and of the groups that it is in, outermost first."""
    parts = leaf.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
