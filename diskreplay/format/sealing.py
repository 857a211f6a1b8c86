"""Sealing: the end of a segment's life as something that changes. Every step may be repeated after a crash.

The order: rows that are no data are cut off or zeroed, shapes become exact, checksums are taken, everything is synced,
and only then `sealed` is written. A sync is one of the whole file system: a segment is thirty files and folders, and
waiting for each takes ten times as long. Only the background thread waits.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.blocks import BlockSums
from diskreplay.format.commit import map_lane_counter, read_lane_counter, write_lane_counter
from diskreplay.format.durable import (
    boot_id,
    machine_id,
    punch_hole,
    read_file,
    storage_error,
    sync_file,
    sync_file_system,
    write_atomic,
    write_file,
)
from diskreplay.format.mapping import open_regular
from diskreplay.format.metadata import RowArray
from diskreplay.format.root import Root
from diskreplay.format.segment import (
    SegmentInfo,
    chunk_nbytes,
    chunk_path,
    open_chunk,
    refuse_links,
    row_bytes,
    rows_document,
    unfinished_chunk_path,
)

_BLOCK = bytes(1 << 20)
_PUBLISHING = (layout.COMMITTED, layout.OBSERVED)


@dataclass
class _Settled:
    """A segment whose files are as they will stay, but for ``durable`` and its own attributes."""

    info: SegmentInfo
    rows: NDArray[np.int64]
    checksums: dict[str, int]
    steps: int = 0
    blocks: BlockSums = field(default_factory=BlockSums)


def seal_segments(root: Root, infos: Sequence[SegmentInfo]) -> None:
    """Seal segments whose locks the caller holds and whose writer is gone or has left them; none is sealed yet.

    Raises
    ------
    StorageFull
        There is no room for their documents; the call may be repeated.
    OSError
        The system's. What the disk holds is unknown after a sync that failed, also when a later one does not.
    """
    with _in_need_of_room(root):
        settled = [_settle(root, info) for info in infos]
    sync_file_system(root.path)
    with _in_need_of_room(root):
        for segment in settled:
            _write_sealed_beside(root, segment)
    sync_file_system(root.path)
    with _in_need_of_room(root):
        for info in infos:
            os.replace(_beside(info), f"{info.path}/{layout.METADATA}")  # from here on it may be evicted at any time
    sync_file_system(root.path)


@contextmanager
def _in_need_of_room(root: Root) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if (full := storage_error(error, root.path)) is error:
            raise
        raise full from error


def _settle(root: Root, info: SegmentInfo) -> _Settled:
    refuse_links(info.path, root.blueprint.paths)
    segment = _Settled(info, *_settle_counters(root, info))
    for path, document in root.blueprint.documents(len(info.lanes), info.chunk_rows, None):
        if array := root.blueprint.arrays.get(path):
            _trim(root, segment, array)
        else:
            name = f"{path}/{layout.METADATA}"
            # A power cut may have left one empty that never changed since it was made.
            if not os.path.exists(f"{info.path}/{name}") or read_file(f"{info.path}/{name}") != document:
                write_atomic(info.path / name, document)
            segment.checksums[name] = google_crc32c.value(document)
    segment.checksums[layout.BLOCKS] = segment.blocks.write(str(info.path))
    return segment


def _beside(info: SegmentInfo) -> str:
    # Inside an array's folder: zarr would warn of a file that it does not know beside the segment's own.
    return f"{info.path}/{layout.COMMITTED}/.{layout.METADATA}"


def _write_sealed_beside(root: Root, segment: _Settled) -> None:
    """All rows are on the platter: say so in ``durable``, and prepare the sealed attributes."""
    info = segment.info
    for name in (layout.OBSERVED, layout.DURABLE):
        write_lane_counter(f"{info.path}/{name}", segment.rows)
    sealed = dataclasses.replace(
        info,
        sealed=True,
        steps=segment.steps - info.lost.surplus,
        checksums=segment.checksums,
        sealed_at=round(time.time(), 3),
    )
    document = root.blueprint.segment_document(sealed.attributes())
    write_file(_beside(info), document)
    write_file(f"{info.path}/{layout.DOCUMENT_COPY}", document)


def _settle_counters(root: Root, info: SegmentInfo) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Fix what is data: all that was committed, and the last observation of an episode that nobody ended.

    Return the rows, and the checksums of the counters as they will be.
    """
    lanes = len(info.lanes)
    committed, observed = (read_lane_counter(f"{info.path}/{name}", lanes) for name in _PUBLISHING)
    if not info.shows_live_rows or (observed > committed).any():
        committed, observed = (map_lane_counter(f"{info.path}/{name}", lanes, writable=True) for name in _PUBLISHING)
        if not info.shows_live_rows:
            # The machine booted, or this is a copy: rows beyond `durable` may be torn.
            committed[:] = observed[:] = read_lane_counter(f"{info.path}/{layout.DURABLE}", lanes)
            for name in _PUBLISHING:
                sync_file(info.path / name / "c.0")
        for lane in np.flatnonzero(observed > committed).tolist():
            _end_with_observation(root, info, lane, int(committed[lane]))
            committed[lane] += 1
    # All three say the same in the end: any one of them can be restored from another.
    crc = google_crc32c.value(committed.tobytes())
    return committed.copy(), {f"{name}/c.0": crc for name in layout.LANE_COUNTERS}


