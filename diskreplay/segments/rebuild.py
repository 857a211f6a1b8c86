"""Replaces a damaged segment by a rebuilt one: intact rows keep their positions, and steps keep their ids.

If the process dies during a replacement, the next holder of the store lock completes it. docs/format.md describes the
folders of each stage.
"""

import dataclasses
import errno
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.ids import NO_STEP, Ints
from diskreplay.segments.blocks import Chunk, Sums, known_sums, parse, sealed_chunks
from diskreplay.segments.damage.damage import Damage, Range, find_damage
from diskreplay.segments.damage.quarantine import Quarantined, forget, include_number, move_aside, read_quarantine
from diskreplay.segments.damage.unproven import rows_with_files
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.eviction_list import evicted_in
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import read_lane_counter
from diskreplay.segments.files.durable import drafted, move, sync_folder, sync_tree, write_file
from diskreplay.segments.files.mapping import data_ranges, opened, read_regular
from diskreplay.segments.files.times import repeat_times, time_bounds
from diskreplay.segments.marks import proven_rows
from diskreplay.segments.packs import InnerChunks, read_members, read_packs, read_tables
from diskreplay.segments.sealing import GroupWriter, count_steps_in
from diskreplay.segments.segment import DAMAGE, Lost, SegmentInfo, counter_inode, read_as_sealed, read_segment
from diskreplay.segments.shards import Compressed, zstd

# The maximum number of results that `_shown` caches.
_MOST_KNOWN = 1024


class Proof(NamedTuple):
    """The rows that checksums of blocks prove in a copied segment.

    ``sealed`` has the attributes of the sealed segment, ``rows`` the number of rows of each lane. ``marked`` has, for
    each lane, the number of rows that marks prove. These rows are intact, but an episode that continues after these
    rows may be lost.
    """

    sealed: SegmentInfo
    rows: Ints
    damage: Damage
    marked: Ints

    @property
    def steps_lost(self) -> int:
        """The number of steps that the copy lost, without those that the sealed segment had already lost."""
        return max(0, self.damage.steps_lost - self.sealed.lost.steps)


def prove_by_blocks(info: SegmentInfo) -> Proof | None:
    """Return the rows that checksums of blocks prove in a copied segment; None if marks prove at least as many steps.

    None is also returned if the segment is not a copy of a sealed segment. Every chunk is read. Raises FormatError or
    OSError if the attributes or counters are damaged.
    """
    if info.sealed or info.boot or (sealed := read_as_sealed(info)) is None:
        return None
    rows = read_lane_counter(f"{info.path}/{layout.COMMITTED}", len(info.lanes))
    if crc32c(rows.tobytes()) != sealed.checksums.get(f"{layout.COMMITTED}/c.0"):
        return None
    marked = proven_rows(info)
    damage = find_damage(sealed, rows, evicted_in(info.root, info.number), marked)
    if damage.steps_kept <= count_steps_in(info, marked):
        return None
    return Proof(sealed, rows, damage, marked)


# --- rows that readers show -------------------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """The rows that readers show of a copy: ``rows[lane]`` rows of each lane, except the rows in ``lost``."""

    rows: tuple[int, ...]
    lost: Lost


_known: dict[tuple[object, ...], _Shown | None] = {}


def read_shown(root: Root, number: int) -> SegmentInfo:
    """Return a segment's attributes as `read_segment` does, for callers that show rows and change nothing.

    If checksums of blocks prove more of a copy than marks do, `SegmentInfo.shown` has the number of shown rows of each
    lane. `SegmentInfo.lost` has the damaged episodes among the shown rows. Errors as for `read_segment`.
    """
    info = read_segment(root, number)
    if info.sealed or info.boot:
        return info
    try:
        shown = _shown(info)
    except (OSError, FormatError):
        return info  # the marks of the copy decide which rows are shown
    if shown is None:
        return info
    return replace(info, shown=shown.rows, lost=shown.lost)


def _shown(info: SegmentInfo) -> _Shown | None:
    """Return the rows that readers show of a copy; None if readers show the rows that marks prove.

    The result is cached until a file of the copy changes.
    """
    sealed = read_as_sealed(info)
    if sealed is None:
        return None
    files = (f"{info.path}/{name}" for name in (layout.METADATA, layout.MARKS, *sealed.checksums))
    key = len(evicted_in(info.root, info.number)), *map(_state, files)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        proof = prove_by_blocks(info)
        _known[key] = None if proof is None else _show(proof)
    return _known[key]


