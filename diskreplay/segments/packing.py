"""Builds packs: copies and checks the rows of sealed segments, one after another, into one new segment."""

import os
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from mmap import PAGESIZE
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import NO_STEP
from diskreplay.segments.blocks import block_bytes, known_sums
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.durable import check_written, storage_errors, sync_file_system, write_at
from diskreplay.segments.files.machine import volume_of
from diskreplay.segments.files.mapping import opened, read_part
from diskreplay.segments.packs import PackTables, open_shard, read_tables
from diskreplay.segments.sealing import GroupWriter
from diskreplay.segments.segment import Lost, PackSize, SegmentInfo, counter_inode
from diskreplay.segments.segment_reader import sealed_extent
from diskreplay.segments.shards import Shard, ShardWriter, codec, inner_rows, is_wide

_AT_ONCE = 4 << 20
_MOST_ROWS = 1 << 24
# The approximate number of a pack's groups and arrays that store no field of the schema.
_FILES = 8

EvictedBySegment = Mapping[int, Sequence[tuple[int, int]]]
"""Maps a segment's number to its episodes that were evicted by hand: (position of the first step, number of steps)."""


def chunk_rows(rows: int) -> int:
    """Return the number of rows of a chunk with room for all ``rows`` rows of a pack; not for episode fields."""
    return layout.ceil_power_of_two(rows + layout.ROWS_BEHIND)


def is_compressed(array: RowArray) -> bool:
    return is_wide(array.row_bytes) and not array.is_of_episodes


def most_rows(root: Root, level: int | None) -> int:
    """Return the maximum number of rows in a pack: one file must have room for all rows of an uncompressed field.

    ``level`` is the level of zstd, or None for a pack without compression.
    """
    arrays = [array for array in root.blueprint.arrays.values() if not array.is_of_episodes]
    widest = max(array.row_bytes for array in arrays if level is None or not is_compressed(array))
    return _rows_of_file(widest) - layout.ROWS_BEHIND


def most_values(root: Root) -> int:
    return _rows_of_file(max((root.blueprint.arrays[leaf].row_bytes for leaf in root.blueprint.values), default=1))


