"""What a segment says of itself, and how a new one comes to be."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.format import layout, metadata
from diskreplay.format.commit import map_lane_counter
from diskreplay.format.durable import (
    Lock,
    boot_id,
    machine_id,
    storage_error,
    try_lock,
    write_atomic,
    write_file,
)
from diskreplay.format.lost import NOTHING_LOST, Lost, parse_lost
from diskreplay.format.mapping import open_regular
from diskreplay.format.root import Root
from diskreplay.format.unwritten import NeverWritten, is_never_written, map_durable

# So many numbers may be looked up one by one: a live store's few. Far more, with one left here and there by a slow
# writer or none at all (hostile counters), would cost more than listing the folder.
_FEW = 256

# What is read, or locked, of a segment as soon as it is seen.
_READ_AT_ONCE = (*layout.LANE_COUNTERS, layout.DONE, f"{layout.COMMITTED}/{layout.LOCK}")

# A segment that a living writer made before it needs it, beside the counters. It gets its number when it is used.
DRAFT = "next-"
_NO_NUMBER = -1
_END_OF_TIME = 1e12


@dataclass(frozen=True)
class SegmentInfo:
    """A segment's attributes."""

    number: int
    path: Path
    writer: int
    lanes: tuple[int, ...]
    chunk_rows: dict[str, int]
    machine: str
    boot: str
    inode: int
    created: str
    sealed: bool
    steps: int | None
    checksums: dict[str, int]
    sealed_at: float = 0.0  # seconds since the epoch; 0: not sealed, or by a release that did not note it
    lost: Lost = NOTHING_LOST

    @property
    def shows_live_rows(self) -> bool:
        """Whether rows that are only in the page cache of this boot can be trusted; sealed ones always can."""
        return self.sealed or (self.boot == boot_id() and self.inode == counter_inode(str(self.path)))

    def map_trusted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Map the rows of each lane whose observation, and that as a whole, can be trusted: ``(lanes,)`` each."""
        if not self.shows_live_rows:
            durable = map_durable(str(self.path), len(self.lanes))
            return durable, durable
        observed, committed = (
            map_lane_counter(f"{self.path}/{name}", len(self.lanes)) for name in (layout.OBSERVED, layout.COMMITTED)
        )
        return observed, committed

    @property
    def lock_path(self) -> str:
        """The lock its writer holds while it lives."""
        return f"{self.path}/{layout.COMMITTED}/{layout.LOCK}"

    def attributes(self) -> dict[str, Any]:
        """Return what stands in the segment's zarr.json."""
        sealed = {"steps": self.steps, "sealed_at": self.sealed_at, "checksums": self.checksums} if self.sealed else {}
        return {
            "requires": [],
            "writer": self.writer,
            "lanes": list(self.lanes),
            "chunk_rows": self.chunk_rows,
            "machine_id": self.machine,
            "boot_id": self.boot,
            "inode": self.inode,
            "created": self.created,
            "sealed": self.sealed,
            **sealed,
            **self.lost.attributes(),
        }


class Size(NamedTuple):
    """How large a segment will be: the most rows of a chunk, and its rows a lane where they are known."""

    chunk_rows: int
    rows: int | None = None


def counter_inode(path: str) -> int:
    """Return the inode of a segment's committed counter: another one means that the segment is a copy."""
    return os.stat(f"{path}/{layout.COMMITTED}/c.0").st_ino


def build_segment(
    root: Root, number: int, writer: int | None, lanes: Sequence[int], size: Size
) -> tuple[SegmentInfo, Lock]:
    """Make segment ``number`` beside the counters, lock it, and rename it in when it is complete.

    The caller holds the store lock. Every array gets its first chunk, without blocks yet.

    Raises
    ------
    StorageFull
        There is no room for it; nothing is left behind.
    """
    building = f"{root.counters_folder}/new-{layout.segment_name(number)}"
    # A writer that died here left one; under the store lock nobody else can be building.
    shutil.rmtree(building, ignore_errors=True)
    info, lock = draft_segment(root, building, number if writer is None else writer, lanes, size)
    try:
        return place_segment(root, info, number), lock
    except BaseException:
        remove_draft(info, lock)
        raise


