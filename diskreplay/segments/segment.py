"""Segments: their attributes, and functions that make segments and read their attributes."""

import dataclasses
import errno
import os
import shutil
import uuid as uuids
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from diskreplay.errors import FormatError
from diskreplay.folders import BY_PATH, Lookup, LookupBelow
from diskreplay.segments.documents import layout, metadata
from diskreplay.segments.documents.metadata import (
    Attribute,
    is_number,
    is_uuid,
    is_whole,
    whole,
    wholes,
)
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.copies import is_whole_copy
from diskreplay.segments.files.durable import (
    drafted,
    overwrite,
    storage_error,
    storage_errors,
    sync_folder,
    sync_tree,
    write_atomic,
    write_file,
    write_zeros,
)
from diskreplay.segments.files.locks import Lock, try_lock
from diskreplay.segments.files.machine import MOST_NS, BootTime, Clock, Volume, boot_id, machine_id, volume_of
from diskreplay.segments.files.mapping import Mapping, map_file, open_regular, read_regular, refuse_links
from diskreplay.segments.shards import Compressed, codec

# The errors that reading a damaged or missing segment raises.
DAMAGE = (FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
# `read_segment` checks that these paths are no symbolic links, because its callers open them next.
_READ_AT_ONCE = (*layout.LANE_COUNTERS, layout.DONE, f"{layout.COMMITTED}/{layout.LOCK}")

# The prefix of a draft folder: a writer makes its next segment in advance, without a number, in the folder of the
# store's counters. When the segment is needed, `place_segment` gives it a number and moves it to the folder of
# segments.
DRAFT = "next-"
_PACK_DRAFT = f"{DRAFT}pack"  # the name of the folder in which a pack is built
_NO_NUMBER = -1
_END_OF_TIME = 1e12
# The number of bytes that a disk writes as a unit, and the maximum number of bytes read from a file.
_SECTOR, _MOST_BYTES = 512, 64 << 20


@dataclass(frozen=True)
class Lost:
    """The rows of a segment that were lost to damage, and the number of steps in them.

    Lost rows form ranges of successive rows of a lane. Repair writes zeros in these rows, and new flags that make each
    range one episode, so that lanes stay sequences of episodes. Readers leave these episodes out.

    ``ranges`` has (position of the first row, number of rows) for each range, sorted by position. The position of row r
    of lane i is r times the number of lanes, plus i. ``steps`` is the number of lost steps, without steps that had been
    evicted by hand. ``values`` has, for each range, the number of its rows in arrays of episode fields. These rows are
    zeros, and stay in the arrays although no row of the range has the flag `EPISODE_VALUES`.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    steps: int = 0
    values: tuple[int, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, int]], steps: int) -> "Lost":
        ordered = sorted(entries)
        return cls(tuple(entry[:2] for entry in ordered), steps, tuple(values for *_, values in ordered))

    @property
    def entries(self) -> Iterator[tuple[int, int, int]]:
        return ((position, rows, values) for (position, rows), values in zip(self.ranges, self.values, strict=True))

    @property
    def surplus(self) -> int:
        """The number of rows in all ranges, minus ``steps``.

        Repair writes flags that make each lost row a step, so a count of steps by flags is too large by this number.
        """
        return sum(rows for _, rows in self.ranges) - self.steps

    def holds(self, position: int, lanes: int) -> bool:
        row, lane = divmod(position, lanes)
        return any(
            first % lanes == lane and first // lanes <= row < first // lanes + rows for first, rows in self.ranges
        )


NOTHING_LOST = Lost()


class PackSize(NamedTuple):
    """The number of segments in a pack, and the number of lanes of all these segments."""

    members: int
    runs: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """The attributes of a segment, and the folder of its files.

    `path` goes through the open folder `root.home`, and is valid only while `root.home` is open.
    """

    number: int
    path: Path
    root: Root = field(repr=False, compare=False)
    uuid: str
    writer: int
    lanes: tuple[int, ...]
    chunk_rows: dict[str, int]
    machine: str
    boot: str
    inode: int
    volume: Volume
    clock: Clock  # the clock of the boot in which rows were written; a copy has this clock, but an empty `boot`
    created: str
    sealed: bool = False
    steps: int | None = None
    # The number of rows of each lane in arrays of episode fields; empty: no episode fields, or unsealed.
    values: tuple[int, ...] = ()
    checksums: dict[str, int] = field(default_factory=dict)
    sealed_at: float = 0.0  # the time of the sealing, in seconds since the epoch; 0: unsealed, or not recorded
    sealed_clock: BootTime | None = None
    times: tuple[int, int] | None = None  # the times of the oldest and the newest row; None: unsealed, or no rows
    # The number of rows of each lane in the files, with unproven rows; None if sealing found no unproven rows.
    claimed: tuple[int, ...] | None = None
    unproven_steps: int = 0  # an upper bound of the number of steps in the unproven rows
    unproven_time: int = 0  # the assumed time of unproven rows, in ns since the epoch; 0: not recorded
    episodes: int | None = None  # the number of episodes in the table of `episode_table`; None: no table
    lost: Lost = NOTHING_LOST
    packed: PackSize | None = None  # None: the segment is not a pack. See `packs`
    compressed: dict[str, Compressed] = field(default_factory=dict)  # by path: the compressed arrays of a pack
    # This attribute is not in zarr.json. Readers of a damaged copy of a sealed segment show this number of rows of each
    # lane, except the episodes in `lost` (see `rebuild.read_shown`). In all other segments, `shown` is None.
    shown: tuple[int, ...] | None = None
    # The inode, modification time and size that the segment's zarr.json had when it was read; zeros: not read.
    document: metadata.Identity = field(default=(0, 0, 0), repr=False, compare=False)
    arrays: dict[str, metadata.RowArray] = field(init=False, repr=False, compare=False)  # arrays with rows, by path

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", self.root.blueprint.of(self.chunk_rows).arrays)

    @property
    def is_in_place(self) -> bool:
        """Whether the segment's files are the original files, and were not copied, moved or taken from a snapshot."""
        return self.has_its_inode() and self.volume.may_be(volume_of(str(self.path)))

    def has_its_inode(self, lookup: Lookup = BY_PATH) -> bool:
        """Return whether `inode` is still the inode of the file with the counter of committed rows.

        A copy of the file has another inode, but in a snapshot of the volume, the file may have the same inode.
        """
        try:
            return self.inode == counter_inode(str(self.path), lookup)
        except FileNotFoundError:  # the counter was lost in a power loss
            return False

    @property
    def lock_path(self) -> str:
        return f"{self.path}/{layout.COMMITTED}/{layout.LOCK}"

    @property
    def bounds(self) -> tuple[int, int]:
        """The times of the segment's oldest and newest row, in nanoseconds since the epoch; zeros if unknown."""
        if self.times is None:
            return 0, 0
        first, last = self.times
        return max(0, first + self.clock.wall), max(0, last + self.clock.wall)

    @property
    def kept_until(self) -> int:
        """The time of this sealed segment's newest row, in ns since the epoch.

        Retention deletes the segment if only rows with later times are kept. The times of unproven rows cannot be
        trusted, so these rows count as published when the segment was sealed.
        """
        if self.claimed is None:
            return self.bounds[1]
        return max(self.bounds[1], self.unproven_time or min(int(self.sealed_at * 1e9), MOST_NS))

    def came_before(self, time: int) -> bool:
        return self.sealed and self.kept_until < time

    @property
    def store(self) -> str:
        return self.root.uuid

    @property
    def requires(self) -> list[str]:
        return [*([layout.PACKS] if self.packed else []), *([layout.ZSTD] if self.compressed else [])]

    def attributes(self) -> dict[str, Any]:
        own = partial(getattr, self)
        return {
            **metadata.write_by(_SEGMENT, own),
            **(metadata.write_by(_SEALED, own) if self.sealed else {}),
            **(metadata.write_by(_UNPROVEN, own) if self.claimed is not None else {}),
            **(metadata.write_by(_LOST, partial(getattr, self.lost)) if self.lost.ranges else {}),
            **metadata.write_by(_PACK, own),
        }

    # --- files ---------------------------------------------------------------------------------------------------

    @property
    def blueprint(self) -> metadata.Blueprint:
        blueprint = self.root.blueprint.of(self.chunk_rows)
        if self.packed is None:
            return blueprint
        arrays = blueprint.arrays
        codecs = {leaf: codec(how.rows, how.level, arrays[leaf].shape) for leaf, how in self.compressed.items()}
        return blueprint.of_pack(*self.packed, codecs)

    @property
    def has_values(self) -> bool:
        return bool(self.root.blueprint.values)

    def chunk_nbytes(self, leaf: str) -> int:
        if leaf in self.compressed:
            return self.compressed[leaf].nbytes
        return len(self.lanes) * self.chunk_rows[leaf] * self.arrays[leaf].row_bytes

    def chunk_path(self, leaf: str, chunk: int) -> str:
        return f"{self.path}/{leaf}/{self.arrays[leaf].chunk_key(chunk)}"

    def map_chunk(self, leaf: str, chunk: int) -> Mapping:
        """Return a mapping of a chunk file; FileNotFoundError if it is missing, FormatError if its size is wrong."""
        return map_file(self.chunk_path(leaf, chunk), self.chunk_nbytes(leaf))

    def map_numbers(self, leaf: str, chunk: int) -> NDArray[Any]:
        """Return a mapped chunk of flags or times as an array ``(lanes, rows)``; errors as for `map_chunk`."""
        return self.map_chunk(leaf, chunk).array(self.arrays[leaf].dtype, (len(self.lanes), self.chunk_rows[leaf]))

    def open_chunk(self, leaf: str, chunk: int) -> int:
        """Return a descriptor to read and write a chunk; a missing chunk is created at full size, without disk blocks.

        Raises FormatError if the file has the wrong size. Raises StorageFull if the disk has no room for a new file's
        name: no file is left, and the call may be repeated.
        """
        path, nbytes = self.chunk_path(leaf, chunk), self.chunk_nbytes(leaf)
        with suppress(FileNotFoundError):
            return open_regular(path, nbytes, os.O_RDWR)
        self.root.check_still_there()
        # The shape is written before the file, because a call that finds the file does not write the shape. zarr reads
        # the rows of a missing file as zeros.
        self.write_rows(leaf, (chunk + 1) * self.chunk_rows[leaf])
        temporary = f"{self.path}/{leaf}/.new-{chunk}"
        try:
            write_file(temporary, nbytes=nbytes)
            os.rename(temporary, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise storage_error(error, path) from error
        return open_regular(path, nbytes, os.O_RDWR)

    def write_rows(self, leaf: str, rows: int) -> None:
        """Write into an array's zarr.json that each lane has ``rows`` rows.

        The file is overwritten in place if its size stays the same. A new file would have to be synced before it
        replaces the old file. Without the sync, a power loss could leave an empty zarr.json for durable rows. If
        StorageFull is raised, the zarr.json is unchanged.
        """
        path, document = self.path / leaf / layout.METADATA, self.rows_document(leaf, rows)
        if not overwrite(path, document):
            write_atomic(path, document, synced=True)

    def documents(self) -> Iterator[tuple[str, bytes]]:
        """Yield (path, zarr.json) of each folder below the segment, parents first; each array has a chunk's shape."""
        return self.blueprint.documents(len(self.lanes), self.chunk_rows, None)

    def own_document(self) -> bytes:
        return self.root.blueprint.segment_document(self.attributes())

    def rows_document(self, leaf: str, rows: int) -> bytes:
        return self.arrays[leaf].document(len(self.lanes), rows, self.chunk_rows[leaf])

    def with_priority(self, rows: int) -> "SegmentInfo":
        """Add the array of initial priorities; the first ``rows`` rows of each lane get 0, which means no priority.

        Return the new attributes. Only the segment's writer may call this, while no mark is being made. After a power
        loss, the segment has either the complete array or no such array. After StorageFull, the segment is unchanged,
        and the call may be repeated.
        """
        leaf, per_chunk = layout.PRIORITY, self.chunk_rows[layout.TIME]  # rows of both arrays have 8 bytes
        changed = dataclasses.replace(self, chunk_rows={**self.chunk_rows, leaf: per_chunk})
        building, folder = f"{self.path}/{layout.DURABLE}/.{leaf}", f"{self.path}/{leaf}"
        chunks = max(1, -(-rows // per_chunk))
        with drafted(building):
            os.mkdir(building)
            write_file(f"{building}/{layout.METADATA}", changed.rows_document(leaf, chunks * per_chunk))
            for chunk in range(chunks):
                write_zeros(f"{building}/{changed.arrays[leaf].chunk_key(chunk)}", changed.chunk_nbytes(leaf))
            sync_tree(building)
            shutil.rmtree(folder, ignore_errors=True)  # an earlier call may have failed after the renaming below
            os.rename(building, folder)
            sync_folder(self.path)
        write_atomic(self.path / layout.METADATA, changed.own_document(), synced=True)
        return changed


# --- the attributes in zarr.json --------------------------------------------------------------------------------------


def _is_clock(value: Any) -> bool:
    wall = value.get("wall") if isinstance(value, dict) else None
    return isinstance(wall, int) and not isinstance(wall, bool) and abs(wall) <= MOST_NS


def _is_moment(value: Any) -> bool:
    return is_number(value) and value >= 0  # False for NaN


def _is_boot_time(value: Any) -> bool:
    return isinstance(value, list) and [*map(type, value[:2])] == [str, str] and [*map(is_number, value[2:])] == [True]


_pair, _lane_numbers = wholes(2), wholes(most=layout.MAX_LANES - 1)


def _are_lanes(value: Any) -> bool:
    return _lane_numbers(value) and 1 <= len(value) <= layout.MAX_LANES


def _are_times(value: Any) -> bool:
    return _pair(value) and value[0] <= value[1] <= MOST_NS


def _is_pack_size(value: Any) -> bool:
    if not isinstance(value, dict) or not is_whole(runs := value.get("runs")):
        return False
    return is_whole(value.get("members"), 1, min(runs, layout.MAX_SEGMENTS))


_SEGMENT = (
    Attribute("requires", list, []),
    Attribute("uuid", is_uuid),
    Attribute("store", str),
    Attribute("writer", whole(most=layout.MAX_SEGMENTS - 1)),
    Attribute(
        "lanes",
        _are_lanes,
        make=tuple,
        write=list,
    ),
    Attribute("chunk_rows", dict),
    Attribute("machine_id", str, field="machine"),
    Attribute("boot_id", str, field="boot"),
    Attribute("inode", whole()),
    Attribute("volume", wholes(3), make=Volume._make, write=list),
    Attribute("clock", _is_clock, make=itemgetter("wall"), write=lambda clock: {"wall": clock.wall}),
    Attribute("created", str),
    Attribute("sealed", bool),
)
_SEALED = (
    Attribute("steps", whole()),
    Attribute("values", wholes(), (), make=tuple, write=list, may_lack=True),
    Attribute("sealed_at", _is_moment, 0.0, make=lambda seconds: float(min(seconds, _END_OF_TIME))),
    Attribute("sealed_clock", _is_boot_time, None, make=BootTime._make, write=list, may_be_null=True),
    Attribute("times", _are_times, make=tuple, write=list, may_be_null=True),
    Attribute("episodes", whole(), None, may_lack=True, may_be_null=True),
    Attribute("checksums", dict),
)
_UNPROVEN = (
    Attribute("claimed", wholes(), None, make=tuple, write=list, may_be_null=True),
    Attribute("unproven_steps", whole(), 0),
    Attribute("unproven_time", whole(most=MOST_NS), 0),
)
_LOST = (
    Attribute(
        "lost",
        lambda value: isinstance(value, list) and all(map(_pair, value)),
        (),
        field="ranges",
        make=lambda value: tuple(map(tuple, value)),
        write=lambda ranges: list(map(list, ranges)),
    ),
    Attribute("steps_lost", whole(), 0, field="steps"),
    Attribute("lost_values", wholes(), (), field="values", make=tuple, write=list),
)
_LOST_NAMES = {attribute.name for attribute in _LOST}
_PACK = (
    Attribute(
        "packed",
        _is_pack_size,
        None,
        make=lambda value: PackSize(value["members"], value["runs"]),
        write=PackSize._asdict,
        may_lack=True,
        may_be_null=True,
    ),
    Attribute(
        "compressed",
        dict,
        {},
        make=lambda value: {leaf: Compressed.read(how) for leaf, how in value.items()},
        write=lambda found: {leaf: how._asdict() for leaf, how in found.items()},
        may_lack=True,
    ),
)


class Size(NamedTuple):
    """The size of a segment to be made.

    ``chunk_rows`` is the maximum number of rows of a lane in a chunk. ``rows`` is the number of rows that each lane
    will have, if each lane gets one episode of a known length. In all other cases, ``rows`` is None.
    """

    chunk_rows: int
    rows: int | None = None
    least_bytes: int = 0  # a chunk with fewer bytes than this gets more rows than `chunk_rows`

    @property
    def most_values(self) -> int:
        return self.chunk_rows if self.rows is None else 1


def counter_inode(path: str, lookup: Lookup = BY_PATH) -> int:
    return lookup.status(f"{path}/{layout.COMMITTED}/c.0").st_ino


def draft_segment(
    root: Root, building: str, writer: int, lanes: Sequence[int], size: Size, clock: Clock, has_priority: bool = False
) -> tuple[SegmentInfo, Lock]:
    """Make a segment without a number in the new folder ``building``; return its attributes and its lock.

    ``building`` is in the folder of the store's counters. The lock is taken before any other file is made, so a free
    lock shows that the folder was left by a process that died. Raises StorageFull if the disk has no room; the folder
    is removed.
    """
    blueprint = root.blueprint.with_priority if has_priority else root.blueprint
    with drafted(building), ExitStack() as undo:
        os.mkdir(building)
        lock = lock_draft(building)
        undo.callback(lock.release)
        chunk_rows = {
            leaf: layout.value_chunk_rows(array.row_bytes, len(lanes), root.chunk_bytes, size.most_values)
            if array.is_of_episodes
            else layout.chunk_rows(array.row_bytes, len(lanes), root.chunk_bytes, size.chunk_rows, size.least_bytes)
            for leaf, array in blueprint.arrays.items()
        }
        _build_arrays(blueprint, building, len(lanes), chunk_rows, size.rows)
        info = SegmentInfo(
            number=_NO_NUMBER,
            path=Path(building),
            root=root,
            uuid=str(uuids.uuid4()),
            writer=writer,
            lanes=tuple(lanes),
            chunk_rows=chunk_rows,
            machine=machine_id(),
            boot=boot_id(),
            inode=counter_inode(building),
            volume=volume_of(building),
            clock=clock,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_file(f"{building}/{layout.METADATA}", info.own_document())
        undo.pop_all()
    return info, lock


def pack_draft(root: Root) -> str:
    return f"{root.counters_folder}/{_PACK_DRAFT}"


def lock_draft(building: str) -> Lock:
    committed = f"{building}/{layout.COMMITTED}"
    os.mkdir(committed)
    lock = try_lock(f"{committed}/{layout.LOCK}")
    if lock is None:  # another process has taken this draft for that of a dead writer
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), building)
    return lock


def place_segment(info: SegmentInfo, number: int) -> SegmentInfo:
    """Move a segment that `draft_segment` made to the folder of segment ``number``, and return its new attributes.

    The caller holds the store lock. Raises StorageFull if the disk has no room for the new name, FileNotFoundError if
    the segment was removed.
    """
    path = info.root.segment_path(number)
    with storage_errors(path):
        os.rename(info.path, path)
    return dataclasses.replace(info, number=number, path=path)


def remove_draft(info: SegmentInfo, lock: Lock) -> None:
    shutil.rmtree(info.path, ignore_errors=True)
    lock.release()


def _build_arrays(
    blueprint: metadata.Blueprint, building: str, lanes: int, chunk_rows: dict[str, int], rows: int | None
) -> None:
    for path, document in blueprint.documents(lanes, chunk_rows, rows):
        folder = f"{building}/{path}"
        if path != layout.COMMITTED:  # this folder exists already: it has the lock file
            os.mkdir(folder)
        write_file(f"{folder}/{layout.METADATA}", document)
        if array := blueprint.arrays.get(path):
            write_file(f"{folder}/{array.chunk_key(0)}", nbytes=lanes * chunk_rows[path] * array.row_bytes)
        elif path in blueprint.counters:
            write_file(f"{folder}/c.0", bytes(8 * lanes))


# --- reading ---------------------------------------------------------------------------------------------------------


def read_segment(root: Root, number: int, path: Path | None = None) -> SegmentInfo:
    """Return the attributes of a segment after checking them; ``path`` replaces the usual folder for its number.

    Raises FileNotFoundError if the segment was evicted, and FormatError if it is damaged or forged. Raises NeverWritten
    if a power loss came before anything in the segment was durable: callers treat this segment as evicted.
    """
    path = path or root.segment_path(number)
    try:
        with LookupBelow(str(path)) as lookup:
            return _read_segment(root, number, path, lookup)
    except NotADirectoryError:
        if os.path.islink(path):
            raise FormatError(f"{path} is a symbolic link; a store has none, restore the folder itself") from None
        raise


def read_as_sealed(info: SegmentInfo) -> SegmentInfo | None:
    """Return the attributes in a segment's zarr.json if they say that the segment is sealed, and ``info`` does not.

    `read_segment` returns some copies of sealed segments as unsealed. For any other segment, None is returned. Errors
    as for `read_segment`.
    """
    with LookupBelow(str(info.path)) as lookup:
        found = _read_segment(info.root, info.number, info.path, lookup, is_trusted=True)
    return found if found.sealed and found.packed is None and not info.sealed else None


def write_unsealed(info: SegmentInfo) -> None:
    """Durably replace the zarr.json of a sealed segment by that of an unsealed segment.

    If StorageFull is raised, the zarr.json is unchanged.
    """
    document = dataclasses.replace(info, sealed=False, claimed=None).own_document()
    write_atomic(info.path / layout.METADATA, document, synced=True)
    sync_folder(info.path)


def _read_segment(root: Root, number: int, path: Path, lookup: Lookup, *, is_trusted: bool = False) -> SegmentInfo:
    document_path = f"{path}/{layout.METADATA}"
    try:
        data, identity = metadata.read_identified(document_path, lookup)
        attributes = metadata.parse_document(data, document_path).get("attributes")
        metadata.verify_document(data, document_path)
    except (FormatError, FileNotFoundError):
        if is_never_written(str(path)):
            raise NeverWritten(errno.ENOENT, "nothing of it was written before the power loss", str(path)) from None
        raise
    # Only the paths that are read next are checked for links, because there may be thousands of segments. Folders of
    # other arrays are checked when chunks are mapped.
    refuse_links(path, _READ_AT_ONCE, lookup)
    try:
        metadata.check_requires(attributes or {}, document_path)
        info = _parse_segment(root, number, path, attributes, identity)
        return info if is_trusted else _as_copied(info, lookup)
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{document_path}: unusable attributes ({error!r}); restore this file") from None


def _as_copied(info: SegmentInfo, lookup: Lookup) -> SegmentInfo:
    """Return the attributes as readers must see them: unsealed if the segment may have been sealed while it was copied.

    The attributes of packs are returned unchanged, because a pack is complete before it is moved to the folder of
    segments.
    """
    if not info.sealed or info.packed is not None or info.has_its_inode(lookup):
        return info
    if is_whole_copy(info.arrays, str(info.path), info.checksums):
        if metadata.identify(f"{info.path}/{layout.METADATA}", lookup) == info.document:
            return info
        # Another process has begun to seal this copy again. That process replaced the zarr.json by an unsealed one
        # before the chunks became read-only.
        return _read_segment(info.root, info.number, info.path, lookup)
    return dataclasses.replace(
        info, sealed=False, steps=None, values=(), checksums={}, sealed_at=0.0, times=None, boot=""
    )


def _parse_segment(root: Root, number: int, path: Path, attributes: Any, identity: metadata.Identity) -> SegmentInfo:
    found = metadata.read_by(_SEGMENT + _PACK, attributes)
    root.check_owns(path, found["store"])
    lanes, arrays = len(found["lanes"]), root.blueprint.of(found["chunk_rows"]).arrays
    if found["sealed"]:
        found |= metadata.read_by(_SEALED + _UNPROVEN, attributes)
        if root.blueprint.values:
            _check_lanes("values", found["values"], lanes)
        else:
            found["values"] = ()
        if found["claimed"] is not None:
            _check_lanes("claimed", found["claimed"], lanes)
    compressed, packed = found["compressed"], found["packed"]
    if packed is not None and not (found["sealed"] and found["lanes"] == (0,)):
        raise ValueError("a pack must be sealed and have one lane")
    if not compressed.keys() <= arrays.keys() or (compressed and packed is None):
        raise ValueError(f"the attribute compressed lists {sorted(compressed)!r:.80}")
    found["chunk_rows"] = {leaf: found["chunk_rows"][leaf] for leaf in arrays}
    _check_chunk_rows(found["chunk_rows"], lanes, arrays, compressed)
    found["clock"] = Clock(found["boot"], found["clock"])
    found["lost"] = _parse_lost(attributes, lanes, found.get("steps"))
    del found["store"], found["requires"]
    return SegmentInfo(number=number, path=path, root=root, document=identity, **found)


def _check_lanes(name: str, rows: tuple[int, ...], lanes: int) -> None:
    if len(rows) != lanes or max(rows) > layout.POSITION_MASK // lanes:
        raise ValueError(f"{name} is {rows!r:.80}")


def _check_chunk_rows(
    chunk_rows: dict[str, Any], lanes: int, arrays: dict[str, metadata.RowArray], compressed: dict[str, Compressed]
) -> None:
    for leaf, array in arrays.items():
        rows = chunk_rows[leaf]
        # The number of rows is a power of two. A chunk of a single row may be larger than the maximum chunk size.
        if type(rows) is not int or rows < 1 or rows & (rows - 1):
            raise ValueError(f"{rows!r:.40} rows a chunk of {leaf}")
        if leaf in compressed:
            is_possible = compressed[leaf].is_possible(rows, array.row_bytes)
        else:
            is_possible = rows == 1 or rows * lanes * array.row_bytes <= 2 * layout.MAX_CHUNK_BYTES
        if not is_possible:
            raise ValueError(f"{rows} rows a chunk of {leaf}")


def _parse_lost(attributes: Any, lanes: int, steps: int | None) -> Lost:
    """Return the lost rows of a segment; ``steps`` is the segment's number of steps, None if it is unsealed.

    Raises ValueError for impossible values.
    """
    if attributes.keys().isdisjoint(_LOST_NAMES):
        return NOTHING_LOST
    lost = Lost(**metadata.read_by(_LOST, attributes))
    ends: dict[int, int] = {}  # by lane
    before = -1
    for position, rows in lost.ranges:
        row, lane = divmod(position, lanes)
        in_order = position > before and row >= ends.get(lane, 0)
        if not in_order or rows < 1 or (row + rows) * lanes > layout.POSITION_MASK:
            raise ValueError(f"the attribute lost has {rows} rows from position {position} on")
        before, ends[lane] = position, row + rows
    most = sum(rows for _, rows in lost.ranges)
    if lost.steps > min(most if steps is None else steps, most):
        raise ValueError(f"steps_lost is {lost.steps!r:.40}")
    if len(lost.values) != len(lost.ranges) or any(count > rows for _, rows, count in lost.entries):
        raise ValueError(f"lost_values is {lost.values!r:.80}")
    return lost


# --- never synced before a power loss: files are empty or missing -----------------------------------------------------


class NeverWritten(FileNotFoundError):
    """A power loss came before the segment's zarr.json was durable, and therefore before any row was durable."""


def is_never_written(segment: str) -> bool:
    """Return whether a segment's zarr.json is unreadable because a power loss came before any row was durable.

    If so, the zarr.json is empty, missing or partly zeros. The segment also has no marks, because marks are made only
    after the zarr.json is durable. Any other unreadable zarr.json is damaged.
    """
    blank = _is_blank(f"{segment}/{layout.METADATA}") and has_no_mark(segment)
    return blank and os.path.isdir(segment)  # this check is the last, because retention may remove the folder meanwhile


def has_no_mark(segment: str) -> bool:
    if os.path.islink(f"{segment}/{layout.DURABLE}"):
        return False
    found = [_content(f"{segment}/{name}") for name in (layout.MARKS, f"{layout.DURABLE}/c.0")]
    return all(data is not None and not data.strip(b"\0") for data in found)


def _is_blank(path: str) -> bool:
    data = _content(path)
    if not data:
        return data is not None
    return any(not data[at : at + _SECTOR].strip(b"\0") for at in range(0, len(data), _SECTOR))


def _content(path: str) -> bytes | None:
    """Return the bytes of a file; empty if it is missing, None if it is not a regular file or too large."""
    try:
        data = read_regular(path, None, _MOST_BYTES + 1)
    except FileNotFoundError:
        return b""
    except (OSError, FormatError):
        return None
    return data if len(data) <= _MOST_BYTES else None
