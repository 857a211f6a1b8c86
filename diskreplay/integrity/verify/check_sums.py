"""Checks the checksums of a sealed segment, and finds the rows in damaged blocks."""

import os
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.integrity.verify.check_attributes import Segment
from diskreplay.integrity.verify.documents import MAX_DOCUMENT_BYTES, check_content
from diskreplay.integrity.verify.files import after_zeros, checksum, joined, read_at
from diskreplay.segments.documents import layout

_RANGES_SHOWN = 3


def block_length(row_bytes: int) -> int:
    length = row_bytes
    while length * 2 <= layout.BLOCK_BYTES and length * 2 <= layout.BLOCK_ROWS * row_bytes:
        length *= 2
    return min(length, layout.BLOCK_BYTES)


class Blocks:
    """The checksums of a sealed segment's blocks, from the file ``durable/blocks``.

    A block is a part of a chunk file. All blocks of an array have the same length, except the last block of each file.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @cached_property
    def sums(self) -> dict[str, NDArray[np.uint32]]:
        """The checksums of blocks, by chunk file; incomplete if the file ``durable/blocks`` is short."""
        quiet = self._segment.files.quiet()  # `check_sums` reports the problems of this file
        data = quiet.read(self._segment.inside(layout.BLOCKS), self.nbytes) or b""
        found, at = {}, 0
        for name, nbytes, length in self._chunks():
            count = -(-nbytes // length)
            values = np.frombuffer(data[at : at + 4 * count], np.uint8)
            at += 4 * count
            # A stored value is the exclusive-or of two checksums: of the block, and of zeros of the block's length.
            if len(values) == 4 * count:
                zeros = np.full(count, after_zeros(0, length), np.uint32)
                zeros[-1] = after_zeros(0, nbytes - (count - 1) * length)
                found[name] = values.view("<u4") ^ zeros
        return found

    @property
    def nbytes(self) -> int:
        return sum(4 * -(-nbytes // length) for _, nbytes, length in self._chunks())

    def _chunks(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, size in bytes, bytes per block) for each chunk file that has a checksum."""
        segment = self._segment
        for path, array in sorted(segment.plan.arrays.items()):
            names = (name.removeprefix(f"{path}/") for name in segment.attributes.checksums if name.startswith(path))
            for number in sorted(number for name in names if (number := array.chunk_number(name)) is not None):
                name = f"{path}/{array.chunk_name(number)}"
                yield name, segment.chunk_bytes(path), self._length(path)

    def _length(self, path: str) -> int:
        is_raw = path not in self._segment.attributes.compressed
        return block_length(self._segment.plan.arrays[path].row_bytes) if is_raw else layout.BLOCK_BYTES

    def check(self) -> None:
        """Report chunk files whose joined block checksums differ from the checksum of the file."""
        segment, where = self._segment, self._segment.inside(layout.BLOCKS)
        for name, nbytes, length in self._chunks():
            sums = self.sums.get(name)
            if sums is None:
                segment.files.report("size", where, f"is shorter than its {self.nbytes} bytes")
                return
            crc = joined(sums, length, nbytes - (len(sums) - 1) * length)
            if crc != segment.attributes.checksums[name]:
                segment.files.report("checksum", where, f"does not match the checksum of {name}")

    def damage(self, name: str, fd: int) -> str:
        """Return in words which rows of a chunk file are in damaged blocks; empty if that is unknown."""
        sums, segment = self.sums.get(name), self._segment
        path, _, file = name.rpartition("/")
        if sums is None or path in segment.attributes.compressed:
            return ""
        array, per_chunk, nbytes = segment.plan.arrays[path], segment.chunk_rows[path], segment.chunk_bytes(path)
        length, first = self._length(path), (array.chunk_number(file) or 0) * per_chunk
        bad: list[tuple[int, int]] = []  # ranges of rows, counted through all lanes of the file
        for i, value in enumerate(sums.tolist()):
            count = min(length, nbytes - i * length)
            if crc32c(_read(fd, count, i * length)) != value:
                start, stop = i * length // array.row_bytes, -(-(i * length + count) // array.row_bytes)
                if bad and start <= bad[-1][1]:
                    start = bad.pop()[0]
                bad.append((start, stop))
        rows = segment.rows_of(path)
        ranges = [part for start, stop in bad for part in self._by_lane(start, stop, per_chunk, first, rows)]
        if not ranges:
            return ": no counted row" if bad else ""
        more = f" and {len(ranges) - _RANGES_SHOWN} more" if len(ranges) > _RANGES_SHOWN else ""
        return f": {', '.join(ranges[:_RANGES_SHOWN])}{more}"

    def _by_lane(self, start: int, stop: int, per_chunk: int, first: int, rows: NDArray[np.int64]) -> Iterator[str]:
        for lane in range(start // per_chunk, -(-stop // per_chunk)):
            low = max(start - lane * per_chunk, 0) + first
            high = min(min(stop - lane * per_chunk, per_chunk) + first, int(rows[lane]))
            if low < high:
                yield f"rows {low} to {high - 1} of lane {lane}" if high - low > 1 else f"row {low} of lane {lane}"


def _read(fd: int, count: int, at: int) -> bytes:
    try:
        return read_at(fd, count, at)
    except OSError:  # the disk cannot read this block
        return b""


def check_sums(segment: Segment, present: dict[str, set[int]], *, deep: bool) -> None:
    """Check that each file of a sealed segment has a checksum and matches it; chunks are read only with ``deep``."""
    files, sums, wanted = segment.files, segment.attributes.checksums, _wanted_sums(segment, present)
    for name in sorted(wanted - sums.keys()):
        files.report("checksum", segment.inside(name), "has no checksum in the sealed segment")
    reported = {problem.where for problem in files.problems}
    links: dict[str, bool] = {}
    blocks = Blocks(segment)
    for name in sorted(sums):
        folder = name.rpartition("/")[0]
        if not _is_safe(name):
            files.report(
                "metadata",
                segment.inside(layout.METADATA),
                f"has a checksum of {name!r:.80}, which is outside of the segment",
            )
        elif segment.inside(name) in reported or (folder in segment.plan.folders and name not in wanted):
            continue  # a problem of this file was reported
        elif (deep or not _is_chunk(segment, name)) and not _is_behind_link(segment, folder, links):
            _check_sum(segment, name, sums[name], blocks)
    _check_copy(segment)
    if deep and segment.inside(layout.BLOCKS) not in {problem.where for problem in files.problems}:
        blocks.check()


def _wanted_sums(segment: Segment, present: dict[str, set[int]]) -> set[str]:
    plan = segment.plan
    wanted = {f"{path}/{layout.METADATA}" for path in plan.folders}
    wanted |= {f"{name}/c.0" for name in layout.LANE_COUNTERS} | {layout.BLOCKS}
    wanted |= {f"{name}/c.0.0" for name in plan.tables} | ({layout.TABLES_COPY} if plan.tables else set())
    wanted |= {f"{path}/c.0" for path in plan.columns} if segment.attributes.episodes else set()
    wanted |= {layout.INDEXES_COPY} if segment.attributes.compressed else set()
    for path, chunks in present.items():
        needed = -(-segment.kept_of(path) // segment.chunk_rows[path])
        wanted |= {f"{path}/{plan.arrays[path].chunk_name(chunk)}" for chunk in chunks if chunk < needed}
    return wanted


def _check_copy(segment: Segment) -> None:
    """Check the copy of the segment's zarr.json. Repair uses this copy if the zarr.json is damaged."""
    document = segment.files.read(segment.inside(layout.METADATA), MAX_DOCUMENT_BYTES)
    where, detail = segment.inside(layout.DOCUMENT_COPY), "is not a copy of the segment's zarr.json"
    check_content(segment.files, where, document, "checksum", detail)


def _is_chunk(segment: Segment, name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return file != layout.METADATA and folder not in (
        *layout.LANE_COUNTERS,
        *segment.plan.tables,
        *segment.plan.columns,
    )


def _is_safe(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def _is_behind_link(segment: Segment, folder: str, known: dict[str, bool]) -> bool:
    if folder and folder not in known:
        known[folder] = os.path.islink(segment.files.path(segment.inside(folder))) or _is_behind_link(
            segment, folder.rpartition("/")[0], known
        )
    return bool(folder) and known[folder]


def _check_sum(segment: Segment, name: str, expected: int, blocks: Blocks) -> None:
    where = segment.inside(name)
    with segment.files.opened(where) as fd:
        if fd is None:
            return
        if checksum(fd) != expected:
            which = blocks.damage(name, fd) if name in blocks.sums else ""
            segment.files.report("checksum", where, f"does not match its checksum from sealing{which}")
        segment.files.on_read(os.fstat(fd).st_blocks * 512)
