"""Sealing: the end of a segment's life as something that changes. Every step may be repeated after a crash.

The order: rows that are no data are cut off or zeroed, shapes become exact, everything is synced, checksums are taken,
and only then `sealed` is written. A sync is one of the whole file system: a segment is thirty files and folders, and
waiting for each takes ten times as long. Only the background thread waits.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout, metadata
from diskreplay.format.commit import map_lane_counter
from diskreplay.format.durable import (
    boot_id,
    machine_id,
    punch_hole,
    sync_file,
    sync_file_system,
)
from diskreplay.format.mapping import open_regular
from diskreplay.format.root import Root
from diskreplay.format.segment import (
    SegmentInfo,
    chunk_nbytes,
    chunk_path,
    create_chunk,
    read_segment,
    row_bytes,
    set_rows,
)

_BLOCK = bytes(1 << 20)


def seal_segments(root: Root, numbers: list[int]) -> None:
    """Seal segments whose locks the caller holds and whose writer is gone or has left them."""
    infos = [read_segment(root, number) for number in numbers]
    infos = [info for info in infos if not info.sealed]
    for info in infos:
        rows = _settle_counters(root, info)
        for leaf in metadata.array_leaves(root.schema):
            _trim(root, info, leaf, rows)
    sync_file_system(root.path)
    for info in infos:
        _write_sealed_beside(root, info)
    sync_file_system(root.path)
    for info in infos:
        os.replace(_beside(info), info.path / layout.METADATA)  # from here on it may be evicted at any time
    sync_file_system(root.path)


def _beside(info: SegmentInfo) -> Path:
    # Inside an array's folder: zarr would warn of a file that it does not know beside the segment's own.
    return info.path / layout.COMMITTED / f".{layout.METADATA}"


def _write_sealed_beside(root: Root, info: SegmentInfo) -> None:
    """All rows are on the platter: say so in ``durable``, take the checksums, and prepare the sealed attributes."""
    committed, durable = (
        map_lane_counter(str(info.path / name), len(info.lanes), writable=True)
        for name in (layout.COMMITTED, layout.DURABLE)
    )
    durable[:] = committed
    sealed = dataclasses.replace(info, sealed=True, steps=count_steps(root, info), checksums=checksums(info.path))
    _beside(info).write_bytes(metadata.seal_document(root.templates[""], sealed.attributes()))


def _settle_counters(root: Root, info: SegmentInfo) -> NDArray[np.int64]:
    """Fix what is data: all that was committed, and the last observation of an episode that nobody ended."""
    committed, observed, durable = (
        map_lane_counter(str(info.path / name), len(info.lanes), writable=True) for name in layout.LANE_COUNTERS
    )
    if not info.shows_live_rows:
        # The machine booted, or this is a copy: rows beyond `durable` may be torn.
        committed[:] = observed[:] = durable
        for name in layout.LANE_COUNTERS:
            sync_file(info.path / name / "c.0")
    for lane in np.flatnonzero(observed > committed).tolist():
        _end_with_observation(root, info, lane, int(committed[lane]))
        committed[lane] += 1
    observed[:] = committed
    return committed.copy()


def _end_with_observation(root: Root, info: SegmentInfo, lane: int, row: int) -> None:
    """Make the observation at ``row`` the final one of a cut episode; a dead writer may have torn the other fields."""
    for leaf in metadata.array_leaves(root.schema):
        if leaf == "obs" or leaf.startswith("obs/"):
            continue
        chunk, at = divmod(row, info.chunk_rows[leaf])
        create_chunk(root, info, leaf, chunk)
        nbytes = row_bytes(root, leaf)
        flags = layout.OBSERVATION_ONLY | layout.TRUNCATED | layout.CUT
        data = bytes([flags]) if leaf == layout.DONE else bytes(nbytes)
        fd = os.open(chunk_path(root, info, leaf, chunk), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, data, (lane * info.chunk_rows[leaf] + at) * nbytes)
        finally:
            os.close(fd)


def _trim(root: Root, info: SegmentInfo, leaf: str, rows: NDArray[np.int64]) -> None:
    """Punch out what lies past each lane's rows, delete chunks past the longest lane, and make the shape exact."""
    per_chunk, width = info.chunk_rows[leaf], row_bytes(root, leaf)
    longest = int(rows.max())
    chunks = -(-longest // per_chunk)
    for chunk in range(chunks):
        fd = os.open(chunk_path(root, info, leaf, chunk), os.O_RDWR | os.O_CLOEXEC)
        try:
            kept = np.clip(rows - chunk * per_chunk, 0, per_chunk)
            for start, stop in _gaps(kept.tolist(), per_chunk):
                punch_hole(fd, start * width, stop * width)
        finally:
            os.close(fd)
    set_rows(root, info, leaf, longest)
    while os.path.exists(path := chunk_path(root, info, leaf, chunks)):
        os.unlink(path)
        chunks += 1
    for name in os.listdir(info.path / leaf):
        if name.startswith(".new-"):
            os.unlink(info.path / leaf / name)


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
    counter = layout.COMMITTED if info.shows_live_rows else layout.DURABLE
    committed = map_lane_counter(str(info.path / counter), len(info.lanes)).copy()
    per_chunk, nbytes = info.chunk_rows[layout.DONE], chunk_nbytes(root, info, layout.DONE)
    steps = 0
    for chunk in range(-(-int(committed.max()) // per_chunk)):
        fd = open_regular(chunk_path(root, info, layout.DONE, chunk), nbytes)
        try:
            rows = np.clip(committed - chunk * per_chunk, 0, per_chunk).tolist()
            steps += sum(_count_in_lane(fd, lane * per_chunk, count) for lane, count in enumerate(rows))
        finally:
            os.close(fd)
    return steps


def _count_in_lane(fd: int, start: int, rows: int) -> int:
    steps = 0
    for at in range(0, rows, len(_BLOCK)):  # a block at a time: a collector stays small
        flags = np.frombuffer(os.pread(fd, min(rows - at, len(_BLOCK)), start + at), np.uint8)
        steps += int(np.count_nonzero(flags & (layout.OBSERVATION_ONLY | layout.END_MARKER) == 0))
    return steps


def checksums(path: Path) -> dict[str, int]:
    """Return the CRC-32C of every file of a segment but its own zarr.json and its lock, by relative path."""
    sums = {}
    for folder, _, files in os.walk(path):
        for name in sorted(files):
            relative = os.path.relpath(os.path.join(folder, name), path)
            if relative != layout.METADATA and name != layout.LOCK and not name.startswith("."):
                sums[relative] = file_checksum(os.path.join(folder, name))
    return sums


def file_checksum(path: str) -> int:
    """Return the CRC-32C of a file, read by position; holes are not read."""
    crc = google_crc32c.Checksum()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size, at = os.fstat(fd).st_size, 0
        while at < size:
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole up to the end
                data = size
            _update_zeros(crc, data - at)
            at = data
            hole = os.lseek(fd, at, os.SEEK_HOLE) if at < size else size
            while at < hole:
                block = os.pread(fd, min(hole - at, len(_BLOCK)), at)
                crc.update(block)
                at += len(block)
    finally:
        os.close(fd)
    return int.from_bytes(crc.digest(), "big")


def _update_zeros(crc: Any, count: int) -> None:
    while count > 0:
        crc.update(_BLOCK[:count])
        count -= len(_BLOCK)


def may_seal(info: SegmentInfo) -> bool:
    """Whether this machine may seal a dead writer's segment: it was written here, or by an earlier boot of this one."""
    return info.machine == machine_id() or info.boot == boot_id()
