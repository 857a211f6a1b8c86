"""Checks of zarr's metadata files, .zarray and zarr.json, before zarr reads an array: dtypes, sizes and codecs.

zarr creates the codecs that a metadata file names. Some codecs, such as pickle, run code. So only listed dtypes and
codecs are accepted. The listed codecs decode numbers and do nothing else.
"""

import bz2
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from diskreplay import FormatError
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.foreign import NUMBERS, check_chunks, check_claim, check_memory

__all__ = ["Documents", "Layout"]

Json = Any

_ARRAY_2, _DOCUMENT_3 = ".zarray", "zarr.json"
_DOCUMENTS = (_ARRAY_2, ".zgroup", _DOCUMENT_3)
_MOST_BYTES, _MOST_AXES, _LARGEST = 16 << 20, 32, 1 << 48
_DTYPES_3 = {
    *("bool", "float16", "float32", "float64"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
_COMPRESSORS = {"blosc", "zstd", "lz4", "zlib", "gzip", "bz2"}
_FILTERS = {"shuffle", "delta", "crc32", "crc32c", "adler32", "fletcher32"}
_IMAGES = "imagecodecs_"  # codecs of the library imagecodecs, which zarr has only if the program registered them
_OF_NUMCODECS = "numcodecs."
_SHARDS = "sharding_indexed"
# A compressed chunk of more than twice `Layout.most` bytes plus this number of bytes is refused.
_OVERHEAD = 64 << 10
_ZSTD_BLOCK, _BLOSC_HEADER, _CHECKSUMS = 128 << 10, 16, 64


class Layout(NamedTuple):
    """The sizes and the compressor of an array, as its .zarray or zarr.json declares them.

    Attributes
    ----------
    nbytes, chunk_nbytes : int
        The sizes of the whole array and of a chunk in bytes, without compression.
    compressor : str, optional
        The codec that compressed the chunks. None: the chunks are not compressed.
    most : int
        The largest number of bytes to which a compressed chunk may unpack. This is more than ``chunk_nbytes``, since
        filters may add a checksum or widen the dtype.
    """

    nbytes: int
    chunk_nbytes: int
    compressor: str | None
    most: int

    def may_unpack(self, data: memoryview) -> bool:
        """Tell whether a compressed chunk is complete and unpacks to at most ``most`` bytes.

        The check reads the sizes in the chunk's headers. Chunks of zlib, gzip and bz2 have no sizes in their headers,
        so up to ``most`` + 1 bytes of such a chunk are unpacked.
        """
        most = self.most
        if len(data) > 2 * most + _OVERHEAD:
            return False
        if self.compressor == "blosc":  # blosc would read as far as its header says, even beyond the end of the data
            is_whole = len(data) >= _BLOSC_HEADER and int.from_bytes(data[12:16], "little") <= len(data)
            return is_whole and int.from_bytes(data[4:8], "little") <= most
        if self.compressor == "lz4":
            return int.from_bytes(data[:4], "little") <= most
        if self.compressor == "zstd":
            return _zstd_size(data) <= 2 * most  # the estimate may be too large
        make = _STREAMS.get(self.compressor or "")
        return make is None or _stream_fits(make, data, most)


class Documents:
    """The metadata files, .zarray and zarr.json, of the arrays in a zarr group: in a folder or in an open zip file.

    ``place`` is the folder or zip file, of ``stored`` bytes, which `check_files` has checked. ``archive`` is None for a
    folder.
    """

    def __init__(self, place: Path, archive: zipfile.ZipFile | None, stored: int) -> None:
        self._place, self._archive, self._stored = place, archive, stored
        if archive is not None:
            check_claim(sum(info.file_size for info in archive.infolist()), stored, str(place))

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
        if any(part in ("", ".", "..") or "\\0" in part for part in name.split("/")):
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
        """Return the contents of all files called ``name``: a zip file may have several, and zarr may read any one."""
        if self._archive is None:
            file = self._place / name
            if not file.is_file():
                return []
            with open(file, "rb") as opened:
                found = [opened.read(_MOST_BYTES + 1)]
        else:
            found = []
            for info in self._archive.infolist():
                if info.filename == name:
                    with self._archive.open(info) as member:
                        found.append(member.read(_MOST_BYTES + 1))
        if any(len(data) > _MOST_BYTES for data in found):
            raise FormatError(f"{self._place}: {name} has more than {_MOST_BYTES} bytes")
        return found

    def _check_2(self, name: str, document: Mapping[str, Json]) -> Layout:
        filters, compressor = document.get("filters") or [], document.get("compressor")
        codecs = [*(filters if isinstance(filters, list) else [filters]), *([compressor] if compressor else [])]
        named = [(str(each.get("id")), each) if isinstance(each, Mapping) else (str(each), {}) for each in codecs]
        names = self._check_codecs(name, named)
        return self._layout(
            name, self._dtype(name, document.get("dtype")), document.get("shape"), document.get("chunks"), names
        )

    def _check_3(self, name: str, document: Mapping[str, Json]) -> Layout:
        names = self._check_codecs(name, self._named(name, document.get("codecs")))
        kind = document.get("data_type")
        if not isinstance(kind, str) or kind not in _DTYPES_3:
            raise self._refused(name, f"is of the dtype {kind!r:.80}")
        grid = document.get("chunk_grid")
        is_regular = isinstance(grid, Mapping) and grid.get("name") == "regular"
        found = grid.get("configuration") if isinstance(grid, Mapping) and is_regular else None
        chunks = found.get("chunk_shape") if isinstance(found, Mapping) else None
        return self._layout(name, np.dtype(kind), document.get("shape"), chunks, names)

    def _named(self, name: str, codecs: Json, *, in_shard: bool = False) -> list[tuple[str, Mapping[str, Json]]]:
        """Return pairs (name, configuration) of the codecs in a zarr.json, without codecs inside of shards."""
        found: list[tuple[str, Mapping[str, Json]]] = []
        for each in codecs if isinstance(codecs, list) else [codecs]:
            codec = each if isinstance(each, Mapping) else {"name": each}
            kind, inner = str(codec.get("name")), codec.get("configuration") or {}
            if kind == _SHARDS:
                if in_shard or not isinstance(inner, Mapping):
                    raise self._refused(name, "has shards inside of shards")
                self._sizes(name, "chunk_shape", inner.get("chunk_shape"), least=1)
                for key in ("codecs", "index_codecs"):
                    self._check_codecs(name, self._named(name, inner.get(key, []), in_shard=True))
            elif kind in ("bytes", "transpose"):
                continue
            found.append((kind.removeprefix(_OF_NUMCODECS), inner))
        return found

    def _layout(self, name: str, dtype: np.dtype[Any], shape: Json, chunks: Json, names: list[str]) -> Layout:
        sizes = self._sizes(name, "shape", shape, least=0)
        chunk = self._sizes(name, "chunks", chunks, least=1)
        if len(sizes) != len(chunk):
            raise self._refused(name, f"has {len(sizes)} axes and chunks of {len(chunk)}")
        chunk_nbytes = math.prod(chunk) * dtype.itemsize
        what = f"{self._place}: a chunk of {name}"
        check_claim(chunk_nbytes, self._stored, what)
        check_memory(chunk_nbytes, what)
        check_chunks(sizes, chunk, self._stored, f"{self._place}: {name}")
        packers = [each for each in names if each in _COMPRESSORS]
        most = chunk_nbytes * (8 if "delta" in names else 1) + _CHECKSUMS
        return Layout(math.prod(sizes) * dtype.itemsize, chunk_nbytes, packers[0] if packers else None, most)

    def _check_codecs(self, name: str, codecs: list[tuple[str, Mapping[str, Json]]]) -> list[str]:
        known = _COMPRESSORS | _FILTERS | {_SHARDS}
        if others := [kind for kind, _ in codecs if kind not in known and not kind.startswith(_IMAGES)]:
            raise self._refused(name, f"is packed by the codec {', '.join(others):.80}")
        for kind, settings in codecs:
            for key in ("dtype", "astype") if isinstance(settings, Mapping) else ():
                if settings.get(key) is not None and kind in _FILTERS:
                    self._dtype(name, settings[key])
        names = [kind for kind, _ in codecs]
        if len([kind for kind in names if kind in _COMPRESSORS]) > 1:
            raise self._refused(name, f"is packed several times, by {', '.join(names)}")
        return names

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

    The result is True for a damaged stream, since zarr raises an error for it.
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
    block is compressed, the block's compressed size counts.
    """
    flags = data[4] if len(data) > 4 else 0
    code, is_single = flags >> 6, flags >> 5 & 1
    width = (is_single, 2, 4, 8)[code]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    if width:
        return int.from_bytes(data[at : at + width], "little") + (256 if code == 1 else 0)
    total, is_last = 0, False
    while not is_last and at + 3 <= len(data):
        header = int.from_bytes(data[at : at + 3], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += size  # if the last block is compressed, its true size may be larger by up to `_ZSTD_BLOCK`
        at += 3 + (1 if kind == 1 else size)
        if kind == 2:
            total += _ZSTD_BLOCK - size if not is_last else 0
    return total if len(data) - at <= 4 else _LARGEST  # a checksum of 4 bytes may follow, but no second frame