def _end_with_observation(root: Root, info: SegmentInfo, lane: int, row: int) -> None:
    """Make the observation at ``row`` the final one of a cut episode; a dead writer may have torn the other fields."""
    for leaf in root.blueprint.arrays:
        if leaf == "obs" or leaf.startswith("obs/"):
            continue
        chunk, at = divmod(row, info.chunk_rows[leaf])
        nbytes = row_bytes(root, leaf)
        flags = layout.OBSERVATION_ONLY | layout.TRUNCATED | layout.CUT
        data = bytes([flags]) if leaf == layout.DONE else bytes(nbytes)
        fd = open_chunk(root, info, leaf, chunk)
        try:
            os.pwrite(fd, data, (lane * info.chunk_rows[leaf] + at) * nbytes)
        finally:
            os.close(fd)


def _trim(root: Root, segment: _Settled, array: RowArray) -> None:
    """Punch out what lies past each lane's rows, delete chunks past the longest lane, and make the shape exact.

    Takes the checksums of what stays, and counts the steps.
    """
    info, rows, sums = segment.info, segment.rows, segment.checksums
    per_chunk, longest = info.chunk_rows[array.path], int(rows.max())
    chunks = -(-longest // per_chunk)
    for chunk in range(chunks):
        kept = _rows_inside(rows, chunk, per_chunk)
        fd = os.open(chunk_path(root, info, array.path, chunk), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for start, stop in _gaps(kept, per_chunk):
                punch_hole(fd, start * array.row_bytes, stop * array.row_bytes)
            sums[f"{array.path}/{array.chunk_key(chunk)}"] = segment.blocks.add(array, chunk, fd)
            if array.path == layout.DONE:
                segment.steps += _count_in_chunk(fd, kept, per_chunk)
        finally:
            os.close(fd)
    name = f"{array.path}/{layout.METADATA}"
    document = rows_document(root, info, array.path, longest)
    if not info.shows_live_rows:
        _remove_unknown(info, array, chunks)
    # The shape reaches over every chunk that was begun: where it is exact, nothing lies behind.
    if read_file(f"{info.path}/{name}") != document:
        _remove_chunks(root, info, array.path, chunks)
        write_atomic(info.path / name, document)
    sums[name] = google_crc32c.value(document)


def _rows_inside(rows: NDArray[np.int64], chunk: int, per_chunk: int) -> list[int]:
    """Return how many rows of each lane one chunk holds."""
    return np.minimum(np.maximum(rows - chunk * per_chunk, 0), per_chunk).tolist()


def _remove_chunks(root: Root, info: SegmentInfo, leaf: str, chunk: int) -> None:
    """Remove the chunks from ``chunk`` on and, as they are created in order, the one after them if it was begun."""
    with suppress(FileNotFoundError):
        while True:
            os.unlink(chunk_path(root, info, leaf, chunk))
            chunk += 1
    with suppress(FileNotFoundError):
        os.unlink(unfinished_chunk_path(info, leaf, chunk))


def _remove_unknown(info: SegmentInfo, array: RowArray, chunks: int) -> None:
    """Remove all but the document and the first chunks: after a loss of power, some of what was begun may be there."""
    known = {layout.METADATA, *map(array.chunk_key, range(chunks))}
    for name in os.listdir(info.path / array.path):
        if name not in known and name.startswith((".", "c.")):
            os.unlink(info.path / array.path / name)


def _gaps(kept: list[int], per_chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows of one chunk, lane after lane, that are no data, neighbours merged."""
    start = stop = 0
    for lane, count in enumerate(kept):
        first, last = lane * per_chunk + count, (lane + 1) * per_chunk
        if first == last:
            continue
        if first != stop:
            if stop > start:
                yield start, stop
            start = first
        stop = last
    if stop > start:
        yield start, stop


def count_steps(root: Root, info: SegmentInfo) -> int:
    """Count the steps of a segment that can be trusted: its rows without observations and markers."""
    rows = info.map_trusted()[1].copy()
    per_chunk, nbytes = info.chunk_rows[layout.DONE], chunk_nbytes(root, info, layout.DONE)
    steps = 0
    for chunk in range(-(-int(rows.max()) // per_chunk)):
        fd = open_regular(chunk_path(root, info, layout.DONE, chunk), nbytes)
        try:
            steps += _count_in_chunk(fd, _rows_inside(rows, chunk, per_chunk), per_chunk)
        finally:
            os.close(fd)
    return steps - info.lost.surplus


def _count_in_chunk(fd: int, kept: list[int], per_chunk: int) -> int:
    return sum(_count_in_lane(fd, lane * per_chunk, count) for lane, count in enumerate(kept))


def _count_in_lane(fd: int, start: int, rows: int) -> int:
    steps = 0
    for at in range(0, rows, len(_BLOCK)):  # a block at a time: a collector stays small
        flags = np.frombuffer(os.pread(fd, min(rows - at, len(_BLOCK)), start + at), np.uint8)
        steps += int(np.count_nonzero(flags & (layout.OBSERVATION_ONLY | layout.END_MARKER) == 0))
    return steps


def may_seal(info: SegmentInfo) -> bool:
    """Whether this machine may seal a dead writer's segment: it was written here, or by an earlier boot of this one."""
    return info.machine == machine_id() or info.boot == boot_id()
