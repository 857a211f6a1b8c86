"""What a segment says of itself, and how a new one comes to be."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from diskreplay.errors import FormatError
from diskreplay.format import layout, metadata
from diskreplay.format.durable import boot_id, machine_id, storage_error, try_lock
from diskreplay.format.root import Root

_FEW = 256


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

    @property
    def shows_live_rows(self) -> bool:
        """Whether rows that are only in the page cache of this boot can be trusted; sealed ones always can."""
        return self.sealed or (self.boot == boot_id() and self.inode == counter_inode(self.path))

    @property
    def lock_path(self) -> str:
        """The lock its writer holds while it lives."""
        return str(self.path / layout.COMMITTED / layout.LOCK)

    def attributes(self) -> dict[str, Any]:
        """Return what stands in the segment's zarr.json."""
        sealed = {"steps": self.steps, "checksums": self.checksums} if self.sealed else {}
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
        }


class Size(NamedTuple):
    """How large a segment will be: the most rows of a chunk, and its rows a lane where they are known."""

    chunk_rows: int
    rows: int | None = None


def counter_inode(path: Path) -> int:
    """Return the inode of a segment's committed counter: another one means that the segment is a copy."""
    return (path / layout.COMMITTED / "c.0").stat().st_ino


def build_segment(
    root: Root, number: int, writer: int | None, lanes: Sequence[int], size: Size
) -> tuple[SegmentInfo, FileLock]:
    """Make segment ``number`` beside the counters, lock it, and rename it in when it is complete.

    The caller holds the store lock. Every array gets its first chunk, without blocks yet.

    Raises
    ------
    StorageFull
        There is no room for it; nothing is left behind.
    """
    path = root.segment_path(number)
    building = root.counters_folder / f"new-{layout.segment_name(number)}"
    # A writer that died here left one; under the store lock nobody else can be building.
    shutil.rmtree(building, ignore_errors=True)
    try:
        info, lock = _build(root, building, number, number if writer is None else writer, lanes, size)
        os.rename(building, path)
    except OSError as error:
        shutil.rmtree(building, ignore_errors=True)
        raise storage_error(error, path) from error
    return dataclasses.replace(info, path=path), lock


