"""Copies sealed and live (unsealed) segments into a backup."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.ids import Ints
from diskreplay.integrity.backup.copying import (
    Account,
    SegmentVanished,
    files_below,
    make_folder,
    make_free_lock,
    noted,
    remove_others,
)
from diskreplay.segments.blocks import read_sums, sealed_chunks
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import RowArray, identify, read_document
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.copies import WRITE_BITS, FileCopier, copy_ranges
from diskreplay.segments.files.durable import descriptor, write_file
from diskreplay.segments.files.machine import volume_of
from diskreplay.segments.files.mapping import opened
from diskreplay.segments.marks import map_trusted, new_rows_crc, read_marks
from diskreplay.segments.segment import SegmentInfo, counter_inode
from diskreplay.segments.segment_reader import Extent, extent_of

_LOCK = f"{layout.COMMITTED}/{layout.LOCK}"


def copy_sealed(info: SegmentInfo, target: Path, copier: FileCopier, account: Account) -> None:
    """Copy a sealed segment to the folder ``target``, which may hold some files already.

    A file in ``target`` is kept if it matches its checksum. Every other file is copied, and a copy that does not match
    its checksum is reported as a problem. Raises SegmentVanished if the segment is gone or was replaced.
    """
    where = layout.segment_folder(info.number)
    account.begin(where)
    try:
        document = read_document(info.path / layout.METADATA)
        names = _make_folders(info.path, target)
        copy = _Copy(info, target, where, copier, account)
        for name in sorted(names - {layout.METADATA}):
            copy.bring(name)
    except FileNotFoundError:
        if is_folder(info.path):
            raise
        raise SegmentVanished(where) from None
    if identify(info.path / layout.METADATA) != info.document:
        raise SegmentVanished(where)
    for name in sorted(info.checksums.keys() - names):
        account.note(where, "missing", name, "is missing")
    write_file(str(target / layout.METADATA), document)


def _make_folders(source: Path, target: Path) -> set[str]:
    names: set[str] = set()
    was_begun = is_folder(target)
    for folder, files in files_below(source):
        inside = folder.relative_to(source)
        make_folder(target / inside, folder)
        names |= {os.path.normpath(inside / name) for name in files}
    if was_begun:
        remove_others(target, names)
    return names


class _Copy:
    def __init__(self, info: SegmentInfo, target: Path, where: str, copier: FileCopier, account: Account) -> None:
        self._info, self._target, self._where = info, target, where
        self._copier, self._account = copier, account
        self._chunks = {chunk.name: chunk for chunk in sealed_chunks(info)}
        # `repair --salvage` changes files of a segment with unproven rows, so a backup must not link to these files.
        self._stays = info.claimed is None

    def bring(self, name: str) -> None:
        source, target = self._info.path / name, self._target / name
        if name == _LOCK:
            make_free_lock(target, source)
            return
        with noted(self._where, name, self._account):
            try:
                nbytes = os.lstat(source).st_blocks * 512
                if name in self._info.checksums and os.path.lexists(target) and self._matches(name):
                    self._account.kept += nbytes
                else:
                    self._copy(name)
            except FileNotFoundError:
                if not is_folder(self._info.path):
                    raise
                self._account.note(self._where, "missing", name, "is missing")
                return
            self._account.advance(nbytes)

    def _copy(self, name: str) -> None:
        target = str(self._target / name)
        is_chunk = name in self._chunks
        self._copier.copy(str(self._info.path / name), target, may_clone=is_chunk, may_link=is_chunk and self._stays)
        if is_chunk and (mode := os.stat(target).st_mode) & WRITE_BITS:
            # Readers check a chunk's bytes only if the chunk's file is writable. The copy is checked here, and becomes
            # read-only.
            os.chmod(target, mode & 0o7777 & ~WRITE_BITS)
        if name in self._info.checksums and not self._matches(name):
            self._account.note(self._where, "checksum", name, "does not match its checksum; copied as it is")

    def _matches(self, name: str) -> bool:
        chunk = self._chunks.get(name)
        try:
            with opened(str(self._target / name), None) as fd:
                crc = read_sums(fd, os.fstat(fd).st_size, layout.BLOCK_BYTES if chunk is None else chunk.block)[1]
        except (OSError, FormatError):
            return False
        return crc == self._info.checksums[name]


# --- live segments ----------------------------------------------------------------------------------------------------


class LiveRows(NamedTuple):
    """A live segment, and each lane's numbers of rows and of observations at one moment."""

    info: SegmentInfo
    committed: Ints
    observed: Ints


