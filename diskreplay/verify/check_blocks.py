"""The checksums of a sealed segment's blocks: whether they fit those of the files, and which rows are damaged."""

import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.verify.check_attributes import Segment
from diskreplay.verify.crc import after_zeros, joined
from diskreplay.verify.files import Files, read_at

_RANGES_TOLD = 3


def block_length(row_bytes: int) -> int:
    """Return the bytes of a block of an array with rows of so many bytes."""
    length = row_bytes
    while length * 2 <= layout.BLOCK_BYTES and length * 2 <= layout.BLOCK_ROWS * row_bytes:
        length *= 2
    return min(length, layout.BLOCK_BYTES)


class Blocks:
    """What ``durable/blocks`` of a sealed segment says of each chunk file."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @cached_property
    def sums(self) -> dict[str, NDArray[np.uint32]]:
        """The checksums of each chunk file's blocks, by its name below the segment; none where the file is short."""
        scratch = Files(self._segment.files.root)  # who checks the file itself reports of it
        data = scratch.read(self._segment.inside(layout.BLOCKS), self.nbytes) or b""
        found, at = {}, 0
        for name, nbytes, length in self._chunks():
            count = -(-nbytes // length)
            values = np.frombuffer(data[at : at + 4 * count], np.uint8)
            at += 4 * count
            if len(values) == 4 * count:  # exclusive-or the checksums of as many zeros
                zeros = np.full(count, after_zeros(0, length), np.uint32)
                zeros[-1] = after_zeros(0, nbytes - (count - 1) * length)
                found[name] = values.view("<u4") ^ zeros
        return found

    @property
    def nbytes(self) -> int:
        """How long the file has to be."""
        return sum(4 * -(-nbytes // length) for _, nbytes, length in self._chunks())

    def _chunks(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name and the bytes of each chunk file that has a checksum, and the length of its blocks."""
        segment = self._segment
        for path, array in sorted(segment.plan.arrays.items()):
            form = re.compile(re.escape(path) + r"/c\.0\.(0|[1-9][0-9]{0,17})" + r"\.0" * len(array.shape))
            matches = [match for name in segment.attributes.checksums if (match := form.fullmatch(name))]
            nbytes = segment.attributes.lanes * segment.attributes.chunk_rows[path] * array.row_bytes
            for match in sorted(matches, key=lambda match: int(match[1])):
                yield match[0], nbytes, block_length(array.row_bytes)

    def check(self) -> None:
        """Report chunk files whose blocks say something else than the checksum of the whole file."""
        segment, where = self._segment, self._segment.inside(layout.BLOCKS)
        for name, nbytes, length in self._chunks():
            sums = self.sums.get(name)
            if sums is None:
                segment.files.report("size", where, f"is shorter than the {self.nbytes} bytes that it has to be")
                return
            crc = joined(sums, length, nbytes - (len(sums) - 1) * length)
            if crc != segment.attributes.checksums[name]:
                segment.files.report("checksum", where, f"does not fit the checksum of {name}")

    def damage(self, name: str, fd: int) -> str:
        """Say which rows of a chunk file are in blocks that do not fit; nothing where that cannot be told."""
        sums, segment = self.sums.get(name), self._segment
        if sums is None:
            return ""
        path, _, file = name.rpartition("/")
        array, per_chunk = segment.plan.arrays[path], segment.attributes.chunk_rows[path]
        length, nbytes = block_length(array.row_bytes), segment.attributes.lanes * per_chunk * array.row_bytes
        first = int(file.split(".")[2]) * per_chunk
        bad: list[tuple[int, int]] = []  # of the rows of all lanes, one lane after the other
        for i, value in enumerate(sums.tolist()):
            count = min(length, nbytes - i * length)
            if crc32c(_read(fd, count, i * length)) != value:
                start, stop = i * length // array.row_bytes, -(-(i * length + count) // array.row_bytes)
                if bad and start <= bad[-1][1]:
                    start = bad.pop()[0]
                bad.append((start, stop))
        ranges = [part for start, stop in bad for part in self._by_lane(start, stop, per_chunk, first)]
        if not ranges:
            return ": no row that counts" if bad else ""
        more = f" and {len(ranges) - _RANGES_TOLD} more" if len(ranges) > _RANGES_TOLD else ""
        return f": {', '.join(ranges[:_RANGES_TOLD])}{more}"

    def _by_lane(self, start: int, stop: int, per_chunk: int, first: int) -> Iterator[str]:
        for lane in range(start // per_chunk, -(-stop // per_chunk)):
            low = max(start - lane * per_chunk, 0) + first
            high = min(min(stop - lane * per_chunk, per_chunk) + first, int(self._segment.rows[lane]))
            if low < high:
                yield f"rows {low} to {high - 1} of lane {lane}" if high - low > 1 else f"row {low} of lane {lane}"


def _read(fd: int, count: int, at: int) -> bytes:
    try:
        return read_at(fd, count, at)
    except OSError:  # the disk refuses this part
        return b""