def draft_segment(root: Root, building: str, writer: int, lanes: Sequence[int], size: Size) -> tuple[SegmentInfo, Lock]:
    """Make a segment that has no number yet, in the folder ``building``, which is made, beside the counters.

    It is locked before anything else: a draft whose lock is free is one of a process that died.

    Raises
    ------
    StorageFull
        There is no room for it; nothing is left behind.
    """
    committed = f"{building}/{layout.COMMITTED}"
    lock: Lock | None = None
    try:
        os.mkdir(building)
        os.mkdir(committed)
        lock = try_lock(f"{committed}/{layout.LOCK}")
        if lock is None:  # just made, and somebody who cleans up thinks that its maker is gone
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), building)
        chunk_rows = {
            leaf: layout.chunk_rows(array.row_bytes, len(lanes), root.chunk_bytes, size.chunk_rows)
            for leaf, array in root.blueprint.arrays.items()
        }
        _build_arrays(root, building, len(lanes), chunk_rows, size.rows)
        info = SegmentInfo(
            number=_NO_NUMBER,
            path=Path(building),
            writer=writer,
            lanes=tuple(lanes),
            chunk_rows=chunk_rows,
            machine=machine_id(),
            boot=boot_id(),
            inode=counter_inode(building),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            sealed=False,
            steps=None,
            checksums={},
        )
        write_file(f"{building}/{layout.METADATA}", root.blueprint.segment_document(info.attributes()))
    except BaseException as error:
        if lock is not None:
            lock.release()
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(error, building) from error
        raise
    return info, lock


def place_segment(root: Root, info: SegmentInfo, number: int) -> SegmentInfo:
    """Give a draft its number and its place among the segments. The caller holds the store lock.

    Raises
    ------
    StorageFull
        There is no room for its name.
    FileNotFoundError
        Somebody removed the draft.
    """
    path = root.segment_path(number)
    try:
        os.rename(info.path, path)
    except OSError as error:
        raise storage_error(error, path) from error
    return dataclasses.replace(info, number=number, path=path)


def remove_draft(info: SegmentInfo, lock: Lock) -> None:
    """Remove a draft that was never placed."""
    shutil.rmtree(info.path, ignore_errors=True)
    lock.release()


def _build_arrays(root: Root, building: str, lanes: int, chunk_rows: dict[str, int], rows: int | None) -> None:
    blueprint = root.blueprint
    for path, document in blueprint.documents(lanes, chunk_rows, rows):
        folder = f"{building}/{path}"
        if path != layout.COMMITTED:  # that one is there, with its lock
            os.mkdir(folder)
        write_file(f"{folder}/{layout.METADATA}", document)
        if array := blueprint.arrays.get(path):
            write_file(f"{folder}/{array.chunk_key(0)}", nbytes=lanes * chunk_rows[path] * array.row_bytes)
        elif path in blueprint.counters:
            write_file(f"{folder}/c.0", bytes(8 * lanes))