def read_live(info: SegmentInfo) -> LiveRows:
    """Return the rows that a live segment has now; the caller has checked that `shows_live_rows` is True.

    Raises FileNotFoundError if the segment was evicted, and FormatError if a counter is damaged.
    """
    shown, committed = map_trusted(info)
    # `observed` is read first: if it is one more than `committed`, the observation after the committed rows exists.
    # If it is greater, a counter is damaged.
    observed = shown.copy()
    committed = committed.copy()
    if (committed < 0).any() or (observed > committed + 1).any():
        raise FormatError(f"{info.path}: the counter committed or observed is damaged; restore the segment")
    return LiveRows(info, committed, np.maximum(observed, committed))


def copy_live(live: LiveRows, root: Root, account: Account) -> SegmentInfo:
    """Copy the committed rows of a segment into another store, and return the unsealed copy.

    `seal_segments` can seal this copy like the segment of a dead writer. Rows that do not match the marks of the
    original are reported as a problem. Raises SegmentVanished if the segment is gone. Raises FormatError or
    FileNotFoundError if files of the segment are damaged or missing.
    """
    info, where = live.info, layout.segment_folder(live.info.number)
    account.begin(where)
    path = root.segment_path(info.number)
    if is_folder(path):
        shutil.rmtree(path)
    try:
        make_folder(path, info.path)
        extent = extent_of(info, live.committed)
        for name, document in info.documents():
            make_folder(path / name, info.path / name)
            if array := info.arrays.get(name):
                _copy_array(live, array, extent, str(path), account)
                continue
            write_file(f"{path}/{name}/{layout.METADATA}", document)
            if name in info.blueprint.counters:
                rows = {layout.COMMITTED: live.committed, layout.OBSERVED: live.observed}.get(name)
                write_file(f"{path}/{name}/c.0", bytes(8 * len(info.lanes)) if rows is None else rows.tobytes())
        make_free_lock(path / layout.COMMITTED / layout.LOCK, info.path / layout.COMMITTED / layout.LOCK)
        marks = read_marks(str(info.path), len(info.lanes))
    except FileNotFoundError:
        if is_folder(info.path):
            raise
        raise SegmentVanished(where) from None
    copy = dataclasses.replace(info, root=root, path=path, inode=counter_inode(str(path)), volume=volume_of(str(path)))
    write_file(f"{path}/{layout.METADATA}", copy.own_document())
    before = Extent.begin(len(live.committed))
    for mark in marks:
        if (mark.rows > live.committed).any():
            break
        upto = extent_of(copy, mark.rows, before)
        if new_rows_crc(copy, before, upto) != mark.sums:
            account.note(where, "checksum", "", "rows do not match the mark that made them durable; copied as they are")
            break
        before = upto
    return copy


def _copy_array(live: LiveRows, array: RowArray, extent: Extent, folder: str, account: Account) -> None:
    info, leaf = live.info, array.path
    per_chunk, nbytes = info.chunk_rows[leaf], info.chunk_nbytes(leaf)
    rows = live.observed if leaf == "obs" or leaf.startswith("obs/") else extent.of(leaf)
    most = extent.values if array.is_of_episodes else live.observed
    chunks = max(1, -(-int(most.max()) // per_chunk))
    write_file(f"{folder}/{leaf}/{layout.METADATA}", info.rows_document(leaf, chunks * per_chunk))
    for chunk in range(chunks):
        target = f"{folder}/{leaf}/{array.chunk_key(chunk)}"
        write_file(target, nbytes=nbytes)
        inside = np.clip(rows - chunk * per_chunk, 0, per_chunk).tolist()
        ranges = layout.merge_ranges((lane * per_chunk, lane * per_chunk + count) for lane, count in enumerate(inside))
        if ranges:
            with opened(info.chunk_path(leaf, chunk), nbytes) as source, descriptor(target, os.O_WRONLY) as copy:
                copy_ranges(source, copy, [(start * array.row_bytes, stop * array.row_bytes) for start, stop in ranges])
            account.advance(os.stat(target).st_blocks * 512)