def _build(
    root: Root, building: Path, number: int, writer: int, lanes: Sequence[int], size: Size
) -> tuple[SegmentInfo, FileLock]:
    shapes = metadata.array_leaves(root.schema)
    fields = root.schema.leaves
    chunk_rows = {
        leaf: layout.chunk_rows(
            fields[leaf].row_bytes if leaf in fields else 1, len(lanes), root.chunk_bytes, size.chunk_rows
        )
        for leaf in shapes
    }
    os.mkdir(building)
    for name, document in metadata.segment_documents(root.templates, root.schema, len(lanes), chunk_rows, size.rows):
        folder = f"{building}/{name}"
        os.mkdir(folder)
        _write(f"{folder}/{layout.METADATA}", metadata.dump(document))
        if name in shapes:
            nbytes = len(lanes) * chunk_rows[name] * (fields[name].row_bytes if name in fields else 1)
            _create_sparse(f"{folder}/{layout.chunk_key(0, len(shapes[name][0]))}", nbytes)
        elif document["node_type"] == "array":
            _write(f"{folder}/c.0", bytes(8 * len(lanes)))
    lock = try_lock(building / layout.COMMITTED / layout.LOCK)
    assert lock is not None, "nobody else can know this file yet"
    info = SegmentInfo(
        number=number,
        path=building,
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
    _write(f"{building}/{layout.METADATA}", metadata.seal_document(root.templates[""], info.attributes()))
    return info, lock


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def _create_sparse(path: str, nbytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def create_chunk(root: Root, info: SegmentInfo, leaf: str, chunk: int) -> None:
    """Create chunk ``chunk`` of an array whole, without blocks, and let the array's shape reach over it.

    Raises
    ------
    StorageFull
        There is no room for its name; nothing is left behind.
    """
    path = chunk_path(root, info, leaf, chunk)
    if os.path.exists(path):
        return
    temporary = f"{os.path.dirname(path)}/.new-{chunk}"
    try:
        if os.path.exists(temporary):
            os.unlink(temporary)
        _create_sparse(temporary, chunk_nbytes(root, info, leaf))
        os.rename(temporary, path)
    except OSError as error:
        raise storage_error(error, path) from error
    set_rows(root, info, leaf, (chunk + 1) * info.chunk_rows[leaf])


def set_rows(root: Root, info: SegmentInfo, leaf: str, rows: int, *, sync: bool = False) -> None:
    """Write the shape of an array: ``rows`` rows a lane."""
    row_shape = root.schema.leaves[leaf].shape if leaf in root.schema.leaves else ()
    document = metadata.array_document(root.templates[leaf], len(info.lanes), rows, info.chunk_rows[leaf], row_shape)
    path = info.path / leaf / layout.METADATA
    # Reading is ten times cheaper than replacing, and an episode in a segment of its own has its shape from the start.
    if sync or metadata.read_document(path) != document:
        metadata.write_document(path, document, sync=sync)


def chunk_path(root: Root, info: SegmentInfo, leaf: str, chunk: int) -> str:
    """Return the path of a chunk file."""
    ndim = len(root.schema.leaves[leaf].shape) if leaf in root.schema.leaves else 0
    return f"{info.path}/{leaf}/{layout.chunk_key(chunk, ndim)}"


def row_bytes(root: Root, leaf: str) -> int:
    """Return the bytes of one row of one lane."""
    field = root.schema.leaves.get(leaf)
    return 1 if field is None else field.row_bytes


def chunk_nbytes(root: Root, info: SegmentInfo, leaf: str) -> int:
    """Return the size of every chunk file of an array."""
    return len(info.lanes) * info.chunk_rows[leaf] * row_bytes(root, leaf)


def segment_numbers(root: Root, start: int, end: int) -> Sequence[int]:
    """Return the numbers from ``start`` to ``end`` that may have a segment: for many, those that have one.

    The time and memory it takes are bounded by what is there, whatever the store's counters say.
    """
    if end - start <= _FEW:
        return range(start, end)
    names = os.listdir(root.path / layout.SEGMENTS)
    return sorted(n for n in (int(name) for name in names if name.isdecimal() and len(name) < 10) if start <= n < end)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_segment(root: Root, number: int) -> SegmentInfo:
    """Read and check a segment's attributes.

    Raises
    ------
    FileNotFoundError
        It was evicted.
    FormatError
        It is damaged or hostile.
    """
    path = root.segment_path(number)
    if path.is_symlink():
        raise FormatError(f"{path} is a symbolic link; a store has none, restore the folder itself")
    document_path = path / layout.METADATA
    data = document_path.read_bytes()
    attributes = metadata.parse_document(data, document_path).get("attributes")
    metadata.verify_document(data, document_path)
    try:
        metadata.check_requires(attributes or {}, document_path)
        return _parse_segment(root, number, path, attributes)
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{document_path}: unusable attributes ({error!r}); restore this file") from None


def _parse_segment(root: Root, number: int, path: Path, attributes: Any) -> SegmentInfo:
    lanes, chunk_rows = tuple(map(_whole, attributes["lanes"])), attributes["chunk_rows"]
    if not 1 <= len(lanes) <= layout.MAX_LANES:
        raise ValueError(f"{len(lanes)} lanes")
    for leaf in metadata.array_leaves(root.schema):
        rows = _whole(chunk_rows[leaf])
        nbytes = rows * len(lanes) * row_bytes(root, leaf)
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
        chunk_rows={leaf: chunk_rows[leaf] for leaf in metadata.array_leaves(root.schema)},
        machine=str(attributes["machine_id"]),
        boot=str(attributes["boot_id"]),
        inode=_whole(attributes["inode"]),
        created=str(attributes["created"]),
        sealed=sealed,
        steps=_whole(attributes["steps"]) if sealed else None,
        checksums=dict(attributes["checksums"]) if sealed else {},
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a whole number")
    return value
