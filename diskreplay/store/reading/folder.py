"""What a reader knows of a pack, and where it finds a segment that was put into one since it was read."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout
from diskreplay.format.numbers import listed_numbers
from diskreplay.format.packs import PackTables, all_packs, open_shard
from diskreplay.format.root import Root
from diskreplay.format.segment import SegmentInfo
from diskreplay.format.shards import Shard
from diskreplay.store.reading.arena import Piece, lone_piece

# Packs that are merged while the folder is listed: each time it is listed again.
_ATTEMPTS = 20


class Pack:
    """A pack: its attributes and tables; ``now`` are those of the pack that has its rows, as far as that is known."""

    def __init__(self, info: SegmentInfo, tables: PackTables) -> None:
        self.info, self.tables = info, tables
        self.now = info, tables
        self._shards: dict[str, Shard] = {}

    def shard(self, leaf: str) -> Shard:
        """Open a compressed array, which stays open; errors as for `format.packs.open_shard`."""
        found = self._shards.get(leaf)
        if found is None:
            found = self._shards[leaf] = open_shard(self.info, leaf)
        return found


def find_pack(root: Root, number: int) -> tuple[SegmentInfo, PackTables] | None:
    """Return the newest pack that has a segment, None where there is none that can be read: the store may be gone."""
    with suppress(FormatError):
        for info, tables in _packs(root, number + 1):
            if tables.places(np.array([number]))[0] >= 0:
                return info, tables
    return None


def merged_numbers(root: Root, first: int) -> set[int]:
    """Return the segments that are in packs with the number ``first``, or a higher one."""
    return {number for _, tables in _packs(root, first) for number in tables.numbers.tolist()}


def _packs(root: Root, first: int) -> Iterator[tuple[SegmentInfo, PackTables]]:
    """Yield the packs from a number on, the newest first; all of them once more where one left meanwhile.

    It may have been merged into one that had not come when the folder was listed.
    """
    for _ in range(_ATTEMPTS):
        listed = [number for number in listed_numbers(root) if number >= first]
        yield from all_packs(root, first)
        if all(os.path.lexists(root.segment_path(number)) for number in listed):
            return


def read_packed_chunk(info: SegmentInfo, leaf: str, chunk: int) -> Piece | None:
    """Return a chunk of a segment that is in a pack now, as the segment had it; None where no pack has it.

    Whoever still has a snapshot from before reads on.
    """
    while (found := find_pack(info.root, info.number)) is not None:
        try:
            return _unpacked(info, leaf, chunk, *found)
        except FileNotFoundError:
            if found[0].path.exists():
                raise
    return None


def _unpacked(info: SegmentInfo, leaf: str, chunk: int, pack: SegmentInfo, tables: PackTables) -> Piece | None:
    """Return a chunk of a segment, None where there is no memory for it; FileNotFoundError where the pack is gone."""
    if (piece := lone_piece(info.chunk_nbytes(leaf))) is None:
        return None
    per_chunk, array = info.chunk_rows[leaf], info.arrays[leaf]
    rows = np.asarray(piece).reshape(len(info.lanes), per_chunk, array.row_bytes)
    rows[:] = 0
    if leaf not in pack.chunk_rows:
        return piece
    read = _row_reader(pack, leaf)
    lines = tables.of(leaf).runs[tables.runs_of(int(tables.places(np.array([info.number]))[0]))]
    for lane, (first, count) in enumerate(lines[:, :2].tolist()):
        begin, stop = chunk * per_chunk, min((chunk + 1) * per_chunk, count)
        if begin < stop:
            read(first + begin, rows[lane, : stop - begin])
    if leaf == layout.TIME:
        rows.view("<i8")[:] += pack.clock.wall - info.clock.wall
    return piece


def _row_reader(info: SegmentInfo, leaf: str) -> Callable[[int, NDArray[np.uint8]], None]:
    """Return what reads rows of an array of a pack, from one on, into memory of zeros, ``(rows, row_bytes)``.

    Raises FileNotFoundError where the pack is gone.
    """
    row_bytes = info.arrays[leaf].row_bytes
    if leaf not in info.compressed:
        packed = info.map_chunk(leaf, 0).array(np.uint8, (info.chunk_rows[leaf], row_bytes))
        return lambda first, out: np.copyto(out, packed[first : first + len(out)])
    shard = open_shard(info, leaf)

    def decompress(first: int, out: NDArray[np.uint8]) -> None:
        for row, data in shard.rows(first, first + len(out), row_bytes):
            rows = data.reshape(-1, row_bytes)
            out[row - first : row - first + len(rows)] = rows

    return decompress


def rows_as_before(
    pack: Pack, leaf: str, ranges: Sequence[tuple[int, int]], info: SegmentInfo, tables: PackTables
) -> Piece:
    """Return ranges of rows of a pack, one behind the other, from one that it was merged into: first rows, and numbers.

    Raises FileNotFoundError where that pack is gone.
    """
    row_bytes, read = info.arrays[leaf].row_bytes, _row_reader(info, leaf)
    total = sum(count for _, count in ranges)
    before, tables = pack.tables.of(leaf), tables.of(leaf)
    piece = lone_piece(total * row_bytes)
    if piece is None:
        raise MemoryError(f"no memory for {leaf} of {pack.info.path}")
    rows, at = np.asarray(piece).reshape(total, row_bytes), 0
    rows[:] = 0
    for first, count in ranges:
        parts = np.array(before.split(first, count), np.int64).reshape(-1, 2)  # without rows between lanes
        now = tables.rows_of(before.ids_of(parts[:, 0]))
        for (row, some), found in zip(parts.tolist(), now.tolist(), strict=True):
            read(found, rows[at + row - first : at + row - first + some])
        at += count
    if leaf == layout.TIME:
        rows.view("<i8")[:] += info.clock.wall - pack.info.clock.wall
    return piece
