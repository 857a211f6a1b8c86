"""The inner chunks of a compressed array that may be damaged: each of them is whole, or lost.

Without its index a file is of no use. So a pack has a copy of the indexes of its arrays, one behind the other in the
order of their paths.
"""

import os
from contextlib import suppress
from functools import cached_property

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.files.mapping import opened
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.shards import CRC_BYTES, NOTHING, Ints, index_bytes


def indexes_of(info: SegmentInfo) -> bytes:
    """Return what the copy of the indexes of a pack has to be; nothing where one of them is damaged."""
    parts = [InnerChunks(info, leaf).own_index for leaf in sorted(info.compressed)]
    return b"".join(parts) if all(parts) else b""


class InnerChunks:
    """The inner chunks of an array of a pack, read with checks."""

    def __init__(self, info: SegmentInfo, leaf: str) -> None:
        self._info, self._leaf, self._how = info, leaf, info.compressed[leaf]
        self.rows = self._how.rows
        self.count = info.chunk_rows[leaf] // self.rows

    @cached_property
    def own_index(self) -> bytes:
        """The index in the file itself; nothing where that does not fit its checksum."""
        size = index_bytes(self._info.chunk_rows[self._leaf], self.rows)
        return _whole_index(self._read(self._how.nbytes - size, size))

    @cached_property
    def _index(self) -> Ints | None:
        """Offset and bytes of each; None where neither the index nor its copy is whole."""
        data = self.own_index or self._copied_index()
        if not data:
            return None
        entries = np.frombuffer(data[:-CRC_BYTES], "<u8").reshape(-1, 2)
        there = (entries[:, 0] != NOTHING) & (entries < self._how.nbytes).all(axis=1)
        index: Ints = np.where(there[:, None], entries, 0).astype(np.int64)
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
        """Return an inner chunk, compressed; nothing where it is of zeros, None where it is damaged."""
        if self._index is None:
            return None
        offset, nbytes = self._index[number].tolist()
        if nbytes <= CRC_BYTES:
            return b""
        data = self._read(offset, nbytes)
        frame, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        return frame if len(data) == nbytes and int(crc32c(frame)) == int.from_bytes(crc, "little") else None

    def lost_rows(self) -> list[tuple[int, int]]:
        """Return the rows of those that are damaged, first and the one after the last."""
        lost = [number for number in range(self.count) if self.frame(number) is None]
        return layout.merge_ranges([(number * self.rows, (number + 1) * self.rows) for number in lost])


def _whole_index(data: bytes) -> bytes:
    entries, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    return data if entries and int(crc32c(entries)) == int.from_bytes(crc, "little") else b""
