"""The inner names that tests of reading patch or look at; the others go by public names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.kernels.table import get_kernel
from diskreplay.reading import (
    chunk_budget,
    chunk_table,
    decompression,
    episodes,
    followed_rows,
    follower,
    known_segments,
)
from diskreplay.reading.snapshot import LaneMap
from diskreplay.segments import folder, shards
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.files import mapping
from diskreplay.segments.packs import all_packs, open_shard

MOST_DECOMPRESSED: int = chunk_budget.MOST_DECOMPRESSED
DISK_BLOCK_BYTES: int = decompression._BLOCK_BYTES
count_mappings = mapping.count_mappings

LIMITS = {
    "mappings": (chunk_budget, "MOST_MAPPINGS"),
    "read_bytes": (chunk_budget, "MOST_READ"),
    "block_bytes": (chunk_budget, "BLOCK_BYTES"),
    "piece_bytes": (chunk_budget, "_PIECE_BYTES"),
    "decompressed_bytes": (chunk_budget, "MOST_DECOMPRESSED"),
    "least_decompressed_bytes": (chunk_budget, "LEAST_DECOMPRESSED"),
    "largest_read_bytes": (chunk_table, "LARGEST_READ"),
    "copied_bytes": (folder, "PART_BYTES"),
    "attempts": (chunk_table, "_ATTEMPTS"),
    "openings": (follower, "_ATTEMPTS"),
    "threads": (decompression, "_MOST_THREADS"),
    "least_for_threads": (decompression, "_LEAST"),
    "fitting_bytes": (decompression, "_MOST_BYTES"),
    "inner_chunk_bytes": (shards, "_INNER_BYTES"),
    "summed_steps": (episodes, "MOST_STEPS"),
    "shown_bytes": (episodes, "MOST_BYTES"),
}


def limit(patch: pytest.MonkeyPatch, **limits: int) -> None:
    """Set what a process may map, read, decompress and show, until the patch is undone."""
    for name, value in limits.items():
        patch.setattr(*LIMITS[name], value)


def new_arenas(patch: pytest.MonkeyPatch) -> None:
    """Begin with no memory of chunks that were read or decompressed: blocks are as large as they are limited to."""
    patch.setattr(chunk_budget, "_arena", chunk_budget.Arena())
    patch.setattr(chunk_budget, "_decompressed", chunk_budget.Arena())


def read_bytes() -> int:
    """Return how much memory has chunks that were read."""
    return chunk_budget._arena.nbytes


def decompressed_bytes() -> int:
    """Return how much memory has what was decompressed."""
    return chunk_budget._decompressed.nbytes


def make_room() -> None:
    """Release what is beyond the limits."""
    chunk_budget.make_room(chunk_budget.now())


def are_read(table: Any) -> bool:
    """Tell whether all chunks of a leaf were read; False: all are mapped."""
    assert np.isin(table.how, (chunk_budget.READ, chunk_budget.MAPPED)).all()
    assert len(set(table.how.tolist())) == 1
    return bool((table.how == chunk_budget.READ).all())


def pieces_of(table: Any) -> int:
    """Count the pieces of memory that hold what was copied of a leaf."""
    return sum(isinstance(piece, chunk_budget.Piece) for piece in table.holder.values())


def mapping_of_chunks(patch: pytest.MonkeyPatch, replaced: Any) -> Any:
    """Have a function map files in the place of the system, until the patch is undone; return the system's."""
    real = mapping._map
    patch.setattr(mapping, "_map", replaced)
    return real


def refuse_tables(patch: pytest.MonkeyPatch) -> None:
    """Have the system refuse to map the tables of packs."""

    def refuse(*_: Any) -> Any:
        raise mapping.MappingRefused("too many")

    patch.setattr("diskreplay.segments.packs.map_file", refuse)


def disk_is_warm(patch: pytest.MonkeyPatch, is_warm: bool) -> None:
    """Have nothing come from disk any more, or all."""
    patch.setattr(decompression._cold, "calls_until_warm", int(not is_warm))
    patch.setattr(decompression._cold, "note", lambda has_read: None)


def blocks_asked(patch: pytest.MonkeyPatch) -> list[int]:
    """Note the size of the blocks for which the disk is asked, call by call."""
    asked = list[int]()
    patch.setattr(decompression._cold, "ask", lambda shard, numbers, block: asked.append(block))
    return asked


class PackedField(NamedTuple):
    """A compressed field of the one pack of a store: its file, where each inner chunk lies there, and its bytes."""

    file: Path
    offsets: np.ndarray
    sizes: np.ndarray


def packed_field(path: Path, leaf: str) -> PackedField:
    """Find a field of the one pack of a store."""
    (info,) = [info for info, _ in all_packs(read_root(path), 0)]
    shard = open_shard(info, leaf)
    below = Path(info.chunk_path(leaf, 0)).parts[-4:]  # of the folder that the document was read in
    return PackedField(path.joinpath(*below), shard.offsets, shard.sizes)


def lane_keys(store: dr.Store) -> list[int]:
    """List the keys of a store's lanes."""
    lanes = LaneMap()
    lanes.update(store.snapshot)
    return lanes.key.tolist()


@contextmanager
def before_opening(called: str, work: Any) -> Iterator[None]:
    """Call a function when a reader that opens a store has come to a place, once."""
    known = known_segments.KnownSegments
    owners = {"KnownSegments.__init__": known, "KnownSegments.read": known}
    owners |= {"read_sealed": followed_rows, "read_tables": folder}
    owner: Any = owners[called]
    name = called.split(".")[-1]
    real, done = getattr(owner, name), list[bool]()

    def work_first(*args: Any) -> Any:
        if not done:
            done.append(True)
            work()
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, work_first)
        yield
    assert done


def while_compiling(store: dr.Store, work: Any) -> None:
    """Call a function each time that a reader of a store asks for a compiled kernel."""

    def compiled_slowly(name: str) -> Any:
        work()
        return get_kernel(name)

    with mock.patch("diskreplay.store.store.get_kernel", compiled_slowly):
        store.follow_compiled()