def open_chunk(root: Root, info: SegmentInfo, leaf: str, chunk: int) -> int:
    """Open a chunk to read and write it; where it is missing, it is created whole, without blocks.

    Raises
    ------
    FormatError
        The file is not as it was made.
    StorageFull
        There is no room for its name; nothing is left behind, and the call may be repeated.
    """
    path, nbytes = chunk_path(root, info, leaf, chunk), chunk_nbytes(root, info, leaf)
    with suppress(FileNotFoundError):
        return open_regular(path, nbytes, os.O_RDWR)
    # The shape first: a call that is repeated ends at the chunk that is there. Until then its rows are zeros to zarr.
    rows = (chunk + 1) * info.chunk_rows[leaf]
    write_atomic(info.path / leaf / layout.METADATA, rows_document(root, info, leaf, rows))
    temporary = unfinished_chunk_path(info, leaf, chunk)
    try:
        write_file(temporary, nbytes=nbytes)
        os.rename(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise storage_error(error, path) from error
    return open_regular(path, nbytes, os.O_RDWR)


def unfinished_chunk_path(info: SegmentInfo, leaf: str, chunk: int) -> str:
    """Return the path of a chunk that is being created."""
    return f"{info.path}/{leaf}/.new-{chunk}"


def rows_document(root: Root, info: SegmentInfo, leaf: str, rows: int) -> bytes:
    """Return the zarr.json of an array with the shape of ``rows`` rows a lane."""
    return root.blueprint.arrays[leaf].document(len(info.lanes), rows, info.chunk_rows[leaf])


def chunk_path(root: Root, info: SegmentInfo, leaf: str, chunk: int) -> str:
    """Return the path of a chunk file."""
    return f"{info.path}/{leaf}/{root.blueprint.arrays[leaf].chunk_key(chunk)}"


def row_bytes(root: Root, leaf: str) -> int:
    """Return the bytes of one row of one lane."""
    return root.blueprint.arrays[leaf].row_bytes


def chunk_nbytes(root: Root, info: SegmentInfo, leaf: str) -> int:
    """Return the size of every chunk file of an array."""
    return len(info.lanes) * info.chunk_rows[leaf] * row_bytes(root, leaf)


def segment_numbers(root: Root, start: int, end: int) -> Sequence[int]:
    """Return the numbers from ``start`` to ``end`` that may have a segment: for many, those that have one.

    The time and memory it takes are bounded by what is there, whatever the store's counters say.
    """
    if end - start <= _FEW:
        return range(start, end)
    return sorted(number for number in _listed(root) if start <= number < end)


def present_segments(root: Root, numbers: Sequence[int]) -> Iterable[int]:
    """Return those of the numbers, and perhaps others, that have a segment."""
    if len(numbers) > _FEW:
        return _listed(root)
    return [number for number in numbers if os.path.exists(root.segment_path(number))]


def _listed(root: Root) -> list[int]:
    names = os.listdir(root.segments_folder)
    return [int(name) for name in names if name.isdecimal() and len(name) < 10]


# --- reading ---------------------------------------------------------------------------------------------------------


def read_segment(root: Root, number: int) -> SegmentInfo:
    """Read and check a segment's attributes.

    Raises
    ------
    FileNotFoundError
        It was evicted.
    NeverWritten
        The power went before anything in it was durable. It is as good as evicted.
    FormatError
        It is damaged or hostile.
    """
    path = root.segment_path(number)
    if os.path.islink(path):
        raise FormatError(f"{path} is a symbolic link; a store has none, restore the folder itself")
    document_path = f"{path}/{layout.METADATA}"
    try:
        data = metadata.read_document(document_path)
        attributes = metadata.parse_document(data, document_path).get("attributes")
        metadata.verify_document(data, document_path)
    except (FormatError, FileNotFoundError):
        if path.is_dir() and is_never_written(str(path)):
            raise NeverWritten(errno.ENOENT, "nothing of it was written before the power went", str(path)) from None
        raise
    # Of thousands of segments only these are read at once; the folders of other arrays are looked at when mapped.
    refuse_links(path, _READ_AT_ONCE)
    try:
        metadata.check_requires(attributes or {}, document_path)
        return _parse_segment(root, number, path, attributes)
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{document_path}: unusable attributes ({error!r}); restore this file") from None


def refuse_links(segment: Path, names: Iterable[str]) -> None:
    """Check that none of these in a segment leads elsewhere.

    Raises
    ------
    FormatError
        One is a symbolic link.
    """
    for name in names:
        if os.path.islink(f"{segment}/{name}"):
            raise FormatError(f"{segment}/{name} is a symbolic link; a store has none, restore what was there")


def _parse_segment(root: Root, number: int, path: Path, attributes: Any) -> SegmentInfo:
    lanes, chunk_rows = tuple(map(_whole, attributes["lanes"])), attributes["chunk_rows"]
    if not 1 <= len(lanes) <= layout.MAX_LANES:
        raise ValueError(f"{len(lanes)} lanes")
    arrays = root.blueprint.arrays
    for leaf, array in arrays.items():
        rows = _whole(chunk_rows[leaf])
        nbytes = rows * len(lanes) * array.row_bytes
        # A chunk is a power of two of rows; one row of all lanes may be wider than any chunk size asked for.
        if rows < 1 or rows & (rows - 1) or (rows > 1 and nbytes > 2 * layout.MAX_CHUNK_BYTES):
            raise ValueError(f"{rows} rows a chunk of {leaf}")
    sealed = attributes["sealed"]
    if not isinstance(sealed, bool):
        raise TypeError("sealed")
    return SegmentInfo(
        number=number,
        path=path,
        writer=_whole(attributes["writer"]),
        lanes=lanes,
        chunk_rows={leaf: chunk_rows[leaf] for leaf in arrays},
        machine=str(attributes["machine_id"]),
        boot=str(attributes["boot_id"]),
        inode=_whole(attributes["inode"]),
        created=str(attributes["created"]),
        sealed=sealed,
        steps=_whole(attributes["steps"]) if sealed else None,
        checksums=dict(attributes["checksums"]) if sealed else {},
        sealed_at=float(min(attributes.get("sealed_at", 0), _END_OF_TIME)) if sealed else 0.0,
        lost=parse_lost(attributes, len(lanes)),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a whole number")
    return value
