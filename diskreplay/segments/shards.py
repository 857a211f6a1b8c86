"""Compressed chunks: zarr's codec ``sharding_indexed``, whose inner chunks are groups of rows compressed by zstd.

An inner chunk of zeros is not stored. docs/format.md describes the files.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.errors import FormatError, MissingExtra
from diskreplay.ids import Ints
from diskreplay.segments.documents import layout
from diskreplay.segments.files.durable import write_at
from diskreplay.segments.files.mapping import Mapping, map_file

LEAST_ROW_BYTES = 256
"""The minimum size of a row in bytes for a compressed field: shorter rows are read faster without compression."""

# The approximate number of bytes of an inner chunk before compression, and its maximum number of rows. The limits are
# small, because reading one row decompresses a whole inner chunk.
_INNER_BYTES, _MOST_INNER_ROWS = 64 << 10, 32
CRC_BYTES, _ENTRY_BYTES = 4, 16
NOTHING = np.uint64((1 << 64) - 1)


class Compressed(NamedTuple):
    """The compression of a pack's array: ``rows`` rows per inner chunk, the level of zstd, and the size of the file."""

    rows: int
    level: int
    nbytes: int

    @classmethod
    def read(cls, value: Any) -> "Compressed":
        """Return the compression that an entry ``value`` of a zarr.json describes.

        Raises KeyError, TypeError or ValueError if ``value`` is invalid.
        """
        found = cls(*(value[name] for name in cls._fields))
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in found):
            raise TypeError(f"compressed is {value!r:.80}")
        if found.rows < 1 or found.rows & (found.rows - 1) or found.nbytes < CRC_BYTES:
            raise ValueError(f"compressed is {value!r:.80}")
        return found

    def is_possible(self, chunk_rows: int, row_bytes: int) -> bool:
        index, inner = _ENTRY_BYTES * (chunk_rows // self.rows), self.rows * row_bytes
        return index <= layout.MAX_INDEX_BYTES and inner <= max(layout.MAX_INNER_BYTES, row_bytes)


def is_wide(row_bytes: int) -> bool:
    return row_bytes >= LEAST_ROW_BYTES


def inner_rows(row_bytes: int) -> int:
    return min(_MOST_INNER_ROWS, layout.floor_power_of_two(_INNER_BYTES // row_bytes))


def index_bytes(chunk_rows: int, rows: int) -> int:
    return _ENTRY_BYTES * (chunk_rows // rows) + CRC_BYTES


def most_frame_bytes(inner_bytes: int) -> int:
    """Return a bound for the bytes of a compressed inner chunk; zstd adds little to bytes that it cannot compress."""
    return 2 * inner_bytes + 1024


def codec(rows: int, level: int, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": level, "checksum": False}}
    configuration = {
        "chunk_shape": [1, rows, *shape],
        "codecs": [plain, zstd, {"name": "crc32c"}],
        "index_codecs": [plain, {"name": "crc32c"}],
        "index_location": "end",
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


def zstd() -> Any:
    with MissingExtra.raised_for("a compressed field", "zstd"):
        import zstandard
    return zstandard


class ShardWriter:
    """Writes the file of a compressed array; rows are added in ascending order, and omitted rows are zeros."""

    def __init__(self, fd: int, chunk_rows: int, row_bytes: int, rows: int, level: int) -> None:
        self._fd, self._row_bytes = fd, row_bytes
        self._compressor = zstd().ZstdCompressor(level=level)
        self._index = np.full((chunk_rows // rows, 2), NOTHING, "<u8")
        self._inner, self._number, self._end = np.zeros(rows * row_bytes, np.uint8), 0, 0

    def write(self, row: int, data: NDArray[np.uint8]) -> None:
        at, start = row * self._row_bytes, 0
        while start < len(data):
            number, inside = divmod(at + start, len(self._inner))
            if number != self._number:
                self._finish_inner()
                self._number = number
            count = min(len(data) - start, len(self._inner) - inside)
            self._inner[inside : inside + count] = data[start : start + count]
            start += count

    def _finish_inner(self) -> None:
        if self._inner.any():
            self.put(self._number, self._compressor.compress(self._inner.data))
            self._inner[:] = 0

    def put(self, number: int, frame: bytes) -> None:
        data = frame + int(crc32c(frame)).to_bytes(CRC_BYTES, "little")
        self._index[number] = self._end, len(data)
        write_at(self._fd, data, self._end)
        self._end += len(data)

    def finish(self) -> int:
        self._finish_inner()
        index = self._index.tobytes()
        data = index + int(crc32c(index)).to_bytes(CRC_BYTES, "little")
        write_at(self._fd, data, self._end)
        return self._end + len(data)


class Shard:
    """The mapped file of a compressed array. Any thread may use this object.

    ``offsets`` and ``sizes`` are the positions and sizes of the inner chunks in bytes, without checksums. An inner
    chunk of zeros has offset 0 and size 0.
    """

    def __init__(self, path: str, chunk_rows: int, row_bytes: int, compressed: Compressed) -> None:
        self.path, self.inner_bytes = path, compressed.rows * row_bytes
        self.mapping: Mapping = map_file(path, compressed.nbytes)
        self._bytes = self.mapping.array(np.uint8, (compressed.nbytes,))
        count = chunk_rows // compressed.rows
        start = compressed.nbytes - index_bytes(chunk_rows, compressed.rows)
        index = self._bytes[max(start, 0) : compressed.nbytes - CRC_BYTES]
        if start < 0 or int(crc32c(index.data)) != int.from_bytes(self._bytes[-CRC_BYTES:].tobytes(), "little"):
            raise FormatError(f"{path}: its index does not fit its checksum; run `diskreplay repair`")
        offsets, sizes = index.view("<u8").reshape(count, 2).T
        there = offsets != NOTHING
        most = min(start, most_frame_bytes(self.inner_bytes))
        if (sizes[there] <= CRC_BYTES).any() or (offsets[there] > start).any() or (sizes[there] > most).any():
            raise FormatError(f"{path}: its index holds impossible values; run `diskreplay repair`")
        self.offsets: Ints = np.where(there, offsets, 0).astype(np.int64)
        self.sizes: Ints = np.where(there, sizes - np.uint64(CRC_BYTES), 0).astype(np.int64)
        if (self.offsets + self.sizes + CRC_BYTES > start).any() and there.any():
            raise FormatError(f"{path}: its index holds impossible values; run `diskreplay repair`")

    def decompress(self, numbers: Ints, out: NDArray[np.uint8]) -> None:
        """Decompress the inner chunks ``numbers``, one after another, into ``out``, which has exactly their total size.

        ``numbers`` must have no inner chunk of zeros, because such chunks are not stored. The GIL is released during
        the call. Raises FormatError if an inner chunk does not match its checksum or cannot be decompressed.
        """
        starts, view = self.offsets[numbers], self._bytes.data
        stops, found = starts + self.sizes[numbers], list[memoryview]()
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            frame = view[start:stop]
            # The frames have no zstd checksum: most damaged frames would decompress to wrong bytes without an error.
            if int(crc32c(frame)) != int.from_bytes(view[stop : stop + CRC_BYTES], "little"):
                problem = "an inner chunk does not fit its checksum"
                raise FormatError(f"{self.path} is damaged ({problem}); run `diskreplay repair`")
            found.append(frame)
        frames, library = b"".join(found), zstd()
        reader = library.ZstdDecompressor().stream_reader(frames, read_across_frames=True)
        try:
            if reader.readinto(out.data) == len(out) and not reader.read(1):
                return
            problem = "an inner chunk does not decompress to its full size"
        except library.ZstdError as error:
            problem = str(error)
        raise FormatError(f"{self.path} is damaged ({problem}); run `diskreplay repair`")

    def rows(self, first: int, stop: int, row_bytes: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yield the rows ``first`` to ``stop`` in parts, as (first row, bytes); inner chunks of zeros are left out.

        Errors as for `decompress`.
        """
        per_inner = self.inner_bytes // row_bytes
        for number, inside, count in layout.split_range(first, stop, per_inner):
            if self.sizes[number]:
                data = np.empty(self.inner_bytes, np.uint8)
                self.decompress(np.array([number]), data)
                yield number * per_inner + inside, data[inside * row_bytes : (inside + count) * row_bytes]
