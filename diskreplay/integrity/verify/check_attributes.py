"""Checks the attributes of a segment, and the counters of its lanes."""

import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from diskreplay.ids import EPISODE_VALUES
from diskreplay.integrity.verify.documents import (
    MAX_DOCUMENT_BYTES,
    Compressed,
    Plan,
    is_positive,
    is_uuid,
    is_whole,
    read_group,
)
from diskreplay.integrity.verify.files import BLOCK_BYTES, Files, checksum, read_at
from diskreplay.integrity.verify.pack_tables import Tables
from diskreplay.segments.documents import layout
from diskreplay.segments.files.machine import Volume, boot_id, volume_of

Ints = NDArray[np.int64]

_SECTOR = 512  # in bytes; a disk writes a sector completely or not at all
_MOST_NS = 1 << 62


@dataclass(frozen=True)
class Attributes:
    lanes: int
    chunk_rows: dict[str, int]
    in_place: bool
    sealed: bool
    steps: int
    checksums: dict[str, int]
    lost: tuple[tuple[int, int], ...]  # rows lost to damage: (row * lanes + lane of the first row, number of rows)
    lost_values: tuple[int, ...]  # the number of lost values of episode fields in each range of `lost`
    steps_lost: int
    writer: int
    values: tuple[int, ...] = ()  # each lane's number of values of episode fields; empty if not sealed
    times: tuple[int, int] | None = None
    episodes: int | None = None  # the number of lines of the table of episodes; None: there is no table
    claimed: tuple[int, ...] = ()  # each lane's number of rows, with unproven rows; empty if all rows are proven
    unproven_steps: int = 0
    was_sealed: bool = False  # the segment was copied while being sealed: marks or block checksums must prove its rows
    packed: tuple[int, int] | None = None  # the numbers of lines of a pack's two tables; None: not a pack
    compressed: Mapping[str, Compressed] = field(default_factory=dict)  # {path of an array: how it is compressed}


