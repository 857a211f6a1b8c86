"""Writes a sealed group, a segment or a pack, into a folder: each file once, with the checksum of what it holds."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager

from crc32c import crc32c

from diskreplay.ids import Ints
from diskreplay.segments.blocks import BlockSums
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import RowArray
from diskreplay.segments.episode_table import write_table
from diskreplay.segments.files.copies import protect
from diskreplay.segments.files.durable import descriptor, write_file
from diskreplay.segments.segment import SegmentInfo
from diskreplay.segments.shards import Compressed, ShardWriter, index_bytes


class GroupWriter:
    """Writes the files of one group: the small ones and the chunks in any order, `finish` at the end.

    The folders of its arrays are there. Nothing is synced: that is for whoever puts the group in its place. Not
    thread-safe.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sums: dict[str, int] = {}
        self._blocks = BlockSums()
        self._compressed: dict[str, Compressed] = {}
        self._indexes: dict[str, bytes] = {}

    def small(self, name: str, data: bytes) -> None:
        """Write a document, a counter, or what else is small and has a checksum."""
        write_file(f"{self._folder}/{name}", data)
        self._sums[name] = crc32c(data)

    @contextmanager
    def chunk(self, array: RowArray, number: int = 0) -> Iterator[int]:
        """Have a block write a chunk file by its descriptor, from nothing."""
        with self._made(array, number) as fd:
            yield fd
            self._seal(array, number, fd, None)

    @contextmanager
    def shard(self, array: RowArray, chunk_rows: int, rows: int, level: int) -> Iterator[ShardWriter]:
        """Have a block write the one chunk file of a compressed array; arguments as for `ShardWriter`."""
        with self._made(array, 0) as fd:
            writer = ShardWriter(fd, chunk_rows, array.row_bytes, rows, level)
            yield writer
            nbytes, index = writer.finish(), index_bytes(chunk_rows, rows)
            self._compressed[array.path] = Compressed(rows, level, nbytes)
            self._indexes[array.path] = os.pread(fd, index, nbytes - index)
            self._seal(array, 0, fd, layout.BLOCK_BYTES)

    def _made(self, array: RowArray, number: int) -> descriptor:
        return descriptor(f"{self._folder}/{array.path}/{array.chunk_key(number)}", os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _seal(self, array: RowArray, number: int, fd: int, block: int | None) -> None:
        self._sums[f"{array.path}/{array.chunk_key(number)}"] = self._blocks.add(array, number, fd, block)
        protect(fd)

    def block_sums(self, array: RowArray, number: int) -> bytes:
        """Return the checksums of the blocks of a chunk that was written, as they are stored."""
        return self._blocks.chunks[array.path, number]

    def finish(self, info: SegmentInfo, rows: Ints) -> SegmentInfo:
        """Write what follows from the chunks, and the group's own document last; return its attributes.

        ``info`` has those of the attributes that do not follow from files, and the folder; ``rows`` are those of each
        lane.
        """
        self._sums[layout.BLOCKS] = self._blocks.write(self._folder)
        if self._indexes:
            self.small(layout.INDEXES_COPY, b"".join(self._indexes[leaf] for leaf in sorted(self._indexes)))
        info = dataclasses.replace(info, compressed=self._compressed)
        episodes, sums = write_table(info, rows, f"{self._folder}/{layout.EPISODES}")
        info = dataclasses.replace(info, episodes=episodes, checksums={**self._sums, **sums})
        for name in (layout.DOCUMENT_COPY, layout.METADATA):
            write_file(f"{self._folder}/{name}", info.own_document())
        return info
