"""Check dtypes, sizes and codecs in zarr's metadata files, .zarray and zarr.json, before zarr reads an array.

zarr creates the codecs that a metadata file names. Some codecs, such as pickle, run code. So this module accepts only
dtypes of numbers, the codecs in its lists, and codecs of the library imagecodecs. These codecs decode numbers and do
nothing else.
"""

import bz2
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from diskreplay import FormatError
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.foreign import DTYPES, NUMBERS, check_chunks, check_claim, check_document, check_memory

Json = Any
_Codec = tuple[str, Mapping[str, Json]]  # the name and the configuration of a codec

_ARRAY_2, _DOCUMENT_3 = ".zarray", "zarr.json"
_DOCUMENTS = (_ARRAY_2, ".zgroup", _DOCUMENT_3)
_MOST_AXES, _LARGEST = 32, 1 << 48
_COMPRESSORS = {"blosc", "zstd", "lz4", "zlib", "gzip", "bz2"}
_FILTERS = {"shuffle", "delta", "crc32", "crc32c", "adler32", "fletcher32"}
_IMAGES = "imagecodecs_"  # codecs of the library imagecodecs; zarr uses them only if the program registered them
_OF_NUMCODECS = "numcodecs."
_SHARDS = "sharding_indexed"
_INDEX: list[_Codec] = [("bytes", {"endian": "little"}), ("crc32c", {})]
# A compressed chunk takes at most twice the bytes of the uncompressed chunk, plus this number of bytes.
_OVERHEAD = 64 << 10
_ZSTD_FRAME, _ZSTD_BLOCK, _BLOSC_HEADER, _CHECKSUMS = 0xFD2FB528, 128 << 10, 16, 64
_NO_CHUNK = (1 << 64) - 1  # offset and length of an omitted chunk in the index of a shard


class Shards(NamedTuple):
    """The division of a shard into ``num_chunks`` chunks.

    An index of ``index_nbytes`` bytes, at the start or the end of a shard, has the offset and the length of each chunk.
    """

    num_chunks: int
    index_nbytes: int
    is_first: bool

    def chunks(self, shard: memoryview) -> Iterator[memoryview | None]:
        """Yield the chunks of a shard; None if the index or a chunk is incomplete."""
        if len(shard) < self.index_nbytes:
            yield None
            return
        start = 0 if self.is_first else len(shard) - self.index_nbytes
        for offset, length in np.frombuffer(shard, "<u8", 2 * self.num_chunks, start).reshape(-1, 2).tolist():
            if (offset, length) != (_NO_CHUNK, _NO_CHUNK):
                yield shard[offset : offset + length] if offset + length <= len(shard) else None


class Layout(NamedTuple):
    """The sizes and the compressor of an array, as its .zarray or zarr.json declares them.

    Attributes
    ----------
    nbytes, chunk_nbytes : int
        ``nbytes`` is the size of the array in bytes, without compression. ``chunk_nbytes`` is the size of a chunk, or
        of a shard if the array has shards.
    compressor : str, optional
        The codec that compressed the chunks. None: the chunks are not compressed.
    most : int
        The largest number of bytes to which a compressed chunk may unpack. This number may differ from the size of a
        chunk, since filters may add a checksum or change the dtype.
    shards : Shards, optional
        The division of each shard into chunks. None: the array has no shards, and each file is a chunk.
    """

    nbytes: int
    chunk_nbytes: int
    compressor: str | None
    most: int
    shards: Shards | None = None

    @property
    def file_nbytes(self) -> int:
        """The largest accepted size of a file (a chunk or a shard), in bytes."""
        return 2 * self.most * (self.shards.num_chunks if self.shards else 1) + _OVERHEAD

    def may_unpack(self, file: memoryview) -> bool:
        """Tell whether a file is complete, and each of its chunks unpacks to at most ``most`` bytes.

        The check reads the size in the header of each chunk. The headers of zlib, gzip and bz2 have no size, so the
        check unpacks up to ``most`` + 1 bytes of such a chunk.
        """
        chunks = [file] if self.shards is None else self.shards.chunks(file)
        return len(file) <= self.file_nbytes and all(data is not None and self._fits(data) for data in chunks)

    def _fits(self, data: memoryview) -> bool:
        most = self.most
        if len(data) > 2 * most + _OVERHEAD:
            return False
        if self.compressor == "blosc":  # blosc would read as far as the chunk's header says, even beyond the chunk
            is_whole = len(data) >= _BLOSC_HEADER and int.from_bytes(data[12:16], "little") <= len(data)
            return is_whole and int.from_bytes(data[4:8], "little") <= most
        if self.compressor == "lz4":
            return int.from_bytes(data[:4], "little") <= most
        if self.compressor == "zstd":
            return _zstd_size(data) <= 2 * most  # `_zstd_size` may return too large a number
        make = _STREAMS.get(self.compressor or "")
        return make is None or _stream_fits(make, data, most)