def _state(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _show(proof: Proof) -> _Shown | None:
    """Return the rows of a copied segment that readers show; None if marks prove at least as many steps.

    Damaged episodes are returned as lost, so that readers hide them. Readers also read the flags and times of hidden
    rows. So a lane's shown rows end before the first episode with damaged flags, damaged times or missing files. A
    damaged last episode of a lane is not shown either, because readers could take it for an open episode.
    """
    sealed, damage, lanes = proof.sealed, proof.damage, len(proof.rows)
    unreadable, most, rows = _unreadable(sealed, damage), rows_with_files(sealed), proof.rows.copy()
    ranges, steps = list(sealed.lost.ranges), sealed.lost.steps
    for lane, count in enumerate(proof.rows.tolist()):
        for first, stop in damage.more.get(lane, []):
            if stop > min(most, count - 1) or any(a < stop and first < b for a, b in unreadable.get(lane, [])):
                rows[lane] = first
                break
            found = list(_episodes(sealed, lane, first, stop))
            ranges += [(row * lanes + lane, length) for row, length in found]
            steps += sum(length for _, length in found)
        rows[lane] = min(rows[lane], most)
    ranges = sorted((position, length) for position, length in ranges if position // lanes < rows[position % lanes])
    # `Lost.values` counts only values whose rows lack the flag `EPISODE_VALUES`. The flags of a newly damaged episode
    # are intact, so the count is 0.
    values = {(position, rows): count for position, rows, count in sealed.lost.entries}
    steps = min(steps, sum(length for _, length in ranges))
    lost = Lost(tuple(ranges), steps, tuple(values.get(entry, 0) for entry in ranges))
    shown = replace(sealed, lost=lost)
    kept = count_steps_in(shown, rows) - lost.steps
    if kept <= count_steps_in(sealed, proof.marked) - sealed.lost.steps:
        return None
    return _Shown(tuple(rows.tolist()), lost)


def _unreadable(sealed: SegmentInfo, damage: Damage) -> dict[int, list[Range]]:
    found: dict[int, list[Range]] = {}
    for chunk in sealed_chunks(sealed):
        if chunk.array.path not in (layout.DONE, layout.TIME):
            continue
        per_chunk, row_bytes = sealed.chunk_rows[chunk.array.path], chunk.array.row_bytes
        for start, stop in damage.parts.get(chunk.name, []):
            for lane, inside, count in layout.split_range(start // row_bytes, -(-stop // row_bytes), per_chunk):
                row = chunk.number * per_chunk + inside
                found.setdefault(lane, []).append((row, row + count))
    return found


def _episodes(info: SegmentInfo, lane: int, first: int, stop: int) -> list[tuple[int, int]]:
    """Return (first row, number of steps) of each episode in rows ``first`` to ``stop`` of a lane.

    The flags of these rows must be intact.
    """
    parts = [
        info.map_numbers(layout.DONE, chunk)[lane, inside : inside + count]
        for chunk, inside, count in layout.split_range(first, stop, info.chunk_rows[layout.DONE])
    ]
    flags = np.concatenate(parts)
    starts = np.flatnonzero(flags & layout.FIRST)
    steps = np.add.reduceat(flags & NO_STEP == 0, starts, dtype=np.int64)
    has_steps = steps > 0  # a discarded part of an episode may have no step
    return list(zip((starts + first)[has_steps].tolist(), steps[has_steps].tolist(), strict=True))


# --- building ---------------------------------------------------------------------------------------------------------


_BUILDING, _REBUILT, _REPLACED = "new-", "rebuilt-", "replaced-"
_COPIED_AT_ONCE = 64 << 20
_MOST_BYTES = 2 * layout.MAX_TABLE_BYTES  # the maximum size of a small file; the copy of a pack's tables is the largest
# Errors that say that the kernel cannot copy between two files.
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)


def build_copy(info: SegmentInfo, damage: Damage) -> str:
    """Build a copy of a sealed segment without the damaged parts; return the copy's folder, relative to the store.

    The caller holds the store lock. The files of the damaged segment are not changed. Raises StorageFull if the disk
    has no room. Raises FormatError if a small file, such as a zarr.json, does not match its checksum, or if an intact
    block changed meanwhile. After an error, the folder of the copy is removed.
    """
    name = f"{_BUILDING}{layout.segment_name(info.number)}"
    folder = f"{info.root.counters_folder}/{name}"
    with drafted(folder):
        os.mkdir(folder)
        _Build(info, damage, folder).run()
        sync_tree(folder)
    return f"{layout.COUNTERS}/{name}"


class _Build:
    def __init__(self, info: SegmentInfo, damage: Damage, folder: str) -> None:
        self._info, self._damage, self._folder = info, damage, folder
        self._group = GroupWriter(folder)
        # The first row of each lane of a pack; row 0 for a segment that is no pack. `repeat_times` needs these rows,
        # because it replaces a damaged time by an earlier time of the same lane.
        self._begins = np.zeros(1, np.int64) if info.packed is None else read_tables(info).first_rows

    def run(self) -> None:
        info, lanes, paths = self._info, len(self._info.lanes), self._info.blueprint.paths
        for path in paths:
            os.mkdir(f"{self._folder}/{path}")
        chunks = list(sealed_chunks(info))
        made = {chunk.name for chunk in chunks} | {layout.BLOCKS, layout.INDEXES_COPY}
        for name in sorted(info.checksums.keys() - made):
            if name.rpartition("/")[0] in paths:
                self._copy_small(name)
        write_file(f"{self._folder}/{layout.COMMITTED}/{layout.LOCK}")
        rows = read_lane_counter(f"{self._folder}/{layout.COMMITTED}", lanes)
        known = known_sums(info)
        for chunk in chunks:
            if chunk.array.path in info.compressed:
                self._build_compressed(chunk)
                continue
            skipped = self._skipped(chunk)
            self._build_chunk(chunk, skipped, rows)
            self._check(chunk, known.get(chunk.name), skipped)
        lost = Lost.of(
            (
                (first * lanes + lane, stop - first, end - begin)
                for lane, some in self._damage.lost.items()
                for (first, stop), (begin, end) in zip(some, self._damage.lost_values[lane], strict=True)
            ),
            self._damage.steps_lost,
        )
        rebuilt = dataclasses.replace(
            info,
            path=Path(self._folder),
            inode=counter_inode(self._folder),
            lost=lost,
            times=time_bounds(self._folder, info.chunk_rows[layout.TIME], rows, lost, self._begins.tolist()),
        )
        self._group.finish(rebuilt, rows)

    def _build_chunk(self, chunk: Chunk, skipped: list[Range], rows: Ints) -> None:
        info, leaf = self._info, chunk.array.path
        with self._group.chunk(chunk.array, chunk.number) as fd:
            os.ftruncate(fd, chunk.nbytes)
            self._copy(chunk.name, fd, layout.subtract_ranges([(0, chunk.nbytes)], skipped))
            if leaf == layout.DONE:
                self._put_flags(fd, chunk.number)
            elif leaf == layout.TIME:
                least = 0 if info.times is None else info.times[0]
                repeat_times(self._folder, chunk.number, info.chunk_rows[leaf], rows, skipped, least, self._begins)

    def _build_compressed(self, chunk: Chunk) -> None:
        """Build the file of a compressed array.

        Inner chunks without lost rows are copied unchanged, and damaged inner chunks are left out. Intact inner chunks
        with lost rows are compressed again, with zeros in these rows.
        """
        leaf, row_bytes = chunk.array.path, chunk.array.row_bytes
        how, inner, lost = self._info.compressed[leaf], InnerChunks(self._info, leaf), self._damage.more.get(0, [])
        with self._group.shard(chunk.array, self._info.chunk_rows[leaf], how.rows, how.level) as shard:
            for number in range(inner.count):
                first, stop = number * how.rows, (number + 1) * how.rows
                if frame := inner.frame(number):
                    cleared = [(max(a, first) - first, min(b, stop) - first) for a, b in lost if a < stop and first < b]
                    shard.put(number, _without_rows(frame, cleared, how, row_bytes) if cleared else frame)

    def _copy_small(self, name: str) -> None:
        data = read_regular(f"{self._info.path}/{name}", None, _MOST_BYTES)
        if crc32c(data) != self._info.checksums[name]:
            raise FormatError(f"{self._info.path}/{name} does not fit its checksum")
        self._group.small(name, data)

    def _skipped(self, chunk: Chunk) -> list[Range]:
        row_bytes, per_chunk = chunk.array.row_bytes, self._info.chunk_rows[chunk.array.path]
        skipped, above = list(self._damage.parts.get(chunk.name, [])), chunk.number * per_chunk
        lost = self._damage.lost_values if chunk.array.is_of_episodes else self._damage.lost
        for lane, ranges in lost.items():
            for first, stop in ranges:
                low, high = max(first - above, 0), min(stop - above, per_chunk)
                if low < high:
                    at = lane * per_chunk
                    skipped.append(((at + low) * row_bytes, (at + high) * row_bytes))
        return layout.merge_ranges(skipped)

    def _copy(self, name: str, target: int, parts: list[Range]) -> None:
        try:
            opening = opened(f"{self._info.path}/{name}", None)
        except (OSError, FormatError):
            return  # the file is gone, so all its bytes are skipped
        with opening as source:
            size = os.fstat(source).st_size
            for start, stop in parts:
                for first, last in data_ranges(source, start, min(stop, size)):
                    _copy_range(source, target, first, last)

    def _put_flags(self, fd: int, chunk: int) -> None:
        per_chunk = self._info.chunk_rows[layout.DONE]
        for (lane, row), flags in self._damage.flags.items():
            if row // per_chunk == chunk:
                os.pwrite(fd, bytes([flags]), lane * per_chunk + row % per_chunk)

    def _check(self, chunk: Chunk, known: Sums | None, skipped: list[Range]) -> None:
        """Raise FormatError if a copied block without skipped bytes does not match its checksum in ``known``."""
        if known is None:
            return
        found, block = self._group.block_sums(chunk.array, chunk.number), chunk.block
        for at in (np.flatnonzero(parse(found, chunk.nbytes, block) != known) * block).tolist():
            if not any(first < at + block and at < stop for first, stop in skipped):
                raise FormatError(f"{self._info.path}/{chunk.name} changed while it was copied")


def _without_rows(frame: bytes, cleared: list[Range], how: Compressed, row_bytes: int) -> bytes:
    library = zstd()
    data = bytearray(library.ZstdDecompressor().decompress(frame, max_output_size=how.rows * row_bytes))
    for first, stop in cleared:
        data[first * row_bytes : stop * row_bytes] = bytes((stop - first) * row_bytes)
    again: bytes = library.ZstdCompressor(level=how.level).compress(bytes(data))
    return again


def _copy_range(source: int, target: int, first: int, stop: int) -> None:
    """Copy bytes to the same offset of another file; some file systems share the blocks instead of copying them."""
    while first < stop:
        count = min(stop - first, _COPIED_AT_ONCE)
        try:
            done = os.copy_file_range(source, target, count, first, first)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
            done = os.pwrite(target, os.pread(source, min(count, 1 << 20), first), first)
        if not done:
            raise FormatError("a chunk became shorter while it was copied")
        first += done


# --- replacing the damaged segment ------------------------------------------------------------------------------------


def put_in_place(root: Root, number: int, building: str, reason: str, steps: int) -> str | None:
    """Put a rebuilt segment in place of the damaged segment; return the new path of the damaged segment.

    ``building`` is the folder of the rebuilt segment, relative to the store. The damaged segment moves to quarantine,
    with ``reason`` and the number of lost steps, ``steps``, in its record. If the damaged segment was evicted
    meanwhile, the rebuilt segment moves to quarantine, and None is returned. The caller holds the store lock.
    """
    os.rename(root.folder / building, _side_folder(root, _REBUILT, number))
    sync_folder(root.counters_folder)
    return _replace(root, number, reason, steps)


def exchange(root: Root, entry: Quarantined, members: Sequence[int], reason: str) -> str | None:
    """Bring the segment ``entry`` back from quarantine, and quarantine the segment that has replaced it.

    Return the new path of the quarantined segment, or None if no segment has replaced ``entry``. All steps of the
    quarantined segment must also be in ``entry``. If ``entry`` is a pack, ``members`` are the numbers of its segments.
    The caller holds the store lock, and has verified ``entry``.
    """
    number = entry.segment or 0
    move(root.folder / entry.where, _side_folder(root, _REBUILT, number))
    forget(root.folder, entry)
    for one in (number, *members[:1]):
        include_number(root.counters(writable=True), one)
    return _replace(root, number, reason)


def rebuild_copy(info: SegmentInfo) -> bool:
    """Rebuild a copy of a sealed segment from its intact blocks; return False if `prove_by_blocks` returns None.

    The damaged copy goes to quarantine unchanged. The caller holds the lock of the store and the lock of the segment.
    Raises FormatError or OSError if small files, such as a zarr.json, are damaged or cannot be read. Raises StorageFull
    if the disk has no room.
    After an error, nothing is changed.
    """
    if (proof := prove_by_blocks(info)) is None:
        return False
    building = build_copy(proof.sealed, proof.damage)
    reason = "blocks do not fit their checksums; the others are in the rebuilt segment"
    put_in_place(info.root, info.number, building, reason, proof.steps_lost)
    return True


def finish_replacements(root: Root) -> list[int]:
    """Complete interrupted replacements of segments; return the numbers of these segments, if they still exist.

    The caller holds the store lock. A rebuilt segment moves to quarantine if the damaged segment was evicted or merged
    meanwhile.
    """
    found = _numbers(root, _REBUILT)
    for number in found:
        if _is_merged(root, number):
            _keep(root, number, "its segment was merged meanwhile")
        else:
            _replace(root, number)
    for number in (replaced := _numbers(root, _REPLACED)):
        _notify(root, number)
    return sorted(number for number in {*found, *replaced} if os.path.lexists(root.segment_path(number)))


def _replace(
    root: Root, number: int, reason: str = "was replaced by another version of it", steps: int = 0
) -> str | None:
    rebuilt, path = _side_folder(root, _REBUILT, number), root.segment_path(number)
    aside = None
    if os.path.lexists(path):
        aside = move_aside(root.folder, f"{layout.SEGMENTS}/{path.name}", reason, steps=steps, rebuilt=True)
    elif not _gave_way(root, number) or number < int(root.counters().read()[layout.FIRST_LIVE]):
        _keep(root, number, "its segment was evicted meanwhile")
        return None
    _side_folder(root, _REPLACED, number).mkdir(exist_ok=True)
    move(rebuilt, path)
    _notify(root, number)
    return aside


def _is_merged(root: Root, number: int) -> bool:
    """Return whether rows of the rebuilt segment ``number`` were merged into a pack other than this segment.

    If so, retention would delete the rebuilt segment as soon as it replaced the damaged segment.
    """
    with suppress(*DAMAGE):
        members = read_members(read_segment(root, number, _side_folder(root, _REBUILT, number)))[:, 0]
        return any(np.isin(members, tables.numbers).any() for info, tables in read_packs(root) if info.number != number)
    return False


def _gave_way(root: Root, number: int) -> bool:
    """Return whether the folder of a missing segment is in quarantine; a record without the folder does not count."""
    return any(entry.path == layout.segment_folder(number) for entry in read_quarantine(root.folder))


def _keep(root: Root, number: int, reason: str) -> None:
    """Quarantine a rebuilt segment that cannot replace the damaged segment; only retention may delete segments."""
    move_aside(root.folder, f"{layout.COUNTERS}/{_side_folder(root, _REBUILT, number).name}", reason, steps=0)


def _notify(root: Root, number: int) -> None:
    root.counters(writable=True).count(layout.CHANGES)
    with suppress(OSError):  # a folder with files stays, and a later call notifies readers again
        _side_folder(root, _REPLACED, number).rmdir()


def _side_folder(root: Root, beginning: str, number: int) -> Path:
    return root.counters_folder / f"{beginning}{layout.segment_name(number)}"


def _numbers(root: Root, beginning: str) -> list[int]:
    names = [name.removeprefix(beginning) for name in os.listdir(root.counters_folder) if name.startswith(beginning)]
    numbers = sorted(int(name) for name in names if re.fullmatch("[0-9]{8,9}", name))
    folders = {number: _side_folder(root, beginning, number) for number in numbers}
    return [number for number, folder in folders.items() if is_folder(folder)]
