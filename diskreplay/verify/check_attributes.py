"""What a segment says of itself: its attributes, and the counters of its lanes."""

import os
import stat
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.machine import boot_id
from diskreplay.format.volume import Volume, volume_of
from diskreplay.verify.crc import checksum
from diskreplay.verify.documents import (
    MAX_DOCUMENT_BYTES,
    Plan,
    fits_itself,
    is_group,
    is_positive,
    is_uuid,
    is_whole,
    parse,
)
from diskreplay.verify.files import Files

_SECTOR = 512  # what a disk writes as a whole
_MOST_NS = 1 << 62


@dataclass(frozen=True)
class Attributes:
    """What a segment's own document says, checked."""

    lanes: int
    chunk_rows: dict[str, int]
    in_place: bool
    sealed: bool
    steps: int
    checksums: dict[str, int]
    lost: tuple[tuple[int, int], ...]
    steps_lost: int
    writer: int
    times: tuple[int, int] | None = None
    claimed: tuple[int, ...] = ()
    unproven_steps: int = 0


@dataclass(frozen=True)
class Segment:
    """One look at a segment: where it is, what it says of itself, and the rows of each lane that count."""

    files: Files
    where: str
    plan: Plan
    attributes: Attributes
    rows: NDArray[np.int64]

    @property
    def longest(self) -> int:
        """The rows of its longest lane."""
        return int(self.rows.max())

    @property
    def kept_rows(self) -> int:
        """The rows of its longest lane with those that are kept although nothing proves them."""
        return max(self.longest, *self.attributes.claimed) if self.attributes.claimed else self.longest

    def inside(self, name: str) -> str:
        """Return the name of a file of the segment, relative to the store."""
        return f"{self.where}/{name}"

    def chunk(self, path: str, chunk: int) -> str:
        """Return the name of a chunk file, relative to the store."""
        return f"{self.where}/{path}/{layout.chunk_key(chunk, len(self.plan.arrays[path].shape))}"


