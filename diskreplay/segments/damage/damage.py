"""The damage of a sealed segment: bad parts of its chunk files, and the rows and episodes that are lost with them.

Chunk files are checked in blocks. If a block does not match its checksum, all rows with bytes in it are damaged, and
the episodes of these rows are lost. A compressed array has a checksum for each inner chunk (zarr's part of a shard)
instead of for each block. A step with a damaged initial priority is not lost: the priority becomes 0, which means "not
given".

Damaged flags hide where episodes begin. A *start* is a row that is known to begin an episode. If the flag of a row is
damaged, a range of rows is lost. The range begins at the last start at or before the row. The range ends before the
next start after the row, or at the end of the lane.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import NO_STEP
from diskreplay.segments.blocks import Chunk, combine, known_sums, read_sums, sealed_chunks
from diskreplay.segments.documents import layout
from diskreplay.segments.files.mapping import opened
from diskreplay.segments.packs import InnerChunks, PackTables, read_tables
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.segment_reader import extent_of, sealed_extent

Range = tuple[int, int]
RangesByLane = dict[int, list[Range]]

_PIECE = 1 << 20
_ENDED = layout.TERMINATED | layout.TRUNCATED


@dataclass
class Damage:
    """The damage of a segment. A range of bytes, rows or values is (first, stop), and ends before ``stop``.

    ``parts`` maps the name of each damaged chunk file to its damaged ranges of bytes. ``lost`` maps each lane to its
    lost ranges of rows, including rows that the segment already records as lost; ``more`` has only the newly lost rows.
    ``lost_values`` maps each lane to ranges of episode values, one range for each range in ``lost``. ``flags`` maps
    (lane, row) to the new flag of this row; the flags of all other lost rows become 0.

    ``steps_kept`` and ``steps_lost`` add up to all steps that the segment ever had. Steps evicted by hand count as
    kept. ``episodes`` is the number of newly lost episodes, or a lower bound of this number if flags are damaged.
    ``flags_damaged`` tells whether any flags are damaged, and ``resized`` whether a chunk file is too long.
    """

    parts: dict[str, list[Range]]
    lost: dict[int, list[Range]] = field(default_factory=dict)
    more: dict[int, list[Range]] = field(default_factory=dict)
    lost_values: dict[int, list[Range]] = field(default_factory=dict)
    flags: dict[tuple[int, int], int] = field(default_factory=dict)
    steps_kept: int = 0
    steps_lost: int = 0
    episodes: int = 0
    flags_damaged: bool = False
    resized: bool = False


def find_damage(
    info: SegmentInfo,
    rows: NDArray[np.int64],
    evicted: Sequence[tuple[int, int]],
    marked: NDArray[np.int64] | None = None,
) -> Damage:
    """Return the damage of a sealed segment, without changing any file.

    ``rows`` has the number of rows of each lane. ``evicted`` has (position of the first step, number of steps) for each
    episode that was evicted by hand. A position is ``row * lanes + lane``; in a pack, which has one lane, it is a row.

    ``marked`` is given only for a copied segment that may lack some rows. Marks prove the first ``marked[lane]`` rows
    of each lane, so these rows are intact, even inside a bad block. A later row is lost even if only its priority
    is damaged, because the row may not have been copied.

    Raises FormatError if a needed chunk has no checksum, or the tables of a pack are damaged.
    """
    return _Search(info, rows, marked).find(evicted)


class _Search:
    def __init__(self, info: SegmentInfo, rows: NDArray[np.int64], marked: NDArray[np.int64] | None) -> None:
        self._info, self._rows, self._extent = info, rows.tolist(), sealed_extent(info, rows)
        self._must_prove = marked is not None
        self._marked = None if marked is None else extent_of(info, marked)
        self._known = known_sums(info)
        self._chunks = list(sealed_chunks(info))
        there = {(chunk.array.path, chunk.number) for chunk in self._chunks}
        for leaf in info.arrays:
            for number in range(-(-int(self._extent.of(leaf).max()) // info.chunk_rows[leaf])):
                if (leaf, number) not in there:
                    raise FormatError(f"{info.path}: chunk {number} of {leaf} has no checksum")
        self._per_chunk = info.chunk_rows[layout.DONE]
        self._resized = False
        self._tables: PackTables | None = None if info.packed is None else read_tables(info)

    def find(self, evicted: Sequence[tuple[int, int]]) -> Damage:
        lanes = len(self._info.lanes)
        damage = Damage({chunk.name: parts for chunk in self._chunks if (parts := self._parts(chunk))})
        damaged, unknown, damaged_values = self._damaged_rows(damage)
        damage.flags_damaged, damage.resized = bool(unknown), self._resized
        lost_before, left_out = _by_lane(self._info.lost.ranges, lanes), _by_lane(evicted, lanes)
        kept = 0
        for lane, count in enumerate(self._rows):
            before = lost_before.get(lane, [])
            holes = layout.merge_ranges(unknown.get(lane, []))
            values = self._values_of(lane, holes) if self._info.has_values else None
            if values is not None:
                rows = values.damaged_rows(damaged_values.get(lane, []))
                damaged[lane] = [*damaged.get(lane, []), *rows]
            if not damaged.get(lane):
                kept += self._count(lane, count, before)
                if before:
                    self._note(damage, lane, before, before, values)
                continue
            starts = self._starts(lane, count, holes)
            edges = [0, *(edge for range_ in before for edge in range_), *self._proven(lane, holes)]
            if self._tables is not None:  # in a pack, an episode begins at the first row of each lane
                edges += self._tables.first_rows.tolist()
            known = np.union1d(starts, np.array(edges, np.int64))
            lost = layout.merge_ranges([*before, *(_episodes_of(range_, known, count) for range_ in damaged[lane])])
            if self._tables is not None:
                lost = [part for range_ in lost for part in self._split(self._tables, *range_)]
            rewritten: list[Range] = []
            for episode in [*left_out.get(lane, []), *self._discarded(lane, count, starts, holes)]:
                lost, again = self._spare(damage, lane, lost, episode, holes)
                rewritten += again
            self._note(damage, lane, lost, before, values, rewritten)
            more = damage.more.get(lane, [])
            damage.episodes += sum(int(np.count_nonzero((starts >= a) & (starts < b))) for a, b in more)
            without = layout.merge_ranges([*lost, *rewritten])
            kept += self._count(lane, count, without) + sum(b - a for a, b in rewritten)
        damage.steps_kept, damage.steps_lost = kept, (self._info.steps or 0) - kept
        return damage

    def _damaged_rows(self, damage: Damage) -> tuple[RangesByLane, RangesByLane, RangesByLane]:
        """Return three dicts of ranges by lane: damaged rows, rows with damaged flags, and damaged episode values."""
        damaged: RangesByLane = {}
        unknown: RangesByLane = {}
        damaged_values: RangesByLane = {}
        for chunk in self._chunks:
            if chunk.array.path == layout.PRIORITY and not self._must_prove:
                continue
            for lane, range_ in self._rows_in(chunk, damage.parts.get(chunk.name, [])):
                (damaged_values if chunk.array.is_of_episodes else damaged).setdefault(lane, []).append(range_)
                if chunk.array.path == layout.DONE:
                    unknown.setdefault(lane, []).append(range_)
        return damaged, unknown, damaged_values

    def _note(
        self,
        damage: Damage,
        lane: int,
        lost: list[Range],
        before: list[Range],
        values: "_Values | None",
        rewritten: Sequence[Range] = (),
    ) -> None:
        damage.lost[lane], damage.more[lane] = lost, layout.subtract_ranges(lost, before)
        if values is not None:
            damage.lost_values[lane], shown = values.places(lost, rewritten)
            damage.flags |= {(lane, stop - 1): damage.flags[lane, stop - 1] | layout.EPISODE_VALUES for stop in shown}
        else:
            damage.lost_values[lane] = [(0, 0)] * len(lost)
        for first, stop in lost:
            damage.flags |= {(lane, first): layout.FIRST}
            damage.flags[lane, stop - 1] = damage.flags.get((lane, stop - 1), 0) | layout.TRUNCATED

    def _split(self, tables: PackTables, first: int, stop: int) -> Iterator[Range]:
        edges = np.union1d(tables.first_rows, tables.first_rows + tables.rows)
        inside = edges[(edges > first) & (edges < stop)].tolist()
        yield from pairwise([first, *inside, stop])

    # --- files -------------------------------------------------------------------------------------------------------

    def _parts(self, chunk: Chunk) -> list[Range]:
        parts = self._bad_blocks(chunk)
        return layout.subtract_ranges(parts, list(self._marked_bytes(chunk))) if parts else parts

    def _marked_bytes(self, chunk: Chunk) -> Iterator[Range]:
        row_bytes, per_chunk = chunk.array.row_bytes, self._info.chunk_rows[chunk.array.path]
        for lane, rows in enumerate(() if self._marked is None else self._marked.of(chunk.array.path).tolist()):
            if (count := min(rows - chunk.number * per_chunk, per_chunk)) > 0:
                at = lane * per_chunk * row_bytes
                yield at, at + count * row_bytes

    def _bad_blocks(self, chunk: Chunk) -> list[Range]:
        block, known = chunk.block, self._known.get(chunk.name)
        found = self._found(chunk, block)
        if known is None:
            is_whole = bool((found >= 0).all()) and (
                combine(found.astype(np.uint32), chunk.nbytes, block) == self._info.checksums[chunk.name]
            )
            return [] if is_whole else [(0, chunk.nbytes)]
        bad = np.flatnonzero(found != known).tolist()
        return layout.merge_ranges([(i * block, min((i + 1) * block, chunk.nbytes)) for i in bad])

    def _found(self, chunk: Chunk, block: int) -> NDArray[np.int64]:
        """Compute the checksum of each block of a chunk file from its bytes; -1 for a block that cannot be read."""
        found = np.full(-(-chunk.nbytes // block), -1, np.int64)
        try:
            opening = opened(f"{self._info.path}/{chunk.name}", None)
        except (OSError, FormatError):
            return found
        with opening as fd:
            size = os.fstat(fd).st_size
            self._resized |= size > chunk.nbytes
            whole = chunk.nbytes if size >= chunk.nbytes else size - size % block
            try:
                sums, _ = read_sums(fd, whole, block)
                found[: len(sums)] = sums
            except (OSError, FormatError):
                for at in range(0, whole, block):
                    found[at // block] = _sum_at(fd, at, min(block, whole - at))
        return found

    def _rows_in(self, chunk: Chunk, parts: list[Range]) -> Iterator[tuple[int, Range]]:
        """Yield (lane, range of rows) for the damaged ranges of bytes ``parts`` of a chunk file.

        A row of an episode field's array is one episode's value.
        """
        if parts and chunk.array.path in self._info.compressed:
            for first, stop in InnerChunks(self._info, chunk.array.path).lost_rows():
                if first < self._rows[0]:
                    yield 0, (first, min(stop, self._rows[0]))
            return
        row_bytes, per_chunk = chunk.array.row_bytes, self._info.chunk_rows[chunk.array.path]
        above, rows = chunk.number * per_chunk, self._extent.of(chunk.array.path).tolist()
        for start, stop in parts:
            for lane, inside, count in layout.split_range(start // row_bytes, -(-stop // row_bytes), per_chunk):
                low, high = above + inside, min(above + inside + count, rows[lane])
                if low < high:
                    yield lane, (low, high)

    # --- flags -------------------------------------------------------------------------------------------------------

    def _pieces(self, lane: int, count: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield (first row, flags) for successive parts of a lane's first ``count`` rows; unreadable flags are 0."""
        for chunk, inside, width in layout.split_range(0, count, self._per_chunk, _PIECE):
            data = self._read(chunk, lane * self._per_chunk + inside, width)
            yield chunk * self._per_chunk + inside, np.frombuffer(data.ljust(width, b"\0"), np.uint8)

    def _read(self, chunk: int, at: int, nbytes: int) -> bytes:
        try:
            with opened(f"{self._info.path}/{layout.DONE}/{layout.chunk_key(chunk, 0)}", None) as fd:
                return os.pread(fd, nbytes, at)
        except (OSError, FormatError):
            return b""

    def _flag(self, lane: int, row: int) -> int:
        data = self._read(row // self._per_chunk, lane * self._per_chunk + row % self._per_chunk, 1)
        return data[0] if data else 0

    def _starts(self, lane: int, count: int, unknown: list[Range]) -> NDArray[np.int64]:
        """Return the rows that begin an episode, except rows in the ranges ``unknown`` of damaged flags."""
        parts = [np.flatnonzero(flags & layout.FIRST) + row for row, flags in self._pieces(lane, count)]
        starts = np.concatenate([np.zeros(0, np.int64), *parts])
        for first, stop in unknown:
            starts = starts[(starts < first) | (starts >= stop)]
        return starts

    def _discarded(self, lane: int, count: int, starts: NDArray[np.int64], unknown: list[Range]) -> Iterator[Range]:
        """Yield (first, stop) of each discarded episode in a lane: the row ``stop`` has the discard flag.

        Episodes with rows in the ranges ``unknown`` of damaged flags are left out. Readers hide a discarded episode
        only because of its discard flag, so this flag must stay.
        """
        for row, flags in self._pieces(lane, count):
            for stop in (np.flatnonzero(flags & layout.DISCARD == layout.DISCARD) + row).tolist():
                first = int(starts[np.searchsorted(starts, stop, "right") - 1]) if len(starts) else stop
                if first <= stop and not any(a <= stop and first < b for a, b in unknown):
                    yield first, stop

    def _values_of(self, lane: int, holes: list[Range]) -> "_Values":
        parts = [
            np.flatnonzero(flags & layout.EPISODE_VALUES) + row for row, flags in self._pieces(lane, self._rows[lane])
        ]
        rows = np.concatenate([np.zeros(0, np.int64), *parts])
        for first, stop in holes:
            rows = rows[(rows < first) | (rows >= stop)]
        lanes = len(self._info.lanes)
        gone = [
            (position // lanes, count) for position, _, count in self._info.lost.entries if position % lanes == lane
        ]
        return _Values(rows, gone, int(self._extent.values[lane]), holes)

    def _count(self, lane: int, count: int, without: list[Range]) -> int:
        steps = 0
        for row, flags in self._pieces(lane, count):
            is_step = flags & NO_STEP == 0
            for first, stop in without:
                is_step[max(first - row, 0) : max(stop - row, 0)] = False
            steps += int(np.count_nonzero(is_step))
        return steps

    def _proven(self, lane: int, unknown: list[Range]) -> Iterator[int]:
        """Yield the first row of each range ``unknown`` of damaged flags, if this row surely begins an episode."""
        for first, _ in unknown:
            if first == 0:
                continue
            before = self._flag(lane, first - 1)
            # The previous episode is complete if its last row has no step, or has an end flag and values. No final
            # observation follows a row with values.
            is_whole = bool(before & NO_STEP or (before & _ENDED and before & layout.EPISODE_VALUES))
            if is_whole or (self._likely(lane, first) or 0) & layout.FIRST:
                yield first

    def _likely(self, lane: int, row: int) -> int | None:
        """Return the original flag of a row in a damaged block, if only one byte of the block was changed; else None.

        The result only decides whether an intact episode ends with the previous row. Readers never get the result.
        """
        chunk, at = row // self._per_chunk, lane * self._per_chunk + row % self._per_chunk
        block, nbytes = layout.BLOCK_ROWS, len(self._info.lanes) * self._per_chunk
        known = self._known.get(f"{layout.DONE}/{layout.chunk_key(chunk, 0)}")
        start = at - at % block
        data = self._read(chunk, start, min(block, nbytes - start))
        if known is None or len(data) != min(block, nbytes - start):
            return None
        found = single_error(data, int(known[start // block]))
        if found is None:
            return None
        return found[1] if found[0] == at - start else data[at - start]

    def _spare(
        self, damage: Damage, lane: int, lost: list[Range], episode: Range, unknown: list[Range]
    ) -> tuple[list[Range], list[Range]]:
        """Take an evicted or discarded episode out of the lost rows, because readers hide its rows in any case.

        Return two lists: the remaining ranges of lost rows, and the ranges of rows whose flags are replaced. The second
        list has the episode's range if some flags of the episode are damaged, and is empty if all are intact.
        ``unknown`` has the ranges of rows with damaged flags.
        """
        first, stop = episode
        if not any(a <= first and stop <= b for a, b in lost):
            return lost, []
        if any(a < stop and first < b for a, b in unknown):
            damage.flags[lane, first] = layout.FIRST
            damage.flags[lane, stop - 1] = damage.flags.get((lane, stop - 1), 0) | layout.TRUNCATED
            return layout.subtract_ranges(lost, [episode]), [episode]
        known = any(a <= stop < b for a, b in lost) and not any(a <= stop < b for a, b in unknown)
        if known and self._flag(lane, stop) & NO_STEP:
            stop += 1
        return layout.subtract_ranges(lost, [(first, stop)]), []


class _Values:
    """Knows which rows of a lane have episode values, and where each row's values are among the lane's values.

    ``rows`` has the rows that have values and intact flags. ``gone`` has (first row, number of values) of each range of
    rows that was lost to earlier damage. ``holes`` has the ranges of rows with damaged flags. The lane has ``total``
    values. Values that belong neither to ``rows`` nor to ``gone`` belong to rows in ``holes``. With several ranges in
    ``holes``, it is unknown to which rows the values between the first and the last range belong.
    """

    def __init__(self, rows: NDArray[np.int64], gone: Sequence[Range], total: int, holes: Sequence[Range]) -> None:
        self._rows, self._gone, self._holes = rows, gone, holes
        self._unknown = max(0, total - len(rows) - sum(count for _, count in gone)) if holes else 0

    def damaged_rows(self, places: Sequence[Range]) -> list[Range]:
        """Return the range (row, row + 1) of each row that has intact flags, but damaged or unknown values.

        ``places`` has the ranges of damaged values.
        """
        found = self._places(self._rows)
        bad = np.zeros(len(found), np.bool_)
        for first, stop in places:
            bad |= (found >= first) & (found < stop)
        if self._unknown and len(self._holes) > 1:
            bad |= (self._rows >= self._holes[0][0]) & (self._rows < self._holes[-1][1])
        return [(row, row + 1) for row in self._rows[bad].tolist()]

    def _places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each of ``rows``, the number of episode values that the lane's earlier rows have."""
        found = np.searchsorted(self._rows, rows)
        for first, count in self._gone:
            found[rows > first] += count
        if self._unknown:
            found[rows >= self._holes[0][1]] += self._unknown
        return found

    def places(self, lost: Sequence[Range], rewritten: Sequence[Range]) -> tuple[list[Range], list[int]]:
        """Return the values' range of each range in ``lost``, and the stop of each range in ``rewritten`` with values.

        ``rewritten`` has the ranges of rows with replaced flags: rows of evicted and discarded episodes. Values whose
        rows are unknown are counted in the first lost range with damaged flags, or in rewritten episodes if there is no
        such range. A rewritten episode keeps its flag `EPISODE_VALUES` if this flag is intact.
        """
        known = [self._rows[(self._rows >= first) & (self._rows < stop)] for first, stop in lost]
        counts = [
            len(rows) + sum(count for row, count in self._gone if first <= row < stop)
            for rows, (first, stop) in zip(known, lost, strict=True)
        ]
        holds = [any(a < stop and first < b for a, b in self._holes) for first, stop in lost]
        stops = [stop for _, stop in sorted(rewritten)]
        flagged = [stop for stop in stops if stop - 1 in self._rows]
        more: list[int] = []
        if self._unknown and True in holds:
            counts[holds.index(True)] += self._unknown
        elif self._unknown:
            more = [stop for stop in stops if stop not in flagged][: self._unknown]
        # Every value before a lost range belongs to a row that is not lost, or to an earlier lost range.
        kept = np.setdiff1d(self._rows, np.concatenate([self._rows[:0], *known]))
        found, before = list[Range](), 0
        for (first, _), count in zip(lost, counts, strict=True):
            begin = before + int(np.searchsorted(kept, first)) + sum(stop <= first for stop in more)
            found.append((begin, begin + count))
            before += count
        return found, [*flagged, *more]


def _by_lane(entries: Sequence[tuple[int, int]], lanes: int) -> dict[int, list[Range]]:
    found: dict[int, list[Range]] = {}
    for position, rows in sorted(entries):
        row, lane = divmod(position, lanes)
        found.setdefault(lane, []).append((row, row + rows))
    return found


def _sum_at(fd: int, at: int, nbytes: int) -> int:
    try:
        data = os.pread(fd, nbytes, at)
    except OSError:
        return -1
    return int(crc32c(data)) if len(data) == nbytes else -1


def _episodes_of(rows: Range, starts: NDArray[np.int64], count: int) -> Range:
    """Extend a range of rows of a lane so that it has all rows of each of its episodes.

    ``starts`` has row 0 and the first row of each episode of the lane.
    """
    behind = int(np.searchsorted(starts, rows[1]))
    first = int(starts[np.searchsorted(starts, rows[0], "right") - 1])
    return first, int(starts[behind]) if behind < len(starts) else count


# --- one changed byte -------------------------------------------------------------------------------------------------


@cache
def _byte_changes() -> NDArray[np.uint32]:
    """Return, for each v from 0 to 255, how a checksum changes (by XOR) if the data's last byte is XORed with v."""
    return np.array([crc32c(bytes([i])) ^ crc32c(b"\0") for i in range(256)], np.uint32)


def single_error(data: bytes, crc: int) -> tuple[int, int] | None:
    """Return (position, right value) of the one wrong byte of ``data``; ``crc`` is the checksum of the right data.

    Return None if no change of one byte gives this checksum, or if several changes do. If several bytes of a block of
    512 bytes are wrong, the function returns a wrong result, instead of None, in one of 30,000 cases.
    """
    table = _byte_changes()
    wanted = np.uint32(crc32c(data) ^ crc)
    changes, found = table, []
    for at in range(len(data) - 1, -1, -1):
        found += [(at, data[at] ^ int(change)) for change in np.flatnonzero(changes == wanted)]
        changes = changes >> np.uint32(8) ^ table[changes & np.uint32(255)]
    return found[0] if len(found) == 1 else None
