"""Copies sealed segments: their files do not change any more, and each has a checksum."""

import os
from pathlib import Path

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.integrity.backup.account import Account
from diskreplay.integrity.backup.trees import (
    SegmentVanished,
    files_below,
    make_folder,
    make_free_lock,
    noted,
    remove_others,
)
from diskreplay.segments.blocks import read_sums, sealed_chunks
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import identify, read_document
from diskreplay.segments.files.copies import WRITE_BITS, FileCopier
from diskreplay.segments.files.durable import write_file
from diskreplay.segments.files.mapping import opened
from diskreplay.segments.segment import SegmentInfo

_LOCK = f"{layout.COMMITTED}/{layout.LOCK}"


def copy_sealed(info: SegmentInfo, target: Path, copier: FileCopier, account: Account) -> None:
    """Make a segment's folder at ``target``, of which some files may be there already.

    Every file that has a checksum is read where it is now. What is there and matches its checksum stays; what does not
    match is copied, and noted where it still does not. Raises SegmentVanished where the segment is gone or was
    replaced, otherwise the system's OSError of the target.
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
    """Make the folders of a segment, remove what does not belong in them, and return the paths of all files."""
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
        # Steps that no mark proves may be taken by `repair --salvage`, which seals the segment again in its place.
        self._stays = info.claimed is None

    def bring(self, name: str) -> None:
        """Bring a file into the copy, unless it is there."""
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
            # A copy whose chunks may be written is taken for one from before it was sealed, unless it is whole.
            os.chmod(target, mode & 0o7777 & ~WRITE_BITS)
        if name in self._info.checksums and not self._matches(name):
            self._account.note(self._where, "checksum", name, "does not match its checksum; copied as it is")

    def _matches(self, name: str) -> bool:
        """Whether a file of the copy matches its checksum."""
        chunk = self._chunks.get(name)
        try:
            with opened(str(self._target / name), None) as fd:
                crc = read_sums(fd, os.fstat(fd).st_size, layout.BLOCK_BYTES if chunk is None else chunk.block)[1]
        except (OSError, FormatError):
            return False
        return crc == self._info.checksums[name]