def read_attributes(files: Files, folder: str, plan: Plan) -> Attributes | None:
    """Return what a segment says of itself, or None where it has to be reported."""
    where = f"{folder}/{layout.METADATA}"
    data = files.read(where, MAX_DOCUMENT_BYTES)
    if data is None:
        return None
    if not (fits := fits_itself(data)):
        files.report("checksum", where, "has no checksum of itself" if fits is None else "does not fit its checksum")
        return None
    document = parse(files, where, data)
    if document is None:
        return None
    try:
        if not is_group(document):
            raise ValueError("this is no group")
        given = document["attributes"]
        return _as_copied(
            files, folder, plan, _parse_attributes(given, plan, _is_in_place(files, folder, given)), given
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        files.report("metadata", where, f"unusable attributes: {text[:120]}")
        return None


def _parse_attributes(given: Any, plan: Plan, in_place: bool) -> Attributes:
    if given.get("requires"):
        raise ValueError(f"needs {given['requires']!r:.80}, which this release does not know")
    if given["store"] != plan.store:
        raise ValueError(f"a segment of another store, {given['store']!r:.40}")
    if not is_uuid(given["uuid"]):
        raise ValueError(f"uuid is {given['uuid']!r:.40}")
    lanes, chunk_rows, checksums = given["lanes"], given["chunk_rows"], {}
    if not isinstance(lanes, list) or not all(map(is_whole, lanes)) or not 1 <= len(set(lanes)) <= layout.MAX_LANES:
        raise ValueError("lanes is no list of numbers")
    if len(set(lanes)) < len(lanes):
        raise ValueError("a lane is there twice")
    for path, array in plan.arrays.items():
        rows = chunk_rows[path]
        if not is_whole(rows, 1) or rows & (rows - 1):
            raise ValueError(f"{rows!r:.40} rows a chunk of {path}")
        if rows > 1 and rows * len(lanes) * array.row_bytes > 2 * layout.MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {path} are too large")
    if not isinstance(given["sealed"], bool):
        raise ValueError("sealed is neither true nor false")
    if given["sealed"]:
        checksums = given["checksums"]
        if not isinstance(checksums, dict) or not all(is_whole(crc) and crc < 1 << 32 for crc in checksums.values()):
            raise ValueError("checksums are no numbers of 32 bits")
    for name in ("writer", "inode", *(["steps"] if given["sealed"] else [])):
        if not is_whole(given[name]):
            raise ValueError(f"{name} is {given[name]!r:.40}")
    if given["sealed"] and not is_positive(given.get("sealed_at", 1)):
        raise ValueError(f"sealed_at is {given['sealed_at']!r:.40}")
    if given["sealed"] and not _is_boot_time(given.get("sealed_clock")):
        raise ValueError(f"sealed_clock is {given['sealed_clock']!r:.40}")
    _check_clock(given)
    for name in ("machine_id", "boot_id", "created"):
        if not isinstance(given[name], str):
            raise ValueError(f"{name} is {given[name]!r:.40}")
    volume = given["volume"]
    if not isinstance(volume, list) or len(volume) != 3 or not all(map(is_whole, volume)):
        raise ValueError(f"volume is {volume!r:.40}")
    claimed, unproven = given.get("claimed", []), given.get("unproven_steps", 0)
    if not isinstance(claimed, list) or not all(map(is_whole, claimed)) or len(claimed) not in (0, len(lanes)):
        raise ValueError("claimed is no list of rows")
    if not is_whole(unproven):
        raise ValueError(f"unproven_steps is {unproven!r:.40}")
    return Attributes(
        lanes=len(lanes),
        chunk_rows={path: chunk_rows[path] for path in plan.arrays},
        in_place=in_place,
        writer=given["writer"],
        claimed=tuple(claimed),
        unproven_steps=unproven,
        sealed=given["sealed"],
        steps=given["steps"] if given["sealed"] else 0,
        times=tuple(given["times"]) if given["sealed"] and given["times"] is not None else None,
        checksums=checksums,
        lost=_parse_lost(given, len(lanes)),
        steps_lost=given.get("steps_lost", 0),
    )


def _parse_lost(given: Any, lanes: int) -> tuple[tuple[int, int], ...]:
    """Return position and rows of each range that was lost to damage: they follow one another and do not overlap."""
    ranges, steps = given.get("lost", []), given.get("steps_lost", 0)
    if not isinstance(ranges, list) or not all(
        isinstance(entry, list) and len(entry) == 2 and is_whole(entry[0]) and is_whole(entry[1], 1) for entry in ranges
    ):
        raise ValueError("lost is no list of positions and rows")
    if any(before[0] >= after[0] for before, after in pairwise(ranges)):
        raise ValueError("lost is not in order")
    free: dict[int, int] = {}  # the first row of each lane that is not in a range before
    for position, rows in ranges:
        row, lane = divmod(position, lanes)
        if row < free.get(lane, 0):
            raise ValueError(f"lost names row {row} of lane {lane} twice")
        free[lane] = row + rows
    if not is_whole(steps) or steps > sum(rows for _, rows in ranges) or (given["sealed"] and steps > given["steps"]):
        raise ValueError(f"steps_lost is {steps!r:.40}")
    return tuple((position, rows) for position, rows in ranges)


def _check_clock(given: Any) -> None:
    """Check what a segment says of the times of its rows: where the epoch is on their clock, and which there are."""
    wall = given["clock"]["wall"]
    if not isinstance(wall, int) or isinstance(wall, bool) or abs(wall) > _MOST_NS:
        raise ValueError(f"clock is {given['clock']!r:.60}")
    if not given["sealed"] or (times := given["times"]) is None:
        return
    in_order = isinstance(times, list) and len(times) == 2 and all(map(is_whole, times)) and times[0] <= times[1]
    if not in_order or times[1] > _MOST_NS:
        raise ValueError(f"times is {times!r:.60}")


def _is_boot_time(value: Any) -> bool:
    """Whether a value is none, or machine, boot and seconds since that."""
    if not isinstance(value, list) or len(value) != 3:
        return value is None
    return isinstance(value[0], str) and isinstance(value[1], str) and (value[2] == 0 or is_positive(value[2]))


def was_lost(files: Files, folder: str) -> bool:
    """Whether a segment is one whose machine went down before its own document was on the disk; no mark is there."""
    scratch = Files(files.root)
    if not scratch.is_folder(folder) or has_marks(scratch, folder):
        return False
    data = _contents(scratch, f"{folder}/{layout.METADATA}")
    if scratch.problems:
        return False  # what is a link, or cannot be read, is another matter
    return not data or any(not data[at : at + _SECTOR].strip(b"\0") for at in range(0, len(data), _SECTOR))


def has_marks(files: Files, folder: str) -> bool:
    """Whether anything says that rows of a segment were brought to the disk: a mark, or a durable row."""
    return any(_contents(files, f"{folder}/{name}").strip(b"\0") for name in (layout.MARKS, f"{layout.DURABLE}/c.0"))


def _as_copied(files: Files, folder: str, plan: Plan, found: Attributes, given: dict[str, Any]) -> Attributes:
    """Take a segment in a copy for one that is not sealed, if some of its chunks were copied before it was."""
    if not found.sealed or given["inode"] == _inode(files, folder):
        return found
    writable, missing = False, False
    for name, crc in found.checksums.items():
        if name.rpartition("/")[0] not in plan.arrays or name.endswith(layout.METADATA):
            continue
        path = files.path(f"{folder}/{name}")
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & 0o222:
                writable = True
                missing |= _checksum(path) != crc
        except OSError:
            missing = True
    log = files.path(f"{folder}/{layout.MARKS}")
    if not missing or not (writable or (os.path.lexists(log) and os.lstat(log).st_size)):
        return found
    return replace(found, sealed=False, in_place=False, steps=0, checksums={}, times=None, claimed=(), unproven_steps=0)


def _checksum(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return checksum(fd)
    finally:
        os.close(fd)


def _is_in_place(files: Files, folder: str, attributes: dict[str, Any]) -> bool:
    """Whether a segment is where it was written, in the same boot: what is in memory counts then."""
    volume = attributes.get("volume")
    if not boot_id() or attributes.get("boot_id") != boot_id() or not isinstance(volume, list) or len(volume) != 3:
        return False
    try:
        here = volume_of(files.path(folder))
    except OSError:
        return False
    return attributes.get("inode") == _inode(files, folder) and here.may_be(Volume(*volume))


def _contents(files: Files, where: str) -> bytes:
    """Return the bytes of a file, none where it is missing."""
    if not os.path.lexists(files.path(where)):
        return b""
    return files.read(where, MAX_DOCUMENT_BYTES) or b""


def read_counters(files: Files, folder: str, attributes: Attributes) -> NDArray[np.int64] | None:
    """Return the rows of each lane that are committed, or None where a counter has to be reported."""
    lanes, values, before = attributes.lanes, {}, len(files.problems)
    if not all([files.is_folder(f"{folder}/{name}") for name in layout.LANE_COUNTERS]):
        return None
    # In this order: a writer stores `committed` first, so what is read of it is never behind the others.
    for name in (layout.DURABLE, layout.OBSERVED, layout.COMMITTED):
        data = files.read(f"{folder}/{name}/c.0", 8 * lanes, 8 * lanes)
        if data is None:
            return None
        values[name] = np.frombuffer(data, "<i8")
        crc = crc32c(data)
        if attributes.checksums.get(f"{name}/c.0", crc) != crc:
            files.report("checksum", f"{folder}/{name}/c.0", "does not fit the checksum that it was sealed with")
    if len(files.problems) > before:
        return None
    committed, observed, durable = (values[name] for name in (layout.COMMITTED, layout.OBSERVED, layout.DURABLE))
    most = layout.POSITION_MASK // lanes
    wrong: dict[str, str] = {}
    for name, value in values.items():
        if (value < 0).any() or (value > most).any():
            wrong[name] = "a lane has a number of rows that cannot be"
    if not attributes.sealed and not attributes.in_place:
        return committed  # whatever they are, nothing but marks counts here
    if not wrong:
        if (observed > committed + 1).any() or (attributes.sealed and (observed > committed).any()):
            wrong[layout.OBSERVED] = "a lane has more observations than its rows allow"
        if (durable > committed).any() or (attributes.sealed and (durable != committed).any()):
            wrong[layout.DURABLE] = "a lane has other rows than are committed"
    for name, detail in wrong.items():
        files.report("counters", f"{folder}/{name}/c.0", detail)
    if wrong:
        return None
    return committed


def _inode(files: Files, folder: str) -> int:
    try:
        return os.stat(files.path(f"{folder}/{layout.COMMITTED}/c.0")).st_ino
    except OSError:
        return -1
