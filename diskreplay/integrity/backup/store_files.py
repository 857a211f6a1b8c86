"""Copies the files of a store outside its segments: metadata, evictions, limiters, saved states, quarantine."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diskreplay.folders import is_folder
from diskreplay.integrity.backup.copying import (
    Account,
    copy_noted,
    files_below,
    make_folder,
    make_free_lock,
    remove_others,
)
from diskreplay.segments.documents import layout, state_files
from diskreplay.segments.documents.metadata import Identity, identify, read_document
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.copies import FileCopier
from diskreplay.segments.files.durable import sync_folder, write_atomic
from diskreplay.segments.segment import DRAFT

# Temporary files in the folder of the counters have these prefixes. Living processes may be using the files.
_TEMPORARY = ("old-", "new-", DRAFT, state_files.DRAFT)
# The files in these folders are changed in place.
_CHANGING = (layout.LIMITERS, layout.EVICTIONS)


class StoreFiles:
    def __init__(self, root: Root, target: Path, copier: FileCopier, account: Account) -> None:
        self._root, self._source, self._target = root, root.folder, target
        self._copier, self._account = copier, account
        self._copied: dict[str, Identity] = {}

    def copy_ahead(self) -> None:
        """Copy, without a lock, the files that are never changed in place, such as saved states."""
        self._copy([top for top in self._tops() if top not in _CHANGING])

    def copy(self) -> None:
        """Copy the current files, and delete copies of files that are gone; the caller holds the store lock.

        Files that `copy_ahead` copied are copied again only if they changed. The caller writes the counters.
        """
        self._account.begin("")
        known = self._copy(self._tops())
        write_root_document(self._root, self._target)
        known |= {layout.METADATA, f"{layout.COUNTERS}/c.0", f"{layout.COUNTERS}/{layout.LOCK}"}
        remove_others(self._target, known, lambda folder: _is_segment(folder.relative_to(self._target)))

    def _tops(self) -> list[str]:
        names = sorted(os.listdir(self._source))
        return [name for name in names if name != layout.METADATA and not name.startswith(".")]

    def _copy(self, tops: list[str]) -> set[str]:
        known = set()
        for name in tops:
            for path in self._files(name):
                known.add(path)
                self._bring(path)
        return known

    def _files(self, top: str) -> Iterator[str]:
        if not is_folder(self._source / top):
            yield top
            return
        for folder, names in files_below(self._source / top, self._is_left_out):
            inside = folder.relative_to(self._source)
            with suppress(FileNotFoundError):  # the folder or its parent is gone
                make_folder(self._target / inside, folder)
                yield from (path for name in names if not _is_made_anew(path := f"{inside}/{name}"))

    def _is_left_out(self, folder: Path) -> bool:
        inside = folder.relative_to(self._source)
        first, second = (*inside.parts, "")[:2]
        return _is_segment(inside) or (first == layout.COUNTERS and second.startswith((".", *_TEMPORARY)))

    def _bring(self, path: str) -> None:
        source, target = self._source / path, self._target / path
        parts = path.split("/")
        if parts[0] == layout.LIMITERS and parts[-1] == layout.LOCK:
            make_free_lock(target, source)
            return
        now = identify(source)
        if parts[0] not in _CHANGING and self._copied.get(path) == now:
            return
        stays = parts[0] == layout.SAMPLERS or path.startswith(f"{layout.COUNTERS}/quarantine/")
        copy_noted(source, target, "", path, self._copier, self._account, may_clone=stays)
        self._copied[path] = now


def write_root_document(root: Root, folder: Path) -> None:
    """Copy the store's zarr.json, with the uuid of the store, into a backup durably."""
    path, data = folder / layout.METADATA, read_document(root.folder / layout.METADATA)
    if not path.exists() or read_document(path) != data:
        write_atomic(path, data, synced=True)
        sync_folder(folder)


def _is_segment(folder: Path) -> bool:
    return len(folder.parts) == 2 and folder.parts[0] == layout.SEGMENTS and folder.name.isdecimal()


def _is_made_anew(path: str) -> bool:
    """Whether the backup leaves out a file.

    The backup makes its own counters and lock. Hidden temporary files are not copied. A file or a link in the place of
    a segment is not copied.
    """
    folder, _, name = path.rpartition("/")
    if (folder == layout.COUNTERS and name in ("c.0", layout.LOCK)) or _is_segment(Path(path)):
        return True
    return name.startswith(".") and not path.startswith(f"{layout.COUNTERS}/quarantine/")
