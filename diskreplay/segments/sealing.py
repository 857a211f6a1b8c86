"""Sealing makes a segment immutable, and can be repeated from the start after a crash.

The order is: remove or zero everything after the rows that are kept; write the exact shapes of the arrays; take
checksums; sync everything; write the attribute `sealed`. Each sync covers the whole file system, because syncing the
thirty files and folders of a segment one by one takes ten times as long.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.ids import NO_STEP, Ints
from diskreplay.segments.blocks import BlockSums
from diskreplay.segments.damage.unproven import forget_claims, keep_proven_rows
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.documents.root import Root
from diskreplay.segments.episode_table import write_table
from diskreplay.segments.files.commit import read_lane_counter, write_lane_counter
from diskreplay.segments.files.copies import note_changed, open_protected, protect
from diskreplay.segments.files.durable import (
    check_written,
    descriptor,
    is_shared,
    punch_hole,
    storage_errors,
    sync_file_system,
    write_atomic,
    write_file,
    writing_back,
)
from diskreplay.segments.files.machine import MOST_NS, boot_id, boot_time, clock_ns, machine_id
from diskreplay.segments.files.mapping import data_ranges, opened, read_regular, refuse_links
from diskreplay.segments.files.times import last_time, time_bounds
from diskreplay.segments.marks import map_trusted, shows_live_rows
from diskreplay.segments.segment import SegmentInfo, read_segment
from diskreplay.segments.segment_reader import Extent, extent_of
from diskreplay.segments.shards import Compressed, ShardWriter, index_bytes
from diskreplay.workers import Job, Workers

Salvaged = Mapping[int, NDArray[np.int64]]

_BLOCK_BYTES = 1 << 20
# With more bytes of chunk files than this, a second thread makes sealing faster.
_SHARED_BYTES = 16 << 20
# The times of this many newest segments are read: more than one, because some segments may be damaged or gone.
_NEWEST = 16
_PUBLISHING = (layout.COMMITTED, layout.OBSERVED)


class GroupWriter:
    """Writes the files of a sealed segment or pack, and their checksums. Call `write_derived` or `finish` in the end.

    The folders of the arrays must exist. The caller syncs the files.

    Concurrency: one thread, but several threads may call `seal_chunk` at once.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sums: dict[str, int] = {}
        self._blocks = BlockSums()
        self._compressed: dict[str, Compressed] = {}
        self._indexes: dict[str, bytes] = {}

    def note(self, name: str, data: bytes) -> None:
        self._sums[name] = crc32c(data)

    def small(self, name: str, data: bytes) -> None:
        write_file(f"{self._folder}/{name}", data)
        self.note(name, data)

    @contextmanager
    def chunk(self, array: RowArray, number: int = 0) -> Iterator[int]:
        """Yield the descriptor of a new chunk file, and seal the file after the ``with`` block has written it."""
        with self._made(array, number) as fd:
            yield fd
            self.seal_chunk(array, number, fd)

    @contextmanager
    def shard(self, array: RowArray, chunk_rows: int, rows: int, level: int) -> Iterator[ShardWriter]:
        with self._made(array, 0) as fd:
            writer = ShardWriter(fd, chunk_rows, array.row_bytes, rows, level)
            yield writer
            nbytes, index = writer.finish(), index_bytes(chunk_rows, rows)
            self._compressed[array.path] = Compressed(rows, level, nbytes)
            self._indexes[array.path] = os.pread(fd, index, nbytes - index)
            self.seal_chunk(array, 0, fd, layout.BLOCK_BYTES)

    def _made(self, array: RowArray, number: int) -> descriptor:
        return descriptor(f"{self._folder}/{array.path}/{array.chunk_key(number)}", os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def seal_chunk(self, array: RowArray, number: int, fd: int, block: int | None = None) -> None:
        """Record the checksums of a chunk file that will not change anymore, and remove the permission to write it.

        ``block`` is the size of a block in bytes; None: `block_bytes` gives the size. In a copy of the segment, a file
        with this permission may have been copied before the sealing.
        """
        self._sums[f"{array.path}/{array.chunk_key(number)}"] = self._blocks.add(array, number, fd, block)
        protect(fd)

    def block_sums(self, array: RowArray, number: int) -> bytes:
        return self._blocks.chunks[array.path, number]

    def write_derived(self, info: SegmentInfo, rows: Ints, table: str) -> SegmentInfo:
        """Write the files that are computed from the chunks; return ``info`` with the attributes that result.

        These files are ``durable/blocks``, the copy of a pack's indexes, and the table of episodes in the new folder
        ``table``. ``rows`` has the number of rows of each lane.
        """
        self._sums[layout.BLOCKS] = self._blocks.write(self._folder)
        if self._indexes:
            self.small(layout.INDEXES_COPY, b"".join(self._indexes[leaf] for leaf in sorted(self._indexes)))
        info = dataclasses.replace(info, compressed=self._compressed)
        episodes, sums = write_table(info, rows, table)
        return dataclasses.replace(info, episodes=episodes, checksums={**self._sums, **sums})

    def finish(self, info: SegmentInfo, rows: Ints) -> SegmentInfo:
        info = self.write_derived(info, rows, f"{self._folder}/{layout.EPISODES}")
        for name in (layout.DOCUMENT_COPY, layout.METADATA):
            write_file(f"{self._folder}/{name}", info.own_document())
        return info


@dataclass
class _Finished:
    """A segment whose files are final, except for its zarr.json and the counters of observed and durable rows."""

    info: SegmentInfo
    data: Extent  # the rows of the sealed segment
    kept_extent: Extent  # the rows in the segment's files: the rows of `data`, and the unproven rows after them
    is_live: bool  # whether the segment's counters in memory are trusted, see `shows_live_rows`
    group: GroupWriter
    times: tuple[int, int] | None = None
    # Two numbers of steps for each chunk of flags: steps in rows of `data`, and steps in unproven rows.
    steps: dict[int, int] = field(default_factory=dict)
    unproven_steps: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> NDArray[np.int64]:
        return self.data.rows

    @property
    def kept(self) -> NDArray[np.int64]:
        """The number of rows of each lane in the files, unproven rows included."""
        return self.kept_extent.rows

    @property
    def claimed(self) -> tuple[int, ...] | None:
        """The number of rows of each lane in the files; None if no lane has unproven rows."""
        return None if (self.rows == self.kept).all() else tuple(self.kept.tolist())


def seal_segments(
    root: Root,
    infos: Sequence[SegmentInfo],
    salvaged: Salvaged | None = None,
    is_waited_for: Callable[[], bool] = lambda: False,
) -> None:
    """Seal unsealed segments without a writer; the caller holds the locks of the segments.

    ``is_waited_for`` returns whether another thread has begun to wait for the result. While a thread waits, its
    processor is idle, so a helper thread then computes checksums, too.

    If the counters of a segment cannot be trusted, the sealed segment has only the rows that its marks prove.
    ``salvaged`` maps a segment's number to the number of rows of each lane to keep, even if marks prove fewer rows. All
    other rows that the counters had counted stay in the files as unproven rows.

    Raises StorageFull if the disk has no room for metadata; the call may be repeated. Raises StoreNotFound if the store
    was deleted or replaced since it was opened. Raises NotWritten if a sync failed, or if the system could not write
    one of the files: it is unknown which data are durable.
    """
    root.check_still_there()
    with storage_errors(root.folder):
        finished = [_finish_files(info, (salvaged or {}).get(info.number), is_waited_for) for info in infos]
    with writing_back():
        sync_file_system(root.folder)
    with storage_errors(root.folder):
        for segment in finished:
            _place_table(segment)
    with writing_back():
        for segment in finished:
            for name in segment.info.checksums:
                check_written(f"{segment.info.path}/{name}")
    with storage_errors(root.folder):
        for segment in finished:
            _write_sealed_draft(segment)
    with writing_back():
        sync_file_system(root.folder)
    with storage_errors(root.folder):
        for segment in finished:
            forget_claims(segment.info, segment.claimed is not None)
        for info in infos:
            # after this rename, retention may evict the segment
            os.replace(_sealed_draft(info), f"{info.path}/{layout.METADATA}")
    sync_file_system(root.folder)


def _finish_files(
    info: SegmentInfo, salvaged: NDArray[np.int64] | None, is_waited_for: Callable[[], bool]
) -> _Finished:
    refuse_links(info.path, info.blueprint.paths)
    is_live = shows_live_rows(info)
    if is_live:
        rows = kept = _finish_counters(info)
    else:
        rows, kept = keep_proven_rows(info, salvaged)
    data, group = extent_of(info, rows), GroupWriter(str(info.path))
    for name in layout.LANE_COUNTERS:  # all counters get the same content, so that each can be restored from another
        group.note(f"{name}/c.0", rows.tobytes())
    segment = _Finished(info, data, extent_of(info, kept, data), is_live, group)
    _finish_chunks(segment, is_waited_for)
    for path, document in info.documents():
        if array := info.arrays.get(path):
            _finish_array(segment, array)
        else:
            name = f"{path}/{layout.METADATA}"
            if not _has_content(f"{info.path}/{name}", document):
                write_atomic(info.path / name, document)
            group.note(name, document)
    segment.times = time_bounds(str(info.path), info.chunk_rows[layout.TIME], rows, info.lost)
    shutil.rmtree(_table_draft(info), ignore_errors=True)  # left by a process that died while sealing
    segment.info = group.write_derived(info, rows, _table_draft(info))
    return segment


def _sealed_draft(info: SegmentInfo) -> str:
    # The draft is in an array's folder: in the segment's folder, zarr would warn of an unknown file.
    return f"{info.path}/{layout.COMMITTED}/.{layout.METADATA}"


def _table_draft(info: SegmentInfo) -> str:
    # The draft is in an array's folder, so that no zarr reader finds a table that is not durable.
    return f"{info.path}/{layout.COMMITTED}/.{layout.EPISODES}"


def _place_table(segment: _Finished) -> None:
    """Move the table of episodes to the folder ``episodes``; a table of an interrupted sealing is deleted."""
    folder = f"{segment.info.path}/{layout.EPISODES}"
    if os.path.lexists(folder):
        shutil.rmtree(folder, ignore_errors=True)
    if segment.info.episodes is not None:
        os.rename(_table_draft(segment.info), folder)


def _write_sealed_draft(segment: _Finished) -> None:
    """Write the counters of observed and durable rows, a draft of the sealed zarr.json, and a copy of it."""
    info = segment.info
    for name in (layout.OBSERVED, layout.DURABLE):
        write_lane_counter(f"{info.path}/{name}", segment.rows)
    for name in layout.LANE_COUNTERS:
        note_changed(f"{info.path}/{name}/c.0", for_good=True)
    sealed = dataclasses.replace(
        info,
        sealed=True,
        steps=sum(segment.steps.values()) - info.lost.surplus,
        values=tuple(segment.data.values.tolist()) if info.has_values else (),
        sealed_at=round(time.time(), 3),
        sealed_clock=boot_time(),
        times=segment.times,
        claimed=segment.claimed,
        unproven_steps=sum(segment.unproven_steps.values()),
        unproven_time=0 if segment.claimed is None else _latest(info),
    )
    document = sealed.own_document()
    write_file(_sealed_draft(info), document)
    write_file(f"{info.path}/{layout.DOCUMENT_COPY}", document)


def _latest(info: SegmentInfo) -> int:
    """Return a time, in nanoseconds since the epoch, at or after the times of all rows in the store.

    The wall clock alone is not enough: it may have been set back after the newest rows were published.
    """
    words = info.root.counters().read()
    latest, end = (
        [time.time_ns(), int(words[layout.HORIZON]), int(words[layout.FRONTIER])],
        int(words[layout.NEXT_SEGMENT]),
    )
    for number in range(max(0, end - _NEWEST), end):
        if number != info.number:
            with suppress(OSError, FormatError):
                latest.append(last_time(read_segment(info.root, number)))
    return min(max(latest), MOST_NS)


def _finish_counters(info: SegmentInfo) -> NDArray[np.int64]:
    """Set the counters of committed rows to the numbers of rows that the sealed segment will have; return them.

    If the observation after a lane's committed rows was published, it becomes a row. The counters must be trusted, see
    `shows_live_rows`.
    """
    lanes = len(info.lanes)
    committed, observed = (read_lane_counter(f"{info.path}/{name}", lanes) for name in _PUBLISHING)
    if (observed > committed).any():
        committed = committed.copy()
        for lane in np.flatnonzero(observed > committed).tolist():
            _end_with_observation(info, lane, int(committed[lane]))
            committed[lane] += 1
        write_lane_counter(f"{info.path}/{layout.COMMITTED}", committed)
    return committed


def _end_with_observation(info: SegmentInfo, lane: int, row: int) -> None:
    """Make the observation at ``row`` the final observation of a cut episode.

    The row's other fields are overwritten, because a writer that died may have written only some of their bytes.
    """
    flags = layout.OBSERVATION_ONLY | layout.TRUNCATED | layout.CUT
    # The segment was written in this boot: its earlier rows have times of the same clock.
    known = {layout.DONE: bytes([flags]), layout.TIME: clock_ns().to_bytes(8, "little")}
    for leaf in info.arrays:
        if leaf == "obs" or leaf.startswith("obs/") or layout.is_of_episodes(leaf):
            continue
        chunk, at = divmod(row, info.chunk_rows[leaf])
        nbytes = info.arrays[leaf].row_bytes
        data = known.get(leaf, bytes(nbytes))
        with open_protected(info.chunk_path(leaf, chunk)) as fd:
            os.pwrite(fd, data, (lane * info.chunk_rows[leaf] + at) * nbytes)


def _finish_chunks(segment: _Finished, is_waited_for: Callable[[], bool]) -> None:
    arrays = segment.info.arrays.values()
    places = [(array, chunk) for array in arrays for chunk in range(_chunk_count(segment, array))]
    may_share = sum(segment.info.chunk_nbytes(array.path) for array, _ in places) > _SHARED_BYTES
    left = iter(places)

    def finish() -> None:
        for array, chunk in left:
            _finish_chunk(segment, array, chunk)

    helper = Job(finish)
    with closing(Workers(1, "diskreplay-checksums")) as thread:
        try:
            for array, chunk in left:
                if may_share and is_waited_for():
                    may_share = False
                    thread.begin(helper)
                _finish_chunk(segment, array, chunk)
        finally:
            helper.withdraw()
    helper.result()


def _chunk_count(segment: _Finished, array: RowArray) -> int:
    return -(-int(segment.kept_extent.of(array.path).max()) // segment.info.chunk_rows[array.path])


def _finish_chunk(segment: _Finished, array: RowArray, chunk: int) -> None:
    """Punch holes after each lane's rows in a chunk, and seal the chunk; in a chunk of flags, also count the steps.

    Different threads may finish different chunks.
    """
    info, per_chunk = segment.info, segment.info.chunk_rows[array.path]
    kept = _rows_inside(segment.kept_extent.of(array.path), chunk, per_chunk)
    with open_protected(info.chunk_path(array.path, chunk)) as fd:
        # One NumPy call for all lanes: a loop over thousands of lanes would hold the GIL, and no thread could append.
        begins = np.arange(len(kept) + 1) * per_chunk
        for start, stop in layout.join_ranges(begins[:-1] + kept, begins[1:]):
            punch_hole(fd, start * array.row_bytes, stop * array.row_bytes)
        if array.path == layout.DONE:
            steps = _count_in_chunk(fd, _rows_inside(segment.rows, chunk, per_chunk), per_chunk)
            segment.steps[chunk] = steps
            segment.unproven_steps[chunk] = _count_in_chunk(fd, kept, per_chunk) - steps
        segment.group.seal_chunk(array, chunk, fd)


def _finish_array(segment: _Finished, array: RowArray) -> None:
    info, longest = segment.info, int(segment.data.of(array.path).max())
    name = f"{array.path}/{layout.METADATA}"
    document = info.rows_document(array.path, longest)
    is_exact = _has_content(f"{info.path}/{name}", document)
    # The shape in zarr.json has the rows of every chunk that was begun. If the shape is already final, no chunk needs
    # to be removed.
    if not (segment.is_live and is_exact):
        _remove_behind(info, array, _chunk_count(segment, array))
    if not is_exact:
        info.write_rows(array.path, longest)
    note_changed(f"{info.path}/{name}", for_good=True)
    segment.group.note(name, document)


def _has_content(path: str, document: bytes) -> bool:
    try:
        return read_regular(path, None, len(document) + 1) == document
    except FileNotFoundError:
        return False


def _rows_inside(rows: NDArray[np.int64], chunk: int, per_chunk: int) -> NDArray[np.int64]:
    return np.clip(rows - chunk * per_chunk, 0, per_chunk)


def _remove_behind(info: SegmentInfo, array: RowArray, chunks: int) -> None:
    """Remove temporary files that a power loss may have left, and chunks from number ``chunks`` on."""
    known = {layout.METADATA, *map(array.chunk_key, range(chunks))}
    for name in os.listdir(info.path / array.path):
        if name not in known and name.startswith((".", "c.")):
            os.unlink(info.path / array.path / name)


def count_steps(info: SegmentInfo) -> int:
    return count_steps_in(info, map_trusted(info)[1].copy())


def count_steps_in(info: SegmentInfo, rows: NDArray[np.int64]) -> int:
    """Return the number of steps in the first ``rows[lane]`` rows of each lane of a segment, lost steps included."""
    return count_flags(str(info.path), rows, info.chunk_rows[layout.DONE]) - info.lost.surplus


def count_flags(segment: str, rows: NDArray[np.int64], per_chunk: int) -> int:
    steps = 0
    for chunk in range(-(-int(rows.max()) // per_chunk)):
        with opened(f"{segment}/{layout.DONE}/{layout.chunk_key(chunk, 0)}", len(rows) * per_chunk) as fd:
            steps += _count_in_chunk(fd, _rows_inside(rows, chunk, per_chunk), per_chunk)
    return steps


def _count_in_chunk(fd: int, kept: NDArray[np.int64], per_chunk: int) -> int:
    steps = int(kept.sum())  # flags in holes are 0, and a row with flag 0 is a step
    for first, stop in data_ranges(fd, 0, len(kept) * per_chunk):
        for at in range(first, stop, _BLOCK_BYTES):  # in blocks, so that the collecting process needs little memory
            flags = np.frombuffer(os.pread(fd, min(stop - at, _BLOCK_BYTES), at), np.uint8)
            lanes, rows = np.divmod(at + np.flatnonzero(flags & NO_STEP), per_chunk)
            steps -= int(np.count_nonzero(rows < kept[lanes]))
    return steps


def may_seal(info: SegmentInfo) -> bool:
    """Return whether this machine may seal a segment with a free lock.

    On a local file system, a free lock means that the writer is gone. On a shared file system, the locks of other
    machines are not visible, so this machine seals only its own segments.
    """
    return not is_shared(info.root.file_system) or info.machine == machine_id() or info.boot == boot_id()