def _rows_of_file(row_bytes: int) -> int:
    return min(_MOST_ROWS, layout.floor_power_of_two(layout.MAX_CHUNK_BYTES // row_bytes))


def most_bytes(root: Root, rows: int, values: int) -> int:
    small_files = 2 * (len(root.blueprint.arrays) + _FILES)
    return rows * root.step_bytes + values * root.value_bytes + small_files * PAGESIZE


def build_pack(
    root: Root,
    building: str,
    sources: Sequence[SegmentInfo],
    evicted: EvictedBySegment,
    level: int | None,
    pace: Callable[[], None],
) -> SegmentInfo:
    """Build a pack from sealed segments and packs, and return its attributes.

    ``building`` is the folder of the new pack. The caller has made only a lock file in it, and holds the lock. The new
    pack is complete and durable, and has no number yet. The files of the sources are not changed. For episodes in
    ``evicted``, only flags and times are copied. ``level`` is the level of zstd, or None for a pack without
    compression. ``pace`` is called after each small part of the work, and may sleep, or raise an error to stop the
    work. Raises StorageFull if the disk has no room. Raises Unfit if a source cannot be read, does not match its
    checksums, or is gone.
    """
    with storage_errors(building):
        info = _Build(root, building, list(_opened(sources, pace)), evicted, level, pace).run()
        sync_file_system(root.folder)
        for name in info.checksums:
            check_written(f"{building}/{name}")
    return info


class Unfit(FormatError):
    """A segment cannot be put into a pack; ``number`` is the segment's number."""

    def __init__(self, info: SegmentInfo, error: Exception) -> None:
        self.number = info.number
        super().__init__(f"segment {info.number} was left as it is: {error}")


class _Run(NamedTuple):
    """A lane whose rows are copied from the segment or pack ``source`` into the new pack.

    ``lane`` is the lane's number in the files of ``source``; in a pack, all lanes are in lane 0. The copied rows are
    ``rows`` rows from row ``first`` on. In arrays of episode fields, ``values`` rows are copied, from row
    ``first_value`` on.
    """

    source: "_Source"
    lane: int
    first: int
    rows: int
    first_value: int
    values: int

    def of(self, leaf: str) -> tuple[int, int]:
        return (self.first_value, self.values) if layout.is_of_episodes(leaf) else (self.first, self.rows)


class _Source:
    """A sealed segment or pack whose rows are copied; the rows are checked when they are read."""

    def __init__(self, info: SegmentInfo) -> None:
        self.info = info
        self._shards: dict[str, Shard] = {}
        try:
            self.tables = self._read()
            self._sums = known_sums(info)
        except (OSError, FormatError) as error:
            raise Unfit(info, error) from error

    def _read(self) -> PackTables:
        """Return the tables of the source; for a segment that is no pack, tables in which each lane begins at row 0."""
        info = self.info
        if info.packed is not None:
            return read_tables(info)
        rows = read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes))
        if crc32c(rows.tobytes()) != info.checksums[f"{layout.COMMITTED}/c.0"]:
            raise FormatError("its counters do not fit their checksum")
        members = np.array([[info.number, len(info.lanes), info.writer, info.steps or 0]], np.int64)
        none, lanes = np.zeros_like(rows), np.array(info.lanes, np.int64)
        return PackTables(members, np.stack([none, rows, lanes, none, sealed_extent(info, rows).values], axis=1))

    def runs_of(self, member: int) -> list[_Run]:
        lines = self.tables.runs[self.tables.runs_of(member)].tolist()
        packed = self.info.packed is not None
        return [
            _Run(self, 0 if packed else lane, first, rows, first_value, values)
            for lane, (first, rows, _, first_value, values) in enumerate(lines)
        ]

    def read(self, leaf: str, run: _Run, begin: int, stop: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the rows ``begin`` to ``stop`` of a lane in an array, in parts: (first row of the part, bytes).

        Rows are counted from the first row of the lane. Inner chunks of zeros are left out. Raises Unfit if rows are
        damaged or gone.
        """
        info = self.info
        if leaf not in info.chunk_rows:
            return  # the steps of this source have no priorities
        array, per_chunk, (begins, _) = info.arrays[leaf], info.chunk_rows[leaf], run.of(leaf)
        if leaf in info.compressed:
            yield from self._decompressed(array, run.first, begin, stop)
            return
        at_once = max(1, _AT_ONCE // array.row_bytes)
        for chunk, inside, count in layout.split_range(begins + begin, begins + stop, per_chunk, at_once):
            where = (run.lane * per_chunk + inside) * array.row_bytes
            try:
                data = self._checked(array, chunk, where, where + count * array.row_bytes)
            except (OSError, FormatError) as error:
                raise Unfit(info, error) from error
            yield chunk * per_chunk + inside - begins, data

    def _decompressed(
        self, array: RowArray, first: int, begin: int, stop: int
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        try:
            shard = self._shards.get(array.path)
            if shard is None:
                shard = self._shards[array.path] = open_shard(self.info, array.path)
            for row, data in shard.rows(first + begin, first + stop, array.row_bytes):
                yield row - first, data
        except (OSError, FormatError) as error:
            raise Unfit(self.info, error) from error

    def _checked(self, array: RowArray, chunk: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the bytes ``start`` to ``stop`` of a chunk file, after checking all blocks with any of these bytes."""
        name = f"{array.path}/{array.chunk_key(chunk)}"
        size, block, sums = self.info.chunk_nbytes(array.path), block_bytes(array.row_bytes), self._sums.get(name)
        if sums is None:
            raise FormatError(f"{name} has no checksums of its blocks")
        low, high = start - start % block, min(size, -(-stop // block) * block)
        data = np.empty(high - low, np.uint8)
        with opened(f"{self.info.path}/{name}", size) as fd:
            if not read_part(fd, low, data):
                raise FormatError(f"{name} became shorter")
        for at in range(0, len(data), block):
            if crc32c(data[at : at + block].data) != sums[(low + at) // block]:
                raise FormatError(f"{name} does not fit its checksum")
        return data[start - low : stop - low]


def _opened(infos: Sequence[SegmentInfo], pace: Callable[[], None]) -> Iterator[_Source]:
    for info in infos:
        pace()
        yield _Source(info)


class _Build:
    def __init__(
        self,
        root: Root,
        folder: str,
        sources: Sequence[_Source],
        evicted: EvictedBySegment,
        level: int | None,
        pace: Callable[[], None],
    ) -> None:
        self._pace, self._group = pace, GroupWriter(folder)
        self._root, self._folder, self._sources, self._evicted = root, folder, sources, evicted
        order = sorted(
            ((source, member) for source in sources for member in range(len(source.tables.members))),
            key=lambda one: int(one[0].tables.numbers[one[1]]),
        )
        self._members = np.concatenate([source.tables.members[[member]] for source, member in order])
        self._runs = [run for source, member in order for run in source.runs_of(member)]
        numbers = np.concatenate([s.tables.runs[s.tables.runs_of(m), 2] for s, m in order])
        arrays = root.blueprint.arrays.values()
        wide = [array for array in arrays if level is not None and is_compressed(array)]
        self._inner_rows = {array.path: inner_rows(array.row_bytes) for array in wide}
        self._level = level or 0
        rows = np.array([run.rows for run in self._runs], np.int64)
        # In a compressed field, each lane begins with a new inner chunk.
        unit = max(self._inner_rows.values(), default=1)
        room = -(-rows // unit) * unit
        first = np.cumsum(room) - room
        values = np.array([run.values for run in self._runs], np.int64)
        first_values = np.cumsum(values) - values
        self.tables = PackTables(self._members, np.stack([first, rows, numbers, first_values, values], axis=1))
        self._rows, self._values = int(first[-1] + rows[-1]), int(values.sum())
        self._between = [(int(a), int(b)) for a, b in zip(first + rows, first[1:], strict=False) if a < b]
        self._clock = min((source.info.clock for source in sources), key=lambda clock: clock.wall)
        # The ranges of rows that belong to episodes evicted by hand: rows of the pack, and rows of its arrays of
        # episode fields.
        self._skipped: list[tuple[int, int]] = []
        self._skipped_values: list[tuple[int, int]] = []

    def run(self) -> SegmentInfo:
        root, folder, infos = self._root, self._folder, [source.info for source in self._sources]
        has_priority = any(layout.PRIORITY in info.chunk_rows for info in infos)
        blueprint = root.blueprint.with_priority if has_priority else root.blueprint
        rows = dict.fromkeys(blueprint.arrays, max([chunk_rows(self._rows), *self._inner_rows.values()]))
        rows |= dict.fromkeys(blueprint.values, layout.ceil_power_of_two(self._values))
        size = PackSize(*map(len, (self.tables.members, self.tables.runs)))
        codecs = {leaf: codec(n, self._level, blueprint.arrays[leaf].shape) for leaf, n in self._inner_rows.items()}
        documents = blueprint.of_pack(*size, codecs).documents(1, rows, self._rows, self._values)
        for path, document in documents:
            if path != layout.COMMITTED:  # this folder exists already: it has the lock file
                os.mkdir(f"{folder}/{path}")
            self._group.small(f"{path}/{layout.METADATA}", document)
        for name, table in zip(layout.PACK_TABLES, self.tables.contents, strict=True):
            self._group.small(f"{name}/c.0.0", table)
        self._group.small(layout.TABLES_COPY, b"".join(self.tables.contents))
        for name in layout.LANE_COUNTERS:
            self._group.small(f"{name}/c.0", np.array([self._rows], "<i8").tobytes())
        without = {layout.DONE, *([] if self._values else blueprint.values)}
        for leaf in (layout.DONE, *sorted(blueprint.arrays.keys() - without)):
            self._build_array(blueprint.arrays[leaf], rows[leaf])
        return self._group.finish(self._described(rows, size), np.array([self._rows]))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _build_array(self, array: RowArray, rows: int) -> None:
        if array.path in self._inner_rows:
            with self._group.shard(array, rows, self._inner_rows[array.path], self._level) as shard:
                self._copy_rows(array, shard)
            return
        with self._group.chunk(array) as fd:
            os.ftruncate(fd, rows * array.row_bytes)
            out = _Output(fd, array.row_bytes)
            self._copy_rows(array, out)
            out.flush()
            if array.path == layout.DONE:
                self._write_flags_between(fd)
                self._skipped = self._find_skipped(fd)
                self._skipped_values = list(self._find_skipped_values(fd))
            elif array.path == layout.TIME:
                self._write_times_between(fd)

    def _copy_rows(self, array: RowArray, out: "_Output | ShardWriter") -> None:
        is_known = array.path in (layout.DONE, layout.TIME)
        skipped = self._skipped_values if array.is_of_episodes else self._skipped
        first_rows = self.tables.of(array.path).first_rows.tolist()
        for run, first in zip(self._runs, first_rows, strict=True):
            count = run.of(array.path)[1]
            for begin, stop in [(0, count)] if is_known else _parts(first, count, skipped):
                for row, data in run.source.read(array.path, run, begin, stop):
                    out.write(first + row, self._converted(data, run) if array.path == layout.TIME else data)
            self._pace()

    def _write_flags_between(self, fd: int) -> None:
        """Write flags that make the unused rows between two lanes one episode; `_lost` counts these rows as lost."""
        for first, stop in self._between:
            os.pwrite(fd, bytes([layout.FIRST]), first)
            os.pwrite(fd, bytes([layout.TRUNCATED | (layout.FIRST if stop == first + 1 else 0)]), stop - 1)

    def _write_times_between(self, fd: int) -> None:
        for first, stop in self._between:
            os.pwrite(fd, os.pread(fd, 8, 8 * (first - 1)) * (stop - first), 8 * first)

    def _converted(self, times: NDArray[np.uint8], run: _Run) -> NDArray[np.uint8]:
        return (times.view("<i8") + (run.source.info.clock.wall - self._clock.wall)).view(np.uint8)

    def _find_skipped(self, fd: int) -> list[tuple[int, int]]:
        """Return the sorted ranges of the pack's rows that belong to episodes evicted by hand.

        The rows of final observations are included. ``fd`` is the open file of the pack's flags.
        """
        found = []
        for number, episodes in self._evicted.items():
            member = int(self.tables.places(np.array([number]))[0])
            for position, steps in episodes if member >= 0 else ():
                row, lane = divmod(position, int(self.tables.lanes[member]))
                first, rows = self.tables.runs[self.tables.first_run[member] + lane, :2].tolist()
                stop = row + steps
                if stop < rows and os.pread(fd, 1, first + stop)[0] & NO_STEP:
                    stop += 1
                found.append((first + row, first + min(stop, rows)))
        return layout.merge_ranges(found)

    def _find_skipped_values(self, fd: int) -> Iterator[tuple[int, int]]:
        """Yield the sorted ranges of rows with values of evicted episodes, in arrays of episode fields."""
        lost = {first: values for first, _, values in self._lost().entries}
        stops = {stop for _, stop in self._skipped}
        edges = {first for first, _ in self._skipped} | stops
        count = before = row = 0
        for edge in sorted(edges | lost.keys()) if self._values and edges else ():
            while row < edge:
                flags = np.frombuffer(os.pread(fd, min(edge - row, _AT_ONCE), row), np.uint8)
                count += int(np.count_nonzero(flags & layout.EPISODE_VALUES))
                row += len(flags)
            if edge in stops and before < count:
                yield before, count
            count += lost.get(edge, 0)
            before = count

    # --- attributes --------------------------------------------------------------------------------------------------

    def _described(self, rows: dict[str, int], size: PackSize) -> SegmentInfo:
        infos = [source.info for source in self._sources]
        newest = max(infos, key=lambda info: info.sealed_at)
        machine, boot = next((info.machine, info.boot) for info in infos if info.clock == self._clock)
        bounds = [
            time + info.clock.wall - self._clock.wall for info in infos if info.times is not None for time in info.times
        ]
        return SegmentInfo(
            number=-1,
            path=Path(self._folder),
            root=self._root,
            uuid=str(uuids.uuid4()),
            writer=int(self._members[0, 2]),
            lanes=(0,),
            chunk_rows=rows,
            values=(self._values,) if self._root.blueprint.values else (),
            machine=machine,
            boot=boot,
            inode=counter_inode(self._folder),
            volume=volume_of(self._folder),
            clock=self._clock,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            sealed=True,
            steps=sum(info.steps or 0 for info in infos),
            sealed_at=newest.sealed_at,
            sealed_clock=newest.sealed_clock,
            times=(min(bounds), max(bounds)) if bounds else None,
            lost=self._lost(),
            packed=size,
        )

    def _lost(self) -> Lost:
        """Return the rows that the segments lost, and the unused rows between lanes, as rows of the pack."""
        ranges = [(first, stop - first, 0) for first, stop in self._between]
        for source in self._sources:
            info = source.info
            for position, rows, values in info.lost.entries:
                if info.packed is not None and not source.tables.holds(position):
                    continue  # unused rows between the lanes of this older pack
                if info.packed is not None:
                    ids = source.tables.ids_of(np.array([position]))
                else:
                    ids = np.array([info.number << layout.POSITION_BITS | position])
                ranges.append((int(self.tables.rows_of(ids)[0]), rows, values))
        return Lost.of(ranges, sum(source.info.lost.steps for source in self._sources))


def _parts(first: int, rows: int, skipped: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges of a lane's rows that are not in ``skipped``, counted from the lane's first row.

    The lane has ``rows`` rows from row ``first`` of the pack on. ``skipped`` has ranges of rows of the pack.
    """
    without = [(a - first, b - first) for a, b in skipped if a < first + rows and first < b]
    return layout.subtract_ranges([(0, rows)], without)


class _Output:
    """Writes rows of a file in batches; rows that are never written stay holes."""

    def __init__(self, fd: int, row_bytes: int) -> None:
        self._fd, self._row_bytes = fd, row_bytes
        self._start, self._size, self._parts = 0, 0, list[NDArray[np.uint8]]()

    def write(self, row: int, data: NDArray[np.uint8]) -> None:
        at = row * self._row_bytes
        if at != self._start + self._size:
            self.flush()
            self._start = at
        self._parts.append(data)
        self._size += len(data)
        if self._size >= _AT_ONCE:
            # This write ends at a multiple of `_AT_ONCE`, because large aligned writes make large pages in the page
            # cache.
            self._flush((self._start + self._size) // _AT_ONCE * _AT_ONCE)

    def flush(self) -> None:
        self._flush(self._start + self._size)

    def _flush(self, stop: int) -> None:
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            count = stop - self._start
            write_at(self._fd, data[:count].data, self._start)
            self._parts = [data[count:]] if count < len(data) else []
        self._start, self._size = stop, self._start + self._size - stop
