"""Notes: JSON documents that a store keeps for its users, each under a name and replaced as a whole.

They lie beside the counters, where no zarr reader looks: `counters/notes/<name>.json`.
"""

import os
from typing import Any

from diskreplay.errors import FormatError
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import is_name
from diskreplay.segments.documents.metadata import MAX_BYTES, read_verified, seal_document
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.durable import storage_errors, sync_folder, write_atomic

_NOTE = "note"


def write_note(root: Root, name: str, value: Any) -> None:
    """Save a JSON value under a name; a reader meanwhile, or after a crash, gets the old one or this one, whole.

    It is durable when this returns. Raises ValueError where the name is invalid or the value is not JSON, StorageFull
    where there is no room, with the old note untouched, StoreNotFound where the store was deleted or replaced since it
    was opened.
    """
    if not is_name(name):
        raise ValueError(
            f"a name is 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or digit, and not "
            f"{layout.METADATA}; this one is {name!r}"
        )
    try:
        data = seal_document({}, {_NOTE: value})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the note {name!r} is not JSON: {error}") from None
    if len(data) > MAX_BYTES:
        raise ValueError(f"the note {name!r} takes {len(data)} bytes, and a note has at most {MAX_BYTES}; use several")
    with root.still_there():
        folder = root.folder / layout.NOTES
        with storage_errors(folder):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                sync_folder(folder.parent)
        write_atomic(folder / _file(name), data, synced=True)
        sync_folder(folder)


def read_note(root: Root, name: str) -> Any:
    """Return the value that was saved last under a name; None where there is none.

    Raises FormatError where it is damaged.
    """
    if not is_name(name):
        return None
    path = root.folder / layout.NOTES / _file(name)
    try:
        return read_verified(path).get(_NOTE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FormatError as error:
        raise FormatError(f"{error}, or set it aside with `diskreplay repair`") from None


def note_names(root: Root) -> list[str]:
    """Return the names under which notes are saved, in order."""
    try:
        files = os.listdir(root.folder / layout.NOTES)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [file.removesuffix(layout.NOTE_SUFFIX) for file in files if file.endswith(layout.NOTE_SUFFIX)]
    return sorted(filter(is_name, names))


def _file(name: str) -> str:
    return name + layout.NOTE_SUFFIX