@dataclass(frozen=True)
class Segment:
    """A segment on disk: its folder, its attributes, and for each lane the number of rows that count as data.

    ``values`` has each lane's number of rows in arrays of episode fields. ``kept_values`` is the largest such number if
    unproven rows are included; it is 0 if all rows are proven. ``tables`` has the two tables of a pack, if they are
    undamaged.
    """

    files: Files
    where: str
    plan: Plan
    attributes: Attributes
    rows: NDArray[np.int64]
    values: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    kept_values: int = 0
    tables: Tables | None = None

    @property
    def lanes(self) -> int:
        return self.attributes.lanes

    @property
    def chunk_rows(self) -> dict[str, int]:
        return self.attributes.chunk_rows

    @property
    def longest(self) -> int:
        return int(self.rows.max())

    @property
    def kept_rows(self) -> int:
        return max(self.longest, *self.attributes.claimed) if self.attributes.claimed else self.longest

    def rows_of(self, path: str) -> NDArray[np.int64]:
        return self.values if layout.is_of_episodes(path) else self.rows

    def longest_of(self, path: str) -> int:
        return int(self.rows_of(path).max())

    def kept_of(self, path: str) -> int:
        return max(self.longest_of(path), self.kept_values) if layout.is_of_episodes(path) else self.kept_rows

    def inside(self, name: str) -> str:
        return f"{self.where}/{name}"

    def chunk(self, path: str, chunk: int) -> str:
        return f"{self.where}/{path}/{self.plan.arrays[path].chunk_name(chunk)}"

    def chunk_bytes(self, path: str) -> int:
        if path in self.attributes.compressed:
            return self.attributes.compressed[path].nbytes
        return self.lanes * self.chunk_rows[path] * self.plan.arrays[path].row_bytes

    def read_rows(self, path: str, lane: int, first: int, stop: int) -> bytes | None:
        """Return the bytes of rows ``[first, stop)``, all in one chunk; None: the chunk's file is not complete."""
        per_chunk, row_bytes = self.chunk_rows[path], self.plan.arrays[path].row_bytes
        nbytes, at = (stop - first) * row_bytes, (lane * per_chunk + first % per_chunk) * row_bytes
        # A missing file is not reported here: `check_chunks` reports it.
        with self.files.quiet().opened(self.chunk(path, first // per_chunk), self.chunk_bytes(path)) as fd:
            if fd is not None and len(data := read_at(fd, nbytes, at)) == nbytes:
                return data
        return None

    def read_flags(self, lane: int, first: int, stop: int) -> NDArray[np.uint8]:
        return np.frombuffer(self.read_rows(layout.DONE, lane, first, stop) or b"", np.uint8)

    def flag_parts(self, lane: int, first: int, stop: int) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        per_chunk = self.chunk_rows[layout.DONE]
        while first < stop:
            end = min(stop, (first // per_chunk + 1) * per_chunk, first + BLOCK_BYTES)
            yield first, end, self.read_flags(lane, first, end)
            first = end

    def count_values(self, upto: Ints, before: Ints | None = None) -> Ints:
        """Return, for each lane, how many rows from ``before[lane]`` to ``upto[lane]`` have values of episode fields.

        Lost values are added. Flags that cannot be read count as 0. If ``before`` is None, the rows of each lane count
        from row 0 on.
        """
        before = np.zeros_like(upto) if before is None else before
        found = np.zeros(self.lanes, np.int64)
        if not self.plan.episode_arrays:
            return found
        for lane in np.flatnonzero(before < upto).tolist():
            for _, _, flags in self.flag_parts(lane, int(before[lane]), int(upto[lane])):
                found[lane] += np.count_nonzero(flags & EPISODE_VALUES)
        return found + self.lost_values(before, upto)

    def lost_values(self, before: Ints, upto: Ints) -> Ints:
        """Return, for each lane, the number of lost values of episode fields in rows ``[before[lane], upto[lane])``."""
        found = np.zeros(self.lanes, np.int64)
        for (position, _), count in zip(self.attributes.lost, self.attributes.lost_values, strict=True):
            row, lane = divmod(position, self.lanes)
            if before[lane] <= row < upto[lane]:
                found[lane] += count
        return found


def read_attributes(files: Files, folder: str, plan: Plan) -> Attributes | None:
    """Return the attributes of a segment, or None after a problem was reported."""
    given = read_group(files, folder)
    if given is None:
        return None
    try:
        plan = plan.of(given["chunk_rows"])
        found = _parse_attributes(given, plan, _is_in_place(files, folder, given))
        # A pack is complete before it is moved to its place, so a copy of a pack is complete, too.
        return (
            found if found.packed or _is_whole_copy(files, folder, plan, found, given["inode"]) else _as_unsealed(found)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        files.report("metadata", f"{folder}/{layout.METADATA}", f"unusable attributes: {text[:120]}")
        return None


def _parse_attributes(given: Any, plan: Plan, in_place: bool) -> Attributes:
    packed, compressed = _parse_packed(given), _parse_compressed(given, plan)
    requires = [*([] if packed is None else [layout.PACKS]), *([layout.ZSTD] if compressed else [])]
    if given.get("requires", []) != requires:
        raise ValueError(f"requires is {given.get('requires')!r:.60} and not {requires}")
    if given["store"] != plan.store:
        raise ValueError(f"belongs to another store, {given['store']!r:.40}")
    lanes, chunk_rows, sealed = given["lanes"], given["chunk_rows"], given["sealed"]
    _need(given, {"lanes": _are_whole(lanes, most=layout.MAX_LANES - 1) and 1 <= len(set(lanes)) <= layout.MAX_LANES})
    if len(set(lanes)) < len(lanes):
        raise ValueError("lists a lane twice")
    _check_chunk_rows(plan, len(lanes), chunk_rows, compressed)
    most_rows = layout.POSITION_MASK // len(lanes)
    _need(given, _are_common(given, len(lanes), most_rows))
    if packed is not None:
        _need(given, {"lanes": lanes == [0], "sealed": sealed, "claimed": not given.get("claimed")})
    _need(given, {"compressed": packed is not None or not compressed})
    if sealed:
        _need(given, _are_of_sealed(given, len(lanes) if plan.episode_arrays else 0, most_rows))
    times = given["times"] if sealed else None
    return Attributes(
        lanes=len(lanes),
        chunk_rows={path: chunk_rows[path] for path in plan.arrays},
        in_place=in_place,
        writer=given["writer"],
        claimed=tuple(given.get("claimed", ())),
        unproven_steps=given.get("unproven_steps", 0),
        sealed=sealed,
        steps=given["steps"] if sealed else 0,
        times=None if times is None else tuple(times),
        episodes=given.get("episodes") if sealed else None,
        checksums=given["checksums"] if sealed else {},
        values=tuple(given.get("values", ())) if sealed else (),
        lost=_parse_lost(given, len(lanes)),
        lost_values=tuple(given.get("lost_values", ())),
        steps_lost=given.get("steps_lost", 0),
        packed=packed,
        compressed=compressed,
    )


def _need(given: Any, good: Mapping[str, bool]) -> None:
    for name, is_good in good.items():
        if not is_good:
            raise ValueError(f"{name} is {given.get(name)!r:.60}, which is not possible")


def _are_common(given: Any, lanes: int, most_rows: int) -> dict[str, bool]:
    """Return {name of an attribute that every segment has: whether its value is possible}."""
    claimed = given.get("claimed", [])
    wall = given["clock"]["wall"]  # the time when the rows' clock was 0, in ns since 1970
    return {
        "uuid": is_uuid(given["uuid"]),
        "sealed": isinstance(given["sealed"], bool),
        "writer": is_whole(given["writer"], most=layout.MAX_SEGMENTS - 1),
        "inode": is_whole(given["inode"]),
        **{name: isinstance(given[name], str) for name in ("machine_id", "boot_id", "created")},
        "volume": _are_whole(given["volume"], 3),
        "clock": is_whole(wall, -_MOST_NS, _MOST_NS),
        "claimed": _are_whole(claimed, most=most_rows) and len(claimed) in (0, lanes),
        "unproven_steps": is_whole(given.get("unproven_steps", 0)),
        "unproven_time": is_whole(given.get("unproven_time", 0), 0, _MOST_NS),
    }


def _are_of_sealed(given: Any, lanes_with_values: int, most_rows: int) -> dict[str, bool]:
    checksums, times = given["checksums"], given["times"]
    are_sums = isinstance(checksums, dict) and _are_whole(list(checksums.values()), most=(1 << 32) - 1)
    return {
        "checksums": are_sums,
        "steps": is_whole(given["steps"]),
        "values": _are_whole(given.get("values", []), lanes_with_values, most_rows),
        "episodes": given.get("episodes") is None or is_whole(given["episodes"]),
        "sealed_at": is_positive(given.get("sealed_at", 1)),
        "sealed_clock": _is_boot_time(given.get("sealed_clock")),
        "times": times is None or (_are_whole(times, 2) and times[0] <= times[1] <= _MOST_NS),
    }


def _check_chunk_rows(plan: Plan, lanes: int, chunk_rows: Any, compressed: Mapping[str, Compressed]) -> None:
    for path, array in plan.arrays.items():
        rows = chunk_rows[path]
        if not is_whole(rows, 1) or rows & (rows - 1):
            raise ValueError(f"chunks of {path} have {rows!r:.40} rows, not a power of two")
        if path in compressed:
            how, index = compressed[path], 16 * (rows // compressed[path].rows)
            inner = how.rows * array.row_bytes
            is_large = index > layout.MAX_INDEX_BYTES or inner > max(layout.MAX_INNER_BYTES, array.row_bytes)
            if rows % how.rows or how.nbytes < index + 4 or is_large:
                raise ValueError(f"the attribute compressed has {how} for {path}, whose chunk has {rows} rows")
        elif rows > 1 and rows * lanes * array.row_bytes > 2 * layout.MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {path} are too large")


def _parse_packed(given: Any) -> tuple[int, int] | None:
    """Return how many segments and how many lanes were merged into a pack; None: it is not a pack."""
    packed = given.get("packed")
    if packed is None:
        return None
    members, runs = packed["members"], packed["runs"]
    if not (is_whole(runs) and is_whole(members, 1, min(runs, layout.MAX_SEGMENTS))):
        raise ValueError(f"packed is {packed!r:.60}, which is not possible")
    return members, runs


def _parse_compressed(given: Any, plan: Plan) -> dict[str, Compressed]:
    found = {path: Compressed(**how) for path, how in given.get("compressed", {}).items()}
    if found.keys() - plan.arrays.keys() or found.keys() & {layout.DONE, layout.TIME, layout.PRIORITY}:
        raise ValueError(f"the attribute compressed lists {sorted(found)!r:.60}, which cannot all be compressed")
    for path, how in found.items():
        good = is_whole(how.rows, 1) and not how.rows & (how.rows - 1) and is_whole(how.nbytes)
        if not good or not is_whole(how.level, *layout.ZSTD_LEVELS):
            raise ValueError(f"the attribute compressed has {how!r:.60} for {path}, which is not possible")
    return found


def _are_whole(value: Any, count: int | None = None, most: float = math.inf) -> bool:
    return isinstance(value, list) and count in (None, len(value)) and all(is_whole(item, most=most) for item in value)


def _parse_lost(given: Any, lanes: int) -> tuple[tuple[int, int], ...]:
    """Return (position of the first row, number of rows) of each range of lost rows."""
    ranges, steps = given.get("lost", []), given.get("steps_lost", 0)
    if not isinstance(ranges, list) or not all(_are_whole(entry, 2) and entry[1] for entry in ranges):
        raise ValueError("the attribute lost is not a list of positions and numbers of rows")
    if any(before[0] >= after[0] for before, after in pairwise(ranges)):
        raise ValueError("the attribute lost is not in order")
    free: dict[int, int] = {}  # {lane: the row after its last range so far}
    for position, rows in ranges:
        row, lane = divmod(position, lanes)
        if (row + rows) * lanes > layout.POSITION_MASK:
            raise ValueError(f"the attribute lost has {rows} rows from position {position} on, too many for a lane")
        if row < free.get(lane, 0):
            raise ValueError(f"the attribute lost has row {row} of lane {lane} in two ranges")
        free[lane] = row + rows
    if not is_whole(steps) or steps > sum(rows for _, rows in ranges) or (given["sealed"] and steps > given["steps"]):
        raise ValueError(f"steps_lost is {steps!r:.40}, which does not fit the lost rows")
    values = given.get("lost_values", [])
    if not _are_whole(values, len(ranges)) or any(n > rows for n, (_, rows) in zip(values, ranges, strict=True)):
        raise ValueError(f"lost_values is {values!r:.60}, which does not fit the lost rows")
    return tuple((position, rows) for position, rows in ranges)


def _is_boot_time(value: Any) -> bool:
    """Whether a value is None, or [id of a machine, id of its boot, seconds since the boot]."""
    if not isinstance(value, list) or len(value) != 3:
        return value is None
    return isinstance(value[0], str) and isinstance(value[1], str) and (value[2] == 0 or is_positive(value[2]))


def was_lost(files: Files, folder: str) -> bool:
    """Whether the machine went down before a segment's zarr.json was durable; such a segment has no mark."""
    scratch = files.quiet()
    if not scratch.is_folder(folder) or has_marks(scratch, folder):
        return False
    data = _contents(scratch, f"{folder}/{layout.METADATA}")
    if scratch.problems:
        return False  # `read_attributes` reports this problem
    return not data or any(not data[at : at + _SECTOR].strip(b"\0") for at in range(0, len(data), _SECTOR))


def has_marks(files: Files, folder: str) -> bool:
    """Whether a segment has a durable row: its log of marks or its counter ``durable`` is not all zeros."""
    return any(_contents(files, f"{folder}/{name}").strip(b"\0") for name in (layout.MARKS, f"{layout.DURABLE}/c.0"))


def _is_whole_copy(files: Files, folder: str, plan: Plan, found: Attributes, inode: int) -> bool:
    """Return False for a copy of a sealed segment if some files were copied before the segment was sealed."""
    if not found.sealed or inode == _inode(files, folder):
        return True
    writable, missing = False, False
    for name, crc in found.checksums.items():
        if name.rpartition("/")[0] not in plan.arrays or name.endswith(layout.METADATA):
            continue
        try:
            mode = os.lstat(files.path(f"{folder}/{name}")).st_mode
            if stat.S_ISREG(mode) and mode & 0o222:
                writable = True
                missing |= _checksum(files, f"{folder}/{name}") != crc
        except OSError:
            missing = True
    counter = f"{layout.COMMITTED}/c.0"
    missing |= writable and _checksum(files, f"{folder}/{counter}") != found.checksums.get(counter)
    log = files.path(f"{folder}/{layout.MARKS}")
    return not missing or not (writable or (os.path.lexists(log) and os.lstat(log).st_size))


def _as_unsealed(found: Attributes) -> Attributes:
    found = replace(found, sealed=False, was_sealed=True, in_place=False, claimed=(), unproven_steps=0)
    return replace(found, steps=0, checksums={}, times=None, values=(), episodes=None)


def _checksum(files: Files, where: str) -> int | None:
    with files.quiet().opened(where) as fd:
        return None if fd is None else checksum(fd)
    return None


def _is_in_place(files: Files, folder: str, attributes: dict[str, Any]) -> bool:
    """Whether a segment was written since the machine booted and is not a copy.

    The counters of such a segment are trusted without marks.
    """
    volume = attributes.get("volume")
    if not boot_id() or attributes.get("boot_id") != boot_id() or not isinstance(volume, list) or len(volume) != 3:
        return False
    try:
        here = volume_of(files.path(folder))
    except OSError:
        return False
    return attributes.get("inode") == _inode(files, folder) and here.may_be(Volume(*volume))


def _contents(files: Files, where: str) -> bytes:
    if not os.path.lexists(files.path(where)):
        return b""
    return files.read(where, MAX_DOCUMENT_BYTES) or b""


def read_counters(files: Files, folder: str, attributes: Attributes) -> NDArray[np.int64] | None:
    """Return the number of committed rows of each lane, or None after a problem was reported."""
    lanes, before = attributes.lanes, len(files.problems)
    values: dict[str, NDArray[np.int64]] = {}
    if not all([files.is_folder(f"{folder}/{name}") for name in layout.LANE_COUNTERS]):
        return None
    # A writer increases `committed` before the other counters. `committed` is read last, so that `durable` is at most
    # `committed`, and `observed` is at most one more.
    for name in (layout.DURABLE, layout.OBSERVED, layout.COMMITTED):
        data = files.read(f"{folder}/{name}/c.0", 8 * lanes, 8 * lanes)
        if data is None:
            return None
        values[name] = np.frombuffer(data, "<i8")
        crc = crc32c(data)
        if attributes.checksums.get(f"{name}/c.0", crc) != crc:
            files.report("checksum", f"{folder}/{name}/c.0", "does not match its checksum from sealing")
    if len(files.problems) > before:
        return None
    if not attributes.sealed and not attributes.in_place:
        return values[layout.COMMITTED]  # the counters are not compared: only marks prove this segment's rows
    wrong = _wrong_counters(values, attributes.sealed)
    for name, detail in wrong.items():
        files.report("counters", f"{folder}/{name}/c.0", detail)
    return None if wrong else values[layout.COMMITTED]


def _wrong_counters(values: Mapping[str, NDArray[np.int64]], sealed: bool) -> dict[str, str]:
    committed, observed, durable = (values[name] for name in (layout.COMMITTED, layout.OBSERVED, layout.DURABLE))
    most = layout.POSITION_MASK // len(committed)
    wrong: dict[str, str] = {}
    for name, value in values.items():
        if (value < 0).any() or (value > most).any():
            wrong[name] = "a lane has an impossible number of rows"
    if not wrong:
        if (observed > committed + 1).any() or (sealed and (observed > committed).any()):
            wrong[layout.OBSERVED] = "a lane has more observations than its rows allow"
        if (durable > committed).any() or (sealed and (durable != committed).any()):
            wrong[layout.DURABLE] = "a lane has a number of rows that differs from its committed rows"
    return wrong


def _inode(files: Files, folder: str) -> int:
    try:
        return os.stat(files.path(f"{folder}/{layout.COMMITTED}/c.0")).st_ino
    except OSError:
        return -1
