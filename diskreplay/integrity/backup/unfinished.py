"""The hidden folder in which a backup is made, until it is complete and appears at its path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diskreplay.errors import FormatError, StoreExists, StoreLocked
from diskreplay.folders import hidden_beside, is_folder
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.metadata import read_document, read_verified
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import storage_errors, sync_folder, write_atomic
from diskreplay.segments.files.locks import try_lock


def unfinished_path(to: Path) -> Path:
    """Return where the backup that is to appear at a path is made."""
    return hidden_beside(to, ".backup")


@contextmanager
def unfinished(root: Root, to: Path) -> Iterator[Path]:
    """Have the folder of a backup that is being made for a block, locked; what an earlier one left is in it.

    It appears at ``to`` when the block ends well, and stays where it is otherwise. Raises StoreExists where there is
    something at ``to``, or something else in the place of the folder, StoreLocked where another process makes a backup
    there, StorageFull where there is no room, ValueError where ``to`` is inside the store.
    """
    folder = unfinished_path(to)
    _check(root, to, folder)
    above = [parent for parent in folder.parents if not parent.exists()]
    with storage_errors(folder, full_message(to)):
        (folder / layout.COUNTERS).mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder / layout.COUNTERS / layout.LOCK)
    if lock is None:
        raise StoreLocked(f"another process is making a backup in {folder}; wait for it, or choose another path")
    try:
        _check(root, to, folder)  # the process that had the lock may have completed it
        write_root_document(root, folder)
        yield folder
        try:
            os.rename(folder, to)
        except OSError as error:
            if os.path.lexists(to):
                raise _exists(to) from error
            raise
        for made in [to, *above]:
            sync_folder(made.parent)
    finally:
        lock.release()


def write_root_document(root: Root, folder: Path) -> None:
    """Write the root's document into a copy as it is now, durably: by it an unfinished backup is known again."""
    path, data = folder / layout.METADATA, read_document(root.folder / layout.METADATA)
    if not path.exists() or read_document(path) != data:
        write_atomic(path, data, synced=True)
        sync_folder(folder)


def full_message(to: Path) -> str:
    """Return what StorageFull says."""
    return (
        f"no space for the backup at {to}; free some and make the backup again, which goes on where it was, or delete "
        f"{unfinished_path(to)}"
    )


def _exists(to: Path) -> StoreExists:
    return StoreExists(f"{to} exists already; give the path of a new store")


def _check(root: Root, to: Path, folder: Path) -> None:
    """Check that a backup may be made in this folder and appear at this path."""
    if os.path.lexists(to):
        raise _exists(to)
    if root.path.resolve() in to.resolve().parents:
        raise ValueError(f"{to} is inside the store {root.path}; give a path outside of it")
    if not os.path.lexists(folder):
        return
    refused = "; delete it, or choose another path"
    if not is_folder(folder):
        raise StoreExists(f"{folder} is in the way of the backup{refused}")
    try:
        found = read_verified(folder / layout.METADATA).get("uuid")
    except (OSError, FormatError):
        if all(name == layout.COUNTERS or name.startswith(".") for name in os.listdir(folder)):
            return  # it was just begun
        raise StoreExists(f"{folder} is not an unfinished backup of {root.path}{refused}") from None
    if found != root.uuid:
        raise StoreExists(f"{folder} is an unfinished backup of another store ({found}){refused}")