class Documents:
    """The metadata files, .zarray and zarr.json, of the arrays in a zarr group: a folder or an open zip file.

    ``place`` is the path of the folder or zip file. Its files have ``stored`` bytes in all. `check_files` has checked
    the files. ``archive`` is None for a folder.
    """

    def __init__(self, place: Path, archive: zipfile.ZipFile | None, stored: int) -> None:
        self._place, self._archive, self._stored = place, archive, stored
        if archive is not None:
            check_claim(sum(info.file_size for info in archive.infolist()), stored, str(place))
            for info in archive.infolist():
                check_document(f"{place}: {info.filename}", info.file_size)

    def members(self, group: str) -> list[str]:
        if self._archive is None:
            folder = self._place / group
            names = os.listdir(folder) if folder.is_dir() else []
            return sorted(name for name in names if any((folder / name / each).is_file() for each in _DOCUMENTS))
        parts = [name.split("/") for name in self._archive.namelist() if name.startswith(f"{group}/")]
        return sorted({part[1] for part in parts if len(part) == 3 and part[2] in _DOCUMENTS})

    def check(self, name: str) -> Layout | None:
        """Check the metadata files of an array, such as "data/img", and return the array's layout.

        The result is None if the array has no metadata files.
        """
        if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
            raise FormatError(f"{self._place}: {name!r} cannot be the name of an array")
        found = None
        for document, check in ((_ARRAY_2, self._check_2), (_DOCUMENT_3, self._check_3)):
            for data in self._read(f"{name}/{document}"):
                try:
                    content = parse_json(data)
                except ValueError as error:
                    raise FormatError(f"{self._place}: {name}/{document} is not JSON: {error}") from None
                if not isinstance(content, dict):
                    raise FormatError(f"{self._place}: {name}/{document} is not a JSON object")
                if content.get("node_type") != "group":
                    found = check(name, content)
        return found

    def _read(self, name: str) -> list[bytes]:
        """Return the contents of all files called ``name``.

        A zip file may have several such files. All of them must be checked, since zarr may read any one of them.
        """
        if self._archive is None:
            file = self._place / name
            if not file.is_file():
                return []
            return [file.read_bytes()]
        return [self._archive.read(info) for info in self._archive.infolist() if info.filename == name]

    def _check_2(self, name: str, document: Mapping[str, Json]) -> Layout:
        filters, compressor = document.get("filters") or [], document.get("compressor")
        codecs = [*(filters if isinstance(filters, list) else [filters]), *([compressor] if compressor else [])]
        named: list[_Codec] = []
        for each in codecs:
            settings = dict(each) if isinstance(each, Mapping) else {"id": each}
            named.append((str(settings.pop("id", None)), settings))
        self._check_codecs(name, named)
        return self._layout(
            name, self._dtype(name, document.get("dtype")), document.get("shape"), document.get("chunks"), named
        )

    def _check_3(self, name: str, document: Mapping[str, Json]) -> Layout:
        codecs, shard = self._named(name, document.get("codecs")), None
        if _SHARDS in dict(codecs):
            (_, shard), *around = codecs
            if around:
                raise self._refused(name, "has codecs around its shards")
            codecs = self._named(name, shard.get("codecs", []))
        self._check_codecs(name, codecs)
        kind = document.get("data_type")
        if not isinstance(kind, str) or kind not in DTYPES:
            raise self._refused(name, f"is of the dtype {kind!r:.80}")
        grid = document.get("chunk_grid")
        is_regular = isinstance(grid, Mapping) and grid.get("name") == "regular"
        found = grid.get("configuration") if isinstance(grid, Mapping) and is_regular else None
        chunks = found.get("chunk_shape") if isinstance(found, Mapping) else None
        return self._layout(name, np.dtype(kind), document.get("shape"), chunks, codecs, shard)

    def _named(self, name: str, codecs: Json) -> list[_Codec]:
        found: list[_Codec] = []
        for each in codecs if isinstance(codecs, list) else [codecs]:
            codec = each if isinstance(each, Mapping) else {"name": each}
            settings = codec.get("configuration") or {}
            if not isinstance(settings, Mapping):
                raise self._refused(name, f"is packed by {each!r:.80}")
            found.append((str(codec.get("name")).removeprefix(_OF_NUMCODECS), settings))
        return found

    def _layout(
        self,
        name: str,
        dtype: np.dtype[Any],
        shape: Json,
        chunks: Json,
        codecs: Sequence[_Codec],
        shard: Mapping[str, Json] | None = None,
    ) -> Layout:
        sizes = self._sizes(name, "shape", shape, least=0)
        chunk = self._sizes(name, "chunks", chunks, least=1)
        if len(sizes) != len(chunk):
            raise self._refused(name, f"has {len(sizes)} axes and chunks of {len(chunk)}")
        file_nbytes = chunk_nbytes = math.prod(chunk) * dtype.itemsize
        what = f"{self._place}: a chunk of {name}"
        check_claim(chunk_nbytes, self._stored, what)
        check_memory(chunk_nbytes, what)
        check_chunks(sizes, chunk, self._stored, f"{self._place}: {name}")
        shards = None
        if shard is not None:
            shards = self._shards(name, chunk, shard)
            chunk_nbytes //= shards.num_chunks
        packers = [kind for kind, _ in codecs if kind in _COMPRESSORS]
        most = chunk_nbytes
        for kind, settings in codecs:
            if kind == "delta":
                before = np.dtype(settings.get("dtype") or dtype)
                most = most * np.dtype(settings.get("astype") or before).itemsize // before.itemsize
        return Layout(
            math.prod(sizes) * dtype.itemsize, file_nbytes, packers[0] if packers else None, most + _CHECKSUMS, shards
        )

    def _shards(self, name: str, shard: Sequence[int], settings: Mapping[str, Json]) -> Shards:
        """Check the settings of shards that have the shape ``shard``; return the division of a shard into chunks."""
        codecs, place = self._named(name, settings.get("index_codecs")), settings.get("index_location", "end")
        if codecs not in (_INDEX, _INDEX[:1]) or place not in ("start", "end"):
            raise self._refused(name, f"has an index of shards at the {place!r:.20}, packed by {codecs!r:.80}")
        chunk = self._sizes(name, "chunk_shape", settings.get("chunk_shape"), least=1)
        if len(chunk) != len(shard) or any(size % part for size, part in zip(shard, chunk, strict=True)):
            raise self._refused(name, f"has shards of {list(shard)!s:.80} and chunks of {list(chunk)!s:.80}")
        check_chunks(shard, chunk, self._stored, f"{self._place}: a shard of {name}")
        count = math.prod(shard) // math.prod(chunk)
        return Shards(count, 16 * count + 4 * (len(codecs) - 1), place == "start")

    def _check_codecs(self, name: str, codecs: Sequence[_Codec]) -> None:
        """Check an array's codecs; ``codecs`` has them in the order in which zarr applies them to a new chunk."""
        known, names = {*_COMPRESSORS, *_FILTERS, "bytes", "transpose"}, [kind for kind, _ in codecs]
        if others := [kind for kind in names if kind not in known and not kind.startswith(_IMAGES)]:
            raise self._refused(name, f"is packed by the codec {', '.join(others):.80}")
        for kind, settings in codecs:
            for key in ("dtype", "astype"):
                if settings.get(key) is not None and kind in _FILTERS:
                    self._dtype(name, settings[key])
        packers = [at for at, kind in enumerate(names) if kind in _COMPRESSORS]
        if len(packers) > 1 or names.count("delta") > 1:
            raise self._refused(name, f"is packed several times, by {', '.join(names)}")
        # A compressed chunk must begin with its header, in which `may_unpack` reads the size. So only these two codecs
        # may follow the compression: they add a checksum at the end of the chunk. With other settings, crc32c may add
        # the checksum at the start.
        at_end: list[_Codec] = [("crc32c", {}), ("fletcher32", {})]
        if packers and any(each not in at_end for each in codecs[packers[0] + 1 :]):
            raise self._refused(name, f"is changed after it is packed, by {', '.join(names)}")

    def _dtype(self, name: str, value: Json) -> np.dtype[Any]:
        try:
            dtype = np.dtype(value) if isinstance(value, str) else None
        except (TypeError, ValueError, SyntaxError):
            dtype = None
        if dtype is None or dtype.kind not in NUMBERS or dtype.itemsize > 8:
            raise self._refused(name, f"is of the dtype {value!r:.80}")
        return dtype

    def _sizes(self, name: str, key: str, value: Json, least: int) -> Sequence[int]:
        if (
            not isinstance(value, list)
            or len(value) > _MOST_AXES
            or any(type(size) is not int or not least <= size <= _LARGEST for size in value)
        ):
            raise self._refused(name, f"has the {key} {value!r:.80}")
        return value

    def _refused(self, name: str, why: str) -> FormatError:
        return FormatError(
            f"{self._place}: {name} {why}, which is not supported; arrays must be of numbers or booleans, packed by "
            f"{', '.join(sorted(_COMPRESSORS))} or not at all"
        )


class _Stream(Protocol):  # implemented by the decompressors of zlib and bz2
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes | memoryview, max_length: int, /) -> bytes: ...


def _any_zlib() -> _Stream:
    return zlib.decompressobj(zlib.MAX_WBITS | 32)  # accepts data with the header of zlib or gzip


_STREAMS: Mapping[str, Callable[[], _Stream]] = {"zlib": _any_zlib, "gzip": _any_zlib, "bz2": bz2.BZ2Decompressor}


def _stream_fits(make: Callable[[], _Stream], data: bytes | memoryview, most: int) -> bool:
    """Tell whether the consecutive compressed streams in ``data`` unpack to at most ``most`` bytes in all.

    The result is True for a damaged stream, since zarr itself raises an error for such a stream.
    """
    left = most
    while data:
        stream = make()
        try:
            left -= len(stream.decompress(data, left + 1))
        except (zlib.error, OSError, EOFError):
            return True
        if left < 0:
            return False
        if not stream.eof:
            return True
        data = stream.unused_data
    return True


def _zstd_size(data: memoryview) -> int:
    """Estimate the number of bytes that a zstd frame unpacks to: the size in its header, or the sum over its blocks.

    In this sum, a compressed block counts as `_ZSTD_BLOCK`, the largest size that a block unpacks to. But if the last
    block is compressed, the compressed size of this block counts.
    """
    flags = data[4] if len(data) > 4 else 0
    code, is_single, has_checksum = flags >> 6, flags >> 5 & 1, flags >> 2 & 1
    width = (is_single, 2, 4, 8)[code]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    declared = int.from_bytes(data[at : at + width], "little") + (256 if code == 1 else 0)
    at += width
    total, is_last = 0, False
    while not is_last and at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += size  # a compressed last block may unpack to more bytes than this, up to `_ZSTD_BLOCK`
        at += 3 + (1 if kind == 1 else size)
        if kind == 2:
            total += _ZSTD_BLOCK - size if not is_last else 0
    # The data must be one frame, with at most 4 bytes after the frame. The estimate does not count further frames,
    # although a decoder would unpack them.
    is_alone = int.from_bytes(data[:4], "little") == _ZSTD_FRAME and len(data) - at - 4 * has_checksum <= 4
    return (declared if width else total) if is_alone else _LARGEST
